// Several decode steps of the same R rows in one call. The tokens that a step draws are the input of the next step.

#pragma once

#include "cpu_forward.h"
#include "cpu_sampling.h"

struct Decode {
    int64_t *ids, *positions;      // [R], the arrays of `Step`, updated after each step
    int64_t* slots;                // [R], the array of `Step`, updated after each step
    int64_t* counters;             // [R], `position` of `Draw`: each row's position in its random stream, updated likewise
    const int32_t* stop_ids;       // [R, stops], token ids that finish a row
    const int32_t* asked;          // no further step starts once this is not 0; another thread may set it at any time
    int64_t* tokens;               // [R, steps], the token that each step has drawn
    float* logprobs;               // [R, steps], NaN if the row's largest score was not finite
    int64_t stops, steps;  // number of stop ids per row; maximum number of steps, at least 1
};

// Stores the tokens and log-probs of a step. Returns whether any row has drawn a stop id or has a NaN log-prob.
inline bool take(const Draw& d, const Decode& run, int64_t made) {
    bool ends = false;
    for (int64_t row = 0; row < d.rows; row++) {
        const int32_t* stop = run.stop_ids + row * run.stops;
        const double peak = d.peak[row];
        run.tokens[row * run.steps + made] = d.token[row];
        run.logprobs[row * run.steps + made] = static_cast<float>((d.score[row] - peak) - d.log_sum[row]);
        ends |= std::isnan(d.log_sum[row]) || std::find(stop, stop + run.stops, d.token[row]) != stop + run.stops;
    }
    return ends;
}

// Makes the drawn tokens the input of the next step.
inline void advance(const Step& s, const Draw& d, const Decode& run) {
    for (int64_t row = 0; row < d.rows; row++) {
        const int64_t position = ++run.positions[row];
        run.ids[row] = d.token[row];
        run.counters[row]++;
        run.slots[row] = s.tables[row * s.width + position / s.block_size] * s.block_size + position % s.block_size;
    }
}

// Returns the number of steps made. No further step starts after one in which `take` returns true.
template <typename T>
static int64_t decode(const Model& m, const Step& s, const Draw& d, const Decode& run) {
    const team::Crew crew(s.threads);
    Step now = s;  // `hidden`, if not null, is [steps, R, m.hidden]
    for (int64_t made = 0;; made++) {
        Forward<T>{m, now, crew}.run();
        draw<T>(d, crew);
        if (take(d, run, made) || made + 1 == run.steps || __atomic_load_n(run.asked, __ATOMIC_RELAXED)) return made + 1;
        advance(s, d, run);
        if (now.hidden) now.hidden = static_cast<T*>(now.hidden) + s.kept * m.hidden;
    }
}

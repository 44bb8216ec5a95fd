// Several decode steps of the same rows in one call: forward, draw, and the drawn tokens as the input of the next step.

#pragma once

#include "cpu_forward.h"
#include "cpu_sampling.h"

struct Decode {
    int64_t *ids, *positions;      // [R], those of the step
    int64_t* slots;                // [R], those of the step
    int64_t* counters;             // [R], those of the draw, in the rows' random streams
    const int32_t* stop_ids;       // [R, stops], tokens that end a row
    const int32_t* asked;          // not 0 when no further step is to be made: another thread may set it meanwhile
    int64_t* tokens;               // [R, steps], what each step has drawn
    float* logprobs;               // [R, steps], NaN where a row had no finite largest score
    int64_t stops, steps;  // steps: the most to make, at least 1
};

// Stores what a step has drawn; returns whether a row ends by it, or has failed.
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

// Returns the number of steps made. A step by which a row ends is the last.
template <typename T>
static int64_t decode(const Model& m, const Step& s, const Draw& d, const Decode& run) {
    const team::Crew crew(s.threads);
    Step now = s;  // its hidden states are [steps, R, m.hidden]
    for (int64_t made = 0;; made++) {
        Forward<T>{m, now, crew}.run();
        draw<T>(d, crew);
        if (take(d, run, made) || made + 1 == run.steps || __atomic_load_n(run.asked, __ATOMIC_RELAXED)) return made + 1;
        advance(s, d, run);
        if (now.hidden) now.hidden = static_cast<T*>(now.hidden) + s.kept * m.hidden;
    }
}

// One token per row, drawn from softmax(scores / temperature), with sums of integers: the likeliest token weighs 2^42.
//
// Integer sums are independent of order, so vectors and threads do not change the result (sampler.py does the same).

#pragma once

#include "cpu_lanes.h"
#include "cpu_team.h"

struct Draw {
    const void* scores;         // [R, V], `stride` elements from row to row
    const float* temperature;   // [R]
    const int64_t* key;         // [R], the row's random stream
    const int64_t* position;    // [R], counter in the stream
    const uint8_t* greedy;      // [R], 1: the largest score, lowest id on ties
    int64_t* token;             // [R]
    float* peak;                // [R], the largest score / temperature
    double* log_sum;            // [R], log of the summed exp(scores / temperature - peak); NaN where the peak is not finite
    float* score;               // [R], the token's score / temperature
    const uint8_t* keeping;     // [R], 1: the row returns what could be drawn; null: none does
    int32_t* kept;              // [R, V], room for those token ids; afterwards they stand row after row without gaps
    int64_t* kept_counts;       // [R], 0 in the other rows
    int64_t rows, vocabulary, stride;
};

typedef int64_t lvec __attribute__((vector_size(LANES * 8)));

constexpr float UNIT = 4398046511104.0f;
constexpr int64_t SUMMED = 128;  // tokens per running sum

// In [0, 1): splitmix64 at counter `position` (same bits as random_stream.py).
static inline double uniform(int64_t key, int64_t position) {
    uint64_t x = static_cast<uint64_t>(key) + static_cast<uint64_t>(position + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    return static_cast<double>(x >> 11) * 0x1p-53;
}

// exp(scores / temperature - peak) in units; 0 behind the first `count` lanes.
template <typename T>
static inline vec units(const T* scores, int64_t count, float temperature, float peak) {
    vec x = count == LANES ? load(scores) : load_first(scores, count);
    if (temperature != 1.0f) x = x / temperature;
    vec u = exponential(x - peak) * UNIT;
    for (int64_t i = count; i < LANES; i++) u[i] = 0;
    return u;
}

template <typename T>
static inline lvec weights(const T* scores, int64_t count, float temperature, float peak) {
    return __builtin_convertvector(units(scores, count, temperature, peak), lvec);
}

// Writes the ids of the `count` tokens from `id` on that have a weight to `out`; returns the end.
static inline int32_t* drawable(const float* units, int64_t count, int32_t id, int32_t* out) {
    int64_t i = 0;
#if WIDE
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + LANES <= count; i += LANES) {
        const __mmask16 mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(units + i), _mm512_set1_ps(1.0f), _CMP_GE_OQ);
        const __m512i ids = _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(lanes, _mm512_set1_epi32(id + i)));
        const int found = __builtin_popcount(mask);
        _mm512_mask_storeu_epi32(out, (1u << found) - 1, ids);
        out += found;
    }
#endif
    // Without a branch: what is filtered is scattered.
    for (; i < count; i++) {
        *out = static_cast<int32_t>(id + i);
        out += units[i] >= 1.0f;
    }
    return out;
}

// The sum of the weights of a block; with KEEPS also writes the ids of the tokens that have one to `out`, and moves it on.
template <bool KEEPS, typename T>
static inline int64_t weigh_block(
    const T* scores, int64_t begin, int64_t end, float temperature, float peak, int32_t*& out
) {
    float found[SUMMED];
    lvec total = lvec{};
    for (int64_t i = begin; i < end; i += LANES) {
        const vec u = units(scores + i, std::min<int64_t>(LANES, end - i), temperature, peak);
        total += __builtin_convertvector(u, lvec);
        if (KEEPS) store(found + (i - begin), u);
    }
    int64_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += total[i];
    if (KEEPS && sum) out = drawable(found, end - begin, static_cast<int32_t>(begin), out);
    return sum;
}

// The largest score and the first token that has it; NaN where there is one.
template <typename T>
static inline float peak_of(const T* scores, int64_t count, int64_t& where) {
    vec top = vec{} - INFINITY;
    ivec bad = ivec{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vec x = load(scores + i);
        bad |= x != x;
        top = x > top ? x : top;
    }
    float peak = largest(top);
    bool is_bad = false;
    for (int lane = 0; lane < LANES; lane++) is_bad |= bad[lane] != 0;
    for (; i < count; i++) {
        const float x = load_one(scores + i);
        is_bad |= x != x;
        peak = std::max(peak, x);
    }
    for (where = 0; where < count - 1 && load_one(scores + where) != peak; where++);
    return is_bad ? NAN : peak;
}

template <typename T>
static void draw_row(const Draw& d, int64_t row, int64_t* sums) {
    const T* scores = static_cast<const T*>(d.scores) + row * d.stride;
    const int64_t V = d.vocabulary;
    const float temperature = d.temperature[row];
    int64_t token;
    const float peak = peak_of(scores, V, token) / temperature;
    const bool keeps = d.keeping && d.keeping[row];
    if (d.keeping) d.kept_counts[row] = 0;
    if (!std::isfinite(peak)) {
        d.token[row] = token;
        d.peak[row] = peak;
        d.log_sum[row] = NAN;
        d.score[row] = peak;
        return;
    }
    int64_t total = 0;
    int32_t* out = d.kept + row * V;
    for (int64_t begin = 0; begin < V; begin += SUMMED) {
        const int64_t end = std::min(begin + SUMMED, V);
        total += keeps ? weigh_block<true>(scores, begin, end, temperature, peak, out)
                       : weigh_block<false>(scores, begin, end, temperature, peak, out);
        sums[begin / SUMMED] = total;
    }
    if (keeps) d.kept_counts[row] = out - (d.kept + row * V);
    if (!d.greedy[row]) {
        // The product rounds up to the total itself for the largest uniforms.
        const double part = uniform(d.key[row], d.position[row]);
        const int64_t level = std::min(static_cast<int64_t>(part * static_cast<double>(total)), total - 1);
        const int64_t block = std::upper_bound(sums, sums + (V + SUMMED - 1) / SUMMED, level) - sums;
        int64_t below = block ? sums[block - 1] : 0;
        token = block * SUMMED;
        for (int64_t i = token; i < std::min(token + SUMMED, V); i += LANES) {
            const int64_t count = std::min<int64_t>(LANES, V - i);
            const lvec w = weights(scores + i, count, temperature, peak);
            for (int64_t lane = 0; lane < count; lane++) {
                if (below <= level) token = i + lane;
                below += w[lane];
                if (below > level) break;
            }
            if (below > level) break;
        }
    }
    d.token[row] = token;
    d.peak[row] = peak;
    d.log_sum[row] = std::log(static_cast<double>(total) / UNIT);
    d.score[row] = load_one(scores + token) / temperature;
}

// Returns the number of kept ids.
template <typename T>
static int64_t draw(const Draw& d, int64_t threads) {
    const team::Crew crew(threads);
    crew.share(d.rows, [&](int64_t row) {
        draw_row<T>(d, row, team::scratch<int64_t>((d.vocabulary + SUMMED - 1) / SUMMED));
    });
    int64_t total = 0;
    for (int64_t row = 0; d.keeping && row < d.rows; total += d.kept_counts[row++])
        std::memmove(d.kept + total, d.kept + row * d.vocabulary, d.kept_counts[row] * sizeof(int32_t));
    return total;
}

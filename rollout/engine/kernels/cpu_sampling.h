// Draws one token per row from softmax(scores / temperature) with integer weights. The most likely token has weight 2^42.
//
// Integer sums do not depend on the order of addition, so vectors and threads do not change the result (as in sampler.py).

#pragma once

#include <utility>

#include "cpu_lanes.h"
#include "cpu_team.h"

struct Draw {
    const void* scores;         // R rows of V scores, one per token of the vocabulary; `stride` elements from row to row
    const float* temperature;   // [R]
    const int64_t* key;         // [R], key of the row's random stream
    const int64_t* position;    // [R], position of the draw in that stream
    const uint8_t* greedy;      // [R], 1: take the token with the largest score, and the lowest id on ties
    int64_t* token;             // [R]
    float* peak;                // [R], the largest score / temperature
    double* log_sum;            // [R], log of the sum of exp(scores / temperature - peak); NaN if the peak is not finite
    float* score;               // [R], the drawn token's score / temperature
    const uint8_t* keeping;     // [R], 1: the row returns the tokens that could be drawn; null: no row returns them
    int32_t* kept;              // [R, V], buffer for those token ids; on return they are stored row after row without gaps
    int64_t* kept_counts;       // [R], number of those token ids; 0 for the other rows
    int64_t rows, vocabulary, stride;
};

typedef int64_t lvec __attribute__((vector_size(LANES * 8)));

constexpr float UNIT = 4398046511104.0f;
constexpr int64_t SUMMED = 128;  // tokens per running sum

// Returns a number in [0, 1): splitmix64 with counter `position` (the same bits as `uniforms` in numerics.py).
static inline double uniform(int64_t key, int64_t position) {
    uint64_t x = static_cast<uint64_t>(key) + static_cast<uint64_t>(position + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    return static_cast<double>(x >> 11) * 0x1p-53;
}

// Returns scores / temperature - peak in the first `count` lanes, and -inf in the others.
template <typename T>
static inline vec below_peak(const T* scores, int64_t count, float temperature, float peak) {
    vec x;
    if (count == LANES) {
        x = load(scores);
    } else {
        x = load_first(scores, count);
        for (int64_t i = count; i < LANES; i++) x[i] = -INFINITY;
    }
    if (temperature != 1.0f) x = x / temperature;
    return x - peak;
}

static inline vec units(vec below_peak) { return exponential(below_peak) * UNIT; }

// Whether any lane may have a weight of at least 1, given that exp(-30) * UNIT is 0.4.
static inline bool any_drawable(vec below_peak) {
#if WIDE
    return _mm512_cmp_ps_mask((__m512)below_peak, _mm512_set1_ps(-30.0f), _CMP_GT_OQ);
#else
    // Tests the sign bits, because without vector instructions of this width a comparison is compiled lane by lane.
    const vec above = below_peak + 30.0f;
    uint64_t pairs[LANES / 2], unlikely = 0x8000000080000000ull;
    std::memcpy(pairs, &above, sizeof(pairs));
    for (int i = 0; i < LANES / 2; i++) unlikely &= pairs[i];
    return unlikely != 0x8000000080000000ull;
#endif
}

// Writes the token ids of the lanes with a weight of at least 1 to `out` and returns the new end. Lane 0 has token id `id`.
static inline int32_t* write_drawable(vec units, int32_t id, int32_t* out) {
#if WIDE
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 which = _mm512_cmp_ps_mask((__m512)units, _mm512_set1_ps(1.0f), _CMP_GE_OQ);
    const int found = __builtin_popcount(which);
    // Compresses in a register, because some processors need a hundred cycles to compress to memory.
    const __m512i ids = _mm512_maskz_compress_epi32(which, _mm512_add_epi32(lanes, _mm512_set1_epi32(id)));
    _mm512_mask_storeu_epi32(out, (1u << found) - 1, ids);
    return out + found;
#else
    for (int32_t lane = 0; lane < LANES; lane++)
        if (units[lane] >= 1.0f) *out++ = id + lane;
    return out;
#endif
}

// Returns the sum of a block's weights. With KEEPS, also writes the ids of tokens with a weight of at least 1 and advances `out`.
template <bool KEEPS, typename T>
static inline int64_t weigh_block(
    const T* scores, int64_t begin, int64_t end, float temperature, float peak, int32_t*& out
) {
    lvec total = lvec{};
    for (int64_t i = begin; i < end; i += LANES) {
        const vec x = below_peak(scores + i, std::min<int64_t>(LANES, end - i), temperature, peak);
        // Filters such as top-k leave few tokens, so most vectors are skipped.
        if (!any_drawable(x)) continue;
        const vec u = units(x);
        total += __builtin_convertvector(u, lvec);
        if (KEEPS) out = write_drawable(u, static_cast<int32_t>(i), out);
    }
    int64_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += total[i];
    return sum;
}

// Returns the largest score, and whether any score is NaN. NaN is ignored in the maximum.
template <typename T>
static inline std::pair<float, bool> peak_of(const T* scores, int64_t count) {
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
    return {peak, is_bad};
}

template <typename T>
static void draw_row(const Draw& d, int64_t row, int64_t* sums) {
    const T* scores = static_cast<const T*>(d.scores) + row * d.stride;
    const int64_t V = d.vocabulary;
    const float temperature = d.temperature[row];
    const auto [largest_score, is_bad] = peak_of(scores, V);
    const float peak = is_bad ? NAN : largest_score / temperature;
    int64_t token = 0;
    // This search takes a fifth of the time of a draw, so it runs only if its result is used.
    if (d.greedy[row] || !std::isfinite(peak))
        while (token < V - 1 && load_one(scores + token) != largest_score) token++;
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
        // For the largest uniforms, the product rounds up to the total itself.
        const double part = uniform(d.key[row], d.position[row]);
        const int64_t level = std::min(static_cast<int64_t>(part * static_cast<double>(total)), total - 1);
        const int64_t block = std::upper_bound(sums, sums + (V + SUMMED - 1) / SUMMED, level) - sums;
        int64_t below = block ? sums[block - 1] : 0;
        token = block * SUMMED;
        for (int64_t i = token; i < std::min(token + SUMMED, V); i += LANES) {
            const int64_t count = std::min<int64_t>(LANES, V - i);
            const lvec w = __builtin_convertvector(units(below_peak(scores + i, count, temperature, peak)), lvec);
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

// Returns the number of token ids in `kept`.
template <typename T>
static int64_t draw(const Draw& d, const team::Crew& crew) {
    crew.share(d.rows, [&](int64_t row) {
        draw_row<T>(d, row, team::scratch<int64_t>((d.vocabulary + SUMMED - 1) / SUMMED));
    });
    int64_t total = 0;
    for (int64_t row = 0; d.keeping && row < d.rows; total += d.kept_counts[row++])
        std::memmove(d.kept + total, d.kept + row * d.vocabulary, d.kept_counts[row] * sizeof(int32_t));
    return total;
}

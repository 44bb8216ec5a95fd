// Rows of 32-bit units, in the type that the processor multiplies, and their transposition. See `Dot` for units.

#pragma once

#include "cpu_matmul.h"

#if WIDE && defined(__AVX512BF16__)
static inline void store_rounded(bf16* p, vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
template <typename T>
using Multiplied = T;
#else
template <typename T>
using Multiplied = float;
#endif
static inline void store_rounded(float* p, vec v) { store(p, v); }

// Converts an element to type C, which is T or float32.
template <typename C, typename T>
static inline C as(T value) {
    if constexpr (sizeof(C) == sizeof(T)) return value;
    else return load_one(&value);
}

// Loads LANES units of a row. With `count`, loads only that many elements and appends zeros.
template <typename T>
static inline vec load_units(const T* p) {
    if constexpr (Dot<Multiplied<T>>::UNIT == 1) return load(p);
    else return load(reinterpret_cast<const float*>(p));
}
template <typename T>
static inline vec load_units(const T* p, int64_t count) {
    T all[LANES * Dot<Multiplied<T>>::UNIT] = {};
    std::memcpy(all, p, count * sizeof(T));
    return load_units(all);
}

// Transposes a square of LANES x LANES units.
INLINE static inline void transpose(vec (&rows)[LANES]) {
    vec next[LANES];
#if WIDE
    constexpr std::make_integer_sequence<int, LANES / 2> PAIRS;
    typedef __m512 F;
    typedef __m512d D;
    // First transposes the 4 x 4 block in each 128-bit lane of four registers, then moves whole 128-bit lanes.
    each_of(PAIRS, [&](auto i) INLINE {
        next[2 * i] = (vec)_mm512_unpacklo_ps((F)rows[2 * i], (F)rows[2 * i + 1]);
        next[2 * i + 1] = (vec)_mm512_unpackhi_ps((F)rows[2 * i], (F)rows[2 * i + 1]);
    });
    each_of(PAIRS, [&](auto i) INLINE {
        constexpr int first = i / 2 * 4 + i % 2;
        rows[first / 4 * 4 + i % 2 * 2] = (vec)_mm512_unpacklo_pd((D)next[first], (D)next[first + 2]);
        rows[first / 4 * 4 + i % 2 * 2 + 1] = (vec)_mm512_unpackhi_pd((D)next[first], (D)next[first + 2]);
    });
    each_of(PAIRS, [&](auto i) INLINE {
        constexpr int first = i / 4 * 8 + i % 4;
        next[first] = (vec)_mm512_shuffle_f32x4((F)rows[first], (F)rows[first + 4], 0x88);
        next[first + 4] = (vec)_mm512_shuffle_f32x4((F)rows[first], (F)rows[first + 4], 0xdd);
    });
    each_of(PAIRS, [&](auto i) INLINE {
        rows[i] = (vec)_mm512_shuffle_f32x4((F)next[i], (F)next[i + 8], 0x88);
        rows[i + 8] = (vec)_mm512_shuffle_f32x4((F)next[i], (F)next[i + 8], 0xdd);
    });
#else
    const auto part = [](vec& of, int at) { return reinterpret_cast<vec4*>(&of) + at / 4; };
    for (int r = 0; r < LANES; r += 4)
        for (int c = 0; c < LANES; c += 4) {
            const vec4 w = *part(rows[r], c), x = *part(rows[r + 1], c), y = *part(rows[r + 2], c), z = *part(rows[r + 3], c);
            const vec4 low[2] = {SHUFFLE4(w, x, 0, 4, 1, 5), SHUFFLE4(y, z, 0, 4, 1, 5)};
            const vec4 high[2] = {SHUFFLE4(w, x, 2, 6, 3, 7), SHUFFLE4(y, z, 2, 6, 3, 7)};
            *part(next[c], r) = SHUFFLE4(low[0], low[1], 0, 1, 4, 5);
            *part(next[c + 1], r) = SHUFFLE4(low[0], low[1], 2, 3, 6, 7);
            *part(next[c + 2], r) = SHUFFLE4(high[0], high[1], 0, 1, 4, 5);
            *part(next[c + 3], r) = SHUFFLE4(high[0], high[1], 2, 3, 6, 7);
        }
    std::copy(next, next + LANES, rows);
#endif
}

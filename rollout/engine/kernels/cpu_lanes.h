// Vectors of the processor's width, loaded from float32 or bfloat16 and computed in float32. Requires GCC or Clang.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define WIDE 1
#include <immintrin.h>
#endif

#if WIDE
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t uvec4 __attribute__((vector_size(16)));
typedef uint16_t hvec4 __attribute__((vector_size(8)));

typedef uint16_t bf16;  // the bits of a bfloat16, which are the upper half of a float32

static inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
static inline vec load(const bf16* p) {
#if WIDE
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (vec)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
#else
    uvec wide = __builtin_convertvector(*reinterpret_cast<const hvec*>(p), uvec) << 16;
    vec out;
    std::memcpy(&out, &wide, sizeof(out));
    return out;
#endif
}
static inline float load_one(const float* p) { return *p; }
static inline float load_one(const bf16* p) {
    uint32_t wide = static_cast<uint32_t>(*p) << 16;
    float out;
    std::memcpy(&out, &wide, sizeof(out));
    return out;
}
// Loads `count` elements into the first lanes and sets the other lanes to zero.
template <typename T>
static inline vec load_first(const T* p, int64_t count) {
    T padded[LANES] = {};
    std::memcpy(padded, p, count * sizeof(T));
    return load(padded);
}
#if WIDE
static inline vec load_first(const float* p, int64_t count) {
    return (vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
}
#endif

static inline void store(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
// Rounds to bfloat16 (to nearest, ties to even; NaN stays NaN). The result is the upper half of each lane; ignore the lower half.
template <typename Bits, typename Floats>
static inline Bits nearest(Floats v) {
    Bits bits, is_nan;
    std::memcpy(&bits, &v, sizeof(bits));
    const auto nan = v != v;
    std::memcpy(&is_nan, &nan, sizeof(nan));
    return ((bits + 0x7fffu + ((bits >> 16) & 1u)) & ~is_nan) | (0x7fc00000u & is_nan);
}
static inline void store(bf16* p, vec v) {
    const uvec narrow = nearest<uvec>(v) >> 16;
#if WIDE
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)narrow));
#else
    *reinterpret_cast<hvec*>(p) = __builtin_convertvector(narrow, hvec);
#endif
}
static inline void store_one(float* p, float v) { *p = v; }
static inline void store_one(bf16* p, float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof(bits));
    *p = v != v ? 0x7fc0 : static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
template <typename T>
static inline void store_first(T* p, vec v, int64_t count) {
    T padded[LANES];
    store(padded, v);
    std::memcpy(p, padded, count * sizeof(T));
}

// Rounds to type T, as the PyTorch module does after each of its operations.
template <typename T>
static inline vec rounded(vec v) {
    if constexpr (sizeof(T) == 4) return v;
    const uvec held = nearest<uvec>(v) & 0xffff0000u;
    vec out;
    std::memcpy(&out, &held, sizeof(out));
    return out;
}
template <typename T>
static inline float rounded(float v) {
    T held;
    store_one(&held, v);
    return load_one(&held);
}

// The same operations for vectors of four elements.
static inline vec4 load_four(const float* p) { return *reinterpret_cast<const vec4*>(p); }
static inline vec4 load_four(const bf16* p) {
    hvec4 narrow;
    std::memcpy(&narrow, p, sizeof(narrow));
    const uvec4 wide = __builtin_convertvector(narrow, uvec4) << 16;
    vec4 out;
    std::memcpy(&out, &wide, sizeof(out));
    return out;
}
static inline void store_four(float* p, vec4 v) { *reinterpret_cast<vec4*>(p) = v; }
static inline void store_four(bf16* p, vec4 v) {
#if WIDE && defined(__AVX512BF16__) && defined(__AVX512VL__)
    // This instruction treats magnitudes below 2^-126 as zero, as do the bfloat16 products whose sums are stored here.
    const __m128bh narrow = _mm_cvtneps_pbh((__m128)v);
    std::memcpy(p, &narrow, sizeof(hvec4));
#else
    const hvec4 narrow = __builtin_convertvector(nearest<uvec4>(v) >> 16, hvec4);
    std::memcpy(p, &narrow, sizeof(narrow));
#endif
}
template <typename T>
static inline vec4 rounded(vec4 v) {
    if constexpr (sizeof(T) == 4) return v;
    const uvec4 held = nearest<uvec4>(v) & 0xffff0000u;
    vec4 out;
    std::memcpy(&out, &held, sizeof(out));
    return out;
}

#if defined(__clang__)
#define SHUFFLE4(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t ivec4 __attribute__((vector_size(16)));
#define SHUFFLE4(a, b, i, j, k, l) __builtin_shuffle(a, b, ivec4{i, j, k, l})
#endif

static inline vec4 quarter(vec v) {  // returns the sum of the four-lane parts of v
    vec4 out;
    std::memcpy(&out, &v, sizeof(out));
    for (int i = 1; i < LANES / 4; i++) {
        vec4 part;
        std::memcpy(&part, reinterpret_cast<const char*>(&v) + 16 * i, sizeof(part));
        out += part;
    }
    return out;
}

// Returns the horizontal sums of four vectors, in one vector.
static inline vec4 sums(vec a, vec b, vec c, vec d) {
#if WIDE
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
    __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return (vec4)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    const vec4 p = quarter(a), q = quarter(b), r = quarter(c), s = quarter(d);
    const vec4 pq = SHUFFLE4(p, q, 0, 4, 1, 5) + SHUFFLE4(p, q, 2, 6, 3, 7);
    const vec4 rs = SHUFFLE4(r, s, 0, 4, 1, 5) + SHUFFLE4(r, s, 2, 6, 3, 7);
    return SHUFFLE4(pq, rs, 0, 1, 4, 5) + SHUFFLE4(pq, rs, 2, 3, 6, 7);
#endif
}

static inline float sum(vec v) {
    const vec4 part = quarter(v);
    return (part[0] + part[2]) + (part[1] + part[3]);
}

static inline float largest(vec v) {
#if WIDE
    return _mm512_reduce_max_ps((__m512)v);
#else
    float out = v[0];
    for (int i = 1; i < LANES; i++) out = v[i] > out ? v[i] : out;
    return out;
#endif
}

// Returns the lane numbers 0, 1, 2, ...
static inline ivec lane_numbers() {
    ivec out = {};
    for (int i = 0; i < LANES; i++) out[i] = i;
    return out;
}

// exp(r) for r in [-ln2/2, ln2/2], a polynomial (Cephes expf, S. Moshier).
static inline vec exponential_near_0(vec r) {
    vec p = vec{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// exp(x) = 2^n exp(r) with x = n ln2 + r. The result is inf for x above 89, NaN for NaN, and 0 for x below -104; where there are
// no denormal results, it is 0 below -87 and inf above 88. With SMALL, x must be at most 88, which saves a check.
template <bool SMALL = false>
static inline vec exponential(vec x) {
    constexpr float PER_LN2 = 1.44269504088896341f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
#if WIDE
    __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-110.0f), (__m512)x);  // max and min return their second operand if one is NaN
    if constexpr (!SMALL) bounded = _mm512_min_ps(_mm512_set1_ps(90.0f), bounded);
    const vec n = (vec)_mm512_roundscale_ps((__m512)((vec)bounded * PER_LN2), 0);
    return (vec)_mm512_scalef_ps((__m512)exponential_near_0((vec)bounded - n * LN2_HIGH - n * LN2_LOW), (__m512)n);
#else
    const vec low = vec{} - 87.0f, high = vec{} + 88.0f;
    const ivec vanishes = x < low, overflows = x > high;
    vec bounded = vanishes ? low : x;
    if constexpr (!SMALL) bounded = overflows ? high : bounded;
    const vec t = bounded * PER_LN2 + 12582912.0f;
    const vec n = t - 12582912.0f;
    const vec p = exponential_near_0(bounded - n * LN2_HIGH - n * LN2_LOW);
    ivec bits;
    std::memcpy(&bits, &t, sizeof(bits));
    bits = (bits << 23) + (127 << 23);
    vec scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    const vec out = vanishes ? vec{} : p * scale;
    if constexpr (SMALL) return out;
    else return overflows ? vec{} + INFINITY : out;
#endif
}

// tanh(x) (Cephes tanhf, S. Moshier): a polynomial if |x| < 0.625, to be accurate near 0, otherwise 1 - 2 / (exp(2|x|) + 1).
static inline vec hyperbolic_tangent(vec x) {
    const vec size = x < 0.0f ? -x : x, z = x * x;
    const vec far = 1.0f - 2.0f / (exponential(size * 2.0f) + 1.0f);
    vec p = vec{} - 5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return size < 0.625f ? p * z * x + x : (x < 0.0f ? -far : far);
}

// One step of a dot product: `add` adds the products of STEP elements of x and y to the lanes of `sum`. A lane adds the products
// of one unit: two neighbouring bfloat16s if the processor multiplies pairs of them, else one element. `spread` copies a unit to
// all lanes.
template <typename T>
struct Dot {
    static constexpr int UNIT = 1, STEP = UNIT * LANES;  // elements
    typedef vec Operand;
    static inline Operand take(const T* p) { return load(p); }
    static inline Operand take_first(const T* p, int64_t count) { return load_first(p, count); }
    static inline Operand of(vec units) { return units; }
    static inline Operand spread(const T* p) { return vec{} + load_one(p); }
    static inline vec add(vec sum, Operand x, Operand y) { return sum + x * y; }
};
#if WIDE && defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
    static constexpr int UNIT = 2, STEP = UNIT * LANES;
    typedef __m512bh Operand;
    static inline Operand take(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static inline Operand take_first(const bf16* p, int64_t count) {
        return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), p);
    }
    static inline Operand of(vec units) { return (__m512bh)units; }
    static inline Operand spread(const bf16* p) {
        int32_t pair;
        std::memcpy(&pair, p, sizeof(pair));
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static inline vec add(vec sum, Operand x, Operand y) { return (vec)_mm512_dpbf16_ps((__m512)sum, x, y); }
};
#endif

// Linear layers of a decoder: the weight of nn.Linear or of Conv1D, a bias, and a low-rank adapter (LoRA, arXiv 2106.09685).

#pragma once

#include <type_traits>
#include <vector>

#include "cpu_matmul.h"
#include "cpu_rows.h"

struct Adapter {
    const void *down, *up;  // [rank, depth], [columns, rank]; null: none
    int64_t rank;
    float scaling;
    int32_t wide;           // whether both are float32, whatever the type of the activations
};

struct Linear {
    const void *weight, *bias;  // [columns, depth], or, with a stride, [depth, columns]; [columns] or null
    int64_t stride;             // elements from one row of Conv1D's weight to the next; 0: nn.Linear's weight
    Adapter adapter;
};

// M rows of a against up to ACROSS columns of b, whose rows are `b_stride` apart; use(m, column, sums, how many are real).
constexpr int ACROSS = 2 * LANES;
constexpr int64_t ROWS_AHEAD = 16;  // of b that are prefetched
template <int M, typename T, typename Use>
static inline void tile_across(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, int64_t count, Use&& use) {
    const int64_t first = std::min<int64_t>(LANES, count), second = count - first;
    const auto some = [](const T* p, int64_t real) { return real == LANES ? load(p) : load_first(p, real); };
    vec low[M], high[M];
    for (int m = 0; m < M; m++) low[m] = high[m] = vec{};
    for (int64_t k = 0; k < depth; k++, b += b_stride) {
        const vec x = some(b, first), y = second ? some(b + LANES, second) : vec{};
        __builtin_prefetch(b + ROWS_AHEAD * b_stride);
        for (int m = 0; m < M; m++) {
            const float v = load_one(a + m * a_stride + k);
            low[m] += x * v;
            high[m] += y * v;
        }
    }
    each_of(std::make_integer_sequence<int, M>(), [&](auto m) {
        use(m, 0, low[m], first);
        if (second) use(m, LANES, high[m], second);
    });
}
#if WIDE && defined(__AVX512BF16__)
// Two rows of b at a time, interleaved.
template <int M, typename Use>
static inline void tile_across(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride, int64_t depth, int64_t count, Use&& use) {
    const __mmask32 real = static_cast<__mmask32>((1ull << count) - 1);
    vec low[M], high[M];
    for (int m = 0; m < M; m++) low[m] = high[m] = vec{};
    const auto step = [&](int64_t k, __m512i x, __m512i y, bool both) {
        const __m512bh lower = (__m512bh)_mm512_unpacklo_epi16(x, y), upper = (__m512bh)_mm512_unpackhi_epi16(x, y);
        for (int m = 0; m < M; m++) {
            uint32_t pair = a[m * a_stride + k];
            if (both) std::memcpy(&pair, a + m * a_stride + k, sizeof(pair));
            const __m512bh v = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(pair));
            low[m] = (vec)_mm512_dpbf16_ps((__m512)low[m], v, lower);
            high[m] = (vec)_mm512_dpbf16_ps((__m512)high[m], v, upper);
        }
    };
    const auto row = [&](int64_t k) { return _mm512_maskz_loadu_epi16(real, b + k * b_stride); };
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2) {
        __builtin_prefetch(b + (k + ROWS_AHEAD) * b_stride);
        __builtin_prefetch(b + (k + ROWS_AHEAD + 1) * b_stride);
        step(k, row(k), row(k + 1), true);
    }
    if (k < depth) step(k, row(k), _mm512_setzero_si512(), false);
    // Interleaving works on groups of eight columns, and leaves four of each in either half.
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    each_of(std::make_integer_sequence<int, M>(), [&](auto m) {
        use(m, 0, (vec)_mm512_permutex2var_ps((__m512)low[m], first, (__m512)high[m]), std::min<int64_t>(LANES, count));
        if (count > LANES) use(m, LANES, (vec)_mm512_permutex2var_ps((__m512)low[m], second, (__m512)high[m]), count - LANES);
    });
}
#endif

// Like `product`, with b [depth, columns] whose rows are `stride` apart; use(row, n, vector of sums from n on, how many are real).
template <typename T, typename Use>
static void product_across(const T* a, int64_t first, int64_t count, const T* b, int64_t stride, int64_t begin, int64_t end,
                           int64_t depth, Use&& use) {
    for (int64_t n = begin; n < end; n += ACROSS) {
        int64_t row = first;
        const auto each = [&](auto m) {
            constexpr int M = decltype(m)::value;
            const auto keep = [&](int64_t i, int64_t at, vec v, int64_t real) { use(row + i, n + at, v, real); };
            for (; row + M <= first + count; row += M)
                tile_across<M>(a + row * depth, depth, b + n, stride, depth, std::min<int64_t>(ACROSS, end - n), keep);
        };
        if constexpr (TILE_ROWS > 4) each(std::integral_constant<int, 6>{});
        each(std::integral_constant<int, 4>{});
        each(std::integral_constant<int, 2>{});
        each(std::integral_constant<int, 1>{});
    }
}

// sum += in * weight + bias
template <typename T>
static void linear_into(const T* in, int64_t rows, int64_t depth, const void* weight, const void* bias, int64_t columns, T* sum,
                        const team::Crew& crew) {
    matmul(in, rows, static_cast<const T*>(weight), columns, depth, crew, [=](int64_t row, int64_t n, vec4 v, int64_t real) {
        T* to = sum + row * columns + n;
        const T* more = bias ? static_cast<const T*>(bias) + n : nullptr;
        if (real == 4) return store_four(to, load_four(to) + rounded<T>(bias ? v + load_four(more) : v));
        for (int64_t i = 0; i < real; i++) store_one(to + i, load_one(to + i) + rounded<T>(bias ? v[i] + load_one(more + i) : v[i]));
    });
}

// out = in * weight + bias, for rows [first, first + count) and columns [begin, end); rows of `out` are `out_stride` apart.
template <typename T>
static inline void linear_part(const Linear& l, const T* in, int64_t first, int64_t count, int64_t begin, int64_t end,
                               int64_t columns, int64_t depth, T* out, int64_t out_stride) {
    const T* weight = static_cast<const T*>(l.weight);
    if (!l.stride)
        return product(in, first, count, weight, begin, end, columns, depth, into(out, out_stride, l.bias));
    product_across(in, first, count, weight, l.stride, begin, end, depth, [&](int64_t row, int64_t n, vec v, int64_t real) {
        const T* more = l.bias ? static_cast<const T*>(l.bias) + n : nullptr;
        if (more) v += real == LANES ? load(more) : load_first(more, real);
        if (real == LANES) store(out + row * out_stride + n, v);
        else store_first(out + row * out_stride + n, v, real);
    });
}

// low = in * down, for rows [first, first + count), of type float with a wide adapter.
template <typename T>
static void adapter_down(const Adapter& a, const T* in, int64_t first, int64_t count, int64_t depth, void* low) {
    if (sizeof(T) == 4 || !a.wide)
        return product(in, first, count, static_cast<const T*>(a.down), 0, a.rank, a.rank, depth,
                       into(static_cast<T*>(low), a.rank, nullptr));
    static thread_local std::vector<float> wide;
    if (static_cast<int64_t>(wide.size()) < count * depth) wide.resize(count * depth);
    for (int64_t i = 0; i < count * depth; i++) wide[i] = load_one(in + first * depth + i);
    product(wide.data(), 0, count, static_cast<const float*>(a.down), 0, a.rank, a.rank, depth,
            into(static_cast<float*>(low) + first * a.rank, a.rank, nullptr));
}

// out += low * up * scaling, rounded where the module rounds, for rows [first, first + count) and columns [begin, end).
template <typename T, typename S>
static void adapter_up(const Adapter& a, const S* low, int64_t first, int64_t count, int64_t begin, int64_t end, int64_t columns,
                       T* out, int64_t out_stride) {
    product(low, first, count, static_cast<const S*>(a.up), begin, end, columns, a.rank,
            [&](int64_t row, int64_t n, vec4 v, int64_t real) {
                T* to = out + row * out_stride + n;
                for (int64_t i = 0; i < real; i++)
                    store_one(to + i, load_one(to + i) + rounded<S>(rounded<S>(v[i]) * a.scaling));
            });
}

// Linear layers of a decoder: a weight in the layout of nn.Linear or Conv1D, a bias, and a LoRA adapter (arXiv 2106.09685).

#pragma once

#include <numeric>
#include <type_traits>
#include <vector>

#include "cpu_matmul.h"
#include "cpu_prefetch.h"
#include "cpu_rows.h"

struct Adapter {
    const void *down, *up;  // [rank, depth], [columns, rank]; null: no adapter
    int64_t rank;
    float scaling;
    int32_t wide;           // whether `down` and `up` are float32 even if the activations are bfloat16
};

struct Linear {
    const void *weight, *bias;  // weight: [columns, depth], or [depth, columns] if `stride` is not 0; bias: [columns] or null
    int64_t stride;             // elements from one row of Conv1D's weight to the next; 0: the layout of nn.Linear
    Adapter adapter;
};

// Operands of a product with b [depth, columns]: TOGETHER rows of b at a time, and ACROSS columns in two vectors.
constexpr int64_t ACROSS = 2 * LANES;
template <typename T>
struct Across {
    static constexpr int64_t TOGETHER = Dot<T>::UNIT;
    typedef typename Dot<T>::Operand Operand;
    static inline void take(const T* b, const T*, int64_t columns, Operand (&out)[2]) {
        out[0] = columns < LANES ? load_first(b, columns) : load(b);
        out[1] = columns == ACROSS ? load(b + LANES) : load_first(b + LANES, std::max<int64_t>(0, columns - LANES));
    }
    static inline Operand spread(const T* a, int64_t) { return Dot<T>::spread(a); }
    static inline void order(vec&, vec&) {}
};
#if WIDE && defined(__AVX512BF16__)
template <>
struct Across<bf16> {
    static constexpr int64_t TOGETHER = Dot<bf16>::UNIT;
    typedef Dot<bf16>::Operand Operand;
    // `below` is the next row of b, or null after the last row.
    static inline void take(const bf16* b, const bf16* below, int64_t columns, Operand (&out)[2]) {
        const __mmask32 real = static_cast<__mmask32>((1ull << columns) - 1);
        const __m512i x = _mm512_maskz_loadu_epi16(real, b);
        const __m512i y = below ? _mm512_maskz_loadu_epi16(real, below) : _mm512_setzero_si512();
        out[0] = (__m512bh)_mm512_unpacklo_epi16(x, y);
        out[1] = (__m512bh)_mm512_unpackhi_epi16(x, y);
    }
    static inline Operand spread(const bf16* a, int64_t rows) {
        const bf16 last[2] = {*a, 0};
        return Dot<bf16>::spread(rows == 2 ? a : last);
    }
    // `take` puts the first four of every eight columns into `low` and the other four into `high`. This restores their order.
    static inline void order(vec& low, vec& high) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        const __m512 x = (__m512)low, y = (__m512)high;
        low = (vec)_mm512_permutex2var_ps(x, first, y);
        high = (vec)_mm512_permutex2var_ps(x, second, y);
    }
};
#endif

// sums[M][ACROSS] += M rows of a times `deep` rows of b, whose operands are in `block`.
template <int M, typename T>
static inline void tile_across(const T* a, int64_t a_stride, const typename Across<T>::Operand (*block)[2], int64_t deep, float* sums,
                               Ahead& ahead) {
    typedef Across<T> A;
    vec low[M], high[M];
    for (int m = 0; m < M; m++) low[m] = load(sums + m * ACROSS), high[m] = load(sums + m * ACROSS + LANES);
    const auto step = [&](int64_t k, int64_t rows) {
        const typename A::Operand(&y)[2] = block[k / A::TOGETHER];
        for (int m = 0; m < M; m++) {
            typename A::Operand x = A::spread(a + m * a_stride + k, rows);
            in_register(x);
            low[m] = Dot<T>::add(low[m], x, y[0]);
            high[m] = Dot<T>::add(high[m], x, y[1]);
        }
    };
    int64_t k = 0;
    for (; k + A::TOGETHER <= deep; k += A::TOGETHER) {
        ahead.step();
        step(k, A::TOGETHER);
    }
    if (k < deep) step(k, deep - k);
    for (int m = 0; m < M; m++) store(sums + m * ACROSS, low[m]), store(sums + m * ACROSS + LANES, high[m]);
}

constexpr int64_t DEEP = 64;  // rows of b per block

// Like `product`, for b [depth, columns] with rows `stride` elements apart. Calls use(row, n, vector of the sums from column n
// on, how many of them exist). A block of b stays in the first-level cache while all rows of a are multiplied by it. Meanwhile
// the next block is fetched row by row, because memory reads contiguous lines twice as fast as scattered lines.
template <typename T, typename Use>
static void product_across(const T* a, int64_t first, int64_t count, const T* b, int64_t stride, int64_t begin, int64_t end,
                           int64_t depth, Use&& use) {
    typedef Across<T> A;
    typename A::Operand block[DEEP / A::TOGETHER][2];
    const int64_t panels = (end - begin + ACROSS - 1) / ACROSS;
    float* all = team::scratch<float>(panels * count * ACROSS);
    std::fill(all, all + panels * count * ACROSS, 0.0f);
    const int64_t tiles = (count + 7) / 8, bytes = sizeof(T);
    int64_t rows[DEEP];
    std::iota(rows, rows + DEEP, 0);
    Ahead ahead;
    for (int64_t k = 0; k < depth; k += DEEP) {
        const int64_t deep = std::min(DEEP, depth - k), next = depth - k - DEEP, steps = panels * tiles * deep / A::TOGETHER;
        // After the last block, fetches the first block of the next job but one: another thread has probably taken the next job.
        const T* from = next > 0 ? b + (k + DEEP) * stride + begin : b + 2 * end - begin;
        const int64_t left = next > 0 ? std::min(DEEP, next) : 3 * end - 2 * begin <= stride ? std::min(DEEP, depth) : 0;
        ahead.begin({reinterpret_cast<const char*>(from), (end - begin) * bytes, stride * bytes}, rows, left, steps);
        for (int64_t panel = 0; panel < panels; panel++) {
            const int64_t n = begin + panel * ACROSS, columns = std::min(ACROSS, end - n);
            float* sums = all + panel * count * ACROSS;
            for (int64_t i = 0; i < deep; i += A::TOGETHER) {
                const T* row = b + (k + i) * stride + n;
                A::take(row, i + 1 < deep ? row + stride : nullptr, columns, block[i / A::TOGETHER]);
            }
            int64_t row = 0;
            const auto each = [&](auto m) {
                constexpr int M = decltype(m)::value;
                for (; row + M <= count; row += M)
                    tile_across<M>(a + (first + row) * depth + k, depth, block, deep, sums + row * ACROSS, ahead);
            };
            if constexpr (TILE_ROWS > 4) each(std::integral_constant<int, 8>{});
            each(std::integral_constant<int, 4>{});
            each(std::integral_constant<int, 2>{});
            each(std::integral_constant<int, 1>{});
        }
    }
    for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t n = begin + panel * ACROSS, columns = std::min(ACROSS, end - n);
        for (int64_t row = 0; row < count; row++) {
            const float* sums = all + (panel * count + row) * ACROSS;
            vec low = load(sums), high = load(sums + LANES);
            A::order(low, high);
            use(first + row, n, low, std::min<int64_t>(LANES, columns));
            if (columns > LANES) use(first + row, n + LANES, high, columns - LANES);
        }
    }
}

// sum += in * weight + bias, rounded before and after the addition to `sum`
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

// low = in * down, for rows [first, first + count). With a wide adapter, `low` is float32.
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

// out += low * up * scaling for rows [first, first + count) and columns [begin, end), rounded where the PyTorch module rounds.
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

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

// M rows of a against `count` columns of b, J vectors of them; use(m, column, sums, how many of them are real).
template <int M, int J, typename T, typename Use>
static inline void tile_across(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, int64_t count, Use&& use) {
    const int64_t tail = count - (J - 1) * LANES;
    vec sum[M][J];
    for (int m = 0; m < M; m++)
        for (int j = 0; j < J; j++) sum[m][j] = vec{};
    for (int64_t k = 0; k < depth; k++, b += b_stride) {
        vec y[J];
        for (int j = 0; j < J; j++) y[j] = j == J - 1 && tail < LANES ? load_first(b + j * LANES, tail) : load(b + j * LANES);
        for (int m = 0; m < M; m++) {
            const float x = load_one(a + m * a_stride + k);
            for (int j = 0; j < J; j++) sum[m][j] += y[j] * x;
        }
    }
    for (int m = 0; m < M; m++)
        for (int j = 0; j < J; j++) use(m, j * LANES, sum[m][j], j == J - 1 ? tail : LANES);
}

// Like `product`, with b [depth, columns] whose rows are `stride` apart; use(row, n, vector of sums from n on, how many are real).
template <typename T, typename Use>
static void product_across(const T* a, int64_t first, int64_t count, const T* b, int64_t stride, int64_t begin, int64_t end,
                           int64_t depth, Use&& use) {
    for (int64_t n = begin; n < end; n += 2 * LANES) {
        const int64_t columns = std::min<int64_t>(2 * LANES, end - n);
        const auto some = [&](auto m, int64_t row) {
            constexpr int M = decltype(m)::value;
            const auto keep = [&](int64_t i, int64_t at, vec v, int64_t real) { use(row + i, n + at, v, real); };
            if (columns > LANES) tile_across<M, 2>(a + row * depth, depth, b + n, stride, depth, columns, keep);
            else tile_across<M, 1>(a + row * depth, depth, b + n, stride, depth, columns, keep);
        };
        int64_t row = first;
        for (; row + 4 <= first + count; row += 4) some(std::integral_constant<int, 4>{}, row);
        for (; row < first + count; row++) some(std::integral_constant<int, 1>{}, row);
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

// Operations on single rows between a decoder's matrix products: norm, rotary embedding, activation, and a product's epilogue.

#pragma once

#include "cpu_lanes.h"
#include "cpu_team.h"

// Prevents inlining, because each inlined copy could round differently: the compiler may or may not contract a product and a sum.
#define KEPT_APART __attribute__((noinline))

constexpr int64_t GRAIN = 1 << 15;  // elements per job of a row-wise operation: with fewer, a second thread does not pay

// Calls use(row) for rows [0, count) of `width` elements each, on the threads of the crew.
template <typename Use>
static void rows_of(int64_t count, int64_t width, const team::Crew& crew, Use&& use) {
    const int64_t some = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, width));
    crew.share((count + some - 1) / some, [&](int64_t job) {
        for (int64_t row = job * some; row < std::min(count, (job + 1) * some); row++) use(row);
    });
}

// Returns the epilogue of a product, which adds an optional bias and stores the sums. Rows of `out` are `stride` elements apart.
template <typename T>
static auto into(T* out, int64_t stride, const void* bias) {
    return [=](int64_t row, int64_t n, vec4 v, int64_t real) {
        T* to = out + row * stride + n;
        const T* more = bias ? static_cast<const T*>(bias) + n : nullptr;
        if (real == 4) return store_four(to, bias ? v + load_four(more) : v);
        for (int64_t i = 0; i < real; i++) store_one(to + i, bias ? v[i] + load_one(more + i) : v[i]);
    };
}

// 1 / sqrt(mean(x^2) + epsilon)
template <typename T>
KEPT_APART static float inverse_rms(const T* x, int64_t width, float epsilon) {
    vec squares = vec{};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const vec v = load(x + i);
        squares += v * v;
    }
    if (i < width) {
        const vec v = load_first(x + i, width - i);
        squares += v * v;
    }
    return 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + epsilon);
}

// weight * x / sqrt(mean(x^2) + epsilon), rounded after the division and after the product (arXiv 1910.07467).
template <typename T>
KEPT_APART static void rms_norm(const T* x, const void* weight, T* out, int64_t width, float epsilon) {
    const T* w = static_cast<const T*>(weight);
    const float scale = inverse_rms(x, width, epsilon);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, load(w + i) * rounded<T>(load(x + i) * scale));
    for (; i < width; i++) store_one(out + i, load_one(w + i) * rounded<T>(load_one(x + i) * scale));
}

// (offset + weight) * x / sqrt(mean(x^2) + epsilon), rounded once. OLMo has an offset of 0, Gemma an offset of 1.
template <typename T>
KEPT_APART static void rms_norm_rounded_once(const T* x, const void* weight, float offset, T* out, int64_t width, float epsilon) {
    const T* w = static_cast<const T*>(weight);
    const float scale = inverse_rms(x, width, epsilon);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, load(x + i) * scale * (load(w + i) + offset));
    for (; i < width; i++) store_one(out + i, load_one(x + i) * scale * (load_one(w + i) + offset));
}

// weight * (x - mean(x)) / sqrt(variance(x) + epsilon) + bias, rounded once (arXiv 1607.06450).
template <typename T>
KEPT_APART static void layer_norm(const T* x, const void* weight, const void* bias, T* out, int64_t width, float epsilon) {
    const T *w = static_cast<const T*>(weight), *b = static_cast<const T*>(bias);
    const auto mean_of = [&](auto&& of) {
        vec total = vec{};
        float rest = 0.0f;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) total += of(load(x + i));
        for (; i < width; i++) rest += of(load_one(x + i));
        return (sum(total) + rest) / static_cast<float>(width);
    };
    const float mean = mean_of([](auto v) { return v; });
    const float scale = 1.0f / std::sqrt(mean_of([=](auto v) { return (v - mean) * (v - mean); }) + epsilon);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const vec v = (load(x + i) - mean) * scale * load(w + i);
        store(out + i, b ? v + load(b + i) : v);
    }
    for (; i < width; i++)
        store_one(out + i, (load_one(x + i) - mean) * scale * load_one(w + i) + (b ? load_one(b + i) : 0.0f));
}

// Rotary embedding (arXiv 2104.09864) that rotates element i of the first half together with element i of the second half, like
// transformers' `rotate_half`. Products are rounded to the type of the tables.
template <typename T, typename A>
KEPT_APART static void rotate(T* x, const A* cosine, const A* sine, int64_t width) {
    const int64_t half = width / 2;
    // Vectors are passed by value, because a reference would promise more alignment than `vec` has.
    const auto minus = [](auto a, auto ca, auto b, auto sa) { return rounded<A>(a * ca) - rounded<A>(b * sa); };
    const auto plus = [](auto b, auto cb, auto a, auto sb) { return rounded<A>(b * cb) + rounded<A>(a * sb); };
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vec first = load(x + i), second = load(x + half + i);
        store(x + i, minus(first, load(cosine + i), second, load(sine + i)));
        store(x + half + i, plus(second, load(cosine + half + i), first, load(sine + half + i)));
    }
    for (; i < half; i++) {
        const float first = load_one(x + i), second = load_one(x + half + i);
        store_one(x + i, minus(first, load_one(cosine + i), second, load_one(sine + i)));
        store_one(x + half + i, plus(second, load_one(cosine + half + i), first, load_one(sine + half + i)));
    }
}

// Rotary embedding that rotates elements 2 i and 2 i + 1 together, as in GLM. Only the first half of each table row is used.
template <typename T, typename A>
KEPT_APART static void rotate_pairs(T* x, const A* cosine, const A* sine, int64_t width) {
    for (int64_t i = 0; i < width / 2; i++) {
        const float a = load_one(x + 2 * i), b = load_one(x + 2 * i + 1), c = load_one(cosine + i), s = load_one(sine + i);
        store_one(x + 2 * i, rounded<A>(a * c) - rounded<A>(b * s));
        store_one(x + 2 * i + 1, rounded<A>(b * c) + rounded<A>(a * s));
    }
}

// gate = use(gate) * up, rounded after both operations. Without `up`, gate = use(gate).
template <typename T, typename Use>
static inline void through(T* gate, const T* up, int64_t width, Use&& use) {
    const auto all = [&](auto&& finish) {
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(gate + i, finish(rounded<T>(use(load(gate + i))), i, LANES));
        if (i < width) store_first(gate + i, finish(rounded<T>(use(load_first(gate + i, width - i))), i, width - i), width - i);
    };
    if (!up) return all([](vec v, int64_t, int64_t) { return v; });
    all([&](vec v, int64_t i, int64_t count) { return v * (count == LANES ? load(up + i) : load_first(up + i, count)); });
}

// gate = silu(gate) * up
template <typename T>
KEPT_APART static void activate(T* gate, const T* up, int64_t width) {
    through(gate, up, width, [](vec x) { return x / (1.0f + exponential(-x)); });
}

enum Activation : int64_t { SILU, GELU_TANH };

// gate = activation(gate) * up. GELU_TANH is the approximation of GELU with a hyperbolic tangent (arXiv 1606.08415).
template <typename T>
KEPT_APART static void activated(int64_t activation, T* gate, const T* up, int64_t width) {
    if (activation == SILU) return activate(gate, up, width);
    through(gate, up, width, [](vec x) {
        return 0.5f * x * (1.0f + hyperbolic_tangent(0.797884560802865f * (x + 0.044715f * x * x * x)));
    });
}

// 1 / (1 + exp(-x)), rounded to T
template <typename T>
static inline float sigmoid(float x) {
    return rounded<T>(1.0f / (1.0f + std::exp(-x)));
}

// x = x * sigmoid(gate), rounded after both operations
template <typename T>
static inline void gate_by_sigmoid(T* x, const T* gate, int64_t width) {
    const auto one = [](vec v, vec g) { return v * rounded<T>(1.0f / (1.0f + exponential(-g))); };
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(x + i, one(load(x + i), load(gate + i)));
    if (i < width) store_first(x + i, one(load_first(x + i, width - i), load_first(gate + i, width - i)), width - i);
}

// x = x * factor
template <typename T>
static inline void scale(T* x, float factor, int64_t width) {
    for (int64_t i = 0; i < width; i++) store_one(x + i, load_one(x + i) * factor);
}

// x = x + y
template <typename T>
static inline void add(T* x, const T* y, int64_t width) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(x + i, load(x + i) + load(y + i));
    for (; i < width; i++) store_one(x + i, load_one(x + i) + load_one(y + i));
}

// x = most * tanh(x / most), rounded after each operation
template <typename T>
static inline void cap(T* x, float most, int64_t width) {
    const auto one = [&](vec v) { return rounded<T>(hyperbolic_tangent(rounded<T>(v / most))) * most; };
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(x + i, one(load(x + i)));
    if (i < width) store_first(x + i, one(load_first(x + i, width - i)), width - i);
}

// Attention over the paged KV cache, with keys and values read in place.
//
// Each row of a task carries its own running maximum and sum (online softmax, arXiv 1805.02867) from tile to tile of its keys,
// and tiles begin at multiples of KEYS. So a row's bits depend on its own keys alone, not on the other rows of its task.

#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "cpu_attention_plan.h"
#include "cpu_matmul.h"
#include "cpu_team.h"

static int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

static int64_t most_rows(int64_t kv_heads) { return std::max(ROWS, FEW_ROWS * kv_heads); }

// Floats of scratch memory per thread.
static int64_t attention_scratch(const Attention& a) {
    return most_rows(a.kv_heads) * (padded(a.head_dim) + padded(a.value_dim) + KEYS + 3);
}

// Running state of the rows of one job across tiles: head after head, `rows` each.
template <typename T>
struct Rows {
    T* query;  // [heads * rows, padded head_dim]
    float *acc, *weights;  // [heads * rows, padded value_dim], [heads * rows, KEYS]
    float *peak, *total, *decay;
    int64_t rows, key_width, value_width;

    Rows(const Attention& a, int64_t rows, float* scratch)
        : rows(rows), key_width(padded(a.head_dim)), value_width(padded(a.value_dim)) {
        const int64_t most = most_rows(a.kv_heads);
        query = reinterpret_cast<T*>(scratch);
        acc = scratch + most * key_width;
        weights = acc + most * value_width;
        peak = weights + most * KEYS;
        total = peak + most;
        decay = total + most;
    }
};

template <int N>
using Count = std::integral_constant<int, N>;

// J vectors of M rows: acc = acc * decay + weights · values, whose elements begin at `column`.
template <int M, int J, bool CUT, typename T>
static inline void weigh(const float* weights, const T* const* values, int64_t column, int64_t from, int64_t to,
                         float* acc, int64_t stride, const float* decay, int64_t tail, Ahead& ahead) {
    vec sum[M][J];
    for (int m = 0; m < M; m++)
        for (int j = 0; j < J; j++) sum[m][j] = load(acc + m * stride + j * LANES) * decay[m];
    for (int64_t s = from; s < to; s++) {
        ahead.step();
        vec v[J];
        for (int j = 0; j < J; j++)
            v[j] = CUT && j == J - 1 ? load_first(values[s] + column + j * LANES, tail) : load(values[s] + column + j * LANES);
        for (int m = 0; m < M; m++)
            for (int j = 0; j < J; j++) sum[m][j] += v[j] * weights[m * KEYS + s];
    }
    for (int m = 0; m < M; m++)
        for (int j = 0; j < J; j++) store(acc + m * stride + j * LANES, sum[m][j]);
}

template <int J, typename T>
static inline void weigh_rows(int64_t rows, const float* weights, const T* const* values, int64_t column, int64_t from,
                              int64_t to, float* acc, int64_t stride, const float* decay, int64_t tail, Ahead& ahead) {
    const auto some = [&](auto m, int64_t r) {
        constexpr int M = decltype(m)::value;
        if (tail) weigh<M, J, true>(weights + r * KEYS, values, column, from, to, acc + r * stride, stride, decay + r, tail, ahead);
        else weigh<M, J, false>(weights + r * KEYS, values, column, from, to, acc + r * stride, stride, decay + r, 0, ahead);
    };
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS) some(Count<TILE_ROWS>{}, r);
    switch (rows - r) {
        case 1: some(Count<1>{}, r); break;
        case 2: if constexpr (TILE_ROWS > 2) some(Count<2>{}, r); break;
        case 3: if constexpr (TILE_ROWS > 3) some(Count<3>{}, r); break;
        case 4: if constexpr (TILE_ROWS > 4) some(Count<4>{}, r); break;
        case 5: if constexpr (TILE_ROWS > 5) some(Count<5>{}, r); break;
    }
}

// Scales one row's scores and cuts them to [low, high); returns the largest.
static inline float scaled(float* row, int64_t low, int64_t high, float scaling, float softcap) {
    vec top = vec{} - INFINITY;
    for (int64_t i = 0; i < KEYS; i += LANES) {
        vec x = load(row + i) * scaling;
        if (softcap != 0.0f) x = softcap * hyperbolic_tangent(x / softcap);
        if (i < low || i + LANES > high) {
            const ivec at = lane_numbers() + static_cast<int32_t>(i);
            x = (at < static_cast<int32_t>(low)) | (at >= static_cast<int32_t>(high)) ? vec{} - INFINITY : x;
        }
        top = x > top ? x : top;
        // A NaN stays in the row, so that its weights show it; the maximum leaves it out.
        store(row + i, x);
    }
    return largest(top);
}

// Turns one row's scores into weights: scaled, cut to [low, high), exponentiated. Returns the decay of its earlier sums.
static inline float soften(float* row, int64_t low, int64_t high, float scaling, float softcap, float& peak, float& total) {
    if (low >= high) {
        for (int64_t i = 0; i < KEYS; i += LANES) store(row + i, vec{});
        return 1.0f;
    }
    const float now = std::max(peak, scaled(row, low, high, scaling, softcap));
    const float base = now == -INFINITY ? 0.0f : now;
    const float decay = now == peak && now != -INFINITY ? 1.0f : exponential(vec{} + (peak - base))[0];
    vec partial = vec{};
    for (int64_t i = 0; i < KEYS; i += LANES) {
        const vec e = exponential<true>(load(row + i) - base);
        store(row + i, e);
        partial += e;
    }
    total = total * decay + sum(partial);
    peak = now;
    return decay;
}

// The keys of a range for rows [begin, end) of each of the KV heads [head, head + heads).
template <typename T>
static void scan(const Attention& a, Range range, int64_t head, int64_t heads, int64_t begin, int64_t end, const int64_t* seen,
                 const Rows<T>& r, Upcoming& upcoming) {
    const T *keys = static_cast<const T*>(a.keys) + head * a.head_dim, *values = static_cast<const T*>(a.values) + head * a.value_dim;
    const int64_t rows = end - begin, piece = piece_of<T>(a, heads);
    const int64_t row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, parts = (a.value_dim + 4 * LANES - 1) / (4 * LANES);
    int64_t slots[KEYS];
    for (; range.from < range.to; range.from = range.tile().to) {
        const Range tile = range.tile();
        const int64_t start = tile.from / KEYS * KEYS, low = tile.from - start, high = tile.to - start;
        const T *key[KEYS], *value[KEYS];
        slots_of(a, tile, slots + low);
        for (int64_t s = low; s < high; s++) {
            key[s] = keys + slots[s] * a.kv_heads * a.head_dim;
            value[s] = values + slots[s] * a.kv_heads * a.value_dim;
        }
        each_piece(low, high, piece, [&](int64_t from, int64_t to) {
            upcoming.begin(heads * ((to + 3) / 4 - from / 4));
            for (int64_t h = 0; h < heads; h++) {
                const int64_t first = h * r.rows + begin;
                float* weights = r.weights + first * KEYS;
                for (int64_t s = from / 4 * 4; s < to; s += 4) {
                    const T* four[1][4];
                    for (int64_t i = 0; i < 4; i++) four[0][i] = key[std::min(std::max(s + i, low), high - 1)] + h * a.head_dim;
                    upcoming.ahead.step();
                    tiles(r.query + first * r.key_width, r.key_width, rows, four, 1, a.head_dim, Next<T>{nullptr, 0, 0},
                          [&](int64_t row, int64_t, vec4 v) { *reinterpret_cast<vec4*>(weights + row * KEYS + s) = v; });
                }
            }
        });
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t row = begin; row < end; row++) {
                const int64_t at = h * r.rows + row;
                const int64_t above = std::min(high, seen[row] + 1 - start), below = std::max(low, a.oldest(seen[row]) - start);
                r.decay[at] = soften(r.weights + at * KEYS, below, above, a.scaling, a.softcap, r.peak[at], r.total[at]);
            }
        }
        each_piece(low, high, piece, [&](int64_t from, int64_t to) {
            upcoming.begin(heads * parts * row_tiles * (to - from));
            for (int64_t h = 0; h < heads; h++) {
                const int64_t first = h * r.rows + begin;
                float* decay = r.decay + first;
                for (int64_t column = 0; column < a.value_dim; column += 4 * LANES) {
                    const int64_t left = a.value_dim - column, tail = left < 4 * LANES ? left % LANES : 0;
                    const auto part = [&](auto j) {
                        weigh_rows<decltype(j)::value>(rows, r.weights + first * KEYS, value, h * a.value_dim + column, from, to,
                                                       r.acc + first * r.value_width + column, r.value_width, decay, tail, upcoming.ahead);
                    };
                    switch (std::min<int64_t>(4, (left + LANES - 1) / LANES)) {
                        case 1: part(Count<1>{}); break;
                        case 2: part(Count<2>{}); break;
                        case 3: part(Count<3>{}); break;
                        case 4: part(Count<4>{}); break;
                    }
                }
                std::fill(decay, decay + rows, 1.0f);
            }
        });
    }
}

template <typename T>
static void attend(const Attention& a, const Task& task, int64_t head, int64_t heads, float* scratch, Upcoming& upcoming) {
    const int64_t group = a.heads / a.kv_heads, rows = (task.end - task.begin) * group;
    const Rows<T> r(a, rows, scratch);
    int64_t seen[ROWS];
    for (int64_t row = 0; row < rows; row++) seen[row] = a.positions[task.begin + row / group];
    // Row i of head h: position task.begin + i / group, query head h * group + i % group.
    const auto each_row = [&](auto use) {
        for (int64_t h = 0; h < heads; h++)
            for (int64_t row = 0; row < rows; row++)
                use(h * rows + row, task.begin + row / group, (head + h) * group + row % group);
    };
    each_row([&](int64_t i, int64_t at, int64_t query_head) {
        std::memcpy(r.query + i * r.key_width, static_cast<const T*>(a.query) + at * a.query_stride + query_head * a.head_dim,
                    a.head_dim * sizeof(T));
        // A sink is one more score, before all others; its value is zero.
        r.peak[i] = a.sinks ? a.sinks[query_head] : -INFINITY;
        r.total[i] = a.sinks ? 1.0f : 0.0f;
        std::fill(r.acc + i * r.value_width, r.acc + (i + 1) * r.value_width, 0.0f);
    });
    each_range(a, task, [&](const Range& range, int64_t begin, int64_t end) {
        scan(a, range, head, heads, begin, end, seen, r, upcoming);
    });
    each_row([&](int64_t i, int64_t at, int64_t query_head) {
        T* out = static_cast<T*>(a.out) + at * a.out_stride + query_head * a.value_dim;
        const float scale = 1.0f / r.total[i];
        if (a.log_sums) a.log_sums[at * a.heads + query_head] = r.peak[i] + std::log(r.total[i]);
        for (int64_t d = 0; d < a.value_dim; d += LANES) {
            const vec v = load(r.acc + i * r.value_width + d) * scale;
            if (d + LANES <= a.value_dim) store(out + d, v);
            else store_first(out + d, v, a.value_dim - d);
        }
    });
}

template <typename T>
static void attention(const Attention& a, const std::vector<Task>& tasks, const team::Crew& crew) {
    const std::vector<Job> jobs = jobs_of(a, tasks, crew.threads);
    crew.share(static_cast<int64_t>(jobs.size()), [&](int64_t index) {
        const Job& job = jobs[index];
        std::vector<Range> ranges;
        for (int64_t i = job.first; i < job.last; i++)
            each_range(a, tasks[i], [&](const Range& range, int64_t, int64_t) { ranges.push_back(range); });
        const auto plane = [&](const void* of, int64_t width) {
            const int64_t bytes = width * static_cast<int64_t>(sizeof(T));
            return Plane{static_cast<const char*>(of) + job.head * bytes, job.heads * bytes, a.kv_heads * bytes};
        };
        Upcoming upcoming(a, plane(a.keys, a.head_dim), plane(a.values, a.value_dim), std::move(ranges), piece_of<T>(a, job.heads));
        float* scratch = team::scratch<float>(attention_scratch(a));
        for (int64_t i = job.first; i < job.last; i++) attend<T>(a, tasks[i], job.head, job.heads, scratch, upcoming);
    });
}

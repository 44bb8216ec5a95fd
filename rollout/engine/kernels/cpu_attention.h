// Attention over the paged KV cache. Keys and values are read in place.
//
// Each row of a task has its own running maximum and sum (online softmax, arXiv 1805.02867) over the tiles of its keys, and tiles
// begin at multiples of KEYS. So the bits of a row depend on its own keys alone, not on the other rows of its task.
//
// Keys are transposed after loading, so that each lane sums the score of one key and no vector is summed across its lanes. If
// bfloat16 inputs are multiplied with bfloat16 instructions, the softmax weights are rounded to bfloat16, but not their sum.

#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "cpu_attention_plan.h"
#include "cpu_linear.h"
#include "cpu_team.h"
#include "cpu_units.h"

static int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// State of the rows of one task across tiles, for every KV head of its job: head after head, `rows` rows each.
template <typename T>
struct Rows {
    typedef Multiplied<T> C;
    static constexpr int64_t STRIDE = KEYS * sizeof(float) / sizeof(C);  // elements from one row's weights to the next
    int64_t rows, key_width, value_width;
    float* panel;                 // [units of a key, KEYS], the transposed keys of one head
    C* query;                     // [heads * rows, key_width]
    float *acc, *scores;          // [heads * rows, value_width], [heads * rows, KEYS]
    float *total, *peak, *decay;  // total: [heads * rows, LANES], partial sums; peak and decay: [heads * rows]
    T* zeros;                     // a zero value for each head, which completes a pair of values

    Rows(const Attention& a, int64_t rows)
        : rows(rows), key_width(padded(a.head_dim, LANES * Dot<C>::UNIT)), value_width(padded(a.value_dim, ACROSS)) {
        const int64_t most = std::max(ROWS, FEW_ROWS * a.kv_heads), size = a.kv_heads * a.value_dim;
        panel = team::scratch<float>(key_width * KEYS + most * (key_width + value_width + KEYS + LANES + 2) + LANES + size);
        acc = panel + key_width * (KEYS + most);
        scores = acc + most * value_width;
        total = scores + most * KEYS;
        peak = total + most * LANES;
        decay = peak + most;
        query = reinterpret_cast<C*>(panel + key_width * KEYS);
        zeros = reinterpret_cast<T*>(decay + most + LANES);
        std::fill(zeros, zeros + size, T{});
    }
    // The weights of a row. They overwrite its scores.
    C* weights(int64_t row) const { return reinterpret_cast<C*>(scores) + row * STRIDE; }
};

template <int N>
using Count = std::integral_constant<int, N>;

// Calls use(Count<n>) for an n from 1 to N.
template <int N, typename Use>
static inline void counted(int64_t n, Use&& use) {
    if (n == N) use(Count<N>{});
    else if constexpr (N > 1) counted<N - 1>(n, use);
}

// Calls use(Count<number of rows>, first row) for every tile of up to TILE_ROWS rows.
template <typename Use>
static inline void each_row_tile(int64_t rows, Use&& use) {
    for (int64_t i = 0; i < rows; i += TILE_ROWS)
        counted<TILE_ROWS>(std::min<int64_t>(TILE_ROWS, rows - i), [&](auto m) { use(m, i); });
}

// Calls use(m, n) for all m below M and n below N, as compile-time constants.
template <int M, int N, typename Use>
INLINE static inline void each_sum(Use&& use) {
    each_of(std::make_integer_sequence<int, M>{}, [&](auto m) INLINE {
        each_of(std::make_integer_sequence<int, N>{}, [&](auto n) INLINE { use(m, n); });
    });
}

// Transposes LANES keys and calls use(u, vector of every key's unit u) for each u. Zeros follow the last unit of a key.
template <typename T, typename Use>
INLINE static inline void each_unit(const T* const* keys, int64_t depth, Ahead& ahead, Use&& use) {
    constexpr int64_t STEP = LANES * Dot<Multiplied<T>>::UNIT;
    constexpr std::make_integer_sequence<int, LANES> ALL;
    for (int64_t d = 0, u = 0; d < depth; d += STEP, u += LANES) {
        vec units[LANES];
        if (d + STEP <= depth) each_of(ALL, [&](auto i) INLINE { units[i] = load_units(keys[i] + d); });
        else each_of(ALL, [&](auto i) INLINE { units[i] = load_units(keys[i] + d, depth - d); });
        transpose(units);
        each_of(ALL, [&](auto i) INLINE {
            if (i % 4 == 0) ahead.step(4);
            use(u + i, units[i]);
        });
    }
}

// Scores of M rows with LANES keys that no other row uses. Here and below, the order of each sum depends on the depth alone.
template <int M, typename T, typename C>
static inline void score_once(const C* query, int64_t stride, const T* const* keys, int64_t depth, float* scores, Ahead& ahead) {
    typedef Dot<C> U;
    vec sum[M][1];
    each_sum<M, 1>([&](auto m, auto n) INLINE { sum[m][n] = vec{}; });
    each_unit(keys, depth, ahead, [&](int64_t u, vec units) INLINE {
        each_sum<M, 1>([&](auto m, auto n) INLINE {
            sum[m][n] = U::add(sum[m][n], U::spread(query + m * stride + u * U::UNIT), U::of(units));
        });
    });
    each_sum<M, 1>([&](auto m, auto n) INLINE { store(scores + m * KEYS, sum[m][n]); });
}

// sum[m][n] += unit of row m, copied to all lanes, times y[n].
template <int M, int N, typename C>
INLINE static inline void add_products(vec (&sum)[M][N], const C* rows, int64_t stride, const typename Dot<C>::Operand (&y)[N]) {
    each_of(std::make_integer_sequence<int, M>{}, [&](auto m) INLINE {
        typename Dot<C>::Operand x = Dot<C>::spread(rows + m * stride);
        in_register(x);
        each_of(std::make_integer_sequence<int, N>{}, [&](auto n) INLINE { sum[m][n] = Dot<C>::add(sum[m][n], x, y[n]); });
    });
}

// Scores of M rows with N vectors of LANES keys in a panel.
template <int M, int N, typename C>
static inline void score(const C* query, int64_t stride, const float* panel, int64_t units, float* scores, Ahead& ahead) {
    typedef Dot<C> U;
    vec sum[M][N];
    each_sum<M, N>([&](auto m, auto n) INLINE { sum[m][n] = vec{}; });
    ahead.step(units);
    for (int64_t u = 0; u < units; u++) {
        typename U::Operand y[N];
        each_of(std::make_integer_sequence<int, N>{}, [&](auto n) INLINE { y[n] = U::of(load(panel + u * KEYS + n * LANES)); });
        add_products<M, N, C>(sum, query + u * U::UNIT, stride, y);
    }
    each_sum<M, N>([&](auto m, auto n) INLINE { store(scores + m * KEYS + n * LANES, sum[m][n]); });
}

constexpr int FEW_SUMS = 12;  // maximum number of sums for prefetches between products: with more sums, these cost registers

// acc = acc * decay + weights · values, for M rows and N pairs of vectors from `column` on. With CUT, only `columns` exist.
template <int M, int N, bool CUT, typename T, typename C>
static inline void weigh(const C* weights, const T* const* values, int64_t column, int64_t columns, int64_t from, int64_t to,
                         float* acc, int64_t stride, const float* decay, Ahead& ahead) {
    constexpr int64_t DEEP = Dot<C>::UNIT;
    vec sum[M][2 * N];
    each_sum<M, 2 * N>([&](auto m, auto n) INLINE { sum[m][n] = load(acc + m * stride + n * LANES) * decay[m]; });
    if (M * 2 * N > FEW_SUMS) ahead.step((to - from) / DEEP);
    for (int64_t s = from / DEEP * DEEP; s < to; s += DEEP) {
        if (M * 2 * N <= FEW_SUMS) ahead.step();
        typename Dot<C>::Operand v[2 * N], both[2];
        each_of(std::make_integer_sequence<int, N>{}, [&](auto n) INLINE {
            const int64_t real = CUT && n == N - 1 ? columns - n * ACROSS : ACROSS;
            Across<T>::take(values[s] + column + n * ACROSS, values[s + DEEP - 1] + column + n * ACROSS, real, both);
            v[2 * n] = both[0], v[2 * n + 1] = both[1];
        });
        add_products<M, 2 * N, C>(sum, weights + s, Rows<T>::STRIDE, v);
    }
    each_sum<M, 2 * N>([&](auto m, auto n) INLINE { store(acc + m * stride + n * LANES, sum[m][n]); });
}

// Scales and soft-caps the scores of one row and masks those outside [low, high). Returns the largest score.
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
        // A NaN stays in the row and makes its weight NaN; the maximum ignores it.
        store(row + i, x);
    }
    return largest(top);
}

// Converts scores to weights, for `rows` rows from `first` on and keys [low, high) of the tile that begins at `start`.
template <typename T>
static inline void soften(const Attention& a, const Rows<T>& r, int64_t first, int64_t rows, const int64_t* seen, int64_t start,
                          int64_t low, int64_t high) {
    float *peak = r.peak + first, *decay = r.decay + first;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t above = std::min(high, seen[i] + 1 - start), below = std::max(low, a.oldest(seen[i]) - start);
        decay[i] = peak[i];
        peak[i] = std::max(peak[i], scaled(r.scores + (first + i) * KEYS, below, above, a.scaling, a.softcap));
    }
    // A vector may extend beyond these rows. That is harmless: the decays of other rows are rewritten before they are read.
    for (int64_t i = 0; i < rows; i += LANES) {
        const vec now = load(peak + i);
        store(decay + i, exponential<true>(load(decay + i) - (now == -INFINITY ? vec{} : now)));
    }
    for (int64_t i = 0; i < rows; i++) {
        const float base = peak[i] == -INFINITY ? 0.0f : peak[i];
        float *row = r.scores + (first + i) * KEYS, *total = r.total + (first + i) * LANES;
        vec sum = load(total) * decay[i];
        for (int64_t k = 0; k < KEYS; k += LANES) {
            const vec e = exponential<true>(load(row + k) - base);
            store_rounded(r.weights(first + i) + k, e);
            sum += e;
        }
        store(total, sum);
    }
}

// Attends to the keys of a range with rows [begin, end) of each KV head in [head, head + heads).
template <typename T>
static void scan(const Attention& a, Range range, int64_t head, int64_t heads, int64_t begin, int64_t end, const int64_t* seen,
                 const Rows<T>& r, Upcoming& upcoming) {
    constexpr int64_t DEEP = Dot<Multiplied<T>>::UNIT, WIDE_PART = 2 * ACROSS;
    const T *keys = static_cast<const T*>(a.keys) + head * a.head_dim, *values = static_cast<const T*>(a.values) + head * a.value_dim;
    const int64_t rows = end - begin, units = (a.head_dim + DEEP - 1) / DEEP;
    const int64_t row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, parts = (a.value_dim + WIDE_PART - 1) / WIDE_PART;
    const bool few = rows <= FEW_ROWS;  // then writing a panel costs more than it saves
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
        if (low % 2) value[low - 1] = r.zeros;  // values are read in pairs, so zeros complete the first and the last pair
        if (high % 2) value[high] = r.zeros;
        each_piece(low, high, upcoming.piece, [&](int64_t from, int64_t to) {
            const int64_t first = from / LANES * LANES, vectors = (to - first + LANES - 1) / LANES, panels = (vectors + 3) / 4;
            upcoming.begin(heads * (vectors * padded(units, LANES) + (few ? 0 : panels * row_tiles * units)));
            for (int64_t h = 0; h < heads; h++) {
                const auto* query = r.query + (h * r.rows + begin) * r.key_width;
                float* scores = r.scores + (h * r.rows + begin) * KEYS;
                for (int64_t s = first; s < to; s += LANES) {
                    const T* some[LANES];
                    for (int64_t i = 0; i < LANES; i++) some[i] = key[std::min(std::max(s + i, low), high - 1)] + h * a.head_dim;
                    if (few)
                        counted<FEW_ROWS>(rows, [&](auto m) {
                            score_once<decltype(m)::value>(query, r.key_width, some, a.head_dim, scores + s, upcoming.ahead);
                        });
                    else
                        each_unit(some, a.head_dim, upcoming.ahead, [&](int64_t u, vec one) INLINE { store(r.panel + u * KEYS + s, one); });
                }
                for (int64_t s = first; s < to && !few; s += 4 * LANES)
                    counted<4>(std::min<int64_t>(4, (to - s + LANES - 1) / LANES), [&](auto n) {
                        each_row_tile(rows, [&](auto m, int64_t i) {
                            score<decltype(m)::value, decltype(n)::value>(query + i * r.key_width, r.key_width, r.panel + s, units,
                                                                          scores + i * KEYS + s, upcoming.ahead);
                        });
                    });
            }
        });
        for (int64_t h = 0; h < heads; h++) soften(a, r, h * r.rows + begin, rows, seen + begin, start, low, high);
        each_piece(low, high, upcoming.piece, [&](int64_t from, int64_t to) {
            upcoming.begin(heads * parts * row_tiles * ((to - from + DEEP - 1) / DEEP));
            for (int64_t h = 0; h < heads; h++) {
                const int64_t first = h * r.rows + begin;
                float* decay = r.decay + first;
                for (int64_t column = 0; column < a.value_dim; column += WIDE_PART) {
                    const int64_t left = std::min(a.value_dim - column, WIDE_PART);
                    const auto go = [&](auto m, auto n, auto cut, int64_t i) {
                        weigh<decltype(m)::value, decltype(n)::value, decltype(cut)::value>(
                            r.weights(first + i), value, h * a.value_dim + column, left, from, to,
                            r.acc + (first + i) * r.value_width + column, r.value_width, decay + i, upcoming.ahead);
                    };
                    counted<2>((left + ACROSS - 1) / ACROSS, [&](auto n) {
                        each_row_tile(rows, [&](auto m, int64_t i) {
                            left % ACROSS ? go(m, n, std::true_type{}, i) : go(m, n, std::false_type{}, i);
                        });
                    });
                }
                std::fill(decay, decay + rows, 1.0f);
            }
        });
    }
}

template <typename T>
static void attend(const Attention& a, const Task& task, int64_t head, int64_t heads, Upcoming& upcoming) {
    const int64_t group = a.heads / a.kv_heads, rows = (task.end - task.begin) * group;
    const Rows<T> r(a, rows);
    int64_t seen[ROWS];
    for (int64_t row = 0; row < rows; row++) seen[row] = a.positions[task.begin + row / group];
    // Row i of KV head h is query head h * group + i % group at position task.begin + i / group.
    const auto each_row = [&](auto use) {
        for (int64_t h = 0; h < heads; h++)
            for (int64_t row = 0; row < rows; row++)
                use(h * rows + row, task.begin + row / group, (head + h) * group + row % group);
    };
    each_row([&](int64_t i, int64_t at, int64_t query_head) {
        const T* query = static_cast<const T*>(a.query) + at * a.query_stride + query_head * a.head_dim;
        auto* to = r.query + i * r.key_width;
        std::fill(std::transform(query, query + a.head_dim, to, as<Multiplied<T>, T>), to + r.key_width, Multiplied<T>{});
        // A sink is one more score, before all others, with a value of zero.
        r.peak[i] = a.sinks ? a.sinks[query_head] : -INFINITY;
        std::fill(r.total + i * LANES, r.total + (i + 1) * LANES, 0.0f);
        if (a.sinks) r.total[i * LANES] = 1.0f;
        std::fill(r.acc + i * r.value_width, r.acc + (i + 1) * r.value_width, 0.0f);
    });
    each_range(a, task, [&](const Range& range, int64_t begin, int64_t end) {
        scan(a, range, head, heads, begin, end, seen, r, upcoming);
    });
    each_row([&](int64_t i, int64_t at, int64_t query_head) {
        T* out = static_cast<T*>(a.out) + at * a.out_stride + query_head * a.value_dim;
        const float total = sum(load(r.total + i * LANES)), scale = 1.0f / total;
        if (a.log_sums) a.log_sums[at * a.heads + query_head] = r.peak[i] + std::log(total);
        for (int64_t d = 0; d < a.value_dim; d += ACROSS) {
            vec both[2] = {load(r.acc + i * r.value_width + d), load(r.acc + i * r.value_width + d + LANES)};
            Across<T>::order(both[0], both[1]);
            for (int64_t n = 0, left = a.value_dim - d; n < 2 && left > 0; n++, left -= LANES) {
                if (left >= LANES) store(out + d + n * LANES, both[n] * scale);
                else store_first(out + d + n * LANES, both[n] * scale, left);
            }
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
        Upcoming upcoming(a, plane(a.keys, a.head_dim), plane(a.values, a.value_dim), std::move(ranges),
                          piece_of<T>(a, tasks[job.first], job.heads));
        for (int64_t i = job.first; i < job.last; i++) attend<T>(a, tasks[i], job.head, job.heads, upcoming);
    });
}

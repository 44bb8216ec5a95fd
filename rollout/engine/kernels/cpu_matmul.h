// Rows times rows: every product here is of the form out[m][n] = sum over k of a[m][k] * b[n][k].
//
// That is the layout of nn.Linear's weight and of the keys in the KV cache, so nothing is packed, and a weight update needs
// no action. The order of a sum depends on k alone: a row's bits do not depend on its neighbours. Long rows are multiplied in
// pieces of k, so that what is used again stays in the first-level cache.

#pragma once

#include <utility>

#include "cpu_lanes.h"
#include "cpu_team.h"

#if WIDE
constexpr int TILE_ROWS = 6;  // 6 x 4 sums, 4 of b and 1 of a: 29 of 32 registers
#else
constexpr int TILE_ROWS = 2;  // 2 x 4 sums, 4 of b and 1 of a: 13 of 16 registers
#endif

constexpr int64_t NEAR_BYTES = 2048;  // of a piece, at most: a tile of a, eight rows of b and the next eight fit into that cache
constexpr int64_t QUADS = 2;          // times 4 rows of b that stay there with a tile of a

// GCC keeps an array of sums in registers if all that touches it is one function with constant indices.
#define INLINE __attribute__((always_inline))

// use(0) to use(M - 1) with constants as types.
template <typename Use, int... I>
INLINE static inline void each_of(std::integer_sequence<int, I...>, Use&& use) {
    (use(std::integral_constant<int, I>{}), ...);
}

// Holds a value in a register: left alone, GCC reads it from memory for each of its four products, and the loads become the limit.
template <typename V>
static inline void in_register([[maybe_unused]] V& v) {
#if WIDE
    asm("" : "+v"(v));
#elif defined(__AVX__)
    asm("" : "+x"(v));
#endif
}

// Sums [rows][QUADS][4] of a piece of k for the next one: one vector each, not yet added up across its lanes.
struct Held {
    float* sums = nullptr;
    bool earlier = false, later = false;  // whether a piece was multiplied before, and another follows

    static constexpr int64_t QUAD = 4 * LANES, ROW = QUADS * QUAD;
    float* at(int64_t row, int64_t quad) const { return sums + row * ROW + quad * QUAD; }
};

// M rows of a against 4 rows of b; use(m, four sums). Prefetches in the first and the last two rows of b as many elements
// ahead as `first` and `last` say; 0: nothing.
template <int M, typename T, typename Use>
INLINE static inline void tile(const T* a, int64_t a_stride, const T* const (&b)[4], int64_t depth, int64_t first, int64_t last,
                               const Held& held, int64_t row, int64_t quad, Use&& use) {
    typedef Dot<T> D;
    constexpr std::make_integer_sequence<int, M> ROWS_OF_A;
    constexpr std::make_integer_sequence<int, 4> FOUR;
    vec sum[M][4];
    const auto each_sum = [&](auto&& use_sum) INLINE {
        each_of(ROWS_OF_A, [&](auto m) INLINE { each_of(FOUR, [&](auto n) INLINE { use_sum(sum[m][n], m, n); }); });
    };
    if (held.earlier) each_sum([&](vec& one, int m, int n) INLINE { one = load(held.at(row + m, quad) + n * LANES); });
    else each_sum([](vec& one, int, int) INLINE { one = vec{}; });
    int64_t k = 0;
    for (; k + D::STEP <= depth; k += D::STEP) {
        typename D::Operand y[4];
        for (int n = 0; n < 4; n++) y[n] = D::take(b[n] + k);
        if (first)
            for (int n = 0; n < 2; n++) __builtin_prefetch(b[n] + k + first);
        if (last)
            for (int n = 2; n < 4; n++) __builtin_prefetch(b[n] + k + last);
        for (int m = 0; m < M; m++) {
            typename D::Operand x = D::take(a + m * a_stride + k);
            in_register(x);
            for (int n = 0; n < 4; n++) sum[m][n] = D::add(sum[m][n], x, y[n]);
        }
    }
    if (k < depth) {
        typename D::Operand y[4];
        each_of(FOUR, [&](auto n) INLINE { y[n] = D::take_first(b[n] + k, depth - k); });
        each_of(ROWS_OF_A, [&](auto m) INLINE {
            const typename D::Operand x = D::take_first(a + m * a_stride + k, depth - k);
            each_of(FOUR, [&](auto n) INLINE { sum[m][n] = D::add(sum[m][n], x, y[n]); });
        });
    }
    if (held.later) each_sum([&](vec one, int m, int n) INLINE { store(held.at(row + m, quad) + n * LANES, one); });
    else each_of(ROWS_OF_A, [&](auto m) INLINE { use(row + m, quad, sums(sum[m][0], sum[m][1], sum[m][2], sum[m][3])); });
}

// All `rows` rows of a against `quads` times 4 rows of b; use(row, quad, four sums). A tile of a is used for all quads
// while it is cached. `ahead`: distance in elements to what comes next in b, 0: nothing. The first two tiles fetch half of it
// each where all of it fits into the first-level cache, so that the memory works while more than one tile is multiplied.
template <typename T, typename Use>
INLINE static inline void tiles(const T* a, int64_t a_stride, int64_t rows, const T* const (*b)[4], int64_t quads, int64_t depth,
                                int64_t ahead, const Held& held, Use&& use) {
    const bool halves = rows > TILE_ROWS && depth * static_cast<int64_t>(sizeof(T)) <= NEAR_BYTES;
    int64_t row = 0, first = ahead, last = halves ? 0 : ahead;
    const auto some = [&](auto m) INLINE {
        for (int64_t q = 0; q < quads; q++)
            tile<decltype(m)::value>(a + row * a_stride, a_stride, b[q], depth, first, last, held, row, q, use);
    };
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS, last = halves ? first : 0, first = 0) some(std::integral_constant<int, TILE_ROWS>{});
    switch (rows - row) {
        case 1: some(std::integral_constant<int, 1>{}); break;
        case 2: if constexpr (TILE_ROWS > 2) some(std::integral_constant<int, 2>{}); break;
        case 3: if constexpr (TILE_ROWS > 3) some(std::integral_constant<int, 3>{}); break;
        case 4: if constexpr (TILE_ROWS > 4) some(std::integral_constant<int, 4>{}); break;
        case 5: if constexpr (TILE_ROWS > 5) some(std::integral_constant<int, 5>{}); break;
    }
}

constexpr int64_t CACHED_BYTES = 1 << 19;  // of the second-level cache, for the rows of a that are reused
constexpr int64_t CHUNK = 32;              // rows of b per job, at least

// Elements of a piece of rows of `depth`; the last piece of a row may be shorter.
template <typename T>
static inline int64_t piece_of(int64_t depth) {
    const int64_t most = NEAR_BYTES / static_cast<int64_t>(sizeof(T)), count = (depth + most - 1) / most;
    return count < 2 ? depth : (depth / count + 63) / 64 * 64;
}

// use(row, n, four sums of n to n + 3, how many of them are real) for rows [first, first + count) of a and [begin, end) of b,
// which has `columns`.
template <typename T, typename Use>
static inline void product(const T* a, int64_t first, int64_t count, const T* b, int64_t begin, int64_t end, int64_t columns,
                           int64_t depth, Use&& use) {
    // A single tile uses nothing again, and reads on in memory.
    const int64_t piece = count > TILE_ROWS ? piece_of<T>(depth) : depth;
    Held held;
    if (piece < depth) held.sums = team::scratch<float>(count * Held::ROW);
    for (int64_t n = begin; n < end; n += 4 * QUADS) {
        const int64_t real = std::min(4 * QUADS, end - n), quads = (real + 3) / 4, ahead = n + 8 * QUADS <= columns ? 4 * QUADS * depth : 0;
        for (int64_t k = 0; k < depth; k += piece) {
            const T* rows_of_b[QUADS][4];
            for (int64_t i = 0; i < 4 * quads; i++) rows_of_b[i / 4][i % 4] = b + (n + std::min(i, real - 1)) * depth + k;
            held.earlier = k > 0;
            held.later = k + piece < depth;
            tiles(a + first * depth + k, depth, count, rows_of_b, quads, std::min(piece, depth - k), ahead, held,
                  [&](int64_t row, int64_t q, vec4 v) { use(first + row, n + 4 * q, v, std::min<int64_t>(4, real - 4 * q)); });
        }
    }
}

constexpr int64_t STREAMED_ROWS = 64;        // of a: the memory is waited for, or nearly so
constexpr int64_t STREAMED_BYTES = 1 << 19;  // of b per job, at most
constexpr int64_t STREAMED_JOBS = 4;         // per thread

// Rows of b per job. The memory gives more the longer a thread reads on in one place (10 to 20 % with few rows of a), so jobs
// are as large as leaves each thread the same number of them.
inline int64_t chunk_of(int64_t rows, int64_t columns, int64_t row_bytes, int64_t threads) {
    if (rows > STREAMED_ROWS) return CHUNK;
    const int64_t unit = 4 * QUADS, jobs = threads * STREAMED_JOBS;
    const int64_t even = (columns + jobs - 1) / jobs, most = STREAMED_BYTES / row_bytes;
    return std::max(CHUNK, (std::min(even, most) + unit - 1) / unit * unit);
}

// One job: the rows of a, in parts that stay in the cache.
struct Parts {
    int64_t rows, size, count;

    Parts(int64_t rows, int64_t depth, int64_t bytes)
        : rows(rows), size(std::max<int64_t>(4, CACHED_BYTES / (depth * bytes) / TILE_ROWS) * TILE_ROWS),
          count((rows + size - 1) / size) {}
    int64_t first(int64_t part) const { return part * size; }
    int64_t length(int64_t part) const { return std::min(size, rows - part * size); }
};

// use(row, n, four sums of n to n + 3, how many of them are real)
template <typename T, typename Use>
static void matmul(const T* a, int64_t rows, const T* b, int64_t columns, int64_t depth, const team::Crew& crew, Use&& use) {
    const Parts parts(rows, depth, sizeof(T));
    const int64_t chunk = chunk_of(rows, columns, depth * sizeof(T), crew.threads), chunks = (columns + chunk - 1) / chunk;
    crew.share(parts.count * chunks, [&](int64_t job) {
        const int64_t part = job / chunks, begin = job % chunks * chunk;
        product(a, parts.first(part), parts.length(part), b, begin, std::min(begin + chunk, columns), columns, depth, use);
    });
}

// Matrix products of rows of a and rows of b: out[m][n] = sum over k of a[m][k] * b[n][k].
//
// nn.Linear stores its weight as rows of b, so nothing is packed and a weight update needs no action. Long rows are multiplied
// in pieces along k, so that reused data stays in the first-level cache. The sums of the pieces are added in order of k. This
// order depends on the length of the rows alone, so the bits of a row do not depend on the other rows.

#pragma once

#include <utility>

#include "cpu_lanes.h"
#include "cpu_team.h"

#if WIDE
constexpr int TILE_ROWS = 6;  // 6 x 4 sums, 4 vectors of b and 1 vector of a use 29 of 32 registers
#else
constexpr int TILE_ROWS = 2;  // 2 x 4 sums, 4 vectors of b and 1 vector of a use 13 of 16 registers
#endif

constexpr int64_t NEAR_BYTES = 2048;  // maximum bytes of a row's piece: a tile of a, 8 rows of b and the next 8 rows fit into L1
constexpr int64_t QUADS = 2;          // number of groups of 4 rows of b that stay in L1 together with a tile of a

// GCC keeps an array of sums in registers only if all accesses to it are inlined into one function and have constant indices.
#define INLINE __attribute__((always_inline))

// Calls use(i) for every i of the sequence, as a compile-time constant.
template <typename Use, int... I>
INLINE static inline void each_of(std::integer_sequence<int, I...>, Use&& use) {
    (use(std::integral_constant<int, I>{}), ...);
}

// Keeps a value in a register. Otherwise GCC loads it again for each of its four products, and the loads become the bottleneck.
template <typename V>
static inline void in_register([[maybe_unused]] V& v) {
#if WIDE
    asm("" : "+v"(v));
#elif defined(__AVX__)
    asm("" : "+x"(v));
#endif
}

// Multiplies M rows of a by 4 rows of b over [k, end) and calls use(m, four sums) per row. fetch(k) prefetches at every step.
template <int M, typename T, typename Fetch, typename Use>
INLINE static inline void tile(const T* a, int64_t a_stride, const T* const (&b)[4], int64_t k, int64_t end, Fetch&& fetch, Use&& use) {
    typedef Dot<T> D;
    constexpr std::make_integer_sequence<int, M> ROWS_OF_A;
    constexpr std::make_integer_sequence<int, 4> FOUR;
    vec sum[M][4] = {};
    for (; k + D::STEP <= end; k += D::STEP) {
        typename D::Operand y[4];
        for (int n = 0; n < 4; n++) y[n] = D::take(b[n] + k);
        fetch(k);
        for (int m = 0; m < M; m++) {
            typename D::Operand x = D::take(a + m * a_stride + k);
            in_register(x);
            for (int n = 0; n < 4; n++) sum[m][n] = D::add(sum[m][n], x, y[n]);
        }
    }
    if (k < end) {
        typename D::Operand y[4];
        each_of(FOUR, [&](auto n) INLINE { y[n] = D::take_first(b[n] + k, end - k); });
        each_of(ROWS_OF_A, [&](auto m) INLINE {
            const typename D::Operand x = D::take_first(a + m * a_stride + k, end - k);
            each_of(FOUR, [&](auto n) INLINE { sum[m][n] = D::add(sum[m][n], x, y[n]); });
        });
    }
    each_of(ROWS_OF_A, [&](auto m) INLINE { use(m, sums(sum[m][0], sum[m][1], sum[m][2], sum[m][3])); });
}

// Calls use(rows) with the rows of the last tile, 1 to TILE_ROWS, as a compile-time constant. Does nothing for 0 rows.
template <typename Use>
INLINE static inline void last_tile(int64_t rows, Use&& use) {
    switch (rows) {
        case 1: use(std::integral_constant<int, 1>{}); break;
        case 2: use(std::integral_constant<int, 2>{}); break;
        case 3: if constexpr (TILE_ROWS > 2) use(std::integral_constant<int, 3>{}); break;
        case 4: if constexpr (TILE_ROWS > 3) use(std::integral_constant<int, 4>{}); break;
        case 5: if constexpr (TILE_ROWS > 4) use(std::integral_constant<int, 5>{}); break;
        case 6: if constexpr (TILE_ROWS > 5) use(std::integral_constant<int, 6>{}); break;
    }
}

// The rows of b that are multiplied next and should be prefetched.
template <typename T>
struct Next {
    const T* from;
    int64_t stride, rows;
};

// Multiplies `rows` rows of a by QUADS groups of 4 rows of b; calls use(row, quad, four sums). A tile of a is used for all quads
// while it is cached. Every tile fetches one row of `next`, or two if there are few tiles, so that memory is never idle.
template <typename T, typename Use>
INLINE static inline void tiles(const T* a, int64_t a_stride, int64_t rows, const T* const (*b)[4], int64_t depth, Next<T> next, Use&& use) {
    const int64_t each = (rows + TILE_ROWS - 1) / TILE_ROWS * QUADS < next.rows ? 2 : 1;
    int64_t row = 0;
    const auto some = [&](auto m) INLINE {
        for (int64_t q = 0; q < QUADS; q++) {
            const int64_t fetched = std::min(next.rows, each);
            // Prefetches something in any case: with a branch, GCC compiles several loops and moves sums between registers.
            const T *one = fetched > 0 ? next.from : a, *two = fetched > 1 ? next.from + next.stride : a;
            const auto fetch = [&](int64_t k) INLINE {
                __builtin_prefetch(one + k);
                __builtin_prefetch(two + k);
            };
            tile<decltype(m)::value>(a + row * a_stride, a_stride, b[q], 0, depth, fetch, [&](int64_t i, vec4 v) INLINE { use(row + i, q, v); });
            next.from += fetched * next.stride;
            next.rows -= fetched;
        }
    };
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS) some(std::integral_constant<int, TILE_ROWS>{});
    last_tile(rows - row, some);
}

constexpr int64_t CACHED_BYTES = 1 << 19;  // bytes of the second-level cache for the rows of a that are reused
constexpr int64_t STREAMED_ROWS = 64;      // maximum rows of a for which the speed is limited by reading b from memory
constexpr int64_t CHUNK = 32;              // minimum number of rows of b per job

// Returns the number of elements per piece of a row of `depth` elements. The last piece may be shorter.
template <typename T>
static inline int64_t piece_of(int64_t depth) {
    const int64_t most = NEAR_BYTES / static_cast<int64_t>(sizeof(T)), count = (depth + most - 1) / most;
    return count < 2 ? depth : (depth / count + 63) / 64 * 64;
}

// Like `tiles`, for one piece of long rows: stores the sums in out [rows][QUADS], or adds them to it. Compiled once per type.
template <typename T>
__attribute__((noinline)) static void piece_tiles(const T* a, int64_t a_stride, int64_t rows, const T* const (*b)[4], int64_t depth,
                                                  const Next<T>& next, vec4* out, bool add) {
    tiles(a, a_stride, rows, b, depth, next, [&](int64_t row, int64_t q, vec4 v) INLINE {
        vec4& sum = out[row * QUADS + q];
        sum = add ? sum + v : v;
    });
}

// Multiplies a single tile of a by rows [begin, end) of b. No row of b is reused, so b is read once, in memory order.
template <typename T, typename Use>
static inline void narrow_product(const T* a, int64_t rows, const T* b, int64_t begin, int64_t end, int64_t columns, int64_t depth, Use&& use) {
    const int64_t piece = piece_of<T>(depth);
    last_tile(rows, [&](auto count) INLINE {
        constexpr int M = decltype(count)::value;
        for (int64_t n = begin; n < end; n += 4) {
            const int64_t real = std::min<int64_t>(4, end - n), ahead = n + 12 <= columns ? 8 * depth : 0;
            const T* four[4];
            for (int64_t i = 0; i < 4; i++) four[i] = b + (n + std::min(i, real - 1)) * depth;
            const auto fetch = [&](int64_t k) INLINE {
                if (ahead)
                    for (int i = 0; i < 4; i++) __builtin_prefetch(four[i] + k + ahead);
            };
            vec4 total[M];
            for (int64_t k = 0; k < depth; k += piece)
                tile<M>(a, depth, four, k, std::min(depth, k + piece), fetch,
                        [&](int64_t m, vec4 v) INLINE { total[m] = k > 0 ? total[m] + v : v; });
            for (int m = 0; m < M; m++) use(m, n, total[m], real);
        }
    });
}

// Multiplies rows [first, first + count) of a by rows [begin, end) of b, which has `columns` rows. Calls
// use(row, n, four sums for rows n to n + 3 of b, how many of these rows exist).
template <typename T, typename Use>
static inline void product(const T* a, int64_t first, int64_t count, const T* b, int64_t begin, int64_t end, int64_t columns,
                           int64_t depth, Use&& use) {
    constexpr int64_t WIDTH = 4 * QUADS;
    const auto narrow = [&](int64_t row, int64_t rows, int64_t from) {
        narrow_product(a + (first + row) * depth, rows, b, from, end, columns, depth,
                       [&](int64_t i, int64_t n, vec4 v, int64_t real) { use(first + row + i, n, v, real); });
    };
    if (count <= TILE_ROWS) return narrow(0, count, begin);
    const int64_t piece = piece_of<T>(depth);
    // Copies of one piece of WIDTH rows of b, and the sums per row and quad. Rows whose distance is a power of two evict each
    // other from the cache; adjacent copies do not.
    const bool whole = piece >= depth;
    T* copies = whole ? nullptr : reinterpret_cast<T*>(team::scratch<float>((NEAR_BYTES / 4 + count) * WIDTH));
    vec4* out = reinterpret_cast<vec4*>(reinterpret_cast<char*>(copies) + WIDTH * NEAR_BYTES);
    // Whether to fetch the next job but one after the last rows of a job, because another thread has probably taken the next job.
    // With few rows of a, memory is the bottleneck, and reading on in order is faster.
    const bool jumps = whole && count >= STREAMED_ROWS;
    int64_t n = begin;
    for (; n + WIDTH <= end; n += WIDTH) {
        const int64_t after = jumps && n + 2 * WIDTH > end ? 2 * end - begin : n + WIDTH;
        // All 4 rows exist. This is a constant, so that stores need no branch.
        const auto done = [&](int64_t row, int64_t q, vec4 v) INLINE { use(first + row, n + 4 * q, v, 4); };
        for (int64_t k = 0; k < depth; k += piece) {
            const int64_t deep = std::min(piece, depth - k);
            const T* quad[QUADS][4];
            for (int64_t i = 0; i < WIDTH; i++) {
                const T* row = b + (n + i) * depth + k;
                quad[i / 4][i % 4] = whole ? row : static_cast<const T*>(std::memcpy(copies + i * piece, row, deep * sizeof(T)));
            }
            const Next<T> next = k + piece < depth
                ? Next<T>{b + n * depth + k + piece, depth, WIDTH}
                : Next<T>{b + after * depth, depth, std::clamp<int64_t>(columns - after, 0, WIDTH)};
            if (whole) tiles(a + first * depth, depth, count, quad, depth, next, done);
            else piece_tiles(a + first * depth + k, depth, count, quad, deep, next, out, k > 0);
        }
        for (int64_t row = 0; row < count && !whole; row++)
            for (int64_t q = 0; q < QUADS; q++) done(row, q, out[row * QUADS + q]);
    }
    for (int64_t row = 0; row < count && n < end; row += TILE_ROWS) narrow(row, std::min<int64_t>(TILE_ROWS, count - row), n);
}

constexpr int64_t STREAMED_BYTES = 1 << 19;  // maximum bytes of b per job
constexpr int64_t STREAMED_JOBS = 4;         // jobs per thread

// Divides the rows of a into equal parts that stay in the cache. A job multiplies one part.
struct Parts {
    int64_t rows, count, size;

    Parts(int64_t rows, int64_t depth, int64_t bytes) : rows(rows) {
        const int64_t most = std::max<int64_t>(4, CACHED_BYTES / (depth * bytes) / TILE_ROWS) * TILE_ROWS;
        count = (rows + most - 1) / most;
        size = count < 2 ? rows : ((rows + count - 1) / count + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    }
    int64_t first(int64_t part) const { return part * size; }
    int64_t length(int64_t part) const { return std::min(size, rows - part * size); }
};

// Returns the number of rows of b per job. Longer contiguous reads are faster (10 to 20 % with few rows of a), and the first rows
// of a job are often not prefetched, so each thread gets only STREAMED_JOBS large jobs, or more if these would be too large.
inline int64_t chunk_of(const Parts& parts, int64_t columns, int64_t row_bytes, int64_t threads) {
    const int64_t unit = 4 * QUADS, jobs = threads * STREAMED_JOBS;
    const int64_t even = (columns * parts.count + jobs - 1) / jobs;
    const int64_t most = parts.rows > STREAMED_ROWS ? 4 * CHUNK : STREAMED_BYTES / row_bytes;
    return std::max(CHUNK, (std::min(even, most) + unit - 1) / unit * unit);
}

// Multiplies all rows of a by all rows of b, on the threads of the crew. Calls `use` like `product`.
template <typename T, typename Use>
static void matmul(const T* a, int64_t rows, const T* b, int64_t columns, int64_t depth, const team::Crew& crew, Use&& use) {
    const Parts parts(rows, depth, sizeof(T));
    const int64_t chunk = chunk_of(parts, columns, depth * sizeof(T), crew.threads), chunks = (columns + chunk - 1) / chunk;
    crew.share(parts.count * chunks, [&](int64_t job) {
        const int64_t part = job / chunks, begin = job % chunks * chunk;
        product(a, parts.first(part), parts.length(part), b, begin, std::min(begin + chunk, columns), columns, depth, use);
    });
}

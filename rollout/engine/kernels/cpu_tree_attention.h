// Attention over a prefix tree, forward and backward, for a trainer's own pass.
//
// Tokens are in depth-first order. Query q attends to key k iff k <= q < ends[k] and, with a window, positions[q] - positions[k]
// < window. Queries and keys are processed in blocks of BLOCK. Pairs of blocks without an attended key are skipped, and pairs in
// which some keys are not attended are masked. The forward stores a log-sum-exp per row, from which the backward recomputes
// the probabilities (arXiv 2205.14135). Sums are float32. Their order depends on the tree alone, not on the threads.

#pragma once

#include <limits>
#include <memory>
#include <vector>

#include "cpu_team.h"
#include "cpu_units.h"

namespace tree {

constexpr int64_t BLOCK = 64;

struct Strided {  // [heads, L, width]; `head` and `row` are strides in elements, and a row is contiguous
    void* at;
    int64_t head, row;
};

struct Attention {  // L tokens, H query heads
    Strided query, key, value, out, out_gradient, query_gradient, key_gradient, value_gradient;  // the last four: backward only
    float* sums;                      // [H, L], log of the sum of exponentials of each row
    const int32_t *ends, *positions;  // [L]; ends[k] is one past the last token that may attend to key k
    int64_t length, heads, kv_heads, head_dim, value_dim;
    int64_t window;                   // a query attends to keys less than `window` positions before it; 0: no limit
    int64_t first;                    // token of row 0 of query, out and their gradients, a multiple of BLOCK
    float scaling, softcap;           // a soft-cap of 0 is not applied
};

// --- products of blocks -----------------------------------------------------------------------------------------------------

// Operands of a product: `a` is stored in rows, `b` in groups of STEP rows with the STEP elements of each column adjacent.
template <typename C>
struct Product : Dot<C> {
    static constexpr int64_t STEP = Dot<C>::UNIT;
    static inline auto take(const C* p) { return Dot<C>::of(load(reinterpret_cast<const float*>(p))); }
};
// Stores two rows of `b`: as float32 [2][width], as bfloat16 [width][2].
static inline void pack(float* p, int64_t width, vec first, vec second) {
    store(p, first);
    store(p + width, second);
}
#if WIDE && defined(__AVX512BF16__)
static inline void pack(bf16* p, int64_t, vec first, vec second) {
    const auto narrow = [](vec v) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)); };
    _mm512_storeu_si512(p, _mm512_or_si512(narrow(first), _mm512_slli_epi32(narrow(second), 16)));
}
#endif

#if WIDE
constexpr int TILE = 4;
#else
constexpr int TILE = 2;
#endif

// out[TILE][V * LANES] = a[TILE][depth] * b[depth][V * LANES], or += with `add`.
template <int V, typename C>
static inline void corner(const C* a, int64_t a_stride, const C* b, int64_t width, int64_t depth, float* out, int64_t out_stride,
                          bool add) {
    typedef Product<C> P;
    vec sum[TILE][V];
    for (int m = 0; m < TILE; m++)
        for (int v = 0; v < V; v++) sum[m][v] = add ? load(out + m * out_stride + v * LANES) : vec{};
    for (int64_t k = 0; k < depth; k += P::STEP) {
        typename P::Operand y[V];
        for (int v = 0; v < V; v++) y[v] = P::take(b + k * width + v * LANES * P::STEP);
        for (int m = 0; m < TILE; m++) {
            const typename P::Operand x = P::spread(a + m * a_stride + k);
            for (int v = 0; v < V; v++) sum[m][v] = P::add(sum[m][v], x, y[v]);
        }
    }
    for (int m = 0; m < TILE; m++)
        for (int v = 0; v < V; v++) store(out + m * out_stride + v * LANES, sum[m][v]);
}

// out[rows][width] = a[rows][depth] * b[depth][width], or += with `add`. rows is a multiple of TILE, width and depth of 16.
template <typename C>
static void gemm(const C* a, int64_t rows, const C* b, int64_t width, int64_t depth, float* out, bool add) {
    for (int64_t n = 0; n < width; n += 4 * LANES) {
        const C* columns = b + n * Product<C>::STEP;
        const auto part = [&](auto tag) {
            for (int64_t m = 0; m < rows; m += TILE)
                corner<decltype(tag)::value>(a + m * depth, depth, columns, width, depth, out + m * width + n, width, add);
        };
        switch (std::min<int64_t>(4, (width - n) / LANES)) {
            case 1: part(std::integral_constant<int, 1>{}); break;
            case 2: part(std::integral_constant<int, 2>{}); break;
            case 3: part(std::integral_constant<int, 3>{}); break;
            case 4: part(std::integral_constant<int, 4>{}); break;
        }
    }
}

// --- blocks of tensors as operands ------------------------------------------------------------------------------------------

static inline int64_t padded(int64_t width) { return (width + 15) / 16 * 16; }

// Copies `rows` rows of a tensor, padded with zeros to BLOCK rows of `wide` columns.
template <typename C, typename T>
static void copy_rows(C* out, const T* in, int64_t stride, int64_t rows, int64_t width, int64_t wide) {
    std::fill(out, out + BLOCK * wide, C{});
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < width; d++) out[r * wide + d] = as<C>(in[r * stride + d]);
}

// Transposes copied rows from [BLOCK][wide] to [wide][BLOCK].
template <typename C>
static void transpose(C* out, const C* rows, int64_t wide) {
    for (int64_t r = 0; r < BLOCK; r += 16)
        for (int64_t d = 0; d < wide; d++)
            for (int64_t i = 0; i < 16; i++) out[d * BLOCK + r + i] = rows[(r + i) * wide + d];
}

// Transposes copied rows to the layout of `b` in a product, [wide / STEP][BLOCK][STEP].
template <typename C>
static void transpose_pairs(C* out, const C* rows, int64_t wide) {
    constexpr int64_t STEP = Product<C>::STEP;
    for (int64_t r = 0; r < BLOCK; r++)
        for (int64_t d = 0; d < wide; d += STEP)
            std::memcpy(out + d * BLOCK + r * STEP, rows + r * wide + d, STEP * sizeof(C));
}

// Converts copied rows to the layout of `b` in a product, [BLOCK / STEP][wide][STEP].
template <typename C>
static void pairs(C* out, const C* rows, int64_t wide) {
    constexpr int64_t STEP = Product<C>::STEP;
    for (int64_t r = 0; r < BLOCK; r += STEP)
        for (int64_t d = 0; d < wide; d++)
            for (int64_t i = 0; i < STEP; i++) out[r * wide + d * STEP + i] = rows[(r + i) * wide + d];
}

// Uninitialised memory for `count` elements, aligned for vectors.
template <typename C>
class Buffer {
  public:
    explicit Buffer(int64_t count) : memory(new char[count * sizeof(C) + 64]) {
        const auto address = reinterpret_cast<uintptr_t>(memory.get());
        start = reinterpret_cast<C*>((address + 63) / 64 * 64);
    }
    C* operator+(int64_t offset) const { return start + offset; }

  private:
    std::unique_ptr<char[]> memory;
    C* start;
};

// --- which blocks attend to each other --------------------------------------------------------------------------------------

struct Pair {
    int64_t query, key;
    bool whole;  // every query attends to every key
};

struct Plan {
    int64_t length, blocks;
    std::vector<int32_t> ends, positions;  // padded to a multiple of BLOCK; no query attends to the padding
    std::vector<std::vector<Pair>> of_query, of_key;

    explicit Plan(const Attention& a) : length(a.length), blocks((a.length + BLOCK - 1) / BLOCK), of_query(blocks), of_key(blocks) {
        ends.assign(blocks * BLOCK, 0);
        positions.assign(blocks * BLOCK, 0);
        std::copy(a.ends, a.ends + length, ends.begin());
        std::copy(a.positions, a.positions + length, positions.begin());
        std::vector<int32_t> end_low(blocks), end_high(blocks), low(blocks), high(blocks);
        for (int64_t b = 0; b < blocks; b++) {
            const auto range = [&](const std::vector<int32_t>& values, int32_t& least, int32_t& most) {
                const auto found = std::minmax_element(values.begin() + b * BLOCK, values.begin() + rows(b) + b * BLOCK);
                least = *found.first;
                most = *found.second;
            };
            range(ends, end_low[b], end_high[b]);
            range(positions, low[b], high[b]);
        }
        for (int64_t q = a.first / BLOCK; q < blocks; q++)
            for (int64_t k = 0; k <= q; k++) {
                if (end_high[k] <= q * BLOCK || (a.window && low[q] - high[k] >= a.window)) continue;
                const bool whole = k < q && end_low[k] >= q * BLOCK + rows(q) && (!a.window || high[q] - low[k] < a.window);
                of_query[q].push_back({q, k, whole});
                of_key[k].push_back({q, k, whole});
            }
    }
    int64_t rows(int64_t block) const { return std::min(BLOCK, length - block * BLOCK); }
};

// Returns the mask of the keys in [key, key + LANES) that `query` attends to.
static inline ivec visible(const Plan& plan, int64_t window, int64_t query, int64_t key) {
    ivec lane, end, position;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    std::memcpy(&end, &plan.ends[key], sizeof(end));
    const int32_t q = static_cast<int32_t>(query);
    ivec seen = (lane + static_cast<int32_t>(key) <= q) & (end > q);
    if (window) {
        std::memcpy(&position, &plan.positions[key], sizeof(position));
        seen &= position > plan.positions[query] - static_cast<int32_t>(window);
    }
    return seen;
}

// --- forward ----------------------------------------------------------------------------------------------------------------

// Scales, soft-caps and masks one row of scores. Returns the largest score.
static inline float shape_scores(const Attention& a, const Plan& plan, const Pair& pair, int64_t row, float* scores) {
    vec top = vec{} - INFINITY;
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        vec x = load(scores + i) * a.scaling;
        if (a.softcap != 0.0f) x = a.softcap * hyperbolic_tangent(x / a.softcap);
        if (!pair.whole) x = visible(plan, a.window, pair.query * BLOCK + row, pair.key * BLOCK + i) ? x : vec{} - INFINITY;
        // A NaN stays in the row and makes the sum of its exponentials NaN, whatever `top` is.
        top = top > x ? top : x;
        store(scores + i, x);
    }
    return largest(top);
}

template <typename T, typename C>
static void forward_block(const Attention& a, const Plan& plan, int64_t head, int64_t block, const C* keys, const C* values) {
    const int64_t D = padded(a.head_dim), V = padded(a.value_dim), rows = plan.rows(block), first = block * BLOCK;
    const Buffer<C> query(BLOCK * D), weights(BLOCK * BLOCK);
    const Buffer<float> scores(BLOCK * BLOCK), mixed(BLOCK * V);
    float peak[BLOCK], total[BLOCK];
    std::fill(peak, peak + BLOCK, -INFINITY);
    std::fill(total, total + BLOCK, 0.0f);
    std::fill(mixed + 0, mixed + BLOCK * V, 0.0f);
    copy_rows(query + 0, static_cast<const T*>(a.query.at) + head * a.query.head + (first - a.first) * a.query.row, a.query.row,
              rows, a.head_dim, D);
    for (const Pair& pair : plan.of_query[block]) {
        gemm(query + 0, BLOCK, keys + pair.key * BLOCK * D, BLOCK, D, scores + 0, false);
        for (int64_t r = 0; r < BLOCK; r++) {
            const float top = shape_scores(a, plan, pair, r, scores + r * BLOCK);
            const float now = peak[r] > top ? peak[r] : top, base = now == -INFINITY ? 0.0f : now;
            vec more = vec{};
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                const vec p = exponential(load(scores + r * BLOCK + i) - base);
                more += p;
                store(weights + r * BLOCK + i, p);
            }
            const float decay = exponential(vec{} + (peak[r] - base))[0];
            total[r] = total[r] * decay + sum(more);
            if (decay != 1.0f)
                for (int64_t d = 0; d < V; d += LANES) store(mixed + r * V + d, load(mixed + r * V + d) * decay);
            peak[r] = now;
        }
        gemm(weights + 0, BLOCK, values + pair.key * BLOCK * V, V, BLOCK, mixed + 0, true);
    }
    for (int64_t r = 0; r < rows; r++) {
        T* out = static_cast<T*>(a.out.at) + head * a.out.head + (first - a.first + r) * a.out.row;
        for (int64_t d = 0; d < a.value_dim; d++) store_one(out + d, (mixed + r * V)[d] / total[r]);
        a.sums[head * a.length + first + r] = peak[r] + std::log(total[r]);
    }
}

template <typename T>
static void forward(const Attention& a, const team::Crew& crew) {
    typedef Multiplied<T> C;
    const Plan plan(a);
    const int64_t D = padded(a.head_dim), V = padded(a.value_dim), size = plan.blocks * BLOCK;
    const Buffer<C> keys(a.kv_heads * size * D), values(a.kv_heads * size * V);
    crew.share(a.kv_heads * plan.blocks, [&](int64_t job) {
        const int64_t head = job / plan.blocks, first = job % plan.blocks * BLOCK, rows = plan.rows(job % plan.blocks);
        const Buffer<C> some(BLOCK * std::max(D, V));
        copy_rows(some + 0, static_cast<const T*>(a.key.at) + head * a.key.head + first * a.key.row, a.key.row, rows, a.head_dim, D);
        transpose_pairs(keys + (head * size + first) * D, some + 0, D);
        copy_rows(some + 0, static_cast<const T*>(a.value.at) + head * a.value.head + first * a.value.row, a.value.row, rows,
                  a.value_dim, V);
        pairs(values + (head * size + first) * V, some + 0, V);
    });
    const int64_t before = a.first / BLOCK, blocks = plan.blocks - before;
    crew.share(a.heads * blocks, [&](int64_t job) {
        const int64_t head = job / blocks, kv_head = head / (a.heads / a.kv_heads);
        forward_block<T, C>(a, plan, head, before + job % blocks, keys + kv_head * size * D, values + kv_head * size * V);
    });
}

// --- backward ---------------------------------------------------------------------------------------------------------------

// Keys and values of all KV heads in the layout of `b`: both of them transposed, and the keys also in rows.
template <typename C>
struct KeyForms {
    Buffer<C> key_columns, value_columns, key_rows;
    KeyForms(int64_t count, int64_t D, int64_t V) : key_columns(count * D), value_columns(count * V), key_rows(count * D) {}
};

// Computes the probabilities and the gradients of the scores for two rows of a pair of blocks, from the scores and from the
// products of out_gradient with the values.
template <typename C>
static inline void two_rows(const Attention& a, const Plan& plan, const Pair& pair, int64_t row, const float* scores,
                            const float* products, const float* sums, const float* deltas, C* weights, C* gradients,
                            C* gradient_rows) {
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        vec p[2], ds[2];
        for (int64_t n = 0; n < 2; n++) {
            const int64_t r = row + n;
            vec x = load(scores + r * BLOCK + i) * a.scaling, slope = vec{} + a.scaling;
            if (a.softcap != 0.0f) {
                const vec t = hyperbolic_tangent(x / a.softcap);
                x = a.softcap * t;
                slope *= 1.0f - t * t;
            }
            p[n] = exponential(x - sums[r]);
            if (!pair.whole) p[n] = visible(plan, a.window, pair.query * BLOCK + r, pair.key * BLOCK + i) ? p[n] : vec{};
            ds[n] = p[n] * (load(products + r * BLOCK + i) - deltas[r]) * slope;
            store(gradient_rows + r * BLOCK + i, ds[n]);
        }
        pack(weights + row * BLOCK + i * Product<C>::STEP, BLOCK, p[0], p[1]);
        pack(gradients + row * BLOCK + i * Product<C>::STEP, BLOCK, ds[0], ds[1]);
    }
}

// Computes the query gradient of one query head, and its parts of the key and value gradients, in transposed blocks.
template <typename T, typename C>
static void backward_head(const Attention& a, const Plan& plan, int64_t head, const C* key_columns, const C* value_columns,
                          const C* key_rows, float* key_part, float* value_part) {
    const int64_t D = padded(a.head_dim), V = padded(a.value_dim), size = plan.blocks * BLOCK;
    const Buffer<C> query(size * D), query_columns(size * D), out(size * V), out_columns(size * V);
    const Buffer<float> sums(size), deltas(size), query_sum(size * D);
    std::fill(query_sum + 0, query_sum + size * D, 0.0f);
    std::fill(sums + 0, sums + size, INFINITY);
    std::fill(deltas + 0, deltas + size, 0.0f);
    std::copy(a.sums + head * a.length, a.sums + (head + 1) * a.length, sums + 0);
    for (int64_t first = a.first, b = first / BLOCK; b < plan.blocks; b++, first += BLOCK) {
        const int64_t row = first - a.first;
        const T* gradient = static_cast<const T*>(a.out_gradient.at) + head * a.out_gradient.head + row * a.out_gradient.row;
        const T* given = static_cast<const T*>(a.out.at) + head * a.out.head + row * a.out.row;
        copy_rows(query + first * D, static_cast<const T*>(a.query.at) + head * a.query.head + row * a.query.row, a.query.row,
                  plan.rows(b), a.head_dim, D);
        transpose(query_columns + first * D, query + first * D, D);
        copy_rows(out + first * V, gradient, a.out_gradient.row, plan.rows(b), a.value_dim, V);
        transpose(out_columns + first * V, out + first * V, V);
        for (int64_t r = 0; r < plan.rows(b); r++) {
            float delta = 0.0f;
            for (int64_t d = 0; d < a.value_dim; d++)
                delta += load_one(gradient + r * a.out_gradient.row + d) * load_one(given + r * a.out.row + d);
            *(deltas + (first + r)) = delta;
        }
    }
    const Buffer<float> scores(BLOCK * BLOCK), products(BLOCK * BLOCK);
    const Buffer<C> weights(BLOCK * BLOCK), gradients(BLOCK * BLOCK), gradient_rows(BLOCK * BLOCK);
    for (int64_t k = 0; k < plan.blocks; k++) {
        const int64_t keys = k * BLOCK;
        std::fill(key_part + keys * D, key_part + (keys + BLOCK) * D, 0.0f);
        std::fill(value_part + keys * V, value_part + (keys + BLOCK) * V, 0.0f);
        for (const Pair& pair : plan.of_key[k]) {
            const int64_t first = pair.query * BLOCK;
            gemm(query + first * D, BLOCK, key_columns + keys * D, BLOCK, D, scores + 0, false);
            gemm(out + first * V, BLOCK, value_columns + keys * V, BLOCK, V, products + 0, false);
            for (int64_t row = 0; row < BLOCK; row += 2)
                two_rows(a, plan, pair, row, scores + 0, products + 0, sums + first, deltas + first, weights + 0, gradients + 0,
                         gradient_rows + 0);
            gemm(out_columns + first * V, V, weights + 0, BLOCK, BLOCK, value_part + keys * V, true);
            gemm(query_columns + first * D, D, gradients + 0, BLOCK, BLOCK, key_part + keys * D, true);
            gemm(gradient_rows + 0, BLOCK, key_rows + keys * D, D, BLOCK, query_sum + first * D, true);
        }
    }
    for (int64_t r = a.first; r < a.length; r++) {
        T* to = static_cast<T*>(a.query_gradient.at) + head * a.query_gradient.head + (r - a.first) * a.query_gradient.row;
        for (int64_t d = 0; d < a.head_dim; d++) store_one(to + d, (query_sum + r * D)[d]);
    }
}

// Adds up the parts of one block from a group's query heads: [wide][BLOCK] each, with `apart` elements from one to the next.
template <typename T>
static void add_parts(const Strided& to, int64_t kv_head, int64_t first, int64_t rows, int64_t width, int64_t wide,
                      const float* parts, int64_t group, int64_t apart) {
    const Buffer<float> sum(BLOCK * wide);
    std::copy(parts, parts + BLOCK * wide, sum + 0);
    for (int64_t g = 1; g < group; g++)
        for (int64_t i = 0; i < BLOCK * wide; i++) (sum + 0)[i] += parts[g * apart + i];
    for (int64_t r = 0; r < rows; r++) {
        T* row = static_cast<T*>(to.at) + kv_head * to.head + (first + r) * to.row;
        for (int64_t d = 0; d < width; d++) store_one(row + d, (sum + d * BLOCK)[r]);
    }
}

template <typename T>
static void backward(const Attention& a, const team::Crew& crew) {
    typedef Multiplied<T> C;
    const Plan plan(a);
    const int64_t D = padded(a.head_dim), V = padded(a.value_dim), size = plan.blocks * BLOCK, group = a.heads / a.kv_heads;
    const KeyForms<C> forms(a.kv_heads * size, D, V);
    crew.share(a.kv_heads * plan.blocks, [&](int64_t job) {
        const int64_t head = job / plan.blocks, first = job % plan.blocks * BLOCK, rows = plan.rows(job % plan.blocks);
        const int64_t at = head * size + first;
        const Buffer<C> some(BLOCK * std::max(D, V));
        copy_rows(some + 0, static_cast<const T*>(a.key.at) + head * a.key.head + first * a.key.row, a.key.row, rows, a.head_dim, D);
        transpose_pairs(forms.key_columns + at * D, some + 0, D);
        pairs(forms.key_rows + at * D, some + 0, D);
        copy_rows(some + 0, static_cast<const T*>(a.value.at) + head * a.value.head + first * a.value.row, a.value.row, rows,
                  a.value_dim, V);
        transpose_pairs(forms.value_columns + at * V, some + 0, V);
    });
    const Buffer<float> key_parts(a.heads * size * D), value_parts(a.heads * size * V);
    crew.share(a.heads, [&](int64_t head) {
        const int64_t at = head / group * size;
        backward_head<T, C>(a, plan, head, forms.key_columns + at * D, forms.value_columns + at * V, forms.key_rows + at * D,
                            key_parts + head * size * D, value_parts + head * size * V);
    });
    crew.share(a.kv_heads * plan.blocks, [&](int64_t job) {
        const int64_t head = job / plan.blocks, first = job % plan.blocks * BLOCK, rows = plan.rows(job % plan.blocks);
        add_parts<T>(a.key_gradient, head, first, rows, a.head_dim, D, key_parts + (head * group * size + first) * D, group, size * D);
        add_parts<T>(a.value_gradient, head, first, rows, a.value_dim, V, value_parts + (head * group * size + first) * V, group,
                     size * V);
    });
}

}  // namespace tree

// Gated delta rule: linear attention whose state is a matrix S per head (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.
//
// Query q and key k have unit length, and q is divided by sqrt(key_dim). With value v, decay a and step b, a token computes
//     S = a S;   d = b (v - S^T k);   S = S + k d^T;   out = S^T q
// in float32, token by token, even for prompts. The chunked form (arXiv 2406.06484; transformers' torch_chunk_gated_delta_rule)
// needs more multiplications, and its bits depend on where a prompt was cut. The columns of S are independent, so a few of them
// at a time stay in the first-level cache. One pass over them updates S with one token and reads it for the next token.

#pragma once

#include <vector>

#include "cpu_linear.h"
#include "cpu_rows.h"

struct DeltaNet {
    Linear qkv, z, b, a;       // if `interleaved`, qkv also contains z, and b also contains a, key head by key head
    const void* convolution;   // [channels, kernel]
    const void *a_log, *bias;  // [value_heads]: decay = exp(-exp(a_log) * softplus(a + bias))
    const void* norm;          // [value_dim]
    void* inputs;              // [slots, kernel, channels], the last `kernel` inputs of the convolution
    float* states;             // [slots, value_heads, key_dim, value_dim]
    int64_t inputs_stride, states_stride;  // elements from one slot to the next
    int64_t key_heads, value_heads, key_dim, value_dim, kernel;  // value_heads 0: the layer has no delta rule
    int64_t interleaved;

    int64_t keys() const { return key_heads * key_dim; }
    int64_t values() const { return value_heads * value_dim; }
    int64_t channels() const { return 2 * keys() + values(); }                // queries, keys, values
    int64_t width() const { return channels() + values() + 2 * value_heads; }  // plus z, b, a
};

// The sequences of a step.
struct Sequences {
    const int64_t *offsets, *states;  // [count + 1], index of each one's first position; [count], state slots
    int64_t count;
};

// Columns [begin, end) of a projection (0 qkv, 1 z, 2 b, 3 a), and their offset `target` in the row of a position.
struct Columns {
    int64_t linear, begin, end, target;
};

// Divides the projections of a layer into pieces of at most `most` columns.
static std::vector<Columns> columns_of(const DeltaNet& d, int64_t most) {
    std::vector<Columns> found;
    int64_t read[4] = {};
    const auto take = [&](int64_t linear, int64_t count, int64_t target) {
        for (int64_t at = 0; at < count; at += most) {
            const int64_t begin = read[linear] + at;
            found.push_back({linear, begin, begin + std::min(most, count - at), target + at});
        }
        read[linear] += count;
    };
    const int64_t z = d.channels(), b = z + d.values(), a = b + d.value_heads;
    if (!d.interleaved) {
        take(0, d.channels(), 0);
        take(1, d.values(), z);
        take(2, d.value_heads, b);
        take(3, d.value_heads, a);
        return found;
    }
    const int64_t heads = d.value_heads / d.key_heads, values = heads * d.value_dim;
    for (int64_t head = 0; head < d.key_heads; head++) {
        take(0, d.key_dim, head * d.key_dim);
        take(0, d.key_dim, d.keys() + head * d.key_dim);
        take(0, values, 2 * d.keys() + head * values);
        take(0, values, z + head * values);
        take(2, heads, b + head * heads);
        take(2, heads, a + head * heads);
    }
    return found;
}

constexpr int64_t MOST_TAPS = 8;   // maximum kernel size of a convolution
constexpr int64_t CHANNELS = 64;   // channels per job

// Applies a causal convolution over the last `kernel` positions, then SiLU, in place to the first channels() of each row.
template <typename T>
static void convolve(const DeltaNet& d, const Sequences& all, T* rows, const team::Crew& crew) {
    const int64_t channels = d.channels(), width = d.width(), taps = d.kernel;
    crew.share((channels + CHANNELS - 1) / CHANNELS, [&](int64_t job) {
        const int64_t begin = job * CHANNELS, count = std::min(CHANNELS, channels - begin);
        float weight[MOST_TAPS][CHANNELS] = {};
        T before[MOST_TAPS][CHANNELS] = {};
        for (int64_t c = 0; c < count; c++)
            for (int64_t k = 0; k < taps; k++) weight[k][c] = load_one(static_cast<const T*>(d.convolution) + (begin + c) * taps + k);
        for (int64_t s = 0; s < all.count; s++) {
            const int64_t length = all.offsets[s + 1] - all.offsets[s];
            T* x = rows + all.offsets[s] * width + begin;
            T* state = static_cast<T*>(d.inputs) + all.states[s] * d.inputs_stride + begin;
            const auto input = [&](int64_t t) { return t < 0 ? before[taps + t] : x + t * width; };
            const auto copy = [&](T* to, const T* from) {
                if (count == CHANNELS) std::memcpy(to, from, CHANNELS * sizeof(T));  // a constant size compiles without a call
                else std::memcpy(to, from, count * sizeof(T));
            };
            for (int64_t k = 0; k < taps; k++) copy(before[k], state + k * channels);
            for (int64_t k = 0; k < taps; k++) copy(state + k * channels, input(length - taps + k));
            // Runs from the last position to the first, because each output overwrites an input of the later positions.
            for (int64_t t = length - 1; t >= 0; t--) {
                for (int64_t c = 0; c < count; c += LANES) {
                    const int64_t real = std::min<int64_t>(LANES, count - c);
                    vec sum = vec{};
                    for (int64_t k = 0; k < taps; k++) {
                        const T* in = input(t - taps + 1 + k) + c;
                        sum += load(weight[k] + c) * (real == LANES ? load(in) : load_first(in, real));
                    }
                    if (real == LANES) store(x + t * width + c, sum);
                    else store_first(x + t * width + c, sum, real);
                }
                activate<T>(x + t * width, nullptr, count);
            }
        }
    });
}

constexpr int64_t STRIPE = 2 * LANES;  // columns of a state that are processed together
constexpr int64_t TOKENS = 64;         // tokens whose queries and keys are prepared together

// x · y
template <typename T>
static float dot(const T* x, const T* y, int64_t size) {
    vec total = vec{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) total += load(x + i) * load(y + i);
    if (i < size) total += load_first(x + i, size - i) * load_first(y + i, size - i);
    return sum(total);
}

// out = x * factor / sqrt(x · x + 1e-6)
template <typename T>
static void unit_length(const T* x, float* out, int64_t size, float factor) {
    const float scale = 1.0f / std::sqrt(dot(x, x, size) + 1e-6f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(out + i, load(x + i) * scale * factor);
    for (; i < size; i++) out[i] = load_one(x + i) * scale * factor;
}

// Rows of STRIPE columns of a state, `stride` elements apart.
struct Stripe {
    float* rows;
    int64_t stride;
};

// One pass over a stripe of `depth` rows: to = decay * from + before d^T, by_key = to^T key, by_query = to^T query. Even and odd
// rows are summed separately, so that the additions do not wait for each other.
static inline void pass(const Stripe& from, const Stripe& to, int64_t depth, float decay, const float* before, const vec (&d)[2],
                        const float* key, const float* query, vec (&by_key)[2], vec (&by_query)[2]) {
    vec sums[2][4] = {};
    for (int64_t row = 0; row < depth; row += 2)
        for (int64_t odd = 0; odd < 2; odd++)
            for (int64_t j = 0; j < 2; j++) {
                const int64_t n = row + odd;
                const vec s = load(from.rows + n * from.stride + j * LANES) * decay + d[j] * before[n];
                store(to.rows + n * to.stride + j * LANES, s);
                sums[odd][j] += s * key[n];
                sums[odd][2 + j] += s * query[n];
            }
    for (int64_t j = 0; j < 2; j++) {
        by_key[j] = sums[0][j] + sums[1][j];
        by_query[j] = sums[0][2 + j] + sums[1][2 + j];
    }
}

// Up to TOKENS positions of one value head.
struct Run {
    float *query, *key, *nothing, *stripe;  // [TOKENS, key_dim] each for query and key, [key_dim] zeros, [key_dim, STRIPE]
    float decay[TOKENS], step[TOKENS], both[TOKENS];

    Run(const DeltaNet& d, float* scratch)
        : query(scratch), key(query + TOKENS * d.key_dim), nothing(key + TOKENS * d.key_dim), stripe(nothing + d.key_dim) {
        std::fill(nothing, nothing + d.key_dim, 0.0f);
    }
    static int64_t floats(const DeltaNet& d) { return (2 * TOKENS + 1 + STRIPE) * d.key_dim; }

    template <typename T>
    void prepare(const DeltaNet& d, const T* rows, int64_t count, int64_t head) {
        const int64_t at = head / (d.value_heads / d.key_heads) * d.key_dim, b = d.channels() + d.values() + head;
        const float rate = std::exp(load_one(static_cast<const T*>(d.a_log) + head));
        const float bias = load_one(static_cast<const T*>(d.bias) + head), size = std::sqrt(static_cast<float>(d.key_dim));
        for (int64_t i = 0; i < count; i++) {
            const T* row = rows + i * d.width();
            float *q = query + i * d.key_dim, *k = key + i * d.key_dim;
            unit_length(row + at, q, d.key_dim, 1.0f / size);
            unit_length(row + d.keys() + at, k, d.key_dim, 1.0f);
            both[i] = dot(q, k, d.key_dim);
            const float x = load_one(row + b + d.value_heads) + bias;
            decay[i] = std::exp(-rate * (x > 20.0f ? x : std::log1p(std::exp(x))));
            step[i] = rounded<T>(1.0f / (1.0f + std::exp(-load_one(row + b))));
        }
    }

    // Computes columns [column, column + STRIPE) of the state and of the outputs.
    template <typename T>
    void stripe_of(const DeltaNet& d, const T* rows, int64_t count, int64_t head, int64_t column, float* state, T* out) {
        const int64_t real = std::min(STRIPE, d.value_dim - column), depth = d.key_dim;
        const int64_t lanes[2] = {std::min<int64_t>(LANES, real), real - std::min<int64_t>(LANES, real)};
        const Stripe near{stripe, STRIPE}, whole{state + column, d.value_dim}, kept = real == STRIPE ? whole : near;
        // A partial stripe is copied and padded with zeros.
        for (int64_t row = 0; row < depth && real < STRIPE; row++) {
            std::copy(whole.rows + row * d.value_dim, whole.rows + row * d.value_dim + real, stripe + row * STRIPE);
            std::fill(stripe + row * STRIPE + real, stripe + (row + 1) * STRIPE, 0.0f);
        }
        vec difference[2] = {}, by_key[2], by_query[2];
        float last = 1.0f;
        const float* before = nothing;
        for (int64_t i = 0; i < count; i++) {
            const float* k = key + i * depth;
            pass(i ? near : kept, near, depth, last, before, difference, k, query + i * depth, by_key, by_query);
            const T* value = rows + i * d.width() + 2 * d.keys() + head * d.value_dim + column;
            for (int64_t j = 0; j < 2; j++) {
                if (!lanes[j]) continue;
                difference[j] = step[i] * (load_first(value + j * LANES, lanes[j]) - decay[i] * by_key[j]);
                store_first(out + i * d.values() + column + j * LANES, decay[i] * by_query[j] + both[i] * difference[j], lanes[j]);
            }
            last = decay[i];
            before = k;
        }
        // Runs the same code as for the tokens above, so that a state does not depend on how many tokens are computed together.
        pass(near, kept, depth, last, before, difference, nothing, nothing, by_key, by_query);
        for (int64_t row = 0; row < depth && real < STRIPE; row++)
            std::copy(stripe + row * STRIPE, stripe + row * STRIPE + real, whole.rows + row * d.value_dim);
    }
};

// out = norm(out) * silu(z) for `width` elements, rounded where transformers' RMSNormGated rounds.
template <typename T>
static void gated_norm(const T* z, const void* weight, T* out, int64_t width, float epsilon) {
    const T* w = static_cast<const T*>(weight);
    const float scale = inverse_rms(out, width, epsilon);
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t real = std::min<int64_t>(LANES, width - i);
        const vec gate = load_first(z + i, real);
        const vec normed = rounded<T>(load_first(w + i, real) * rounded<T>(load_first(out + i, real) * scale));
        store_first(out + i, normed * (gate / (1.0f + exponential(-gate))), real);
    }
}

// Runs the recurrence over `rows` [positions, width()] and stores the gated norm of its outputs [positions, values()].
template <typename T>
static void delta_rule(const DeltaNet& d, const Sequences& all, const T* rows, T* out, float epsilon, const team::Crew& crew) {
    crew.share(all.count * d.value_heads, [&](int64_t job) {
        const int64_t s = job / d.value_heads, head = job % d.value_heads;
        float* state = d.states + all.states[s] * d.states_stride + head * d.key_dim * d.value_dim;
        Run run(d, team::scratch<float>(Run::floats(d)));
        for (int64_t first = all.offsets[s]; first < all.offsets[s + 1]; first += TOKENS) {
            const int64_t count = std::min(TOKENS, all.offsets[s + 1] - first);
            const T* from = rows + first * d.width();
            T* to = out + first * d.values() + head * d.value_dim;
            run.prepare(d, from, count, head);
            for (int64_t column = 0; column < d.value_dim; column += STRIPE) run.stripe_of(d, from, count, head, column, state, to);
            for (int64_t i = 0; i < count; i++)
                gated_norm(from + i * d.width() + d.channels() + head * d.value_dim, d.norm, to + i * d.values(), d.value_dim, epsilon);
        }
    });
}

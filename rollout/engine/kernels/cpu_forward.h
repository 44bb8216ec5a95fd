// The forward of a decoder, with the parameters of the PyTorch module itself. The fields of `Layer` select its operations.
//
// Activations have the type of the parameters and are rounded where the module rounds them, so log-probs match the trainer's.

#pragma once

#include <atomic>
#include <initializer_list>
#include <vector>

#include "cpu_attention.h"
#include "cpu_delta.h"
#include "cpu_experts.h"
#include "cpu_linear.h"
#include "cpu_rows.h"

struct Norm {
    const void *weight, *bias;  // null weight: no norm
};

struct Layer {  // P positions, R sequences, H query heads, Hkv KV heads, D = head_dim
    Norm before_attention, after_attention, before_mlp, after_mlp;
    Norm query_norm, key_norm;
    Linear query, key, value, output, gate, up, down;  // without `gate`, the MLP is down(activation(up(x)))
    Experts experts;
    Linear shared_gate;            // gate of the shared expert, an MLP that all positions use; null weight: no shared expert
    DeltaNet delta;                // replaces attention if it has value heads
    void *keys, *values;           // [blocks, block_size, Hkv, D]
    const void *cosines, *sines;   // [positions, rotary_dim]; null: no rotary embedding
    int64_t window;                // number of positions that a query attends to; 0: all
    int64_t inner;                 // width of the MLP
};

enum NormKind : int64_t { RMS, RMS_ROUNDED_ONCE, RMS_OF_ONE_PLUS_WEIGHT, LAYER_NORM };
enum RotaryKind : int64_t { HALVES, PAIRS };

struct Model {
    const Layer* layers;
    const void *embedding, *head;
    const void* positions;  // learned position embeddings, or null
    Norm norm;
    int64_t count, hidden, heads, kv_heads, head_dim, vocabulary;
    int64_t inner;          // maximum number of intermediate elements per position in the MLP of any layer
    int64_t experts, chosen, rank;  // maxima over all layers; 0 if no layer has any
    int64_t norm_kind, norm_whole;  // norm_whole: query and key norms are computed over all heads together
    int64_t gated;          // whether the query projection also computes a gate for the output of each head
    int64_t delta_width, delta_values;  // maximum elements per position of a delta rule's projections and outputs, or 0
    int64_t shared;         // whether there is a shared expert
    int64_t rotary_kind, rotary_dim, rotary_wide;  // rotary_wide: the tables are float32, and a rotation is rounded once
    int64_t activation;
    float epsilon, scaling, embedding_scale, softcap, final_softcap;  // a soft-cap of 0 is not applied
};

struct Step {
    const int64_t *ids, *positions;          // [P]
    const int64_t* slots;                    // [P], slot of each position in the KV cache, block * block_size + offset
    const int64_t* offsets;                  // [R + 1], index of each sequence's first position among the P positions
    const int64_t* tables;                   // [R, width], block ids
    const int64_t* keep;                     // [kept], indices of the positions whose logits are computed
    const int64_t* states;                   // [R], state slots; read only by recurrent layers
    void* logits;                            // [kept, vocabulary]
    void* workspace;
    int64_t* routes;                         // [layers with experts, P * m.chosen], the chosen experts; null: not stored
    void* hidden;                            // [kept, m.hidden], the input of the head; null: not stored
    int64_t count, sequences, width, block_size, kept, threads;
};

// Activations of one step, in the workspace.
template <typename T>
struct Buffers {
    T *x, *h, *projected, *attended, *gate, *up;
    T *shared, *shares;  // [P, hidden], [P]
    char* low;  // first products of up to four adapters, [P, rank] each
    Mixture<T> mixture;
    int64_t bytes = 0;

    Buffers(const Model& m, int64_t count, int64_t kept, void* workspace) {
        const auto bytes_of = [&](int64_t size) {
            char* start = static_cast<char*>(workspace) + bytes;
            bytes += (size + 63) / 64 * 64 + 64;
            return start;
        };
        const auto take = [&](int64_t elements) { return reinterpret_cast<T*>(bytes_of(elements * static_cast<int64_t>(sizeof(T)))); };
        x = take(count * m.hidden);
        h = take(std::max(count, kept) * m.hidden);
        projected = take(count * std::max(((1 + m.gated) * m.heads + 2 * m.kv_heads) * m.head_dim, m.delta_width));
        attended = take(count * std::max(m.heads * m.head_dim, m.delta_values));
        gate = take(count * m.inner);
        up = take(count * m.inner);
        shared = take(m.shared * count * m.hidden);
        shares = take(m.shared * count);
        low = bytes_of(4 * count * m.rank * static_cast<int64_t>(sizeof(float)));
        mixture.scores = take(count * m.experts);
        mixture.gathered = take(count * m.chosen * m.hidden);
        mixture.mixed = take(count * m.chosen * m.hidden);
        mixture.shares = reinterpret_cast<float*>(bytes_of(count * m.chosen * static_cast<int64_t>(sizeof(float))));
        mixture.chosen = reinterpret_cast<int64_t*>(bytes_of(count * m.chosen * static_cast<int64_t>(sizeof(int64_t))));
        mixture.places = reinterpret_cast<int64_t*>(bytes_of(count * m.chosen * static_cast<int64_t>(sizeof(int64_t))));
    }
};

// The parts of a forward. Each part distributes its work over the crew and returns when all of it is done.
template <typename T>
struct Forward {
    const Model& m;
    const Step& s;
    const team::Crew& crew;
    const int64_t P = s.count, D = m.head_dim, H = m.heads, K = m.kv_heads, heads = (1 + m.gated) * H + 2 * K, width = heads * D;
    const Buffers<T> at{m, P, s.kept, s.workspace};

    // Calls use(row) for rows [0, count) of m.hidden elements each.
    template <typename Use>
    void each_row(int64_t count, Use&& use) const {
        rows_of(count, m.hidden, crew, use);
    }

    void embed() const {
        each_row(P, [&](int64_t p) {
            T* to = at.x + p * m.hidden;
            std::memcpy(to, static_cast<const T*>(m.embedding) + s.ids[p] * m.hidden, m.hidden * sizeof(T));
            if (m.embedding_scale != 1.0f) scale(to, m.embedding_scale, m.hidden);
            if (m.positions) add(to, static_cast<const T*>(m.positions) + s.positions[p] * m.hidden, m.hidden);
        });
    }

    void norm_row(const Norm& norm, const T* in, T* out, int64_t width) const {
        switch (m.norm_kind) {
            case RMS: return rms_norm(in, norm.weight, out, width, m.epsilon);
            case RMS_ROUNDED_ONCE: return rms_norm_rounded_once(in, norm.weight, 0.0f, out, width, m.epsilon);
            case RMS_OF_ONE_PLUS_WEIGHT: return rms_norm_rounded_once(in, norm.weight, 1.0f, out, width, m.epsilon);
            case LAYER_NORM: return layer_norm(in, norm.weight, norm.bias, out, width, m.epsilon);
        }
    }

    // Returns the residual stream, normalised if the layer has this norm.
    const T* normed(const Norm& norm) const {
        if (!norm.weight) return at.x;
        each_row(P, [&](int64_t p) { norm_row(norm, at.x + p * m.hidden, at.h + p * m.hidden, m.hidden); });
        return at.h;
    }

    // Computes the first products of the adapters of up to four linear layers that read the same rows.
    void lower(std::initializer_list<const Linear*> layers, const T* in, int64_t depth) const {
        constexpr int64_t SOME = 8;
        if (std::none_of(layers.begin(), layers.end(), [](const Linear* l) { return l->adapter.down; })) return;
        crew.share((P + SOME - 1) / SOME, [&](int64_t job) {
            const int64_t first = job * SOME, count = std::min(SOME, P - first);
            int64_t index = 0;
            for (const Linear* l : layers) {
                if (l->adapter.down) adapter_down(l->adapter, in, first, count, depth, low(index));
                index++;
            }
        });
    }
    void* low(int64_t index) const { return at.low + index * P * m.rank * static_cast<int64_t>(sizeof(float)); }

    // Computes columns [begin, end) of a linear layer for `count` rows. `index` is the layer's index in the call of `lower`.
    void linear(const Linear& l, int64_t index, const T* in, int64_t first, int64_t count, int64_t begin, int64_t end,
                int64_t columns, int64_t depth, T* out, int64_t stride) const {
        linear_part(l, in, first, count, begin, end, columns, depth, out, stride);
        if (!l.adapter.down) return;
        if (l.adapter.wide) adapter_up(l.adapter, static_cast<const float*>(low(index)), first, count, begin, end, columns, out, stride);
        else adapter_up(l.adapter, static_cast<const T*>(low(index)), first, count, begin, end, columns, out, stride);
    }

    // Returns the columns of a linear layer per job. With few rows, reading the weight is the bottleneck, so jobs are larger. In
    // Conv1D's layout the columns of a row are adjacent, so there a job takes a multiple of whole cache lines.
    int64_t columns_per_job(const Linear& l, const Parts& parts, int64_t columns, int64_t depth) const {
        if (!l.stride) return chunk_of(parts, columns, depth * sizeof(T), crew.threads);
        if (P > STREAMED_ROWS) return CHUNK;
        return std::clamp(columns / (STREAMED_JOBS * crew.threads) / CHUNK * CHUNK, CHUNK, 4 * CHUNK);
    }

    // Computes queries, keys, values and gates. The job that computes the last piece of a head normalises, rotates and caches it.
    void project(const Layer& layer, const T* in) const {
        const Parts parts(P, m.hidden, sizeof(T));
        const int64_t most = columns_per_job(layer.query, parts, H * D, m.hidden), pieces = (D + most - 1) / most;
        const int64_t some = (D + pieces * CHUNK - 1) / (pieces * CHUNK) * CHUNK;
        const bool whole = m.norm_whole && layer.query_norm.weight;
        std::vector<std::atomic<int32_t>> missing(pieces > 1 ? parts.count * heads : 0);
        for (auto& each : missing) each.store(static_cast<int32_t>(pieces), std::memory_order_relaxed);
        lower({&layer.query, &layer.key, &layer.value}, in, m.hidden);
        crew.share(parts.count * heads * pieces, [&](int64_t job) {
            const int64_t part = job / pieces / heads, head = job / pieces % heads, piece = job % pieces;
            const int64_t first = parts.first(part), count = parts.length(part);
            const int64_t kind = head < H || head >= H + 2 * K ? 0 : head < H + K ? 1 : 2;
            const Linear& l = kind == 0 ? layer.query : kind == 1 ? layer.key : layer.value;
            // The first column of the head in its projection, in units of D.
            const int64_t own = head < H ? head * (1 + m.gated) : head < H + 2 * K ? (head - H) % K : 2 * (head - H - 2 * K) + 1;
            const int64_t begin = own * D + piece * some, end = own * D + std::min(D, (piece + 1) * some);
            linear(l, kind, in, first, count, begin, end, (kind == 0 ? (1 + m.gated) * H : K) * D, m.hidden,
                   at.projected + (head - own) * D, width);
            if (whole || head >= H + 2 * K) return;
            if (pieces == 1 || missing[part * heads + head].fetch_sub(1) == 1)
                for (int64_t p = first; p < first + count; p++) place(layer, p, head);
        });
        if (!whole) return;
        each_row(P, [&](int64_t p) {
            T* row = at.projected + p * width;
            norm_row(layer.query_norm, row, row, H * D);
            norm_row(layer.key_norm, row + H * D, row + H * D, K * D);
            for (int64_t head = 0; head < H + 2 * K; head++) place(layer, p, head);
        });
    }

    void place(const Layer& layer, int64_t p, int64_t head) const {
        T* one = at.projected + p * width + head * D;
        if (head < H + K) {
            const Norm& norm = head < H ? layer.query_norm : layer.key_norm;
            if (norm.weight && !m.norm_whole) norm_row(norm, one, one, D);
            if (layer.cosines) turn(one, layer.cosines, layer.sines, s.positions[p] * m.rotary_dim);
        }
        if (head < H) return;
        void* cache = head < H + K ? layer.keys : layer.values;
        std::memcpy(static_cast<T*>(cache) + (s.slots[p] * K + (head - H) % K) * D, one, D * sizeof(T));
    }

    void turn(T* one, const void* cosines, const void* sines, int64_t angle) const {
        const auto by = [&](auto type) {
            typedef decltype(type) A;
            const A *cosine = static_cast<const A*>(cosines) + angle, *sine = static_cast<const A*>(sines) + angle;
            if (m.rotary_kind == HALVES) rotate(one, cosine, sine, m.rotary_dim);
            else rotate_pairs(one, cosine, sine, m.rotary_dim);
        };
        if (m.rotary_wide) by(float{});
        else by(T{});
    }

    // gate = activation(gate) * up
    void widen(const Layer& layer, const T* in) const {
        const Parts parts(P, m.hidden, sizeof(T));
        const int64_t some = columns_per_job(layer.up, parts, layer.inner, m.hidden), chunks = (layer.inner + some - 1) / some;
        const bool gated = layer.gate.weight;
        if (gated) lower({&layer.gate, &layer.up}, in, m.hidden);
        else lower({&layer.up}, in, m.hidden);
        crew.share(parts.count * chunks, [&](int64_t job) {
            const int64_t first = parts.first(job / chunks), count = parts.length(job / chunks);
            const int64_t begin = job % chunks * some, end = std::min(begin + some, layer.inner);
            if (gated) linear(layer.gate, 0, in, first, count, begin, end, layer.inner, m.hidden, at.gate, layer.inner);
            linear(layer.up, gated, in, first, count, begin, end, layer.inner, m.hidden, gated ? at.up : at.gate, layer.inner);
            for (int64_t p = first; p < first + count; p++) {
                const T* up = gated ? at.up + p * layer.inner + begin : nullptr;
                activated(m.activation, at.gate + p * layer.inner + begin, up, end - begin);
            }
        });
    }

    // attended *= sigmoid(gate), rounded after both operations
    void gate_outputs() const {
        rows_of(P, H * D, crew, [&](int64_t p) {
            gate_by_sigmoid(at.attended + p * H * D, at.projected + p * width + (H + 2 * K) * D, H * D);
        });
    }

    // Runs the gated delta rule on `in` and writes its outputs to `attended`.
    void recur(const DeltaNet& d, const T* in) const {
        const Parts parts(P, m.hidden, sizeof(T));
        const std::vector<Columns> pieces = columns_of(d, CHUNK);
        const Linear* const layers[4] = {&d.qkv, &d.z, &d.b, &d.a};
        const int64_t both = d.interleaved ? 2 : 1, wide[4] = {d.channels(), d.values(), d.value_heads, d.value_heads};
        const int64_t size = static_cast<int64_t>(pieces.size());
        lower({&d.qkv, &d.z, &d.b, &d.a}, in, m.hidden);
        crew.share(parts.count * size, [&](int64_t job) {
            const Columns& c = pieces[job % size];
            const int64_t columns = both == 1 ? wide[c.linear] : wide[c.linear] + wide[c.linear + 1];
            linear(*layers[c.linear], c.linear, in, parts.first(job / size), parts.length(job / size), c.begin, c.end, columns, m.hidden,
                   at.projected + c.target - c.begin, d.width());
        });
        const Sequences all{s.offsets, s.states, s.sequences};
        convolve(d, all, at.projected, crew);
        delta_rule(d, all, at.projected, at.attended, m.epsilon, crew);
    }

    // out [P, hidden] = l(in)
    void transform(const Linear& l, const T* in, int64_t depth, T* out) const {
        const Parts parts(P, depth, sizeof(T));
        const int64_t some = columns_per_job(l, parts, m.hidden, depth), chunks = (m.hidden + some - 1) / some;
        lower({&l}, in, depth);
        crew.share(parts.count * chunks, [&](int64_t job) {
            const int64_t part = job / chunks, begin = job % chunks * some;
            linear(l, 0, in, parts.first(part), parts.length(part), begin, std::min(begin + some, m.hidden), m.hidden, depth,
                   out, m.hidden);
        });
    }

    // shared = sigmoid(shared_gate(in)) * MLP(in)
    void share_mlp(const Layer& layer, const T* in) const {
        widen(layer, in);
        transform(layer.down, at.gate, layer.inner, at.shared);
        lower({&layer.shared_gate}, in, m.hidden);
        each_row(P, [&](int64_t p) {
            linear(layer.shared_gate, 0, in, p, 1, 0, 1, 1, m.hidden, at.shares, 1);
            scale(at.shared + p * m.hidden, sigmoid<T>(load_one(at.shares + p)), m.hidden);
        });
    }

    // x += norm(l(in)), or x += l(in) without a norm
    void add_to_stream(const Linear& l, const T* in, int64_t depth, const Norm& norm) const {
        if (!norm.weight && !l.adapter.down && !l.stride)
            return linear_into(in, P, depth, l.weight, l.bias, m.hidden, at.x, crew);
        transform(l, in, depth, at.h);
        each_row(P, [&](int64_t p) {
            T* row = at.h + p * m.hidden;
            if (norm.weight) norm_row(norm, row, row, m.hidden);
            add(at.x + p * m.hidden, row, m.hidden);
        });
    }

    void logits() const {
        each_row(s.kept, [&](int64_t p) { norm_row(m.norm, at.x + s.keep[p] * m.hidden, at.h + p * m.hidden, m.hidden); });
        if (s.hidden) std::memcpy(s.hidden, at.h, s.kept * m.hidden * sizeof(T));
        T* out = static_cast<T*>(s.logits);
        matmul(at.h, s.kept, static_cast<const T*>(m.head), m.vocabulary, m.hidden, crew, into(out, m.vocabulary, nullptr));
        if (m.final_softcap != 0.0f)
            rows_of(s.kept, m.vocabulary, crew, [&](int64_t row) { cap(out + row * m.vocabulary, m.final_softcap, m.vocabulary); });
    }

    // x += the output of the layer's attention or recurrence, which reads other positions.
    void mix_tokens(const Layer& layer, const T* in, Attention& a, const std::vector<Task>& tasks) const {
        if (layer.delta.value_heads) {
            recur(layer.delta, in);
            return add_to_stream(layer.output, at.attended, layer.delta.values(), layer.after_attention);
        }
        project(layer, in);
        a.keys = layer.keys;
        a.values = layer.values;
        a.window = layer.window;
        attention<T>(a, tasks, crew);
        if (m.gated) gate_outputs();
        add_to_stream(layer.output, at.attended, H * D, layer.after_attention);
    }

    void run() const {
        Attention a{at.projected, nullptr, nullptr, at.attended, s.offsets, s.positions, s.tables, s.sequences, s.width,
                    s.block_size, H, K, D, D, width, H * D, 0, m.scaling, m.softcap, nullptr, nullptr};
        const std::vector<Task> tasks = plan(a);
        // Layers with a window need a plan of their own, because with a window sequences do not share prefixes.
        for (int64_t i = 0; i < m.count && !a.window; i++) a.window = m.layers[i].window;
        const std::vector<Task> windowed = a.window ? plan(a) : std::vector<Task>();
        embed();
        int64_t* routes = s.routes;
        for (int64_t i = 0; i < m.count; i++) {
            const Layer& layer = m.layers[i];
            mix_tokens(layer, normed(layer.before_attention), a, layer.window ? windowed : tasks);
            const T* in = normed(layer.before_mlp);
            if (layer.experts.router) {
                const bool shared = layer.shared_gate.weight;
                if (shared) share_mlp(layer, in);
                mix(layer.experts, m.activation, in, P, m.hidden, at.mixture, at.gate, at.up, shared ? at.shared : nullptr, at.x, crew);
                if (routes) {
                    std::copy_n(at.mixture.chosen, P * layer.experts.chosen, routes);
                    routes += P * m.chosen;
                }
            } else {
                widen(layer, in);
                add_to_stream(layer.down, at.gate, layer.inner, layer.after_mlp);
            }
        }
        logits();
    }
};

// Entry points for Python: a draw from logits, attention alone (for a model that runs its own forward), attention over a
// prefix tree with its backward (for a trainer's own pass), the whole forward of a Llama-like decoder (Llama, Mistral,
// Qwen2, Qwen3), which reads the module's parameters in place, and its parts.
//
// Activations have the parameters' type and are rounded where the module rounds them, so log-probs equal the trainer's.

#include "cpu_attention.h"
#include "cpu_exact.h"
#include "cpu_rows.h"
#include "cpu_sampling.h"
#include "cpu_tree_attention.h"

struct Layer {
    const void *input_norm, *post_norm, *query, *key, *value, *output, *gate, *up, *down;
    const void *query_bias, *key_bias, *value_bias, *output_bias;  // null: none
    const void *query_norm, *key_norm;                             // null: none
    void *keys, *values;                                           // [blocks, block_size, Hkv, D]
    int64_t window;                                                // 0: none
    int64_t group;                                                 // of layers, whose slots and tables it uses
};

struct Model {
    const Layer* layers;
    const void *embedding, *norm, *head;
    const void *cosines, *sines;  // [positions, D]
    int64_t count, hidden, inner, heads, kv_heads, head_dim, vocabulary;
    float epsilon, scaling;
};

struct Step {
    const int64_t *ids, *positions;          // [P]
    const int64_t* slots;                    // [groups, P], slot mapping of K and V, block * block_size + offset
    const int64_t* offsets;                  // [R + 1]
    const int64_t* tables;                   // [groups, R, width]
    const int64_t* keep;                     // [kept], positions whose logits are wanted
    void* logits;                            // [kept, vocabulary]
    void* workspace;
    int64_t count, sequences, width, block_size, kept, threads;
};

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

// Activations of one step, in the workspace.
template <typename T>
struct Buffers {
    T *x, *h, *projected, *attended, *gate, *up;
    int64_t bytes = 0;

    Buffers(const Model& m, int64_t count, int64_t kept, void* workspace) {
        const auto take = [&](int64_t elements) {
            T* start = reinterpret_cast<T*>(static_cast<char*>(workspace) + bytes);
            bytes += (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64 + 64;
            return start;
        };
        x = take(count * m.hidden);
        h = take(std::max(count, kept) * m.hidden);
        projected = take(count * (m.heads + 2 * m.kv_heads) * m.head_dim);
        attended = take(count * m.heads * m.head_dim);
        gate = take(count * m.inner);
        up = take(count * m.inner);
    }
};

// The parts of a forward: each distributes its work over the crew and returns when all of it is done.
template <typename T>
struct Forward {
    const Model& m;
    const Step& s;
    const team::Crew& crew;
    const int64_t P = s.count, D = m.head_dim, H = m.heads, K = m.kv_heads, width = (H + 2 * K) * D;
    const Buffers<T> at{m, P, s.kept, s.workspace};

    // use(row) for rows [0, count), of m.hidden elements each.
    template <typename Use>
    void each_row(int64_t count, Use&& use) const {
        const int64_t some = std::max<int64_t>(1, GRAIN / m.hidden);
        crew.share((count + some - 1) / some, [&](int64_t job) {
            for (int64_t row = job * some; row < std::min(count, (job + 1) * some); row++) use(row);
        });
    }

    void embed() const {
        each_row(P, [&](int64_t p) {
            std::memcpy(at.x + p * m.hidden, static_cast<const T*>(m.embedding) + s.ids[p] * m.hidden, m.hidden * sizeof(T));
        });
    }

    void norm(const void* weight) const {
        each_row(P, [&](int64_t p) { rms_norm(at.x + p * m.hidden, weight, at.h + p * m.hidden, m.hidden, m.epsilon); });
    }

    // Queries, keys and values; the job that computes the last piece of a head normalises, rotates and caches it.
    void project(const Layer& layer) const {
        const Parts parts(P, m.hidden, sizeof(T));
        const int64_t pieces = (D + CHUNK - 1) / CHUNK;
        std::vector<std::atomic<int32_t>> missing(pieces > 1 ? parts.count * (H + 2 * K) : 0);
        for (auto& each : missing) each.store(static_cast<int32_t>(pieces), std::memory_order_relaxed);
        crew.share(parts.count * (H + 2 * K) * pieces, [&](int64_t job) {
            const int64_t part = job / pieces / (H + 2 * K), head = job / pieces % (H + 2 * K), piece = job % pieces;
            const int64_t first = parts.first(part), count = parts.length(part);
            const int64_t kind = head < H ? 0 : head < H + K ? 1 : 2, start = (kind == 0 ? 0 : kind == 1 ? H : H + K) * D;
            const void* weight[] = {layer.query, layer.key, layer.value};
            const void* bias[] = {layer.query_bias, layer.key_bias, layer.value_bias};
            const int64_t begin = head * D - start + piece * CHUNK, end = head * D - start + std::min(D, (piece + 1) * CHUNK);
            product(at.h, first, count, static_cast<const T*>(weight[kind]), begin, end, (kind == 0 ? H : K) * D, m.hidden,
                    into(at.projected + start, width, bias[kind]));
            if (pieces == 1 || missing[part * (H + 2 * K) + head].fetch_sub(1) == 1)
                for (int64_t p = first; p < first + count; p++) place(layer, p, head);
        });
    }

    void place(const Layer& layer, int64_t p, int64_t head) const {
        T* one = at.projected + p * width + head * D;
        if (head < H + K) {
            const void* weight = head < H ? layer.query_norm : layer.key_norm;
            if (weight) rms_norm(one, weight, one, D, m.epsilon);
            rotate(one, static_cast<const T*>(m.cosines) + s.positions[p] * D, static_cast<const T*>(m.sines) + s.positions[p] * D, D);
        }
        if (head < H) return;
        void* cache = head < H + K ? layer.keys : layer.values;
        std::memcpy(static_cast<T*>(cache) + (s.slots[layer.group * P + p] * K + (head - H) % K) * D, one, D * sizeof(T));
    }

    // gate = silu(gate) * up
    void widen(const Layer& layer) const {
        const Parts parts(P, m.hidden, sizeof(T));
        const int64_t chunks = (m.inner + CHUNK - 1) / CHUNK;
        crew.share(parts.count * chunks, [&](int64_t job) {
            const int64_t first = parts.first(job / chunks), count = parts.length(job / chunks);
            const int64_t begin = job % chunks * CHUNK, end = std::min(begin + CHUNK, m.inner);
            for (auto [weight, out] : {std::pair{layer.gate, at.gate}, std::pair{layer.up, at.up}})
                product(at.h, first, count, static_cast<const T*>(weight), begin, end, m.inner, m.hidden,
                        into(out, m.inner, nullptr));
            for (int64_t p = first; p < first + count; p++)
                activate(at.gate + p * m.inner + begin, at.up + p * m.inner + begin, end - begin);
        });
    }

    void logits() const {
        each_row(s.kept, [&](int64_t p) {
            rms_norm(at.x + s.keep[p] * m.hidden, m.norm, at.h + p * m.hidden, m.hidden, m.epsilon);
        });
        matmul(at.h, s.kept, static_cast<const T*>(m.head), m.vocabulary, m.hidden, crew,
               into(static_cast<T*>(s.logits), m.vocabulary, nullptr));
    }

    void run() const {
        Attention a{at.projected, nullptr, nullptr, at.attended, s.offsets, s.positions, s.tables, s.sequences, s.width,
                    s.block_size, H, K, D, D, width, H * D, 0, 0, m.scaling, 0.0f, nullptr, nullptr};
        const std::vector<Task> tasks = plan(a);
        // With a window, prefixes are not shared.
        for (int64_t i = 0; i < m.count && !a.window; i++) a.window = m.layers[i].window;
        const std::vector<Task> windowed = a.window ? plan(a) : std::vector<Task>();
        embed();
        for (int64_t i = 0; i < m.count; i++) {
            const Layer& layer = m.layers[i];
            norm(layer.input_norm);
            project(layer);
            a.keys = layer.keys;
            a.values = layer.values;
            a.window = layer.window;
            a.tables = s.tables + layer.group * s.sequences * s.width;
            attention<T>(a, layer.window ? windowed : tasks, crew);
            linear_into(at.attended, P, H * D, layer.output, layer.output_bias, m.hidden, at.x, crew);
            norm(layer.post_norm);
            widen(layer);
            linear_into(at.gate, P, m.inner, layer.down, nullptr, m.hidden, at.x, crew);
        }
        logits();
    }
};

extern "C" {

int64_t rollout_workspace_bytes(const Model* m, int64_t count, int64_t kept, int is_bfloat16) {
    return is_bfloat16 ? Buffers<bf16>(*m, count, kept, nullptr).bytes : Buffers<float>(*m, count, kept, nullptr).bytes;
}

void rollout_forward(const Model* m, const Step* s, int is_bfloat16) {
    const team::Crew crew(s->threads);
    if (is_bfloat16) Forward<bf16>{*m, *s, crew}.run();
    else Forward<float>{*m, *s, crew}.run();
}

// Returns the number of tasks.
int64_t rollout_attention(const Attention* a, int64_t threads, int is_bfloat16) {
    const std::vector<Task> tasks = plan(*a);
    const team::Crew crew(threads);
    if (is_bfloat16) attention<bf16>(*a, tasks, crew);
    else attention<float>(*a, tasks, crew);
    return static_cast<int64_t>(tasks.size());
}

void rollout_tree_forward(const tree::Attention* a, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) tree::forward<bf16>(*a, crew);
    else tree::forward<float>(*a, crew);
}

void rollout_tree_backward(const tree::Attention* a, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) tree::backward<bf16>(*a, crew);
    else tree::backward<float>(*a, crew);
}

// Returns the number of kept ids.
int64_t rollout_draw(const Draw* d, int64_t threads, int is_bfloat16) {
    return is_bfloat16 ? draw<bf16>(*d, threads) : draw<float>(*d, threads);
}

void rollout_linear(const Product* p, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) linear<bf16>(*p, crew);
    else linear<float>(*p, crew);
}

void rollout_rms_norm(const RowWise* r, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) norm_rows<bf16>(*r, crew);
    else norm_rows<float>(*r, crew);
}

void rollout_rotate(const RowWise* r, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) rotate_rows<bf16>(*r, crew);
    else rotate_rows<float>(*r, crew);
}

void rollout_activate(const RowWise* r, int64_t threads, int is_bfloat16) {
    const team::Crew crew(threads);
    if (is_bfloat16) activate_rows<bf16>(*r, crew);
    else activate_rows<float>(*r, crew);
}
}

// What Python calls: a draw from logits; attention alone, for a model that runs its own forward, and the whole forward of a Llama-like decoder
// (Llama, Mistral, Qwen2, Qwen3), which reads the module's own parameters where the optimizer left them.
//
// Activations have the parameters' type and are rounded where the module rounds them, so that log-probs are the trainer's.

#include "cpu_attention.h"
#include "cpu_sampling.h"

struct Layer {
    const void *input_norm, *post_norm, *query, *key, *value, *output, *gate, *up, *down;
    const void *query_bias, *key_bias, *value_bias, *output_bias;  // null: none
    const void *query_norm, *key_norm;                             // null: none
    void *keys, *values;                                           // [blocks, block_size, Hkv, D]
    int64_t window;                                                // 0: none
};

struct Model {
    const Layer* layers;
    const void *embedding, *norm, *head;
    const void *cosines, *sines;  // [positions, D]
    int64_t count, hidden, inner, heads, kv_heads, head_dim, vocabulary;
    float epsilon, scaling;
};

struct Step {
    const int64_t *ids, *positions, *slots;  // [P]; slots: where K and V go, block * block_size + offset
    const int64_t* offsets;                  // [R + 1]
    const int64_t* tables;                   // [R, width]
    const int64_t* keep;                     // [kept], positions whose logits are wanted
    void* logits;                            // [kept, vocabulary]
    void* workspace;
    int64_t count, sequences, width, block_size, kept, threads;
};

template <typename T>
static inline void store_four(T* p, vec4 v, int64_t real) {
    for (int64_t i = 0; i < real; i++) store_one(p + i, v[i]);
}

template <typename T>
static void linear(const T* in, int64_t rows, int64_t depth, const void* weight, const void* bias, int64_t columns, T* out,
                   int64_t stride) {
    matmul(in, rows, static_cast<const T*>(weight), columns, depth, [=](int64_t row, int64_t n, vec4 v, int64_t real) {
        if (bias)
            for (int64_t i = 0; i < real; i++) v[i] += load_one(static_cast<const T*>(bias) + n + i);
        store_four(out + row * stride + n, v, real);
    });
}

template <typename T>
static void linear_into(const T* in, int64_t rows, int64_t depth, const void* weight, const void* bias, int64_t columns, T* sum) {
    matmul(in, rows, static_cast<const T*>(weight), columns, depth, [=](int64_t row, int64_t n, vec4 v, int64_t real) {
        T* out = sum + row * columns + n;
        for (int64_t i = 0; i < real; i++) {
            if (bias) v[i] += load_one(static_cast<const T*>(bias) + n + i);
            store_one(out + i, load_one(out + i) + rounded<T>(v[i]));
        }
    });
}

// weight * x / sqrt(mean(x^2) + epsilon), rounded after the division and after the product (arXiv 1910.07467).
template <typename T>
static void rms_norm(const T* x, const void* weight, T* out, int64_t width, float epsilon) {
    const T* w = static_cast<const T*>(weight);
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
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + epsilon);
    for (i = 0; i + LANES <= width; i += LANES) store(out + i, load(w + i) * rounded<T>(load(x + i) * scale));
    for (; i < width; i++) store_one(out + i, load_one(w + i) * rounded<T>(load_one(x + i) * scale));
}

// Rotary embedding with halves side by side (arXiv 2104.09864, in the layout of transformers' `rotate_half`).
template <typename T>
static void rotate(T* x, const T* cosine, const T* sine, int64_t width) {
    const int64_t half = width / 2;
    const auto turn = [](auto a, auto b, auto ca, auto sa, auto cb, auto sb, auto& first, auto& second) {
        first = rounded<T>(a * ca) - rounded<T>(b * sa);
        second = rounded<T>(b * cb) + rounded<T>(a * sb);
    };
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec first, second;
        turn(load(x + i), load(x + half + i), load(cosine + i), load(sine + i), load(cosine + half + i), load(sine + half + i),
             first, second);
        store(x + i, first);
        store(x + half + i, second);
    }
    for (; i < half; i++) {
        float first, second;
        turn(load_one(x + i), load_one(x + half + i), load_one(cosine + i), load_one(sine + i), load_one(cosine + half + i),
             load_one(sine + half + i), first, second);
        store_one(x + i, first);
        store_one(x + half + i, second);
    }
}

// gate = silu(gate) * up
template <typename T>
static void activate(T* gate, const T* up, int64_t width) {
    const auto silu = [](vec x) { return rounded<T>(x / (1.0f + exponential(-x))); };
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(gate + i, silu(load(gate + i)) * load(up + i));
    if (i < width) store_first(gate + i, silu(load_first(gate + i, width - i)) * load_first(up + i, width - i), width - i);
}

struct Buffers {
    int64_t x, h, projected, attended, gate, up, scratch, end;  // offsets, in bytes

    Buffers(const Model& m, int64_t count, int64_t kept, int64_t threads, int64_t size) {
        int64_t at = 0;
        const auto take = [&](int64_t elements, int64_t bytes) {
            const int64_t start = at;
            at += (elements * bytes + 63) / 64 * 64 + 64;
            return start;
        };
        x = take(count * m.hidden, size);
        h = take(std::max(count, kept) * m.hidden, size);
        projected = take(count * (m.heads + 2 * m.kv_heads) * m.head_dim, size);
        attended = take(count * m.heads * m.head_dim, size);
        gate = take(count * m.inner, size);
        up = take(count * m.inner, size);
        Attention a{};
        a.kv_heads = m.kv_heads;
        a.head_dim = a.value_dim = m.head_dim;
        scratch = take(threads * attention_scratch(a), sizeof(float));
        end = at;
    }
};

template <typename T>
static void forward(const Model& m, const Step& s) {
    const int64_t size = sizeof(T), P = s.count, D = m.head_dim, H = m.heads, K = m.kv_heads, width = (H + 2 * K) * D;
    const Buffers at(m, P, s.kept, s.threads, size);
    char* base = static_cast<char*>(s.workspace);
    T *x = reinterpret_cast<T*>(base + at.x), *h = reinterpret_cast<T*>(base + at.h);
    T *projected = reinterpret_cast<T*>(base + at.projected), *attended = reinterpret_cast<T*>(base + at.attended);
    T *gate = reinterpret_cast<T*>(base + at.gate), *up = reinterpret_cast<T*>(base + at.up);
    Attention a{projected, nullptr, nullptr, attended, s.offsets, s.positions, s.tables, s.sequences, s.width, s.block_size,
                H, K, D, D, width, H * D, 0, m.scaling, 0.0f};
    const std::vector<Task> tasks = plan(a);
    // In a window nothing is shared.
    for (int64_t i = 0; i < m.count && !a.window; i++) a.window = m.layers[i].window;
    const std::vector<Task> windowed = a.window ? plan(a) : std::vector<Task>();
    const int64_t each = attention_scratch(a);
#pragma omp parallel num_threads(s.threads)
    {
        float* scratch = reinterpret_cast<float*>(base + at.scratch) + omp_get_thread_num() * each;
#pragma omp for
        for (int64_t p = 0; p < P; p++)
            std::memcpy(x + p * m.hidden, static_cast<const T*>(m.embedding) + s.ids[p] * m.hidden, m.hidden * size);
        for (int64_t i = 0; i < m.count; i++) {
            const Layer& layer = m.layers[i];
#pragma omp for
            for (int64_t p = 0; p < P; p++) rms_norm(x + p * m.hidden, layer.input_norm, h + p * m.hidden, m.hidden, m.epsilon);
            linear(h, P, m.hidden, layer.query, layer.query_bias, H * D, projected, width);
            linear(h, P, m.hidden, layer.key, layer.key_bias, K * D, projected + H * D, width);
            linear(h, P, m.hidden, layer.value, layer.value_bias, K * D, projected + (H + K) * D, width);
#pragma omp barrier
#pragma omp for
            for (int64_t p = 0; p < P; p++) {
                T* heads = projected + p * width;
                const T *cosine = static_cast<const T*>(m.cosines) + s.positions[p] * D;
                const T *sine = static_cast<const T*>(m.sines) + s.positions[p] * D;
                for (int64_t head = 0; head < H + K; head++) {
                    T* one = heads + head * D;
                    const void* weight = head < H ? layer.query_norm : layer.key_norm;
                    if (weight) rms_norm(one, weight, one, D, m.epsilon);
                    rotate(one, cosine, sine, D);
                }
                std::memcpy(static_cast<T*>(layer.keys) + s.slots[p] * K * D, heads + H * D, K * D * size);
                std::memcpy(static_cast<T*>(layer.values) + s.slots[p] * K * D, heads + (H + K) * D, K * D * size);
            }
            Attention mine = a;
            mine.keys = layer.keys;
            mine.values = layer.values;
            mine.window = layer.window;
            attention<T>(mine, layer.window ? windowed : tasks, scratch);
            linear_into(attended, P, H * D, layer.output, layer.output_bias, m.hidden, x);
#pragma omp barrier
#pragma omp for
            for (int64_t p = 0; p < P; p++) rms_norm(x + p * m.hidden, layer.post_norm, h + p * m.hidden, m.hidden, m.epsilon);
            linear(h, P, m.hidden, layer.gate, nullptr, m.inner, gate, m.inner);
            linear(h, P, m.hidden, layer.up, nullptr, m.inner, up, m.inner);
#pragma omp barrier
#pragma omp for
            for (int64_t p = 0; p < P; p++) activate(gate + p * m.inner, up + p * m.inner, m.inner);
            linear_into(gate, P, m.inner, layer.down, nullptr, m.hidden, x);
#pragma omp barrier
        }
#pragma omp for
        for (int64_t p = 0; p < s.kept; p++)
            rms_norm(x + s.keep[p] * m.hidden, m.norm, h + p * m.hidden, m.hidden, m.epsilon);
        linear(h, s.kept, m.hidden, m.head, nullptr, m.vocabulary, static_cast<T*>(s.logits), m.vocabulary);
    }
}

extern "C" {

int64_t rollout_workspace_bytes(const Model* m, int64_t count, int64_t kept, int64_t threads, int is_bfloat16) {
    return Buffers(*m, count, kept, threads, is_bfloat16 ? 2 : 4).end;
}

void rollout_forward(const Model* m, const Step* s, int is_bfloat16) {
    if (is_bfloat16) forward<bf16>(*m, *s);
    else forward<float>(*m, *s);
}

// Returns how many tasks there were.
int64_t rollout_attention(const Attention* a, int64_t threads, int is_bfloat16) {
    const std::vector<Task> tasks = plan(*a);
    const int64_t each = attention_scratch(*a);
    std::vector<float> scratch(threads * each);
#pragma omp parallel num_threads(threads)
    {
        float* mine = scratch.data() + omp_get_thread_num() * each;
        if (is_bfloat16) attention<bf16>(*a, tasks, mine);
        else attention<float>(*a, tasks, mine);
    }
    return static_cast<int64_t>(tasks.size());
}

void rollout_draw(const Draw* d, int64_t threads, int is_bfloat16) {
    if (is_bfloat16) draw<bf16>(*d, threads);
    else draw<float>(*d, threads);
}
}

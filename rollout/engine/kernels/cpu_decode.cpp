// Paged decode attention on a CPU: one query position per sequence, keys and values read where they lie, once.
//
// Work item = (sequence, KV head). Scores of all its query heads are kept, so that K is read once and then V once, each in
// block order; sums are float32 whatever the cache holds. GCC/Clang vector extensions: 16 lanes on any machine.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef float f16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef float f8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float f4 __attribute__((vector_size(16), aligned(4), may_alias));

static inline f16 load(const float* p) { return *reinterpret_cast<const f16*>(p); }
static inline f16 load(const uint16_t* p) {  // bfloat16 is the upper half of a float32
    u16 wide = __builtin_convertvector(*reinterpret_cast<const h16*>(p), u16) << 16;
    f16 out;
    std::memcpy(&out, &wide, sizeof(out));
    return out;
}

static inline void store(float* p, f16 v) { *reinterpret_cast<f16*>(p) = v; }
static inline void store(uint16_t* p, f16 v) {  // round to nearest, ties to even
    u16 bits;
    std::memcpy(&bits, &v, sizeof(bits));
    u16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    i16 nan = v != v;
    rounded = (rounded & ~reinterpret_cast<u16&>(nan)) | (0x7fc0u & reinterpret_cast<u16&>(nan));
    *reinterpret_cast<h16*>(p) = __builtin_convertvector(rounded, h16);
}

static inline float sum(f16 v) {
    f8 a, b;
    std::memcpy(&a, &v, sizeof(a));
    std::memcpy(&b, reinterpret_cast<const char*>(&v) + 32, sizeof(b));
    a += b;
    f4 c, d;
    std::memcpy(&c, &a, sizeof(c));
    std::memcpy(&d, reinterpret_cast<const char*>(&a) + 16, sizeof(d));
    c += d;
    return (c[0] + c[2]) + (c[1] + c[3]);
}

// exp(x) for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes expf, S. Moshier). NaN stays NaN.
static inline f16 exponential(f16 x) {
    const f16 low = f16{} - 87.0f;
    x = x < low ? low : x;
    f16 t = x * 1.44269504088896341f + 12582912.0f;
    f16 n = t - 12582912.0f;
    f16 r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    f16 p = f16{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i16 bits;
    std::memcpy(&bits, &t, sizeof(bits));
    bits = (bits << 23) + (127 << 23);
    f16 scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    return p * scale;
}

struct Args {
    const void *query, *keys, *values;  // [B, H, D], [blocks, block_size, Hkv, D], [blocks, block_size, Hkv, Dv]
    void* out;                          // [B, H, Dv]
    const int64_t* table;               // [B, width]
    const int64_t* positions;           // [B], position of the query: it sees positions 0 to its own
    int64_t batch, heads, kv_heads, width, block_size, window;  // window 0: none
    float scaling;
};

// Scores and weights of G query heads of one work item. VK, VV: vectors of 16 in a key and in a value.
template <typename T, int VK, int VV, int G>
static void attend(const Args& a, int64_t sequence, int64_t kv_head, int64_t first, float* scores, int64_t stride) {
    const int64_t head_dim = VK * 16, value_dim = VV * 16;
    const int64_t last = a.positions[sequence];
    const int64_t begin = a.window && last + 1 > a.window ? last + 1 - a.window : 0;
    const int64_t* blocks = a.table + sequence * a.width;
    const T* query = static_cast<const T*>(a.query) + (sequence * a.heads + first) * head_dim;
    f16 q[G][VK];
    for (int g = 0; g < G; g++)
        for (int v = 0; v < VK; v++) q[g][v] = load(query + g * head_dim + v * 16) * a.scaling;

    float peak[G];
    for (int g = 0; g < G; g++) peak[g] = -INFINITY;
    const int64_t span = last + 1 - begin;
    for (int64_t at = begin; at <= last;) {
        const int64_t block = at / a.block_size, offset = at % a.block_size;
        const int64_t count = std::min(a.block_size - offset, last + 1 - at);
        const T* key = static_cast<const T*>(a.keys) +
                       ((blocks[block] * a.block_size + offset) * a.kv_heads + kv_head) * head_dim;
        for (int64_t i = 0; i < count; i++, at++, key += a.kv_heads * head_dim) {
            f16 dot[G];
            for (int g = 0; g < G; g++) dot[g] = f16{};
            for (int v = 0; v < VK; v++) {
                const f16 k = load(key + v * 16);
                for (int g = 0; g < G; g++) dot[g] += q[g][v] * k;
            }
            for (int g = 0; g < G; g++) {
                const float score = sum(dot[g]);
                scores[g * stride + at - begin] = score;
                peak[g] = score > peak[g] ? score : peak[g];
            }
        }
    }
    float total[G];
    for (int g = 0; g < G; g++) {
        float* row = scores + g * stride;
        for (int64_t i = span; i % 16; i++) row[i] = -INFINITY;
        f16 partial = f16{};
        for (int64_t i = 0; i < span; i += 16) {
            f16 x = load(row + i) - peak[g];
            const i16 real = load(row + i) != f16{} - INFINITY;
            f16 e = exponential(x);
            e = real ? e : f16{};
            store(row + i, e);
            partial += e;
        }
        total[g] = sum(partial);
    }
    f16 acc[G][VV];
    for (int g = 0; g < G; g++)
        for (int v = 0; v < VV; v++) acc[g][v] = f16{};
    for (int64_t at = begin; at <= last;) {
        const int64_t block = at / a.block_size, offset = at % a.block_size;
        const int64_t count = std::min(a.block_size - offset, last + 1 - at);
        const T* value = static_cast<const T*>(a.values) +
                         ((blocks[block] * a.block_size + offset) * a.kv_heads + kv_head) * value_dim;
        for (int64_t i = 0; i < count; i++, at++, value += a.kv_heads * value_dim) {
            for (int v = 0; v < VV; v++) {
                const f16 x = load(value + v * 16);
                for (int g = 0; g < G; g++) acc[g][v] += x * scores[g * stride + at - begin];
            }
        }
    }
    T* out = static_cast<T*>(a.out) + (sequence * a.heads + first) * value_dim;
    for (int g = 0; g < G; g++)
        for (int v = 0; v < VV; v++) store(out + g * value_dim + v * 16, acc[g][v] / total[g]);
}

template <typename T, int V>
static void run(const Args& a) {
    const int64_t groups = a.heads / a.kv_heads;
    const int64_t stride = (a.width * a.block_size + 31) / 16 * 16;
    int64_t work = 0;
    for (int64_t sequence = 0; sequence < a.batch; sequence++) work += a.positions[sequence] * a.kv_heads * V;
    // Waking the other threads costs as much as 10,000 vectors of work.
#pragma omp parallel if (work > 20000)
    {
        std::vector<float> scores(4 * stride);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < a.batch * a.kv_heads; item++) {
            const int64_t sequence = item / a.kv_heads, kv_head = item % a.kv_heads;
            int64_t first = kv_head * groups;
            const int64_t end = first + groups;
            for (; first + 4 <= end && V <= 8; first += 4) attend<T, V, V, (V <= 8 ? 4 : 1)>(a, sequence, kv_head, first, scores.data(), stride);
            for (; first + 3 <= end && V <= 8; first += 3) attend<T, V, V, (V <= 8 ? 3 : 1)>(a, sequence, kv_head, first, scores.data(), stride);
            for (; first + 2 <= end; first += 2) attend<T, V, V, 2>(a, sequence, kv_head, first, scores.data(), stride);
            for (; first < end; first += 1) attend<T, V, V, 1>(a, sequence, kv_head, first, scores.data(), stride);
        }
    }
}

template <typename T>
static int dispatch(const Args& a, int64_t head_dim) {
    switch (head_dim) {
        case 16: run<T, 1>(a); return 0;
        case 32: run<T, 2>(a); return 0;
        case 48: run<T, 3>(a); return 0;
        case 64: run<T, 4>(a); return 0;
        case 80: run<T, 5>(a); return 0;
        case 96: run<T, 6>(a); return 0;
        case 128: run<T, 8>(a); return 0;
        case 256: run<T, 16>(a); return 0;
    }
    return 1;
}

extern "C" int rollout_paged_decode(const Args* args, int64_t head_dim, int bfloat16) {
    return bfloat16 ? dispatch<uint16_t>(*args, head_dim) : dispatch<float>(*args, head_dim);
}

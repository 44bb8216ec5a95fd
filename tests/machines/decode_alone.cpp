// Decodes a small random model with the kernels alone, without Python: prints the tokens of every sequence, greedy and drawn
// in turn, then the greatest logits of the first step, in float32 and in bfloat16.
//
//     decode_alone THREADS

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../rollout/engine/kernels/cpu_kernels.cpp"

constexpr int64_t LAYERS = 3, HIDDEN = 64, INNER = 160, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 16, VOCABULARY = 211;
constexpr int64_t SEQUENCES = 5, BLOCK = 16, BLOCKS = 6, STEPS = 40;

static uint64_t state = 20260101;
static float next_float() {  // in [-0.5, 0.5), the same on every machine
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<float>(state >> 40) / 16777216.0f - 0.5f;
}

template <typename T>
struct Tensors {
    std::vector<std::vector<T>> kept;

    T* random(int64_t count, float scale, float offset = 0.0f) {
        kept.emplace_back(count);
        for (T& each : kept.back()) store_one(&each, next_float() * scale + offset);
        return kept.back().data();
    }
    T* zeros(int64_t count) {
        kept.emplace_back(count);
        return kept.back().data();
    }
};

template <typename T>
static void decode(int64_t threads, const char* name) {
    const int narrow = sizeof(T) == 2;
    state = 20260101;
    Tensors<T> tensors;
    std::vector<Layer> layers(LAYERS);
    for (int64_t i = 0; i < LAYERS; i++) {
        Layer& layer = layers[i];
        layer = Layer{};
        layer.before_attention.weight = tensors.random(HIDDEN, 0.2f, 1.0f);
        layer.before_mlp.weight = tensors.random(HIDDEN, 0.2f, 1.0f);
        layer.query.weight = tensors.random(HEADS * HEAD_DIM * HIDDEN, 0.8f);
        layer.key.weight = tensors.random(KV_HEADS * HEAD_DIM * HIDDEN, 0.8f);
        layer.value.weight = tensors.random(KV_HEADS * HEAD_DIM * HIDDEN, 0.8f);
        layer.output.weight = tensors.random(HIDDEN * HEADS * HEAD_DIM, 0.8f);
        layer.gate.weight = tensors.random(INNER * HIDDEN, 0.8f);
        layer.up.weight = tensors.random(INNER * HIDDEN, 0.8f);
        layer.down.weight = tensors.random(HIDDEN * INNER, 0.8f);
        layer.query.bias = tensors.random(HEADS * HEAD_DIM, 0.2f);
        layer.query_norm.weight = tensors.random(HEAD_DIM, 0.2f, 1.0f);
        layer.key_norm.weight = tensors.random(HEAD_DIM, 0.2f, 1.0f);
        layer.keys = tensors.zeros(SEQUENCES * BLOCKS * BLOCK * KV_HEADS * HEAD_DIM);
        layer.values = tensors.zeros(SEQUENCES * BLOCKS * BLOCK * KV_HEADS * HEAD_DIM);
        layer.window = i == 1 ? 20 : 0;
        layer.inner = INNER;
    }
    Model model{};
    model.layers = layers.data();
    model.embedding = tensors.random(VOCABULARY * HIDDEN, 2.0f);
    model.norm.weight = tensors.random(HIDDEN, 0.2f, 1.0f);
    model.head = tensors.random(VOCABULARY * HIDDEN, 2.0f);
    T* cosines = tensors.zeros(BLOCKS * BLOCK * HEAD_DIM);
    T* sines = tensors.zeros(BLOCKS * BLOCK * HEAD_DIM);
    for (int64_t position = 0; position < BLOCKS * BLOCK; position++)
        for (int64_t i = 0; i < HEAD_DIM; i++) {
            const double angle = position * std::pow(10000.0, -2.0 * (i % (HEAD_DIM / 2)) / HEAD_DIM);
            store_one(cosines + position * HEAD_DIM + i, static_cast<float>(std::cos(angle)));
            store_one(sines + position * HEAD_DIM + i, static_cast<float>(std::sin(angle)));
        }
    for (Layer& layer : layers) layer.cosines = cosines, layer.sines = sines;
    model.count = LAYERS, model.hidden = HIDDEN, model.inner = INNER, model.heads = HEADS, model.kv_heads = KV_HEADS;
    model.head_dim = HEAD_DIM, model.vocabulary = VOCABULARY, model.epsilon = 1e-6f, model.scaling = 0.25f;
    model.rotary_dim = HEAD_DIM, model.embedding_scale = 1.0f;

    std::vector<std::vector<int64_t>> tokens(SEQUENCES);
    for (int64_t s = 0; s < SEQUENCES; s++)
        for (int64_t i = 0; i < 3 + 9 * s; i++) tokens[s].push_back((7 + 31 * i + 17 * s) % VOCABULARY);
    std::vector<int64_t> tables(SEQUENCES * BLOCKS);
    for (int64_t i = 0; i < SEQUENCES * BLOCKS; i++) tables[i] = SEQUENCES * BLOCKS - 1 - i;

    std::vector<float> first;
    for (int64_t step = 0; step < STEPS; step++) {
        std::vector<int64_t> ids, positions, slots, offsets{0}, keep;
        for (int64_t s = 0; s < SEQUENCES; s++) {
            const int64_t length = tokens[s].size();
            for (int64_t at = step ? length - 1 : 0; at < length; at++) {
                ids.push_back(tokens[s][at]);
                positions.push_back(at);
                slots.push_back(tables[s * BLOCKS + at / BLOCK] * BLOCK + at % BLOCK);
            }
            offsets.push_back(ids.size());
            keep.push_back(ids.size() - 1);
        }
        const int64_t count = ids.size();
        std::vector<char> workspace(rollout_workspace_bytes(&model, count, SEQUENCES, narrow));
        std::vector<T> logits(SEQUENCES * VOCABULARY);
        const Step work{ids.data(), positions.data(), slots.data(), offsets.data(), tables.data(), keep.data(),
                        nullptr, logits.data(), workspace.data(), nullptr, nullptr, count, SEQUENCES, BLOCKS, BLOCK, SEQUENCES,
                        threads};
        rollout_forward(&model, &work, narrow);
        std::vector<float> temperature(SEQUENCES, 1.0f), peak(SEQUENCES), score(SEQUENCES);
        std::vector<int64_t> key(SEQUENCES), position(SEQUENCES, step), token(SEQUENCES);
        std::vector<uint8_t> greedy(SEQUENCES);
        std::vector<double> log_sum(SEQUENCES);
        for (int64_t s = 0; s < SEQUENCES; s++) key[s] = 1000 + s, greedy[s] = s % 2 == 0;
        const Draw draw{logits.data(), temperature.data(), key.data(), position.data(), greedy.data(), token.data(),
                        peak.data(), log_sum.data(), score.data(), nullptr, nullptr, nullptr,
                        SEQUENCES, VOCABULARY, VOCABULARY};
        rollout_draw(&draw, threads, narrow);
        if (!step) first = peak;
        for (int64_t s = 0; s < SEQUENCES; s++) tokens[s].push_back(token[s]);
    }
    for (const auto& sequence : tokens) {
        std::printf("%s tokens", name);
        for (int64_t token : sequence) std::printf(" %lld", static_cast<long long>(token));
        std::printf("\n");
    }
    std::printf("%s peaks", name);
    for (float each : first) std::printf(" %.6f", each);
    std::printf("\n");
}

int main(int count, char** arguments) {
    const int64_t threads = count > 1 ? std::atoll(arguments[1]) : 1;
    decode<float>(threads, "float32");
    decode<bf16>(threads, "bfloat16");
    return 0;
}

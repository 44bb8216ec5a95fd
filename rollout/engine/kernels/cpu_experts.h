// Sparse mixture of experts. The router chooses experts for each of P positions, and the positions are batched by expert.

#pragma once

#include <numeric>
#include <utility>
#include <vector>

#include "cpu_matmul.h"
#include "cpu_rows.h"

struct Experts {
    const void *router, *gate_up, *down;  // [count, hidden], [count, 2 * inner, hidden], [count, hidden, inner]; null: no experts
    int64_t count, chosen, inner;
    int32_t normalised;                   // whether the chosen probabilities are divided by their sum
    int32_t wide;                         // whether they, and the products of expert outputs with them, stay float32
};

// Activations of one layer.
template <typename T>
struct Mixture {
    T* scores;                    // [P, count]
    T *gathered, *mixed;          // [P * chosen, hidden], inputs and outputs of the experts, ordered by expert
    float* shares;                // [P, chosen]
    int64_t *chosen, *places;     // [P, chosen], the chosen experts, and their rows of `gathered`
};

// Finds the most probable experts of one position, and their shares of its output. Ties are resolved as in torch.topk on a CPU,
// which sorts the same pairs with the same algorithms.
template <typename T>
static void choose(const Experts& e, const T* scores, int64_t* chosen, float* shares) {
    static thread_local std::vector<std::pair<float, int64_t>> ranked;
    ranked.resize(e.count);
    float top = -INFINITY, total = 0.0f;
    for (int64_t i = 0; i < e.count; i++) top = std::max(top, load_one(scores + i));
    for (int64_t i = 0; i < e.count; i++) {
        ranked[i] = {std::exp(load_one(scores + i) - top), i};
        total += ranked[i].first;
    }
    for (auto& each : ranked) each.first /= total;
    // A NaN is ordered before all numbers, so that this is a strict weak ordering.
    const auto before = [](const auto& x, const auto& y) {
        return (std::isnan(x.first) && !std::isnan(y.first)) || x.first > y.first;
    };
    const auto end = ranked.begin() + e.chosen;
    if (e.chosen * 64 <= e.count) {
        std::partial_sort(ranked.begin(), end, ranked.end(), before);
    } else {
        std::nth_element(ranked.begin(), end - 1, ranked.end(), before);
        std::sort(ranked.begin(), end - 1, before);
    }
    float sum = 0.0f;
    for (int64_t i = 0; i < e.chosen; i++) sum += ranked[i].first;
    for (int64_t i = 0; i < e.chosen; i++) {
        const float share = e.normalised ? ranked[i].first / sum : ranked[i].first;
        chosen[i] = ranked[i].second;
        shares[i] = e.wide ? share : rounded<T>(share);
    }
}

// x += mixture of `in` [P, hidden], plus `shared` [P, hidden] if not null. `gate` and `up` are buffers [P * chosen, inner].
template <typename T>
static void mix(const Experts& e, int64_t activation, const T* in, int64_t P, int64_t hidden, const Mixture<T>& at, T* gate, T* up,
                const T* shared, T* x, const team::Crew& crew) {
    struct Group {
        int64_t expert, first, count;
    };
    matmul(in, P, static_cast<const T*>(e.router), e.count, hidden, crew, into(at.scores, e.count, nullptr));
    rows_of(P, e.count, crew, [&](int64_t p) { choose(e, at.scores + p * e.count, at.chosen + p * e.chosen, at.shares + p * e.chosen); });
    std::vector<int64_t> starts(e.count + 1);
    for (int64_t i = 0; i < P * e.chosen; i++) starts[at.chosen[i] + 1]++;
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    std::vector<Group> groups;
    const Parts sizes(P * e.chosen, hidden, sizeof(T));
    for (int64_t expert = 0; expert < e.count; expert++)
        for (int64_t first = starts[expert]; first < starts[expert + 1]; first += sizes.size)
            groups.push_back({expert, first, std::min(sizes.size, starts[expert + 1] - first)});
    for (int64_t i = 0; i < P * e.chosen; i++) at.places[i] = starts[at.chosen[i]]++;
    rows_of(P * e.chosen, hidden, crew, [&](int64_t i) {
        std::memcpy(at.gathered + at.places[i] * hidden, in + i / e.chosen * hidden, hidden * sizeof(T));
    });
    // Calls use(group, begin, end) for columns [begin, end) of the matrix of every group's expert.
    const auto each_part = [&](int64_t columns, auto&& use) {
        const int64_t chunks = (columns + CHUNK - 1) / CHUNK;
        crew.share(static_cast<int64_t>(groups.size()) * chunks, [&](int64_t job) {
            const int64_t begin = job % chunks * CHUNK;
            use(groups[job / chunks], begin, std::min(begin + CHUNK, columns));
        });
    };
    each_part(e.inner, [&](const Group& g, int64_t begin, int64_t end) {
        const T* weight = static_cast<const T*>(e.gate_up) + g.expert * 2 * e.inner * hidden;
        product(at.gathered, g.first, g.count, weight, begin, end, e.inner, hidden, into(gate, e.inner, nullptr));
        product(at.gathered, g.first, g.count, weight + e.inner * hidden, begin, end, e.inner, hidden, into(up, e.inner, nullptr));
        for (int64_t i = g.first; i < g.first + g.count; i++)
            activated(activation, gate + i * e.inner + begin, up + i * e.inner + begin, end - begin);
    });
    each_part(hidden, [&](const Group& g, int64_t begin, int64_t end) {
        const T* weight = static_cast<const T*>(e.down) + g.expert * hidden * e.inner;
        product(gate, g.first, g.count, weight, begin, end, hidden, e.inner, into(at.mixed, hidden, nullptr));
    });
    rows_of(P, hidden, crew, [&](int64_t p) {
        for (int64_t d = 0; d < hidden; d++) {
            float sum = 0.0f;
            for (int64_t i = p * e.chosen; i < (p + 1) * e.chosen; i++) {
                const float part = load_one(at.mixed + at.places[i] * hidden + d) * at.shares[i];
                sum += e.wide ? part : rounded<T>(part);
            }
            if (shared) sum = rounded<T>(sum) + load_one(shared + p * hidden + d);
            store_one(x + p * hidden + d, load_one(x + p * hidden + d) + rounded<T>(sum));
        }
    });
}

// Prefetching of the keys or values that attention reads next, while it computes.
//
// A core has some twenty cache lines under way at most, and drops what is asked for beyond them. So requests are spread evenly
// over the computation, and go upwards in memory as far as they can, where the processor's own prefetchers take part.

#pragma once

#include <algorithm>
#include <cstdint>

// What lies at the slots of a KV pool.
struct Plane {
    const char* base;       // of slot 0
    int64_t bytes, stride;  // to fetch of a slot; from one slot to the next
};

class Ahead {
  public:
    // Fetch what lies at `number` slots, which stay valid, in the course of so many steps.
    void begin(const Plane& from, const int64_t* which, int64_t number, int64_t steps) {
        plane = from;
        slots = which;
        count = number;
        next = budget = 0;
        at = nullptr;
        rate = count * ((plane.bytes + LINE - 1) / LINE) * ONE / std::max<int64_t>(1, steps) + 1;
        if (count) open();
    }

    void step(int64_t steps = 1) {
        for (budget += rate * steps; at && budget >= ONE; budget -= ONE) {
            __builtin_prefetch(at);
            at += LINE;
            if (at >= end) open();
        }
    }

  private:
    static constexpr int64_t LINE = 64, ONE = 1 << 16;  // bytes; one line, in the unit of `budget`

    Plane plane{};
    const int64_t* slots = nullptr;
    int64_t count = 0, next = 0;               // slot that is opened next
    int64_t rate = 0, budget = 0;              // per step; unspent
    const char *at = nullptr, *end = nullptr;  // of the contiguous bytes that are being fetched; null: there are none

    void open() {
        if (next == count) {
            at = nullptr;
            return;
        }
        at = plane.base + slots[next] * plane.stride;
        end = at + plane.bytes;
        for (next++; plane.bytes == plane.stride && next < count && slots[next] == slots[next - 1] + 1; next++) end += plane.bytes;
    }
};

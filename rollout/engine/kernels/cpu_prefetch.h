// Prefetches what a computation reads next, such as the keys or values of attention.
//
// A core has at most about twenty cache lines in flight and drops further requests. So the requests are spread evenly over the
// computation. Their addresses ascend as far as possible, so that the hardware prefetchers detect the pattern and help.

#pragma once

#include <algorithm>
#include <cstdint>

// An array with one record per slot, such as the keys in a KV pool.
struct Plane {
    const char* base;       // address of slot 0
    int64_t bytes, stride;  // number of bytes to fetch per slot; bytes from one slot to the next
};

class Ahead {
  public:
    // Starts to fetch `number` slots, spread over the next `steps` steps. The array `which` must stay valid meanwhile.
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
    static constexpr int64_t LINE = 64, ONE = 1 << 16;  // bytes per cache line; one line in the units of `budget`

    Plane plane{};
    const int64_t* slots = nullptr;
    int64_t count = 0, next = 0;               // next: index of the slot that is opened next
    int64_t rate = 0, budget = 0;              // lines per step, and lines that may be fetched now, both times ONE
    const char *at = nullptr, *end = nullptr;  // the contiguous bytes that are being fetched; null: no bytes are left

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

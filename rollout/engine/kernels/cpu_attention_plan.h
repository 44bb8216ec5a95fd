// Plans what attention over the paged KV cache reads, and in which order: tasks, jobs of tasks, and their ranges of positions.
//
// A *task* is up to ROWS queries of one KV head that read the same keys: the positions of a prefill chunk, or the samples of a
// group over their common prompt. Keys are read in tiles of KEYS positions that begin at multiples of KEYS.

#pragma once

#include <utility>
#include <vector>

#include "cpu_prefetch.h"

constexpr int64_t ROWS = 96, KEYS = 64;

struct Attention {  // P positions, R sequences, H query heads, Hkv KV heads, D = head_dim, Dv = value_dim
    const void *query, *keys, *values;  // [P, H, D], [blocks, block_size, Hkv, D], [blocks, block_size, Hkv, Dv]
    void* out;                          // [P, H, Dv]
    const int64_t* offsets;             // [R + 1], index of each sequence's first position among the P positions
    const int64_t* positions;           // [P]; a query attends to position 0 up to its own position
    const int64_t* tables;              // [R, width], block ids
    int64_t sequences, width, block_size, heads, kv_heads, head_dim, value_dim;
    int64_t query_stride, out_stride;   // elements from one position to the next
    int64_t window;                     // maximum number of positions that a query attends to; 0: all
    float scaling, softcap;             // a soft-cap of 0 is not applied
    float* log_sums;                    // [P, H], log of the sum of exponentials of each row; null: not stored
    const float* sinks;                 // [H], an extra score per head that has no value (attention sink); null: none

    // The first position that a query at `position` attends to.
    int64_t oldest(int64_t position) const { return window ? std::max<int64_t>(0, position + 1 - window) : 0; }
    // Whether queries attend to their prefix from position 0 on.
    bool whole() const { return !window; }
};

struct Task {
    int64_t first, last;  // the first and the last sequence; if there are several, each has one position
    int64_t begin, end;   // range of the queries among the P positions
    int64_t shared;       // number of positions in common prefix blocks, a multiple of KEYS
};

static int64_t common_blocks(const Attention& a, int64_t one, int64_t other) {
    const int64_t *x = a.tables + one * a.width, *y = a.tables + other * a.width;
    const int64_t least = std::min(a.positions[a.offsets[one]], a.positions[a.offsets[other]]) / a.block_size;
    int64_t same = 0;
    while (same < least && x[same] == y[same]) same++;
    return same;
}

// Returns the tasks of a step for one KV head. Every task runs once per KV head.
static std::vector<Task> plan(const Attention& a) {
    std::vector<Task> tasks;
    const int64_t group = a.heads / a.kv_heads, most = std::max<int64_t>(1, ROWS / group);
    const auto decoding = [&](int64_t s) { return s < a.sequences && a.offsets[s + 1] - a.offsets[s] == 1; };
    for (int64_t s = 0; s < a.sequences;) {
        if (!decoding(s)) {
            for (int64_t at = a.offsets[s]; at < a.offsets[s + 1]; at += most)
                tasks.push_back({s, s, at, std::min(at + most, a.offsets[s + 1]), 0});
            s++;
            continue;
        }
        // Joins neighbours with the same common prefix: samples of one group, or sequences with the same system prompt.
        int64_t last = s, shared = decoding(s + 1) && a.whole() ? common_blocks(a, s, s + 1) : 0;
        if (shared * a.block_size >= KEYS && !(decoding(s + 2) && common_blocks(a, s + 1, s + 2) > shared))
            for (last = s + 1; last - s + 1 < most && decoding(last + 1) && common_blocks(a, last, last + 1) == shared;) last++;
        tasks.push_back({s, last, a.offsets[s], a.offsets[last] + 1, last > s ? shared * a.block_size / KEYS * KEYS : 0});
        s = last + 1;
    }
    return tasks;
}

constexpr int64_t FEW_ROWS = 8;  // maximum rows per KV head for a job of all heads, which reads each token's keys contiguously

// Positions [from, to) of one block table.
struct Range {
    const int64_t* table;
    int64_t from, to;

    // The first tile of the range.
    Range tile() const { return {table, from, std::min(from / KEYS * KEYS + KEYS, to)}; }
};

// Writes the pool slots of the range's positions to `slots`.
static inline void slots_of(const Attention& a, const Range& range, int64_t* slots) {
    int64_t block = range.from / a.block_size, offset = range.from - block * a.block_size;
    for (int64_t at = range.from; at < range.to; block++, offset = 0) {
        int64_t slot = range.table[block] * a.block_size + offset;
        for (const int64_t end = std::min(range.to, at + a.block_size - offset); at < end; at++) *slots++ = slot++;
    }
}

// Calls use(range, begin, end) for every range that a task reads. Rows [begin, end) of the task attend to it.
template <typename Use>
static void each_range(const Attention& a, const Task& task, Use&& use) {
    const int64_t group = a.heads / a.kv_heads, rows = (task.end - task.begin) * group;
    const int64_t* table = a.tables + task.first * a.width;
    if (task.first == task.last)
        return use(Range{table, a.oldest(a.positions[task.begin]), a.positions[task.end - 1] + 1}, int64_t{0}, rows);
    if (task.shared) use(Range{table, 0, task.shared}, int64_t{0}, rows);
    for (int64_t row = 0; row < rows; row += group, table += a.width)
        use(Range{table, task.shared, a.positions[task.begin + row / group] + 1}, row, row + group);
}

// Tasks [first, last) for KV heads [head, head + heads): one head, or all heads.
struct Job {
    int64_t first, last, head, heads;
};

// Groups tasks into jobs. If there are many tasks, several tasks of few rows share a job, which runs all KV heads and can fetch
// the keys of its next task in advance.
static std::vector<Job> jobs_of(const Attention& a, const std::vector<Task>& tasks, int64_t threads) {
    const int64_t count = static_cast<int64_t>(tasks.size()), group = a.heads / a.kv_heads;
    const bool many = count >= 4 * threads;
    const auto small = [&](const Task& task) { return many && (task.end - task.begin) * group <= FEW_ROWS; };
    const auto length = [&](const Task& task) {
        int64_t positions = 0;
        each_range(a, task, [&](const Range& range, int64_t, int64_t) { positions += range.to - range.from; });
        return positions;
    };
    int64_t left = 0;
    for (const Task& task : tasks) left += length(task);
    std::vector<Job> jobs;
    for (int64_t first = 0, last; first < count; first = last) {
        last = first + 1;
        int64_t taken = length(tasks[first]);
        if (!small(tasks[first])) {
            for (int64_t head = 0; head < a.kv_heads; head++) jobs.push_back({first, last, head, 1});
        } else {
            for (; last < count && small(tasks[last]) && 4 * threads * (taken + length(tasks[last])) <= left; last++)
                taken += length(tasks[last]);
            jobs.push_back({first, last, 0, a.kv_heads});
        }
        left -= taken;
    }
    return jobs;
}

constexpr int64_t PIECE_BYTES = 8192;  // bytes of a piece of keys or values: it and the next piece fit into the first-level cache

// Returns the number of positions per piece. A job of `heads` KV heads reads the keys of a piece, and later its values, together.
template <typename T>
static int64_t piece_of(const Attention& a, const Task& task, int64_t heads) {
    if ((task.end - task.begin) * a.heads > FEW_ROWS * a.kv_heads) return KEYS;
    const int64_t bytes = heads * std::max(a.head_dim, a.value_dim) * static_cast<int64_t>(sizeof(T));
    return std::min(KEYS, std::max<int64_t>(16, PIECE_BYTES / bytes / 16 * 16));
}

// Calls use(from, to) for every piece of positions [low, high) of a tile.
template <typename Use>
static inline void each_piece(int64_t low, int64_t high, int64_t piece, Use&& use) {
    for (int64_t from = low, to; from < high; from = to) use(from, to = std::min(high, from / piece * piece + piece));
}

// Iterates over the pieces that a job reads, one piece ahead of the computation.
class Upcoming {
  public:
    Ahead ahead;
    const int64_t piece;

    Upcoming(const Attention& a, const Plane& keys, const Plane& values, std::vector<Range> ranges, int64_t piece)
        : piece(piece), a(a), planes{keys, values}, ranges(std::move(ranges)) {
        advance();
    }

    // Starts to fetch the next piece, spread over the next `steps` steps.
    void begin(int64_t steps) {
        advance();
        ahead.begin(planes[plane], slots + from, to - from, steps);
    }

  private:
    const Attention& a;
    const Plane planes[2];
    std::vector<Range> ranges;  // the parts that are not yet fetched
    size_t index = 0;
    int64_t slots[KEYS];
    int64_t low = 0, high = 0, plane = 1;  // positions [low, high) of the current tile; plane 0: keys, 1: values
    int64_t from = 0, to = 0;

    void advance() {
        if (to == high) {
            plane = 1 - plane;
            if (plane == 0) open();
            to = low;
        }
        from = to;
        to = std::min(high, from / piece * piece + piece);
    }
    // Opens the next tile, or an empty one if no tile is left.
    void open() {
        while (index < ranges.size() && ranges[index].from == ranges[index].to) index++;
        low = high = 0;
        if (index == ranges.size()) return;
        const Range tile = ranges[index].tile();
        low = tile.from % KEYS;
        high = low + tile.to - tile.from;
        slots_of(a, tile, slots + low);
        ranges[index].from = tile.to;
    }
};

// The operations of the fused forward, one at a time. A trainer's forward that uses them computes the same bits for each row.
//
// Each operation calls the same function as the fused forward, and the bits of a row do not depend on the other rows. Attention
// has its own entry point.

#pragma once

#include "cpu_matmul.h"
#include "cpu_rows.h"
#include "cpu_team.h"

struct Product {
    const void *in, *weight, *bias;  // in: [rows, depth]; weight: [columns, depth]; bias: [columns] or null
    const int64_t* places;           // [rows], index in `out` of each row of `in`; null: the same index
    void* out;                       // [at least rows, columns]
    int64_t rows, depth, columns;
};

struct RowWise {
    const void *in, *other;         // [rows, width]; other: the weight of a norm [width], or the factor of silu(in) [rows, width]
    void* out;                      // [rows, width]
    const void *cosines, *sines;    // rotary tables [positions, width]
    const int64_t* positions;       // [rows / heads], used by the rotary embedding
    int64_t rows, width, heads;     // heads: number of consecutive rows with the same position
    float epsilon;                  // used by the norm
};

template <typename T>
static void linear(const Product& p, const team::Crew& crew) {
    const auto keep = into(static_cast<T*>(p.out), p.columns, p.bias);
    matmul(static_cast<const T*>(p.in), p.rows, static_cast<const T*>(p.weight), p.columns, p.depth, crew,
           [&](int64_t row, int64_t n, vec4 v, int64_t real) { keep(p.places ? p.places[row] : row, n, v, real); });
}

// Calls use(offset of the row's first element, row) for each row.
template <typename Use>
static void each_row(const RowWise& r, const team::Crew& crew, Use&& use) {
    rows_of(r.rows, r.width, crew, [&](int64_t row) { use(row * r.width, row); });
}

template <typename T>
static void norm_rows(const RowWise& r, const team::Crew& crew) {
    each_row(r, crew, [&](int64_t at, int64_t) {
        rms_norm(static_cast<const T*>(r.in) + at, r.other, static_cast<T*>(r.out) + at, r.width, r.epsilon);
    });
}

template <typename T>
static void rotate_rows(const RowWise& r, const team::Crew& crew) {
    const T *cosines = static_cast<const T*>(r.cosines), *sines = static_cast<const T*>(r.sines);
    each_row(r, crew, [&](int64_t at, int64_t row) {
        T* out = static_cast<T*>(r.out) + at;
        std::memcpy(out, static_cast<const T*>(r.in) + at, r.width * sizeof(T));
        const int64_t angle = r.positions[row / r.heads] * r.width;
        rotate(out, cosines + angle, sines + angle, r.width);
    });
}

template <typename T>
static void activate_rows(const RowWise& r, const team::Crew& crew) {
    each_row(r, crew, [&](int64_t at, int64_t) {
        T* out = static_cast<T*>(r.out) + at;
        std::memcpy(out, static_cast<const T*>(r.in) + at, r.width * sizeof(T));
        activate(out, static_cast<const T*>(r.other) + at, r.width);
    });
}

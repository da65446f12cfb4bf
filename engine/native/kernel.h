// The one micro kernel: up to kMaxRows rows of A times a panel of 32 columns of B, bf16 in, float32 out.
//
// Panel layout: [k / 2][32 columns][2], so that one register holds a pair of k for sixteen columns. Weights, keys (a column
// is a key) and values (a column is a dimension, k runs over keys) all stand in it. Each output is summed over ascending k
// from zero, alone in its lane: it does not depend on the rows that are computed beside it.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

#include "simd.h"

namespace chorus {

constexpr int kColumns = 32;

/** Rows of A: `stride` in elements; k is even. */
struct RowBlock {
    const bf16* data;
    std::ptrdiff_t stride;
};

/** B: `count` panels of `pairs` pairs of k each, one after the other along k. */
struct PanelRun {
    const bf16* const* panels;
    int count;
    int pairs;
};

/** out[r][c] for R rows and 32 columns. `prefetch`: memory half as large as the panels that is wanted next. */
template <int R>
void multiply_rows(RowBlock a, PanelRun b, float* out, std::ptrdiff_t out_stride, const char* prefetch) {
    F16 acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
    const bf16* a_pair = a.data;
    for (int panel = 0; panel < b.count; ++panel) {
        const bf16* b_pair = b.panels[panel];
        for (int pair = 0; pair < b.pairs; ++pair) {
            const ColumnPairs left = load_pairs(b_pair), right = load_pairs(b_pair + kColumns);
            _mm_prefetch(prefetch, _MM_HINT_T1);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const ColumnPairs x = splat_pair(a_pair + r * a.stride);
                acc[r][0] = dot2(acc[r][0], x, left);
                acc[r][1] = dot2(acc[r][1], x, right);
            }
            a_pair += 2;
            b_pair += 2 * kColumns;
            prefetch += 64;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        store(out + r * out_stride, acc[r][0]);
        store(out + r * out_stride + 16, acc[r][1]);
    }
}

using Kernel = void (*)(RowBlock, PanelRun, float*, std::ptrdiff_t, const char*);

template <std::size_t... R>
constexpr std::array<Kernel, sizeof...(R)> make_kernels(std::index_sequence<R...>) {
    return {&multiply_rows<static_cast<int>(R) + 1>...};
}
inline constexpr auto kKernels = make_kernels(std::make_index_sequence<kMaxRows>());

inline void multiply(int rows, RowBlock a, PanelRun b, float* out, std::ptrdiff_t out_stride, const char* prefetch) {
    kKernels[static_cast<std::size_t>(rows - 1)](a, b, out, out_stride, prefetch);
}

}  // namespace chorus

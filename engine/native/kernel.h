// The one micro kernel: up to kMaxRows rows of A times a panel of 32 columns of B, bf16 in, float32 out.
//
// Panel layout: [k / 2][32 columns][2], so that one register holds a pair of k for sixteen columns. Weights, keys (a
// column is a key) and values (a column is a dimension, k runs over keys) all stand in it. Each output is summed over
// ascending k from zero, alone in its lane: it does not depend on the rows that are computed beside it.
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

/** Memory that is wanted soon, fetched into the second-level cache on the way: `lines` (0 to 2) of 64 bytes per pair.
 */
struct Prefetch {
    const bf16* from = nullptr;
    int lines = 0;
};

/** out[r][c] for R rows and 32 columns. */
template <int R, int Lines>
void multiply_rows(RowBlock a, PanelRun b, float* out, std::ptrdiff_t out_stride, const bf16* prefetch) {
    F16 acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
    const bf16* a_pair = a.data;
    for (int panel = 0; panel < b.count; ++panel) {
        const bf16* b_pair = b.panels[panel];
        for (int pair = 0; pair < b.pairs; ++pair) {
            const ColumnPairs left = load_pairs(b_pair), right = load_pairs(b_pair + kColumns);
            if (Lines > 0) _mm_prefetch((const char*)prefetch, _MM_HINT_T1);
            if (Lines > 1) _mm_prefetch((const char*)prefetch + 64, _MM_HINT_T1);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const ColumnPairs x = splat_pair(a_pair + r * a.stride);
                acc[r][0] = dot2(acc[r][0], x, left);
                acc[r][1] = dot2(acc[r][1], x, right);
            }
            a_pair += 2;
            b_pair += 2 * kColumns;
            prefetch += Lines * 32;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        store(out + r * out_stride, acc[r][0]);
        store(out + r * out_stride + 16, acc[r][1]);
    }
}

using Kernel = void (*)(RowBlock, PanelRun, float*, std::ptrdiff_t, const bf16*);

template <int Lines, std::size_t... R>
constexpr std::array<Kernel, sizeof...(R)> make_kernels(std::index_sequence<R...>) {
    return {&multiply_rows<static_cast<int>(R) + 1, Lines>...};
}
using AllRows = std::make_index_sequence<kMaxRows>;
inline constexpr std::array kKernels = {make_kernels<0>(AllRows()), make_kernels<1>(AllRows()),
                                        make_kernels<2>(AllRows())};

inline void multiply(int rows, RowBlock a, PanelRun b, float* out, std::ptrdiff_t out_stride, Prefetch prefetch = {}) {
    kKernels[std::size_t(prefetch.lines)][std::size_t(rows - 1)](a, b, out, out_stride, prefetch.from);
}

}  // namespace chorus

// Attention over a step's segments.
//
// The law: keys are cut into tiles of 256 absolute positions. Each (row, head, tile) gives one partial result with its
// own maximum, from sums that start at zero, and a row's partials are folded in ascending order by one formula. How
// rows and tiles are dealt to work items, who computes them and beside whom, therefore changes no bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention_plan.h"
#include "team.h"

namespace chorus {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

/** A row's keys in one tile, or in all tiles so far: maximum score, sum of weights; the weighted values stand
 * elsewhere. */
struct Softmax {
    float max = kNothing, sum = 0.0f;
};

/** One layer of the KV pool: [page][kv head][keys | values], each half of it in panel layout. */
struct KvLayer {
    bf16* pool;
    std::int64_t page_elements;
    int head_dim;

    bf16* keys(std::int64_t page, int kv_head) const {
        return pool + page * page_elements + kv_head * 2 * kPage * head_dim;
    }
    bf16* values(std::int64_t page, int kv_head) const { return keys(page, kv_head) + kPage * head_dim; }
};

/** What one layer's attention reads and writes. q: [kv head][row][head of the group][dim]; context: [row][head][dim].
    window: keys that a row sees at most, itself included; 0 for all. */
struct AttentionLayer {
    KvLayer kv;
    const bf16* q;
    bf16* context;
    std::int64_t context_stride;
    int window;
};

class Attention {
public:
    Attention(const Shape& shape, int num_threads)
        : s(shape), log2_scale_(1.4426950408889634f / std::sqrt(float(s.head_dim))), plan_(s), scratch_(num_threads) {}

    void plan(std::span<const int> rows, const Plan& plan, int num_threads) {
        plan_.make(rows, plan, num_threads);
        partials_.reserve(std::size_t(plan_.num_partials) * s.num_heads * partial_size());
    }

    int num_rows() const { return plan_.num_rows(); }

    /** One layer; every thread of the team calls it. */
    void run(Team& team, int thread, const AttentionLayer& layer) {
        Scratch& scratch = scratch_[thread];
        team.for_each(thread, int(plan_.items.size()), Deal::InOrder, [&](int i) {
            const AttentionItem& item = plan_.items[i];
            item.tile == AttentionItem::kAllTiles ? run_whole(item, layer, scratch) : run_tile(item, layer, scratch);
        });
        const int num_merges = int(plan_.partial_rows.size()) * s.num_kv_heads;
        if (num_merges == 0) return;
        team.for_each(thread, num_merges, Deal::Contiguous, [&](int i) {
            merge(plan_.partial_rows[i / s.num_kv_heads], i % s.num_kv_heads, layer, scratch);
        });
    }

private:
    static constexpr int kTilePages = kTile / kPage;
    static constexpr int kBlock = AttentionPlan::kBlock;

    /** For (row, head) pairs: one tile's scores, weights and results; `values` and `all` for the tiles so far. */
    struct alignas(64) Scratch {
        float scores[kBlock * kTile];
        bf16 weights[kBlock * kTile];
        float part[kBlock * kMaxHeadDim], values[kBlock * kMaxHeadDim];
        Softmax tile[kBlock], all[kBlock];
    };

    /** Keys first .. end - 1 of a tile. */
    struct Span {
        int first, end;

        bool empty() const { return first >= end; }
    };

    // Pairs are numbered row by row: pair / group is the row, pair % group the head within its kv head's group.
    int row_of(int pair) const { return pair / s.group(); }
    int head_of(int pair, int kv_head) const { return kv_head * s.group() + pair % s.group(); }

    /** A partial in memory: values, maximum, sum, padding. */
    int partial_size() const { return s.head_dim + 16; }
    float* partial(int row, int tile, int head) const {
        return partials_.data() + (std::int64_t{plan_.first_partial[row] + tile} * s.num_heads + head) * partial_size();
    }

    Span visible(const Segment& segment, int tile, int position, int window) const {
        const int end = segment.causal ? std::min(segment.end(), position + 1) : segment.end();
        const int first = window > 0 ? position + 1 - window : 0;
        return {std::clamp(first - tile * kTile, 0, kTile), std::clamp(end - tile * kTile, 0, kTile)};
    }

    /** One tile's partials for `count` pairs from `first` on, into scratch.part and scratch.tile. */
    void attend(int first, int count, int kv_head, const Segment& segment, int tile, const AttentionLayer& layer,
                Scratch& scratch) const {
        Span spans[kBlock], any{kTile, 0};
        for (int i = 0; i < count; ++i) {
            spans[i] = visible(segment, tile, plan_.positions[row_of(first + i)], layer.window);
            if (!spans[i].empty()) any = {std::min(any.first, spans[i].first), std::max(any.end, spans[i].end)};
        }
        const int num_pages = (any.end + kPage - 1) / kPage;
        const std::int32_t* pages = plan_.pages.data() + segment.first_page + (tile * kTile - segment.base) / kPage;
        const bf16* q = layer.q + (std::int64_t{kv_head} * num_rows() * s.group() + first) * s.head_dim;
        const bf16 *keys[kTilePages + 1], *values[kTilePages] = {};
        for (int page = 0; page < num_pages; ++page) {
            keys[page] = layer.kv.keys(pages[page], kv_head);
            values[page] = layer.kv.values(pages[page], kv_head);
        }
        keys[num_pages] = values[0];  // what is fetched after the last keys
        for (int page = 0; page < num_pages; ++page) {
            for (int i = 0; i < count; i += kMaxRows) {
                multiply(std::min(kMaxRows, count - i), {q + i * s.head_dim, s.head_dim},
                         {keys + page, 1, s.head_dim / 2}, scratch.scores + i * kTile + page * kPage, kTile,
                         {keys[page + 1], i == 0 ? 2 : 0});
            }
        }
        for (int i = 0; i < count; ++i) {
            scratch.tile[i] =
                weigh(scratch.scores + i * kTile, scratch.weights + i * kTile, spans[i], num_pages * kPage);
        }
        for (int dim = 0; dim < s.head_dim; dim += kColumns) {
            for (int i = 0; i < count; i += kMaxRows) {
                multiply(std::min(kMaxRows, count - i), {scratch.weights + i * kTile, kTile},
                         {values, num_pages, kPage / 2}, scratch.part + i * s.head_dim + dim, s.head_dim);
            }
            for (int page = 0; page < num_pages; ++page) values[page] += kPage * kColumns;
        }
    }

    /** Scores to softmax weights over the keys of `span`; the other keys of the block's `width` get exact zeros. */
    Softmax weigh(float* scores, bf16* weights, Span span, int width) const {
        if (span.empty()) {
            std::fill(weights, weights + width, bf16{0});
            return {};
        }
        std::fill(scores, scores + span.first, kNothing);
        std::fill(scores + span.end, scores + width, kNothing);
        F16 top = splat(kNothing);
        for (int i = 0; i < width; i += 16) top = max(top, load(scores + i));
        const float max_score = maximum(top);
        const F16 scale = splat(log2_scale_), offset = splat(-max_score * log2_scale_);
        F16 total = splat(0.0f);
        for (int i = 0; i < width; i += 16) {
            const F16 weight = exp2(fma(load(scores + i), scale, offset));
            total = total + weight;
            store_bf16(weights + i, weight);
        }
        return {max_score, sum(total)};
    }

    /** The one formula that joins a tile's partial to those before it. */
    void fold(Softmax& all, float* values, Softmax tile, const float* part) const {
        if (tile.max == kNothing) return;
        const float top = std::max(all.max, tile.max);
        alignas(64) float factors[16] = {(all.max - top) * log2_scale_, (tile.max - top) * log2_scale_};
        store(factors, exp2(load(factors)));
        all = {top, all.sum * factors[0] + tile.sum * factors[1]};
        const F16 old_factor = splat(factors[0]), new_factor = splat(factors[1]);
        for (int d = 0; d < s.head_dim; d += 16) {
            store(values + d, fma(load(part + d), new_factor, load(values + d) * old_factor));
        }
    }

    void write_context(const AttentionLayer& layer, int row, int head, const float* values, float sum) const {
        bf16* context = layer.context + row * layer.context_stride + head * s.head_dim;
        for (int d = 0; d < s.head_dim; d += 16) store_bf16(context + d, load(values + d) / splat(sum));
    }

    void run_whole(const AttentionItem& item, const AttentionLayer& layer, Scratch& scratch) const {
        const int end_pair = (item.first_row + item.num_rows) * s.group();
        for (int first = item.first_row * s.group(), count; first < end_pair; first += count) {
            count = std::min(kBlock, end_pair - first);
            std::fill(scratch.values, scratch.values + count * s.head_dim, 0.0f);
            std::fill(scratch.all, scratch.all + count, Softmax{});
            const int last_position = plan_.positions[row_of(first + count - 1)];
            for (int index : plan_.segments_of(item.first_row)) {
                const Segment& segment = plan_.segments[index];
                for (int tile = segment.base / kTile; tile * kTile < std::min(segment.end(), last_position + 1);
                     ++tile) {
                    attend(first, count, item.kv_head, segment, tile, layer, scratch);
                    for (int i = 0; i < count; ++i) {
                        fold(scratch.all[i], scratch.values + i * s.head_dim, scratch.tile[i],
                             scratch.part + i * s.head_dim);
                    }
                }
            }
            for (int i = 0; i < count; ++i) {
                const int pair = first + i;
                write_context(layer, row_of(pair), head_of(pair, item.kv_head), scratch.values + i * s.head_dim,
                              scratch.all[i].sum);
            }
        }
    }

    void run_tile(const AttentionItem& item, const AttentionLayer& layer, Scratch& scratch) const {
        const int end_pair = (item.first_row + item.num_rows) * s.group();
        for (int first = item.first_row * s.group(), count; first < end_pair; first += count) {
            count = std::min(kBlock, end_pair - first);
            attend(first, count, item.kv_head, plan_.segments[item.segment], item.tile, layer, scratch);
            for (int i = 0; i < count; ++i) {
                const int row = row_of(first + i);
                if (item.tile >= plan_.num_tiles(row)) continue;
                float* to = partial(row, item.tile, head_of(first + i, item.kv_head));
                std::copy_n(scratch.part + i * s.head_dim, s.head_dim, to);
                to[s.head_dim] = scratch.tile[i].max;
                to[s.head_dim + 1] = scratch.tile[i].sum;
            }
        }
    }

    /** Fold the partials of one row, for the heads of one kv head. */
    void merge(int row, int kv_head, const AttentionLayer& layer, Scratch& scratch) const {
        for (int head = kv_head * s.group(); head < (kv_head + 1) * s.group(); ++head) {
            Softmax all;
            std::fill(scratch.values, scratch.values + s.head_dim, 0.0f);
            for (int tile = 0; tile < plan_.num_tiles(row); ++tile) {
                const float* part = partial(row, tile, head);
                fold(all, scratch.values, {part[s.head_dim], part[s.head_dim + 1]}, part);
            }
            write_context(layer, row, head, scratch.values, all.sum);
        }
    }

    const Shape s;
    const float log2_scale_;
    AttentionPlan plan_;
    Buffer<float> partials_;
    std::vector<Scratch> scratch_;
};

}  // namespace chorus

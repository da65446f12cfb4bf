// Attention over a step's segments: planned once a step, run once a layer.
//
// The law: keys are cut into tiles of 256 absolute positions. Each (row, head, tile) gives one partial result with its own
// maximum, from sums that start at zero, and a row's partials are folded in ascending order by one formula. How rows and
// tiles are dealt to work items, who computes them and beside whom, therefore changes no bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "team.h"
#include "weights.h"

namespace chorus {

constexpr int kPage = 32;
constexpr int kTile = 256;
constexpr int kTilePages = kTile / kPage;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

/** As engine/plan.py's AttentionSegment; its page list is pages[first_page ..]. */
struct Segment {
    std::int32_t first_row, num_rows, base, num_keys, causal, first_page, num_pages;
};

/** A row's keys in one tile or in all tiles so far: maximum score, sum of weights; the weighted values stand elsewhere. */
struct Softmax {
    float max = kNothing, sum = 0.0f;
};

/** The one formula that joins a tile's partial to those before it; values and part: [dims]. */
inline void fold(Softmax& all, float* values, Softmax tile, const float* part, int dims, float log2_scale) {
    if (tile.max == kNothing) return;
    const float top = std::max(all.max, tile.max);
    float factors[16] = {(all.max - top) * log2_scale, (tile.max - top) * log2_scale};
    store(factors, exp2(load(factors)));
    all = {top, all.sum * factors[0] + tile.sum * factors[1]};
    const F16 old_factor = splat(factors[0]), new_factor = splat(factors[1]);
    for (int d = 0; d < dims; d += 16) store(values + d, fma(load(part + d), new_factor, load(values + d) * old_factor));
}

inline void write_context(bf16* context, const float* values, float sum, int dims) {
    const F16 divisor = splat(sum);
    for (int d = 0; d < dims; d += 16) store_bf16(context + d, load(values + d) / divisor);
}

/** The KV pool of one layer: [page][kv head][keys | values], each half in panel layout. */
struct KvLayer {
    bf16* pool;
    std::size_t page_elements;
    int head_dim;

    bf16* keys(int page, int kv_head) const {
        return pool + std::size_t(page) * page_elements + std::size_t(kv_head) * std::size_t(2 * kPage * head_dim);
    }
    bf16* values(int page, int kv_head) const { return keys(page, kv_head) + kPage * head_dim; }
};

/** What one layer's attention reads and writes. q: [kv head][row][head of the group][dim]; context: [row][head][dim]. */
struct AttentionLayer {
    KvLayer kv;
    const bf16* q;
    bf16* context;
    std::ptrdiff_t context_stride;
    int window;
};

class Attention {
public:
    Attention(const Shape& shape, int num_threads)
        : s(shape), log2_scale_(1.4426950408889634f / std::sqrt(float(shape.head_dim))), scratch_(std::size_t(num_threads)) {}

    /** Plan for those rows of the batch in `rows` (ascending); everything is taken over, nothing is kept by reference. */
    void plan(const std::vector<int>& rows, const std::int32_t* positions, const std::vector<Segment>& segments,
              const std::int32_t* pages, std::size_t num_pages, int num_threads) {
        positions_.clear();
        for (int row : rows) positions_.push_back(positions[row]);
        segments_ = segments;
        pages_.assign(pages, pages + num_pages);
        index_segments(rows);
        items_.clear();
        first_partial_.assign(rows.size(), kDirect);
        partial_rows_.clear();
        int num_partials = 0;
        for (int begin = 0, end; begin < num_rows(); begin = end) {
            for (end = begin + 1; end < num_rows() && same_segments(begin, end); ++end) {}
            const int tiles = positions_[std::size_t(end - 1)] / kTile + 1;
            if (tiles == 1 || end - begin >= kManyRows) {
                add_direct_items(begin, end, num_threads);
                continue;
            }
            for (int row = begin; row < end; ++row) {
                first_partial_[std::size_t(row)] = num_partials;
                partial_rows_.push_back(row);
                num_partials += positions_[std::size_t(row)] / kTile + 1;
            }
        }
        for (int segment = 0; segment < int(segments_.size()); ++segment) add_partial_items(segment);
        std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
        partials_.reserve(std::size_t(num_partials) * std::size_t(s.num_heads) * partial_size());
    }

    int num_rows() const { return int(positions_.size()); }

    /** One layer; every thread of the team calls it. */
    void run(Team& team, int thread, const AttentionLayer& layer) {
        Scratch& scratch = scratch_[std::size_t(thread)];
        team.for_each(thread, int(items_.size()), Deal::InOrder, [&](int i) {
            const Item& item = items_[std::size_t(i)];
            item.tile == kAllTiles ? run_direct(item, layer, scratch) : run_partial(item, layer, scratch);
        });
        if (partial_rows_.empty()) return;
        const int count = int(partial_rows_.size()) * s.num_kv_heads;
        team.for_each(thread, count, Deal::Contiguous, [&](int i) {
            merge(partial_rows_[std::size_t(i / s.num_kv_heads)], i % s.num_kv_heads, layer, scratch);
        });
    }

private:
    static constexpr int kDirect = -1;      // the row's work item folds its tiles itself
    static constexpr int kAllTiles = -1;
    static constexpr int kManyRows = 8;     // from here on, rows that share all their keys are worth no partials
    static constexpr int kBlock = 24;       // (row, head) pairs whose scores over one tile stay in the nearest cache
    static constexpr int kSharedRows = 64;  // rows of a shared segment in one work item

    /** Rows and one kv head, over one tile of `segment`, or over all tiles of all the rows' segments. */
    struct Item {
        int first_row, num_rows, kv_head, segment, tile;
        std::int64_t cost;
    };

    struct alignas(64) Scratch {
        float scores[kBlock * kTile];
        bf16 weights[kBlock * kTile];
        float part[kBlock * kMaxHeadDim];
        float values[kBlock * kMaxHeadDim];
        Softmax tile[kBlock], all[kBlock];
    };

    /** Keys first .. end - 1 of a tile that one row sees. */
    struct Span {
        int first, end;
    };

    std::size_t partial_size() const { return std::size_t(s.head_dim) + 16; }  // values, maximum, sum, padding
    float* partial(int row, int tile, int head) const {
        const std::size_t index = std::size_t(first_partial_[std::size_t(row)] + tile) * std::size_t(s.num_heads) + std::size_t(head);
        return partials_.data() + index * partial_size();
    }

    const std::int32_t* segments_begin(int row) const { return row_segments_.data() + row_offsets_[std::size_t(row)]; }
    const std::int32_t* segments_end(int row) const { return row_segments_.data() + row_offsets_[std::size_t(row) + 1]; }
    bool same_segments(int a, int b) const {
        return std::equal(segments_begin(a), segments_end(a), segments_begin(b), segments_end(b));
    }

    /** Rewrite the segments in terms of the planned rows, and list each row's segments. */
    void index_segments(const std::vector<int>& rows) {
        row_offsets_.assign(rows.size() + 1, 0);
        for (Segment& segment : segments_) {
            const auto begin = std::lower_bound(rows.begin(), rows.end(), segment.first_row);
            const auto end = std::lower_bound(begin, rows.end(), segment.first_row + segment.num_rows);
            segment.first_row = int(begin - rows.begin());
            segment.num_rows = int(end - begin);
            for (int i = 0; i < segment.num_rows; ++i) ++row_offsets_[std::size_t(segment.first_row + i) + 1];
        }
        for (std::size_t row = 0; row < rows.size(); ++row) row_offsets_[row + 1] += row_offsets_[row];
        row_segments_.resize(std::size_t(row_offsets_.back()));
        std::vector<int> next(row_offsets_.begin(), row_offsets_.end() - 1);
        for (std::size_t segment = 0; segment < segments_.size(); ++segment) {
            const Segment& it = segments_[segment];
            for (int i = 0; i < it.num_rows; ++i) row_segments_[std::size_t(next[std::size_t(it.first_row + i)]++)] = int(segment);
        }
    }

    void add_direct_items(int begin, int end, int num_threads) {
        int step = std::max(1, kBlock / s.group());
        if ((end - begin + step - 1) / step * s.num_kv_heads < 4 * num_threads) step = std::max(1, step / 2);
        for (int row = begin; row < end; row += step) {
            const int count = std::min(step, end - row);
            const std::int64_t cost = std::int64_t{count} * positions_[std::size_t(row + count - 1)];
            for (int kv_head = 0; kv_head < s.num_kv_heads; ++kv_head) items_.push_back({row, count, kv_head, 0, kAllTiles, cost});
        }
    }

    void add_partial_items(int index) {
        const Segment& segment = segments_[std::size_t(index)];
        const int last = segment.first_row + segment.num_rows;
        for (int row = segment.first_row, end; row < last; row = end) {
            end = row + 1;
            if (first_partial_[std::size_t(row)] == kDirect) continue;
            while (end < last && end - row < kSharedRows && first_partial_[std::size_t(end)] != kDirect) ++end;
            for (int tile = segment.base / kTile; tile * kTile < segment.base + segment.num_keys; ++tile) {
                const int keys = std::min(kTile, segment.base + segment.num_keys - tile * kTile);
                const std::int64_t cost = std::int64_t{end - row} * keys;
                for (int kv_head = 0; kv_head < s.num_kv_heads; ++kv_head) items_.push_back({row, end - row, kv_head, index, tile, cost});
            }
        }
    }

    Span visible(const Segment& segment, int tile, int position, int window) const {
        const int end = segment.causal ? std::min(segment.base + segment.num_keys, position + 1) : segment.base + segment.num_keys;
        const int first = window > 0 ? position + 1 - window : 0;
        return {std::clamp(first - tile * kTile, 0, kTile), std::clamp(end - tile * kTile, 0, kTile)};
    }

    /** Partials of `count` (row, head) pairs from pair `first` on (row = pair / group), into scratch.part and scratch.tile. */
    void attend(int first, int count, int kv_head, const Segment& segment, int tile, const AttentionLayer& layer, Scratch& scratch) const {
        Span spans[kBlock], all{kTile, 0};
        for (int i = 0; i < count; ++i) {
            spans[i] = visible(segment, tile, positions_[std::size_t((first + i) / s.group())], layer.window);
            if (spans[i].first >= spans[i].end) continue;
            all = {std::min(all.first, spans[i].first), std::max(all.end, spans[i].end)};
        }
        const std::int32_t* pages = pages_.data() + segment.first_page + (tile * kTile - segment.base) / kPage;
        const int num_pages = (all.end + kPage - 1) / kPage;
        if (num_pages == 0) {  // all of it lies before the rows' windows
            std::fill(scratch.tile, scratch.tile + count, Softmax{});
            return;
        }
        const bf16* panels[kTilePages];
        const std::size_t q_row = std::size_t(kv_head) * std::size_t(num_rows() * s.group()) + std::size_t(first);
        const bf16* q = layer.q + q_row * std::size_t(s.head_dim);
        for (int page = 0; page < num_pages; ++page) panels[page] = layer.kv.keys(pages[page], kv_head);
        for (int page = 0; page < num_pages; ++page) {
            const bf16* next = page + 1 < num_pages ? panels[page + 1] : layer.kv.values(pages[0], kv_head);
            for (int i = 0; i < count; i += kMaxRows) {
                multiply(std::min(kMaxRows, count - i), {q + i * s.head_dim, s.head_dim}, {panels + page, 1, s.head_dim / 2},
                         scratch.scores + i * kTile + page * kPage, kTile, (const char*)next);
            }
        }
        for (int i = 0; i < count; ++i) scratch.tile[i] = weigh(scratch.scores + i * kTile, scratch.weights + i * kTile, spans[i], num_pages * kPage);
        for (int panel = 0; panel < s.head_panels(); ++panel) {
            for (int page = 0; page < num_pages; ++page) panels[page] = layer.kv.values(pages[page], kv_head) + panel * kPage * kColumns;
            for (int i = 0; i < count; i += kMaxRows) {
                multiply(std::min(kMaxRows, count - i), {scratch.weights + i * kTile, kTile}, {panels, num_pages, kPage / 2},
                         scratch.part + i * s.head_dim + panel * kColumns, s.head_dim, (const char*)(panels[0] + kPage * kColumns));
            }
        }
    }

    /** Scores to softmax weights over the keys of `span`; the other keys of the row's `width` get exact zeros. */
    Softmax weigh(float* scores, bf16* weights, Span span, int width) const {
        if (span.first >= span.end) {
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

    void run_direct(const Item& item, const AttentionLayer& layer, Scratch& scratch) const {
        const int end_pair = (item.first_row + item.num_rows) * s.group();
        for (int first = item.first_row * s.group(), count; first < end_pair; first += count) {
            count = std::min(kBlock, end_pair - first);
            std::fill(scratch.values, scratch.values + count * s.head_dim, 0.0f);
            std::fill(scratch.all, scratch.all + count, Softmax{});
            const int last = positions_[std::size_t((first + count - 1) / s.group())];
            for (const std::int32_t* it = segments_begin(item.first_row); it != segments_end(item.first_row); ++it) {
                const Segment& segment = segments_[std::size_t(*it)];
                const int end = std::min(segment.base + segment.num_keys, last + 1);
                for (int tile = segment.base / kTile; tile * kTile < end; ++tile) {
                    attend(first, count, item.kv_head, segment, tile, layer, scratch);
                    for (int i = 0; i < count; ++i) {
                        fold(scratch.all[i], scratch.values + i * s.head_dim, scratch.tile[i], scratch.part + i * s.head_dim, s.head_dim, log2_scale_);
                    }
                }
            }
            for (int i = 0; i < count; ++i) {
                const int row = (first + i) / s.group(), head = item.kv_head * s.group() + (first + i) % s.group();
                write_context(layer.context + row * layer.context_stride + head * s.head_dim, scratch.values + i * s.head_dim, scratch.all[i].sum, s.head_dim);
            }
        }
    }

    void run_partial(const Item& item, const AttentionLayer& layer, Scratch& scratch) const {
        const int end_pair = (item.first_row + item.num_rows) * s.group();
        for (int first = item.first_row * s.group(), count; first < end_pair; first += count) {
            count = std::min(kBlock, end_pair - first);
            attend(first, count, item.kv_head, segments_[std::size_t(item.segment)], item.tile, layer, scratch);
            for (int i = 0; i < count; ++i) {
                const int row = (first + i) / s.group();
                if (item.tile * kTile > positions_[std::size_t(row)]) continue;  // it has no partial for this tile
                float* to = partial(row, item.tile, item.kv_head * s.group() + (first + i) % s.group());
                std::copy(scratch.part + i * s.head_dim, scratch.part + (i + 1) * s.head_dim, to);
                to[s.head_dim] = scratch.tile[i].max;
                to[s.head_dim + 1] = scratch.tile[i].sum;
            }
        }
    }

    void merge(int row, int kv_head, const AttentionLayer& layer, Scratch& scratch) const {
        for (int head = kv_head * s.group(); head < (kv_head + 1) * s.group(); ++head) {
            Softmax all;
            std::fill(scratch.values, scratch.values + s.head_dim, 0.0f);
            for (int tile = 0; tile <= positions_[std::size_t(row)] / kTile; ++tile) {
                const float* part = partial(row, tile, head);
                fold(all, scratch.values, {part[s.head_dim], part[s.head_dim + 1]}, part, s.head_dim, log2_scale_);
            }
            write_context(layer.context + row * layer.context_stride + head * s.head_dim, scratch.values, all.sum, s.head_dim);
        }
    }

    const Shape s;
    const float log2_scale_;
    std::vector<std::int32_t> positions_, pages_, row_segments_;
    std::vector<int> row_offsets_, first_partial_, partial_rows_;
    std::vector<Segment> segments_;
    std::vector<Item> items_;
    Buffer<float> partials_;
    std::vector<Scratch> scratch_;
};

}  // namespace chorus

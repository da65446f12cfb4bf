// How a step's attention is dealt to the threads: the same for all layers, so it is planned once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "plan.h"

namespace chorus {

/** Rows and one kv head, over one tile of a segment, or over all tiles of all the rows' segments. */
struct AttentionItem {
    static constexpr int kAllTiles = -1;

    int first_row, num_rows, kv_head, segment, tile;
    std::int64_t cost;
};

/** Some rows of a batch, numbered afresh from 0, and the work items that their attention consists of.

    Many rows with the same segments (a prefill chunk) go through their keys in one item, which folds its tiles itself.
    Other rows (decoding) get an item per segment and tile, shared with the rows beside them; those leave partial
   results that are folded afterwards. */
class AttentionPlan {
public:
    static constexpr int kBlock = 24;  // (row, head) pairs whose scores over one tile stay in the nearest cache

    explicit AttentionPlan(const Shape& shape) : s(shape) {}

    /** rows: ascending. Everything is copied out of the plan. */
    void make(std::span<const int> rows, const Plan& plan, int num_threads) {
        segments.assign(plan.segments, plan.segments + plan.num_segments);
        pages.assign(plan.pages, plan.pages + plan.num_pages);
        positions.clear();
        for (int row : rows) positions.push_back(plan.positions[row]);
        index_segments(rows);
        items.clear();
        partial_rows.clear();
        first_partial.assign(rows.size(), kNone);
        num_partials = 0;
        for (int begin = 0, end; begin < num_rows(); begin = end) {
            for (end = begin + 1; end < num_rows() && same_segments(begin, end);) ++end;
            if (num_tiles(end - 1) == 1 || end - begin >= kManyRows) {
                add_whole_items(begin, end, num_threads);
            } else {
                for (int row = begin; row < end; ++row) reserve_partials(row);
            }
        }
        for (int segment = 0; segment < plan.num_segments; ++segment) add_tile_items(segment);
        std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
    }

    int num_rows() const { return int(positions.size()); }
    int num_tiles(int row) const { return positions[row] / kTile + 1; }
    std::span<const int> segments_of(int row) const {
        return {row_segments_.data() + row_offsets_[row], row_segments_.data() + row_offsets_[row + 1]};
    }

    std::vector<Segment> segments;  // first_row and num_rows count the planned rows
    std::vector<std::int32_t> pages;
    std::vector<int> positions;
    std::vector<AttentionItem> items;  // from big to small
    std::vector<int> partial_rows;     // the rows whose partials are to be folded
    std::vector<int> first_partial;    // where a row's partials begin, one for each of its tiles
    int num_partials = 0;

private:
    static constexpr int kNone = -1;
    static constexpr int kManyRows = 8;     // from here on a run of rows is worth no partials
    static constexpr int kSharedRows = 64;  // rows of a shared segment in one item

    /** Rewrite the segments in terms of the planned rows, and list each row's segments. */
    void index_segments(std::span<const int> rows) {
        row_offsets_.assign(rows.size() + 1, 0);
        for (Segment& segment : segments) {
            const auto begin = std::lower_bound(rows.begin(), rows.end(), segment.first_row);
            const auto end = std::lower_bound(begin, rows.end(), segment.first_row + segment.num_rows);
            segment.first_row = int(begin - rows.begin());
            segment.num_rows = int(end - begin);
            for (int i = 0; i < segment.num_rows; ++i) ++row_offsets_[segment.first_row + i + 1];
        }
        for (std::size_t row = 0; row < rows.size(); ++row) row_offsets_[row + 1] += row_offsets_[row];
        row_segments_.resize(row_offsets_.back());
        std::vector<int> next(row_offsets_.begin(), row_offsets_.end() - 1);
        for (int index = 0; index < int(segments.size()); ++index) {
            const Segment& segment = segments[index];
            for (int i = 0; i < segment.num_rows; ++i) row_segments_[next[segment.first_row + i]++] = index;
        }
    }

    bool same_segments(int a, int b) const { return std::ranges::equal(segments_of(a), segments_of(b)); }

    void reserve_partials(int row) {
        partial_rows.push_back(row);
        first_partial[row] = num_partials;
        num_partials += num_tiles(row);
    }

    void add_whole_items(int begin, int end, int num_threads) {
        int step = std::max(1, kBlock / s.group());
        if ((end - begin) / step * s.num_kv_heads < 4 * num_threads) step = std::max(1, step / 2);
        for (int row = begin; row < end; row += step) {
            const int count = std::min(step, end - row);
            add(row, count, 0, AttentionItem::kAllTiles, positions[row + count - 1] + 1);
        }
    }

    void add_tile_items(int index) {
        const Segment& segment = segments[index];
        const int last = segment.first_row + segment.num_rows;
        for (int row = segment.first_row, end; row < last; row = end) {
            end = row + 1;
            if (first_partial[row] == kNone) continue;
            while (end < last && end - row < kSharedRows && first_partial[end] != kNone) ++end;
            for (int tile = segment.base / kTile; tile * kTile < segment.end(); ++tile) {
                add(row, end - row, index, tile, std::min(kTile, segment.end() - tile * kTile));
            }
        }
    }

    void add(int row, int count, int segment, int tile, int num_keys) {
        const std::int64_t cost = std::int64_t{count} * num_keys;
        for (int kv_head = 0; kv_head < s.num_kv_heads; ++kv_head)
            items.push_back({row, count, kv_head, segment, tile, cost});
    }

    const Shape s;
    std::vector<int> row_segments_, row_offsets_;
};

}  // namespace chorus

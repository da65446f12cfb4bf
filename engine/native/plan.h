// A step's plan as the binding hands it over (binding.py and plan_arrays.py mirror these structs), and its check.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "weights.h"

namespace chorus {

constexpr int kPage = 32;
constexpr int kTile = 256;

/** engine/plan.py's AttentionSegment; its page list is the plan's pages[first_page ..]. */
struct Segment {
    std::int32_t first_row, num_rows, base, num_keys, causal, first_page, num_pages;

    int end() const { return base + num_keys; }
};

/** One token to draw. Its lists are runs of the plan's pools: prompt ids; then output, biased and blocked ids, one
   after the other; biases; mask words, of which there are none where every token is allowed. `logprobs`: 0 for none,
   k + 1 for the k best. */
struct SamplingRow {
    std::uint64_t logits_row, position, seed, top_k, logprobs;
    std::uint64_t num_prompt, num_output, num_biased, num_blocked, num_mask_words;
    std::uint64_t first_prompt, first_id, first_bias, first_mask_word;
    double temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty;
};

/** What one row gave. token: -1 when its logits have no finite maximum. best_*: `logprobs - 1` entries, id -1 for those
    that a tiny vocabulary does not fill. */
struct Sample {
    std::int32_t token;
    float logprob;
    std::int32_t* best_ids;
    float* best_logprobs;
};

/** Counts, then arrays. copies: (source, target) pairs. */
struct Plan {
    std::int32_t num_rows, num_segments, num_pages, num_copies, num_logit_rows;
    std::int32_t num_samples, num_prompt_ids, num_ids, num_biases, num_mask_words;
    const std::int32_t *token_ids, *positions;
    const std::int64_t* slots;
    const Segment* segments;
    const std::int32_t *pages, *copies, *logit_rows;
    const SamplingRow* samples;
    const std::int32_t *prompt_ids, *ids;
    const float* biases;
    const std::uint32_t* mask_words;  // bit t % 32 of word t / 32: token t may be drawn
    Sample* results;
};

/** Refuses what would reach outside the model, the pool or the batch, and what breaks the contract of engine/plan.py.
 */
class PlanCheck {
public:
    PlanCheck(const Shape& shape, int num_pages)
        : s(shape), num_pages_(num_pages), slot_steps_(std::size_t(num_pages) * kPage) {}

    /** Throws std::invalid_argument. */
    void check(const Plan& plan) {
        expect(plan.num_rows > 0, "a plan needs a row");
        check_rows(plan);
        check_pages(plan);
        check_segments(plan);
        check_samples(plan);
    }

private:
    static void expect(bool fits, const char* message) {
        if (!fits) throw std::invalid_argument(message);
    }

    bool is_page(std::int64_t page) const { return page >= 0 && page < num_pages_; }
    bool is_token(std::int32_t id) const { return id >= 0 && id < s.vocab; }

    void check_rows(const Plan& plan) {
        ++step_;
        for (int row = 0; row < plan.num_rows; ++row) {
            const std::int64_t slot = plan.slots[row];
            const int position = plan.positions[row];
            expect(is_token(plan.token_ids[row]), "a token id is not in the vocabulary");
            expect(position >= 0 && position < s.max_positions, "a position is outside the model's context");
            expect(slot >= 0 && is_page(slot / kPage), "a slot is outside the pool");
            expect(slot % kPage == position % kPage, "a slot's offset does not fit its position");
            expect(std::exchange(slot_steps_[slot], step_) != step_, "two rows write one slot");
        }
        for (int i = 0; i < plan.num_logit_rows; ++i) {
            const int row = plan.logit_rows[i];
            expect(row >= 0 && row < plan.num_rows, "a logit row is outside the batch");
            expect(i == 0 || plan.logit_rows[i - 1] < row, "logit rows must ascend");
        }
    }

    void check_pages(const Plan& plan) const {
        for (int i = 0; i < plan.num_pages; ++i) expect(is_page(plan.pages[i]), "a segment's page is outside the pool");
        for (int i = 0; i < 2 * plan.num_copies; ++i)
            expect(is_page(plan.copies[i]), "a copied page is outside the pool");
    }

    /** Each row's segments must cover 0 .. its position without a gap, and its own slot must be where it reads itself.
     */
    void check_segments(const Plan& plan) {
        covered_.assign(plan.num_rows, 0);
        for (const Segment* it = plan.segments; it != plan.segments + plan.num_segments; ++it) {
            const bool in_batch =
                it->first_row >= 0 && it->num_rows > 0 && it->num_rows <= plan.num_rows - it->first_row;
            expect(in_batch, "a segment's rows are outside the batch");
            const bool in_context = it->base >= 0 && it->num_keys > 0 && it->num_keys <= s.max_positions - it->base;
            expect(in_context && it->base % kTile == 0, "a segment's keys are outside the context or not aligned");
            expect((it->num_keys + kPage - 1) / kPage <= it->num_pages, "a segment has too few pages");
            for (int row = it->first_row; row < it->first_row + it->num_rows; ++row) check_row(plan, *it, row);
        }
        for (int row = 0; row < plan.num_rows; ++row) {
            expect(covered_[row] == plan.positions[row] + 1, "a row's segments do not reach its position");
        }
    }

    void check_row(const Plan& plan, const Segment& it, int row) {
        const int position = plan.positions[row];
        expect(covered_[row] == it.base && it.base <= position, "a row's segments do not follow one another");
        expect(it.causal || it.end() <= position + 1, "a row would see keys after its own");
        covered_[row] = std::min(it.end(), position + 1);
        if (it.end() <= position) return;
        const std::int64_t page = plan.pages[it.first_page + (position - it.base) / kPage];
        expect(page == plan.slots[row] / kPage, "a row writes to a page that it does not read");
    }

    void check_samples(const Plan& plan) const {
        const auto all_tokens = [this](const std::int32_t* ids, int count) {
            return std::all_of(ids, ids + count, [this](std::int32_t id) { return is_token(id); });
        };
        const bool known = all_tokens(plan.prompt_ids, plan.num_prompt_ids) && all_tokens(plan.ids, plan.num_ids);
        expect(known, "a sampling row names a token outside the vocabulary");
        for (const SamplingRow* row = plan.samples; row != plan.samples + plan.num_samples; ++row) {
            expect(row->logits_row < std::uint64_t(plan.num_logit_rows), "a sampling row has no logits");
            const bool in_range = row->temperature >= 0.0 && row->top_p >= 0.0 && row->min_p >= 0.0;
            expect(in_range && row->repetition_penalty > 0.0, "a sampling parameter is out of range");
            const std::uint64_t words = row->num_mask_words;
            expect(words == 0 || words == std::uint64_t(s.vocab + 31) / 32, "a mask does not fit the vocabulary");
        }
    }

    const Shape s;
    const int num_pages_;
    std::vector<std::uint32_t> slot_steps_;  // the step that last wrote each slot
    std::uint32_t step_ = 0;
    std::vector<int> covered_;  // keys of each row that the segments so far reach
};

}  // namespace chorus

// Draws tokens from rows of logits: no sort of the vocabulary, no state, equal rows and parameters give equal tokens.
//
// What may be drawn is defined by thresholds (ties are kept): top_k keeps logits >= the k-th largest; of what that
// keeps, top_p keeps probabilities >= the largest t whose kept mass reaches top_p; min_p keeps probabilities >= min_p
// times the largest. Then inverse CDF in token order, with one uniform number from (seed, position).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "plan.h"
#include "simd.h"

namespace chorus {

/** Uniform in [0, 1) with 53 bits from Philox4x32-10 (Salmon et al. 2011): key is the seed, counter the position. */
inline double uniform(std::uint64_t seed, std::uint64_t position) {
    std::uint32_t x[4] = {std::uint32_t(position), std::uint32_t(position >> 32), 0, 0};
    std::uint32_t key[2] = {std::uint32_t(seed), std::uint32_t(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t a = std::uint64_t{0xD2511F53} * x[0], b = std::uint64_t{0xCD9E8D57} * x[2];
        const std::uint32_t x1 = x[1], x3 = x[3];
        x[0] = std::uint32_t(b >> 32) ^ x1 ^ key[0];
        x[1] = std::uint32_t(b);
        x[2] = std::uint32_t(a >> 32) ^ x3 ^ key[1];
        x[3] = std::uint32_t(a);
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return (double(x[0] >> 5) * 67108864.0 + double(x[1] >> 6)) / 9007199254740992.0;
}

/** One thread's sampler. A row of logits has width(vocab) entries, those beyond the vocabulary -inf. */
class Sampler {
public:
    static int width(int vocab) { return (vocab + kBlock - 1) / kBlock * kBlock; }

    Sampler(int vocab, int width)
        : vocab_(vocab), width_(width), changed_(width), weights_(width), found_(width), counts_(width), marks_(width),
          block_values_(width / kBlock), block_sums_(width / kBlock) {}

    /** plan: for the lists that the row names. The logits stay as they are. */
    void sample(const SamplingRow& row, const float* logits, const Plan& plan, Sample& out) {
        const bool penalised =
            row.repetition_penalty != 1.0 || row.frequency_penalty != 0.0 || row.presence_penalty != 0.0;
        const bool changed = penalised || row.num_biased + row.num_blocked + row.num_mask_words > 0;
        if (changed) change(row, logits, plan);
        out.token = draw(row, changed ? changed_.data() : logits);
        if (row.logprobs > 0 && out.token >= 0) report(int(row.logprobs) - 1, logits, out);
    }

private:
    static constexpr int kBlock = 64;
    static constexpr float kNothing = -std::numeric_limits<float>::infinity();
    static constexpr double kLeastLogprob = -9999.0;  // for what has no probability: clients cannot read -inf
    static constexpr float kLog2E = 1.4426950408889634f;

    int num_blocks() const { return width_ / kBlock; }

    /** Bias, then blocked ids and the mask, then penalties, into changed_. */
    void change(const SamplingRow& row, const float* logits, const Plan& plan) {
        const std::span prompt(plan.prompt_ids + row.first_prompt, row.num_prompt);
        const std::span output(plan.ids + row.first_id, row.num_output);
        const std::span biased(output.data() + row.num_output, row.num_biased);
        const std::span blocked(biased.data() + row.num_biased, row.num_blocked);
        std::copy(logits, logits + width_, changed_.begin());
        for (std::size_t i = 0; i < biased.size(); ++i) changed_[biased[i]] += plan.biases[row.first_bias + i];
        for (std::int32_t id : blocked) changed_[id] = kNothing;
        if (row.num_mask_words > 0) {
            const std::uint32_t* words = plan.mask_words + row.first_mask_word;
            for (int id = 0; id < vocab_; ++id) {
                if ((words[id / 32] >> (id % 32) & 1) == 0) changed_[id] = kNothing;
            }
        }
        if (row.repetition_penalty != 1.0) {
            ++mark_;
            for (std::int32_t id : prompt) repeat_once(id, float(row.repetition_penalty));
            for (std::int32_t id : output) repeat_once(id, float(row.repetition_penalty));
        }
        for (std::int32_t id : output) ++counts_[id];
        for (std::int32_t id : output) {
            const int count = std::exchange(counts_[id], 0);
            if (count == 0) continue;  // this id has had its turn
            changed_[id] -= float(row.frequency_penalty) * float(count);
            changed_[id] -= float(row.presence_penalty);
        }
    }

    void repeat_once(std::int32_t id, float repetition) {
        if (std::exchange(marks_[id], mark_) == mark_) return;
        float& x = changed_[id];
        x = x > 0.0f ? x / repetition : x * repetition;
    }

    /** Each block's maximum into block_values_; the largest of all, NaN where any logit is. */
    float maxima(const float* logits) {
        F16 all = splat(kNothing);
        bool nan = false;
        for (int block = 0; block < num_blocks(); ++block) {
            const float* x = logits + block * kBlock;
            const F16 a = load(x), b = load(x + 16), c = load(x + 32), d = load(x + 48);
            nan |= any_nan(a + b) | any_nan(c + d);
            const F16 top = max(max(a, b), max(c, d));
            block_values_[block] = maximum(top);
            all = max(all, top);
        }
        return nan ? std::numeric_limits<float>::quiet_NaN() : maximum(all);
    }

    std::int32_t draw(const SamplingRow& row, const float* logits) {
        const float top = maxima(logits);
        if (!std::isfinite(top)) return -1;
        if (row.temperature == 0.0 || row.top_p == 0.0) return first_at_least(logits, top);
        const bool limited = row.top_k > 0 && row.top_k < std::uint64_t(vocab_);
        const float least = limited ? kth_largest(logits, int(row.top_k)) : kNothing;
        const double total = weigh(logits, top, least, std::min(kLog2E / float(row.temperature), 1e30f));
        float threshold = 0.0f;
        if (row.top_p < 1.0) threshold = top_p_threshold(row.top_p, total);
        threshold = std::max(threshold, float(row.min_p));
        return invert(uniform(row.seed, row.position), threshold > 0.0f ? drop_below(threshold) : total);
    }

    std::int32_t first_at_least(const float* logits, float value) const {
        int block = 0;
        while (block_values_[block] < value) ++block;
        std::int32_t id = block * kBlock;
        while (logits[id] < value) ++id;
        return id;
    }

    /** Needs block_values_. The k-th largest block maximum bounds the answer from below, so few logits are looked at.
     */
    float kth_largest(const float* logits, int k) {
        float bound = kNothing;
        if (k <= num_blocks()) {
            std::vector<float>& sorted = found_;
            std::copy(block_values_.begin(), block_values_.end(), sorted.begin());
            std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.begin() + num_blocks(), std::greater<>());
            bound = sorted[k - 1];
        }
        const int count = collect(logits, bound);
        std::nth_element(found_.begin(), found_.begin() + (k - 1), found_.begin() + count, std::greater<>());
        return found_[k - 1];
    }

    /** The values that are at least `bound`, into found_; how many. */
    int collect(const float* values, float bound) {
        int count = 0;
        for (int i = 0; i < width_; i += 16) {
            for (std::uint32_t mask = greater_equal(load(values + i), splat(bound)); mask != 0; mask &= mask - 1) {
                found_[count++] = values[i + std::countr_zero(mask)];
            }
        }
        return count;
    }

    /** weights_ = 2^((logit - top) * scale) where logit >= least, else 0; block sums; the total. */
    double weigh(const float* logits, float top, float least, float scale) {
        double total = 0.0;
        for (int block = 0; block < num_blocks(); ++block) {
            F16 block_sum = splat(0.0f);
            for (int i = block * kBlock; i < (block + 1) * kBlock; i += 16) {
                const F16 x = load(logits + i);
                const F16 weight =
                    select_greater_equal(x, splat(least), exp2((x - splat(top)) * splat(scale)), splat(0.0f));
                store(weights_.data() + i, weight);
                block_sum = block_sum + weight;
            }
            total += block_sums_[block] = sum(block_sum);
        }
        return total;
    }

    /** Zero the weights below `threshold`; the new total. */
    double drop_below(float threshold) {
        double total = 0.0;
        for (int block = 0; block < num_blocks(); ++block) {
            F16 block_sum = splat(0.0f);
            for (int i = block * kBlock; i < (block + 1) * kBlock; i += 16) {
                const F16 weight = load(weights_.data() + i),
                          kept = select_greater_equal(weight, splat(threshold), weight, splat(0.0f));
                store(weights_.data() + i, kept);
                block_sum = block_sum + kept;
            }
            total += block_sums_[block] = sum(block_sum);
        }
        return total;
    }

    /** The largest weight t for which weights >= t add up to top_p of `total`. */
    float top_p_threshold(double top_p, double total) {
        const double wanted = top_p * total;
        // What lies below this cannot add up to more than top_p leaves out.
        const float bound = float((1.0 - top_p) * total / double(width_));
        const int count = collect(weights_.data(), std::max(bound, std::numeric_limits<float>::min()));
        std::fill(found_.begin() + count, found_.begin() + (count + 15) / 16 * 16, 0.0f);
        std::uint32_t low = std::bit_cast<std::uint32_t>(bound), high = std::bit_cast<std::uint32_t>(1.0f) + 1;
        while (high - low >
               1) {  // positive floats are ordered like their bits; mass(low) suffices, mass(high) does not
            const std::uint32_t middle = low + (high - low) / 2;
            (mass(count, std::bit_cast<float>(middle)) >= wanted ? low : high) = middle;
        }
        return std::bit_cast<float>(low);
    }

    double mass(int count, float threshold) const {
        double total = 0.0;
        for (int begin = 0; begin < count; begin += kBlock) {
            F16 block_sum = splat(0.0f);
            for (int i = begin; i < std::min(count, begin + kBlock); i += 16) {
                const F16 weight = load(found_.data() + i);
                block_sum = block_sum + select_greater_equal(weight, splat(threshold), weight, splat(0.0f));
            }
            total += sum(block_sum);
        }
        return total;
    }

    /** The first token at which the running sum of weights exceeds u * total. */
    std::int32_t invert(double u, double total) const {
        const double target = u * total;
        double running = 0.0;
        int found = -1;
        for (int block = 0; block < num_blocks(); ++block) {
            const double block_sum = block_sums_[block];
            if (block_sum == 0.0) continue;
            found = block;
            if (running + block_sum > target) break;
            running += block_sum;
        }
        std::int32_t token = -1;
        for (int i = found * kBlock; i < (found + 1) * kBlock; ++i) {
            if (weights_[i] == 0.0f) continue;
            running += double(weights_[i]);
            token = i;
            if (running > target) break;
        }
        return token;  // the last one that has any weight where rounding left the target behind it
    }

    /** Log-softmax of the unchanged logits: the drawn token's and the `k` best (ties by lower id). */
    void report(int k, const float* logits, Sample& out) {
        const float top = maxima(logits);
        const double log_total = std::log(weigh(logits, top, kNothing, kLog2E));
        const auto logprob = [&](std::int32_t id) {
            return float(std::max(double(logits[id]) - double(top) - log_total, kLeastLogprob));
        };
        out.logprob = logprob(out.token);
        std::fill(out.best_ids, out.best_ids + k, -1);
        if (k == 0) return;
        const float least = kth_largest(logits, std::min(k, vocab_));
        std::vector<std::int32_t> best;
        for (std::int32_t id = 0; id < vocab_; ++id) {
            if (logits[id] >= least) best.push_back(id);
        }
        std::stable_sort(best.begin(), best.end(),
                         [&](std::int32_t a, std::int32_t b) { return logits[a] > logits[b]; });
        for (int i = 0; i < std::min(k, int(best.size())); ++i) {
            out.best_ids[i] = best[i];
            out.best_logprobs[i] = logprob(best[i]);
        }
    }

    const int vocab_, width_;
    std::vector<float> changed_, weights_, found_;
    std::vector<int> counts_;
    std::vector<std::uint64_t> marks_;  // whose repetition has been counted, by the mark of that row
    std::uint64_t mark_ = 0;
    std::vector<float> block_values_;
    std::vector<double> block_sums_;
};

}  // namespace chorus

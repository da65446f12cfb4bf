// One engine step: a flat batch of rows through the whole model, then sampling. See engine/plan.py for what a plan means.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "sampler.h"
#include "team.h"
#include "weights.h"

namespace chorus {

/** A plan as the binding hands it over (the same struct stands in library.py); counts, then arrays. */
struct Plan {
    std::int32_t num_rows, num_segments, num_pages, num_copies, num_logit_rows, num_samples, num_prompt_ids, num_ids, num_biases;
    const std::int32_t *token_ids, *positions;
    const std::int64_t* slots;
    const Segment* segments;
    const std::int32_t *pages, *copies;  // copies: (source, target) pairs
    const std::int32_t* logit_rows;
    const SamplingRow* samples;
    const std::int32_t *prompt_ids, *ids;
    const float* biases;
    Sample* results;
};

class Step {
public:
    Step(const Shape& shape, const Weights& weights, int num_pages, int num_threads)
        : s(shape), w(weights), num_pages_(num_pages), team_(num_threads), all_rows_(shape, num_threads), last_rows_(shape, num_threads),
          inv_freq_(shape.inv_freq, s.inv_freq + s.head_dim / 2), windows_(shape.windows, shape.windows + shape.num_layers),
          pool_(std::size_t(s.num_layers) * std::size_t(num_pages) * s.page_elements()), slot_steps_(std::size_t(num_pages) * kPage) {
        for (int thread = 0; thread < num_threads; ++thread) samplers_.emplace_back(s.vocab, logits_width());
    }

    /** Throws std::invalid_argument, before anything has changed, when the plan reaches outside model, pool or batch. */
    void execute(const Plan& plan) {
        check(plan);
        prepare(plan);
        team_.run([&](int thread) { run(plan, thread); });
    }

    const float* logits() const { return logits_.data(); }
    int logits_width() const { return (s.vocab + 63) / 64 * 64; }
    bf16* pool() const { return pool_.data(); }
    std::size_t pool_size() const { return pool_.size(); }

private:
    static constexpr int kChunkRows = 192;  // rows of A that stay in a core's second-level cache

    static void expect(bool fits, const char* message) {
        if (!fits) throw std::invalid_argument(message);
    }

    bool is_page(std::int64_t page) const { return page >= 0 && page < num_pages_; }

    void check(const Plan& plan) {
        expect(plan.num_rows > 0, "a plan needs a row");
        ++step_;
        for (int row = 0; row < plan.num_rows; ++row) {
            expect(plan.token_ids[row] >= 0 && plan.token_ids[row] < s.vocab, "a token id is not in the vocabulary");
            expect(plan.positions[row] >= 0 && plan.positions[row] < s.max_positions, "a position is outside the model's context");
            expect(plan.slots[row] >= 0 && is_page(plan.slots[row] / kPage), "a slot is outside the pool");
            expect(plan.slots[row] % kPage == plan.positions[row] % kPage, "a slot's offset does not fit its position");
            expect(std::exchange(slot_steps_[std::size_t(plan.slots[row])], step_) != step_, "two rows write one slot");
        }
        for (int i = 0; i < plan.num_pages; ++i) expect(is_page(plan.pages[i]), "a segment's page is outside the pool");
        for (int i = 0; i < 2 * plan.num_copies; ++i) expect(is_page(plan.copies[i]), "a copied page is outside the pool");
        check_segments(plan);
        for (int i = 0; i < plan.num_logit_rows; ++i) {
            expect(plan.logit_rows[i] >= 0 && plan.logit_rows[i] < plan.num_rows, "a logit row is outside the batch");
            expect(i == 0 || plan.logit_rows[i - 1] < plan.logit_rows[i], "logit rows must ascend");
        }
        check_samples(plan);
    }

    void check_segments(const Plan& plan) {
        covered_.assign(std::size_t(plan.num_rows), 0);
        for (int i = 0; i < plan.num_segments; ++i) {
            const Segment& it = plan.segments[i];
            expect(it.first_row >= 0 && it.num_rows > 0 && it.num_rows <= plan.num_rows - it.first_row, "a segment's rows are outside the batch");
            expect(it.base >= 0 && it.base % kTile == 0 && it.num_keys > 0 && it.num_keys <= s.max_positions - it.base, "a segment's keys are not aligned");
            expect((it.num_keys + kPage - 1) / kPage <= it.num_pages, "a segment has too few pages");
            for (int row = it.first_row; row < it.first_row + it.num_rows; ++row) {
                const int position = plan.positions[row], last = it.base + it.num_keys - 1;
                expect(covered_[std::size_t(row)] == it.base && it.base <= position, "a row's segments do not follow one another");
                expect(it.causal || last <= position, "a row would see keys after its own");
                covered_[std::size_t(row)] = std::min(last, position) + 1;
                if (last < position) continue;
                const std::int64_t page = plan.pages[it.first_page + (position - it.base) / kPage];
                expect(page == plan.slots[row] / kPage, "a row writes to a page that it does not read");
            }
        }
        for (int row = 0; row < plan.num_rows; ++row) expect(covered_[std::size_t(row)] == plan.positions[row] + 1, "a row's segments do not reach its position");
    }

    void check_samples(const Plan& plan) {
        const auto in_vocabulary = [this](const std::int32_t* ids, int count) {
            return std::all_of(ids, ids + count, [this](std::int32_t id) { return id >= 0 && id < s.vocab; });
        };
        expect(in_vocabulary(plan.prompt_ids, plan.num_prompt_ids) && in_vocabulary(plan.ids, plan.num_ids), "a sampling row names a token outside the vocabulary");
        for (int i = 0; i < plan.num_samples; ++i) {
            const SamplingRow& row = plan.samples[i];
            expect(row.logits_row < std::uint64_t(plan.num_logit_rows), "a sampling row has no logits");
            expect(row.temperature >= 0.0 && row.top_p >= 0.0 && row.min_p >= 0.0 && row.repetition_penalty > 0.0, "a sampling parameter is out of range");
        }
    }

    void prepare(const Plan& plan) {
        const auto n = [](int rows, int columns) { return std::size_t(rows) * std::size_t(columns); };
        const std::vector<Segment> segments(plan.segments, plan.segments + plan.num_segments);
        rows_.resize(std::size_t(plan.num_rows));
        for (int row = 0; row < plan.num_rows; ++row) rows_[std::size_t(row)] = row;
        logit_rows_.assign(plan.logit_rows, plan.logit_rows + plan.num_logit_rows);
        q_rows_.assign(std::size_t(plan.num_rows), -1);
        for (int i = 0; i < plan.num_logit_rows; ++i) q_rows_[std::size_t(plan.logit_rows[i])] = i;
        all_rows_.plan(rows_, plan.positions, segments, plan.pages, std::size_t(plan.num_pages), team_.size());
        last_rows_.plan(logit_rows_, plan.positions, segments, plan.pages, std::size_t(plan.num_pages), team_.size());
        residual_.reserve(n(plan.num_rows, s.hidden));
        last_residual_.reserve(n(plan.num_logit_rows, s.hidden));
        normed_.reserve(n(plan.num_rows, stride(s.hidden)));
        q_.reserve(n(plan.num_rows, s.num_heads * s.head_dim));
        context_.reserve(n(plan.num_rows, stride(s.num_heads * s.head_dim)));
        gated_.reserve(n(plan.num_rows, stride(s.intermediate)));
        rotary_.reserve(n(plan.num_rows, s.head_dim));
        logits_.reserve(n(plan.num_logit_rows, logits_width()));
    }

    /** Elements from one row of A to the next: rows that lay whole pages apart would share a few cache sets. */
    static int stride(int k) { return k + 32; }

    void run(const Plan& plan, int thread) {
        open_pages(plan, thread);
        team_.for_each(thread, plan.num_rows, Deal::Contiguous, [&](int row) {
            w.embed(plan.token_ids[row], residual_.data() + std::size_t(row) * std::size_t(s.hidden));
            turn(plan.positions[row], rotary_.data() + std::size_t(row) * std::size_t(s.head_dim));
        });
        for (int layer = 0; layer + 1 < s.num_layers; ++layer) {
            project_qkv(plan, layer, rows_, thread);
            finish_layer(layer, all_rows_, residual_.data(), thread);
        }
        project_qkv(plan, s.num_layers - 1, q_rows_, thread);
        if (plan.num_logit_rows == 0) return;
        // From here on only the rows whose logits are wanted go on.
        team_.for_each(thread, plan.num_logit_rows, Deal::Contiguous, [&](int i) {
            const float* from = residual_.data() + std::size_t(plan.logit_rows[i]) * std::size_t(s.hidden);
            std::copy(from, from + s.hidden, last_residual_.data() + std::size_t(i) * std::size_t(s.hidden));
        });
        finish_layer(s.num_layers - 1, last_rows_, last_residual_.data(), thread);
        compute_logits(plan.num_logit_rows, thread);
        team_.for_each(thread, plan.num_samples, Deal::InOrder, [&](int i) {
            const SamplingRow& row = plan.samples[i];
            const float* logits = logits_.data() + std::size_t(row.logits_row) * std::size_t(logits_width());
            samplers_[std::size_t(thread)].sample(row, logits, plan.prompt_ids, plan.ids, plan.biases, plan.results[i]);
        });
    }

    KvLayer kv_layer(int layer) const {
        const std::size_t size = std::size_t(num_pages_) * s.page_elements();
        return {pool_.data() + std::size_t(layer) * size, s.page_elements(), s.head_dim};
    }

    /** Copy pages; then zero the values of those whose first slot is about to be written: stale NaN times 0 is NaN. */
    void open_pages(const Plan& plan, int thread) {
        team_.for_each(thread, s.num_layers, Deal::Contiguous, [&](int layer) {
            const KvLayer kv = kv_layer(layer);
            for (int i = 0; i < plan.num_copies; ++i) {
                std::memmove(kv.keys(plan.copies[2 * i + 1], 0), kv.keys(plan.copies[2 * i], 0), s.page_elements() * sizeof(bf16));
            }
            for (int row = 0; row < plan.num_rows; ++row) {
                if (plan.slots[row] % kPage != 0) continue;
                for (int kv_head = 0; kv_head < s.num_kv_heads; ++kv_head) {
                    bf16* values = kv.values(int(plan.slots[row] / kPage), kv_head);
                    std::fill(values, values + kPage * s.head_dim, bf16{0});
                }
            }
        });
    }

    /** The cosines, then the sines of one position. */
    void turn(int position, float* rotary) const {
        const int half = s.head_dim / 2;
        for (int i = 0; i < half; ++i) {
            const float angle = float(position) * inv_freq_[std::size_t(i)];
            rotary[i] = std::cos(angle) * s.rope_scale;
            rotary[half + i] = std::sin(angle) * s.rope_scale;
        }
    }

    void normalise(const float* x, const float* weight, int row) const {
        F16 squares = splat(0.0f);
        for (int i = 0; i < s.hidden; i += 16) squares = fma(load(x + i), load(x + i), squares);
        const F16 factor = splat(1.0f / std::sqrt(sum(squares) / float(s.hidden) + s.rms_eps));
        bf16* out = normed_.data() + std::size_t(row) * std::size_t(stride(s.hidden));
        for (int i = 0; i < s.hidden; i += 16) store_bf16(out + i, load(x + i) * factor * load(weight + i));
    }

    void normalise_rows(const float* residual, int num_rows, const float* weight, int thread) {
        team_.for_each(thread, num_rows, Deal::Contiguous, [&](int row) { normalise(residual + std::size_t(row) * std::size_t(s.hidden), weight, row); });
    }

    /** Rows of A times all units of `width` panels; finish(first row, rows, unit, tile) takes each [rows][width * 32] tile. */
    template <class Finish>
    void product(const bf16* a, int num_rows, int k, const bf16* panels, int num_units, int width, int thread, Finish&& finish) {
        const int num_chunks = (num_rows + kChunkRows - 1) / kChunkRows;
        const int chunk_rows = (num_rows + num_chunks - 1) / num_chunks;
        team_.for_each(thread, num_chunks * num_units, Deal::Contiguous, [&](int item) {
            const int unit = item % num_units, begin = item / num_units * chunk_rows, end = std::min(num_rows, begin + chunk_rows);
            const int num_blocks = (end - begin + kMaxRows - 1) / kMaxRows;
            const std::size_t panel_size = std::size_t(k) * kColumns;
            const bf16* unit_panels = panels + std::size_t(unit * width) * panel_size;
            alignas(64) float tile[kMaxRows * kMaxHeadDim];
            for (int block = 0; block < num_blocks; ++block) {
                const int first = begin + (end - begin) * block / num_blocks, last = begin + (end - begin) * (block + 1) / num_blocks;
                for (int i = 0; i < width; ++i) {
                    const bf16* panel = unit_panels + std::size_t(i) * panel_size;
                    const bf16* next = panel + panel_size + (block == 0 ? 0 : panel_size / 2);
                    multiply(last - first, {a + std::size_t(first) * std::size_t(stride(k)), stride(k)}, {&panel, 1, k / 2},
                             tile + i * kColumns, width * kColumns, (const char*)next);
                }
                finish(first, last - first, unit, tile);
            }
        });
    }

    /** Queries for the rows that q_rows maps to 0 or more, keys and values for all. */
    void project_qkv(const Plan& plan, int layer, const std::vector<int>& q_rows, int thread) {
        const Layer& l = w.layers[std::size_t(layer)];
        const KvLayer kv = kv_layer(layer);
        const int num_q_rows = layer + 1 < s.num_layers ? plan.num_rows : plan.num_logit_rows;
        normalise_rows(residual_.data(), plan.num_rows, l.attention_norm, thread);
        const int width = s.qk_norm ? s.head_panels() : 1;  // panels that must be finished together
        product(normed_.data(), plan.num_rows, s.hidden, l.qkv, s.qkv_panels() / width, width, thread, [&](int first, int count, int unit, float* tile) {
            const int head = unit * width / s.head_panels(), panel = unit * width % s.head_panels();
            for (int i = 0; i < count; ++i) {
                const int row = first + i, dims = width * kColumns, dim = panel * kColumns;
                float* x = tile + i * dims;
                if (s.qkv_bias) add(x, l.qkv_bias + head * s.head_dim + dim, dims);
                const int kv_head = head < s.num_heads ? 0 : (head - s.num_heads) % s.num_kv_heads;
                const int page = int(plan.slots[row] / kPage), slot = int(plan.slots[row] % kPage);
                if (head >= s.num_heads + s.num_kv_heads) {
                    write_values(x, dims, kv.values(page, kv_head) + dim * kPage, slot);
                    continue;
                }
                if (s.qk_norm) normalise_head(x, head < s.num_heads ? l.q_norm : l.k_norm);
                const float* rotary = rotary_.data() + std::size_t(row) * std::size_t(s.head_dim);
                for (int p = 0; p < width; ++p) rotate(x + p * kColumns, rotary + (panel + p) * 16);
                if (head >= s.num_heads) {
                    write_keys(x, dims, kv.keys(page, kv_head) + dim * kPage, slot);
                } else if (q_rows[std::size_t(row)] >= 0) {
                    const int group = s.group(), at = (head / group * num_q_rows + q_rows[std::size_t(row)]) * group + head % group;
                    bf16* q = q_.data() + std::size_t(at) * std::size_t(s.head_dim) + dim;
                    for (int d = 0; d < dims; d += 16) store_bf16(q + d, load(x + d));
                }
            }
        });
    }

    static void add(float* x, const float* y, int count) {
        for (int i = 0; i < count; i += 16) store(x + i, load(x + i) + load(y + i));
    }

    void normalise_head(float* x, const float* weight) const {
        F16 squares = splat(0.0f);
        for (int d = 0; d < s.head_dim; d += 16) squares = fma(load(x + d), load(x + d), squares);
        const F16 factor = splat(1.0f / std::sqrt(sum(squares) / float(s.head_dim) + s.rms_eps));
        for (int d = 0; d < s.head_dim; d += 16) store(x + d, load(x + d) * factor * load(weight + d));
    }

    void rotate(float* panel, const float* rotary) const {
        const F16 low = load(panel), high = load(panel + 16), cosine = load(rotary), sine = load(rotary + s.head_dim / 2);
        store(panel, low * cosine - high * sine);
        store(panel + 16, high * cosine + low * sine);
    }

    /** One key into its column: [dim pairs][32 keys][2]. */
    static void write_keys(const float* x, int dims, bf16* keys, int slot) {
        alignas(32) bf16 rounded[kMaxHeadDim];
        for (int d = 0; d < dims; d += 16) store_bf16(rounded + d, load(x + d));
        for (int d = 0; d < dims; d += 2) std::memcpy(keys + d * kPage + slot * 2, rounded + d, 2 * sizeof(bf16));
    }

    /** One value into its row: [dims / 32][key pairs][32 dims][2]. */
    static void write_values(const float* x, int dims, bf16* values, int slot) {
        alignas(32) bf16 rounded[kMaxHeadDim];
        for (int d = 0; d < dims; d += 16) store_bf16(rounded + d, load(x + d));
        for (int d = 0; d < dims; ++d) values[d / kColumns * kPage * kColumns + slot / 2 * 2 * kColumns + d % kColumns * 2 + slot % 2] = rounded[d];
    }

    /** All of a layer after its queries, keys and values. */
    void finish_layer(int layer, Attention& attention, float* residual, int thread) {
        const Layer& l = w.layers[std::size_t(layer)];
        const int num_rows = attention.num_rows(), heads = s.num_heads * s.head_dim;
        attention.run(team_, thread, {kv_layer(layer), q_.data(), context_.data(), stride(heads), windows_[std::size_t(layer)]});
        const auto add_to_residual = [&](int first, int count, int panel, const float* tile) {
            for (int i = 0; i < count; ++i) add(residual + std::size_t(first + i) * std::size_t(s.hidden) + panel * kColumns, tile + i * kColumns, kColumns);
        };
        product(context_.data(), num_rows, heads, l.output, s.hidden / kColumns, 1, thread, add_to_residual);
        normalise_rows(residual, num_rows, l.mlp_norm, thread);
        product(normed_.data(), num_rows, s.hidden, l.gate_up, s.intermediate / 16, 1, thread, [&](int first, int count, int panel, const float* tile) {
            for (int i = 0; i < count; ++i) {
                bf16* out = gated_.data() + std::size_t(first + i) * std::size_t(stride(s.intermediate)) + panel * 16;
                store_bf16(out, gate(load(tile + i * kColumns), load(tile + i * kColumns + 16)));
            }
        });
        product(gated_.data(), num_rows, s.intermediate, l.down, s.hidden / kColumns, 1, thread, add_to_residual);
    }

    /** silu(gate) * up. Below -80 silu is 0 for all that floats can tell. */
    static F16 gate(F16 gate, F16 up) {
        const F16 exponential = exp2(max(splat(-80.0f), gate) * splat(-1.4426950408889634f));
        return gate / (splat(1.0f) + exponential) * up;
    }

    void compute_logits(int num_rows, int thread) {
        normalise_rows(last_residual_.data(), num_rows, w.final_norm, thread);
        product(normed_.data(), num_rows, s.hidden, w.lm_head, s.vocab_panels(), 1, thread, [&](int first, int count, int panel, const float* tile) {
            const int width = logits_width(), columns = std::min(kColumns, s.vocab - panel * kColumns);
            for (int i = 0; i < count; ++i) {
                float* out = logits_.data() + std::size_t(first + i) * std::size_t(width) + panel * kColumns;
                store(out, load(tile + i * kColumns));
                store(out + 16, load(tile + i * kColumns + 16));
                if (panel + 1 == s.vocab_panels()) std::fill(out + columns, out + (width - panel * kColumns), kNothing);
            }
        });
    }

    const Shape s;
    const Weights& w;
    const int num_pages_;
    Team team_;
    Attention all_rows_, last_rows_;
    std::vector<Sampler> samplers_;
    const std::vector<float> inv_freq_;
    const std::vector<std::int32_t> windows_;
    Buffer<bf16> pool_;
    std::vector<std::uint32_t> slot_steps_;  // the step that last wrote each slot
    std::uint32_t step_ = 0;
    std::vector<int> rows_, logit_rows_, q_rows_, covered_;
    Buffer<float> residual_, last_residual_, rotary_, logits_;
    Buffer<bf16> normed_, q_, context_, gated_;
};

}  // namespace chorus

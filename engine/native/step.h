// One engine step: a flat batch of rows through the whole model, then sampling. engine/plan.py says what a plan means.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "attention.h"
#include "phases.h"
#include "plan.h"
#include "sampler.h"
#include "team.h"
#include "weights.h"

namespace chorus {

class Step {
public:
    Step(const Shape& shape, const Weights& weights, int num_pages, int num_threads)
        : s(shape), w(weights), num_pages_(num_pages), check_(s, num_pages), team_(num_threads),
          attention_(s, num_threads), last_attention_(s, num_threads),
          inv_freq_(s.inv_freq, s.inv_freq + s.head_dim / 2), windows_(s.windows, s.windows + s.num_layers),
          pool_(std::size_t(s.num_layers) * num_pages * s.page_elements()) {
        for (int thread = 0; thread < num_threads; ++thread) samplers_.emplace_back(s.vocab, logits_width());
    }

    /** Throws std::invalid_argument, before anything is written, for a plan that PlanCheck refuses. */
    void execute(const Plan& plan) {
        check_.check(plan);
        phases_.start();
        prepare(plan);
        team_.run([&](int thread) { run(plan, thread); });
    }

    /** Where the last step's time went. */
    const Phases& phases() const { return phases_; }

    const float* logits() const { return logits_.data(); }
    int logits_width() const { return Sampler::width(s.vocab); }
    bf16* pool() const { return pool_.data(); }
    std::size_t pool_size() const { return pool_.size(); }

private:
    static constexpr int kChunkRows = 192;  // rows of A that stay in a core's second-level cache

    /** Elements from one row of A to the next: rows that lay whole pages apart would share a few cache sets. */
    static int stride(int k) { return k + 32; }
    int heads_width() const { return s.num_heads * s.head_dim; }

    void prepare(const Plan& plan) {
        rows_.resize(plan.num_rows);
        std::iota(rows_.begin(), rows_.end(), 0);
        logit_index_.assign(plan.num_rows, -1);
        for (int i = 0; i < plan.num_logit_rows; ++i) logit_index_[plan.logit_rows[i]] = i;
        attention_.plan(rows_, plan, team_.size());
        last_attention_.plan({plan.logit_rows, plan.logit_rows + plan.num_logit_rows}, plan, team_.size());
        const std::size_t num_rows = plan.num_rows, num_logit_rows = plan.num_logit_rows;
        residual_.reserve(num_rows * s.hidden);
        last_residual_.reserve(num_logit_rows * s.hidden);
        normed_.reserve(num_rows * stride(s.hidden));
        q_.reserve(num_rows * heads_width());
        context_.reserve(num_rows * stride(heads_width()));
        gated_.reserve(num_rows * stride(s.intermediate));
        rotary_.reserve(num_rows * s.head_dim);
        logits_.reserve(num_logit_rows * logits_width());
    }

    void run(const Plan& plan, int thread) {
        open_pages(plan, thread);
        team_.for_each(thread, plan.num_rows, Deal::Contiguous, [&](int row) {
            w.embed(plan.token_ids[row], residual(row));
            turn(plan.positions[row], rotary(row));
        });
        if (thread == 0) phases_.end(Phase::Prepare);
        const int last = s.num_layers - 1;
        for (int layer = 0; layer < last; ++layer) {
            project_qkv(plan, layer, rows_, plan.num_rows, thread);
            finish_layer(layer, attention_, residual_.data(), thread);
        }
        // After the last layer's keys and values, only the rows whose logits are wanted go on.
        project_qkv(plan, last, logit_index_, plan.num_logit_rows, thread);
        if (plan.num_logit_rows == 0) return;
        team_.for_each(thread, plan.num_logit_rows, Deal::Contiguous, [&](int i) {
            std::copy_n(residual(plan.logit_rows[i]), s.hidden, last_residual_.data() + std::int64_t{i} * s.hidden);
        });
        finish_layer(last, last_attention_, last_residual_.data(), thread);
        compute_logits(plan.num_logit_rows, thread);
        if (thread == 0) phases_.end(Phase::Logits);
        team_.for_each(thread, plan.num_samples, Deal::InOrder, [&](int i) {
            const float* logits = logits_.data() + std::int64_t(plan.samples[i].logits_row) * logits_width();
            samplers_[thread].sample(plan.samples[i], logits, plan, plan.results[i]);
        });
        if (thread == 0) phases_.end(Phase::Sampling);
    }

    float* residual(std::int64_t row) const { return residual_.data() + row * s.hidden; }
    float* rotary(std::int64_t row) const { return rotary_.data() + row * s.head_dim; }
    KvLayer kv_layer(std::int64_t layer) const {
        return {pool_.data() + layer * num_pages_ * s.page_elements(), s.page_elements(), s.head_dim};
    }

    /** Copy pages; then zero the values of those whose first slot is about to be written: stale NaN times 0 is NaN. */
    void open_pages(const Plan& plan, int thread) {
        team_.for_each(thread, s.num_layers, Deal::Contiguous, [&](int layer) {
            const KvLayer kv = kv_layer(layer);
            for (int i = 0; i < 2 * plan.num_copies; i += 2) {
                std::memmove(kv.keys(plan.copies[i + 1], 0), kv.keys(plan.copies[i], 0),
                             s.page_elements() * sizeof(bf16));
            }
            for (int row = 0; row < plan.num_rows; ++row) {
                if (plan.slots[row] % kPage != 0) continue;
                for (int kv_head = 0; kv_head < s.num_kv_heads; ++kv_head) {
                    std::fill_n(kv.values(plan.slots[row] / kPage, kv_head), kPage * s.head_dim, bf16{0});
                }
            }
        });
    }

    /** The cosines, then the sines of one position. */
    void turn(int position, float* rotary) const {
        for (int i = 0; i < s.head_dim / 2; ++i) {
            const float angle = float(position) * inv_freq_[i];
            rotary[i] = std::cos(angle) * s.rope_scale;
            rotary[s.head_dim / 2 + i] = std::sin(angle) * s.rope_scale;
        }
    }

    /** What brings x[size] to a root mean square of 1. */
    F16 rms_factor(const float* x, int size) const {
        F16 squares = splat(0.0f);
        for (int i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
        return splat(1.0f / std::sqrt(sum(squares) / float(size) + s.rms_eps));
    }

    void normalise(const float* residual, int num_rows, const float* weight, int thread) {
        team_.for_each(thread, num_rows, Deal::Contiguous, [&](int row) {
            const float* x = residual + std::int64_t{row} * s.hidden;
            bf16* out = normed_.data() + std::int64_t{row} * stride(s.hidden);
            const F16 factor = rms_factor(x, s.hidden);
            for (int i = 0; i < s.hidden; i += 16) store_bf16(out + i, load(x + i) * factor * load(weight + i));
        });
    }

    /** A [rows][stride(k)] times B, `width` neighbouring panels at a time. finish(first row, rows, unit, tile) takes
       each tile of [rows][width * 32] as soon as it is there. */
    template <class Finish>
    void product(const bf16* a, int num_rows, const Matrix& b, int width, int thread, Finish&& finish) {
        const int k = b.k, num_units = b.columns / kColumns / width;
        if (b.packed && num_rows <= PackedMatrix::kMaxRows) {
            team_.for_each(thread, num_units, Deal::Contiguous, [&](int unit) {
                alignas(64) float tile[PackedMatrix::kMaxRows * kMaxHeadDim];
                for (int i = 0; i < width; ++i)
                    b.packed.multiply(num_rows, {a, stride(k)}, unit * width + i, tile + i * kColumns, width * kColumns);
                finish(0, num_rows, unit, tile);
            });
            return;
        }
        const int num_chunks = (num_rows + kChunkRows - 1) / kChunkRows;
        team_.for_each(thread, num_chunks * num_units, Deal::Contiguous, [&](int item) {
            const int unit = item % num_units, chunk = item / num_units;
            const int begin = num_rows * chunk / num_chunks, end = num_rows * (chunk + 1) / num_chunks;
            const int num_blocks = (end - begin + kMaxRows - 1) / kMaxRows;
            const std::int64_t panel_size = std::int64_t{k} * kColumns;
            alignas(64) float tile[kMaxRows * kMaxHeadDim];
            for (int block = 0; block < num_blocks; ++block) {
                const int first = begin + (end - begin) * block / num_blocks;
                const int count = begin + (end - begin) * (block + 1) / num_blocks - first;
                const RowBlock rows{a + std::int64_t{first} * stride(k), stride(k)};
                for (int i = 0; i < width; ++i) {
                    const bf16* panel = b.panels + (std::int64_t{unit} * width + i) * panel_size;
                    const Prefetch next = next_panel(panel + panel_size, panel_size, count, block, num_blocks);
                    multiply(count, rows, {&panel, 1, k / 2}, tile + i * kColumns, width * kColumns, next);
                }
                finish(first, count, unit, tile);
            }
        });
    }

    /** Fetch the next panel while one is worked on, in its first two row blocks. With few rows the work is faster than
        memory; what the processor fetches by itself is best then. */
    static Prefetch next_panel(const bf16* next, std::int64_t size, int count, int block, int num_blocks) {
        if (num_blocks == 1) return count <= 4 ? Prefetch{} : Prefetch{next, 2};
        return block < 2 ? Prefetch{next + block * size / 2, 1} : Prefetch{};
    }

    /** Keys and values of all rows, and the queries of those whose q_index, their place in q_, is not negative. */
    void project_qkv(const Plan& plan, int layer, const std::vector<int>& q_index, int num_q_rows, int thread) {
        const Layer& l = w.layers[layer];
        const KvLayer kv = kv_layer(layer);
        const int width = s.qk_norm ? s.head_panels() : 1;  // panels that must be finished together
        const int first_value = s.num_heads + s.num_kv_heads, group = s.group();
        normalise(residual_.data(), plan.num_rows, l.attention_norm, thread);
        const auto finish = [&](int first, int count, int unit, float* tile) {
            const int head = unit * width / s.head_panels(), dims = width * kColumns, dim = unit * dims % s.head_dim;
            for (int row = first; row < first + count; ++row, tile += dims) {
                const std::int64_t page = plan.slots[row] / kPage;
                const int slot = int(plan.slots[row] % kPage);
                if (s.qkv_bias) add(tile, l.qkv_bias + head * s.head_dim + dim, dims);
                if (head >= first_value) {
                    write_values(tile, dims, kv.values(page, head - first_value) + dim * kPage, slot);
                    continue;
                }
                if (s.qk_norm) normalise_head(tile, head < s.num_heads ? l.q_norm : l.k_norm);
                for (int i = 0; i < dims; i += kColumns) rotate(tile + i, rotary(row) + (dim + i) / 2);
                if (head >= s.num_heads) {
                    write_keys(tile, dims, kv.keys(page, head - s.num_heads) + dim * kPage, slot);
                } else if (q_index[row] >= 0) {
                    const std::int64_t place = (head / group * num_q_rows + q_index[row]) * group + head % group;
                    round(tile, dims, q_.data() + place * s.head_dim + dim);
                }
            }
        };
        product(normed_.data(), plan.num_rows, l.qkv, width, thread, finish);
        if (thread == 0) phases_.end(Phase::Queries);
    }

    static void add(float* x, const float* y, int count) {
        for (int i = 0; i < count; i += 16) store(x + i, load(x + i) + load(y + i));
    }

    static void round(const float* x, int count, bf16* out) {
        for (int i = 0; i < count; i += 16) store_bf16(out + i, load(x + i));
    }

    void normalise_head(float* x, const float* weight) const {
        const F16 factor = rms_factor(x, s.head_dim);
        for (int d = 0; d < s.head_dim; d += 16) store(x + d, load(x + d) * factor * load(weight + d));
    }

    void rotate(float* panel, const float* rotary) const {
        const F16 low = load(panel), high = load(panel + 16), cosine = load(rotary),
                  sine = load(rotary + s.head_dim / 2);
        store(panel, low * cosine - high * sine);
        store(panel + 16, high * cosine + low * sine);
    }

    /** One key into its column: [dim pairs][32 keys][2]. */
    static void write_keys(const float* x, int dims, bf16* keys, int slot) {
        alignas(64) bf16 rounded[kMaxHeadDim];
        round(x, dims, rounded);
        for (int d = 0; d < dims; d += 2) std::memcpy(keys + d * kPage + slot * 2, rounded + d, 2 * sizeof(bf16));
    }

    /** One value into its row: [dims / 32][key pairs][32 dims][2]. */
    static void write_values(const float* x, int dims, bf16* values, int slot) {
        alignas(64) bf16 rounded[kMaxHeadDim];
        round(x, dims, rounded);
        values += slot / 2 * 2 * kColumns + slot % 2;
        for (int d = 0; d < dims; ++d) values[d / kColumns * kPage * kColumns + d % kColumns * 2] = rounded[d];
    }

    /** All of a layer after its queries, keys and values. */
    void finish_layer(int layer, Attention& attention, float* residual, int thread) {
        const Layer& l = w.layers[layer];
        const int num_rows = attention.num_rows();
        const auto add_to_residual = [&](int first, int count, int panel, const float* tile) {
            for (int row = first; row < first + count; ++row, tile += kColumns) {
                add(residual + std::int64_t{row} * s.hidden + panel * kColumns, tile, kColumns);
            }
        };
        const auto gate_up = [&](int first, int count, int panel, const float* tile) {
            for (int row = first; row < first + count; ++row, tile += kColumns) {
                bf16* out = gated_.data() + std::int64_t{row} * stride(s.intermediate) + panel * 16;
                store_bf16(out, silu(load(tile)) * load(tile + 16));
            }
        };
        attention.run(team_, thread,
                      {kv_layer(layer), q_.data(), context_.data(), stride(heads_width()), windows_[layer]});
        if (thread == 0) phases_.end(Phase::Attention);
        product(context_.data(), num_rows, l.output, 1, thread, add_to_residual);
        if (thread == 0) phases_.end(Phase::Output);
        normalise(residual, num_rows, l.mlp_norm, thread);
        product(normed_.data(), num_rows, l.gate_up, 1, thread, gate_up);
        product(gated_.data(), num_rows, l.down, 1, thread, add_to_residual);
        if (thread == 0) phases_.end(Phase::Mlp);
    }

    /** x / (1 + e^-x). Below -80 it is 0 for all that floats can tell. */
    static F16 silu(F16 x) { return x / (splat(1.0f) + exp2(max(splat(-80.0f), x) * splat(-1.4426950408889634f))); }

    void compute_logits(int num_rows, int thread) {
        const int width = logits_width();
        const auto finish = [&](int first, int count, int panel, const float* tile) {
            const int column = panel * kColumns;
            for (int row = first; row < first + count; ++row, tile += kColumns) {
                float* out = logits_.data() + std::int64_t{row} * width;
                std::copy_n(tile, kColumns, out + column);
                if (column + kColumns >= s.vocab) std::fill(out + s.vocab, out + width, kNothing);
            }
        };
        normalise(last_residual_.data(), num_rows, w.final_norm, thread);
        product(normed_.data(), num_rows, w.lm_head, 1, thread, finish);
    }

    const Shape s;
    const Weights& w;
    const std::int64_t num_pages_;
    PlanCheck check_;
    Phases phases_;
    Team team_;
    Attention attention_, last_attention_;  // of all rows; of the rows whose logits are wanted
    std::vector<Sampler> samplers_;         // one per thread
    const std::vector<float> inv_freq_;
    const std::vector<std::int32_t> windows_;
    Buffer<bf16> pool_;
    std::vector<int> rows_, logit_index_;
    Buffer<float> residual_, last_residual_, rotary_, logits_;
    Buffer<bf16> normed_, q_, context_, gated_;
};

}  // namespace chorus

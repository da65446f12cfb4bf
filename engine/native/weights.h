// The model's shape and its weights, packed once into the panels that the micro kernel reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel.h"
#include "memory.h"

namespace chorus {

constexpr int kMaxHeadDim = 256;

/** Filled by the binding (the same struct stands in binding.py). inv_freq: head_dim / 2. windows: one per layer, 0 for
 * none. */
struct Shape {
    std::int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
    std::int32_t tied, qkv_bias, qk_norm, max_positions;
    float rms_eps, rope_scale;
    const float* inv_freq;
    const std::int32_t* windows;

    int group() const { return num_heads / num_kv_heads; }
    int num_qkv_heads() const { return num_heads + 2 * num_kv_heads; }
    int head_panels() const { return head_dim / kColumns; }
    int qkv_panels() const { return num_qkv_heads() * head_panels(); }
    int vocab_panels() const { return (vocab + kColumns - 1) / kColumns; }
    std::int64_t page_elements() const { return std::int64_t{2} * 32 * num_kv_heads * head_dim; }

    void check() const {
        const bool fits = num_layers > 0 && hidden > 0 && hidden % 32 == 0 && intermediate > 0 &&
                          intermediate % 32 == 0 && head_dim > 0 && head_dim % 32 == 0 && head_dim <= kMaxHeadDim &&
                          num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0 && vocab > 0 &&
                          max_positions > 0;
        if (!fits) throw std::invalid_argument("the model's shape does not fit the native step");
    }
};

/** Where column `column` of a head's panel `panel` comes from in queries and keys: d and d + head_dim / 2 share a
   panel, because the rotary embedding turns them together. Scores do not care about the order. */
inline int rotary_dim(const Shape& s, int panel, int column) {
    return panel * 16 + column % 16 + (column < 16 ? 0 : s.head_dim / 2);
}

struct Layer {
    bf16 *qkv, *output, *gate_up, *down;
    float *attention_norm, *mlp_norm, *qkv_bias, *q_norm, *k_norm;
};

class Weights {
public:
    explicit Weights(const Shape& shape) : s(shape) {
        s.check();
        const auto n = [](std::size_t rows, std::size_t columns) { return rows * columns; };
        const int qkv = s.qkv_panels() * kColumns, heads = s.num_heads * s.head_dim;
        const std::size_t layer = n(qkv, s.hidden) + n(s.hidden, heads) + n(3 * s.intermediate, s.hidden);
        const std::size_t head = n(s.vocab_panels() * kColumns, s.hidden);
        matrices_.reserve(n(s.num_layers, layer) + head + (s.tied ? 0 : n(s.vocab, s.hidden)));
        vectors_.reserve(n(s.num_layers, 2 * s.hidden + qkv + 2 * s.head_dim) + s.hidden);
        bf16* matrix = matrices_.data();
        float* vector = vectors_.data();
        const auto take = [](auto*& from, std::size_t count) { return std::exchange(from, from + count); };
        for (int i = 0; i < s.num_layers; ++i) {
            Layer& l = layers.emplace_back();
            l.qkv = take(matrix, n(qkv, s.hidden));
            l.output = take(matrix, n(s.hidden, heads));
            l.gate_up = take(matrix, n(2 * s.intermediate, s.hidden));
            l.down = take(matrix, n(s.hidden, s.intermediate));
            l.attention_norm = take(vector, s.hidden);
            l.mlp_norm = take(vector, s.hidden);
            l.qkv_bias = take(vector, qkv);
            l.q_norm = take(vector, s.head_dim);
            l.k_norm = take(vector, s.head_dim);
        }
        lm_head = take(matrix, head);
        embedding_ = s.tied ? nullptr : take(matrix, n(s.vocab, s.hidden));
        final_norm = take(vector, s.hidden);
    }

    /** Pack one parameter, named as in its Hugging Face module; data is [rows, columns] row-major. */
    void load(const std::string& name, int layer, const bf16* data, int rows, int columns) {
        if (name == "embed_tokens") return load_embedding(data, rows, columns);
        if (name == "lm_head") return load_head(data, rows, columns);
        if (name == "norm") return load_vector(final_norm, data, rows, columns, s.hidden, [](int i) { return i; });
        if (layer < 0 || layer >= s.num_layers) throw std::invalid_argument("no such layer");
        Layer& l = layers[layer];
        const auto same = [](int i) { return i; };
        const auto head_order = [this](int i) { return rotary_dim(s, i / kColumns, i % kColumns); };
        if (name == "input_layernorm") return load_vector(l.attention_norm, data, rows, columns, s.hidden, same);
        if (name == "post_attention_layernorm") return load_vector(l.mlp_norm, data, rows, columns, s.hidden, same);
        if (name == "q_norm") return load_vector(l.q_norm, data, rows, columns, s.head_dim, head_order);
        if (name == "k_norm") return load_vector(l.k_norm, data, rows, columns, s.head_dim, head_order);
        if (name == "q_proj") return load_heads(l, data, rows, columns, 0, s.num_heads, true);
        if (name == "k_proj") return load_heads(l, data, rows, columns, s.num_heads, s.num_kv_heads, true);
        if (name == "v_proj")
            return load_heads(l, data, rows, columns, s.num_heads + s.num_kv_heads, s.num_kv_heads, false);
        if (name == "o_proj") return load_matrix(l.output, data, rows, columns, s.hidden, s.num_heads * s.head_dim);
        if (name == "down_proj") return load_matrix(l.down, data, rows, columns, s.hidden, s.intermediate);
        if (name == "gate_proj") return load_gated(l, data, rows, columns, 0);
        if (name == "up_proj") return load_gated(l, data, rows, columns, 16);
        throw std::invalid_argument("no parameter of this model is called " + name);
    }

    /** x[hidden] = the embedding of a token. A tied model reads it out of the head's panels. */
    void embed(int token, float* x) const {
        if (embedding_ != nullptr) {
            const bf16* row = embedding_ + std::int64_t{token} * s.hidden;
            for (int i = 0; i < s.hidden; i += 16) store(x + i, load_bf16(row + i));
            return;
        }
        const bf16* column = panel_of(lm_head, token, s.hidden) + token % kColumns * 2;
        for (int i = 0; i < s.hidden; i += 2, column += 2 * kColumns) {
            x[i] = to_float(column[0]);
            x[i + 1] = to_float(column[1]);
        }
    }

    const Shape s;
    std::vector<Layer> layers;
    bf16* lm_head;
    float* final_norm;

private:
    static void expect(bool fits) {
        if (!fits) throw std::invalid_argument("a parameter has the wrong shape");
    }

    /** The panel that holds a column of a matrix with k rows. */
    static bf16* panel_of(bf16* matrix, std::int64_t column, int k) {
        return matrix + column / kColumns * kColumns * k;
    }

    /** One column of a matrix with k rows. */
    static void pack_column(bf16* matrix, int column, const bf16* data, int k) {
        bf16* to = panel_of(matrix, column, k) + column % kColumns * 2;
        for (int i = 0; i < k; i += 2, to += 2 * kColumns) std::memcpy(to, data + i, 2 * sizeof(bf16));
    }

    static void load_matrix(bf16* to, const bf16* data, int rows, int columns, int want_rows, int want_columns) {
        expect(rows == want_rows && columns == want_columns);
        for (int row = 0; row < rows; ++row) pack_column(to, row, data + std::int64_t{row} * columns, columns);
    }

    template <class Order>
    static void load_vector(float* to, const bf16* data, int rows, int columns, int size, Order&& order) {
        expect(rows == size && columns == 1);
        for (int i = 0; i < size; ++i) to[i] = to_float(data[order(i)]);
    }

    /** Heads first .. first + count - 1 of the qkv columns; a matrix, or its bias when it has one column. */
    void load_heads(Layer& l, const bf16* data, int rows, int columns, int first, int count, bool rotary) {
        expect(rows == count * s.head_dim && (columns == s.hidden || (columns == 1 && s.qkv_bias)));
        for (int i = 0; i < rows; ++i) {
            const int in_head = i % s.head_dim, column = first * s.head_dim + i;
            const int row = rotary ? i - in_head + rotary_dim(s, in_head / kColumns, in_head % kColumns) : i;
            if (columns == 1) {
                l.qkv_bias[column] = to_float(data[row]);
            } else {
                pack_column(l.qkv, column, data + std::int64_t{row} * columns, columns);
            }
        }
    }

    /** Gate goes to columns 0 .. 15 of each panel, up to 16 .. 31. */
    void load_gated(Layer& l, const bf16* data, int rows, int columns, int first) {
        expect(rows == s.intermediate && columns == s.hidden);
        for (int row = 0; row < rows; ++row) {
            const int column = row / 16 * kColumns + row % 16 + first;
            pack_column(l.gate_up, column, data + std::int64_t{row} * columns, columns);
        }
    }

    void load_head(const bf16* data, int rows, int columns) {
        load_matrix(lm_head, data, rows, columns, s.vocab, s.hidden);
        const std::vector<bf16> zeros(s.hidden, bf16{0});
        for (int i = s.vocab; i < s.vocab_panels() * kColumns; ++i) pack_column(lm_head, i, zeros.data(), s.hidden);
    }

    void load_embedding(const bf16* data, int rows, int columns) {
        if (s.tied) return load_head(data, rows, columns);
        expect(rows == s.vocab && columns == s.hidden);
        std::copy_n(data, std::int64_t{rows} * columns, embedding_);
    }

    Buffer<bf16> matrices_;
    Buffer<float> vectors_;
    bf16* embedding_;
};

}  // namespace chorus

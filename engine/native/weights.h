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
#include "packed.h"

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

/** The column of d's place: rotary_dim read backwards. */
inline int rotary_column(const Shape& s, int dim) {
    const int in_half = dim % (s.head_dim / 2);
    return in_half / 16 * kColumns + in_half % 16 + (dim < s.head_dim / 2 ? 0 : 16);
}

/** B of a product, in panels; also in the bits of its file where it came from a quantized one. */
struct Matrix {
    bf16* panels = nullptr;
    int k = 0, columns = 0;
    PackedMatrix packed;

    /** The panel that holds a column. */
    bf16* panel_of(std::int64_t column) const { return panels + column / kColumns * kColumns * k; }
};

struct Layer {
    Matrix qkv, output, gate_up, down;
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
        bf16* panels = matrices_.data();
        float* vector = vectors_.data();
        const auto take = [](auto*& from, std::size_t count) { return std::exchange(from, from + count); };
        const auto matrix = [&](int columns, int k) { return Matrix{take(panels, n(columns, k)), k, columns, {}}; };
        for (int i = 0; i < s.num_layers; ++i) {
            Layer& l = layers.emplace_back();
            l.qkv = matrix(qkv, s.hidden);
            l.output = matrix(s.hidden, heads);
            l.gate_up = matrix(2 * s.intermediate, s.hidden);
            l.down = matrix(s.hidden, s.intermediate);
            l.attention_norm = take(vector, s.hidden);
            l.mlp_norm = take(vector, s.hidden);
            l.qkv_bias = take(vector, qkv);
            l.q_norm = take(vector, s.head_dim);
            l.k_norm = take(vector, s.head_dim);
        }
        lm_head = matrix(s.vocab_panels() * kColumns, s.hidden);
        std::fill_n(lm_head.panel_of(s.vocab - 1), kColumns * s.hidden, bf16{0});  // not all of it is a token's
        embedding_ = s.tied ? nullptr : take(panels, n(s.vocab, s.hidden));
        final_norm = take(vector, s.hidden);
    }

    /** Pack one parameter, named as in its Hugging Face module; data is [rows, columns] row-major. */
    void load(const std::string& name, int layer, const bf16* data, int rows, int columns) {
        if (name == "embed_tokens" && !s.tied) return load_embedding(data, rows, columns);
        if (name == "norm") return load_vector(final_norm, data, rows, columns, s.hidden, [](int i) { return i; });
        Layer& l = at(layer);
        const auto same = [](int i) { return i; };
        const auto head_order = [this](int i) { return rotary_dim(s, i / kColumns, i % kColumns); };
        if (name == "input_layernorm") return load_vector(l.attention_norm, data, rows, columns, s.hidden, same);
        if (name == "post_attention_layernorm") return load_vector(l.mlp_norm, data, rows, columns, s.hidden, same);
        if (name == "q_norm") return load_vector(l.q_norm, data, rows, columns, s.head_dim, head_order);
        if (name == "k_norm") return load_vector(l.k_norm, data, rows, columns, s.head_dim, head_order);
        if (columns == 1 && s.qkv_bias) {
            return each_column(name, layer, rows, s.hidden, [&](const Matrix&, int column, int row) {
                l.qkv_bias[column] = to_float(data[row]);
            });
        }
        each_column(name, layer, rows, columns, [&](const Matrix& matrix, int column, int row) {
            pack_column(matrix, column, data + std::int64_t{row} * columns);
        });
    }

    /** Keep a matrix that `load` has packed also as the file has it: blocks of a GGUF `type`, [rows][row_bytes]. */
    void load_packed(const std::string& name, int layer, const std::string& type, const std::uint8_t* blocks, int rows,
                     int columns) {
        if (name == "embed_tokens" && !s.tied) return;  // no matrix of a product
        const std::int64_t row_bytes = PackedMatrix::row_bytes(type, columns);
        each_column(name, layer, rows, columns, [&](Matrix& matrix, int column, int row) {
            matrix.packed.add(type, column, blocks + row * row_bytes, matrix.k, matrix.columns);
        });
    }

    /** Drop what is packed in part, or is not the same bit for bit; the number of matrices that stay packed. */
    int check_packed() {
        int count = 0;
        const auto check = [&](Matrix& matrix, int columns) {
            if (!matrix.packed.holds(matrix.panels, columns)) matrix.packed = PackedMatrix();
            count += matrix.packed ? 1 : 0;
        };
        for (Layer& l : layers) {
            for (Matrix* matrix : {&l.qkv, &l.output, &l.gate_up, &l.down}) check(*matrix, matrix->columns);
        }
        check(lm_head, s.vocab);
        return count;
    }

    /** x[hidden] = the embedding of a token. A tied model reads it out of the head's panels. */
    void embed(int token, float* x) const {
        if (embedding_ != nullptr) {
            const bf16* row = embedding_ + std::int64_t{token} * s.hidden;
            for (int i = 0; i < s.hidden; i += 16) store(x + i, load_bf16(row + i));
            return;
        }
        const bf16* column = lm_head.panel_of(token) + token % kColumns * 2;
        for (int i = 0; i < s.hidden; i += 2, column += 2 * kColumns) {
            x[i] = to_float(column[0]);
            x[i + 1] = to_float(column[1]);
        }
    }

    const Shape s;
    std::vector<Layer> layers;
    Matrix lm_head;
    float* final_norm;

private:
    static void expect(bool fits) {
        if (!fits) throw std::invalid_argument("a parameter has the wrong shape");
    }

    Layer& at(int layer) {
        if (layer < 0 || layer >= s.num_layers) throw std::invalid_argument("no such layer");
        return layers[layer];
    }

    /** put(matrix, column, row) for every row of a matrix parameter, which is a column of a product's B. */
    template <class Put>
    void each_column(const std::string& name, int layer, int rows, int k, Put&& put) {
        Layer& l = at(layer);
        const int q_rows = s.num_heads * s.head_dim, kv_rows = s.num_kv_heads * s.head_dim;
        const auto each = [&](Matrix& matrix, int want_rows, auto&& column_of) {
            expect(rows == want_rows && k == matrix.k);
            for (int row = 0; row < rows; ++row) put(matrix, column_of(row), row);
        };
        const auto same = [](int row) { return row; };
        const auto heads = [&](int count, int first) {
            each(l.qkv, count, [&](int row) { return first + row - row % s.head_dim + rotary_column(s, row % s.head_dim); });
        };
        if (name == "q_proj") return heads(q_rows, 0);
        if (name == "k_proj") return heads(kv_rows, q_rows);
        if (name == "v_proj") return each(l.qkv, kv_rows, [&](int row) { return q_rows + kv_rows + row; });
        if (name == "o_proj") return each(l.output, s.hidden, same);
        if (name == "down_proj") return each(l.down, s.hidden, same);
        // Gate goes to columns 0 .. 15 of each panel, up to 16 .. 31.
        if (name == "gate_proj") return each(l.gate_up, s.intermediate, [](int row) { return row + row / 16 * 16; });
        if (name == "up_proj") return each(l.gate_up, s.intermediate, [](int row) { return row + row / 16 * 16 + 16; });
        if (name == "lm_head" || name == "embed_tokens") return each(lm_head, s.vocab, same);
        throw std::invalid_argument("no parameter of this model is called " + name);
    }

    static void pack_column(const Matrix& matrix, int column, const bf16* data) {
        bf16* to = matrix.panel_of(column) + column % kColumns * 2;
        for (int i = 0; i < matrix.k; i += 2, to += 2 * kColumns) std::memcpy(to, data + i, 2 * sizeof(bf16));
    }

    template <class Order>
    static void load_vector(float* to, const bf16* data, int rows, int columns, int size, Order&& order) {
        expect(rows == size && columns == 1);
        for (int i = 0; i < size; ++i) to[i] = to_float(data[order(i)]);
    }

    void load_embedding(const bf16* data, int rows, int columns) {
        expect(rows == s.vocab && columns == s.hidden);
        std::copy_n(data, std::int64_t{rows} * columns, embedding_);
    }

    Buffer<bf16> matrices_;
    Buffer<float> vectors_;
    bf16* embedding_;
};

}  // namespace chorus

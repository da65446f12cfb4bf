// Weights in the four or eight bits of the file that they came from, expanded to bf16 in registers.
//
// A file's block is 32 consecutive k of one column: w = scale * code + min. Expanded and rounded to bf16 this is, bit for
// bit, the weight that the panels of weights.h hold, so a product over it has the same bits; it only reads a third of the
// memory, which is what a step with few rows waits for. `PackedMatrix::holds` checks that the two are equal.
//
// Layout of a panel: per 32 k one block of [32 halves: scales][32 halves: mins][codes]. Four-bit codes stand in lines of
// 64 bytes, [4 groups of 4 pairs][2 halves of the columns]: word i of a line has eight codes, two (left, right) for each of
// its pairs; left is column i / 2 of its half, right that plus 8, both at k + i % 2. Eight-bit codes stand as the panels'
// weights do: [pair][32 columns][2].
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernel.h"
#include "memory.h"

namespace chorus {

constexpr int kPackedBlock = 32;  // k that share a scale

/** One block of a panel, ready to expand. Bits: 4 or 8. */
template <int Bits>
class PackedBlock {
public:
    static constexpr int kHeader = 2 * kColumns * 2, kCodes = kPackedBlock * kColumns * Bits / 8;
    static constexpr int kBytes = kHeader + kCodes, kHalf = Bits == 4 ? 64 : 32;

    /** half: of the panel's columns. */
    PackedBlock(const std::uint8_t* block, int half) : codes_(block + kHeader + half * kHalf) {
        const F16 scales = load_half(block + half * 32), mins = load_half(block + kColumns * 2 + half * 32);
        left_scale_ = double_lower(scales), right_scale_ = double_upper(scales);
        left_min_ = double_lower(mins), right_min_ = double_upper(mins);
    }

    /** Sixteen columns of (k, k + 1), before rounding: columns 0 .. 7, then 8 .. 15. */
    template <class Take>
    auto expand(int pair, Take&& take) const {
        F16 left, right;
        if constexpr (Bits == 4) {
            const CodeWords words = load_words(codes_ + pair / 4 * 128);
            left = nibbles(words, pair % 4 * 8), right = nibbles(words, pair % 4 * 8 + 4);
        } else {
            left = load_int8(codes_ + pair * 64), right = load_int8(codes_ + pair * 64 + 16);
        }
        return take(fma(left, left_scale_, left_min_), fma(right, right_scale_, right_min_));
    }

private:
    const std::uint8_t* codes_;
    F16 left_scale_, right_scale_, left_min_, right_min_;
};

/** multiply_rows of kernel.h, the same sums in the same order, with a packed panel of `num_blocks` blocks. */
template <int R, int Bits>
void multiply_packed_rows(RowBlock a, const std::uint8_t* panel, int num_blocks, float* out, std::ptrdiff_t out_stride) {
    F16 acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
    const bf16* a_pair = a.data;
    for (int i = 0; i < num_blocks; ++i, panel += PackedBlock<Bits>::kBytes) {
        const PackedBlock<Bits> left(panel, 0), right(panel, 1);
#pragma GCC unroll 4
        for (int pair = 0; pair < kPackedBlock / 2; ++pair) {
            const ColumnPairs x_left = left.expand(pair, round_pairs), x_right = right.expand(pair, round_pairs);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const ColumnPairs x = splat_pair(a_pair + r * a.stride);
                acc[r][0] = dot2(acc[r][0], x, x_left);
                acc[r][1] = dot2(acc[r][1], x, x_right);
            }
            a_pair += 2;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        store(out + r * out_stride, acc[r][0]);
        store(out + r * out_stride + 16, acc[r][1]);
    }
}

/** A whole matrix [k][columns], packed; empty when its file has no such form. */
class PackedMatrix {
public:
    static constexpr int kMaxRows = std::min(8, chorus::kMaxRows);  // of a product; more would not fit the registers

    explicit operator bool() const { return num_added_ > 0; }

    /** Bytes of one column in the blocks of a GGUF type. Throws std::invalid_argument for those not known here. */
    static std::int64_t row_bytes(const std::string& type, int k) {
        if (type == "Q4_0") return k / kPackedBlock * 18;
        if (type == "Q4_1") return k / kPackedBlock * 20;
        if (type == "Q8_0") return k / kPackedBlock * 34;
        throw std::invalid_argument("no such packing: " + type);
    }

    /** Add one of the matrix's `columns`, which all have to be of as many bits. */
    void add(const std::string& type, std::int64_t column, const std::uint8_t* blocks, int k, std::int64_t columns) {
        const int bits = type == "Q8_0" ? 8 : 4;
        if (panels_.size() == 0) {
            bits_ = bits, k_ = k;
            panels_.reserve(panel_bytes() * (columns / kColumns));
            std::memset(panels_.data(), 0, panels_.size());
        }
        if (bits != bits_) return;
        std::uint8_t* to = panels_.data() + column / kColumns * panel_bytes();
        const std::int64_t file_block = row_bytes(type, kPackedBlock);
        for (int i = 0; i < k / kPackedBlock; ++i, to += block_bytes(), blocks += file_block)
            add_block(type, int(column % kColumns), blocks, to);
        ++num_added_;
    }

    /** Whether all `columns` have been added, and are those of these panels bit for bit (a zero's sign aside). */
    bool holds(const bf16* panels, std::int64_t columns) const {
        if (num_added_ != columns) return false;
        const std::int64_t num_panels = (columns + kColumns - 1) / kColumns;
        for (std::int64_t panel = 0; panel < num_panels; ++panel, panels += std::int64_t{k_} * kColumns) {
            const bool same = bits_ == 4 ? panel_is<4>(panel_at(panel), panels) : panel_is<8>(panel_at(panel), panels);
            if (!same) return false;
        }
        return true;
    }

    void multiply(int rows, RowBlock a, std::int64_t panel, float* out, std::ptrdiff_t out_stride) const {
        const auto kernel = kKernels[bits_ == 8][std::size_t(rows - 1)];
        kernel(a, panel_at(panel), k_ / kPackedBlock, out, out_stride);
    }

private:
    using Kernel = void (*)(RowBlock, const std::uint8_t*, int, float*, std::ptrdiff_t);

    template <int Bits, std::size_t... R>
    static constexpr std::array<Kernel, sizeof...(R)> make_kernels(std::index_sequence<R...>) {
        return {&multiply_packed_rows<static_cast<int>(R) + 1, Bits>...};
    }
    using Rows = std::make_index_sequence<kMaxRows>;
    static constexpr std::array<std::array<Kernel, kMaxRows>, 2> kernels() {
        return {make_kernels<4>(Rows()), make_kernels<8>(Rows())};
    }
    static const std::array<std::array<Kernel, kMaxRows>, 2> kKernels;

    std::int64_t block_bytes() const { return bits_ == 4 ? PackedBlock<4>::kBytes : PackedBlock<8>::kBytes; }
    std::int64_t panel_bytes() const { return k_ / kPackedBlock * block_bytes(); }
    const std::uint8_t* panel_at(std::int64_t panel) const { return panels_.data() + panel * panel_bytes(); }

    /** A file's block has its scale, for Q4_1 its min, then the codes: 8 bits each, or the low nibbles of 16 bytes for
        k 0 .. 15 and the high ones for k 16 .. 31. */
    static void add_block(const std::string& type, int column, const std::uint8_t* from, std::uint8_t* to) {
        std::memcpy(to + column * 2, from, 2);
        if (type == "Q4_1") std::memcpy(to + kColumns * 2 + column * 2, from + 2, 2);
        if (type == "Q4_0") store_half(to + kColumns * 2 + column * 2, -8.0f * half_to_float(from));  // exact
        const std::uint8_t* codes = from + (type == "Q4_1" ? 4 : 2);
        const int half = column / 16, in_half = column % 16, word = in_half % 8 * 2;
        to += PackedBlock<4>::kHeader;
        for (int i = 0; i < kPackedBlock; ++i) {
            const int pair = i / 2;
            if (type == "Q8_0") {
                to[pair * 64 + half * 32 + in_half * 2 + i % 2] = codes[i];
                continue;
            }
            const int code = codes[i % 16] >> (i < 16 ? 0 : 4) & 15;
            const int nibble = pair % 4 * 2 + in_half / 8;
            std::uint8_t& byte = to[pair / 4 * 128 + half * 64 + (word + i % 2) * 4 + nibble / 2];
            byte = std::uint8_t(byte | code << nibble % 2 * 4);
        }
    }

    template <int Bits>
    bool panel_is(const std::uint8_t* packed, const bf16* panel) const {
        bf16 words[kColumns];
        for (int i = 0; i < k_ / kPackedBlock; ++i, packed += PackedBlock<Bits>::kBytes) {
            const PackedBlock<Bits> halves[2] = {{packed, 0}, {packed, 1}};
            for (int pair = 0; pair < kPackedBlock / 2; ++pair) {
                for (const PackedBlock<Bits>& half : halves) {
                    half.expand(pair, [&](F16 left, F16 right) {
                        store_bf16(words, left), store_bf16(words + 16, right);
                    });
                    for (int column = 0; column < kColumns; ++column) {
                        if (words[column] != *panel++ && to_float(words[column]) != to_float(panel[-1])) return false;
                    }
                }
            }
        }
        return true;
    }

    int bits_ = 0, k_ = 0;
    std::int64_t num_added_ = 0;
    Buffer<std::uint8_t> panels_;
};

inline const std::array<std::array<PackedMatrix::Kernel, PackedMatrix::kMaxRows>, 2> PackedMatrix::kKernels =
    PackedMatrix::kernels();

}  // namespace chorus

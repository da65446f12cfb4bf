// Sixteen float lanes and the bf16 dot product, for AVX512-BF16, AVX-512 and AVX2. Nothing else here knows the
// processor.
//
// Every function is exact about its order of operations (compile with -ffp-contract=off): equal inputs give equal bits
// wherever in a batch they stand. Only the variants differ among each other.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>

namespace chorus {

using bf16 = std::uint16_t;

inline int load_word(const bf16* p) {
    int word;
    std::memcpy(&word, p, sizeof word);
    return word;
}
inline float half_to_float(const std::uint8_t* p) {
    std::uint16_t half;
    std::memcpy(&half, p, sizeof half);
    return _cvtsh_ss(half);
}
inline void store_half(std::uint8_t* p, float x) {
    const std::uint16_t half = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(p, &half, sizeof half);
}
inline float to_float(bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }

#if defined(__AVX512F__)

struct F16 {
    __m512 v;
};

inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
/** b where either is NaN. */
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 load_bf16(const bf16* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}

/** Sixteen IEEE half floats. */
inline F16 load_half(const std::uint8_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
/** x[0], x[0], x[1], x[1] .. x[7]; the same of x[8] .. x[15]. */
inline F16 double_lower(F16 x) {
    return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), x.v)};
}
inline F16 double_upper(F16 x) {
    return {_mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), x.v)};
}
inline F16 load_int8(const std::uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
/** Sixteen words of eight nibbles; nibbles() are those from bit `shift` on, as numbers. */
struct CodeWords {
    __m512i v;
};
inline CodeWords load_words(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline F16 nibbles(CodeWords x, int shift) {  // a permutation looks at four bits of its index, so it can look them up
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(x.v, unsigned(shift)), numbers)};
}

/** Bit i: a[i] >= b[i]. */
inline std::uint32_t greater_equal(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline bool any_nan(F16 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
/** x where a >= b, else y. */
inline F16 select_greater_equal(F16 a, F16 b, F16 x, F16 y) {
    return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), x.v)};
}

/** 2^n * x for whole n. */
inline F16 scale_by_power(F16 x, F16 n) { return {_mm512_scalef_ps(x.v, n.v)}; }
inline F16 round_to_whole(F16 x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

inline __m256 lower_half(F16 x) { return _mm512_castps512_ps256(x.v); }
inline __m256 upper_half(F16 x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1)); }

#else  // AVX2

struct F16 {
    __m256 lo, hi;
};

inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 x) { _mm256_storeu_ps(p, x.lo), _mm256_storeu_ps(p + 8, x.hi); }
inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }

inline __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline F16 load_bf16(const bf16* p) {
    return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)(p + 8)))};
}

inline F16 load_half(const std::uint8_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
inline F16 double_each(__m256 x) {
    return {_mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}
inline F16 double_lower(F16 x) { return double_each(x.lo); }
inline F16 double_upper(F16 x) { return double_each(x.hi); }
inline F16 load_int8(const std::uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
struct CodeWords {
    __m256i lo, hi;
};
inline CodeWords load_words(const std::uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline F16 nibbles(CodeWords x, int shift) {
    const __m256i mask = _mm256_set1_epi32(15);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.lo, shift), mask)),
            _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.hi, shift), mask))};
}

inline std::uint32_t greater_equal(F16 a, F16 b) {
    const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ));
    const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
    return static_cast<std::uint32_t>(lo | hi << 8);
}
inline bool any_nan(F16 a) {
    const __m256 lo = _mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), hi = _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q);
    return _mm256_movemask_ps(_mm256_or_ps(lo, hi)) != 0;
}
inline F16 select_greater_equal(F16 a, F16 b, F16 x, F16 y) {
    return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ)),
            _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ))};
}

inline __m256 power_of_two(__m256 n) {  // 0 below the normal range
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_max_epi32(biased, _mm256_setzero_si256()), 23));
}
inline F16 scale_by_power(F16 x, F16 n) { return x * F16{power_of_two(n.lo), power_of_two(n.hi)}; }
inline F16 round_to_whole(F16 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
}

inline __m256 lower_half(F16 x) { return x.lo; }
inline __m256 upper_half(F16 x) { return x.hi; }

#endif

inline float sum(F16 x) {
    const __m256 a = _mm256_add_ps(lower_half(x), upper_half(x));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

inline float maximum(F16 x) {
    const __m256 a = _mm256_max_ps(lower_half(x), upper_half(x));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

/** 2^x for x <= 120 within 2 units in the last place; exactly 1 at 0, exactly 0 from -200 down (also for -inf). */
inline F16 exp2(F16 x) {
    x = max(splat(-200.0f), x);                          // in this order NaN goes through
    const F16 whole = round_to_whole(x), f = x - whole;  // f in [-0.5, 0.5]
    F16 y = splat(1.535336188e-4f);
    y = fma(y, f, splat(1.339887440e-3f));
    y = fma(y, f, splat(9.618437357e-3f));
    y = fma(y, f, splat(5.550332471e-2f));
    y = fma(y, f, splat(2.402264791e-1f));
    y = fma(y, f, splat(6.931472028e-1f));
    y = fma(y, f, splat(1.0f));
    return scale_by_power(y, whole);
}

inline __m256i round_to_bf16_words(__m256 x) {  // to nearest even; the result stands in the upper halves; NaN stays NaN
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan));
}

#if defined(__AVX512BF16__)

inline void store_bf16(bf16* p, F16 x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x.v)); }

/** Sixteen columns of a pair of rows of B; a pair of A for all columns; and acc + a0 * b0 + a1 * b1. */
struct ColumnPairs {
    __m512i v;
};
inline ColumnPairs load_pairs(const bf16* p) { return {_mm512_load_si512(p)}; }
inline ColumnPairs splat_pair(const bf16* p) { return {_mm512_set1_epi32(load_word(p))}; }
inline F16 dot2(F16 acc, ColumnPairs a, ColumnPairs b) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
}
/** Columns 0 .. 7, then 8 .. 15, each as (k, k + 1), rounded. */
inline ColumnPairs round_pairs(F16 left, F16 right) { return {(__m512i)_mm512_cvtne2ps_pbh(right.v, left.v)}; }
constexpr int kMaxRows = 12;

#else

inline void store_bf16(bf16* p, F16 x) {
    const __m256i lo = _mm256_srli_epi32(round_to_bf16_words(lower_half(x)), 16);
    const __m256i hi = _mm256_srli_epi32(round_to_bf16_words(upper_half(x)), 16);
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8));
}

struct ColumnPairs {
    F16 even, odd;
};
#if defined(__AVX512F__)
inline ColumnPairs split_pairs(__m512i x) {
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000))))}};
}
inline ColumnPairs load_pairs(const bf16* p) { return split_pairs(_mm512_load_si512(p)); }
inline ColumnPairs splat_pair(const bf16* p) { return split_pairs(_mm512_set1_epi32(load_word(p))); }
constexpr int kMaxRows = 12;
#else
inline ColumnPairs split_pairs(__m256i lo, __m256i hi) {
    const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(lo, odd)), _mm256_castsi256_ps(_mm256_and_si256(hi, odd))}};
}
inline ColumnPairs load_pairs(const bf16* p) {
    return split_pairs(_mm256_load_si256((const __m256i*)p), _mm256_load_si256((const __m256i*)p + 1));
}
inline ColumnPairs splat_pair(const bf16* p) {
    const __m256i pair = _mm256_set1_epi32(load_word(p));
    return split_pairs(pair, pair);
}
constexpr int kMaxRows = 2;
#endif
inline ColumnPairs round_pairs(F16 left, F16 right) {
    alignas(64) bf16 rounded[32];
    store_bf16(rounded, left), store_bf16(rounded + 16, right);
    return load_pairs(rounded);
}
inline F16 dot2(F16 acc, ColumnPairs a, ColumnPairs b) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }

#endif

}  // namespace chorus

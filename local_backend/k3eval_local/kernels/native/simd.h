/* Vector types and elementary functions for AVX-512 and AVX2+FMA.
 * One source serves both: VW is the vector width in floats, a panel is NV vectors wide. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define VW 16
#define MR 6 /* rows of a register tile: 6 x 4 accumulators of the 32 registers */
typedef __m512 vf;
INLINE vf vload(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vstore(float *p, vf v) { _mm512_storeu_ps(p, v); }
INLINE vf vset(float x) { return _mm512_set1_ps(x); }
INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vround(vf a) { return _mm512_roundscale_ps(a, 0); }
INLINE vf vscale2(vf a, vf n) { return _mm512_scalef_ps(a, n); }
INLINE float vsum(vf a) { return _mm512_reduce_add_ps(a); }
INLINE float vtop(vf a) { return _mm512_reduce_max_ps(a); }
INLINE vf vload_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE vf vload_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* out[c * ldo + j] = in[j * ldi + c] for a VW x VW block */
INLINE void transpose_tile(const float *in, long ldi, float *out, long ldo) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = vload(in + i * ldi);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* a[i + k]: column 4 * lane + k of rows i .. i + 3 */
        a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    for (int k = 0; k < 4; k++) { /* gather the lanes of the four row groups */
        __m512 lo = _mm512_shuffle_f32x4(a[k], a[4 + k], 0x88), hi = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0x88);
        __m512 lo2 = _mm512_shuffle_f32x4(a[k], a[4 + k], 0xdd), hi2 = _mm512_shuffle_f32x4(a[8 + k], a[12 + k], 0xdd);
        vstore(out + (long)k * ldo, _mm512_shuffle_f32x4(lo, hi, 0x88));
        vstore(out + (long)(8 + k) * ldo, _mm512_shuffle_f32x4(lo, hi, 0xdd));
        vstore(out + (long)(4 + k) * ldo, _mm512_shuffle_f32x4(lo2, hi2, 0x88));
        vstore(out + (long)(12 + k) * ldo, _mm512_shuffle_f32x4(lo2, hi2, 0xdd));
    }
}
#else
#define VW 8
#define MR 3 /* 3 x 4 accumulators of the 16 registers */
typedef __m256 vf;
INLINE vf vload(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vstore(float *p, vf v) { _mm256_storeu_ps(p, v); }
INLINE vf vset(float x) { return _mm256_set1_ps(x); }
INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vscale2(vf a, vf n) {
    __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}
INLINE float vsum(vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
INLINE float vtop(vf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
INLINE vf vload_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE vf vload_i8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE void transpose_tile(const float *in, long ldi, float *out, long ldo) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = vload(in + i * ldi);
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    for (int k = 0; k < 4; k++) {
        vstore(out + (long)k * ldo, _mm256_permute2f128_ps(a[k], a[4 + k], 0x20));
        vstore(out + (long)(4 + k) * ldo, _mm256_permute2f128_ps(a[k], a[4 + k], 0x31));
    }
}
#endif

#define NV 4
#define NR (VW * NV) /* outputs of a packed panel */

/* e^x by range reduction to |r| <= ln2/2 and a degree-6 polynomial; about 1e-7 relative. */
INLINE vf vexp(vf x) {
    x = vmin(vmax(x, vset(-87.0f)), vset(88.0f));
    vf n = vround(x * vset(1.44269504088896341f));
    vf r = vfma(n, vset(-0.693359375f), x);
    r = vfma(n, vset(2.12194440e-4f), r);
    vf p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(p, r * r, r + vset(1.0f));
    return vscale2(p, n);
}

INLINE vf vsigmoid(vf x) { return vset(1.0f) / (vset(1.0f) + vexp(vset(0.0f) - x)); }

/* tanh x = 1 - 2 / (e^2x + 1) */
INLINE vf vtanh(vf x) { return vset(1.0f) - vset(2.0f) / (vexp(x + x) + vset(1.0f)); }

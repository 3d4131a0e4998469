/* y = W x for packed weights. W [out, in] is stored as panels of NR outputs, each [in][NR], in fp32, bf16 or
 * int8 (one fp32 scale an output), so that one broadcast of x feeds NV vector FMAs and no sum crosses lanes.
 * Rows of y have a stride of at least the padded output width: whole panels are written. */
#pragma once
#include "simd.h"

enum { F32 = 0, BF16 = 1, I8 = 2 };

typedef struct {
    const void *w;      /* packed panels */
    const float *scale; /* int8: one a padded output; else NULL */
    int32_t out, in, dtype, pad_;
} Mat;

INLINE int padded(int n) { return (n + NR - 1) / NR * NR; }

INLINE vf wload(const void *w, int dtype, long i) {
    if (dtype == F32) return vload((const float *)w + i);
    if (dtype == BF16) return vload_bf16((const uint16_t *)w + i);
    return vload_i8((const int8_t *)w + i);
}

/* R rows of x [R, in] against one panel: a register tile of R x NV accumulators. */
INLINE void tile(int R, int dtype, const void *w, int in, const float *x, long ldx, vf acc[MR][NV]) {
    vf a[MR][NV];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) a[r][v] = vset(0.0f);
    for (int k = 0; k < in; k++) {
        vf b[NV];
        for (int v = 0; v < NV; v++) b[v] = wload(w, dtype, (long)k * NR + v * VW);
        for (int r = 0; r < R; r++) {
            vf s = vset(x[r * ldx + k]);
            for (int v = 0; v < NV; v++) a[r][v] = vfma(s, b[v], a[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = a[r][v];
}

#define AHEAD 2048 /* bytes */

/* One row: two sets of accumulators, so that the FMA latency is hidden. */
INLINE void tile1(int dtype, const void *w, int in, const float *x, vf acc[NV]) {
    vf a[NV], b[NV];
    for (int v = 0; v < NV; v++) a[v] = b[v] = vset(0.0f);
    int k = 0, size = dtype == F32 ? 4 : dtype == BF16 ? 2 : 1;
    for (; k + 2 <= in; k += 2) {
        vf s = vset(x[k]), t = vset(x[k + 1]);
        for (int b = 0; b < 2 * NR * size; b += 64) /* panels follow one another: the next one is fetched too */
            _mm_prefetch((const char *)w + (long)k * NR * size + b + AHEAD, _MM_HINT_T0);
        for (int v = 0; v < NV; v++) a[v] = vfma(s, wload(w, dtype, (long)k * NR + v * VW), a[v]);
        for (int v = 0; v < NV; v++) b[v] = vfma(t, wload(w, dtype, (long)(k + 1) * NR + v * VW), b[v]);
    }
    for (; k < in; k++) {
        vf s = vset(x[k]);
        for (int v = 0; v < NV; v++) a[v] = vfma(s, wload(w, dtype, (long)k * NR + v * VW), a[v]);
    }
    for (int v = 0; v < NV; v++) acc[v] = a[v] + b[v];
}

INLINE void panel_rows(int dtype, const void *w, const float *scale, int in, const float *x, long ldx, int n,
                       float *y, long ldy) {
    for (int i = 0; i < n;) {
        vf acc[MR][NV];
        int R = n - i < MR ? n - i : MR;
        const float *xi = x + i * ldx;
        switch (R) {
        case 1: tile1(dtype, w, in, xi, acc[0]); break;
        case 2: tile(2, dtype, w, in, xi, ldx, acc); break;
        case 3: tile(3, dtype, w, in, xi, ldx, acc); break;
#if MR > 3
        case 4: tile(4, dtype, w, in, xi, ldx, acc); break;
        case 5: tile(5, dtype, w, in, xi, ldx, acc); break;
        case 6: tile(6, dtype, w, in, xi, ldx, acc); break;
#endif
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < NV; v++) {
                vf o = acc[r][v];
                if (scale) o = o * vload(scale + v * VW);
                vstore(y + (i + r) * ldy + v * VW, o);
            }
        i += R;
    }
}

static void panel(const Mat *m, int p, const float *x, long ldx, int n, float *y, long ldy) {
    long at = (long)p * m->in * NR;
    const float *scale = m->scale ? m->scale + (long)p * NR : NULL;
    float *yp = y + (long)p * NR;
    if (m->dtype == F32) panel_rows(F32, (const float *)m->w + at, scale, m->in, x, ldx, n, yp, ldy);
    else if (m->dtype == BF16) panel_rows(BF16, (const uint16_t *)m->w + at, scale, m->in, x, ldx, n, yp, ldy);
    else panel_rows(I8, (const int8_t *)m->w + at, scale, m->in, x, ldx, n, yp, ldy);
}

/* y [n, ldy] = x [n, ldx] W^T. Threads share the panels when the work is worth a fork. */
static void linear(const Mat *m, const float *x, long ldx, int n, float *y, long ldy, int threads) {
    int panels = padded(m->out) / NR;
    if (threads > 1 && (double)m->out * m->in * n > 2e5) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int p = 0; p < panels; p++) panel(m, p, x, ldx, n, y, ldy);
    } else {
        for (int p = 0; p < panels; p++) panel(m, p, x, ldx, n, y, ldy);
    }
}

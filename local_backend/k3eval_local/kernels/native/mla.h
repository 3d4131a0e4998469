/* Absorbed MLA attention over a paged latent cache, one pass with an online softmax.
 * A cache row is [c (r values) ; k_s (slot values)], W = r + slot, shared by all heads: keys are the whole row,
 * values its first r. A block of KB rows is transposed once into scratch and serves all query rows of a tile
 * as one packed panel set; the values are read from the rows as they lie. */
#pragma once
#include "gemm.h"

#define KB 64    /* tokens of a key block: NR on AVX-512, two panels on AVX2 */
#define GMAX 48  /* query rows (token, head) of a tile */
#define LINE 16  /* floats of a cache line */
#define AHEAD 2  /* key blocks between what is read and what is fetched */

typedef struct {
    const float *base;   /* the layer's pages */
    const int32_t *table; /* page numbers of the sequence; NULL: rows lie one after another */
    int64_t stride;       /* floats from one page to the next */
    int32_t page;         /* tokens a page, where there is a table */
    int32_t width;        /* W */
} Cache;

INLINE const float *cache_row(const Cache *c, long t) {
    if (!c->table) return c->base + t * c->width;
    return c->base + c->table[t / c->page] * c->stride + t % c->page * c->width;
}

/* Rows [at, at + count) as one run: where they lie when their pages follow one another, else copied to flat. */
static const float *cache_run(const Cache *c, long at, int count, float *flat) {
    const float *first = cache_row(c, at);
    if (!c->table) return first;
    long page = at / c->page, last = (at + count - 1) / c->page;
    int together = 1;
    for (long p = page; p < last; p++)
        together &= c->stride == (int64_t)c->page * c->width && c->table[p + 1] == c->table[p] + 1;
    if (together) return first;
    for (long t = at; t < at + count;) {
        long end = (t / c->page + 1) * c->page < at + count ? (t / c->page + 1) * c->page : at + count;
        memcpy(flat + (t - at) * c->width, cache_row(c, t), sizeof(float) * (size_t)(end - t) * (size_t)c->width);
        t = end;
    }
    return flat;
}

/* kt: panels of NR tokens, each [W][NR]; columns past `count` are zero. W is a multiple of VW. */
static void transpose_block(const float *rows, int count, int W, float *kt) {
    if (count < KB) memset(kt, 0, sizeof(float) * (size_t)W * KB);
    for (int t = 0; t < count; t += VW) {
        float *out = kt + (long)(t / NR) * W * NR + t % NR;
        if (t + VW <= count) {
            for (int c = 0; c < W; c += VW) transpose_tile(rows + (long)t * W + c, W, out + (long)c * NR, NR);
        } else {
            for (int j = 0; j < count - t; j++)
                for (int c = 0; c < W; c++) out[(long)c * NR + j] = rows[(long)(t + j) * W + c];
        }
    }
}

/* o [R, r] = o * corr + p [R, KB] rows[:, :r], a column block of V vectors. Where `ahead` is set, the block there
 * is fetched into the second-level cache row by row meanwhile: left alone, the processor reads a long cache at a
 * tenth of its memory's speed, and all of a block at once would fill its queue. */
INLINE void values(int R, int V, const float *p, const float *rows, int count, int W, const float *corr, float *o,
                   long ldo, const float *ahead) {
    vf a[MR][NV];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) a[r][v] = vload(o + r * ldo + v * VW) * vset(corr[r]);
    for (int j = 0; j < count; j++) {
        if (ahead)
            for (int c = 0; c < W; c += LINE) _mm_prefetch((const char *)(ahead + (long)j * W + c), _MM_HINT_T1);
        vf b[NV];
        for (int v = 0; v < V; v++) b[v] = vload(rows + (long)j * W + v * VW);
        for (int r = 0; r < R; r++) {
            vf s = vset(p[r * KB + j]);
            for (int v = 0; v < V; v++) a[r][v] = vfma(s, b[v], a[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) vstore(o + r * ldo + v * VW, a[r][v]);
}

INLINE void values_rows(int R, const float *p, const float *rows, int count, int W, int r, const float *corr,
                        float *o, long ldo, const float *ahead) {
    int c = 0;
    for (; c + 4 * VW <= r; c += 4 * VW) values(R, 4, p, rows + c, count, W, corr, o + c, ldo, c ? NULL : ahead);
    for (; c + 2 * VW <= r; c += 2 * VW) values(R, 2, p, rows + c, count, W, corr, o + c, ldo, c ? NULL : ahead);
    for (; c < r; c += VW) values(R, 1, p, rows + c, count, W, corr, o + c, ldo, c ? NULL : ahead);
}

/* G query rows q [G, W] (already scaled), row g may see the cache positions < limit[g], against the key range
 * [from, to). Leaves the unnormalised sum in o [G, r] and the running maximum and sum in m, l [G].
 * kt: scratch of 2 * KB * W floats. */
static void attend(const float *q, int G, const int64_t *limit, const Cache *cache, int r, long from, long to,
                   float *o, float *m, float *l, float *kt) {
    int W = cache->width;
    float s[GMAX * KB], corr[GMAX];
    for (int g = 0; g < G; g++) m[g] = -INFINITY, l[g] = 0.0f;
    memset(o, 0, sizeof(float) * (size_t)G * (size_t)r);
    for (long at = from; at < to; at += KB) {
        int count = to - at < KB ? (int)(to - at) : KB;
        const float *rows = cache_run(cache, at, count, kt + (long)KB * W);
        transpose_block(rows, count, W, kt);
        for (int p = 0; p < KB / NR; p++)
            panel_rows(F32, kt + (long)p * W * NR, NULL, W, q, W, G, s + p * NR, KB);
        for (int g = 0; g < G; g++) {
            float *sg = s + g * KB;
            long seen = limit[g] - at < count ? limit[g] - at : count;
            if (seen < KB)
                for (long j = seen < 0 ? 0 : seen; j < KB; j++) sg[j] = -INFINITY;
            vf top = vload(sg);
            for (int j = VW; j < KB; j += VW) top = vmax(top, vload(sg + j));
            float mn = vtop(top);
            if (mn < m[g]) mn = m[g];
            if (mn == -INFINITY) { /* nothing visible yet */
                corr[g] = 1.0f;
                memset(sg, 0, sizeof(float) * KB);
                continue;
            }
            corr[g] = m[g] == -INFINITY ? 0.0f : expf(m[g] - mn);
            vf mv = vset(mn), sum = vset(0.0f);
            for (int j = 0; j < KB; j += VW) {
                vf e = vexp(vload(sg + j) - mv);
                vstore(sg + j, e);
                sum += e;
            }
            if (seen < KB) { /* vexp floors a masked score at e^-87: make it zero */
                for (long j = seen < 0 ? 0 : seen; j < KB; j++) sg[j] = 0.0f;
                sum = vset(0.0f);
                for (int j = 0; j < KB; j += VW) sum += vload(sg + j);
            }
            l[g] = l[g] * corr[g] + vsum(sum);
            m[g] = mn;
        }
        /* no matter if that block lies in pieces: a fetch in vain does no harm */
        const float *ahead = at + AHEAD * KB < to ? cache_row(cache, at + AHEAD * KB) : NULL;
        for (int g = 0; g < G; g += MR, ahead = NULL) {
            int R = G - g < MR ? G - g : MR;
            const float *sg = s + g * KB;
            float *og = o + (long)g * r;
            switch (R) {
            case 1: values_rows(1, sg, rows, count, W, r, corr + g, og, r, ahead); break;
            case 2: values_rows(2, sg, rows, count, W, r, corr + g, og, r, ahead); break;
            case 3: values_rows(3, sg, rows, count, W, r, corr + g, og, r, ahead); break;
#if MR > 3
            case 4: values_rows(4, sg, rows, count, W, r, corr + g, og, r, ahead); break;
            case 5: values_rows(5, sg, rows, count, W, r, corr + g, og, r, ahead); break;
            case 6: values_rows(6, sg, rows, count, W, r, corr + g, og, r, ahead); break;
#endif
            }
        }
    }
}

/* Merge `parts` partial results of the same rows (o [parts][G, r], m, l [parts][G]) into o[0], normalised. */
static void merge(int parts, int G, int r, float *o, float *m, float *l, long stride_o, long stride_m) {
    for (int g = 0; g < G; g++) {
        float top = -INFINITY, sum = 0.0f;
        for (int p = 0; p < parts; p++) top = fmaxf(top, m[p * stride_m + g]);
        float w[64];
        for (int p = 0; p < parts; p++) {
            float mp = m[p * stride_m + g];
            w[p] = mp == -INFINITY ? 0.0f : expf(mp - top);
            sum += w[p] * l[p * stride_m + g];
        }
        for (int c = 0; c < r; c += VW) {
            vf a = vset(0.0f);
            for (int p = 0; p < parts; p++) a = vfma(vset(w[p]), vload(o + p * stride_o + (long)g * r + c), a);
            vstore(o + (long)g * r + c, a / vset(sum));
        }
    }
}

/* One forward step of a Kimi K3 model on a CPU: rows of several sequences at once, so that single-token decode,
 * batched decode and chunked prefill are one function. Equations: the torch modules under k3eval_local/model.
 * State is the caller's: KDA state and convolution taps a sequence, latent cache pages a layer. */
#include "kda.h"
#include "mla.h"
#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

#define MAX_SOURCES 64 /* AttnRes sources: embedding, finished blocks, partial */
#define MAX_PARTS 64

typedef struct {
    int32_t d, layers, vocab, block;
    int32_t heads, K, rank, unbounded_gate;
    int32_t mla_heads, q_lora, r, nope, slot, vdim;
    int32_t experts, topk, latent, width, shared, dense_width;
    int32_t renormalize, page, threads, max_rows;
    int64_t page_stride;
    float eps, latent_eps, g_min, beta_gate, beta_up, routed_scale;
} Config;

typedef struct {
    int32_t kind; /* 0 KDA, 1 MLA */
    int32_t dense;
    const float *norm_in, *norm_post, *res_attn, *res_mlp; /* [d]; res = pseudo-query * key-norm weight */
    Mat in;  /* KDA: q, k, v, gate, f_a, beta stacked; MLA: q_a, kv_a, gate */
    Mat out; /* o_proj */
    Mat f_b;
    const float *conv, *decay, *dt, *head_norm; /* [4][3P], exp(A_log) [H], [P], [K] */
    const float *q_norm, *kv_norm;
    Mat q_b;
    const Mat *uk, *uv; /* one a head: [r, nope] and [vdim, r] */
    Mat up;             /* dense: gate, up; MoE: latent down, shared gate, shared up */
    Mat down;           /* dense: down; MoE: [latent up | shared down] on [latent | shared] */
    Mat router;         /* always fp32 */
    const float *bias, *latent_norm;
    const Mat *w13, *w2; /* one an expert: gate and up stacked; down */
    float *pages;        /* MLA: latent cache [pages * page, r + slot] */
} Layer;

typedef struct {
    int64_t pos;
    float **state;        /* [layers]: KDA state [H, K, K]; NULL for MLA */
    float **taps;         /* [layers]: the last three inputs of the convolution [3][3P] */
    const int32_t *table; /* page table; NULL: the cache is one run of rows */
} Seq;

typedef struct {
    Config c;
    const float *embed, *norm, *res_out;
    Mat head;
    Layer *layer;
    float *bank, *rms, *p, *x, *proj, *gate, *mix, *wide, *lat, *ql, *scratch;
    long ld_proj, ld_wide, scratch_each;
    int32_t most_threads; /* scratch is sized for these */
} Model;

static float *floats(long n) {
    void *p = NULL;
    return posix_memalign(&p, 64, (size_t)(n + 64) * sizeof(float)) ? NULL : p;
}

static float inv_rms(const float *x, int n, float eps) {
    vf s = vset(0.0f);
    for (int i = 0; i < n; i += VW) s = vfma(vload(x + i), vload(x + i), s);
    return 1.0f / sqrtf(vsum(s) / (float)n + eps);
}

static void rmsnorm(const float *x, const float *w, int n, float eps, float *y) {
    vf r = vset(inv_rms(x, n, eps));
    for (int i = 0; i < n; i += VW) vstore(y + i, vload(x + i) * r * vload(w + i));
}

static void situ(const Config *c, const float *gate, const float *up, int n, float *y) {
    vf bg = vset(c->beta_gate), bu = vset(c->beta_up), ig = vset(1.0f / c->beta_gate), iu = vset(1.0f / c->beta_up);
    for (int i = 0; i < n; i += VW) {
        vf g = vload(gate + i);
        vstore(y + i, bg * vtanh(g * ig) * vsigmoid(g) * (bu * vtanh(vload(up + i) * iu)));
    }
}

/* AttnRes: softmax over the sources of <w, rmsnorm(row)>, then the mix of the raw rows; followed by an RMSNorm
 * when norm is given. */
static void attn_res(Model *M, int nbank, const float *w, const float *norm, int t, float *y) {
    const Config *c = &M->c;
    long N = c->max_rows;
    int d = c->d;
    const float *row[MAX_SOURCES];
    float score[MAX_SOURCES], top = -INFINITY, sum = 0.0f;
    for (int s = 0; s <= nbank; s++) {
        row[s] = s < nbank ? M->bank + (s * N + t) * d : M->p + (long)t * d;
        float r = s < nbank ? M->rms[s * N + t] : inv_rms(row[s], d, c->eps);
        vf dot = vset(0.0f);
        for (int i = 0; i < d; i += VW) dot = vfma(vload(w + i), vload(row[s] + i), dot);
        score[s] = vsum(dot) * r;
        top = fmaxf(top, score[s]);
    }
    for (int s = 0; s <= nbank; s++) sum += score[s] = expf(score[s] - top);
    for (int i = 0; i < d; i += VW) {
        vf a = vset(0.0f);
        for (int s = 0; s <= nbank; s++) a = vfma(vset(score[s] / sum), vload(row[s] + i), a);
        vstore(y + i, a);
    }
    if (norm) rmsnorm(y, norm, d, c->eps, y);
}

static void kda(Model *M, Layer *L, int li, int nseg, Seq **seq, const int32_t *len, int N) {
    const Config *c = &M->c;
    int H = c->heads, K = c->K, P = H * K, T = c->threads;
    long ld = M->ld_proj, lw = M->ld_wide;
    linear(&L->in, M->x, c->d, N, M->proj, ld, T);
    float *beta = M->proj + 4L * P + c->rank; /* column offsets: q k v g f_a beta */
    linear(&L->f_b, M->proj + 4L * P, ld, N, M->gate, lw, T);
    int at = 0;
    for (int s = 0; s < nseg; s++) {
        float *taps = seq[s]->taps[li];
        for (int t = at; t < at + len[s]; t++) { /* convolution, SiLU */
            float *x = M->proj + t * ld, *y = M->wide + t * lw;
            for (int i = 0; i < 3 * P; i += VW) {
                vf x0 = vload(taps + i), x1 = vload(taps + 3L * P + i), x2 = vload(taps + 6L * P + i), x3 = vload(x + i);
                vf a = x0 * vload(L->conv + i);
                a = vfma(x1, vload(L->conv + 3L * P + i), a);
                a = vfma(x2, vload(L->conv + 6L * P + i), a);
                a = vfma(x3, vload(L->conv + 9L * P + i), a);
                vstore(taps + i, x1), vstore(taps + 3L * P + i, x2), vstore(taps + 6L * P + i, x3);
                vstore(y + i, a * vsigmoid(a));
            }
        }
        at += len[s];
    }
    float qscale = 1.0f / sqrtf((float)K);
#pragma omp parallel for schedule(static) num_threads(T) if (T > 1 && N > 32)
    for (int t = 0; t < N; t++) {
        float *y = M->wide + t * lw, *z = M->gate + t * lw, *b = beta + t * ld;
        for (int h = 0; h < 2 * H; h++) { /* L2 norm of q and k */
            vf ss = vset(0.0f);
            for (int i = 0; i < K; i += VW) ss = vfma(vload(y + h * K + i), vload(y + h * K + i), ss);
            vf r = vset((h < H ? qscale : 1.0f) / sqrtf(vsum(ss) + 1e-6f));
            for (int i = 0; i < K; i += VW) vstore(y + h * K + i, vload(y + h * K + i) * r);
        }
        for (int h = 0; h < H; h++) {
            vf a = vset(L->decay[h]);
            for (int i = h * K; i < (h + 1) * K; i += VW) {
                vf u = vload(z + i) + vload(L->dt + i), g;
                if (c->unbounded_gate) { /* -exp(A) softplus(z) */
                    float tmp[VW];
                    vstore(tmp, u);
                    for (int j = 0; j < VW; j++) tmp[j] = tmp[j] > 20.0f ? tmp[j] : log1pf(expf(tmp[j]));
                    g = vset(0.0f) - a * vload(tmp);
                } else {
                    g = vset(c->g_min) * vsigmoid(a * u);
                }
                vstore(z + i, vexp(g));
            }
            b[h] = 1.0f / (1.0f + expf(-b[h]));
        }
    }
    /* head by head; the output takes the place of the raw q, which the convolution has consumed */
#pragma omp parallel for schedule(static) num_threads(T) if (T > 1)
    for (int h = 0; h < H; h++) {
        long row = 0;
        for (int s = 0; s < nseg; s++) {
            float *y = M->wide + row * lw + h * K;
            kda_head(len[s], K, K, lw, y, y + P, M->gate + row * lw + h * K, y + 2L * P, lw, beta + row * ld + h, ld,
                     seq[s]->state[li] + (long)h * K * K, M->proj + row * ld + h * K, ld);
            row += len[s];
        }
    }
    for (int t = 0; t < N; t++) {
        float *o = M->proj + t * ld, *g = o + 3L * P;
        for (int h = 0; h < H; h++) rmsnorm(o + h * K, L->head_norm, K, c->eps, o + h * K);
        for (int i = 0; i < P; i += VW) vstore(o + i, vload(o + i) * vsigmoid(vload(g + i)));
    }
    linear(&L->out, M->proj, ld, N, M->mix, padded(c->d), T);
}

static void mla(Model *M, Layer *L, int nseg, Seq **seq, const int32_t *len, int N) {
    const Config *c = &M->c;
    int H = c->mla_heads, r = c->r, W = r + c->slot, T = c->threads, Q = c->nope + c->slot;
    long ld = M->ld_proj, lw = M->ld_wide;
    linear(&L->in, M->x, c->d, N, M->proj, ld, T);
    for (int t = 0; t < N; t++) rmsnorm(M->proj + t * ld, L->q_norm, c->q_lora, c->latent_eps, M->proj + t * ld);
    linear(&L->q_b, M->proj, ld, N, M->wide, lw, T);
    float scale = 1.0f / sqrtf((float)Q);
    for (int t = 0; t < N; t++)
        for (int i = 0; i < H * Q; i++) M->wide[t * lw + i] *= scale;
    long row = 0;
    for (int s = 0; s < nseg; s++)
        for (int i = 0; i < len[s]; i++, row++) {
            Cache cache = {L->pages, seq[s]->table, c->page_stride, c->page, W};
            float *kv = M->proj + row * ld + c->q_lora, *dst = (float *)cache_row(&cache, seq[s]->pos + i);
            rmsnorm(kv, L->kv_norm, r, c->latent_eps, dst);
            memcpy(dst + r, kv + r, sizeof(float) * (size_t)c->slot);
        }
    /* absorbed queries [N, H, W]: W_UK^T q_n, then the slot */
    long lq = (long)H * W, lr = padded(r);
    for (int h = 0; h < H; h++) {
        const float *q = M->wide + h * Q;
        linear(&L->uk[h], q, lw, N, M->lat, lr, T);
        for (int t = 0; t < N; t++) {
            memcpy(M->ql + t * lq + (long)h * W, M->lat + t * lr, sizeof(float) * (size_t)r);
            memcpy(M->ql + t * lq + (long)h * W + r, q + t * lw + c->nope, sizeof(float) * (size_t)c->slot);
        }
    }
    int hb = H < GMAX ? H : GMAX, tq = GMAX / hb, hg = (H + hb - 1) / hb;
    row = 0;
    for (int s = 0; s < nseg; s++) {
        Cache cache = {L->pages, seq[s]->table, c->page_stride, c->page, W};
        int n = len[s], items = (n + tq - 1) / tq * hg, parts = 1;
        if (items < T) {
            long blocks = (seq[s]->pos + n + KB - 1) / KB;
            parts = T / items < MAX_PARTS ? T / items : MAX_PARTS;
            if (blocks < 8L * parts) parts = 1;
        }
#pragma omp parallel for schedule(dynamic) num_threads(T) if (T > 1 && items * parts > 1)
        for (int it = 0; it < items * parts; it++) {
            int part = it % parts, tile = it / parts, h0 = tile % hg * hb, t0 = tile / hg * tq;
            int G = (H - h0 < hb ? H - h0 : hb) * (n - t0 < tq ? n - t0 : tq);
            int64_t limit[GMAX];
            for (int g = 0; g < G; g++) limit[g] = seq[s]->pos + t0 + g / hb + 1;
            long blocks = (limit[G - 1] + KB - 1) / KB, from = blocks * part / parts * KB;
            long to = blocks * (part + 1) / parts * KB;
            if (to > limit[G - 1]) to = limit[G - 1];
            float *kt = M->scratch + (long)THREAD * M->scratch_each;
            float *o = M->lat + (row + t0) * (long)H * r + (long)h0 * r, m[GMAX], l[GMAX];
            if (parts == 1) {
                attend(M->ql + (row + t0) * lq + (long)h0 * W, G, limit, &cache, r, from, to, o, m, l, kt);
                merge(1, G, r, o, m, l, 0, 0);
            } else { /* partial results side by side: o, m, l */
                float *po = M->gate + ((long)tile * parts + part) * ((long)GMAX * (r + 2));
                attend(M->ql + (row + t0) * lq + (long)h0 * W, G, limit, &cache, r, from, to, po, po + (long)GMAX * r,
                       po + (long)GMAX * (r + 1), kt);
            }
        }
        if (parts > 1)
            for (int tile = 0; tile < items; tile++) {
                long each = (long)GMAX * (r + 2);
                int h0 = tile % hg * hb, t0 = tile / hg * tq;
                int G = (H - h0 < hb ? H - h0 : hb) * (n - t0 < tq ? n - t0 : tq);
                float *po = M->gate + (long)tile * parts * each;
                merge(parts, G, r, po, po + (long)GMAX * r, po + (long)GMAX * (r + 1), each, each);
                memcpy(M->lat + (row + t0) * (long)H * r + (long)h0 * r, po, sizeof(float) * (size_t)G * (size_t)r);
            }
        row += n;
    }
    long lo = padded(c->vdim);
    for (int h = 0; h < H; h++) {
        linear(&L->uv[h], M->lat + (long)h * r, (long)H * r, N, M->ql, lo, T);
        for (int t = 0; t < N; t++) {
            float *o = M->wide + t * lw + h * c->vdim;
            const float *g = M->proj + t * ld + c->q_lora + W + h * c->vdim;
            for (int i = 0; i < c->vdim; i += VW)
                vstore(o + i, vload(M->ql + t * lo + i) * vsigmoid(vload(g + i)));
        }
    }
    linear(&L->out, M->wide, lw, N, M->mix, padded(c->d), T);
}

static void route(const Config *c, const Layer *L, const float *logit, int *chosen, float *weight) {
    float s[c->experts], b[c->experts], sum = 0.0f;
    for (int e = 0; e < c->experts; e++) {
        s[e] = 1.0f / (1.0f + expf(-logit[e]));
        b[e] = s[e] + L->bias[e];
    }
    for (int j = 0; j < c->topk; j++) {
        int best = 0;
        for (int e = 1; e < c->experts; e++)
            if (b[e] > b[best]) best = e;
        chosen[j] = best;
        weight[j] = s[best];
        sum += s[best];
        b[best] = -INFINITY;
    }
    float scale = c->renormalize ? c->routed_scale / (sum + 1e-20f) : c->routed_scale;
    for (int j = 0; j < c->topk; j++) weight[j] *= scale;
}

static void ffn(Model *M, Layer *L, int N) {
    const Config *c = &M->c;
    int T = c->threads;
    long ld = M->ld_proj, lw = M->ld_wide;
    linear(&L->up, M->x, c->d, N, M->proj, ld, T);
    if (L->dense) {
        for (int t = 0; t < N; t++)
            situ(c, M->proj + t * ld, M->proj + t * ld + c->dense_width, c->dense_width, M->wide + t * lw);
        linear(&L->down, M->wide, lw, N, M->mix, padded(c->d), T);
        return;
    }
    int l = c->latent, sh = c->shared, k = c->topk, lg = padded(c->experts);
    int *chosen = (int *)(M->scratch), *rows = chosen + (long)N * k;
    float *weight = (float *)(rows + N), *hidden = M->gate, *z = M->lat, *u = M->ql;
    linear(&L->router, M->x, c->d, N, M->ql, lg, T);
    for (int t = 0; t < N; t++) route(c, L, M->ql + (long)t * lg, chosen + t * k, weight + t * k);
    for (int t = 0; t < N; t++) memset(M->wide + t * lw, 0, sizeof(float) * (size_t)l);
    int lh = padded(2 * c->width), lu = padded(l);
    for (int e = 0; e < c->experts; e++) { /* gather the rows of an expert, run it, add the weighted result */
        int n = 0;
        for (int t = 0; t < N; t++)
            for (int j = 0; j < k; j++)
                if (chosen[t * k + j] == e) {
                    memcpy(z + (long)n * l, M->proj + t * ld, sizeof(float) * (size_t)l);
                    rows[n++] = t * k + j;
                }
        if (!n) continue;
        linear(&L->w13[e], z, l, n, hidden, lh, T);
        for (int i = 0; i < n; i++)
            situ(c, hidden + (long)i * lh, hidden + (long)i * lh + c->width, c->width, hidden + (long)i * lh);
        linear(&L->w2[e], hidden, lh, n, u, lu, T);
        for (int i = 0; i < n; i++) {
            float *out = M->wide + rows[i] / k * lw;
            vf w = vset(weight[rows[i]]);
            for (int x = 0; x < l; x += VW) vstore(out + x, vfma(w, vload(u + (long)i * lu + x), vload(out + x)));
        }
    }
    for (int t = 0; t < N; t++) {
        float *y = M->wide + t * lw, *s = M->proj + t * ld + l;
        rmsnorm(y, L->latent_norm, l, c->eps, y);
        situ(c, s, s + sh, sh, y + l);
    }
    linear(&L->down, M->wide, lw, N, M->mix, padded(c->d), T);
}

static void add_rows(Model *M, int N, int replace) {
    int d = M->c.d;
    long lm = padded(d);
    for (int t = 0; t < N; t++)
        for (int i = 0; i < d; i += VW) {
            vf y = vload(M->mix + t * lm + i);
            if (!replace) y += vload(M->p + (long)t * d + i);
            vstore(M->p + (long)t * d + i, y);
        }
}

/* ids: the new tokens of all sequences, one after another. want[i] != 0: logits of row i, in order, [*, vocab].
 * Advances pos of every sequence. Returns 0, or 1 when the rows exceed max_rows. */
int k3_forward(Model *M, int nseg, Seq **seq, const int32_t *len, const int32_t *ids, const uint8_t *want,
               float *logits) {
    const Config *c = &M->c;
    int N = 0, nbank = 0, d = c->d, T = c->threads;
    for (int s = 0; s < nseg; s++) N += len[s];
    if (N > c->max_rows) return 1;
    for (int t = 0; t < N; t++) memcpy(M->p + (long)t * d, M->embed + (long)ids[t] * d, sizeof(float) * (size_t)d);
    for (int li = 0; li < c->layers; li++) {
        Layer *L = M->layer + li;
        int first = li % c->block == 0;
#pragma omp parallel for schedule(static) num_threads(T) if (T > 1 && N > 32)
        for (int t = 0; t < N; t++) {
            if (nbank) attn_res(M, nbank, L->res_attn, L->norm_in, t, M->x + (long)t * d);
            else rmsnorm(M->p + (long)t * d, L->norm_in, d, c->eps, M->x + (long)t * d);
            if (first) { /* the bank keeps the finished block sum (layer 0: the embedding) */
                memcpy(M->bank + ((long)nbank * c->max_rows + t) * d, M->p + (long)t * d, sizeof(float) * (size_t)d);
                M->rms[(long)nbank * c->max_rows + t] = inv_rms(M->p + (long)t * d, d, c->eps);
            }
        }
        nbank += first;
        if (L->kind == 0) kda(M, L, li, nseg, seq, len, N);
        else mla(M, L, nseg, seq, len, N);
        add_rows(M, N, first);
#pragma omp parallel for schedule(static) num_threads(T) if (T > 1 && N > 32)
        for (int t = 0; t < N; t++) attn_res(M, nbank, L->res_mlp, L->norm_post, t, M->x + (long)t * d);
        ffn(M, L, N);
        add_rows(M, N, 0);
    }
    int n = 0;
    for (int t = 0; t < N; t++)
        if (want[t]) attn_res(M, nbank, M->res_out, M->norm, t, M->x + (long)n++ * d);
    if (n) {
        long lv = padded(c->vocab);
        for (int i = 0; i < n; i++) { /* the padded row goes through scratch */
            linear(&M->head, M->x + (long)i * d, d, 1, M->proj, lv, T);
            memcpy(logits + (long)i * c->vocab, M->proj, sizeof(float) * (size_t)c->vocab);
        }
    }
    for (int s = 0; s < nseg; s++) seq[s]->pos += len[s];
    return 0;
}

static long most(long a, long b) { return a > b ? a : b; }

void k3_free(Model *M) {
    if (!M) return;
    free(M->bank), free(M->rms), free(M->p), free(M->x), free(M->proj), free(M->gate), free(M->mix);
    free(M->wide), free(M->lat), free(M->ql), free(M->scratch), free(M->layer), free(M);
}

/* Copies the layer table; the weights stay the caller's. NULL when memory is short. */
Model *k3_new(const Config *c, const Layer *layers, const float *embed, const float *norm, const float *res_out,
              const Mat *head) {
    Model *M = calloc(1, sizeof *M);
    if (!M) return NULL;
    M->most_threads = c->threads;
    M->c = *c, M->embed = embed, M->norm = norm, M->res_out = res_out, M->head = *head;
    long N = c->max_rows, P = (long)c->heads * c->K, W = c->r + c->slot, H = c->mla_heads;
    long moe = c->experts ? c->latent + 2L * c->shared : 0;
    long wide = most(most(3 * P, H * (c->nope + c->slot)), most(H * c->vdim, most(c->dense_width, c->latent + c->shared)));
    long in = most(4 * P + c->rank + c->heads, c->q_lora + W + H * c->vdim);
    M->ld_proj = padded((int)most(most(in, 2L * c->dense_width), moe)) + NR;
    M->ld_wide = padded((int)wide) + NR;
    long parts = (long)MAX_PARTS * GMAX * (c->r + 2); /* split attention */
    long sources = (c->layers + c->block - 1) / c->block;
    M->scratch_each = 2 * KB * W + 64;
    M->layer = malloc(sizeof(Layer) * (size_t)c->layers);
    M->bank = floats(sources * N * c->d), M->rms = floats(sources * N);
    M->p = floats(N * c->d), M->x = floats(N * c->d);
    M->proj = floats(most(N * M->ld_proj, padded(c->vocab)));
    M->gate = floats(most(most(N * M->ld_wide, parts), N * padded(2 * c->width)));
    M->mix = floats(N * padded(c->d)), M->wide = floats(N * M->ld_wide);
    M->lat = floats(N * most(most(H * c->r, c->latent), padded(c->r)));
    M->ql = floats(N * most(most(H * W, padded(c->vdim)), most(padded(c->experts), padded(c->latent))));
    M->scratch = floats(most((c->threads + 1) * M->scratch_each, N * (2L * c->topk + 1)));
    if (!M->layer || !M->bank || !M->rms || !M->p || !M->x || !M->proj || !M->gate || !M->mix || !M->wide ||
        !M->lat || !M->ql || !M->scratch || sources >= MAX_SOURCES) {
        k3_free(M);
        return NULL;
    }
    memcpy(M->layer, layers, sizeof(Layer) * (size_t)c->layers);
    return M;
}

void k3_set_pages(Model *M, int layer, float *pages, int32_t page, int64_t stride) {
    M->layer[layer].pages = pages;
    M->c.page = page;
    M->c.page_stride = stride;
}

void k3_set_threads(Model *M, int32_t threads) {
    if (threads <= M->most_threads) M->c.threads = threads;
}

int k3_panel_width(void) { return NR; }

/* One product alone, for the probe of weight types. */
void k3_linear(const Mat *m, const float *x, float *y) { linear(m, x, m->in, 1, y, padded(m->out), 1); }

/* The scan alone: q, k, alpha, v, o [T, H, K] and beta [T, H], state [H, K, K] in place. q is scaled and q, k are
 * normalised by the caller. */
void k3_kda_scan(int T, int H, int K, const float *q, const float *k, const float *alpha, const float *v,
                 const float *beta, float *state, float *o, int threads) {
    long ld = (long)H * K;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int h = 0; h < H; h++)
        kda_head(T, K, K, ld, q + h * K, k + h * K, alpha + h * K, v + h * K, ld, beta + h, H, state + (long)h * K * K,
                 o + h * K, ld);
}

/* One KDA layer between its projections, forward and backward, on a CPU.
 *
 * Per head and token: convolution of 4 taps and SiLU on q, k, v; l2 norms; gate and beta; the delta rule
 *     S' = Diag(a) S;  w = beta (v - S'^T k);  S = S' + k w^T;  o = S^T q
 * then RMSNorm over the head and the sigmoid output gate. The backward pass recomputes a span of tokens from
 * the state saved before it and walks it in reverse. HEAD is the head size, a compile-time constant.
 *
 * x [B, T, width] holds q, k, v (P each) at columns 0, P, 2P, beta logits at column `beta_at`, gate logits at
 * `gate_at`. z [B, T, P] with the bias added. taps [4, 3P]. carry [B, 3, 3P]. S [B, H, HEAD, HEAD], key rows.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define K HEAD
#define SPAN 32
#define L2_EPS 1e-6f

typedef struct {
    long B, T, H, width, beta_at, gate_at;
    float bound, eps;
} Shape;

typedef struct { /* everything of one token of one head that the backward pass reads */
    float y[3][K], sig[3][K], q[K], k[K], v[K], z[K], fade[K], a[K], u[K], w[K], normed[K], gate[K];
    float inverse_q, inverse_k, inverse_o, beta;
} Token;

static inline const float *row(const Shape *s, const float *x, const float *carry, long b, long t) {
    return t < 0 ? carry + (b * 3 + t + 3) * 3 * s->H * K : x + (b * s->T + t) * s->width;
}

/* exp of x <= 87 (of -87 for what is smaller) to about 2e-7, in a form that compilers turn into vector instructions: 2^n times the
 * Taylor polynomial of the rest, which is at most ln 2 / 2. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x; /* fmaxf and fminf are calls that no compiler turns into vectors */
    const float n = rintf(x * 1.44269504f);
    const float r = fmaf(n, -1.42860682e-6f, fmaf(n, -0.693145752f, x));
    float p = 1.0f / 720;
    p = fmaf(p, r, 1.0f / 120);
    p = fmaf(p, r, 1.0f / 24);
    p = fmaf(p, r, 1.0f / 6);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    const union {
        int bits;
        float value;
    } power = {.bits = ((int)n + 127) << 23};
    return p * power.value;
}

/* The bound keeps exp finite: fast arithmetic turns 1 / infinity into NaN. */
static inline float logistic(float x) {
    x = x < -40.0f ? -40.0f : x;
    x = x > 40.0f ? 40.0f : x;
    return 1.0f / (1.0f + exponential(-x));
}

static inline float dot(const float *a, const float *b) {
    float sum = 0;
    for (int i = 0; i < K; i++) sum += a[i] * b[i];
    return sum;
}

/* Everything before the state. */
static void prepare(const Shape *s, const float *x, const float *carry, const float *z, const float *taps,
                    const float *rate, long b, long h, long t, Token *n) {
    const long P = s->H * K;
    const float *now = row(s, x, carry, b, t);
    for (int stream = 0; stream < 3; stream++) {
        const long at = stream * P + h * K;
        const float *x0 = row(s, x, carry, b, t - 3) + at, *x1 = row(s, x, carry, b, t - 2) + at;
        const float *x2 = row(s, x, carry, b, t - 1) + at, *x3 = now + at;
        const float *w = taps + at;
        for (int c = 0; c < K; c++)
            n->y[stream][c] = x0[c] * w[c] + x1[c] * w[3 * P + c] + x2[c] * w[6 * P + c] + x3[c] * w[9 * P + c];
        for (int c = 0; c < K; c++) n->sig[stream][c] = logistic(n->y[stream][c]);
    }
    for (int c = 0; c < K; c++) {
        n->q[c] = n->y[0][c] * n->sig[0][c];
        n->k[c] = n->y[1][c] * n->sig[1][c];
        n->v[c] = n->y[2][c] * n->sig[2][c];
    }
    n->inverse_q = 1.0f / sqrtf(dot(n->q, n->q) + L2_EPS);
    n->inverse_k = 1.0f / sqrtf(dot(n->k, n->k) + L2_EPS);
    const float scale = n->inverse_q / sqrtf((float)K);
    const float *own = z + (b * s->T + t) * P + h * K, *gate = now + s->gate_at + h * K;
    for (int c = 0; c < K; c++) {
        n->q[c] *= scale;
        n->k[c] *= n->inverse_k;
        n->z[c] = own[c];
        n->fade[c] = logistic(rate[h] * own[c]);
        n->a[c] = exponential(s->bound * n->fade[c]);
        n->gate[c] = logistic(gate[c]);
    }
    n->beta = logistic(now[s->beta_at + h]);
}

/* One step of the state; `faded` receives S', and S becomes the new state. */
static void advance(Token *n, float *S, float *faded, float eps) {
    float o[K];
    memset(n->u, 0, sizeof n->u);
    memset(o, 0, sizeof o);
    for (int i = 0; i < K; i++)
        for (int j = 0; j < K; j++) {
            const float f = n->a[i] * S[i * K + j];
            faded[i * K + j] = f;
            n->u[j] += n->k[i] * f;
        }
    for (int j = 0; j < K; j++) n->w[j] = n->beta * (n->v[j] - n->u[j]);
    for (int i = 0; i < K; i++)
        for (int j = 0; j < K; j++) {
            const float f = faded[i * K + j] + n->k[i] * n->w[j];
            S[i * K + j] = f;
            o[j] += n->q[i] * f;
        }
    n->inverse_o = 1.0f / sqrtf(dot(o, o) / K + eps);
    for (int j = 0; j < K; j++) n->normed[j] = o[j] * n->inverse_o;
}

/* out [B, T, P]. S is read and becomes the last state. saved [B, H, ceil(T / SPAN), HEAD, HEAD]. */
int kda_forward(const Shape *s, const float *x, const float *carry, const float *z, const float *taps,
                const float *rate, const float *norm, float *S, float *saved, float *out) {
    const long P = s->H * K, spans = (s->T + SPAN - 1) / SPAN;
    float *faded = aligned_alloc(64, sizeof(float) * K * K);
    Token *n = aligned_alloc(64, (sizeof(Token) + 63) / 64 * 64);
    if (!faded || !n) return 1;
    for (long b = 0; b < s->B; b++)
        for (long h = 0; h < s->H; h++) {
            float *state = S + (b * s->H + h) * K * K;
            for (long t = 0; t < s->T; t++) {
                if (t % SPAN == 0)
                    memcpy(saved + ((b * s->H + h) * spans + t / SPAN) * K * K, state, sizeof(float) * K * K);
                prepare(s, x, carry, z, taps, rate, b, h, t, n);
                advance(n, state, faded, s->eps);
                float *target = out + (b * s->T + t) * P + h * K;
                for (int c = 0; c < K; c++) target[c] = n->gate[c] * n->normed[c] * norm[c];
            }
        }
    free(faded);
    free(n);
    return 0;
}

/* Gradients of one token; dS goes from after the token to before it. */
static void retreat(const Shape *s, const Token *n, const float *faded, const float *norm, const float *dout, float *dS,
                    float rate, float *dy, float *dz, float *dgate, float *dbeta, float *dnorm, float *drate) {
    float dn[K], go[K], dq[K], dk[K], dv[K], dw[K], du[K], dg[K];
    for (int c = 0; c < K; c++) {
        const float g = dout[c] * norm[c];
        dgate[c] = g * n->normed[c] * n->gate[c] * (1.0f - n->gate[c]);
        dn[c] = g * n->gate[c];
        dnorm[c] += dout[c] * n->gate[c] * n->normed[c];
    }
    const float along = dot(dn, n->normed) / K;
    for (int c = 0; c < K; c++) go[c] = n->inverse_o * (dn[c] - n->normed[c] * along);
    const float wo = dot(n->w, go);
    memset(dw, 0, sizeof dw);
    for (int i = 0; i < K; i++) {
        float read = 0;
        for (int j = 0; j < K; j++) {
            const float d = dS[i * K + j] + n->q[i] * go[j];
            dS[i * K + j] = d;
            dw[j] += n->k[i] * d;
            read += faded[i * K + j] * go[j];
        }
        dq[i] = read + n->k[i] * wo;
    }
    float db = 0;
    for (int j = 0; j < K; j++) {
        db += dw[j] * (n->v[j] - n->u[j]);
        dv[j] = n->beta * dw[j];
        du[j] = -dv[j];
    }
    for (int i = 0; i < K; i++) {
        float key = 0, decay = 0;
        for (int j = 0; j < K; j++) {
            const float f = faded[i * K + j], old = dS[i * K + j];
            const float d = old + n->k[i] * du[j];
            key += old * n->w[j] + f * du[j];
            decay += d * f;
            dS[i * K + j] = n->a[i] * d;
        }
        dk[i] = key;
        dg[i] = decay;
    }
    *dbeta = db * n->beta * (1.0f - n->beta);
    for (int c = 0; c < K; c++) {
        const float f = dg[c] * s->bound * n->fade[c] * (1.0f - n->fade[c]);
        dz[c] = f * rate;
        *drate += f * n->z[c];
    }
    const float root = 1.0f / sqrtf((float)K), qq = dot(n->q, dq), kk = dot(n->k, dk);
    for (int c = 0; c < K; c++) {
        dq[c] = n->inverse_q * (dq[c] * root - n->q[c] / root * qq);
        dk[c] = n->inverse_k * (dk[c] - n->k[c] * kk);
    }
    const float *grads[3] = {dq, dk, dv};
    for (int stream = 0; stream < 3; stream++)
        for (int c = 0; c < K; c++) {
            const float sig = n->sig[stream][c];
            dy[stream * K + c] = grads[stream][c] * sig * (1.0f + n->y[stream][c] * (1.0f - sig));
        }
}

/* dx [B, T, width], dcarry, dtaps, dnorm [HEAD] and drate [H] must come zeroed; dz is written; dS [B, H, ..] holds
 * the gradient of the last state and becomes that of the first. */
int kda_backward(const Shape *s, const float *x, const float *carry, const float *z, const float *taps,
                 const float *rate, const float *norm, const float *saved, const float *dout, float *dS, float *dx,
                 float *dcarry, float *dz, float *dtaps, float *dnorm, float *drate) {
    const long P = s->H * K, spans = (s->T + SPAN - 1) / SPAN;
    float *faded = aligned_alloc(64, sizeof(float) * K * K * (SPAN + 1));
    Token *tokens = aligned_alloc(64, (sizeof(Token) * SPAN + 63) / 64 * 64);
    if (!faded || !tokens) return 1;
    float *state = faded + (long)SPAN * K * K;
    float dy[3 * K];
    for (long b = 0; b < s->B; b++)
        for (long h = 0; h < s->H; h++)
            for (long span = spans - 1; span >= 0; span--) {
                const long first = span * SPAN, last = first + SPAN < s->T ? first + SPAN : s->T;
                memcpy(state, saved + ((b * s->H + h) * spans + span) * K * K, sizeof(float) * K * K);
                for (long t = first; t < last; t++) {
                    prepare(s, x, carry, z, taps, rate, b, h, t, tokens + t - first);
                    advance(tokens + t - first, state, faded + (t - first) * K * K, s->eps);
                }
                for (long t = last - 1; t >= first; t--) {
                    const long at = b * s->T + t;
                    float *own = dx + at * s->width;
                    retreat(s, tokens + t - first, faded + (t - first) * K * K, norm, dout + at * P + h * K,
                            dS + (b * s->H + h) * K * K, rate[h], dy, dz + at * P + h * K, own + s->gate_at + h * K,
                            own + s->beta_at + h, dnorm, drate + h);
                    for (int tap = 0; tap < 4; tap++) {
                        const long from = t - 3 + tap;
                        const float *source = row(s, x, carry, b, from);
                        float *target = from < 0 ? dcarry + (b * 3 + from + 3) * 3 * P : dx + (b * s->T + from) * s->width;
                        for (int stream = 0; stream < 3; stream++) {
                            const long col = stream * P + h * K;
                            for (int c = 0; c < K; c++) {
                                target[col + c] += taps[tap * 3 * P + col + c] * dy[stream * K + c];
                                dtaps[tap * 3 * P + col + c] += source[col + c] * dy[stream * K + c];
                            }
                        }
                    }
                }
            }
    free(faded);
    free(tokens);
    return 0;
}

/* situ(a, b) = beta tanh(a / beta) sigmoid(a) * linear tanh(b / linear), n values. */
void situ_forward(long n, float beta, float linear, const float *a, const float *b, float *y) {
    for (long i = 0; i < n; i++)
        y[i] = beta * linear * (2.0f * logistic(2.0f / beta * a[i]) - 1.0f) * logistic(a[i]) *
               (2.0f * logistic(2.0f / linear * b[i]) - 1.0f);
}

void situ_backward(long n, float beta, float linear, const float *a, const float *b, const float *dy, float *da,
                   float *db) {
    for (long i = 0; i < n; i++) {
        const float sig = logistic(a[i]), s = 2.0f * logistic(2.0f / beta * a[i]) - 1.0f;
        const float u = 2.0f * logistic(2.0f / linear * b[i]) - 1.0f, g = dy[i] * sig;
        db[i] = g * beta * s * (1.0f - u * u);
        da[i] = g * linear * u * (1.0f - s * s + beta * s * (1.0f - sig));
    }
}

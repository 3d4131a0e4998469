/* Kimi Delta Attention, token-recurrent: S' = Diag(alpha) S; S = S' + beta k (v - S'^T k)^T; o = S^T q.
 * A tile of the state, all K rows by a few columns, stays in the first-level cache for all tokens, and the
 * write of one token is fused with the decay and read of the next: one pass over the tile a token. */
#pragma once
#include "simd.h"

/* n tokens of one head and C vectors of columns. q, k, alpha: [n] rows of K floats at stride ld; v, o at stride
 * ldv, ldo; S [K, dv] row-major, updated in place. */
INLINE void kda_columns(int C, int n, int K, long ld, const float *q, const float *k, const float *alpha,
                        const float *v, long ldv, const float *beta, long ldb, float *S, long dv, float *o,
                        long ldo) {
    vf read[C], delta[C], out[C];
    for (int c = 0; c < C; c++) read[c] = vset(0.0f);
    for (int i = 0; i < K; i++) {
        vf a = vset(alpha[i]), kk = vset(k[i]);
        for (int c = 0; c < C; c++) {
            vf s = vload(S + i * dv + c * VW) * a;
            vstore(S + i * dv + c * VW, s);
            read[c] = vfma(kk, s, read[c]);
        }
    }
    for (int t = 0; t < n; t++) {
        const float *qt = q + t * ld, *kt = k + t * ld;
        vf b = vset(beta[t * ldb]);
        for (int c = 0; c < C; c++) {
            delta[c] = b * (vload(v + t * ldv + c * VW) - read[c]);
            out[c] = read[c] = vset(0.0f);
        }
        if (t + 1 < n) {
            const float *kn = kt + ld, *an = alpha + (t + 1) * ld;
            for (int i = 0; i < K; i++) {
                vf kk = vset(kt[i]), qq = vset(qt[i]), a = vset(an[i]), kk2 = vset(kn[i]);
                for (int c = 0; c < C; c++) {
                    vf s = vfma(kk, delta[c], vload(S + i * dv + c * VW));
                    out[c] = vfma(qq, s, out[c]);
                    s = s * a;
                    vstore(S + i * dv + c * VW, s);
                    read[c] = vfma(kk2, s, read[c]);
                }
            }
        } else {
            for (int i = 0; i < K; i++) {
                vf kk = vset(kt[i]), qq = vset(qt[i]);
                for (int c = 0; c < C; c++) {
                    vf s = vfma(kk, delta[c], vload(S + i * dv + c * VW));
                    out[c] = vfma(qq, s, out[c]);
                    vstore(S + i * dv + c * VW, s);
                }
            }
        }
        for (int c = 0; c < C; c++) vstore(o + t * ldo + c * VW, out[c]);
    }
}

/* All columns of one head; dv is a multiple of VW. */
static void kda_head(int n, int K, int dv, long ld, const float *q, const float *k, const float *alpha,
                     const float *v, long ldv, const float *beta, long ldb, float *S, float *o, long ldo) {
    int c = 0;
    for (; c + 4 * VW <= dv; c += 4 * VW)
        kda_columns(4, n, K, ld, q, k, alpha, v + c, ldv, beta, ldb, S + c, dv, o + c, ldo);
    for (; c + 2 * VW <= dv; c += 2 * VW)
        kda_columns(2, n, K, ld, q, k, alpha, v + c, ldv, beta, ldb, S + c, dv, o + c, ldo);
    for (; c < dv; c += VW)
        kda_columns(1, n, K, ld, q, k, alpha, v + c, ldv, beta, ldb, S + c, dv, o + c, ldo);
}

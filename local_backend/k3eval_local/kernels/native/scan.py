"""The native KDA scan alone: the recurrence over a prompt, for one sequence."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from k3eval_local.kernels.native.build import NativeLibrary, load


def kda_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    threads: int = 1,
    library: NativeLibrary | None = None,
) -> Tensor:
    """``kda_recurrent`` for one sequence, fp32.

    Args:
        q, k, v, g: [T, H, K], q and k normalised and q scaled, g the log-decay. beta: [T, H].
        state: [H, K, K], contiguous; updated in place. threads: heads are shared among them.
        library: a loaded library; ``build.load()`` by default.

    Returns:
        o [T, H, K].

    Raises:
        ValueError: shapes or types that do not fit.
    """
    T, H, K = q.shape
    if K % 16 or state.shape != (H, K, K) or state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(f"state must be a contiguous fp32 tensor [{H}, {K}, {K}] and {K} a multiple of 16")
    library = library or load()
    alpha = g.to(torch.float32).exp().contiguous()
    inputs = [x.to(torch.float32).contiguous() for x in (q, k, v, beta)]
    o = torch.empty(T, H, K)
    if T:
        q, k, v, beta = inputs
        library.handle.k3_kda_scan(
            T, H, K, *(ctypes.c_void_p(x.data_ptr()) for x in (q, k, alpha, v, beta, state, o)), threads
        )
    return o

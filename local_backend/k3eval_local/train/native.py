"""The KDA layer of the training forward in C, where a compiler is found; built once a head size and cached.

`kda_layer` is one autograd operation with the meaning of ``forward.kda_between`` in plain torch, three to
five times as fast on one CPU thread. Without a C compiler ``available`` says why, and the torch path serves.
"""

import ctypes
import hashlib
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3eval_local.kernels.native.build import (
    NativeUnavailable,
    compile_library,
    cpu_flags,
    default_cache,
    intact,
)

SPAN = 32
_SOURCE = Path(__file__).with_name("scan.c")
_FLAGS = (
    *("-O3", "-std=gnu11", "-march=native", "-shared", "-fPIC"),
    # what sums need to be vectorised; never -ffast-math, which changes the whole process's float state
    *(
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fno-signed-zeros",
        "-fassociative-math",
        "-freciprocal-math",
    ),
)
_ANY_HEAD = 32
"""Head size of the build that elementwise functions are taken from."""


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("B", "T", "H", "width", "beta_at", "gate_at")),
        *((name, ctypes.c_float) for name in ("bound", "eps")),
    )


@cache
def library(head: int) -> ctypes.CDLL:
    """The library for heads of ``head`` channels.

    Raises:
        NativeUnavailable: no compiler, or it failed; with the reason.
    """
    digest = hashlib.sha256("\n".join((*_FLAGS, *sorted(cpu_flags()), _SOURCE.read_text())).encode())
    path = default_cache() / f"scan-{head}-{digest.hexdigest()[:20]}.so"
    if not intact(path):
        compile_library(_SOURCE, path, (*_FLAGS, f"-DHEAD={head}"))
    return ctypes.CDLL(str(path))


@cache
def available(head: int) -> str | None:
    """None when the library can be used for this head size, else why not."""
    try:
        library(head)
    except NativeUnavailable as error:
        return str(error)
    except OSError as error:
        return f"the built library does not load: {error}"
    return None


def _pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    for tensor in tensors:
        if not (tensor.is_contiguous() and tensor.dtype == torch.float32 and tensor.device.type == "cpu"):
            raise ValueError("the native KDA layer takes contiguous fp32 tensors on the CPU")
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


class _KDALayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, carry, z, taps, rate, norm, S, beta_at, gate_at, bound, eps):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        B, T, width = x.shape
        H, K = S.shape[1], S.shape[2]
        shape = _Shape(B, T, H, width, beta_at, gate_at, bound, eps)
        inputs = tuple(t.contiguous() for t in (x, carry, z, taps, rate, norm))
        state = S.clone(memory_format=torch.contiguous_format)
        saved = torch.empty(B, H, -(-T // SPAN), K, K)
        out = torch.empty(B, T, H * K)
        if library(K).kda_forward(ctypes.byref(shape), *_pointers(*inputs, state, saved, out)):
            raise MemoryError("the native KDA layer could not get its work space")
        ctx.save_for_backward(*inputs, saved)
        ctx.shape = shape
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dS):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        x, carry, z, taps, rate, norm, saved = ctx.saved_tensors
        K = saved.shape[-1]
        dS = dS.clone(memory_format=torch.contiguous_format)
        zeros = [torch.zeros_like(t) for t in (x, carry, z, taps, norm, rate)]
        pointers = _pointers(x, carry, z, taps, rate, norm, saved, dout.contiguous(), dS, *zeros)
        if library(K).kda_backward(ctypes.byref(ctx.shape), *pointers):
            raise MemoryError("the native KDA layer could not get its work space")
        dx, dcarry, dz, dtaps, dnorm, drate = zeros
        return dx, dcarry, dz, dtaps, drate, dnorm, dS, None, None, None, None


def kda_layer(
    x: Tensor,
    carry: Tensor,
    z: Tensor,
    taps: Tensor,
    rate: Tensor,
    norm: Tensor,
    S: Tensor,
    *,
    beta_at: int,
    gate_at: int,
    bound: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """A KDA layer between its projections.

    Args:
        x: [B, T, W], projections: q, k, v (P = H K columns each), then beta logits [H] at ``beta_at`` and
            gate logits [P] at ``gate_at``.
        carry: [B, 3, 3 P], the q, k, v projections before x.
        z: [B, T, P], inputs of the decay gate, bias added.
        taps: [4, 3 P] convolution weights, the oldest token's first.
        rate: [H], exp of ``A_log``.
        norm: [K], weight of the output norm.
        S: [B, H, K, K], the state before x.
        beta_at: column.
        gate_at: column.
        bound: K3's bound of the log-decay, negative.
        eps: of the output norm.

    Returns:
        Gated output [B, T, P], before ``o_proj``, and the state after x.
    """
    out, state = _KDALayer.apply(x, carry, z, taps, rate, norm, S, beta_at, gate_at, bound, eps)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return out, state


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, beta, linear_beta):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        a, b = a.contiguous(), b.contiguous()
        y = torch.empty_like(a)
        library(_ANY_HEAD).situ_forward(
            ctypes.c_long(a.numel()), ctypes.c_float(beta), ctypes.c_float(linear_beta), *_pointers(a, b, y)
        )
        ctx.save_for_backward(a, b)
        ctx.betas = (beta, linear_beta)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]  # torch's own signature is untyped
        a, b = ctx.saved_tensors
        da, db = torch.empty_like(a), torch.empty_like(b)
        beta, linear_beta = map(ctypes.c_float, ctx.betas)
        library(_ANY_HEAD).situ_backward(
            ctypes.c_long(a.numel()), beta, linear_beta, *_pointers(a, b, grad.contiguous(), da, db)
        )
        return da, db, None, None


def situ(a: Tensor, b: Tensor, beta: float, linear_beta: float) -> Tensor:
    """``gradients.situ`` as one pass over memory each way."""
    result: Tensor = _Situ.apply(a, b, beta, linear_beta)  # type: ignore[no-untyped-call]  # as above
    return result

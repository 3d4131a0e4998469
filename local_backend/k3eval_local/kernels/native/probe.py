"""Whether narrow weights pay on this machine: a measured ratio, not a processor flag."""

from __future__ import annotations

import ctypes
import time

import torch

from k3eval_local.kernels.native.build import NativeLibrary
from k3eval_local.kernels.native.pack import WeightType, pack

_OUTPUTS, _INPUTS, _REPEATS = 4096, 1024, 7
"""16 MiB in fp32: more than a core's own caches hold, as in a model that is worth narrowing."""


def narrow_speedup(library: NativeLibrary, weights: WeightType) -> float:
    """Time of one fp32 matrix-vector product over the same with ``weights``; above 1 when they pay."""
    matrix = torch.randn(_OUTPUTS, _INPUTS, generator=torch.Generator().manual_seed(0))
    x, y = torch.randn(_INPUTS), torch.empty(_OUTPUTS + 64)
    packed = {kind: pack([matrix], kind, library.isa) for kind in ("fp32", weights)}
    best = dict.fromkeys(packed, float("inf"))
    for _ in range(_REPEATS):  # taking turns
        for kind, one in packed.items():
            start = time.perf_counter()
            library.handle.k3_linear(
                ctypes.byref(one.mat), ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())
            )
            best[kind] = min(best[kind], time.perf_counter() - start)
    return best["fp32"] / best[weights]

"""Weights in the native step's form: panels of NR outputs, each [in, NR], in fp32, bf16 or int8."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k3eval_local.kernels.native.build import PANEL, Isa

WeightType = Literal["fp32", "bf16", "int8"]
_DTYPE: dict[WeightType, int] = {"fp32": 0, "bf16": 1, "int8": 2}


class Mat(ctypes.Structure):
    """``Mat`` of gemm.h."""

    _fields_ = (
        ("w", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("out", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("pad", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Packed:
    """A packed matrix and the arrays that ``mat`` points into: keep it as long as C uses it."""

    mat: Mat
    panels: NDArray[np.generic]
    scale: NDArray[np.float32] | None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.panels.nbytes + (0 if self.scale is None else self.scale.nbytes)


def pack(parts: Sequence[Tensor], weights: WeightType, isa: Isa) -> Packed:
    """The matrices [out_i, in], stacked over their outputs.

    bf16 rounds to nearest even; int8 rounds to nearest with one scale an output, ``max |w| / 127``.
    """
    panel = PANEL[isa]
    matrix = torch.cat([part.detach().to(torch.float32) for part in parts])
    out, inputs = matrix.shape
    matrix = torch.nn.functional.pad(matrix, (0, 0, 0, -out % panel))
    scale: NDArray[np.float32] | None = None
    if weights == "int8":
        peak = matrix.abs().amax(1).clamp(min=1e-30) / 127.0
        scale = peak.numpy().copy()
        matrix = (matrix / peak[:, None]).round().to(torch.int8)
    elif weights == "bf16":
        matrix = matrix.to(torch.bfloat16).view(torch.int16)
    panels = matrix.view(-1, panel, inputs).transpose(1, 2).contiguous().numpy().copy()
    mat = Mat(
        panels.ctypes.data, None if scale is None else scale.ctypes.data, out, inputs, _DTYPE[weights], 0
    )
    return Packed(mat, panels, scale)

"""Which form serves an operation: a Triton kernel or the torch reference, by device, dtype and shape.

One table of conditions, one function. ``force`` overrides it for tests and comparisons; a kernel that cannot
do a shape is then an error instead of a silent fallback.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from k3eval_local.errors import LocalError

Force = Literal["auto", "torch", "triton"]
Operation = Literal["kda_prefill", "kda_decode", "mla_decode", "moe", "attn_res"]


class KernelUnavailable(LocalError):
    """A kernel was asked for by name and cannot serve; the message says why."""


@dataclass(frozen=True)
class Sizes:
    """What the conditions look at; zero where an operation has no such size."""

    head: int = 0
    """KDA head size."""
    rank: int = 0
    """MLA latent rank."""
    bound: float | None = -5.0
    """Lower bound of KDA's log-decay; ``None`` for Kimi Linear's gate."""
    packed: bool = False
    """Experts are MXFP4."""


def _power_of_two(size: int) -> bool:
    return size >= 16 and size & (size - 1) == 0


_CONDITIONS: Mapping[Operation, tuple[tuple[Callable[[Sizes], bool], str], ...]] = {
    "kda_prefill": (
        (lambda s: _power_of_two(s.head), "the head size must be a power of two of at least 16"),
        (lambda s: s.bound is not None and -5.0 <= s.bound <= 0.0, "the decay must be bounded by -5 or more"),
    ),
    "kda_decode": ((lambda s: _power_of_two(s.head), "the head size must be a power of two of at least 16"),),
    "mla_decode": (
        (lambda s: _power_of_two(s.rank), "the latent rank must be a power of two of at least 16"),
    ),
    "moe": (),
    "attn_res": (),
}


def choose(
    operation: Operation, device: torch.device, dtype: torch.dtype, sizes: Sizes, force: Force = "auto"
) -> bool:
    """Whether the Triton kernel serves this operation.

    By itself: on CUDA devices, for fp32 and bf16, where the sizes fit. Forced to ``triton`` it also runs on
    CPU tensors in Triton's interpreter (``TRITON_INTERPRET=1``).

    Raises:
        KernelUnavailable: forced to ``triton`` where the kernel cannot serve.
    """
    if force == "torch":
        return False
    reason = _why_not(operation, device, dtype, sizes)
    if force == "triton" and reason is not None:
        raise KernelUnavailable(f"the Triton kernel {operation} cannot serve: {reason}")
    return reason is None and (force == "triton" or device.type == "cuda")


def _why_not(operation: Operation, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not (device.type == "cpu" and interpreted):
        return f"{device.type} tensors need TRITON_INTERPRET=1"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{dtype} is neither fp32 nor bf16"
    return next((text for holds, text in _CONDITIONS[operation] if not holds(sizes)), None)

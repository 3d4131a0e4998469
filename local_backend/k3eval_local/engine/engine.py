"""The engine for a `K3Model`: continuous batching, chunked prefill, paged cache, prefix reuse."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from k3eval_local.engine.core import EngineCore
from k3eval_local.engine.k3_runner import K3Runner
from k3eval_local.engine.native_runner import NativeRunner
from k3eval_local.kernels.native.build import NativeUnavailable
from k3eval_local.kernels.native.pack import WeightType
from k3eval_local.model.accounting import count_parameters
from k3eval_local.model.decoder import K3Model

_log = logging.getLogger(__name__)
Kernels = Literal["auto", "torch", "native", "triton"]
DEFAULT_MEMORY_BYTES = 2 * 1024**3
"""Reserved address space; memory is only used as the cache fills."""
_CHUNK_PRODUCTS = 4e9
"""Multiply-adds of a default prefill piece: 0.1 to 0.5 s on one core."""


class Engine(EngineCore):
    """Generates token ids from token ids, for many requests at once.

    `start()` (or `with Engine(...) as engine`) runs it on a thread of its own; `submit` returns a
    `Generation` to iterate over; `close()` always joins.

    A request's random numbers and the pieces of its prompt do not depend on what else runs; its logits do by
    rounding alone (matrix products over more rows): at most 2e-5 for logits of size 1, fp32, configs A and B.
    """

    def __init__(
        self,
        model: K3Model,
        *,
        memory_budget_bytes: int = DEFAULT_MEMORY_BYTES,
        max_batch: int = 64,
        prefill_chunk: int | None = None,
        block_tokens: int = 32,
        checkpoint_tokens: int = 512,
        cache_dtype: torch.dtype | None = None,
        kernels: Kernels = "auto",
        weights: WeightType = "fp32",
        seed: int | None = None,
    ) -> None:
        """Reserves the memory; does not start yet.

        memory_budget_bytes: for the cache of all sequences, their recurrent states and saved prefixes.
            Weights and a step's activations come on top.
        max_batch: sequences that run at the same time; more wait.
        prefill_chunk: most prompt tokens that a step runs besides one token of each stream; by default as
            many as keep such a step short for a model of this size.
        block_tokens: tokens of a page of the cache.
        checkpoint_tokens: spacing of the checkpoints that are kept besides those at turn ends.
        cache_dtype: of the attention cache; the model's own by default.
        kernels: what runs the model. ``auto``: Triton kernels on a GPU; on a CPU the native step when it can
            be had, else torch, and one line says why. The other values force one of them.
        weights: of the native step's matrices; narrower ones only where a probe finds them faster.
        seed: source of the seeds of requests that bring none.

        Raises InvalidRequest when the budget does not hold max_batch states and one page, NativeUnavailable
        or KernelUnavailable when a forced path cannot serve this model here.
        """
        runner = _runner(model, memory_budget_bytes, max_batch, block_tokens, cache_dtype, kernels, weights)
        chunk = _chunk(model) if prefill_chunk is None else prefill_chunk
        super().__init__(runner, prefill_chunk=chunk, checkpoint_tokens=checkpoint_tokens, seed=seed)


def _runner(
    model: K3Model,
    budget: int,
    max_batch: int,
    page_tokens: int,
    dtype: torch.dtype | None,
    kernels: Kernels,
    weights: WeightType,
) -> K3Runner:
    """The runner asked for, or the fastest that can be had."""
    if weights != "fp32" and kernels not in ("auto", "native"):
        raise NativeUnavailable(
            f"{weights} weights are the native step's; {kernels} runs fp32 and bf16 models"
        )
    if kernels == "triton" or (kernels == "auto" and model.device.type == "cuda"):
        from k3eval_local.engine.triton_runner import (
            TritonRunner,
        )  # imports triton, which a CPU can do without

        return TritonRunner(
            model,
            memory_budget_bytes=budget,
            max_batch=max_batch,
            page_tokens=page_tokens,
            cache_dtype=dtype,
            force=kernels,
        )
    if kernels == "native" or (kernels == "auto" and dtype in (None, model.dtype)):
        try:
            return NativeRunner(
                model,
                memory_budget_bytes=budget,
                max_batch=max_batch,
                page_tokens=page_tokens,
                weights=weights,
            )
        except NativeUnavailable as reason:
            if kernels == "native" or weights != "fp32":
                raise
            _log.warning("the engine runs on torch: %s", reason)
    return K3Runner(
        model,
        memory_budget_bytes=budget,
        max_batch=max_batch,
        page_tokens=page_tokens,
        cache_dtype=dtype,
    )


def _chunk(model: K3Model) -> int:
    """64 to 512 tokens: larger pieces are faster, smaller ones let other streams through sooner."""
    size, active = 512, count_parameters(model.config).active
    while size > 64 and size * active > _CHUNK_PRODUCTS:
        size //= 2
    return size

"""The same memory, run by the native CPU step: C on the engine's own pages and slots.

A whole step is one call, during which other Python threads run. Results equal the torch runner's to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3eval_local.engine.k3_runner import K3Runner
from k3eval_local.engine.prefix import TokenArray
from k3eval_local.engine.runner import Row
from k3eval_local.kernels.native.build import NativeUnavailable, load
from k3eval_local.kernels.native.pack import WeightType
from k3eval_local.kernels.native.probe import narrow_speedup
from k3eval_local.kernels.native.step import NativeStep, SequenceView
from k3eval_local.model.decoder import K3Model

_log = logging.getLogger(__name__)
_MAX_ROWS = 512


class NativeRunner(K3Runner):
    """A `K3Runner` with the native step. It holds a packed copy of the weights."""

    def __init__(
        self,
        model: K3Model,
        *,
        memory_budget_bytes: int,
        max_batch: int,
        page_tokens: int = 32,
        weights: WeightType = "fp32",
    ) -> None:
        """``weights`` narrower than fp32 are used only where a probe finds them faster; a line says if not.

        Raises NativeUnavailable where the step cannot be built or does not do this model.
        """
        library = load()
        if weights != "fp32" and (ratio := narrow_speedup(library, weights)) <= 1.0:
            _log.warning("%s weights are no faster here (%.2fx): fp32 is used", weights, ratio)
            weights = "fp32"
        if model.dtype != torch.float32 or model.device.type != "cpu":
            raise NativeUnavailable("the native step runs fp32 models on a CPU")
        step = NativeStep(
            model,
            weights=weights,
            threads=torch.get_num_threads(),
            max_rows=max(_MAX_ROWS, max_batch),
            library=library,
        )
        super().__init__(
            model, memory_budget_bytes=memory_budget_bytes, max_batch=max_batch, page_tokens=page_tokens
        )
        width = model.config.latent_cache_width
        step.set_pages(list(self._latents), page_tokens=page_tokens, page_stride=page_tokens * width)
        self._step = step
        self._views = [
            SequenceView(
                model.config.num_hidden_layers,
                [
                    (layer, self._S[place, slot], self._conv[place, slot])
                    for place, layer in enumerate(step.kda_layers)
                ],
            )
            for slot in range(max_batch)
        ]

    def prefill(self, row: Row, tokens: TokenArray, *, last: bool) -> Tensor | None:
        """See `ModelRunner.prefill`."""
        logits = None
        for start in range(0, len(tokens), _MAX_ROWS):
            piece = tokens[start : start + _MAX_ROWS]
            want = np.zeros(len(piece), dtype=np.uint8)
            want[-1] = last and start + len(piece) == len(tokens)
            here = replace(row, cached=row.cached + start)
            logits = self._forward([here], np.array([len(piece)], dtype=np.int32), piece, want)
        return logits[0] if last and logits is not None else None

    def decode(self, rows: Sequence[Row], tokens: Sequence[int]) -> Tensor:
        """See `ModelRunner.decode`."""
        counts, want = np.ones(len(rows), dtype=np.int32), np.ones(len(rows), dtype=np.uint8)
        return self._forward(rows, counts, np.array(tokens, dtype=np.int32), want)

    def _forward(
        self, rows: Sequence[Row], counts: TokenArray, tokens: TokenArray, want: npt.NDArray[np.uint8]
    ) -> Tensor:
        views = []
        for row in rows:
            view = self._views[row.slot]
            view.position = row.cached
            view.set_table(row.table)
            views.append(view)
        return self._step.forward(views, counts, np.ascontiguousarray(tokens, dtype=np.int32), want)

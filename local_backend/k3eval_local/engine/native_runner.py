"""The same memory, run by the native CPU step: C on the engine's own pages and slots.

Decoding and short prompts go through the native step, which does a whole step in one call and lets other
Python threads run meanwhile. Where attention over a long past is nearly all the work, torch's blocked
attention is faster, so long pieces of long prompts stay there; which of the two depends on position and
length only. Results equal the torch runner's to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3eval_local.engine.k3_runner import K3Runner
from k3eval_local.engine.prefix import TokenArray
from k3eval_local.engine.runner import Row
from k3eval_local.kernels.native.build import NativeUnavailable
from k3eval_local.kernels.native.step import NativeStep, SequenceView
from k3eval_local.model.decoder import K3Model

_MAX_ROWS = 512
_TORCH_PAIRS = 1 << 20
"""New tokens times past tokens from which torch's attention wins; measured on config A, one thread."""


class NativeRunner(K3Runner):
    """A `K3Runner` with the native step. It holds a packed copy of the weights."""

    def __init__(
        self, model: K3Model, *, memory_budget_bytes: int, max_batch: int, page_tokens: int = 32
    ) -> None:
        """Raises NativeUnavailable where the step cannot be built or does not do this model."""
        if model.dtype != torch.float32 or model.device.type != "cpu":
            raise NativeUnavailable("the native step runs fp32 models on a CPU")
        step = NativeStep(model, threads=torch.get_num_threads(), max_rows=max(_MAX_ROWS, max_batch))
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
        if len(tokens) > _MAX_ROWS or len(tokens) * row.cached > _TORCH_PAIRS:
            return super().prefill(row, tokens, last=last)
        want = np.zeros(len(tokens), dtype=np.uint8)
        want[-1] = last
        logits = self._forward([row], np.array([len(tokens)], dtype=np.int32), tokens, want)
        return logits[0] if last else None

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

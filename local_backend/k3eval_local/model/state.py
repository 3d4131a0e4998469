"""What a sequence leaves behind after some tokens: one state a layer, and how many tokens were seen.

States are values: no function of this package writes into a state it was given, so one state can be
continued twice. KDA layers keep a fixed-size matrix, MLA layers one latent vector a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from k3eval_local.model.config import K3Config
from k3eval_local.model.norm import wide


@dataclass(frozen=True)
class KDAState:
    """State of one KDA layer.

    conv: [B, kernel - 1, 3 P], the last projections of q, k and v before convolution, oldest first.
    S: [B, H, d_k, d_v] fp32 (fp64 for an fp64 model): rows are key channels.
    """

    conv: Tensor
    S: Tensor


@dataclass(frozen=True)
class MLAState:
    """Cache of one MLA layer. latent: [B, T, kv_lora + slot], the normed latent and the raw slot key."""

    latent: Tensor


LayerState = KDAState | MLAState


@dataclass(frozen=True)
class ModelState:
    """The states of all layers of a batch.

    lengths: tokens seen, one a sequence. MLA caches are as long as the longest; rows beyond a
    sequence's own length are zero and never read.
    """

    layers: tuple[LayerState, ...]
    lengths: tuple[int, ...]

    @classmethod
    def empty(
        cls, config: K3Config, batch: int, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> ModelState:
        """The state before the first token: all zeros, caches of length 0."""
        linear = config.linear_attn
        layers: list[LayerState] = []
        for kind in config.layer_kinds:
            if kind == "kda":
                conv = torch.zeros(
                    batch, linear.short_conv_kernel_size - 1, 3 * config.kda_width, dtype=dtype, device=device
                )
                S = torch.zeros(
                    batch,
                    linear.num_heads,
                    linear.head_dim,
                    linear.head_dim,
                    dtype=wide(dtype),
                    device=device,
                )
                layers.append(KDAState(conv, S))
            else:
                latent = torch.zeros(batch, 0, config.latent_cache_width, dtype=dtype, device=device)
                layers.append(MLAState(latent))
        return cls(tuple(layers), (0,) * batch)

    @property
    def batch(self) -> int:
        """Sequences in this state."""
        return len(self.lengths)

    @property
    def uniform(self) -> bool:
        """Whether all sequences have seen the same number of tokens."""
        return len(set(self.lengths)) <= 1

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for layer in self.layers for tensor in _tensors(layer))

    def clone(self) -> ModelState:
        """A copy that shares no memory, detached from any autograd graph."""
        return ModelState(
            tuple(
                KDAState(layer.conv.detach().clone(), layer.S.detach().clone())
                if isinstance(layer, KDAState)
                else MLAState(layer.latent.detach().clone())
                for layer in self.layers
            ),
            self.lengths,
        )

    def split(self) -> list[ModelState]:
        """One state of batch 1 for each sequence (views), caches cut to the sequence's own length."""
        return [
            ModelState(
                tuple(
                    KDAState(layer.conv[row : row + 1], layer.S[row : row + 1])
                    if isinstance(layer, KDAState)
                    else MLAState(layer.latent[row : row + 1, :length])
                    for layer in self.layers
                ),
                (length,),
            )
            for row, length in enumerate(self.lengths)
        ]

    @classmethod
    def stack(cls, states: Sequence[ModelState]) -> ModelState:
        """The inverse of ``split``: several states as one batch, in order. Shorter caches are padded."""
        if not states or len({len(state.layers) for state in states}) != 1:
            raise ValueError("stack needs at least one state, all of the same model")
        lengths = tuple(length for state in states for length in state.lengths)
        longest = max(lengths)
        layers: list[LayerState] = []
        for parts in zip(*(state.layers for state in states), strict=True):
            kda = [part for part in parts if isinstance(part, KDAState)]
            mla = [part for part in parts if isinstance(part, MLAState)]
            if kda and mla:
                raise ValueError("stack needs states of the same model")
            if kda:
                layers.append(KDAState(torch.cat([p.conv for p in kda]), torch.cat([p.S for p in kda])))
            else:
                padded = [functional.pad(p.latent, (0, 0, 0, longest - p.latent.shape[1])) for p in mla]
                layers.append(MLAState(torch.cat(padded)))
        return cls(tuple(layers), lengths)

    def truncate_mla(self, length: int) -> ModelState:
        """The MLA caches cut back to ``length`` tokens.

        KDA states cannot be rewound: they are kept as they are, so the caller must pair the result with
        KDA states taken at ``length`` (a checkpoint of the same sequence).
        """
        if not 0 <= length <= min(self.lengths, default=0):
            raise ValueError(f"cannot cut caches of lengths {self.lengths} to {length}")
        return ModelState(
            tuple(
                layer if isinstance(layer, KDAState) else MLAState(layer.latent[:, :length])
                for layer in self.layers
            ),
            (length,) * self.batch,
        )


def _tensors(layer: LayerState) -> tuple[Tensor, ...]:
    return (layer.conv, layer.S) if isinstance(layer, KDAState) else (layer.latent,)


@dataclass(frozen=True)
class Segment:
    """The new tokens of one forward call: where they start and how many of each row are real.

    past: tokens before this call, one a sequence. new: real tokens of each row in this call; the rest of
    a row, up to ``width``, is padding on the right.
    """

    past: tuple[int, ...]
    new: tuple[int, ...]
    width: int

    @property
    def padded(self) -> bool:
        """Whether some row has padding."""
        return any(count != self.width for count in self.new)

    @property
    def ragged_past(self) -> bool:
        """Whether rows start at different lengths."""
        return len(set(self.past)) > 1

    def valid(self, device: torch.device) -> Tensor:
        """[B, width] bool: which positions hold real tokens."""
        counts = torch.tensor(self.new, device=device)
        return torch.arange(self.width, device=device)[None] < counts[:, None]

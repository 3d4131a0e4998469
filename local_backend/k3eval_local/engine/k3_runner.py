"""Runs a `K3Model` over paged memory: the engine's `ModelRunner` for the real model, in plain torch.

Memory is reserved once and touched as it is used. The pool is [attention layers, pages, bytes of a page];
a page holds latents, or a slice of a saved recurrent state. Running states are [KDA layers, slots, ...] in
fp32. Layers are the model's own functions; only storage, and attention over pages, is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from k3eval_local.engine.errors import InvalidRequest
from k3eval_local.engine.paged_attention import attend_decode, attend_prefill, plan_decode, spans
from k3eval_local.engine.pages import Pages
from k3eval_local.engine.prefix import TokenArray
from k3eval_local.engine.runner import CacheLayout, Row
from k3eval_local.model.accounting import count_parameters
from k3eval_local.model.attn_res import BlockStream
from k3eval_local.model.config import K3Config
from k3eval_local.model.decoder import DecoderLayer, K3Model
from k3eval_local.model.kda import KDA, SAFE_BOUND, kda_chunk, kda_step
from k3eval_local.model.mla import MLA
from k3eval_local.model.norm import wide
from k3eval_local.model.state import Segment

_Attend = Callable[[MLA, Tensor, Tensor], Tensor]
"""(layer, its cache [pages, page_tokens, W], normed input [B, T, d]) -> output [B, T, d]."""
_ATTENTION_EFFICIENCY = 10.0
"""Attention over long contexts runs at ten times the flop rate of the rest (config A, CPU, measured)."""


class K3Runner:
    """One model with memory for `max_batch` running sequences and as many pages as the budget leaves."""

    def __init__(
        self,
        model: K3Model,
        *,
        memory_budget_bytes: int,
        max_batch: int,
        page_tokens: int = 32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Reserves the memory. cache_dtype: of the latents, the model's own by default.

        Raises InvalidRequest when the budget does not even hold the running states and one page.
        """
        config, device = model.config, model.device
        self._model, self._device = model, device
        kinds = config.layer_kinds
        kda, mla = kinds.count("kda"), kinds.count("mla")
        dtype = cache_dtype or model.dtype
        linear, width = config.linear_attn, config.latent_cache_width
        self._S = torch.zeros(
            kda,
            max_batch,
            linear.num_heads,
            linear.head_dim,
            linear.head_dim,
            dtype=wide(model.dtype),
            device=device,
        )
        self._conv = torch.zeros(
            kda,
            max_batch,
            linear.short_conv_kernel_size - 1,
            3 * config.kda_width,
            dtype=model.dtype,
            device=device,
        )
        slot_bytes = (self._S.nbytes + self._conv.nbytes) // max_batch
        layer_page_bytes = page_tokens * width * dtype.itemsize
        page_bytes = mla * layer_page_bytes
        pages = (memory_budget_bytes - max_batch * slot_bytes) // page_bytes
        if pages < 1:
            raise InvalidRequest(
                f"memory_budget_bytes is {memory_budget_bytes}; {max_batch} running sequences need "
                f"{max_batch * slot_bytes + page_bytes} bytes at least"
            )
        self._pool = torch.empty(mla, pages, layer_page_bytes, dtype=torch.uint8, device=device)
        self._latents = self._pool.view(dtype).view(mla, pages, page_tokens, width)
        self._scale = config.qk_head_dim**-0.5
        self._queries = model.queries().detach()
        # The place of each layer among those of its kind.
        self._places = [kinds[:layer].count(kind) for layer, kind in enumerate(kinds)]
        self._layout = CacheLayout(
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            page_tokens=page_tokens,
            page_bytes=page_bytes,
            slot_bytes=slot_bytes,
            state_pages=-(-slot_bytes // page_bytes),
            pages=pages,
            slots=max_batch,
            attention_parity=_parity(config),
        )

    @property
    def layout(self) -> CacheLayout:
        """Sizes, fixed for the runner's life."""
        return self._layout

    def prefill(self, row: Row, tokens: TokenArray, *, last: bool) -> Tensor | None:
        """See `ModelRunner.prefill`."""
        count, size = len(tokens), self._layout.page_tokens
        past = spans(row.table, row.cached, size)
        positions = np.arange(row.cached, row.cached + count)
        places = torch.from_numpy(row.table[positions // size].astype(np.int64) * size + positions % size)

        def attend(layer: MLA, cache: Tensor, x: Tensor) -> Tensor:
            new = layer.latents(x)[0].to(cache.dtype)
            q = self._absorbed(layer, x).to(cache.dtype)
            out = attend_prefill(q, new, cache, past, self._scale)
            cache.flatten(0, 1).index_copy_(0, places.to(self._device), new)
            return self._expanded(layer, x, out)

        ids = torch.from_numpy(tokens).long()[None].to(self._device)
        segment = Segment((row.cached,), (count,), count)
        out = self._run(ids, segment, slice(row.slot, row.slot + 1), attend)
        return self._model.head(out[0, -1]) if last else None

    def decode(self, rows: Sequence[Row], tokens: Sequence[int]) -> Tensor:
        """See `ModelRunner.decode`."""
        size, batch = self._layout.page_tokens, len(rows)
        lengths = [row.cached + 1 for row in rows]
        places = torch.tensor(
            [int(row.table[row.cached // size]) * size + row.cached % size for row in rows],
            device=self._device,
        )
        plan = plan_decode([row.table for row in rows], lengths, size, self._device)

        def attend(layer: MLA, cache: Tensor, x: Tensor) -> Tensor:
            cache.flatten(0, 1).index_copy_(0, places, layer.latents(x)[:, 0].to(cache.dtype))
            q = self._absorbed(layer, x).to(cache.dtype)
            return self._expanded(layer, x, attend_decode(q, cache, plan, self._scale))

        ids = torch.tensor(tokens, device=self._device)[:, None]
        segment = Segment((0,) * batch, (1,) * batch, 1)
        out = self._run(ids, segment, _slots([row.slot for row in rows], self._device), attend)
        return self._model.head(out[:, 0])

    def reset_state(self, slot: int) -> None:
        """See `ModelRunner.reset_state`."""
        self._S[:, slot] = 0
        self._conv[:, slot] = 0

    def save_state(self, slot: int, pages: Pages) -> None:
        """See `ModelRunner.save_state`. Bytes are copied, so a restored state is the same to the last bit."""
        if len(pages):
            data = torch.cat([_bytes(self._S[:, slot]), _bytes(self._conv[:, slot])])
            mla, _, page = self._pool.shape
            padded = functional.pad(data, (0, len(pages) * mla * page - len(data)))
            self._pool[:, self._index(pages)] = padded.view(mla, len(pages), page)

    def load_state(self, slot: int, pages: Pages) -> None:
        """See `ModelRunner.load_state`."""
        if len(pages):
            data = self._pool[:, self._index(pages)].flatten()
            for target in (self._S[:, slot], self._conv[:, slot]):
                size = target.numel() * target.itemsize
                target.copy_(data[:size].clone().view(target.dtype).view(target.shape))
                data = data[size:]

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        """See `ModelRunner.copy_page`."""
        self._latents[:, target, :tokens] = self._latents[:, source, :tokens]

    def fill_with_noise(self, pages: int, seed: int = 0) -> None:
        """Pretends that the first `pages` pages hold tokens, for timing at a context length."""
        self._latents[:, :pages].normal_(generator=torch.Generator(self._device).manual_seed(seed))

    def _run(self, ids: Tensor, segment: Segment, slots: slice | Tensor, attend: _Attend) -> Tensor:
        """All layers: ids [B, T] -> the vectors [B, T, d] before the final norm."""
        model = self._model
        stream = self._stream(model.model.embed_tokens(ids))
        for layer, place in zip(model.layers, self._places, strict=True):
            x = layer.input_layernorm(stream.read())
            if isinstance(layer.self_attn, KDA):
                stream.write_attention(self._kda(layer.self_attn, place, x, segment, slots))
            else:
                stream.write_attention(attend(layer.self_attn, self._latents[place], x))
            stream.write_ffn(self._feed_forward(layer, stream.read()))
        return stream.read()

    def _stream(self, embedding: Tensor) -> BlockStream:
        """The residual stream of one pass."""
        config = self._model.config
        return BlockStream(
            embedding, self._queries, config.attn_res_block_size, config.rms_norm_eps, "direct"
        )

    def _feed_forward(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        """The feed-forward sublayer on its mixed input [B, T, d]."""
        return layer.feed_forward(x)[0]

    def _kda(self, layer: KDA, place: int, x: Tensor, segment: Segment, slots: slice | Tensor) -> Tensor:
        """One KDA layer: x [B, T, d] -> [B, T, d]; the slots' states move on."""
        q, k, v, g, beta, conv = layer.inputs(x, self._conv[place, slots], segment)
        S = self._S[place, slots]
        if segment.width == 1:
            o, S = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], S)
            o = o[:, None]
        else:
            bounded = layer.bound is not None and layer.bound >= SAFE_BOUND
            o, S = kda_chunk(q, k, v, g, beta, S, bounded=bounded)
        self._conv[place, slots] = conv.to(self._conv.dtype)
        self._S[place, slots] = S
        return layer.output(x, o)

    def _absorbed(self, layer: MLA, x: Tensor) -> Tensor:
        """Queries in the latent: x [B, T, d] -> [B T, H, kv_lora + slot]."""
        q = layer.queries(x).flatten(0, 1)
        w_uk, _ = layer.expansion()
        nope, slot = q.tensor_split([layer.nope], dim=-1)
        return torch.cat([torch.einsum("bhn,hnr->bhr", nope, w_uk), slot], dim=-1)

    def _expanded(self, layer: MLA, x: Tensor, latent: Tensor) -> Tensor:
        """From mean latents [B T, H, kv_lora + slot] to the sublayer's output [B, T, d]."""
        _, w_uv = layer.expansion()
        o = torch.einsum("bhr,hvr->bhv", latent[..., : layer.rank].to(x.dtype), w_uv)
        return layer.output(x, o.view(*x.shape[:2], layer.heads, layer.value))

    def _index(self, pages: Pages) -> Tensor:
        return torch.from_numpy(pages).long().to(self._device)


def _slots(slots: Sequence[int], device: torch.device) -> slice | Tensor:
    """A slice when the slots are consecutive: the batch's states are then used in place."""
    if list(slots) == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots, device=device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _parity(config: K3Config) -> float:
    """Context at which one token's attention costs as much as the rest of the model.

    Products only: 2 flops a weight that a token meets, and 2 H (2 r + s) flops a cached token and layer.
    """
    attention = config.num_attention_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    layers = config.layer_kinds.count("mla")
    return _ATTENTION_EFFICIENCY * count_parameters(config).active / (attention * layers)

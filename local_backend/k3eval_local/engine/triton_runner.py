"""The paged memory run by Triton kernels, operation by operation as ``kernels.dispatch`` chooses.

KDA (prefill, and decode in place on the slots), absorbed MLA decode over the block tables, routed experts
and the attention-residual mixes have kernels; projections are torch's. Results equal the torch runner's to
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from k3eval_local.engine.k3_runner import K3Runner
from k3eval_local.engine.runner import Row
from k3eval_local.kernels import attn_res, kda_decode, kda_prefill, mla_decode, moe
from k3eval_local.kernels.dispatch import Force, Operation, Sizes, choose
from k3eval_local.model.attn_res import BlockStream
from k3eval_local.model.decoder import DecoderLayer, K3Model
from k3eval_local.model.kda import KDA, short_conv
from k3eval_local.model.mla import MLA
from k3eval_local.model.moe import LatentMoE, PackedExperts
from k3eval_local.model.state import Segment


class TritonRunner(K3Runner):
    """A ``K3Runner`` whose operations go through the dispatch table."""

    def __init__(
        self,
        model: K3Model,
        *,
        memory_budget_bytes: int,
        max_batch: int,
        page_tokens: int = 64,
        cache_dtype: torch.dtype | None = None,
        force: Force = "auto",
    ) -> None:
        """As ``K3Runner``. Raises KernelUnavailable when a kernel is forced that cannot serve this model."""
        super().__init__(
            model,
            memory_budget_bytes=memory_budget_bytes,
            max_batch=max_batch,
            page_tokens=page_tokens,
            cache_dtype=cache_dtype,
        )
        config = model.config
        sizes = Sizes(
            head=config.linear_attn.head_dim,
            rank=config.kv_lora_rank,
            bound=config.linear_attn.gate_lower_bound,
            packed=config.mxfp4,
        )
        operations: tuple[Operation, ...] = ("kda_prefill", "kda_decode", "mla_decode", "moe", "attn_res")
        self._kernel = {op: choose(op, model.device, model.dtype, sizes, force) for op in operations}

    def decode(self, rows: Sequence[Row], tokens: Sequence[int]) -> Tensor:
        """See `ModelRunner.decode`."""
        if not self._kernel["mla_decode"]:
            return super().decode(rows, tokens)
        size, batch = self._layout.page_tokens, len(rows)
        widest = max(self._layout.pages_for(row.cached + 1) for row in rows)
        tables = np.zeros((batch, widest), dtype=np.int32)
        for i, row in enumerate(rows):
            pages = row.table[: self._layout.pages_for(row.cached + 1)]
            tables[i, : len(pages)] = pages
        table = torch.from_numpy(tables).to(self._device)
        lengths = torch.tensor([row.cached + 1 for row in rows], dtype=torch.int32, device=self._device)
        last = lengths.long() - 1
        places = table.gather(1, last[:, None] // size)[:, 0].long() * size + last % size

        def attend(layer: MLA, cache: Tensor, x: Tensor) -> Tensor:
            cache.flatten(0, 1).index_copy_(0, places, layer.latents(x)[:, 0].to(cache.dtype))
            q = self._absorbed(layer, x).to(cache.dtype)
            out = mla_decode.mla_decode(q, cache, table, lengths, rank=layer.rank, scale=self._scale)
            return self._expanded(layer, x, out)

        ids = torch.tensor(tokens, device=self._device)[:, None]
        slots = torch.tensor([row.slot for row in rows], device=self._device)
        out = self._run(ids, Segment((0,) * batch, (1,) * batch, 1), slots, attend)
        return self._model.head(out[:, 0])

    def _kda(self, layer: KDA, place: int, x: Tensor, segment: Segment, slots: slice | Tensor) -> Tensor:
        if segment.width == 1 and self._kernel["kda_decode"]:
            return self._kda_decode(layer, place, x, slots)
        if segment.width > 1 and self._kernel["kda_prefill"]:
            return self._kda_prefill(layer, place, x, slots)
        return super()._kda(layer, place, x, segment, slots)

    def _kda_decode(self, layer: KDA, place: int, x: Tensor, slots: slice | Tensor) -> Tensor:
        streams, z, beta = _projections(layer, x)
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=x.device)
        weight = torch.cat([layer.q_conv1d.weight, layer.k_conv1d.weight, layer.v_conv1d.weight])[:, 0]
        gated = kda_decode.kda_decode(
            streams[:, 0],
            z[:, 0],
            beta[:, 0],
            layer.g_proj(x)[:, 0],
            self._conv[place],
            self._S[place],
            slots.to(torch.int32),
            conv_weight=weight,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            norm=layer.o_norm.weight,
            bound=layer.bound,
            eps=layer.o_norm.eps,
        )
        projected: Tensor = layer.o_proj(gated)
        return projected[:, None]

    def _kda_prefill(self, layer: KDA, place: int, x: Tensor, slots: slice | Tensor) -> Tensor:
        streams, z, beta = _projections(layer, x)
        weight = torch.cat([layer.q_conv1d.weight, layer.k_conv1d.weight, layer.v_conv1d.weight])[:, 0]
        mixed, conv = short_conv(streams, weight, self._conv[place, slots])
        batch, width = x.shape[:2]
        q, k, v = mixed.to(x.dtype).view(batch * width, 3, layer.heads, layer.head_dim).unbind(1)
        o, S = kda_prefill.kda_prefill(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            z.reshape(batch * width, layer.heads, layer.head_dim),
            beta.flatten(0, 1),
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            cu_seqlens=torch.arange(0, batch * width + 1, width, device=x.device),
            initial=self._S[place, slots].contiguous(),
            bound=layer.bound,
        )
        self._conv[place, slots] = conv.to(self._conv.dtype)
        self._S[place, slots] = S.to(self._S.dtype)
        return layer.output(x, o.view(batch, width, layer.heads, layer.head_dim))

    def _stream(self, embedding: Tensor) -> BlockStream:
        config = self._model.config
        kind = _KernelStream if self._kernel["attn_res"] else BlockStream
        return kind(embedding, self._queries, config.attn_res_block_size, config.rms_norm_eps, "direct")

    def _feed_forward(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        if not layer.is_moe or not self._kernel["moe"]:
            return super()._feed_forward(layer, x)
        mixture = layer.block_sparse_moe
        normed = layer.post_attention_layernorm(x).flatten(0, 1)
        index, weight, _ = moe.route(
            normed, mixture.gate.weight, mixture.gate.e_score_correction_bias, mixture.top_k, mixture.scaling
        )
        z = mixture.routed_expert_down_proj(normed)
        u = moe.experts(z, index, weight, _tensors(mixture), mixture.betas)
        y: Tensor = mixture.shared_experts(normed)
        y = y + mixture.routed_expert_up_proj(mixture.routed_expert_norm(u))
        return y.view_as(x)


class _KernelStream(BlockStream):
    """The residual stream whose mixes are one kernel each."""

    def read(self) -> Tensor:
        """See ``BlockStream.read``."""
        if not self.bank:
            return super().read()
        query = self._queries[self._reads]
        self._reads += 1
        rows = torch.stack([row.flatten(0, 1) for row in self.bank])
        mixed, _ = attn_res.attn_res_mix(rows, self.partial.flatten(0, 1), query, None, self._eps)
        return mixed.view_as(self.partial)


def _projections(layer: KDA, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels take, raw: [q, k, v] [B, T, 3 P], z [B, T, P], beta [B, T, H]."""
    weights = torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight])
    return functional.linear(x, weights), layer.f_b_proj(layer.f_a_proj(x)), layer.b_proj(x)


def _tensors(mixture: LatentMoE) -> moe.ExpertTensors:
    experts = mixture.experts
    if not isinstance(experts, PackedExperts):
        return moe.ExpertTensors(experts.w1, experts.w3, experts.w2)
    packed = [experts.get_buffer(f"{name}_packed") for name in ("w1", "w3", "w2")]
    scale = [experts.get_buffer(f"{name}_scale") for name in ("w1", "w3", "w2")]
    return moe.ExpertTensors(packed[0], packed[1], packed[2], scales=(scale[0], scale[1], scale[2]))

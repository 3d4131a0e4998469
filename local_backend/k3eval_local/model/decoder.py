"""The whole model: embedding, layers joined by Block Attention Residuals, final norm and head.

``K3Model.forward`` continues any number of sequences by any number of tokens from a ``ModelState``;
``step`` is the cached single-token form. All forms compute the same function. Parameter names are those
of the checkpoint without the prefix ``language_model.`` and with the routed experts stacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from k3eval_local.model.attn_res import AttnResForm, BlockStream
from k3eval_local.model.config import K3Config
from k3eval_local.model.kda import KDA, KDAForm
from k3eval_local.model.mla import MLA, MLAForm
from k3eval_local.model.moe import LatentMoE, RoutingObserver
from k3eval_local.model.norm import RMSNorm, wide
from k3eval_local.model.situ import SituMLP
from k3eval_local.model.state import KDAState, LayerState, MLAState, ModelState, Segment

Form = Literal["recurrent", "chunk"]


class DecoderLayer(nn.Module):
    """Attention and feed-forward network, each behind a norm, with the two queries that read their input."""

    def __init__(self, config: K3Config, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attention_res_norm = RMSNorm(d, eps, dtype)
        self.self_attention_res_proj = nn.Linear(d, 1, bias=False, dtype=dtype)
        self.mlp_res_norm = RMSNorm(d, eps, dtype)
        self.mlp_res_proj = nn.Linear(d, 1, bias=False, dtype=dtype)
        self.input_layernorm = RMSNorm(d, eps, dtype)
        self.post_attention_layernorm = RMSNorm(d, eps, dtype)
        self.self_attn: KDA | MLA = (KDA if config.layer_kinds[index] == "kda" else MLA)(config, dtype)
        self.is_moe = config.is_moe(index)
        if self.is_moe:
            self.block_sparse_moe = LatentMoE(config, dtype)
        else:
            betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
            self.mlp = SituMLP(d, config.intermediate_size, betas, dtype)

    def attention(
        self, x: Tensor, state: LayerState, segment: Segment, kda: KDAForm, mla: MLAForm
    ) -> tuple[Tensor, LayerState]:
        """The attention sublayer on the mixed input x [B, T, d]."""
        normed = self.input_layernorm(x)
        if isinstance(self.self_attn, KDA):
            return self.self_attn.forward(normed, cast(KDAState, state), segment, kda)
        return self.self_attn.forward(normed, cast(MLAState, state), segment, mla)

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The feed-forward sublayer on the mixed input x [B, T, d]; and router scores [B T, E], if any."""
        normed: Tensor = self.post_attention_layernorm(x)
        if not self.is_moe:
            return self.mlp.forward(normed), None
        y, scores = self.block_sparse_moe.forward(normed.flatten(0, 1))
        return y.view_as(x), scores

    def queries(self) -> tuple[Tensor, Tensor]:
        """The mix queries w * gamma [d] of attention and feed-forward network, in fp32."""
        return (
            mix_query(self.self_attention_res_norm, self.self_attention_res_proj),
            mix_query(self.mlp_res_norm, self.mlp_res_proj),
        )


class Backbone(nn.Module):
    """The checkpoint's ``model.``: embedding, layers, output mix and final norm."""

    def __init__(self, config: K3Config, dtype: torch.dtype) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        # a weight of its own: nn.Embedding's initialisation imports torch._dynamo on the meta device (1.3 s)
        weight = torch.empty(config.vocab_size, d, dtype=dtype)
        self.embed_tokens = nn.Embedding(config.vocab_size, d, _weight=weight)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, dtype) for index in range(config.num_hidden_layers)
        )
        self.output_attn_res_norm = RMSNorm(d, eps, dtype)
        self.output_attn_res_proj = nn.Linear(d, 1, bias=False, dtype=dtype)
        self.norm = RMSNorm(d, eps, dtype)


class K3Model(nn.Module):
    """Kimi K3 at any size.

    Args:
        config: sizes.
        dtype: of the matrices; norms, gates, router and KDA states are fp32 in any case (fp64 for fp64).
        device: ``"meta"`` builds the full K3 without memory.

    Weights are uninitialised until ``init_weights`` or a checkpoint fills them.
    """

    def __init__(
        self, config: K3Config, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):  # torch's own initialisation would be wasted time
            self.model = Backbone(config, dtype)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        if torch.device(device or "cpu").type != "meta":
            # to_empty would do, but it imports sympy (0.5 s) for each start of the server
            memory = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device or "cpu")
                for name, tensor in self.state_dict().items()
            }
            self.load_state_dict(memory, assign=True)

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """The decoder layers, typed."""
        return cast(Sequence[DecoderLayer], self.model.layers)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices."""
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    def init_weights(self, seed: int) -> K3Model:
        """Random weights, the same for the same seed and config at any dtype. Returns the model.

        Matrices: normal with variance 1 / inputs; embedding: standard normal. As in the report: A_log zero,
        dt_bias the inverse softplus of a step drawn log-uniformly from [0.001, 0.1] (Mamba-2), mix queries
        zero (a uniform average at the start), norm weights one, correction bias zero.

        Raises:
            ValueError: the experts are packed; draw a plain model and save it with ``mxfp4``.
        """
        if self.config.mxfp4:
            raise ValueError("packed experts cannot be drawn; draw a plain model and save it with mxfp4")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(_initial(name, parameter.shape, generator))
            for buffer in self.buffers():
                buffer.zero_()
        return self

    def empty_state(self, batch: int) -> ModelState:
        """The state before the first token."""
        return ModelState.empty(self.config, batch, self.dtype, self.device)

    def forward(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        form: Form = "chunk",
        mla: MLAForm = "expanded",
        attn_res: AttnResForm = "direct",
        last_only: bool = False,
        observer: RoutingObserver | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Continue B sequences by T tokens.

        Args:
            ids: [B, T] int64; rows with fewer tokens are padded on the right with any valid id.
            state: what came before; ``None`` for the start of the sequences.
            lengths: real tokens of each row, 0 to T; ``None`` means all T.
            form: KDA token by token or by chunks.
            mla: expanded keys and values, or attention in the latent.
            attn_res: every mix on its own, or the bank's share of a block at once.
            last_only: logits of each row's last real token only.
            observer: is shown the router's scores of the real tokens (training).

        Returns:
            logits [B, T, V] ([B, 1, V] with ``last_only``); those at padded positions mean nothing. And the
            state after each row's last real token.

        Raises:
            ValueError: shapes or lengths that do not fit each other or the state.
        """
        out, state = self.hidden(
            ids, state, lengths=lengths, form=form, mla=mla, attn_res=attn_res, observer=observer
        )
        if last_only:
            out = out[:, -1:] if lengths is None else self._last(out, lengths)
        return self.head(out), state

    def step(self, ids: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """One cached token for each sequence: ids [B] -> (logits [B, V], new state)."""
        if ids.dim() != 1:
            raise ValueError(f"step takes ids of shape [B], not {tuple(ids.shape)}")
        out, state = self._run(ids[:, None], state, None, "step", "absorbed", "direct", None)
        return self.head(out[:, 0]), state

    def hidden(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        form: Form = "chunk",
        mla: MLAForm = "expanded",
        attn_res: AttnResForm = "direct",
        observer: RoutingObserver | None = None,
    ) -> tuple[Tensor, ModelState]:
        """``forward`` without norm and head: [B, T, d], the vector that a draft head would read too."""
        if ids.dim() != 2:
            raise ValueError(f"ids must have shape [B, T], not {tuple(ids.shape)}")
        return self._run(ids, state, lengths, form, mla, attn_res, observer)

    def all_logits(self, ids: Tensor, segment: int = 4096) -> Tensor:
        """Logits [B, T, V] of a whole sequence at bounded memory: by segments with state hand-over."""
        state, parts = self.empty_state(ids.shape[0]), []
        for piece in ids.split(segment, dim=1):  # type: ignore[no-untyped-call]  # torch has no types for it
            logits, state = self.forward(piece, state)
            parts.append(logits)
        return torch.cat(parts, dim=1)

    def head(self, out: Tensor) -> Tensor:
        """Final RMSNorm and the untied head: [..., d] -> logits [..., V], no soft cap."""
        logits: Tensor = self.lm_head(self.model.norm(out))
        return logits

    def queries(self) -> Tensor:
        """All mix queries in the order of use, [2 L + 1, d] fp32."""
        pairs = [query for layer in self.layers for query in layer.queries()]
        return torch.stack(
            [*pairs, mix_query(self.model.output_attn_res_norm, self.model.output_attn_res_proj)]
        )

    def _run(
        self,
        ids: Tensor,
        state: ModelState | None,
        lengths: Sequence[int] | Tensor | None,
        kda: KDAForm,
        mla: MLAForm,
        attn_res: AttnResForm,
        observer: RoutingObserver | None,
    ) -> tuple[Tensor, ModelState]:
        batch, width = ids.shape
        state = self.empty_state(batch) if state is None else state
        segment = _segment(self.config, state, batch, width, lengths)
        config = self.config
        stream = BlockStream(
            self.model.embed_tokens(ids),
            self.queries(),
            config.attn_res_block_size,
            config.rms_norm_eps,
            attn_res,
        )
        states: list[LayerState] = []
        for index, (layer, before) in enumerate(zip(self.layers, state.layers, strict=True)):
            output, after = layer.attention(stream.read(), before, segment, kda, mla)
            states.append(after)
            stream.write_attention(output)
            output, scores = layer.feed_forward(stream.read())
            stream.write_ffn(output)
            if observer is not None and scores is not None:
                real = scores.detach()[segment.valid(ids.device).flatten()]
                observer.observe(index, real, layer.block_sparse_moe.gate.e_score_correction_bias)
        seen = tuple(past + new for past, new in zip(segment.past, segment.new, strict=True))
        return stream.read(), ModelState(tuple(states), seen)

    @staticmethod
    def _last(out: Tensor, lengths: Sequence[int] | Tensor) -> Tensor:
        rows = torch.as_tensor(lengths, device=out.device) - 1
        if int(rows.min()) < 0:
            raise ValueError("last_only needs at least one real token in every row")
        return out.gather(1, rows[:, None, None].expand(-1, 1, out.shape[-1]))


def mix_query(norm: RMSNorm, proj: nn.Linear) -> Tensor:
    """W * gamma [d] in fp32: norm weight and pseudo-query only ever act as their product."""
    kept = wide(norm.weight.dtype)
    return norm.weight.to(kept) * proj.weight[0].to(kept)


def _segment(
    config: K3Config, state: ModelState, batch: int, width: int, lengths: Sequence[int] | Tensor | None
) -> Segment:
    kinds = tuple("kda" if isinstance(layer, KDAState) else "mla" for layer in state.layers)
    if kinds != config.layer_kinds:
        raise ValueError("the state belongs to another model: its layers are of other kinds")
    if state.batch != batch:
        raise ValueError(f"ids hold {batch} sequences but the state holds {state.batch}")
    if lengths is None:
        return Segment(state.lengths, (width,) * batch, width)
    new = tuple(int(length) for length in lengths)
    if len(new) != batch or not all(0 <= length <= width for length in new):
        raise ValueError(f"lengths must be {batch} numbers from 0 to {width}, not {new}")
    return Segment(state.lengths, new, width)


def _initial(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    kind = name.rsplit(".", 1)[-1]
    if kind == "A_log" or name.endswith("_res_proj.weight"):
        return torch.zeros(shape)
    if kind == "dt_bias":
        low, high = math.log(1e-3), math.log(0.1)
        dt = (low + (high - low) * torch.rand(shape, generator=generator)).exp()
        return dt + (-torch.expm1(-dt)).log()
    if len(shape) == 1:
        return torch.ones(shape)
    deviation = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
    return torch.randn(shape, generator=generator) * deviation

"""The native step over a ``K3Model``'s weights: packing, the ctypes view of step.c, and a session of one
sequence.

``NativeStep.forward`` runs new tokens of several sequences at once on caller-owned state (the engine's
pages and slots); ``NativeSession`` keeps the state of one sequence itself. Results equal ``K3Model`` to
rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k3eval_local.kernels.native.build import NativeLibrary, NativeUnavailable, load
from k3eval_local.kernels.native.pack import Mat, WeightType, pack
from k3eval_local.model import K3Model
from k3eval_local.model.config import K3Config
from k3eval_local.model.decoder import mix_query
from k3eval_local.model.kda import KDA
from k3eval_local.model.mla import MLA
from k3eval_local.model.moe import LatentMoE

_LANES = 16
"""Every vector loop runs over whole vectors of this many floats."""

IntArray = NDArray[np.int32]


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Config(ctypes.Structure):
    _fields_ = (
        *_fields(
            ctypes.c_int32,
            "d layers vocab block heads K rank unbounded_gate mla_heads q_lora r nope slot vdim experts topk "
            "latent width shared dense_width renormalize page threads max_rows",
        ),
        ("page_stride", ctypes.c_int64),
        *_fields(ctypes.c_float, "eps latent_eps g_min beta_gate beta_up routed_scale"),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int32, "kind dense"),
        *_fields(ctypes.c_void_p, "norm_in norm_post res_attn res_mlp"),
        *_fields(Mat, "inputs out f_b"),
        *_fields(ctypes.c_void_p, "conv decay dt head_norm q_norm kv_norm"),
        ("q_b", Mat),
        *_fields(ctypes.c_void_p, "uk uv"),
        *_fields(Mat, "up down router"),
        *_fields(ctypes.c_void_p, "bias latent_norm w13 w2 pages"),
    )


class _Seq(ctypes.Structure):
    _fields_ = (
        ("pos", ctypes.c_int64),
        ("state", ctypes.c_void_p),
        ("taps", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
    )


class SequenceView:
    """The state of one sequence where it lies: made once, used for many calls.

    Args:
        layers: layers of the model. kda: for each KDA layer its number, its state [H, K, K] and its taps
            [3, 3 P] (oldest first), fp32 and contiguous; owned by the caller and updated in place.
    """

    def __init__(self, layers: int, kda: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        self._tensors = tuple(kda)
        self._state, self._taps = (ctypes.c_void_p * layers)(), (ctypes.c_void_p * layers)()
        for layer, state, taps in kda:
            for tensor in (state, taps):
                if tensor.dtype != torch.float32 or not tensor.is_contiguous():
                    raise ValueError("KDA states and taps must be contiguous fp32 tensors")
            self._state[layer], self._taps[layer] = state.data_ptr(), taps.data_ptr()
        self._table: NDArray[np.int32] | None = None
        self._c = _Seq(0, ctypes.addressof(self._state), ctypes.addressof(self._taps), None)
        self.address = ctypes.addressof(self._c)

    @property
    def position(self) -> int:
        """Tokens in the cache; a call moves it on."""
        return int(self._c.pos)

    @position.setter
    def position(self, tokens: int) -> None:
        self._c.pos = tokens

    def set_table(self, table: NDArray[np.int32] | None) -> None:
        """The page numbers of the sequence; ``None`` when its cache is one run of rows."""
        self._table = None if table is None else np.ascontiguousarray(table, dtype=np.int32)
        self._c.table = None if self._table is None else self._table.ctypes.data


class NativeStep:
    """Packed weights of one model and the library that runs them.

    Args:
        model: fp32, bf16 or MXFP4 experts; the weights are copied into the packed form.
        weights: of the matrices; the router, norms and gates stay fp32. int8 has one scale an output.
        threads: worker threads of a step. max_rows: most new tokens of one call.
        library: a loaded library; ``build.load()`` by default.

    Raises:
        NativeUnavailable: no library can be had here, or the model has a size that it does not do.
    """

    def __init__(
        self,
        model: K3Model,
        *,
        weights: WeightType = "fp32",
        threads: int = 1,
        max_rows: int = 256,
        library: NativeLibrary | None = None,
    ) -> None:
        config = model.config
        _check(config)
        self.config, self.weights, self.threads, self.max_rows = config, weights, threads, max_rows
        self.library = library or load()
        self._keep: list[object] = []  # arrays that C points into
        self._bytes = self._expert_bytes = 0
        self.kda_layers = [i for i, kind in enumerate(config.layer_kinds) if kind == "kda"]
        self.mla_layers = [i for i, kind in enumerate(config.layer_kinds) if kind == "mla"]
        lib = self.library.handle
        lib.k3_new.restype = ctypes.c_void_p
        self._forward = lib.k3_forward
        self._forward.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 5]
        with torch.no_grad():
            layers = (_Layer * config.num_hidden_layers)(
                *(self._layer(model, i) for i in range(config.num_hidden_layers))
            )
            backbone = model.model
            out = mix_query(backbone.output_attn_res_norm, backbone.output_attn_res_proj)
            handle = lib.k3_new(
                ctypes.byref(self._config()),
                layers,
                self._vector(backbone.embed_tokens.weight),
                self._vector(backbone.norm.weight),
                self._vector(out),
                ctypes.byref(self._mat([model.lm_head.weight])),
            )
        if not handle:
            raise NativeUnavailable("no memory for the native step's buffers")
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p(handle)

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights and vectors (embedding included)."""
        return self._bytes

    @property
    def active_bytes(self) -> int:
        """Bytes of weights that one token reads: not the embedding, nor the experts it does not use."""
        config = self.config
        embedding = 4 * config.vocab_size * config.hidden_size
        unused = 1 - config.num_experts_per_token / config.num_experts
        return self._bytes - embedding - round(unused * self._expert_bytes)

    def close(self) -> None:
        """Free the buffers; the step cannot be used afterwards."""
        if self._handle is not None:
            self.library.handle.k3_free(self._handle)
            self._handle = None

    def set_pages(self, pages: Sequence[Tensor], *, page_tokens: int, page_stride: int) -> None:
        """Where the latent cache lies: for each MLA layer its first page; ``page_stride`` floats to the
        next.
        """
        for layer, tensor in zip(self.mla_layers, pages, strict=True):
            self.library.handle.k3_set_pages(
                self._live,
                layer,
                ctypes.c_void_p(tensor.data_ptr()),
                page_tokens,
                ctypes.c_int64(page_stride),
            )

    def forward(
        self, views: Sequence[SequenceView], counts: IntArray, ids: IntArray, want: NDArray[np.uint8]
    ) -> Tensor:
        """Run new tokens of several sequences; the caches must have room for them.

        counts: new tokens of each sequence. ids: all of them, sequence after sequence. want: one flag a
            token: whether its logits are returned. Contiguous, int32 and uint8. Returns [wanted, V] fp32,
            and moves the positions on.
        """
        total = len(ids)
        if (
            total > self.max_rows
            or len(want) != total
            or int(counts.sum()) != total
            or len(views) != len(counts)
        ):
            raise ValueError(
                f"{total} tokens, {len(want)} flags, {len(counts)} counts; at most {self.max_rows} tokens"
            )
        if total and not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise ValueError(f"a token id is outside 0..{self.config.vocab_size - 1}")
        # not torch.empty, which lets go of the interpreter: the thread that then runs keeps this one waiting
        logits = np.empty((int(np.count_nonzero(want)), self.config.vocab_size), dtype=np.float32)
        pointers = (ctypes.c_void_p * len(views))(*[view.address for view in views])
        code = self._forward(
            self._live,
            len(views),
            pointers,
            counts.ctypes.data,
            ids.ctypes.data,
            want.ctypes.data,
            logits.ctypes.data,
        )
        if code:
            raise RuntimeError("the native step refused its input")
        return torch.from_numpy(logits)

    @property
    def _live(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise RuntimeError("the native step was closed")
        return self._handle

    # Packing --------------------------------------------------------------------------------------------

    def _vector(self, tensor: Tensor) -> ctypes.c_void_p:
        array = np.ascontiguousarray(tensor.detach().to(torch.float32).numpy(force=True)).copy()
        self._keep.append(array)
        self._bytes += array.nbytes
        return _pointer(array)

    def _mat(self, parts: Sequence[Tensor], weights: WeightType | None = None) -> Mat:
        packed = pack(parts, weights or self.weights, self.library.isa)
        self._keep.append(packed)
        self._bytes += packed.nbytes
        return packed.mat

    def _mats(self, matrices: Sequence[Sequence[Tensor]]) -> ctypes.c_void_p:
        array = (Mat * len(matrices))(*(self._mat(parts) for parts in matrices))
        self._keep.append(array)
        return ctypes.c_void_p(ctypes.addressof(array))

    def _config(self) -> _Config:
        c, linear = self.config, self.config.linear_attn
        bound = linear.gate_lower_bound
        moe = any(c.is_moe(index) for index in range(c.num_hidden_layers))
        return _Config(
            d=c.hidden_size,
            layers=c.num_hidden_layers,
            vocab=c.vocab_size,
            block=c.attn_res_block_size,
            heads=linear.num_heads,
            K=linear.head_dim,
            rank=linear.head_dim,
            unbounded_gate=int(bound is None),
            mla_heads=c.num_attention_heads,
            q_lora=c.q_lora_rank,
            r=c.kv_lora_rank,
            nope=c.qk_nope_head_dim,
            slot=c.qk_rope_head_dim,
            vdim=c.v_head_dim,
            experts=c.num_experts if moe else 0,
            topk=c.num_experts_per_token,
            latent=c.routed_expert_hidden_size,
            width=c.moe_intermediate_size,
            shared=c.num_shared_experts * c.moe_intermediate_size,
            dense_width=c.intermediate_size,
            renormalize=1,
            page=0,
            threads=self.threads,
            max_rows=self.max_rows,
            page_stride=0,
            eps=c.rms_norm_eps,
            latent_eps=c.rms_norm_eps,
            g_min=bound or 0.0,
            beta_gate=c.activation_situ_beta,
            beta_up=c.activation_situ_linear_beta,
            routed_scale=c.routed_scaling_factor,
        )

    def _layer(self, model: K3Model, index: int) -> _Layer:
        source = model.layers[index]
        attention_query, mlp_query = source.queries()
        layer = _Layer(
            dense=int(not source.is_moe),
            norm_in=self._vector(source.input_layernorm.weight),
            norm_post=self._vector(source.post_attention_layernorm.weight),
            res_attn=self._vector(attention_query),
            res_mlp=self._vector(mlp_query),
        )
        attention = source.self_attn
        if isinstance(attention, KDA):
            self._kda(layer, attention)
        else:
            self._mla(layer, attention)
        if source.is_moe:
            self._moe(layer, source.block_sparse_moe)
        else:
            layer.up = self._mat([source.mlp.gate_proj.weight, source.mlp.up_proj.weight])
            layer.down = self._mat([source.mlp.down_proj.weight])
        return layer

    def _kda(self, layer: _Layer, kda: KDA) -> None:
        layer.kind = 0
        layer.inputs = self._mat(
            [m.weight for m in (kda.q_proj, kda.k_proj, kda.v_proj, kda.g_proj, kda.f_a_proj, kda.b_proj)]
        )
        layer.f_b, layer.out = self._mat([kda.f_b_proj.weight]), self._mat([kda.o_proj.weight])
        conv = torch.cat([kda.q_conv1d.weight, kda.k_conv1d.weight, kda.v_conv1d.weight])[:, 0]
        layer.conv, layer.decay = self._vector(conv.T.contiguous()), self._vector(kda.A_log.exp())
        layer.dt, layer.head_norm = self._vector(kda.dt_bias), self._vector(kda.o_norm.weight)

    def _mla(self, layer: _Layer, mla: MLA) -> None:
        layer.kind = 1
        layer.inputs = self._mat([m.weight for m in (mla.q_a_proj, mla.kv_a_proj_with_mqa, mla.g_proj)])
        layer.out, layer.q_b = self._mat([mla.o_proj.weight]), self._mat([mla.q_b_proj.weight])
        layer.q_norm, layer.kv_norm = (
            self._vector(mla.q_a_layernorm.weight),
            self._vector(mla.kv_a_layernorm.weight),
        )
        w_uk, w_uv = mla.expansion()
        layer.uk, layer.uv = self._mats([[w.T] for w in w_uk]), self._mats([[w] for w in w_uv])

    def _moe(self, layer: _Layer, moe: LatentMoE) -> None:
        shared = moe.shared_experts
        layer.router = self._mat([moe.gate.weight], "fp32")
        layer.bias = self._vector(moe.gate.e_score_correction_bias)
        layer.latent_norm = self._vector(moe.routed_expert_norm.weight)
        layer.up = self._mat(
            [moe.routed_expert_down_proj.weight, shared.gate_proj.weight, shared.up_proj.weight]
        )
        layer.down = self._mat(
            [torch.cat([moe.routed_expert_up_proj.weight, shared.down_proj.weight], dim=1)]
        )
        before = self._bytes
        experts = [moe.experts.one(expert) for expert in range(self.config.num_experts)]
        layer.w13 = self._mats([[w1, w3] for w1, w3, _ in experts])
        layer.w2 = self._mats([[w2] for _, _, w2 in experts])
        self._expert_bytes += self._bytes - before


class NativeSession:
    """One sequence with its own state: for tests, benchmarks and whole-file logits."""

    def __init__(self, step: NativeStep, capacity: int = 1024) -> None:
        config, linear = step.config, step.config.linear_attn
        self._step, self._capacity = step, max(1, capacity)
        states = [
            (
                layer,
                torch.zeros(linear.num_heads, linear.head_dim, linear.head_dim),
                torch.zeros(3, 3 * config.kda_width),
            )
            for layer in step.kda_layers
        ]
        self._view = SequenceView(config.num_hidden_layers, states)
        self._latent = [torch.empty(self._capacity, config.latent_cache_width) for _ in step.mla_layers]

    @property
    def position(self) -> int:
        """Tokens seen."""
        return self._view.position

    def run(self, ids: Sequence[int] | IntArray, *, every: bool = False) -> Tensor:
        """Append tokens; the logits of the last one [1, V], or of each [T, V] with ``every``."""
        tokens = np.asarray(ids, dtype=np.int32)
        if not len(tokens):
            raise ValueError("at least one token is needed")
        self._reserve(self.position + len(tokens))
        self._step.set_pages(self._latent, page_tokens=self._capacity, page_stride=0)
        parts = []
        for start in range(0, len(tokens), self._step.max_rows):
            part = tokens[start : start + self._step.max_rows]
            want = np.full(len(part), int(every), dtype=np.uint8)
            want[-1] |= start + len(part) == len(tokens)
            parts.append(self._step.forward([self._view], np.array([len(part)], dtype=np.int32), part, want))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def fill(self, tokens: int, seed: int = 0) -> None:
        """Pretend that ``tokens`` tokens were seen: noise in the caches (for timing at a context
        length).
        """
        self._reserve(tokens + 1)
        generator = torch.Generator().manual_seed(seed)
        for latent in self._latent:
            latent[:tokens].normal_(generator=generator)
        self._view.position = tokens

    def rewind(self, tokens: int) -> None:
        """Set the position back: the latent cache is read up to there; KDA states stay as they are."""
        if not 0 <= tokens <= self.position:
            raise ValueError(f"the position is {self.position}, so it cannot be set back to {tokens}")
        self._view.position = tokens

    def _reserve(self, tokens: int) -> None:
        if tokens <= self._capacity:
            return
        self._capacity = max(tokens, 2 * self._capacity)
        grown = [torch.empty(self._capacity, latent.shape[1]) for latent in self._latent]
        for new, old in zip(grown, self._latent, strict=True):
            new[: self.position] = old[: self.position]
        self._latent = grown


def _pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _check(config: K3Config) -> None:
    linear = config.linear_attn
    if linear.short_conv_kernel_size != 4:
        raise NativeUnavailable(
            f"short_conv_kernel_size is {linear.short_conv_kernel_size}; the native step does 4"
        )
    sizes = {
        "hidden_size": config.hidden_size,
        "linear_attn_config.head_dim": linear.head_dim,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "intermediate_size": config.intermediate_size,
        "routed_expert_hidden_size": config.routed_expert_hidden_size,
        "moe_intermediate_size": config.moe_intermediate_size,
    }
    for name, size in sizes.items():
        if size % _LANES:
            raise NativeUnavailable(f"{name} is {size}; the native step needs a multiple of {_LANES}")

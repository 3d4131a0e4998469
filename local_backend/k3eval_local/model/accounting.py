"""Parameters, cache, state and decode traffic of a model, from its configuration alone. Needs no torch.

Counts are text-only and exact. Bytes are per sequence unless stated. A hybrid model keeps a fixed state in
its KDA layers and a growing cache in its MLA layers; its all-MLA twin keeps a cache in every layer.
Formulas: K3 report sections 2.1-2.3 for the shapes; the byte model counts what a step must read or write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from k3eval_local.model.config import K3Config

StoredType = Literal["fp32", "bf16", "fp8"]
BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp8": 1}
MXFP4_BITS = 4.25
"""Four bits a value and one scale byte for 32 of them."""


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part. ``active`` is what one token uses; the embedding lookup is not counted in it."""

    embedding: int
    head: int
    kda: int
    mla: int
    dense_ffn: int
    routed_experts: int
    active_experts: int
    """The part of ``routed_experts`` that one token uses."""
    shared_experts: int
    latent: int
    """Down and up projection around the routed experts, and the norm between."""
    router: int
    norms: int
    """Layer norms, the two queries of each layer and its norms, final norm and output query."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.routed_experts + self.always_active

    @property
    def active(self) -> int:
        """Parameters that take part in one token: head yes, embedding table no."""
        return self.active_experts + self.always_active

    @property
    def always_active(self) -> int:
        """Parameters that every token reads: all but the embedding table and the routed experts."""
        return (
            self.head
            + self.kda
            + self.mla
            + self.dense_ffn
            + self.shared_experts
            + self.latent
            + self.router
            + self.norms
        )


def count_parameters(config: K3Config) -> ParameterCount:
    """Count every tensor of the checkpoint (``A_log`` without padding, correction biases included)."""
    d, P, linear = config.hidden_size, config.kda_width, config.linear_attn
    H, rank = config.num_attention_heads, config.kv_lora_rank
    latent, f = config.routed_expert_hidden_size, config.moe_intermediate_size
    kda = (
        3 * d * P
        + 3 * P * linear.short_conv_kernel_size
        + d * linear.head_dim
        + linear.head_dim * P
        + d * linear.num_heads
        + 2 * d * P
        + linear.num_heads
        + P
        + linear.head_dim
    )
    mla = (
        d * config.q_lora_rank
        + config.q_lora_rank
        + config.q_lora_rank * H * config.qk_head_dim
        + d * config.latent_cache_width
        + rank
        + rank * H * (config.qk_nope_head_dim + config.v_head_dim)
        + 2 * d * H * config.v_head_dim
    )
    layers, kinds = config.num_hidden_layers, config.layer_kinds
    moe = layers - config.first_k_dense_replace
    expert = 3 * latent * f
    return ParameterCount(
        embedding=config.vocab_size * d,
        head=config.vocab_size * d,
        kda=kinds.count("kda") * kda,
        mla=kinds.count("mla") * mla,
        dense_ffn=config.first_k_dense_replace * 3 * d * config.intermediate_size,
        routed_experts=moe * config.num_experts * expert,
        active_experts=moe * config.num_experts_per_token * expert,
        shared_experts=moe * 3 * d * config.num_shared_experts * f,
        latent=moe * (2 * d * latent + latent),
        router=moe * (d * config.num_experts + config.num_experts),
        norms=layers * 6 * d + 3 * d,
    )


@dataclass(frozen=True)
class SequenceBytes:
    """Memory of one sequence at one context length."""

    context: int
    mla_cache: int
    kda_state: int
    conv_state: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.mla_cache + self.kda_state + self.conv_state


def cache_bytes_per_token(config: K3Config, cache: StoredType = "bf16") -> int:
    """Growth of all MLA caches by one token."""
    return config.layer_kinds.count("mla") * config.latent_cache_width * BYTES[cache]


def sequence_bytes(
    config: K3Config, context: int, cache: StoredType = "bf16", state: StoredType = "fp32"
) -> SequenceBytes:
    """Cache and state after ``context`` tokens. The conv state (the last projections) is bf16."""
    linear, layers = config.linear_attn, config.layer_kinds.count("kda")
    matrix = linear.num_heads * linear.head_dim * linear.head_dim
    taps = linear.short_conv_kernel_size - 1
    return SequenceBytes(
        context=context,
        mla_cache=context * cache_bytes_per_token(config, cache),
        kda_state=layers * matrix * BYTES[state],
        conv_state=layers * taps * 3 * config.kda_width * BYTES["bf16"],
    )


def break_even(config: K3Config, cache: StoredType = "bf16", state: StoredType = "fp32") -> int | None:
    """Context, to the nearest token, from which the model stores less than its all-MLA twin.

    ``None`` when it has no KDA layer and so is its own twin.
    """
    saved = cache_bytes_per_token(config.mla_twin(), cache) - cache_bytes_per_token(config, cache)
    return round(sequence_bytes(config, 0, cache, state).total / saved) if saved else None


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes moved for each decoded token, at one context and batch."""

    cache: int
    """MLA cache read."""
    state: int
    """KDA and conv state, read and written."""
    weights: float
    """Weights of one step, shared by the batch: an expectation over uniform routing."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.cache + self.state + self.weights


def decode_bytes(
    config: K3Config,
    context: int,
    batch: int = 1,
    cache: StoredType = "fp8",
    state: StoredType = "fp32",
    expert_bits: float = MXFP4_BITS,
) -> DecodeBytes:
    """Traffic of one decoded token when ``batch`` sequences of ``context`` tokens decode together.

    A step reads all always-active weights in bf16 and each expert that some token chose: on average
    ``E (1 - (1 - k / E)^batch)`` of E experts a layer. The step's bytes are divided by the batch.
    """
    count = count_parameters(config)
    memory = sequence_bytes(config, context, cache, state)
    missed = (1 - config.num_experts_per_token / config.num_experts) ** batch
    weights = count.always_active * BYTES["bf16"] + count.routed_experts * (1 - missed) * expert_bits / 8
    return DecodeBytes(memory.mla_cache, 2 * (memory.kda_state + memory.conv_state), weights / batch)


@dataclass(frozen=True)
class ContextReport:
    """One model and its all-MLA twin at one context, bytes."""

    context: int
    memory: int
    twin_memory: int
    decode: int
    """Bytes moved per decoded token at batch 1."""
    twin_decode: int


@dataclass(frozen=True)
class ModelReport:
    """What ``k3eval model info`` says about a configuration."""

    parameters_total: int
    parameters_active: int
    layers: int
    kda_layers: int
    mla_layers: int
    cache_type: StoredType
    state_type: StoredType
    cache_bytes_per_token: int
    twin_cache_bytes_per_token: int
    state_bytes: int
    """KDA and conv state of one sequence, at any context."""
    break_even_tokens: int | None
    contexts: tuple[ContextReport, ...]


def report(
    config: K3Config, contexts: Sequence[int], cache: StoredType = "bf16", state: StoredType = "fp32"
) -> ModelReport:
    """Everything above for one configuration against its twin. Experts are counted as they are stored."""
    count, twin = count_parameters(config), config.mla_twin()
    bits = MXFP4_BITS if config.mxfp4 else 16
    kinds = config.layer_kinds
    return ModelReport(
        parameters_total=count.total,
        parameters_active=count.active,
        layers=len(kinds),
        kda_layers=kinds.count("kda"),
        mla_layers=kinds.count("mla"),
        cache_type=cache,
        state_type=state,
        cache_bytes_per_token=cache_bytes_per_token(config, cache),
        twin_cache_bytes_per_token=cache_bytes_per_token(twin, cache),
        state_bytes=sequence_bytes(config, 0, cache, state).total,
        break_even_tokens=break_even(config, cache, state),
        contexts=tuple(
            ContextReport(
                context=context,
                memory=sequence_bytes(config, context, cache, state).total,
                twin_memory=sequence_bytes(twin, context, cache, state).total,
                decode=round(decode_bytes(config, context, 1, cache, state, bits).total),
                twin_decode=round(decode_bytes(twin, context, 1, cache, state, bits).total),
            )
            for context in contexts
        ),
    )

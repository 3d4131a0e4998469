"""Sizes of a Kimi K3 model, in the shape of the published ``config.json``.

``K3Config.from_dict`` and ``to_dict`` read and write that shape: ``model_type: kimi_k3`` around a
``text_config`` whose layer lists are 1-based. Everything is checked on construction and every error
names the field. Values of which this model has only one (``hidden_act: situ`` ...) are written out
and must agree when they are read. Source of the sizes: K3 report, table "K2 vs K3" and sections 2.1-2.3.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, islice
from pathlib import Path
from typing import Literal

from k3eval_local.errors import ModelConfigError

LayerKind = Literal["kda", "mla"]
MXFP4_GROUP = 32
CONTROL_IDS = 256
"""The last 256 ids of every vocabulary are control tokens: offset 0 BOS, 2 end of message, 255 PAD."""

_log = logging.getLogger(__name__)

_FIXED_TEXT: Mapping[str, object] = {
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
}
_IGNORED_TEXT = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "dtype",
        "head_dim",
        "initializer_range",
        "pad_token_id",
        "rope_scaling",
        "rope_theta",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Fields of other engines that change nothing here."""
_QUANTIZATION: Mapping[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": MXFP4_GROUP,
                "scale_dtype": "torch.uint8",
                "symmetric": True,
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*mlp.*",
        "re:.*shared_experts.*",
        "re:.*gate$",
        "re:.*routed_expert_(down|up)_proj",
        "re:.*_res_proj",
    ],
}


@dataclass(frozen=True)
class LinearAttnConfig:
    """``linear_attn_config``: the KDA heads and which layers are which (1-based lists)."""

    num_heads: int
    head_dim: int
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = -5.0
    """Kimi K3's bounded decay gate; ``None`` selects Kimi Linear's unbounded one."""


@dataclass(frozen=True)
class K3Config:
    """Every size of one model. Field names are those of the published ``text_config``."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the slot that other MLA models rotate. Here it exists and is never rotated."""
    v_head_dim: int
    routed_expert_hidden_size: int
    """Latent width of the routed experts."""
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    attn_res_block_size: int
    linear_attn: LinearAttnConfig
    num_shared_experts: int = 2
    first_k_dense_replace: int = 1
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1_048_576
    mxfp4: bool = False
    """Routed experts are stored as MXFP4 (``quantization_config`` in the file)."""

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> K3Config:
        """Read the published shape.

        Raises:
            ModelConfigError: a field is missing, of the wrong type or has a value this model cannot have.
        """
        if data.get("model_type") != "kimi_k3":
            raise ModelConfigError(
                f"config.json: model_type is {data.get('model_type')!r}; only 'kimi_k3' can be loaded"
            )
        text = _mapping(data, "text_config")
        for name, value in _FIXED_TEXT.items():
            if name in text and text[name] != value:
                raise ModelConfigError(
                    f"config.json: text_config.{name} is {text[name]!r}; this model only has {value!r}"
                )
        linear = _mapping(text, "linear_attn_config")
        if linear.get("use_full_rank_gate", True) is not True:
            raise ModelConfigError(
                "config.json: linear_attn_config.use_full_rank_gate must be true, as in Kimi K3"
            )
        heads = _integer(text, "num_attention_heads")
        kv_heads = _integer(text, "num_key_value_heads") if "num_key_value_heads" in text else heads
        if kv_heads < 1 or heads % kv_heads:
            raise ModelConfigError(
                f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
            )
        if kv_heads != heads:
            raise ModelConfigError(
                f"config.json: num_key_value_heads {kv_heads} must equal num_attention_heads {heads}: "
                "the latent cache is shared by all heads, keys are not grouped"
            )
        values: dict[str, object] = {}
        for field in fields(cls):
            if field.name in {"linear_attn", "mxfp4"}:
                continue
            if field.name in text:
                number = _number if field.type == "float" else _integer
                values[field.name] = number(text, field.name)
            elif field.name in _REQUIRED:
                raise ModelConfigError(f"config.json: text_config.{field.name} is missing")
        _warn_unknown(text)
        bound = linear.get("gate_lower_bound", -5.0)
        kernel = _integer(linear, "short_conv_kernel_size") if "short_conv_kernel_size" in linear else 4
        return cls(
            **values,  # type: ignore[arg-type]  # built from the fields' own names and types just above
            mxfp4=_is_mxfp4(text.get("quantization_config", data.get("quantization_config"))),
            linear_attn=LinearAttnConfig(
                num_heads=_integer(linear, "num_heads"),
                head_dim=_integer(linear, "head_dim"),
                kda_layers=_layers(linear, "kda_layers"),
                full_attn_layers=_layers(linear, "full_attn_layers"),
                short_conv_kernel_size=kernel,
                gate_lower_bound=None if bound is None else _number(linear, "gate_lower_bound", -5.0),
            ),
        )

    def to_dict(self) -> dict[str, object]:
        """The published shape; ``from_dict`` gives the same configuration back."""
        linear = self.linear_attn
        text: dict[str, object] = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in {"linear_attn", "mxfp4"}
        }
        text |= _FIXED_TEXT
        text |= {
            "architectures": ["KimiK3ForCausalLM"],
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": linear.head_dim,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "linear_attn_config": {
                "num_heads": linear.num_heads,
                "head_dim": linear.head_dim,
                "short_conv_kernel_size": linear.short_conv_kernel_size,
                "use_full_rank_gate": True,
                "gate_lower_bound": linear.gate_lower_bound,
                "kda_layers": list(linear.kda_layers),
                "full_attn_layers": list(linear.full_attn_layers),
            },
        }
        if self.mxfp4:
            text["quantization_config"] = json.loads(json.dumps(_QUANTIZATION))
        return {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "tie_word_embeddings": False,
            "text_config": text,
        }

    @classmethod
    def read(cls, path: Path) -> K3Config:
        """Read a ``config.json``. Errors name the file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelConfigError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ModelConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ModelConfigError(f"{path} must hold a JSON object")
        return cls.from_dict(data)

    @classmethod
    def scaled(cls, name: str) -> K3Config:
        """A scaled-down K3: ``a`` (1.2M), ``b`` (9M), ``c`` (65M), ``d`` (1.04B parameters).

        ``c56`` and ``d56`` are C and D at K3's own sparsity: 112 experts, 2 of them a token.
        A suffix ``-mla`` gives the all-MLA twin.
        """
        key = name.lower()
        if key.endswith("-mla"):
            return cls.scaled(key.removesuffix("-mla")).mla_twin()
        if key.endswith("56") and key[:-2] in _SPARSE_WIDTH:
            return replace(
                cls.scaled(key[:-2]),
                num_experts=112,
                num_experts_per_token=2,
                moe_intermediate_size=_SPARSE_WIDTH[key[:-2]],
            )
        if key not in _SCALED:
            raise ModelConfigError(
                f"no scaled config is called {name!r}; there are {', '.join(SCALED_NAMES)}"
            )
        return _SCALED[key]

    @classmethod
    def full(cls) -> K3Config:
        """The released Kimi K3, 2.78T parameters: for counting, and for the meta device."""
        return _family(
            hidden=7168,
            layers=93,
            heads=96,
            head_dim=128,
            lora=(1536, 512),
            head=(128, 64, 128),
            expert=(3584, 3072, 896, 16),
            dense=33792,
            block=12,
            vocab=163840,
            mxfp4=True,
        )

    def mla_twin(self) -> K3Config:
        """The same depth and width with every layer MLA: the control for cache and speed claims."""
        every = tuple(range(1, self.num_hidden_layers + 1))
        return replace(self, linear_attn=replace(self.linear_attn, kda_layers=(), full_attn_layers=every))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order (0-based)."""
        kda = set(self.linear_attn.kda_layers)
        return tuple("kda" if layer + 1 in kda else "mla" for layer in range(self.num_hidden_layers))

    def is_moe(self, layer: int) -> bool:
        """Whether the 0-based ``layer`` has routed experts (the first layers are dense)."""
        return layer >= self.first_k_dense_replace

    @property
    def kda_width(self) -> int:
        """P: KDA heads times head size."""
        return self.linear_attn.num_heads * self.linear_attn.head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query head: the nope part and the unrotated slot."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_cache_width(self) -> int:
        """Values that one MLA layer keeps a token: the latent and the slot."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def bos_token_id(self) -> int:
        """First control id."""
        return self.vocab_size - CONTROL_IDS

    @property
    def eos_token_id(self) -> int:
        """End of message, the only stop token."""
        return self.bos_token_id + 2

    @property
    def pad_token_id(self) -> int:
        """Last id."""
        return self.vocab_size - 1


_REQUIRED = frozenset(field.name for field in fields(K3Config)[:15])


def _check(config: K3Config) -> None:
    """Raise ModelConfigError, naming the field, when the sizes cannot make a model."""
    linear = config.linear_attn
    sizes = {field.name: getattr(config, field.name) for field in fields(K3Config) if field.type == "int"} | {
        f"linear_attn_config.{name}": getattr(linear, name)
        for name in ("num_heads", "head_dim", "short_conv_kernel_size")
    }
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise ModelConfigError(f"{name} must be an integer, not {size!r}")
        if size < (0 if name == "first_k_dense_replace" else 1):
            raise ModelConfigError(f"{name} must be positive, not {size}")
    for name in (
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "rms_norm_eps",
        "routed_scaling_factor",
    ):
        if not 0 < getattr(config, name) < float("inf"):
            raise ModelConfigError(f"{name} must be a positive number, not {getattr(config, name)}")
    if config.vocab_size <= CONTROL_IDS:
        raise ModelConfigError(
            f"vocab_size {config.vocab_size} must be above {CONTROL_IDS}, the control tokens at its end"
        )
    if linear.short_conv_kernel_size < 2:
        raise ModelConfigError("linear_attn_config.short_conv_kernel_size must be at least 2")
    if linear.gate_lower_bound is not None and not -float("inf") < linear.gate_lower_bound < 0:
        raise ModelConfigError(
            f"linear_attn_config.gate_lower_bound must be negative or null, not {linear.gate_lower_bound}"
        )
    if config.num_experts_per_token > config.num_experts:
        raise ModelConfigError(
            f"num_experts_per_token {config.num_experts_per_token} is above num_experts {config.num_experts}"
        )
    if config.first_k_dense_replace > config.num_hidden_layers:
        raise ModelConfigError(
            f"first_k_dense_replace {config.first_k_dense_replace} is above "
            f"num_hidden_layers {config.num_hidden_layers}"
        )
    _check_layers(config)
    if config.mxfp4:
        for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
            if getattr(config, name) % MXFP4_GROUP:
                raise ModelConfigError(
                    f"{name} {getattr(config, name)} is not a multiple of {MXFP4_GROUP}, the MXFP4 group"
                )


def _check_layers(config: K3Config) -> None:
    linear = config.linear_attn
    for name, layers in (("kda_layers", linear.kda_layers), ("full_attn_layers", linear.full_attn_layers)):
        wrong = [layer for layer in layers if not 1 <= layer <= config.num_hidden_layers]
        if wrong:
            raise ModelConfigError(
                f"linear_attn_config.{name} holds {wrong}: layers count from 1 to {config.num_hidden_layers}"
            )
        twice = sorted({layer for layer in layers if layers.count(layer) > 1})
        if twice:
            raise ModelConfigError(f"linear_attn_config.{name} holds {twice} more than once")
    overlap = sorted(set(linear.kda_layers) & set(linear.full_attn_layers))
    if overlap:
        raise ModelConfigError(
            f"linear_attn_config: layers {overlap} are in both kda_layers and full_attn_layers"
        )
    listed = {*linear.kda_layers, *linear.full_attn_layers}
    missing = config.num_hidden_layers - len(listed)
    if missing:
        gaps = list(islice((layer for layer in count(1) if layer not in listed), min(missing, 8)))
        more = f" and {missing - 8} more" if missing > 8 else ""
        raise ModelConfigError(
            f"linear_attn_config: layers {gaps}{more} are in neither kda_layers nor full_attn_layers"
        )


def _mapping(data: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = data.get(name)
    if not isinstance(value, dict):
        raise ModelConfigError(f"config.json: {name} is missing or not an object")
    return value


def _integer(data: Mapping[str, object], name: str) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelConfigError(f"config.json: {name} must be an integer, not {value!r}")
    return value


def _number(data: Mapping[str, object], name: str, default: float | None = None) -> float:
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelConfigError(f"config.json: {name} must be a number, not {value!r}")
    return float(value)


def _layers(data: Mapping[str, object], name: str) -> tuple[int, ...]:
    value = data.get(name)
    if not isinstance(value, Sequence) or not all(type(layer) is int for layer in value):
        raise ModelConfigError(f"config.json: linear_attn_config.{name} must be a list of layer numbers")
    return tuple(value)


def _is_mxfp4(quantization: object) -> bool:
    if quantization is None:
        return False
    groups = quantization.get("config_groups") if isinstance(quantization, dict) else None
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not (
        isinstance(quantization, dict)
        and isinstance(group, dict)
        and isinstance(weights, dict)
        and "mxfp4-pack-quantized" in (quantization.get("format"), group.get("format"))
        and weights.get("num_bits") == 4
        and weights.get("group_size") == MXFP4_GROUP
    ):
        raise ModelConfigError(
            "config.json: quantization_config is not mxfp4-pack-quantized with 4 bits and groups of "
            f"{MXFP4_GROUP}, the only one that can be loaded"
        )
    return True


def _warn_unknown(text: Mapping[str, object]) -> None:
    known = {field.name for field in fields(K3Config)} | set(_FIXED_TEXT) | _IGNORED_TEXT
    known |= {
        "linear_attn_config",
        "num_key_value_heads",
        "quantization_config",
        "bos_token_id",
        "eos_token_id",
    }
    for name in sorted(set(text) - known):
        _log.warning("config.json: text_config.%s is not known and was ignored", name)


def _family(
    *,
    hidden: int,
    layers: int,
    heads: int,
    head_dim: int,
    lora: tuple[int, int],
    head: tuple[int, int, int],
    expert: tuple[int, int, int, int],
    dense: int,
    block: int,
    vocab: int,
    mxfp4: bool = False,
) -> K3Config:
    """K3's pattern at any size: every fourth layer MLA and the last one too, the first layer dense."""
    full = tuple(sorted({*range(4, layers + 1, 4), layers}))
    return K3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=dense,
        q_lora_rank=lora[0],
        kv_lora_rank=lora[1],
        qk_nope_head_dim=head[0],
        qk_rope_head_dim=head[1],
        v_head_dim=head[2],
        routed_expert_hidden_size=expert[0],
        moe_intermediate_size=expert[1],
        num_experts=expert[2],
        num_experts_per_token=expert[3],
        attn_res_block_size=block,
        mxfp4=mxfp4,
        linear_attn=LinearAttnConfig(
            num_heads=heads,
            head_dim=head_dim,
            kda_layers=tuple(layer for layer in range(1, layers + 1) if layer not in full),
            full_attn_layers=full,
        ),
    )


_SCALED: Mapping[str, K3Config] = {
    "a": _family(
        hidden=128, layers=5, heads=4, head_dim=32, lora=(64, 32), head=(32, 16, 32),
        expert=(64, 32, 16, 2), dense=256, block=2, vocab=512,
    ),
    "b": _family(
        hidden=192, layers=9, heads=5, head_dim=64, lora=(64, 32), head=(64, 32, 64),
        expert=(96, 64, 28, 2), dense=768, block=4, vocab=2048,
    ),
    "c": _family(
        hidden=384, layers=13, heads=10, head_dim=64, lora=(96, 64), head=(64, 32, 64),
        expert=(192, 160, 32, 4), dense=1792, block=3, vocab=8192,
    ),
    "d": _family(
        hidden=1024, layers=25, heads=14, head_dim=128, lora=(256, 128), head=(128, 64, 128),
        expert=(512, 448, 40, 4), dense=4864, block=4, vocab=32768,
    ),
}  # fmt: skip
_SPARSE_WIDTH: Mapping[str, int] = {"c": 64, "d": 128}
SCALED_NAMES = ("a", "b", "c", "d", "c56", "d56")
"""Names that ``K3Config.scaled`` knows, each also with the suffix ``-mla``."""

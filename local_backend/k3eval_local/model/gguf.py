"""Export to GGUF as llama.cpp's own converter writes a Kimi K3 checkpoint, architecture ``kimi-k3``.

Differences from the published layout: the two factors of every mix query are multiplied, ``ssm_a`` holds
``-exp(A_log)``, ``kv_b_proj`` is cut into its key part (transposed) and its value part, experts are stacked.
Needs the package ``gguf``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from numpy.typing import NDArray
from torch import Tensor

from k3eval_local.errors import CheckpointError
from k3eval_local.model.config import CONTROL_IDS, K3Config
from k3eval_local.model.decoder import DecoderLayer, K3Model, mix_query
from k3eval_local.model.kda import KDA
from k3eval_local.model.mla import MLA

ARCHITECTURE = "kimi-k3"
MatrixType = Literal["fp32", "fp16", "bf16"]
_TYPES = {
    "fp32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "fp16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
_MATRIX, _EXACT = True, False


def export(
    model: K3Model, path: Path, *, matrices: MatrixType = "fp32", vocabulary: Vocabulary | None = None
) -> None:
    """Write one GGUF file.

    Args:
        model: MXFP4 experts are written unpacked.
        path: of the new file; a file that is there is not replaced.
        matrices: type of the matrices; norms, biases, convolutions and mix queries stay fp32.
        vocabulary: by default ``Vocabulary.made_up``.

    Raises:
        CheckpointError: the file exists or cannot be written, the vocabulary has another size, or llama.cpp
            could not run such a model.
    """
    if path.exists():
        raise CheckpointError(f"{path} exists; choose a new file")
    config = model.config
    if len(set(config.layer_kinds)) != 2 or config.linear_attn.num_heads != config.num_attention_heads:
        raise CheckpointError(
            "llama.cpp only runs Kimi K3 with both KDA and MLA layers and as many KDA heads as MLA heads"
        )
    vocabulary = vocabulary or Vocabulary.made_up(config)
    distinct = len(set(vocabulary.tokens))
    if not distinct == len(vocabulary.tokens) == config.vocab_size:
        raise CheckpointError(f"the vocabulary needs {config.vocab_size} distinct tokens, not {distinct}")
    partial = path.with_name(f".{path.name}.partial")
    kind, file_type = _TYPES[matrices]
    try:
        writer = gguf.GGUFWriter(partial, ARCHITECTURE)
        _write_keys(writer, config, vocabulary, int(file_type))
        with torch.no_grad():
            for name, tensor, is_matrix in _tensors(model):
                array: NDArray[np.generic] = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
                if is_matrix and matrices != "fp32":
                    writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
                else:
                    writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class Vocabulary:
    """tokens: text of every id, bytes written as GPT-2 writes them. merges: BPE merges in order of rank."""

    tokens: tuple[str, ...]
    merges: tuple[str, ...]

    @classmethod
    def of(cls, ordinary: Sequence[bytes], control: Sequence[str]) -> Vocabulary:
        """From a rank-ordered byte-level vocabulary; each token's merge is the last step of its own BPE."""
        ranks = {token: rank for rank, token in enumerate(ordinary)}
        merges = []
        for rank, token in enumerate(ordinary):
            parts = _bpe(token, ranks, rank) if len(token) > 1 else []
            if len(parts) == 2:
                merges.append(" ".join(_byte_level(part) for part in parts))
        tokens = [*(_byte_level(token) for token in ordinary), *control]
        return cls(tuple(tokens), tuple(merges or [f"{tokens[0]} {tokens[1]}"]))

    @classmethod
    def made_up(cls, config: K3Config) -> Vocabulary:
        """For weights without a tokenizer: the bytes, then a distinct piece for each id."""
        count = config.vocab_size - CONTROL_IDS
        ordinary = [bytes([byte]) for byte in range(256)] + [b"[%d]" % number for number in range(256, count)]
        return cls.of(ordinary[:count], [f"<|{number}|>" for number in range(CONTROL_IDS)])


def _bpe(token: bytes, ranks: Mapping[bytes, int], below: int) -> list[bytes]:
    """The parts of ``token`` that merges of lower rank leave."""
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, below) for left, right in itertools.pairwise(parts)]
        best = min(joined)
        if best >= below:
            break
        place = joined.index(best)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _byte_level(token: bytes) -> str:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in token)


def _write_keys(writer: gguf.GGUFWriter, config: K3Config, vocabulary: Vocabulary, file_type: int) -> None:
    linear = config.linear_attn
    writer.add_type("model")
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    integers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_token,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.num_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_latent_length": config.routed_expert_hidden_size,
        "ssm.conv_kernel": linear.short_conv_kernel_size,
        "kda.head_dim": linear.head_dim,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
        "attention.key_length": config.latent_cache_width,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attn_res.block_size": config.attn_res_block_size,
    }
    for name, value in integers.items():
        writer.add_uint32(f"{ARCHITECTURE}.{name}", value)
    numbers = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "expert_weights_scale": config.routed_scaling_factor,
        "activation.situ_beta": config.activation_situ_beta,
        "activation.situ_linear_beta": config.activation_situ_linear_beta,
    }
    if linear.gate_lower_bound is not None:
        numbers["kda.gate_lower_bound"] = linear.gate_lower_bound
    for name, number in numbers.items():
        writer.add_float32(f"{ARCHITECTURE}.{name}", number)
    writer.add_bool(f"{ARCHITECTURE}.expert_weights_norm", True)
    writer.add_array(
        f"{ARCHITECTURE}.attention.head_count_kv", [int(kind == "mla") for kind in config.layer_kinds]
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("kimi-k2")
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types([1] * (config.vocab_size - CONTROL_IDS) + [3] * CONTROL_IDS)
    writer.add_token_merges(list(vocabulary.merges))
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)


def _tensors(model: K3Model) -> Iterator[tuple[str, Tensor, bool]]:
    """Name, values, and whether it is a matrix (may be stored in 16 bits)."""
    backbone = model.model
    yield "token_embd.weight", backbone.embed_tokens.weight, _MATRIX
    yield "output.weight", model.lm_head.weight, _MATRIX
    yield "output_norm.weight", backbone.norm.weight, _EXACT
    output_query = mix_query(backbone.output_attn_res_norm, backbone.output_attn_res_proj)
    yield "output_res_score.weight", output_query, _EXACT
    for index, layer in enumerate(model.layers):
        for name, tensor, is_matrix in _layer(layer):
            yield f"blk.{index}.{name}", tensor, is_matrix


def _layer(layer: DecoderLayer) -> Iterator[tuple[str, Tensor, bool]]:
    attention_query, ffn_query = layer.queries()
    yield "attn_norm.weight", layer.input_layernorm.weight, _EXACT
    yield "ffn_norm.weight", layer.post_attention_layernorm.weight, _EXACT
    yield "attn_res_score.weight", attention_query, _EXACT
    yield "ffn_res_score.weight", ffn_query, _EXACT
    yield from _kda(layer.self_attn) if isinstance(layer.self_attn, KDA) else _mla(layer.self_attn)
    if not layer.is_moe:
        for name in ("gate", "up", "down"):
            yield f"ffn_{name}.weight", layer.mlp.get_parameter(f"{name}_proj.weight"), _MATRIX
        return
    moe = layer.block_sparse_moe
    yield "ffn_gate_inp.weight", moe.gate.weight, _EXACT
    yield "exp_probs_b.bias", moe.gate.e_score_correction_bias, _EXACT
    w1, w3, w2 = moe.experts.all()
    for name, stacked in (("gate", w1), ("up", w3), ("down", w2)):
        yield f"ffn_{name}_exps.weight", stacked, _MATRIX
        shared = moe.shared_experts.get_parameter(f"{name}_proj.weight")
        yield f"ffn_{name}_shexp.weight", shared, _MATRIX
    yield "ffn_routed_down.weight", moe.routed_expert_down_proj.weight, _MATRIX
    yield "ffn_routed_norm.weight", moe.routed_expert_norm.weight, _EXACT
    yield "ffn_routed_up.weight", moe.routed_expert_up_proj.weight, _MATRIX


def _kda(kda: KDA) -> Iterator[tuple[str, Tensor, bool]]:
    matrices = {
        "attn_q": kda.q_proj,
        "attn_k": kda.k_proj,
        "attn_v": kda.v_proj,
        "attn_output": kda.o_proj,
        "ssm_f_a": kda.f_a_proj,
        "ssm_f_b": kda.f_b_proj,
        "ssm_beta": kda.b_proj,
        "ssm_g": kda.g_proj,
    }
    for name, projection in matrices.items():
        yield f"{name}.weight", projection.weight, _MATRIX
    for name, conv in (("q", kda.q_conv1d), ("k", kda.k_conv1d), ("v", kda.v_conv1d)):
        yield f"ssm_conv1d_{name}.weight", conv.weight[None], _EXACT
    yield "ssm_a", -kda.A_log.exp(), _EXACT
    yield "ssm_dt.bias", kda.dt_bias, _EXACT
    yield "ssm_norm.weight", kda.o_norm.weight, _EXACT


def _mla(mla: MLA) -> Iterator[tuple[str, Tensor, bool]]:
    matrices = {
        "attn_q_a": mla.q_a_proj,
        "attn_q_b": mla.q_b_proj,
        "attn_kv_a_mqa": mla.kv_a_proj_with_mqa,
        "attn_gate": mla.g_proj,
        "attn_output": mla.o_proj,
    }
    for name, projection in matrices.items():
        yield f"{name}.weight", projection.weight, _MATRIX
    yield "attn_q_a_norm.weight", mla.q_a_layernorm.weight, _EXACT
    yield "attn_kv_a_norm.weight", mla.kv_a_layernorm.weight, _EXACT
    w_uk, w_uv = mla.expansion()
    yield "attn_k_b.weight", w_uk.transpose(1, 2), _MATRIX
    yield "attn_v_b.weight", w_uv, _MATRIX

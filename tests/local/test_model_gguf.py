from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import xllamacpp
from model_helpers import random_ids, shaken

from k3eval_local.checkpoint import load, save
from k3eval_local.errors import CheckpointError
from k3eval_local.model.config import CONTROL_IDS, K3Config
from k3eval_local.model.convert import to_gguf
from k3eval_local.model.decoder import K3Model
from k3eval_local.model.gguf import Vocabulary, export

A = K3Config.scaled("a")


def distinct(config: K3Config) -> Vocabulary:
    """Every ordinary id is a printable piece of its own, so that llama.cpp reports each generated id."""
    ordinary = [b"x%03x" % token for token in range(config.vocab_size - CONTROL_IDS)]
    return Vocabulary.of(ordinary, [f"<|{offset}|>" for offset in range(CONTROL_IDS)])


def greedy_in_llama_cpp(path: Path, prompt: list[int], count: int) -> list[int]:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 512, 1, 0
    params.cpuparams.n_threads = 1
    params.warmup = False
    request = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    reply = xllamacpp.Server(params).handle_completions(request)
    assert isinstance(reply, dict), reply
    return [entry["id"] for entry in reply["choices"][0]["logprobs"]["content"]]


@torch.no_grad()
def greedy(model: K3Model, prompt: list[int], count: int) -> list[int]:
    logits, state = model(torch.tensor([prompt]), last_only=True)
    ids, logits = [], logits[:, 0]
    for _ in range(count):
        logits[:, model.config.eos_token_id] = -math.inf
        ids.append(int(logits.argmax()))
        logits, state = model.step(torch.tensor(ids[-1:]), state)
    return ids


def test_llama_cpp_generates_the_same_tokens(tmp_path: Path) -> None:
    model = shaken(A, seed=15, dtype=torch.float32)
    export(model, tmp_path / "a.gguf", vocabulary=distinct(A))
    prompt = random_ids(A, 1, 23, seed=3)[0].tolist()
    ours = greedy(model, prompt, 64)
    assert len(set(ours)) > 40
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ours]))[0][0, 22:-1]
    logits[:, A.eos_token_id] = -math.inf
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > 0.03  # rounding, below 0.001, cannot change a choice
    assert greedy_in_llama_cpp(tmp_path / "a.gguf", prompt, 64) == ours


def read(path: Path) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return keys, {tensor.name: tensor.data for tensor in reader.tensors}


def test_keys_and_changed_tensors(tmp_path: Path) -> None:
    model = shaken(A, dtype=torch.float32)
    export(model, tmp_path / "a.gguf")
    keys, tensors = read(tmp_path / "a.gguf")
    assert keys["general.architecture"] == "kimi-k3"
    assert keys["kimi-k3.attention.head_count_kv"] == [0, 0, 0, 1, 1]
    assert keys["kimi-k3.attention.key_length"] == 48
    assert keys["kimi-k3.attention.key_length_mla"] == 48
    assert keys["kimi-k3.attention.value_length"] == 32
    assert keys["kimi-k3.kda.gate_lower_bound"] == -5.0
    assert keys["tokenizer.ggml.eos_token_id"] == A.eos_token_id
    assert len(keys["tokenizer.ggml.tokens"]) == 512  # type: ignore[arg-type]
    kda = model.layers[0].self_attn
    np.testing.assert_array_equal(tensors["blk.0.ssm_a"], -kda.get_parameter("A_log").detach().exp().numpy())
    assert tensors["blk.0.ssm_conv1d_k.weight"].shape == (1, 128, 1, 4)
    up = model.layers[3].self_attn.get_parameter("kv_b_proj.weight").detach().view(4, 64, 32)
    np.testing.assert_array_equal(tensors["blk.3.attn_k_b.weight"], up[:, :32].transpose(1, 2).numpy())
    np.testing.assert_array_equal(tensors["blk.3.attn_v_b.weight"], up[:, 32:].numpy())
    np.testing.assert_array_equal(tensors["blk.4.ffn_res_score.weight"], model.queries()[9].detach().numpy())
    np.testing.assert_array_equal(tensors["output_res_score.weight"], model.queries()[10].detach().numpy())
    down = model.layers[1].block_sparse_moe.experts.get_parameter("w2").detach()
    np.testing.assert_array_equal(tensors["blk.1.ffn_down_exps.weight"], down.numpy())
    assert len(tensors) == 4 + 5 * 4 + 3 * 14 + 2 * 9 + 3 + 4 * 11


@pytest.mark.parametrize("matrices", ["fp16", "bf16"])
def test_sixteen_bit_matrices_run(tmp_path: Path, matrices: str) -> None:
    model = shaken(A, seed=15, dtype=torch.float32)
    export(model, tmp_path / "a.gguf", matrices=matrices, vocabulary=distinct(A))  # type: ignore[arg-type]
    _, tensors = read(tmp_path / "a.gguf")
    assert tensors["blk.0.attn_q.weight"].nbytes == 128 * 128 * 2
    assert tensors["blk.0.attn_norm.weight"].dtype == np.float32
    prompt = random_ids(A, 1, 23, seed=3)[0].tolist()
    assert greedy_in_llama_cpp(tmp_path / "a.gguf", prompt, 2)[0] == greedy(model, prompt, 1)[0]


def test_convert_unpacks_and_takes_the_checkpoints_vocabulary(tmp_path: Path) -> None:
    config = K3Config.scaled("a")
    save(shaken(config, dtype=torch.float32), tmp_path / "m", mxfp4=True)
    to_gguf(tmp_path / "m", tmp_path / "m.gguf")
    keys, tensors = read(tmp_path / "m.gguf")
    w1 = load(tmp_path / "m", unpack=True).layers[2].block_sparse_moe.experts.all()[0]
    np.testing.assert_array_equal(tensors["blk.2.ffn_gate_exps.weight"], w1.detach().numpy())
    tokens = keys["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert tokens[ord("a")] == "a"
    assert tokens[ord(" ")] == "\u0120"
    with pytest.raises(CheckpointError, match="exists"):
        to_gguf(tmp_path / "m", tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="cannot write"):
        to_gguf(tmp_path / "m", tmp_path / "no" / "m.gguf")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "kimi_k3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.gguf"]


def test_what_llama_cpp_cannot_run_is_refused(tmp_path: Path) -> None:
    fewer = replace(A, linear_attn=replace(A.linear_attn, num_heads=3))
    for config in (A.mla_twin(), fewer):
        with pytest.raises(CheckpointError, match=r"llama\.cpp only runs"):
            export(shaken(config, dtype=torch.float32), tmp_path / "a.gguf")
    assert list(tmp_path.iterdir()) == []


def test_merges_rebuild_every_token() -> None:
    ordinary = [bytes([byte]) for byte in range(256)] + [
        b"th",
        b"he",
        b"the",
        b" the",
        b"in",
        b"ing",
        b"thing",
    ]
    vocabulary = Vocabulary.of(ordinary, ["<|0|>"])
    assert vocabulary.merges[:4] == ("t h", "h e", "th e", "\u0120 the")
    joined = {"".join(merge.split(" ")) for merge in vocabulary.merges}
    assert {"th", "he", "the", "in", "ing", "thing"} <= joined
    wrong = Vocabulary(("a", "a"), ("a a",))
    with pytest.raises(CheckpointError, match="512 distinct tokens"):
        export(shaken(A, dtype=torch.float32), Path("never.gguf"), vocabulary=wrong)

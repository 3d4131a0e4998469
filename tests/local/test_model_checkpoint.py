from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_helpers import random_ids, shaken
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from k3eval_local.checkpoint import INDEX, expected_shapes, fingerprint, load, open_model, save
from k3eval_local.errors import CheckpointError, ModelConfigError
from k3eval_local.model.config import K3Config
from k3eval_local.model.moe import PackedExperts
from k3eval_local.model.mxfp4 import dequantize

A = K3Config.scaled("a")
LAYER = "language_model.model.layers."


def saved(folder: Path, **options: object) -> Path:
    save(shaken(A, dtype=torch.float32), folder, **options)  # type: ignore[arg-type]
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace all tensors by these, with a matching index."""
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    save_file(tensors, folder / "all.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "all.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))


def test_names_and_shapes_are_those_of_the_release() -> None:
    full = expected_shapes(K3Config.full())
    assert len(full) == 92 * 896 * 3 * 2 + 2460
    assert full[f"{LAYER}0.self_attn.A_log"] == (128,)
    assert full[f"{LAYER}1.self_attn.q_conv1d.weight"] == (12288, 1, 4)
    assert full[f"{LAYER}1.self_attn.f_b_proj.weight"] == (12288, 128)
    assert full[f"{LAYER}1.self_attention_res_proj.weight"] == (1, 7168)
    assert full[f"{LAYER}3.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert full[f"{LAYER}0.mlp.gate_proj.weight"] == (33792, 7168)
    assert full[f"{LAYER}92.block_sparse_moe.experts.895.w1.weight_packed"] == (3072, 3584 // 2)
    assert full[f"{LAYER}92.block_sparse_moe.experts.895.w2.weight_scale"] == (3584, 3072 // 32)
    assert full[f"{LAYER}1.block_sparse_moe.gate.e_score_correction_bias"] == (896,)
    assert full[f"{LAYER}1.block_sparse_moe.shared_experts.down_proj.weight"] == (7168, 6144)
    assert full["language_model.model.output_attn_res_norm.weight"] == (7168,)
    assert full["language_model.lm_head.weight"] == (163840, 7168)


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["fp32", "fp64"])
def test_round_trip_in_shards(tmp_path: Path, dtype: torch.dtype | None) -> None:
    model = shaken(A, dtype=dtype or torch.float32)
    save(model, tmp_path / "m", shard_bytes=700_000)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 5
    assert set(index["weight_map"]) == set(expected_shapes(A))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(tmp_path / "m").values())
    again = load(tmp_path / "m", model.dtype)
    assert again.config == A
    for (name, one), two in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


def test_what_is_stored(tmp_path: Path) -> None:
    tensors = tensors_of(saved(tmp_path / "m", dtype=torch.bfloat16))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected_shapes(A)
    wide = {name.rsplit(f"{LAYER}0.", 1)[-1] for name, t in tensors.items() if t.dtype == torch.float32}
    assert {
        "self_attn.A_log",
        "self_attn.dt_bias",
        "self_attn.o_norm.weight",
        "self_attn.q_conv1d.weight",
    } <= wide
    assert tensors[f"{LAYER}1.block_sparse_moe.gate.weight"].dtype == torch.bfloat16
    padded = tensors[f"{LAYER}0.self_attn.A_log"]
    assert padded.shape == (32,)
    assert not padded[4:].any()
    assert padded[:4].all()


def test_other_padding_and_a_single_file_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    tensors = tensors_of(folder)
    bare = {name: t[:4].clone() if name.endswith("A_log") else t for name, t in tensors.items()}
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    (folder / INDEX).unlink()
    save_file(bare, folder / "model.safetensors")
    model, weights = open_model(str(folder))
    assert torch.equal(model.layers[0].self_attn.get_parameter("A_log"), bare[f"{LAYER}0.self_attn.A_log"])
    assert weights == fingerprint(folder)
    assert weights.startswith("sha256:")


@torch.no_grad()
def test_packed_experts_run_and_stay_packed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", mxfp4=True, dtype=torch.bfloat16)
    packed, plain = load(folder, torch.float64), load(folder, torch.float64, unpack=True)
    assert packed.config.mxfp4
    assert not plain.config.mxfp4
    moe = packed.layers[1].block_sparse_moe
    assert isinstance(moe.experts, PackedExperts)
    tensors = tensors_of(folder)
    name = f"{LAYER}1.block_sparse_moe.experts.3.w2.weight"
    expected = dequantize(tensors[f"{name}_packed"], tensors[f"{name}_scale"], torch.float64)
    assert torch.equal(moe.experts.one(3)[2], expected)
    for length in (1, 30):
        ids = random_ids(A, 2, length)
        torch.testing.assert_close(packed(ids)[0], plain(ids)[0], rtol=0, atol=1e-10)
    save(packed, tmp_path / "again", dtype=torch.bfloat16)
    assert fingerprint(tmp_path / "again") == fingerprint(folder)


def test_every_missing_unexpected_and_misshaped_tensor_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    tensors = tensors_of(folder)
    gone = [f"{LAYER}1.self_attn.q_proj.weight", f"{LAYER}4.block_sparse_moe.experts.15.w2.weight"]
    for name in gone:
        del tensors[name]
    tensors["language_model.model.layers.7.extra"] = torch.zeros(2)
    tensors["vision_tower.patch"] = torch.zeros(2)
    tensors[f"{LAYER}2.input_layernorm.weight"] = torch.zeros(127)
    tensors[f"{LAYER}0.self_attn.A_log"] = torch.zeros(3)
    tensors[f"{LAYER}1.self_attn.A_log"] = torch.ones(32)
    tensors["language_model.lm_head.weight"] = tensors["language_model.lm_head.weight"].to(torch.int64)
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    missing, unexpected, misshaped = message.split("; ")[1:]
    assert missing == f"missing: {gone[0]}, {gone[1]}"
    assert unexpected == "unexpected: language_model.model.layers.7.extra, vision_tower.patch"
    assert f"{LAYER}2.input_layernorm.weight is [127], not [128]" in misshaped
    assert f"{LAYER}0.self_attn.A_log is [3], not [32]" in misshaped
    assert f"{LAYER}1.self_attn.A_log has values in its padding" in misshaped
    assert "language_model.lm_head.weight holds I64" in misshaped


def test_a_transposed_matrix_is_misshaped(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    tensors = tensors_of(folder)
    name = f"{LAYER}0.self_attn.f_a_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError, match=r"f_a_proj\.weight is \[128, 32\], not \[32, 128\]"):
        load(folder)


def test_damage_names_the_file(tmp_path: Path) -> None:
    for name, damage in (
        ("cut", lambda data: data[: len(data) // 2]),
        ("short", lambda data: data[:-1]),
        ("stub", lambda data: data[:5]),
        ("head", lambda data: b"\xff" * 8 + data[8:]),
        ("empty", lambda data: b""),
    ):
        folder = saved(tmp_path / name, shard_bytes=2_000_000)
        shard = sorted(folder.glob("*.safetensors"))[1]
        shard.write_bytes(damage(shard.read_bytes()))
        with pytest.raises(CheckpointError, match=rf"{shard.name} is damaged or truncated"):
            load(folder)
        shard.unlink()
        with pytest.raises(CheckpointError, match=rf"{shard.name} is missing"):
            load(folder)


def test_a_wrong_index_is_told_apart(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    name = f"{LAYER}0.self_attn.dt_bias"
    shard = index["weight_map"].pop(name)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"missing: {name}; unexpected: {name}"):
        load(folder)
    index["weight_map"] |= {name: shard, "ghost": shard}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="unexpected: ghost"):
        load(folder)
    for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"x": "../y"}}'):
        (folder / INDEX).write_text(text)
        with pytest.raises(CheckpointError, match="is damaged"):
            load(folder)
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        load(folder)


def test_a_config_that_does_not_fit_the_tensors(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(replace(A, moe_intermediate_size=64).to_dict()))
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight is \[32, 64\], not \[64, 64\]"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"config\.json is not JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelConfigError, match="cannot read"):
        load(folder)


def test_saving_is_all_or_nothing(tmp_path: Path) -> None:
    model = shaken(A, dtype=torch.float32)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="exists"):
        save(model, tmp_path / "full")
    with pytest.raises(CheckpointError, match="cannot write"):
        save(model, tmp_path / "full" / "mine" / "under-a-file")
    odd = shaken(replace(A, routed_expert_hidden_size=80), dtype=torch.float32)
    with pytest.raises(ModelConfigError, match="routed_expert_hidden_size 80"):
        save(odd, tmp_path / "odd", mxfp4=True)
    with pytest.raises(CheckpointError, match="cannot write"):
        save(model, tmp_path / "half", extra_files=[tmp_path / "not-there"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
    (tmp_path / "empty").mkdir()
    save(model, tmp_path / "empty")
    with safe_open(next((tmp_path / "empty").glob("*.safetensors")), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3eval_local.errors import ModelConfigError
from k3eval_local.model.accounting import count_parameters
from k3eval_local.model.config import SCALED_NAMES, K3Config
from k3eval_local.model.decoder import K3Model
from k3eval_local.model.names import config_of, resolve

ALL = [*SCALED_NAMES, *(f"{name}-mla" for name in SCALED_NAMES)]


def published(**text: Any) -> dict[str, Any]:
    data: dict[str, Any] = copy.deepcopy(K3Config.scaled("a").to_dict())
    data["text_config"].update(text)
    return data


def with_linear(**linear: Any) -> dict[str, Any]:
    data = published()
    data["text_config"]["linear_attn_config"].update(linear)
    return data


@pytest.mark.parametrize("config", [*map(K3Config.scaled, ALL), K3Config.full(), K3Config.full().mla_twin()])
def test_the_published_shape_round_trips(config: K3Config) -> None:
    text = json.dumps(config.to_dict())
    assert K3Config.from_dict(json.loads(text)) == config


def test_the_full_config_has_the_published_values() -> None:
    data: dict[str, Any] = K3Config.full().to_dict()
    text = data["text_config"]
    assert (data["model_type"], text["model_type"]) == ("kimi_k3", "kimi_linear")
    assert data["eos_token_id"] == 163586
    assert text["linear_attn_config"]["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert len(text["linear_attn_config"]["kda_layers"]) == 69
    assert text["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert K3Config.full().layer_kinds[:4] == ("kda", "kda", "kda", "mla")
    assert K3Config.full().layer_kinds[-2:] == ("mla", "mla")


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("a", "1.21M", "0.80M"),
        ("b", "8.96M", "4.74M"),
        ("c", "64.8M", "30.7M"),
        ("d", "1044M", "416M"),
        ("c56", "76.7M", "24.9M"),
        ("d56", "867M", "314M"),
    ],
)
def test_scaled_parameter_counts(name: str, total: str, active: str) -> None:
    count = count_parameters(K3Config.scaled(name))
    for value, written in ((count.total, total), (count.active, active)):
        decimals = len(written.removesuffix("M").partition(".")[2])
        assert f"{value / 1e6:.{decimals}f}M" == written


def test_full_parameter_counts() -> None:
    count = count_parameters(K3Config.full())
    assert count.total == 2_779_484_476_000
    assert count.active == 104_189_612_640


@pytest.mark.parametrize("config", [*map(K3Config.scaled, ("a", "b", "a-mla", "c56")), K3Config.full()])
def test_counts_from_the_config_equal_the_built_model(config: K3Config) -> None:
    model = K3Model(replace(config, mxfp4=False), device="meta")
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == count_parameters(config).total


def test_the_twin_has_the_same_depth_and_width() -> None:
    config = K3Config.scaled("b")
    twin = config.mla_twin()
    assert set(twin.layer_kinds) == {"mla"}
    assert replace(twin, linear_attn=config.linear_attn) == config
    assert twin.mla_twin() == twin
    assert K3Config.scaled("B-mla") == twin


def test_kimi_linears_gate_is_selected_by_null() -> None:
    config = K3Config.from_dict(with_linear(gate_lower_bound=None))
    assert config.linear_attn.gate_lower_bound is None
    assert K3Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (published(hidden_size=None), "hidden_size"),
        (published(hidden_size="128"), "hidden_size"),
        (published(hidden_size=0), "hidden_size"),
        (published(vocab_size=True), "vocab_size"),
        (published(vocab_size=256), "vocab_size"),
        (published(num_key_value_heads=3), "num_key_value_heads"),
        (published(num_key_value_heads=2), "num_key_value_heads"),
        (published(num_experts_per_token=17), "num_experts_per_token"),
        (published(first_k_dense_replace=6), "first_k_dense_replace"),
        (published(hidden_act="silu"), "hidden_act"),
        (published(mla_use_nope=False), "mla_use_nope"),
        (published(tie_word_embeddings=True), "tie_word_embeddings"),
        (published(num_nextn_predict_layers=1), "num_nextn_predict_layers"),
        (published(activation_situ_beta=0), "activation_situ_beta"),
        (published(rms_norm_eps="small"), "rms_norm_eps"),
        (published(linear_attn_config=[]), "linear_attn_config"),
        (published(quantization_config={"quant_method": "awq"}), "quantization_config"),
        (with_linear(kda_layers=[1, 2, 3, 4]), "kda_layers"),
        (with_linear(kda_layers=[1, 2]), "kda_layers"),
        (with_linear(kda_layers=[1, 2, 2, 3]), "kda_layers"),
        (with_linear(full_attn_layers=[4, 5, 6]), "full_attn_layers"),
        (with_linear(full_attn_layers=[0, 4, 5]), "full_attn_layers"),
        (with_linear(full_attn_layers="45"), "full_attn_layers"),
        (with_linear(head_dim=-32), "linear_attn_config.head_dim"),
        (with_linear(gate_lower_bound=5.0), "gate_lower_bound"),
        (with_linear(use_full_rank_gate=False), "use_full_rank_gate"),
        (with_linear(short_conv_kernel_size=1), "short_conv_kernel_size"),
        ({**published(), "model_type": "kimi_k2"}, "model_type"),
        ({"model_type": "kimi_k3"}, "text_config"),
    ],
)
def test_a_bad_field_is_named_in_one_line(data: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        K3Config.from_dict(data)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["hidden_size", "kv_lora_rank", "attn_res_block_size", "num_experts"])
def test_a_missing_field_is_named(field: str) -> None:
    data = published()
    del data["text_config"][field]
    with pytest.raises(ModelConfigError, match=f"{field} is missing"):
        K3Config.from_dict(data)


def test_overlap_and_gap_name_the_layers() -> None:
    with pytest.raises(ModelConfigError, match=r"\[4\] are in both"):
        K3Config.from_dict(with_linear(kda_layers=[1, 2, 3, 4]))
    with pytest.raises(ModelConfigError, match=r"\[2\] are in neither"):
        K3Config.from_dict(with_linear(kda_layers=[1, 3]))
    with pytest.raises(
        ModelConfigError, match=r"\[6, 7, 8, 9, 10, 11, 12, 13\] and 9+87 more are in neither"
    ):
        K3Config.from_dict(published(num_hidden_layers=10**12))


@pytest.mark.parametrize("field", ["routed_expert_hidden_size", "moe_intermediate_size"])
def test_mxfp4_needs_whole_groups(field: str) -> None:
    with pytest.raises(ModelConfigError, match=rf"{field} 80 is not a multiple of 32"):
        replace(K3Config.scaled("a"), **{field: 80, "mxfp4": True})


def test_an_unknown_field_is_reported_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert K3Config.from_dict(published(hidden_sise=3)) == K3Config.scaled("a")
    assert "hidden_sise" in caplog.text


def test_names(tmp_path: Path) -> None:
    assert resolve("A") == K3Config.scaled("a")
    assert config_of("full") == K3Config.full()
    (tmp_path / "config.json").write_text(json.dumps(K3Config.scaled("b").to_dict()))
    assert resolve(str(tmp_path)) == tmp_path
    assert config_of(str(tmp_path)) == config_of(str(tmp_path / "config.json")) == K3Config.scaled("b")
    with pytest.raises(ModelConfigError, match="no model is called 'e'"):
        resolve("e")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelConfigError, match=r"no config\.json"):
        resolve(str(tmp_path / "empty"))


def test_config_and_accounting_work_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from k3eval_local.model import accounting, names"
    root = Path(__file__).parents[2] / "local_backend"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(root)}, timeout=60)

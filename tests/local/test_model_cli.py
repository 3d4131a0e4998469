from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from k3eval_harness.cli.app import app
from k3eval_local.checkpoint import fingerprint, load, open_model, save
from k3eval_local.model.decoder import K3Model

RUN = CliRunner()


def k3eval(*arguments: object) -> Result:
    return RUN.invoke(app, ["model", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """The one line of an error that the caller can cure."""
    result = k3eval(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("k3eval: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def made(folder: Path, *options: object) -> Path:
    result = k3eval("init", "--config", "A", "--seed", 5, "--out", folder, *options)
    assert result.exit_code == 0, result.output
    return folder


def ids_file(folder: Path, text: str = "[1, 2, 3, 511]") -> Path:
    (folder / "ids.json").write_text(text)
    return folder / "ids.json"


def test_init_is_the_seeds_model(tmp_path: Path) -> None:
    result = k3eval(
        "init", "--config", "a", "--seed", 5, "--out", tmp_path / "m", "--dtype", "fp32", "--json"
    )
    assert json.loads(result.stdout) == {"path": str(tmp_path / "m"), "weights": "random, seed 5"}
    model = load(tmp_path / "m")
    expected = K3Model(model.config).init_weights(5)
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))


def test_a_checkpoint_of_random_weights_says_so_also_when_converted(tmp_path: Path) -> None:
    folder = made(tmp_path / "m")
    assert k3eval("convert", folder, "--to", "fp32", "--out", tmp_path / "fp32").exit_code == 0
    for where in (folder, tmp_path / "fp32"):
        model, weights = open_model(str(where))
        assert weights == f"random, seed 5 ({fingerprint(where)})"
    save(model, tmp_path / "trained")
    assert open_model(str(tmp_path / "trained"))[1] == fingerprint(tmp_path / "trained")


def test_info_of_a_folder_and_of_the_full_model(tmp_path: Path) -> None:
    found = json.loads(k3eval("info", made(tmp_path / "m"), "--context", 1000, "--json").stdout)
    assert (found["parameters_total"], found["parameters_active"]) == (1_211_500, 801_900)
    assert [row["context"] for row in found["contexts"]] == [1000]
    full = json.loads(k3eval("info", "full", "--cache", "fp8", "--json").stdout)
    assert (full["break_even_tokens"], full["parameters_total"]) == (11_307, 2_779_484_476_000)
    text = k3eval("info", "a").stdout
    assert "1,211,500 parameters" in text
    assert "195 tokens" in text


@torch.no_grad()
def test_logits(tmp_path: Path) -> None:
    folder = made(tmp_path / "m")
    out = tmp_path / "logits.npy"
    result = k3eval("logits", folder, "--ids", ids_file(tmp_path), "--out", out, "--json")
    assert json.loads(result.stdout)["shape"] == [4, 512]
    values = np.load(out)
    assert values.dtype == np.float32
    expected = load(folder)(torch.tensor([[1, 2, 3, 511]]))[0][0]
    np.testing.assert_allclose(values, expected.numpy(), rtol=0, atol=1e-4)
    assert "exists" in refused("logits", folder, "--ids", ids_file(tmp_path), "--out", out)


def test_convert_and_back(tmp_path: Path) -> None:
    folder = made(tmp_path / "m")
    (folder / "tiktoken.model").write_bytes(b"")
    for form in ("mxfp4", "bf16", "fp32"):
        result = k3eval("convert", folder, "--to", form, "--out", tmp_path / form, "--json")
        assert json.loads(result.stdout)["format"] == form
        assert (tmp_path / form / "tiktoken.model").is_file()
    assert load(tmp_path / "mxfp4").config.mxfp4
    one, other = (load(tmp_path / form).state_dict().values() for form in ("m", "fp32"))
    assert all(map(torch.equal, one, other))
    (folder / "tiktoken.model").unlink()
    assert k3eval("convert", folder, "--to", "gguf", "--out", tmp_path / "m.gguf").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("init", "--config", "zz", "--out", "new"), "no model is called 'zz'"),
        (("init", "--config", "full", "--out", "new"), "too many"),
        (("init", "--config", "a", "--out", "m"), "exists"),
        (("info", "nothing"), "no model is called"),
        (("info", "."), "no config.json"),
        (("info", "ids.json"), "model_type"),
        (("logits", "m", "--ids", "none.json", "--out", "new"), "none.json"),
        (("logits", "m", "--ids", "bad.json", "--out", "new"), "not JSON"),
        (("logits", "m", "--ids", "float.json", "--out", "new"), "list of at least one token id"),
        (("logits", "m", "--ids", "empty.json", "--out", "new"), "list of at least one token id"),
        (("logits", "m", "--ids", "large.json", "--out", "new"), "the id 512, outside the vocabulary of 512"),
        (("logits", "m", "--ids", "ids.json", "--out", "no/new"), "no/"),
        (("logits", "cut", "--ids", "ids.json", "--out", "new"), "damaged or truncated"),
        (("convert", "m", "--to", "bf16", "--out", "m"), "exists"),
        (("convert", "none", "--to", "bf16", "--out", "new"), "cannot read none"),
        (("convert", "cut", "--to", "mxfp4", "--out", "new"), "damaged or truncated"),
        (("convert", "cut", "--to", "gguf", "--out", "new"), "damaged or truncated"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    made(tmp_path / "m")
    shard = next(made(tmp_path / "cut").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    texts = {
        "ids": "{}" if arguments[0] == "info" else "[1]",
        "bad": "[",
        "float": "[1.5]",
        "empty": "[]",
        "large": "[512]",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert words in refused(*arguments)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_module_imports_only_typer_and_the_standard_library() -> None:
    code = (
        "import sys; import k3eval_harness.cli.model; "
        "heavy = ('torch', 'numpy', 'rich.table', 'safetensors', 'k3eval_local'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    path = f"{root}:{root / 'harness'}:{root / 'local_backend'}"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": path}, capture_output=True, timeout=60
    )
    assert found.stdout.strip() == b"[]"

"""Bad input to the training commands: one line on stderr, exit code 2, nothing left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from k3eval_local.errors import CheckpointError
from k3eval_local.model import K3Model
from k3eval_local.tokenizer import Tokenizer
from k3eval_local.train import __main__ as training
from k3eval_local.train import evaluate, loop, vocabulary
from k3eval_local.train.command import folder, one_line
from k3eval_local.train.forward import Precision
from k3eval_local.train.loop import Inputs, Run
from k3eval_local.train.settings import PRESETS

ROOT = Path(__file__).parents[2]
Main = Callable[[list[str]], None]


def _line(**changes: object) -> str:
    word = random.Random(3).choice(("harbor", "panel"))
    messages = [{"role": "user", "content": f"Say {word}"}, {"role": "assistant", "content": word}]
    return json.dumps({"messages": messages} | changes) + "\n"


def _messages(*messages: dict[str, object]) -> bytes:
    return json.dumps({"messages": messages}).encode()


CALL = {"id": "c", "function": {"name": "bash", "arguments": "5"}}
BAD_LINES = [
    pytest.param(b'{"messages": [{"role": "us', "cut or no JSON", id="cut"),
    pytest.param(b"junk", "cut or no JSON", id="junk"),
    pytest.param(b"[1]", "not a JSON object", id="list"),
    pytest.param(b"[" * 100_000, "no usable JSON", id="deep"),
    pytest.param(b'{"messages": ' + b"9" * 5000 + b"}", "no usable JSON", id="digits"),
    pytest.param(b'{"messages": 5}', "no conversation", id="number"),
    pytest.param(b"{}", "no conversation", id="object"),
    pytest.param(_messages({"role": "user", "content": 5}), "no conversation", id="content"),
    pytest.param(b'{"messages": "\xff\xfe"}', "not UTF-8", id="latin"),
]
ONLY_TOKENS = [
    pytest.param(b'{"messages": []}', "no message", id="empty"),
    pytest.param(_messages({"role": "user", "content": "a"}), "no assistant message", id="no-answer"),
    pytest.param(_line(untrained=[1]).encode(), "no assistant message", id="untrained"),
    pytest.param(_messages({"role": "tool", "tool_call_id": "x"}), "answers no call", id="tool"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "tiktoken.model"
    Tokenizer.for_vocab(600).save(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "ep.jsonl"
    path.write_text(_line() * 40, encoding="utf-8")
    return path


def _refused(main: Main, arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("k3eval: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


def _train(data: Path | str, ranks: Path | str, out: Path | str, *more: str) -> list[str]:
    return ["--config", "micro", "--data", str(data), "--ranks", str(ranks), "--out", str(out), *more]


@pytest.mark.parametrize(("line", "said"), [*BAD_LINES, *ONLY_TOKENS])
def test_bad_data_are_refused_with_their_line(
    line: bytes, said: str, data: Path, ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.write_bytes(data.read_bytes() + line + b"\n")
    told = _refused(training.main, _train(data, ranks, tmp_path / "a" / "out"), capsys)
    assert f"{data}, line 41: " in told
    assert said in told
    assert not (tmp_path / "a").exists()
    told = _refused(evaluate.main, ["--model", "a", "--data", str(data)], capsys)
    assert said in told


@pytest.mark.parametrize(
    ("lines", "said"),
    [(0, "holds 0 conversations"), (32, "at least 33")],
)
def test_too_few_conversations_say_how_many_are_needed(
    lines: int, said: str, data: Path, ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.write_text(_line() * lines)
    assert said in _refused(training.main, _train(data, ranks, tmp_path / "out"), capsys)
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_read_are_named(
    data: Path, ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, none, junk = tmp_path / "out", tmp_path / "none", tmp_path / "junk"
    junk.write_bytes(b"\xff no ranks\n")
    for wrong, reason in ((none, "No such file"), (tmp_path, "Is a directory")):
        for main, arguments in (
            (training.main, _train(wrong, ranks, out)),
            (evaluate.main, ["--model", "a", "--data", str(wrong)]),
            (vocabulary.main, ["--words", str(data), "--data", str(wrong), "--out", str(out)]),
        ):
            told = _refused(main, arguments, capsys)
            assert f"cannot read --data {wrong}: {reason}" in told
    for wrong in (none, tmp_path, junk, data):
        assert str(wrong) in _refused(training.main, _train(data, wrong, out), capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    "options",
    [
        *(["--threads", value] for value in ("0", "-1", "1025", "x")),
        *(["--seed", value] for value in ("-1", str(2**63), "1.5")),
        *(["--steps", value] for value in ("0", "-3", "")),
        *(["--hold", value] for value in ("0", "-1", "121")),
        ["--steps", "6", "--hold", "7"],
        ["--config", "huge"],
        ["--what"],
    ],
    ids=" ".join,
)
def test_options_out_of_range_are_refused(
    options: list[str], data: Path, ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _refused(training.main, _train(data, ranks, tmp_path / "out", *options), capsys)
    assert any(option in told for option in options if option)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["/proc/z", "file", "file/under", "used"])
def test_a_place_that_cannot_be_written_is_refused_first(
    out: str, ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "used" / "checkpoint").mkdir(parents=True)
    (tmp_path / "used" / "checkpoint" / "config.json").write_text("mine")
    told = _refused(training.main, _train("none.jsonl", ranks, tmp_path / out), capsys)
    assert str(tmp_path / out) in told
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("name", ["log.jsonl", "state.pt"])
def test_a_folder_in_the_place_of_a_file_is_refused(
    name: str, data: Path, ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    assert f"{name} is a folder" in _refused(training.main, _train(data, ranks, tmp_path), capsys)


def test_resuming_from_nothing_is_refused(
    data: Path, ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _refused(training.main, _train(data, ranks, tmp_path / "out", "--resume"), capsys)
    assert "there is no state.pt" in told
    assert not (tmp_path / "out").exists()


def _state(out: Path, vocabulary_size: int, step: int) -> Path:
    tokenizer = Tokenizer.for_vocab(vocabulary_size)
    preset = PRESETS["micro"]
    run = Run(
        K3Model(preset.config(tokenizer.vocab_size)),
        tokenizer,
        Inputs([], []),
        preset.schedule,
        seed=0,
        out=out,
        precision=Precision(torch.bfloat16),
    )
    run.step = step
    run.save()
    return out / "state.pt"


def _cut(path: Path) -> None:
    _state(path.parent, 600, 2)
    path.write_bytes(path.read_bytes()[:-5000])


def _number(path: Path) -> None:
    torch.save({"model": {}, "optimizers": {}, "step": "one", "tokens": -1}, path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_cut, "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.write_bytes(b"junk\n" * 99), "damaged"),
        (lambda path: torch.save([1], path), "damaged"),
        (lambda path: torch.save({"model": {}}, path), "damaged"),
        (_number, "damaged"),
        (lambda path: _state(path.parent, 700, 2), "another configuration"),
        (lambda path: _state(path.parent, 600, 121), "is at step 121"),
    ],
    ids=["cut", "empty", "junk", "list", "keys", "types", "vocabulary", "step"],
)
def test_a_state_that_does_not_fit_is_refused(
    spoil: Callable[[Path], object],
    said: str,
    data: Path,
    ranks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    spoil(out / "state.pt")
    before = (out / "state.pt").read_bytes()
    told = _refused(training.main, _train(data, ranks, out, "--resume"), capsys)
    assert said in told
    assert str(out / "state.pt") in told
    assert (out / "state.pt").read_bytes() == before
    assert [path.name for path in out.iterdir()] == ["state.pt"]


def test_a_save_that_fails_leaves_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _state(tmp_path, 600, 1)
    before = path.read_bytes()

    def full(state: object, target: Path) -> NoReturn:
        target.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed\nwriting file")

    monkeypatch.setattr(loop.torch, "save", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*state.pt"):
        _state(tmp_path, 600, 2)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "k4"], "no model is called 'k4'"),
        (["--turns", "0"], "at least 1"),
        (["--threads", "0"], "1 to 1024"),
        (["--json", "/proc"], "is a folder"),
        (["--json", "none/result.json"], "there is no folder"),
        (["--json", "/proc/z"], "/proc/z"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_evaluate_refuses_bad_options(
    options: list[str], said: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.write_text("" if options[-1] != "/proc/z" else _line())
    if options[-1] == "/proc/z":  # known only when it is written: the table stands above the error
        with pytest.raises(SystemExit) as ended:
            evaluate.main(["--model", "a", "--data", str(data), *options])
        assert ended.value.code == 2
        assert capsys.readouterr().err == "k3eval: cannot use /proc/z: No such file or directory\n"
    else:
        assert said in _refused(evaluate.main, ["--model", "a", "--data", str(data), *options], capsys)


def test_evaluate_refuses_empty_data_and_folders_that_are_no_model(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.write_text("\n")
    arguments = ["--data", str(data), "--model"]
    assert "holds no conversation" in _refused(evaluate.main, [*arguments, "a"], capsys)
    assert "no config.json" in _refused(evaluate.main, [*arguments, str(tmp_path)], capsys)
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in _refused(evaluate.main, [*arguments, str(tmp_path)], capsys)


@pytest.mark.parametrize(("line", "said"), BAD_LINES)
def test_vocabulary_refuses_bad_data_with_their_line(
    line: bytes, said: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, out = tmp_path / "words", tmp_path / "ranks"
    words.write_text("harbor panel")
    data.write_bytes(data.read_bytes() + line)
    told = _refused(vocabulary.main, ["--words", str(words), "--data", str(data), "--out", str(out)], capsys)
    assert f"{data}, line 41: " in told
    assert said in told
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "lines", "options", "said"),
    [
        (b"", _line(), [], "holds no name"),
        (b"\xff", _line(), [], "is not UTF-8"),
        (None, _line(), [], "No such file"),
        (b"harbor", "", [], "holds no conversation"),
        (b"harbor", _messages({"role": "assistant", "tool_calls": [CALL]}).decode(), [], "line 1"),
        (b"harbor", _messages({"role": "user", "content": "\ud800"}).decode(), [], "line 1"),
        (b"harbor", _line(), ["--least", "0"], "at least 1"),
        (b"harbor", _line(), ["--out", "/proc"], "is a folder"),
        (b"harbor", _line(), ["--out", "none/ranks"], "there is no folder none"),
        (b"harbor", _line(), ["--out", "/proc/z"], "cannot use /proc/z"),
    ],
)
def test_vocabulary_refuses_bad_input(
    words: bytes | None,
    lines: str,
    options: list[str],
    said: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names, out = tmp_path / "words", tmp_path / "ranks"
    if words is not None:
        names.write_bytes(words)
    data.write_text(lines)
    arguments = ["--words", str(names), "--data", str(data), "--out", str(out), *options]
    assert said in _refused(vocabulary.main, arguments, capsys)
    assert not out.exists()


def test_ctrl_c_says_where_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    for hint, said in ((str, ""), (lambda: "; go on", "; go on")):
        with pytest.raises(SystemExit) as ended, one_line(hint):
            raise KeyboardInterrupt
        assert ended.value.code == 130
        assert capsys.readouterr().err == f"k3eval: interrupted{said}\n"


def _stopped_in(out: Path, kept: str) -> None:
    with folder(out):
        assert out.is_dir()
        if kept:
            (out.parent / kept).write_text("mine")
        raise KeyboardInterrupt


@pytest.mark.parametrize("kept", ["", "kept"])
def test_folders_that_were_made_go_again_unless_they_hold_something(kept: str, tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with pytest.raises(KeyboardInterrupt):
        _stopped_in(out, kept)
    assert out.parent.exists() == bool(kept)
    assert not out.exists()


def test_standard_input_that_is_no_utf8_is_refused(
    data: Path, ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.write_bytes(_line().encode() + b"\xff\n")
    own = os.dup(0)
    try:
        with data.open("rb") as file:
            os.dup2(file.fileno(), 0)
        told = _refused(training.main, _train("-", ranks, tmp_path / "out"), capsys)
    finally:
        os.dup2(own, 0)
        os.close(own)
    assert told == "k3eval: standard input, line 2: not UTF-8; write the file as UTF-8\n"


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join((str(ROOT / "local_backend"), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, "-m", "k3eval_local.train", *arguments],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
    )


def test_the_process_answers_a_wrong_option_at_once() -> None:
    out, err = _start(["--data", "-", "--ranks", "x", "--out", "x", "--steps", "0"]).communicate(timeout=60)
    assert out == b""
    assert err == b"k3eval: argument --steps: must be at least 1, not 0\n"


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_130(data: Path, ranks: Path, tmp_path: Path) -> None:
    process = _start(_train(data, ranks, tmp_path / "out"))
    try:
        assert process.stdout is not None
        assert b"schedule" in process.stdout.readline()  # training starts now
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == b"k3eval: interrupted, nothing was saved yet\n"
    assert not (tmp_path / "out").exists()

"""The bundled checkpoint is what its card says: small, greedy, able to repair fresh generated projects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from k3eval_harness.task.mini.episodes import SHAPES, episodes
from k3eval_local.checkpoint import load
from k3eval_local.errors import CheckpointError
from k3eval_local.model.names import resolve
from k3eval_local.tokenizer import Tokenizer
from k3eval_local.train.measure import pass_rate, replay
from k3eval_local.train.render import render, share_openings

SERIES: Final = 4001
COUNT: Final = 24
REQUIRED: Final = 0.8
"""Of 24 fixed fresh projects; the measured rate on 300 others is in the model card."""


@pytest.fixture(scope="module")
def folder() -> Path:
    found = resolve("k3-nano")
    assert isinstance(found, Path)
    return found


def test_the_folder_is_small_and_complete(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tiktoken.model", "README.md", "LICENSE"} <= names
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 20_000_000
    assert json.loads((folder / "generation_config.json").read_text()) == {"do_sample": False}


@pytest.mark.slow
def test_it_repairs_fresh_projects(folder: Path) -> None:
    model = load(folder)
    tokenizer = Tokenizer.for_checkpoint(folder, model.config.vocab_size)
    examples = [render(record, tokenizer) for record in episodes(SERIES, COUNT, SHAPES["plain"])]
    scores = replay(model, share_openings(examples, least=2), pad=tokenizer.control.pad)
    assert pass_rate(scores) >= REQUIRED
    assert all(score.turns[0] for score in scores)


def test_a_truncated_copy_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        content = path.read_bytes()
        (tmp_path / path.name).write_bytes(content[:-1000] if path.suffix == ".safetensors" else content)
    with pytest.raises(CheckpointError, match="model-00001-of-00001"):
        load(tmp_path)

"""Without a temperature in the request, the checkpoint's generation_config.json decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3eval_local.protocol.dialects.base import DialectOptions
from k3eval_local.protocol.dialects.vllm import VllmDialect
from k3eval_local.server.lifecycle import LaunchError, _temperature


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("config", "expected"), [(None, 1.0), ({"do_sample": False}, 0.0), ({"temperature": 0.6}, 0.6), ({}, 1.0)]
)
def test_the_checkpoint_sets_the_default(
    checkpoint: Path, config: dict[str, object] | None, expected: float
) -> None:
    if config is not None:
        (checkpoint / "generation_config.json").write_text(json.dumps(config))
    assert _temperature(str(checkpoint)) == expected


@pytest.mark.parametrize("text", ["[", '{"temperature": "NaN"}', '{"temperature": -1}'])
def test_an_unusable_file_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / "generation_config.json").write_text(text)
    with pytest.raises(LaunchError, match="generation_config"):
        _temperature(str(checkpoint))


def test_a_request_overrides_it() -> None:
    dialect = VllmDialect(DialectOptions(temperature=0.0))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert dialect.read_bytes(json.dumps(body).encode()).temperature == 0.0
    assert dialect.read_bytes(json.dumps(body | {"temperature": 0.7}).encode()).temperature == 0.7

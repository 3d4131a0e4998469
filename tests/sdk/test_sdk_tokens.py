from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3eval import ConfigError, Message, Reasoning, ToolCall, ToolSpec
from k3eval import tokens as module
from k3eval.tokens import RANK_FILE_ENV, TokenCount, count_locally, count_texts


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Counting must never download: whoever opens a socket here fails the test."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("counting tokens opened a socket")

    monkeypatch.delenv(RANK_FILE_ENV, raising=False)
    monkeypatch.setattr(socket, "socket", refuse)
    yield
    module._from_rank_file.cache_clear()


def rank_file(path: Path, extra: list[bytes]) -> Path:
    ranks = [bytes([i]) for i in range(256)] + extra
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(ranks)))
    return path


def test_published_counts_with_the_offline_vocabulary() -> None:
    assert count_texts(["Hello world"]) == TokenCount(2, "vocabulary", 0.10)
    chinese = count_texts(["你好世界"])
    assert chinese.lower_bound <= 2 <= chinese.upper_bound
    # published for a conversation of one assistant turn "hello" at effort high: 99
    assert count_locally([Message.assistant("hello")]).tokens == 99


def test_a_rank_file_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rank_file(tmp_path / "k3.ranks", [b"he", b"ll", b"hell", b"hello"])
    monkeypatch.setenv(RANK_FILE_ENV, str(path))
    assert count_texts(["hello hello", "你"]) == TokenCount(1 + 2 + 3, "rank file", 0.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"nonsense", "line 1"), (b"!!! 5\n", "line 1"), (b"YQ== 0\n", "no rank file"), (b"", "no rank file")],
)
def test_bad_rank_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    monkeypatch.setenv(RANK_FILE_ENV, str(path))
    with pytest.raises(ConfigError, match=said):
        count_texts(["x"])


def test_an_absent_rank_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_FILE_ENV, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=RANK_FILE_ENV):
        count_texts(["x"])


def test_without_a_vocabulary_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    module._offline_vocabulary.cache_clear()
    monkeypatch.setattr(tiktoken, "list_encoding_names", list)
    try:
        found = count_texts(["a" * 360])
        assert found == TokenCount(100, "bytes", 0.9)
        assert found.lower_bound < 360 / 5.5
        assert found.upper_bound > 360 / 1.9
    finally:
        module._offline_vocabulary.cache_clear()


@pytest.mark.parametrize("text", ["a" * 600_000, " " * 300_000, "漢" * 60_000, "x y\n" * 200_000, "\ud83d"])
def test_long_and_odd_texts(text: str) -> None:
    assert 0 < count_texts([text]).tokens <= len(text.encode("utf-8", "surrogatepass"))


@given(st.text(max_size=200))
def test_a_token_has_at_least_one_byte(text: str) -> None:
    assert count_texts([text]).tokens <= len(text.encode("utf-8", "surrogatepass"))


def test_everything_in_a_prompt_counts() -> None:
    spec = ToolSpec("f", "does", {"type": "object", "properties": {"a": {"type": "string"}}})
    steps = [
        [Message.user("x")],
        [Message.user("x"), Message.user("y")],
        [Message.user("x"), Message.assistant("y")],
        [Message.user("x"), Message.assistant("y", reasoning=Reasoning("a long thought"))],
        [
            Message.user("x"),
            Message.assistant(
                "y", reasoning=Reasoning("a long thought"), tool_calls=[ToolCall("i", "f", "{}")]
            ),
        ],
    ]
    counts = [count_locally(step).tokens for step in steps]
    assert counts == sorted(set(counts))
    assert count_locally(steps[0], [spec]).tokens > counts[0] + 20

"""Ordinary text stays ordinary, nothing is lost, rank files and sizes fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3eval_local.tokenizer import (
    CONTROL_IDS,
    MAX_CHARS,
    MAX_RUN,
    Tokenizer,
    TokenizerError,
    control_name,
    guarded_pieces,
)

SMALL = Tokenizer.for_vocab(2048)


@given(st.text())
def test_decode_inverts_encode(text: str) -> None:
    assert SMALL.decode(SMALL.encode(text)) == text


@given(st.sampled_from([control_name(offset) for offset in range(CONTROL_IDS)]), st.text(max_size=5))
def test_a_spelled_control_token_stays_text(name: str, around: str) -> None:
    ids = SMALL.encode(around + name + around)
    assert not any(SMALL.is_control(token) for token in ids)
    assert SMALL.decode(ids) == around + name + around


@pytest.mark.parametrize("size", [512, 2048, 8192, 32768])
def test_built_in_vocabularies_have_exactly_the_size_and_are_stable(size: int) -> None:
    tokenizer = Tokenizer.for_vocab(size)
    again = Tokenizer.for_vocab(size)
    text = "def test_add(self):\n    return 12345 + self.value  # 你好 naïve\r\n\t\n"
    ids = tokenizer.encode(text)
    assert tokenizer.vocab_size == size
    assert max(ids) < tokenizer.n_ranks == size - CONTROL_IDS
    assert tokenizer.decode(ids) == text
    assert again.encode(text) == ids


def test_larger_vocabularies_need_fewer_tokens() -> None:
    text = "the tests of the harness run in containers " * 20
    lengths = [len(Tokenizer.for_vocab(size).encode(text)) for size in (512, 2048, 8192, 32768)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0] / 1.4


@pytest.mark.parametrize("size", [0, 256, 511])
def test_too_small_a_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(TokenizerError, match="512"):
        Tokenizer.for_vocab(size)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", " world"]),
        ("don't HTTPServer", ["don't", " HTTPServer"]),
        ("12345", ["123", "45"]),
        ("a  b\n\nc", ["a", " ", " b", "\n\n", "c"]),
        ("你好world", ["你好", "world"]),
        ("x += 1;\n", ["x", " +=", " ", "1", ";\n"]),
    ],
)
def test_pre_tokeniser_splits_as_described(text: str, pieces: list[str]) -> None:
    # In a vocabulary that has every piece whole, each piece is one token.
    ranks = {bytes((value,)): value for value in range(256)}
    for piece in pieces:
        ranks.setdefault(piece.encode(), len(ranks))
    tokenizer = Tokenizer(ranks)
    assert [tokenizer.token_bytes(token).decode() for token in tokenizer.encode(text)] == pieces


@pytest.mark.parametrize(
    "text", ["x" * (MAX_RUN + 7), " " * (3 * MAX_RUN), "ab " * (MAX_CHARS // 2), "", "x" * MAX_RUN]
)
def test_guard_rails_bound_every_piece_and_lose_nothing(text: str) -> None:
    pieces = list(guarded_pieces(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= MAX_CHARS for piece in pieces)
    assert all(run <= MAX_RUN for piece in pieces for run in _runs(piece))


def _runs(piece: str) -> list[int]:
    longest, current, kind = [0], 0, None
    for char in piece:
        current = current + 1 if char.isspace() == kind else 1
        kind = char.isspace()
        longest.append(current)
    return longest


def test_rank_file_round_trip(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "tiktoken.model")
    loaded = Tokenizer.for_checkpoint(tmp_path, 2048)
    assert loaded.encode("ranks in a file") == SMALL.encode("ranks in a file")
    assert loaded.control == SMALL.control


def test_rank_file_of_another_size_is_refused(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "tiktoken.model")
    with pytest.raises(TokenizerError, match="2048 ids, the model has 512"):
        Tokenizer.for_checkpoint(tmp_path, 512)


def test_the_users_rank_file_wins(tmp_path: Path) -> None:
    mine = tmp_path / "mine.model"
    ranks = {bytes((value,)): value for value in range(256)} | {b"zz": 256}
    Tokenizer(ranks).save(mine)
    SMALL.save(tmp_path / "tiktoken.model")
    assert Tokenizer.for_checkpoint(tmp_path, 513, mine).encode("zz") == [256]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"AA== 0\nnot a pair here\n", "line 2"),
        (b"AA== 0\n!!!! 1\n", "line 2"),
        (b"AA== 0\nAQ== 5\n", "without a gap"),
        (b"AA== 0\n", "255 of the 256 single bytes"),
    ],
)
def test_broken_rank_files_say_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_file(path)


def test_missing_rank_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot read the rank file"):
        Tokenizer.from_file(tmp_path / "absent")


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(IndexError, match="2048"):
        SMALL.token_bytes(2048)

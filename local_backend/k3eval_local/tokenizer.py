"""K3's tokenizer: tiktoken BPE ranks with a block of 256 control ids at the top of the vocabulary.

Ordinary text never becomes a control id: :meth:`Tokenizer.encode` has no special tokens at all, and the
protocol places control ids itself. A checkpoint folder brings its ranks in ``tiktoken.model``; the scaled
random-weight configurations get a small built-in vocabulary of exactly their size, the same on every machine.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import tiktoken

from k3eval_local.errors import LocalError

RANK_FILE = "tiktoken.model"
CONTROL_IDS = 256
"""Size of the control block; it always sits above the BPE ranks."""

MAX_CHARS = 400_000
"""Longest text handed to the BPE at once (spec section 5)."""
MAX_RUN = 25_000
"""Longest run of only whitespace, or of no whitespace, handed to the BPE at once (spec section 5)."""

_CONTROL_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"\p{Han}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The pre-tokeniser: the o200k alternatives with a branch for Han runs in front (spec section 5)."""

_RUN = re.compile(rf"\s{{{MAX_RUN}}}|\S{{{MAX_RUN}}}")
_COMMON = " etaoinshrdlucmfwygpbvkxqjz_().,:=\"'0123456789\n-ETAOINSHRDLUCMFWYGPBVKXQJZ/[]{}#<>*+"


class TokenizerError(LocalError, ValueError):
    """A rank file that cannot be used, or a vocabulary size that cannot be built."""


@dataclass(frozen=True, slots=True)
class Control:
    """Ids of the control tokens that the chat protocol uses."""

    end_of_msg: int
    open: int
    close: int
    sep: int
    pad: int


class Tokenizer:
    """BPE over ``ranks`` plus the control block.

    ``ranks`` maps token bytes to ids ``0 .. len(ranks) - 1`` and holds all 256 single bytes, so every text
    can be encoded. The vocabulary has ``len(ranks) + 256`` ids.
    """

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise TokenizerError("the ranks of a vocabulary must be 0, 1, 2, ... without a gap")
        missing = sum(bytes((value,)) not in ranks for value in range(256))
        if missing:
            raise TokenizerError(
                f"the vocabulary lacks {missing} of the 256 single bytes; use a byte-level rank file"
            )
        self._encoding = tiktoken.Encoding(
            "k3", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens={}, explicit_n_vocab=len(ranks)
        )
        self.n_ranks = len(ranks)
        self.vocab_size = self.n_ranks + CONTROL_IDS
        self._bytes = [b""] * self.n_ranks
        for token, rank in ranks.items():
            self._bytes[rank] = token
        base = self.n_ranks
        self.control = Control(
            end_of_msg=base + 2, open=base + 3, close=base + 4, sep=base + 5, pad=base + 255
        )

    @classmethod
    def for_vocab(cls, vocab_size: int) -> Tokenizer:
        """The built-in vocabulary of exactly ``vocab_size`` ids: bytes, then short common strings."""
        wanted = vocab_size - CONTROL_IDS
        if wanted < 256:
            raise TokenizerError(
                f"a vocabulary needs at least 512 ids (256 bytes and 256 control ids), not {vocab_size}"
            )
        tokens = {bytes((value,)): value for value in range(256)}
        for token in _short_strings():
            if len(tokens) == wanted:
                return cls(tokens)
            tokens.setdefault(token, len(tokens))
        raise AssertionError("the stream of short strings has no end")

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a tiktoken rank file: one ``base64 rank`` pair a line."""
        ranks: dict[bytes, int] = {}
        number = 0
        try:
            for number, line in enumerate(path.read_bytes().splitlines(), start=1):  # noqa: B007 - for the error
                if line:
                    token, rank = line.split()
                    ranks[base64.b64decode(token, validate=True)] = int(rank)
        except OSError as error:
            raise TokenizerError(f"cannot read the rank file {path}: {error.strerror}") from error
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(f"{path}, line {number}: expected 'base64 rank'") from error
        return cls(ranks)

    @classmethod
    def for_checkpoint(cls, folder: Path | None, vocab_size: int, rank_file: Path | None = None) -> Tokenizer:
        """The tokenizer that belongs to a model of ``vocab_size``.

        ``rank_file`` (the user's own) wins over the checkpoint's ``tiktoken.model``; without either, the
        built-in vocabulary is used. A rank file of another size is an error.
        """
        path = rank_file if rank_file is not None else folder / RANK_FILE if folder is not None else None
        if path is None or (rank_file is None and not path.is_file()):
            return cls.for_vocab(vocab_size)
        tokenizer = cls.from_file(path)
        if tokenizer.vocab_size != vocab_size:
            raise TokenizerError(
                f"{path} makes a vocabulary of {tokenizer.vocab_size} ids, the model has {vocab_size}; "
                f"give the rank file that the model was trained with"
            )
        return tokenizer

    def save(self, path: Path) -> None:
        """Write the ranks as a tiktoken rank file."""
        lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self._bytes))
        path.write_bytes(b"".join(lines))

    def encode(self, text: str) -> list[int]:
        """Ordinary BPE ids of ``text``; a spelled control token stays text."""
        ids: list[int] = []
        for piece in guarded_pieces(text):
            ids.extend(self._encoding.encode_ordinary(piece))
        return ids

    def is_control(self, token: int) -> bool:
        """Whether ``token`` belongs to the control block."""
        return token >= self.n_ranks

    def token_bytes(self, token: int) -> bytes:
        """Bytes of an ordinary token, or the UTF-8 name of a control token.

        Raises:
            IndexError: ``token`` is outside the vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise IndexError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        return self._bytes[token] if token < self.n_ranks else control_name(token - self.n_ranks).encode()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; control tokens by name, broken UTF-8 as U+FFFD."""
        return b"".join(self.token_bytes(token) for token in ids).decode("utf-8", "replace")


def control_name(offset: int) -> str:
    """Name of the control token ``offset`` places above the last rank."""
    return _CONTROL_NAMES.get(offset, f"<|reserved_{offset}|>")


def guarded_pieces(text: str) -> Iterator[str]:
    """Split ``text`` so that no piece is longer than the guard rails allow; joined they are ``text``."""
    for start in range(0, len(text), MAX_CHARS):
        chunk = text[start : start + MAX_CHARS]
        last = 0
        for match in _RUN.finditer(chunk):
            yield chunk[last : match.end()]
            last = match.end()
        if last < len(chunk):
            yield chunk[last:]


def _short_strings() -> Iterator[bytes]:
    """Every string over the common characters by length (from 2), the commonest characters first.

    Each longer string extends a shorter one that came before it, so BPE can always reach it by merges.
    """
    previous = [char.encode() for char in _COMMON]
    for _ in count():
        longer: list[bytes] = []
        # Anti-diagonals of (string, character) put pairs of two common parts before all others.
        for total in range(len(previous) + len(_COMMON) - 1):
            for index in range(max(0, total - len(_COMMON) + 1), min(total + 1, len(previous))):
                token = previous[index] + _COMMON[total - index].encode()
                longer.append(token)
                yield token
        previous = longer

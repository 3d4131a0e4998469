"""Build a rank file in which a name is cut into the same tokens wherever it occurs.

    python -m k3eval_local.train.vocabulary --words words.txt --data episodes.jsonl --out tiktoken.model

Names (``--words``) and common words get merges that end in one token, and no token joins a name with the
character before it. Other pieces that the data repeats (a space and ``the``, ``.get``) become tokens that
only match as whole pieces. Numbers 0 to 999 are one token each. The control block is not in the file: the
tokenizer puts it above the last rank.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import regex

from k3eval_local.command import Parser, fail, whole
from k3eval_local.protocol.options import EFFORTS, effort_body
from k3eval_local.tokenizer import PATTERN, RANK_FILE, Tokenizer
from k3eval_local.train.command import check_target, one_line, opened
from k3eval_local.train.render import DataError, read_records

_PIECES = regex.compile(PATTERN, regex.V1)
_WORD = regex.compile(r"[A-Za-z]{2,}")
_PROTOCOL_PIECES = (
    *("message", "think", "response", "tools", "call", "argument", "json"),
    *(" role", " type", " index", " key", " tool", " name", '="', '"'),
    *("system", "user", "assistant", "tool", "string", "number", "boolean", "null", "object", "array"),
)


def build_ranks(names: Sequence[str], texts: Iterable[str], *, least: int = 8) -> dict[bytes, int]:
    """Ranks for ``names`` and for the pieces that occur at least ``least`` times in ``texts``."""
    counts: Counter[str] = Counter(dict.fromkeys(_PROTOCOL_PIECES, least))
    for text in texts:
        counts.update(piece.rstrip("\r\n") or piece for piece in _PIECES.findall(text))
    common = [
        piece
        for piece, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        if count >= least
    ]
    words = sorted({*names, *(piece for piece in common if _WORD.fullmatch(piece))})
    tokens = [bytes((value,)) for value in range(256)] + merges(words)
    tokens += [f"{number:0{width}d}".encode() for width in (2, 3) for number in range(10**width)]
    known = set(names) | {word for word in words if len(word) < 4}
    for piece in common:
        letters = _WORD.search(piece)
        if letters is None:  # punctuation or space: every beginning too, so that BPE can reach it
            tokens += [piece.encode()[:end] for end in range(2, len(piece.encode()) + 1)]
        elif letters.group() == piece[1:] and piece[1:] not in known:
            tokens.append(piece.encode())
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def merges(words: Sequence[str]) -> list[bytes]:
    """Tokens of the byte-pair merges that make each of ``words`` one token, commonest pair first."""
    spelled = [[bytes((value,)) for value in word.encode()] for word in words]
    made: list[bytes] = []
    while True:
        pairs = Counter(pair for parts in spelled for pair in itertools.pairwise(parts))
        if not pairs:
            return made
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        made.append(left + right)
        for parts in spelled:
            at = 0
            while at < len(parts) - 1:
                if parts[at] == left and parts[at + 1] == right:
                    parts[at : at + 2] = [left + right]
                at += 1


def texts_of(path: Path) -> Iterator[str]:
    """Every string of the conversations in a JSONL file, and the protocol's own texts.

    Raises:
        DataError: a line is no conversation, or there is none.
    """
    yield from (effort_body(effort) for effort in EFFORTS)
    empty = True
    with opened(str(path)) as lines:
        for number, record in read_records(lines, str(path)):
            empty = False
            try:
                yield from _strings(record)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
                raise DataError(f"{path}, line {number}: no conversation: {error!r}") from error
    if empty:
        raise DataError(f"--data {path} holds no conversation; at least 1 is needed")


def _strings(record: Mapping[str, Any]) -> list[str]:
    texts = [json.dumps(record.get("tools", []), separators=(",", ":"), sort_keys=True)]
    for message in record["messages"]:
        for call in message.get("tool_calls") or ():
            texts += map(str, json.loads(call["function"]["arguments"]).values())
        texts += filter(None, (message.get("content"), message.get("reasoning_content")))
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not a text")
        text.encode()  # half a surrogate pair has no bytes
    return texts


def _names(path: Path) -> list[str]:
    try:
        names = path.read_text(encoding="utf-8").split()
    except OSError as error:
        fail(f"cannot read --words {path}: {error.strerror}; give a text file of names")
    except UnicodeDecodeError:
        fail(f"--words {path} is not UTF-8; write the file as UTF-8")
    return names or fail(f"--words {path} holds no name; give at least one")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the rank file and say how large the vocabulary is."""
    parser = Parser(prog="k3eval_local.train.vocabulary", description="Build a rank file.")
    parser.add_argument("--words", type=Path, required=True, help="names, one a line")
    parser.add_argument("--data", type=Path, required=True, help="conversations, one JSON object a line")
    parser.add_argument("--out", type=Path, default=Path(RANK_FILE), help="rank file to write")
    parser.add_argument("--least", type=whole(1), default=8, help="occurrences from which a piece is a token")
    options = parser.parse_args(arguments)
    with one_line():
        check_target("--out", options.out)
        tokenizer = Tokenizer(build_ranks(_names(options.words), texts_of(options.data), least=options.least))
        tokenizer.save(options.out)
    print(f"{options.out}: {tokenizer.n_ranks} ranks, vocabulary {tokenizer.vocab_size}")  # noqa: T201  # command


if __name__ == "__main__":
    main()

"""Prompts of an exact length in a model's own tokens, each unique from its first line on.

The caller gives the counter (a host's token-count endpoint, or an estimate); what the model then really
read is taken from the reply's usage, never from here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from k3eval_harness.decode.corpus import Corpus
from k3eval_harness.errors import UsageError

MAX_CONTEXT = 16 * 1024 * 1024
"""Longest context that can be asked for, in tokens: 16 times the longest of K3."""

MAX_PROBES = 40
"""Counts asked for per prompt at most; five to eight are usual."""

TASK = (
    "\n\nAbove is an excerpt of a library's source code. Write a detailed review of it: go through it "
    "function by function, describe what each does, and do not stop early.\n"
)
FILLER = " a"
"""One token in the usual vocabularies; tops a prompt up when no cut has the exact length."""


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A user message and what the counter says of its length."""

    text: str
    tokens: int
    source_chars: int


def parse_contexts(text: str) -> tuple[int, ...]:
    """Read ``4k,32k`` as token counts; ``1k`` is 1,024 and ``1m`` is 1,048,576.

    Raises:
        UsageError: an entry that is no positive whole number with an optional ``k`` or ``m``, or is more
            than ``MAX_CONTEXT``.
    """
    contexts: list[int] = []
    for entry in text.split(","):
        number = entry.strip().lower()
        scale = {"k": 1024, "m": 1024 * 1024}.get(number[-1:], 1)
        digits = number[:-1] if scale > 1 else number
        if not (digits.isascii() and digits.isdigit()) or not digits.strip("0"):
            raise UsageError(
                f"--contexts: {entry.strip()[:40]!r} is no length; write for example 4k,32k (1k = 1024)"
            )
        size = digits.lstrip("0")
        # int() itself refuses thousands of digits
        if len(size) > len(str(MAX_CONTEXT)) or int(size) * scale > MAX_CONTEXT:
            raise UsageError(f"--contexts: {entry.strip()[:40]!r} is more than {MAX_CONTEXT} tokens")
        contexts.append(int(size) * scale)
    return tuple(sorted(set(contexts)))


def fit_prompt(
    corpus: Corpus,
    target: int,
    count: Callable[[str], int],
    rng: random.Random,
    nonce: str,
    chars_per_token: float = 3.0,
) -> FittedPrompt:
    """A prompt of ``target`` tokens: the nonce's line, a cut of the corpus from a random place, the task.

    ``count`` must be of the whole request (chat template included). The number of characters is found by
    interpolation between the nearest known counts; a last gap is topped up with filler. Where no exact
    length is found the nearest one below is returned.

    Raises:
        UsageError: the target is smaller than the prompt's fixed parts.
    """
    start = rng.randrange(len(corpus.text))

    def build(chars: int, filler: int = 0) -> str:
        return f"Excerpt {nonce}\n\n" + corpus.cut(start, chars) + FILLER * filler + TASK

    below, above = (0, count(build(0))), None
    if below[1] > target:
        raise UsageError(f"a context of {target} tokens is too short; the smallest here is {below[1]}")
    chars = max(1, int((target - below[1]) * chars_per_token))
    for _ in range(MAX_PROBES):
        if below[1] == target or (above is not None and above[0] - below[0] <= 1):
            break
        tokens = count(build(chars))
        if tokens <= target:
            below = (chars, tokens)
        else:
            above = (chars, tokens)
        chars = _next_guess(target, below, above)
    return _top_up(build, count, target, below)


def _next_guess(target: int, below: tuple[int, int], above: tuple[int, int] | None) -> int:
    if above is None:
        density = max(below[1] / max(below[0], 1), 0.01)
        return below[0] + max(1, int((target - below[1]) / density * 1.01) + 1)
    share = (target - below[1] + 0.5) / max(above[1] - below[1], 1)
    guess = below[0] + round((above[0] - below[0]) * min(share, 1.0))
    return min(max(guess, below[0] + 1), above[0] - 1)


def _top_up(
    build: Callable[[int, int], str], count: Callable[[str], int], target: int, below: tuple[int, int]
) -> FittedPrompt:
    chars, tokens = below
    best = FittedPrompt(build(chars, 0), tokens, chars)
    filler = 0
    for _ in range(4):
        if best.tokens == target:
            break
        filler += target - tokens
        if filler <= 0:
            break
        tokens = count(build(chars, filler))
        if best.tokens < tokens <= target:
            best = FittedPrompt(build(chars, filler), tokens, chars)
    return best

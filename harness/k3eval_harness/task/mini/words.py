"""The words that names in generated projects are made of.

``words.txt`` is frozen: the tokenizer of the bundled model has one token for each. ``rare_words.txt`` never
occurs in training data and serves to measure unseen names. ``invented_word`` spells new English-like words
from the letter statistics of the known ones. None is a keyword, a builtin or a module of the library.
"""

import builtins
import keyword
import random
import sys
from collections.abc import Iterator
from functools import cache
from importlib import resources

_RESERVED = (
    set(keyword.kwlist)
    | {name.lower() for name in dir(builtins)}
    | set(sys.stdlib_module_names)
    | {"pytest", "pluggy", "iniconfig", "pygments", "packaging", "conftest", "tests", "test", "app"}
)


@cache
def known_words() -> tuple[str, ...]:
    """The frozen vocabulary of names, sorted."""
    return _read("words.txt")


@cache
def rare_words() -> tuple[str, ...]:
    """Real words that are never used in training data, sorted."""
    return _read("rare_words.txt")


def _read(name: str) -> tuple[str, ...]:
    text = resources.files("k3eval_harness.task.mini").joinpath(name).read_text(encoding="utf-8")
    return tuple(text.split())


@cache
def _followers() -> dict[str, str]:
    """For each pair of letters of the known words, what followed it (``$`` is the end of a word)."""
    table: dict[str, str] = {}
    for word in known_words():
        padded = f"^^{word}$"
        for at in range(len(padded) - 2):
            pair = padded[at : at + 2]
            table[pair] = table.get(pair, "") + padded[at + 2]
    return table


def invented_word(rng: random.Random) -> str:
    """A word of 4 to 8 letters that is neither known, nor rare, nor reserved."""
    table, taken = _followers(), set(known_words()) | set(rare_words()) | _RESERVED
    while True:
        word, pair = "", "^^"
        while len(word) <= 8:
            letter = rng.choice(table[pair])
            if letter == "$":
                break
            word, pair = word + letter, pair[1] + letter
        if 4 <= len(word) <= 8 and word not in taken:
            return word


def word_source(rng: random.Random, *, invented: float, rare: bool) -> Iterator[str]:
    """Endless words, each given out once: known ones, a share ``invented``, or rare ones only."""
    given: set[str] = set()
    pool = list(rare_words() if rare else known_words())
    rng.shuffle(pool)
    while True:
        fresh = rng.random() < invented or not pool
        word = invented_word(rng) if fresh else pool.pop()
        if word not in given:
            given.add(word)
            yield word

"""Prompts of an exact length, cut from real sources."""

from __future__ import annotations

import random
import re

import pytest

from k3eval_harness.decode.corpus import Corpus, load_corpus
from k3eval_harness.decode.prompts import TASK, fit_prompt, parse_contexts
from k3eval_harness.errors import UsageError

CORPUS = Corpus(
    "sample", "1", "0" * 64, "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(2000))
)


def words(text: str) -> int:
    return 9 + len(re.findall(r"\w+|\W", text))


def pairs_of_bytes(text: str) -> int:
    """Counts in steps, so that many targets have no exact cut."""
    return 9 + -(-len(text) // 37) * 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4k,32k", (4096, 32768)),
        (" 1M ", (1048576,)),
        ("32k,4k,4k", (4096, 32768)),
        ("1000", (1000,)),
        ("4K", (4096,)),
    ],
)
def test_contexts(text: str, expected: tuple[int, ...]) -> None:
    assert parse_contexts(text) == expected


@pytest.mark.parametrize("text", ["", "4k,", "k", "0", "-4k", "4.5k", "4kk", "four", "4k;8k", "٤k"])
def test_bad_contexts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--contexts"):
        parse_contexts(text)


@pytest.mark.parametrize("text", ["17m", "16777217", "4k,99999999999999999999", "9" * 5000, "9" * 5000 + "k"])
def test_absurd_contexts_are_refused(text: str) -> None:
    assert parse_contexts("16m,0016777216") == (16_777_216,)
    with pytest.raises(UsageError, match="more than 16777216 tokens") as caught:
        parse_contexts(text)
    assert len(caught.value.message) < 100


@pytest.mark.parametrize("target", [128, 1000, 4096, 20_000])
def test_a_prompt_has_exactly_the_length_asked_for(target: int) -> None:
    asked: list[int] = []

    def count(text: str) -> int:
        asked.append(len(text))
        return words(text)

    fitted = fit_prompt(CORPUS, target, count, random.Random(1), "nonce")
    assert fitted.tokens == target == words(fitted.text)
    assert fitted.text.startswith("Excerpt nonce\n")
    assert fitted.text.endswith(TASK)
    assert len(asked) <= 16


@pytest.mark.parametrize("target", [500, 501, 502])
def test_a_length_that_no_cut_has_is_approached_from_below(target: int) -> None:
    fitted = fit_prompt(CORPUS, target, pairs_of_bytes, random.Random(1), "nonce")
    assert target - 3 < fitted.tokens <= target
    assert fitted.tokens == pairs_of_bytes(fitted.text)


def test_a_target_below_the_fixed_parts_is_refused() -> None:
    with pytest.raises(UsageError, match="too short"):
        fit_prompt(CORPUS, 16, words, random.Random(1), "nonce")


def test_same_seed_same_cut_other_nonce_other_first_line() -> None:
    one, two, other = (
        fit_prompt(CORPUS, 1000, words, random.Random(seed), nonce).text
        for seed, nonce in ((1, "a"), (1, "b"), (2, "a"))
    )
    assert one != two
    assert one.split("\n", 1)[1] == two.split("\n", 1)[1]
    assert other.split("\n", 1)[1] != one.split("\n", 1)[1]


def test_a_cut_past_the_end_goes_on_at_the_beginning() -> None:
    corpus = Corpus("p", "1", "", "abc")
    assert corpus.cut(2, 8) == "cabcabca"
    assert corpus.cut(5, 2) == "ca"


def test_the_corpus_is_an_installed_package_with_version_and_digest() -> None:
    corpus = load_corpus("typer")
    assert re.fullmatch(r"[0-9a-f]{64}", corpus.sha256)
    assert "def " in corpus.text
    assert load_corpus("typer") == corpus


@pytest.mark.parametrize("package", ["no-such-package-here", "pandas-stubs"])
def test_a_package_without_sources_is_refused(package: str) -> None:
    with pytest.raises(UsageError, match="package"):
        load_corpus(package)

"""From conversations to tokens and batches: the vocabulary's promise, masks, order, bad data."""

from __future__ import annotations

import json

import numpy as np
import pytest

from k3eval_local.tokenizer import Tokenizer
from k3eval_local.train.batches import Batches, collate, excerpt_of, row_of
from k3eval_local.train.render import DataError, Example, read_examples, render, share_openings
from k3eval_local.train.vocabulary import build_ranks

NAMES = ["harbor", "panel", "the" + "sis", "sphere"]
TEXTS = ["Return the sum of the items.", "def f(x):\n    return x.get(y)\n", "run the tests"] * 10


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_ranks(NAMES, TEXTS))


def _record(question: str = "add", answer: str = "plus", system: str = "Be brief.") -> dict[str, object]:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls -l"}'}}
    return {
        "id": "x/1",
        "kind": "demo",
        "tools": [
            {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {}}}
        ],
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "harbor.py"},
            {"role": "assistant", "content": answer, "reasoning_content": "Easy."},
        ],
        "untrained": [2],
    }


@pytest.mark.parametrize(
    "around", ["{}", "_{}", " {}", "({}", '"{}"', "test_{}", "./{}.py", "'/def {}(", "{}_{}"]
)
def test_a_name_is_one_token_wherever_it_occurs(tokenizer: Tokenizer, around: str) -> None:
    for name in NAMES:
        ids = tokenizer.encode(around.replace("{}", name))
        assert ids.count(tokenizer.encode(name)[0]) == around.count("{}"), (name, around)


def test_numbers_and_common_words_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert [len(tokenizer.encode(str(number))) for number in (0, 7, 10, 99, 100, 999)] == [1] * 6
    assert len(tokenizer.encode(" the")) == len(tokenizer.encode("Return")) == 1
    assert tokenizer.decode(tokenizer.encode("any text, é too\n")) == "any text, é too\n"


def test_the_mask_covers_what_the_model_writes(tokenizer: Tokenizer) -> None:
    example = render(_record(), tokenizer)
    first, last = (tokenizer.decode(example.ids[turn.start : turn.end]) for turn in example.turns)
    assert first.startswith("<|close|>think<|sep|>")
    assert last.startswith("Easy.<|close|>think<|sep|>")
    assert last.endswith("<|close|>message<|sep|><|end_of_msg|>")
    assert [turn.trained for turn in example.turns] == [False, True]
    row = row_of(example)
    assert tokenizer.decode(row.ids[row.weights == 1.0]) == last
    assert example.ids[: example.prefix] + tuple(row.ids.tolist()) == example.ids


def test_a_common_opening_is_shared(tokenizer: Tokenizer) -> None:
    examples = [render(_record(system="A" if at % 2 else "B"), tokenizer) for at in range(4)]
    examples.append(render(_record(system="C"), tokenizer))
    shared = share_openings(examples, least=2)
    assert [example.prefix == example.opening for example in shared] == [True] * 4 + [False]


def test_an_excerpt_is_the_longest_pair_of_message_and_turn(tokenizer: Tokenizer) -> None:
    row = excerpt_of(render(_record(), tokenizer))
    text = tokenizer.decode(row.ids)
    assert text.startswith('<|open|>message role="tool"')
    assert "harbor.py" in text
    assert row.head == ()


def test_batches_follow_from_seed_and_step(tokenizer: Tokenizer) -> None:
    examples: list[Example] = [render(_record(question="add " * at), tokenizer) for at in range(1, 30)]

    def make(seed: int) -> Batches:
        return Batches(examples, tokenizer, tokens=400, seed=seed, drill_steps=2, excerpts=0.5)

    one, other = make(1), make(1)
    for step in (7, 0, 40):  # any order
        for first, second in zip(one.batches(step), other.batches(step), strict=True):
            assert first.ids.equal(second.ids)
            assert first.weights.equal(second.weights)
    assert any(not make(1).batches(at)[0].ids.equal(make(2).batches(at)[0].ids) for at in range(5))


def test_a_long_row_rides_along_and_no_row_is_lost(tokenizer: Tokenizer) -> None:
    examples = [render(_record(question="add " * at), tokenizer) for at in (1, 2, 3, 4, 5, 6, 700, 900)]
    data = Batches(examples, tokenizer, tokens=400, seed=0, drill_steps=0)
    seen = []
    for step in range(4):
        first, *long = data.batches(step)
        assert first.ids.shape[1] < 200
        assert all(batch.ids.shape[0] == 1 for batch in long)
        read_only = [((batch.weights > 0) & (batch.weights < 1)).any() for batch in long]
        assert not any(read_only)
        seen += [int(row.sum()) for batch in (first, *long) for row in batch.valid]
        if sum(length > 700 for length in seen) == 2:
            break
    assert sum(length > 700 for length in seen) == 2


def test_context_weight_is_what_is_asked_for(tokenizer: Tokenizer) -> None:
    data = Batches([render(_record(), tokenizer)] * 9, tokenizer, tokens=2000, seed=0, drill_steps=0)
    (batch,) = data.batches(0, 0.05)
    assert sorted({round(float(w), 4) for w in batch.weights}) == [0.05, 1.0]


def test_targets_are_the_next_tokens_and_padding_is_never_one(tokenizer: Tokenizer) -> None:
    rows = [row_of(render(_record(question="add " * at), tokenizer)) for at in (1, 9)]
    batch = collate(rows, tokenizer.control.pad, np.random.default_rng(0))
    width = batch.ids.shape[1]
    for position, target in zip(batch.positions.tolist(), batch.targets.tolist(), strict=True):
        row, column = divmod(position, width)
        assert int(batch.ids[row, column + 1]) == target
        assert bool(batch.valid[row, column + 1])
    assert not bool(batch.valid[0].all())


@pytest.mark.parametrize("line", ["{", "[]", '{"messages": [{"role": "robot"}]}', json.dumps({"tools": []})])
def test_bad_data_name_the_line(tokenizer: Tokenizer, line: str) -> None:
    with pytest.raises(DataError, match="line 2"):
        list(read_examples([json.dumps(_record()), line], tokenizer))

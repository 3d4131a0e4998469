from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3eval_local.engine.prefix import Checkpoint, PrefixIndex


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def checkpoint(position: int) -> Checkpoint:
    return Checkpoint(position, tokens(), tokens())


def test_the_deepest_prefix_within_the_limit_is_found():
    index = PrefixIndex()
    prompt = tokens(1, 2, 3, 4, 5)
    short, long = checkpoint(2), checkpoint(4)
    index.insert(prompt, short)
    index.insert(prompt, long)
    assert index.match(prompt, 5) is long
    assert index.match(prompt, 4) is long
    assert index.match(prompt, 3) is short
    assert index.match(prompt, 1) is None
    assert index.match(tokens(1, 2, 3, 9, 5), 5) is short
    assert index.match(tokens(7, 2, 3), 3) is None


def test_a_fork_splits_an_edge_and_both_sides_are_found():
    index = PrefixIndex()
    left, right = checkpoint(4), checkpoint(5)
    index.insert(tokens(1, 2, 3, 4), left)
    index.insert(tokens(1, 2, 9, 9, 9), right)
    assert index.match(tokens(1, 2, 3, 4, 5), 5) is left
    assert index.match(tokens(1, 2, 9, 9, 9), 5) is right
    assert index.match(tokens(1, 2, 8), 3) is None


def test_find_is_exact_and_inserting_twice_is_refused():
    index = PrefixIndex()
    kept = checkpoint(2)
    index.insert(tokens(1, 2), kept)
    assert index.find(tokens(1, 2), 2) is kept
    assert index.find(tokens(1, 2, 3), 3) is None
    with pytest.raises(ValueError, match="exists"):
        index.insert(tokens(1, 2), checkpoint(2))


def test_eviction_order_is_least_recently_used_with_a_cold_end():
    index = PrefixIndex()
    a, b, c, cold = (checkpoint(n) for n in (1, 2, 3, 4))
    for item in (a, b, c):
        index.insert(tokens(1, 2, 3, 4), item)
    index.insert(tokens(1, 2, 3, 4), cold, evict_first=True)
    index.touch(a)
    assert list(index) == [cold, b, c, a]


def test_an_empty_index_keeps_no_nodes():
    index = PrefixIndex()
    made = [checkpoint(n) for n in (2, 3, 5)]
    for item in made:
        index.insert(tokens(1, 2, 3, 4, 5), item)
    for item in made:
        index.remove(item)
    assert len(index) == 0
    assert index.match(tokens(1, 2, 3, 4, 5), 5) is None
    assert not index._root.children


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(sequences, st.integers(0, 2)), max_size=40), sequences)
def test_agrees_with_a_dictionary_of_prefixes(steps: list[tuple[list[int], int]], query: list[int]):
    index, known = PrefixIndex(), {}
    for ids, action in steps:
        key = tuple(ids)
        if action and key not in known:
            known[key] = checkpoint(len(ids))
            index.insert(tokens(*ids), known[key])
        elif not action and key in known:
            index.remove(known.pop(key))
        for limit in (len(query), len(query) - 1):
            prefixes = [tuple(query[:n]) for n in range(1, limit + 1) if tuple(query[:n]) in known]
            expected = known[max(prefixes, key=len)] if prefixes else None
            assert index.match(tokens(*query), limit) is expected
        assert len(index) == len(known)

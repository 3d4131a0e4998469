from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3eval_local.engine.pages import Holder, OutOfPages, PageAllocator, stretches


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_a_page_is_free_only_when_nobody_holds_it():
    allocator = PageAllocator(4)
    held = allocator.allocate(2, Holder.RUNNING)
    allocator.retain(held, Holder.CACHED)
    allocator.release(held, Holder.RUNNING)
    assert (allocator.free, allocator.evictable, allocator.running) == (2, 2, 0)
    allocator.release(held, Holder.CACHED)
    assert (allocator.free, allocator.evictable) == (4, 0)


def test_too_large_an_allocation_takes_nothing():
    allocator = PageAllocator(3)
    allocator.allocate(2, Holder.RUNNING)
    with pytest.raises(OutOfPages):
        allocator.allocate(2, Holder.RUNNING)
    assert allocator.free == 1


def test_releasing_twice_is_an_error():
    allocator = PageAllocator(3)
    held = allocator.allocate(1, Holder.RUNNING)
    allocator.release(held, Holder.RUNNING)
    with pytest.raises(ValueError, match="released more often"):
        allocator.release(held, Holder.RUNNING)


def test_growth_continues_where_the_sequence_ends():
    allocator = PageAllocator(64)
    first = allocator.allocate(4, Holder.RUNNING, roomy=True)
    second = allocator.allocate(4, Holder.RUNNING, roomy=True)
    more = allocator.allocate(4, Holder.RUNNING, after=int(first[-1]), roomy=True)
    assert stretches(np.concatenate((first, more))) == [(int(first[0]), 8)]
    assert not set(second.tolist()) & {*first.tolist(), *more.tolist()}


def test_small_allocations_fill_the_smallest_hole():
    allocator = PageAllocator(16)
    held = allocator.allocate(16, Holder.RUNNING)
    allocator.release(held[2:4], Holder.RUNNING)
    allocator.release(held[8:14], Holder.RUNNING)
    assert allocator.allocate(2, Holder.CACHED).tolist() == [2, 3]


def test_a_fragmented_pool_still_gives_all_it_has():
    allocator = PageAllocator(8)
    held = allocator.allocate(8, Holder.RUNNING)
    allocator.release(held[::2], Holder.RUNNING)
    assert sorted(allocator.allocate(4, Holder.RUNNING, after=1, roomy=True).tolist()) == [0, 2, 4, 6]


def test_stretches():
    assert stretches(pages()) == []
    assert stretches(pages(5)) == [(5, 1)]
    assert stretches(pages(0, 1, 2, 7, 8, 3)) == [(0, 3), (7, 2), (3, 1)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=60))
def test_counts_agree_with_a_naive_model(total: int, steps: list[tuple[int, int]]):
    allocator = PageAllocator(total)
    held: list[tuple[np.ndarray, Holder]] = []
    for kind, n in steps:
        if kind <= 1 and n <= allocator.free:
            holder = Holder.RUNNING if kind else Holder.CACHED
            after = int(held[-1][0][-1]) if held and len(held[-1][0]) else None
            taken = allocator.allocate(n, holder, after=after, roomy=bool(n % 2))
            in_use = {page for table, _ in held for page in table.tolist()}
            assert len(set(taken.tolist())) == n
            assert not set(taken.tolist()) & in_use
            held.append((taken, holder))
        elif kind == 2 and held:
            table, _ = held[n % len(held)]
            allocator.retain(table, Holder.CACHED)
            held.append((table, Holder.CACHED))
        elif kind == 3 and held:
            table, holder = held.pop(n % len(held))
            allocator.release(table, holder)
        running = {page for table, holder in held if holder is Holder.RUNNING for page in table.tolist()}
        everyone = {page for table, _ in held for page in table.tolist()}
        assert allocator.free == total - len(everyone)
        assert allocator.running == len(running)
        assert allocator.evictable == len(everyone - running)

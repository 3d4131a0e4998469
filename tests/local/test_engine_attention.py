from __future__ import annotations

import numpy as np
import pytest
import torch

from k3eval_local.engine.paged_attention import (
    GATHER_TOKENS,
    attend_decode,
    attend_prefill,
    plan_decode,
    spans,
)

H, W, PAGE = 3, 12, 8
SCALE = 0.3


def table_of(length: int, pages: int, kind: str, seed: int) -> np.ndarray:
    """A block table for `length` tokens: consecutive pages, two stretches, or scattered ones."""
    count = -(-length // PAGE)
    if kind == "scattered":
        return np.random.default_rng(seed).permutation(pages)[:count].astype(np.int32)
    start = 1 + seed
    table = np.arange(start, start + count, dtype=np.int32)
    if kind == "split":
        table[count // 2 :] += 3
    return table


def filled(
    tables: list[np.ndarray], lengths: list[int], pages: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A pool in which everything that belongs to nobody is NaN, and each sequence's latents."""
    pool = torch.full((pages * PAGE, W), float("nan"))
    latents = []
    for table, length in zip(tables, lengths, strict=True):
        mine = torch.randn(length, W)
        positions = np.arange(length)
        pool[torch.from_numpy(table[positions // PAGE].astype(np.int64) * PAGE + positions % PAGE)] = mine
        latents.append(mine)
    return pool.view(pages, PAGE, W), latents


def reference(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[H, W] x [T, W] -> [H, W] in fp64."""
    scores = q.double() @ keys.double().T * SCALE
    return (scores.softmax(-1) @ keys.double()).float()


def test_spans_cover_the_tokens_in_order():
    table = np.array([4, 5, 9, 1, 2], dtype=np.int32)
    assert spans(table, 0, PAGE) == ()
    assert spans(table, 9, PAGE) == ((32, 41),)
    assert spans(table, 34, PAGE) == ((32, 48), (72, 80), (8, 18))


@pytest.mark.parametrize("kind", ["consecutive", "split", "scattered"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 100, GATHER_TOKENS + 5])
def test_decode_of_one_sequence(kind: str, length: int):
    pages = 200
    table = table_of(length, pages, kind, seed=2)
    cache, (latents,) = filled([table], [length], pages)
    q = torch.randn(1, H, W)
    out = attend_decode(q, cache, plan_decode([table], [length], PAGE, cache.device), SCALE)
    torch.testing.assert_close(out[0], reference(q[0], latents), atol=2e-6, rtol=1e-5)


def test_decode_of_short_and_long_sequences_together():
    lengths = [5, GATHER_TOKENS + 30, 64, 1, GATHER_TOKENS, 2 * GATHER_TOKENS]
    pages = 700
    order = np.random.default_rng(0).permutation(pages).astype(np.int32)
    tables, used = [], 0
    for i, length in enumerate(lengths):
        count = -(-length // PAGE)
        mine = order[used : used + count]
        tables.append(np.sort(mine) if i % 2 else mine)
        used += count
    cache, latents = filled(tables, lengths, pages)
    q = torch.randn(len(lengths), H, W)
    out = attend_decode(q, cache, plan_decode(tables, lengths, PAGE, cache.device), SCALE)
    for row, keys in enumerate(latents):
        torch.testing.assert_close(out[row], reference(q[row], keys), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["consecutive", "split", "scattered"])
@pytest.mark.parametrize(("cached", "new"), [(0, 1), (0, 17), (1, 1), (7, 3), (8, 16), (61, 40)])
def test_prefill_sees_the_past_and_itself_causally(kind: str, cached: int, new: int):
    pages = 60
    table = table_of(cached + new, pages, kind, seed=1)
    cache, (past,) = filled([table], [cached], pages)
    fresh, q = torch.randn(new, W), torch.randn(new, H, W)
    out = attend_prefill(q, fresh, cache, spans(table, cached, PAGE), SCALE)
    for t in range(new):
        expected = reference(q[t], torch.cat([past, fresh[: t + 1]]))
        torch.testing.assert_close(out[t], expected, atol=2e-6, rtol=1e-5)

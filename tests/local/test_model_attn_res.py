from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3eval_local.model.attn_res import BlockStream, merge_partial, mix, read_bank

EPS = 1e-5


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_mix_is_the_equation() -> None:
    rows, query = normal(4, 2, 3, 7), normal(7, seed=1)
    out = mix(list(rows), query, EPS)
    for b in range(2):
        for t in range(3):
            row = rows[:, b, t]
            rms = row / (row.square().mean(-1, keepdim=True) + EPS).sqrt()
            torch.testing.assert_close(out[b, t], (rms @ query).softmax(0) @ row, rtol=0, atol=1e-12)
    uniform = mix(list(rows), torch.zeros(7, dtype=torch.float64), EPS)
    torch.testing.assert_close(uniform, rows.mean(0))


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("size", [1.0, 60.0], ids=["plain", "peaked"])
def test_two_phase_equals_direct(rows: int, size: float) -> None:
    bank, partial, queries = normal(rows, 2, 5, 8), normal(2, 5, 8, seed=1), size * normal(6, 8, seed=2)
    read = read_bank(list(bank), queries, EPS)
    for which in range(6):
        direct = mix([*bank, partial], queries[which], EPS)
        torch.testing.assert_close(
            merge_partial(read, which, partial, queries[which], EPS), direct, rtol=0, atol=1e-10
        )


def run(layers: int, block: int, form: str, dtype: torch.dtype) -> tuple[list[Tensor], int]:
    """All reads of a stream whose sublayers are fixed random maps."""
    queries = normal(2 * layers + 1, 6, seed=3, dtype=dtype)
    stream = BlockStream(normal(2, 3, 6, seed=4, dtype=dtype), queries, block, EPS, form)  # type: ignore[arg-type]
    reads = []
    for layer in range(layers):
        reads.append(stream.read())
        stream.write_attention(torch.tanh(reads[-1] @ normal(6, 6, seed=10 + layer, dtype=dtype)))
        reads.append(stream.read())
        stream.write_ffn(torch.tanh(reads[-1] @ normal(6, 6, seed=50 + layer, dtype=dtype)))
    return [*reads, stream.read()], len(stream.bank)


def by_hand(layers: int, block: int) -> list[Tensor]:
    """The loop of the specification."""
    queries, reads = normal(2 * layers + 1, 6, seed=3), []
    bank: list[Tensor] = []
    p = normal(2, 3, 6, seed=4)
    for layer in range(layers):
        a_in = mix([*bank, p], queries[2 * layer], EPS) if bank else p
        if layer % block == 0:
            bank.append(p)
        o = torch.tanh(a_in @ normal(6, 6, seed=10 + layer))
        p = o if layer % block == 0 else p + o
        f_in = mix([*bank, p], queries[2 * layer + 1], EPS)
        p = p + torch.tanh(f_in @ normal(6, 6, seed=50 + layer))
        reads += [a_in, f_in]
    return [*reads, mix([*bank, p], queries[-1], EPS)]


@pytest.mark.parametrize("block", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 9, 13])
def test_streams_at_and_around_block_boundaries(layers: int, block: int) -> None:
    truth = by_hand(layers, block)
    for form, dtype, bound in (
        ("direct", torch.float64, 1e-10),
        ("two_phase", torch.float64, 1e-10),
        ("direct", torch.float32, 1e-4),
        ("two_phase", torch.float32, 1e-4),
    ):
        reads, rows = run(layers, block, form, dtype)
        assert rows == -(-layers // block)
        for ours, expected in zip(reads, truth, strict=True):
            torch.testing.assert_close(ours.double(), expected, rtol=0, atol=bound)


def test_gradients() -> None:
    rows = [normal(2, 3, seed=s).requires_grad_() for s in range(3)]
    queries = normal(2, 3, seed=9).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, *rows: mix(rows, q[0], EPS), (queries, *rows))

    def two_phase(q: Tensor, partial: Tensor, *bank: Tensor) -> Tensor:
        return merge_partial(read_bank(bank, q, EPS), 1, partial, q[1], EPS)

    assert torch.autograd.gradcheck(two_phase, (queries, *rows))

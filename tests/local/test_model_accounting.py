"""The tables of the specification, section 3."""

from __future__ import annotations

import pytest
import torch
from model_helpers import random_ids, shaken

from k3eval_local.model.accounting import (
    MXFP4_BITS,
    StoredType,
    break_even,
    cache_bytes_per_token,
    count_parameters,
    decode_bytes,
    report,
    sequence_bytes,
)
from k3eval_local.model.config import K3Config
from k3eval_local.model.state import MLAState

FULL = K3Config.full()
TWIN = FULL.mla_twin()


def test_per_token_and_per_layer() -> None:
    assert cache_bytes_per_token(FULL) == 27_648
    assert cache_bytes_per_token(FULL, "fp8") == 13_824
    assert cache_bytes_per_token(TWIN) == 107_136
    assert cache_bytes_per_token(TWIN, "fp8") == 53_568
    one = sequence_bytes(FULL, 0)
    assert (one.kda_state // 69, one.conv_state // 69) == (6_291_456, 221_184)
    assert sequence_bytes(FULL, 0, state="bf16").kda_state // 69 == 3_145_728
    assert round(one.total / 1e6, 1) == 449.4
    assert round(sequence_bytes(FULL, 0, state="bf16").total / 1e6, 1) == 232.3
    assert sequence_bytes(TWIN, 0).total == 0


@pytest.mark.parametrize(
    ("cache", "rows"),
    [
        ("bf16", [(4, 0.524, 0.409, 1.28), (8, 0.629, 0.817, 0.77), (32, 1.26, 3.27, 0.386),
                  (128, 3.79, 13.08, 0.290), (256, 7.17, 26.16, 0.274), (512, 13.92, 52.31, 0.266),
                  (1024, 27.42, 104.6, 0.262)]),
        ("fp8", [(4, 0.471, 0.204, 2.31), (8, 0.524, 0.409, 1.28), (32, 0.840, 1.64, 0.514),
                 (128, 2.11, 6.54, 0.322), (256, 3.79, 13.08, 0.290), (512, 7.17, 26.16, 0.274),
                 (1024, 13.92, 52.31, 0.266)]),
    ],
)  # fmt: skip
def test_memory_against_the_twin(cache: StoredType, rows: list[tuple[int, float, float, float]]) -> None:
    for kilo, ours, twins, ratio in rows:
        memory = sequence_bytes(FULL, kilo * 1024, cache).total
        twin = sequence_bytes(TWIN, kilo * 1024, cache).total
        assert memory / 2**30 == pytest.approx(ours, rel=4e-3)
        assert twin / 2**30 == pytest.approx(twins, rel=4e-3)
        assert memory / twin == pytest.approx(ratio, rel=4e-3)


def test_break_even() -> None:
    assert break_even(FULL) == 5653
    assert break_even(FULL, "fp8") == 11_307
    assert break_even(TWIN) is None
    for cache in ("bf16", "fp8"):
        context = break_even(FULL, cache)  # type: ignore[arg-type]
        assert context is not None
        saved = [
            sequence_bytes(TWIN, at, cache).total - sequence_bytes(FULL, at, cache).total  # type: ignore[arg-type]
            for at in (context - 1, context + 1)
        ]
        assert saved[0] < 0 < saved[1]


@pytest.mark.parametrize(
    ("name", "state", "per_token", "even"),
    [
        ("a", "56 kB", 192, 195),
        ("b", "526 kB", 384, 685),
        ("c", "1578 kB", 768, 913),
        ("d", "17096 kB", 2688, 2473),
    ],
)
def test_scaled_configs(name: str, state: str, per_token: int, even: int) -> None:
    config = K3Config.scaled(name)
    assert f"{sequence_bytes(config, 0).total / 1e3:.0f} kB" == state
    assert cache_bytes_per_token(config) == per_token
    assert break_even(config) == even


def test_decode_bytes_of_the_full_model() -> None:
    one, twin = decode_bytes(FULL, 1 << 20), decode_bytes(TWIN, 1 << 20)
    assert one.cache == (1 << 20) * 13_824
    assert round(one.state / 1e9, 3) == 0.899
    assert twin.state == 0
    count, twin_count = count_parameters(FULL), count_parameters(TWIN)
    assert round(count.always_active * 2 / 1e9, 1) == 111.1
    assert round(twin_count.always_active * 2 / 1e9, 1) == 81.9
    assert round(count.routed_experts / 92 / 896 * MXFP4_BITS / 8 / 1e6, 2) == 17.55
    assert one.weights == pytest.approx(count.always_active * 2 + count.active_experts * MXFP4_BITS / 8)


@pytest.mark.parametrize(
    ("context", "cache_only", "by_batch"),
    [
        (4096, 0.23, {1: 0.78, 8: 0.89, 64: 0.93, 256: 0.88}),
        (131_072, 2.59, {1: 0.82, 8: 1.02, 64: 1.19, 256: 1.48}),
        (1 << 20, 3.65, {1: 1.08, 8: 1.69, 64: 2.24, 256: 2.90}),
    ],
)
def test_decode_ratios(context: int, cache_only: float, by_batch: dict[int, float]) -> None:
    ours, twins = decode_bytes(FULL, context), decode_bytes(TWIN, context)
    assert round(twins.cache / (ours.cache + ours.state), 2) == cache_only
    for batch, ratio in by_batch.items():
        pair = [decode_bytes(config, context, batch).total for config in (TWIN, FULL)]
        assert round(pair[0] / pair[1], 2) == ratio


def test_the_report_is_made_of_these() -> None:
    found = report(FULL, (4096, 1 << 20), "fp8")
    assert found.parameters_active == 104_189_612_640
    assert found.break_even_tokens == 11_307
    assert [row.context for row in found.contexts] == [4096, 1 << 20]
    assert found.contexts[1].memory == sequence_bytes(FULL, 1 << 20, "fp8").total
    assert found.contexts[0].twin_decode == round(decode_bytes(TWIN, 4096).total)


@torch.no_grad()
@pytest.mark.parametrize("name", ["a", "a-mla"])
def test_a_running_model_keeps_exactly_these_bytes(name: str) -> None:
    config = K3Config.scaled(name)
    model = shaken(config, dtype=torch.bfloat16)
    _, state = model(random_ids(config, 1, 50))
    expected = sequence_bytes(config, 50, "bf16", "fp32")
    assert state.nbytes() == expected.total
    cache = sum(layer.latent.nbytes for layer in state.layers if isinstance(layer, MLAState))
    assert cache == expected.mla_cache

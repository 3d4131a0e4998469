from __future__ import annotations

import itertools

import pytest
import torch

from k3eval_local.model.mxfp4 import VALUES, dequantize, quantize


def test_every_code_at_every_scale_round_trips_bit_exactly() -> None:
    codes = torch.tensor(list(itertools.product(range(16), repeat=2)), dtype=torch.uint8)
    packed = (codes[:, 0] | (codes[:, 1] << 4)).view(16, 16).repeat(255, 1)
    scale = torch.arange(255, dtype=torch.uint8).repeat_interleave(16)[:, None]
    values = dequantize(packed, scale, torch.float64)
    again, again_scale = quantize(values)
    assert torch.equal(dequantize(again, again_scale, torch.float64), values)
    whole = (values.abs().amax(1) == 6 * 2.0 ** (scale[:, 0].double() - 127)).nonzero()[:, 0]
    assert len(whole) > 200
    assert torch.equal(again[whole], packed[whole])
    assert torch.equal(again_scale[whole], scale[whole])


def test_the_low_nibble_is_the_even_element() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 1], weight[0, 30], weight[0, 31] = 6.0, -0.5, 1.5, -4.0
    packed, scale = quantize(weight)
    assert scale.tolist() == [[127]]
    assert packed[0, 0] == 0b1001_0111
    assert packed[0, 15] == 0b1110_0011
    assert torch.equal(dequantize(packed, scale), weight)


def test_values_are_e2m1() -> None:
    for code, value in enumerate(VALUES):
        sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
        magnitude = 0.5 * mantissa if exponent == 0 else (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
        assert value == (-1) ** sign * magnitude


def test_rounding_is_to_the_nearest_and_ties_go_to_the_even_code() -> None:
    points = torch.cat([torch.linspace(-6, 6, 961), torch.zeros(31)]).view(-1, 32).double()
    points[:, 0] = 6.0
    packed, scale = quantize(points)
    rounded = dequantize(packed, scale, torch.float64)
    table = torch.tensor(VALUES, dtype=torch.float64)
    nearest = (points[..., None] - table).abs().amin(-1)
    assert torch.equal((points - rounded).abs(), nearest)
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    for point, even in ties.items():
        for sign in (1, -1):
            group = torch.tensor([[6.0, sign * point] + [0.0] * 30])
            assert float(dequantize(*quantize(group))[0, 1]) == sign * even


def test_random_weights_lose_about_a_tenth() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    packed, scale = quantize(weight)
    assert packed.shape == (64, 64)
    assert scale.shape == (64, 4)
    error = (dequantize(packed, scale) - weight).square().mean().sqrt() / weight.std()
    assert 0.05 < float(error) < 0.15
    assert dequantize(packed, scale, torch.bfloat16).dtype == torch.bfloat16
    torch.testing.assert_close(dequantize(packed, scale, torch.bfloat16).float(), dequantize(packed, scale))


def test_zeros_and_extremes() -> None:
    assert torch.equal(dequantize(*quantize(torch.zeros(2, 32))), torch.zeros(2, 32))
    huge = torch.full((1, 32), 3e38)
    assert torch.isfinite(dequantize(*quantize(huge))).all()
    tiny = torch.full((1, 32), 1e-45, dtype=torch.float64)
    assert float(dequantize(*quantize(tiny), torch.float64).abs().max()) < 1e-37


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="NaN"):
        quantize(torch.full((1, 32), torch.nan))
    with pytest.raises(ValueError, match="do not fit"):
        dequantize(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8))

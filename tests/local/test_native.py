"""The native CPU step against the reference model, and what happens where it cannot be built."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from k3eval_local.checkpoint import open_model
from k3eval_local.kernels.native import build
from k3eval_local.kernels.native.build import Isa, NativeUnavailable
from k3eval_local.kernels.native.pack import WeightType
from k3eval_local.kernels.native.probe import narrow_speedup
from k3eval_local.kernels.native.scan import kda_scan
from k3eval_local.kernels.native.step import NativeSession, NativeStep, SequenceView
from k3eval_local.model import K3Config, K3Model
from k3eval_local.model.kda import kda_recurrent
from k3eval_local.train.native import library as train_library

ISAS: list[Isa] = [isa for isa in ("avx512", "avx2") if build._NEEDS[isa] <= build.cpu_flags()]
SOURCE = Path(build.__file__).with_name("step.c")
needs_native = pytest.mark.skipif(not ISAS, reason="this CPU has neither AVX-512 nor AVX2 with FMA")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


def model(name: str, seed: int = 0) -> K3Model:
    """Random weights, but mixes that are not uniform and an expert bias that is not zero."""
    built = K3Model(K3Config.scaled(name)).init_weights(seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in [*built.named_parameters(), *built.named_buffers()]:
            if key.endswith("_res_proj.weight"):
                value.copy_(0.1 * torch.randn(value.shape, generator=generator))
            elif key.endswith(("e_score_correction_bias", "A_log")):
                value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    return built


def reference(built: K3Model, ids: Tensor) -> Tensor:
    """In float64: the fp32 model itself is no closer to the truth than the native step."""
    exact = K3Model(built.config, dtype=torch.float64)
    exact.load_state_dict({key: value.double() for key, value in built.state_dict().items()})
    with torch.no_grad():
        return exact(ids[None])[0][0].float()


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["a", "b", "a-mla"])
def test_prefill_and_decode_equal_the_reference(name: str, isa: Isa, cache: Path) -> None:
    base = model("a" if name == "a-mla" else name)
    built = base if name != "a-mla" else K3Model(base.config.mla_twin()).init_weights(1).eval()
    ids = torch.randint(0, built.config.vocab_size, (170,), generator=torch.Generator().manual_seed(3))
    step = NativeStep(built, library=build.load(isa=isa, cache=cache), max_rows=40, threads=2)
    session = NativeSession(step, capacity=8)
    got = [session.run(ids[:101].numpy(), every=True)]
    got += [session.run([int(i)]) for i in ids[101:]]
    step.close()
    assert (torch.cat(got) - reference(built, ids)).abs().max().item() < 1e-4


@needs_native
@pytest.mark.slow
def test_512_decoded_tokens_stay_within_1e_4(cache: Path) -> None:
    built = model("a")
    session = NativeSession(NativeStep(built, library=build.load(cache=cache)), capacity=600)
    state, token, worst = built.empty_state(1), 5, 0.0
    with torch.no_grad():
        for _ in range(512):
            expected, state = built.step(torch.tensor([token]), state)
            logits = session.run([token])
            worst = max(worst, (logits - expected).abs().max().item())
            token = int(expected.argmax())
            assert int(logits.argmax()) == token
    assert worst < 1e-4


@needs_native
def test_greedy_output_of_the_shipped_checkpoint_is_the_reference_s(cache: Path) -> None:
    built, _ = open_model("k3-nano")
    built = built.float().eval()
    session = NativeSession(NativeStep(built, library=build.load(cache=cache)), capacity=300)
    state, token, worst = built.empty_state(1), 5, 0.0
    with torch.no_grad():
        for _ in range(256):
            expected, state = built.step(torch.tensor([token]), state)
            logits = session.run([token])
            worst = max(worst, (logits - expected).abs().max().item())
            token = int(expected.argmax())
            assert int(logits.argmax()) == token
    assert worst < 1e-4 * max(1.0, expected.abs().max().item())


@needs_native
def test_paged_batch_equals_single_sequences(cache: Path) -> None:
    """Different lengths in one call, scattered pages, pages of 24 tokens that cut the key blocks."""
    built = model("a")
    step = NativeStep(built, library=build.load(cache=cache), max_rows=128)
    linear, page, width = built.config.linear_attn, 24, built.config.latent_cache_width
    generator = torch.Generator().manual_seed(4)
    lengths = [70, 1, 33]
    ids = [torch.randint(0, 500, (n + 2,), generator=generator).to(torch.int32).numpy() for n in lengths]
    pool = torch.full((12, len(step.mla_layers), page, width), float("nan"))
    order = torch.randperm(12, generator=generator).to(torch.int32).numpy()
    views = []
    for i in range(3):
        states = [
            (
                layer,
                torch.zeros(linear.num_heads, linear.head_dim, linear.head_dim),
                torch.zeros(3, 3 * built.config.kda_width),
            )
            for layer in step.kda_layers
        ]
        view = SequenceView(built.config.num_hidden_layers, states)
        view.set_table(order[4 * i : 4 * i + 4])
        views.append(view)
    pages = [pool[0, layer] for layer in range(len(step.mla_layers))]
    step.set_pages(pages, page_tokens=page, page_stride=pool.stride(0))
    counts = np.array(lengths, dtype=np.int32)
    prompt = np.concatenate([part[:n] for part, n in zip(ids, lengths, strict=True)])
    want = np.zeros(len(prompt), dtype=np.uint8)
    want[np.cumsum(lengths) - 1] = 1
    first = step.forward(views, counts, prompt, want)
    second = [
        step.forward(
            views,
            np.ones(3, np.int32),
            np.array([part[n + k] for part, n in zip(ids, lengths, strict=True)]),
            np.ones(3, np.uint8),
        )
        for k in range(2)
    ]
    for i, n in enumerate(lengths):
        session = NativeSession(step)
        alone = session.run(ids[i], every=True)[n - 1 :]
        together = torch.stack([first[i], second[0][i], second[1][i]])
        assert (together - alone).abs().max().item() < 1e-5


@needs_native
@pytest.mark.parametrize(("weights", "bound"), [("bf16", 0.1), ("int8", 0.2)])
def test_narrow_weights_stay_near(weights: str, bound: float, cache: Path) -> None:
    built = K3Model(K3Config.scaled("a").mla_twin()).init_weights(2).eval()
    ids = torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(5))
    step = NativeStep(built, weights="bf16" if weights == "bf16" else "int8", library=build.load(cache=cache))
    error = (NativeSession(step).run(ids.numpy(), every=True) - reference(built, ids)).abs().mean().item()
    assert 0 < error < bound


@needs_native
def test_input_outside_the_limits_is_refused(cache: Path) -> None:
    step = NativeStep(model("a"), library=build.load(cache=cache), max_rows=4)
    session = NativeSession(step)
    with pytest.raises(ValueError, match="outside 0"):
        session.run([512])
    with pytest.raises(ValueError, match="at least one"):
        session.run([])
    step.close()
    step.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.run([1])


@needs_native
@pytest.mark.parametrize("K", [16, 48, 128])
def test_scan_equals_the_recurrence(K: int, cache: Path) -> None:
    generator = torch.Generator().manual_seed(K)
    q, k, v, z = (torch.randn(1, 29, 3, K, generator=generator) for _ in range(4))
    q, k, g = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1), -z.sigmoid()
    beta, state = torch.rand(1, 29, 3, generator=generator), torch.randn(1, 3, K, K, generator=generator)
    expected, end = kda_recurrent(q, k, v, g, beta, state)
    o = kda_scan(q[0], k[0], v[0], g[0], beta[0], state[0], threads=2, library=build.load(cache=cache))
    assert (o - expected[0]).abs().max().item() < 1e-5
    assert (state - end).abs().max().item() < 1e-5


@needs_native
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_the_probe_measures_a_ratio(weights: WeightType, cache: Path) -> None:
    assert 0.05 < narrow_speedup(build.load(cache=cache), weights) < 50


@needs_native
def test_loading_leaves_the_float_state_alone(cache: Path) -> None:
    """A library linked with -ffast-math would flush subnormal numbers to zero in the whole process."""
    build.load(cache=cache)
    train_library(32)
    assert float(np.float64(5e-324) * 1.0) != 0.0
    assert 5e-324 / 1.0 != 0.0


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="no C compiler"):
        build.compile_library(SOURCE, tmp_path / "step.so", (), compiler="no-such-compiler")


def test_compiler_that_fails(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'step.c:1: error: broken' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(NativeUnavailable, match="broken"):
        build.compile_library(SOURCE, tmp_path / "x" / "step.so", (), compiler=str(compiler))
    assert list((tmp_path / "x").iterdir()) == []


def test_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(NativeUnavailable, match="cannot be written"):
        build.compile_library(SOURCE, blocked / "step.so", ())


def test_unsupported_cpu() -> None:
    with pytest.raises(NativeUnavailable, match="neither AVX-512 nor AVX2"):
        build.choose_isa(frozenset({"sse4_2", "avx"}))
    assert build.choose_isa(frozenset({"avx2", "fma"})) == "avx2"


@needs_native
def test_corrupt_library_is_built_again(tmp_path: Path) -> None:
    path = build.load(cache=tmp_path, isa=ISAS[-1]).path
    good = path.read_bytes()
    path.unlink()  # never overwrite a library that is mapped
    path.write_bytes(good[: len(good) // 2])
    assert build.load(cache=tmp_path, isa=ISAS[-1]).path == path
    assert path.read_bytes() == good
    assert stat.S_ISREG(path.stat().st_mode)


def test_sizes_that_the_step_does_not_do() -> None:
    from dataclasses import replace

    config = replace(K3Config.scaled("a"), qk_rope_head_dim=8)
    with pytest.raises(NativeUnavailable, match="qk_rope_head_dim is 8"):
        NativeStep(K3Model(config).init_weights(0))

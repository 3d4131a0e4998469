"""The training loop: learns, resumes exactly, is deterministic; the replay measure means what it says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3eval_local.checkpoint import load
from k3eval_local.model import K3Model
from k3eval_local.tokenizer import Tokenizer
from k3eval_local.train.__main__ import main
from k3eval_local.train.evaluate import Rate, evaluate, table
from k3eval_local.train.forward import Precision
from k3eval_local.train.initial import initialise
from k3eval_local.train.loop import Inputs, Run, Schedule
from k3eval_local.train.measure import pass_rate, replay
from k3eval_local.train.muon import Optimizers, Rates, is_matrix, orthogonal
from k3eval_local.train.plot import draw
from k3eval_local.train.render import Example, render, share_openings
from k3eval_local.train.settings import PRESETS
from k3eval_local.train.vocabulary import build_ranks

WORDS = [f"{a}{b}" for a in ("har", "pan", "sto", "mel") for b in ("bor", "el", "ne", "on", "ty", "ka")]
TEXTS = ["Say it again ."] * 10


def _record(rng: random.Random) -> dict[str, object]:
    """A conversation whose answer repeats the word of the question: guessing gets 1 in 24."""
    word = rng.choice(WORDS)
    return {
        "kind": word[:3],
        "messages": [
            {"role": "user", "content": f"Say it again . {word}"},
            {"role": "assistant", "content": word},
        ],
    }


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_ranks(WORDS, TEXTS))


@pytest.fixture(scope="module")
def examples(tokenizer: Tokenizer) -> list[Example]:
    rng = random.Random(0)
    return share_openings([render(_record(rng), tokenizer) for _ in range(300)])


SMALL = replace(PRESETS["micro"], width=64, head_dim=16, latent=32, expert=32, dense=64)


def _run(tokenizer: Tokenizer, examples: list[Example], out: Path, steps: int, **changes: int) -> Run:
    model = K3Model(SMALL.config(tokenizer.vocab_size))
    initialise(model, 0)
    plan = Schedule(steps=steps, hold=steps, tokens=600, drills=0, warm_up=5, excerpts=0.0, evaluate_every=50)
    return Run(
        model,
        tokenizer,
        Inputs(examples[40:], examples[:40]),
        replace(plan, **changes),
        seed=0,
        out=out,
        precision=Precision(torch.bfloat16),
    )


@pytest.mark.slow
def test_it_learns_to_repeat_a_word_far_above_chance(
    tokenizer: Tokenizer, examples: list[Example], tmp_path: Path
) -> None:
    run = _run(tokenizer, examples, tmp_path, 60)
    before = run.measure()
    run.run()
    assert before <= 0.2
    assert run.measure() >= 0.5  # guessing the word gives 1 / 24
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any("replay_pass_rate" in entry for entry in entries)
    assert any(entry.get("tokens_per_s", 0) > 0 for entry in entries)


def test_a_resumed_run_ends_with_the_same_weights(
    tokenizer: Tokenizer, examples: list[Example], tmp_path: Path
) -> None:
    whole = _run(tokenizer, examples, tmp_path / "whole", 6, evaluate_every=100)
    whole.run()
    part = _run(tokenizer, examples, tmp_path / "part", 6, evaluate_every=100)
    part.run(until=3)
    resumed = _run(tokenizer, examples, tmp_path / "part", 6, evaluate_every=100)
    assert resumed.resume()
    assert resumed.step == 3
    resumed.run()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_the_rate_warms_up_holds_and_falls() -> None:
    plan = Schedule(steps=100, hold=40, warm_up=10)
    assert plan.rate(0) == pytest.approx(0.1)
    assert plan.rate(20) == plan.rate(39) == 1.0
    assert 0.03 <= plan.rate(99) < 0.04
    rates = [plan.rate(step) for step in range(40, 100)]
    assert rates == sorted(rates, reverse=True)


def test_replay_agrees_with_writing_token_by_token(tokenizer: Tokenizer, examples: list[Example]) -> None:
    model = K3Model(SMALL.config(tokenizer.vocab_size))
    initialise(model, 0)
    with torch.no_grad():  # likely to repeat: some answers come out right, some wrong
        scores = replay(model, examples[:12], pad=tokenizer.control.pad)
    for example, score in zip(examples[:12], scores, strict=True):
        turn = example.turns[0]
        logits, state = model(torch.tensor([example.ids[: turn.start]]), form="recurrent", last_only=True)
        right = True
        for target in example.ids[turn.start : turn.end]:
            best = int(logits.flatten().argmax())
            right = right and best == target
            if not right:
                break
            step, state = model.step(torch.tensor([best]), state)
            logits = step
        assert score.passed == right
    assert 0.0 <= pass_rate(scores) <= 1.0


def test_muon_makes_orthogonal_updates_and_every_parameter_has_one_optimizer() -> None:
    update = orthogonal(torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(update)
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.4
    model = K3Model(SMALL.config(600))
    initialise(model, 0)
    optimizers = Optimizers(model, Rates())
    counted = sum(
        len(group["params"]) for group in optimizers.muon.param_groups + optimizers.adam.param_groups
    )
    assert counted == len(list(model.parameters()))
    matrices = {name for name, parameter in model.named_parameters() if is_matrix(name, parameter)}
    assert "model.layers.0.self_attn.q_proj.weight" in matrices
    assert "model.layers.0.self_attn.f_b_proj.weight" in matrices
    assert "model.layers.0.self_attn.b_proj.weight" not in matrices
    assert not any("gate.weight" in name or "embed" in name for name in matrices)


def test_the_report_counts_by_kind(tokenizer: Tokenizer, examples: list[Example]) -> None:
    model = K3Model(SMALL.config(tokenizer.vocab_size))
    initialise(model, 0)
    result = evaluate("random", replay(model, examples[:30], pad=tokenizer.control.pad))
    assert sum(rate.n for rate in result.kinds.values()) == result.all.n == 30
    assert "| all |" in table(result)
    rate = Rate.of(283, 300)  # the published Wilson interval of this count
    assert (round(rate.low, 3), round(rate.high, 3)) == (0.911, 0.964)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate("none", [])


@pytest.mark.slow
def test_the_command_writes_a_checkpoint_that_loads(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rng = random.Random(1)
    data, ranks, out = tmp_path / "data.jsonl", tmp_path / "ranks", tmp_path / "out"
    data.write_text("".join(json.dumps(_record(rng)) + "\n" for _ in range(60)))
    tokenizer.save(ranks)
    main(["--config", "micro", "--data", str(data), "--ranks", str(ranks), "--out", str(out), "--steps", "2"])
    model = load(out / "checkpoint")
    assert model.config.vocab_size == tokenizer.vocab_size
    assert Tokenizer.from_file(out / "checkpoint" / "tiktoken.model").vocab_size == tokenizer.vocab_size


def test_the_plot_draws_both_panels() -> None:
    log = [
        json.dumps({"step": 20, "tokens": 60000, "loss": 4.2}),
        json.dumps({"step": 40, "tokens": 120000, "loss": 0.5}),
        json.dumps({"step": 40, "tokens": 120000, "replay_pass_rate": 0.25, "held_out_loss": 0.4}),
    ]
    picture = draw(log)
    assert picture.count("<polyline") == 3
    assert "0.12 million tokens" in picture
    with pytest.raises(ValueError, match="no training step"):
        draw([])

"""Two training checks of the reference model, with a plot and a page of numbers.

1. Config A overfits one batch of random tokens: every mechanism can learn.
2. At sparsity 56 (112 experts, 2 a token) plain top-k routing starves experts; Quantile Balancing keeps
   all of them in use.

Run: ``python benchmarks/model_checks.py [--out results]``. About five minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "local_backend"))

from k3eval_local.model.balancing import QuantileBalancer  # noqa: E402 - runs from a checkout, see the line above
from k3eval_local.model.config import K3Config  # noqa: E402
from k3eval_local.model.decoder import K3Model  # noqa: E402

OVERFIT_STEPS, ROUTING_STEPS, WINDOW = 120, 120, 20
SPARSE = replace(K3Config.scaled("a"), num_experts=112, num_experts_per_token=2)
ROUTES = {"plain top-k": False, "quantile balancing": True}


class Loads:
    """Counts what the router chooses, without changing it."""

    def __init__(self, model: K3Model) -> None:
        self._model = model
        self.step: dict[int, Tensor] = {}

    def observe(self, layer: int, scores: Tensor, bias: Tensor) -> None:
        """See ``RoutingObserver``."""
        chosen = (scores + bias).topk(self._model.config.num_experts_per_token, dim=-1).indices
        self.step[layer] = chosen.flatten().bincount(minlength=scores.shape[1])


@dataclass(frozen=True)
class RoutingRun:
    """One training run: the loss of each step and the loads [steps, MoE layers, E]."""

    losses: list[float]
    loads: Tensor

    def idle(self) -> Tensor:
        """Experts without a single token over a sliding window, summed over layers, [steps - window + 1]."""
        return (self.loads.unfold(0, WINDOW, 1).sum(-1) == 0).sum((1, 2))

    def busiest(self) -> Tensor:
        """Load of the busiest expert over the mean load, worst layer, each step."""
        loads = self.loads.double()
        return (loads.amax(-1) / loads.mean(-1)).amax(-1)


def loss_of(model: K3Model, ids: Tensor, observer: Loads | QuantileBalancer | None = None) -> Tensor:
    """Next-token cross-entropy."""
    logits, _ = model(ids[:, :-1], attn_res="two_phase", observer=observer)
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def overfit() -> list[float]:
    """Loss of config A on one batch of 8 x 65 random tokens."""
    model = K3Model(K3Config.scaled("a")).init_weights(0)
    ids = torch.randint(0, 512, (8, 65), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for _ in range(OVERFIT_STEPS):
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def text(seed: int) -> Iterator[Tensor]:
    """Batches [8, 129] of a made-up language: Zipf words, each of which prefers a few followers."""
    generator = torch.Generator().manual_seed(seed)
    zipf = 1 / torch.arange(1, 513, dtype=torch.float64)
    follow = torch.zeros(512, 512, dtype=torch.float64)
    for word in range(512):
        follow[word, torch.multinomial(zipf, 8, generator=generator)] = torch.rand(
            8, generator=generator, dtype=torch.float64
        )
    follow = 0.9 * follow / follow.sum(1, keepdim=True) + 0.1 * zipf / zipf.sum()
    while True:
        words = [torch.multinomial(zipf, 8, replacement=True, generator=generator)]
        for _ in range(128):
            words.append(torch.multinomial(follow[words[-1]], 1, generator=generator)[:, 0])
        yield torch.stack(words, dim=1)


def routing(balanced: bool) -> RoutingRun:
    """Train the sparse config; both runs see the same weights and the same text."""
    model = K3Model(SPARSE).init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    balancer, counter = QuantileBalancer(model), Loads(model)
    losses, loads = [], []
    for step, ids in enumerate(text(1)):
        if step == ROUTING_STEPS:
            break
        loss = loss_of(model, ids, balancer if balanced else counter)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step_loads = balancer.step() if balanced else counter.step
        losses.append(loss.item())
        loads.append(torch.stack([step_loads[layer] for layer in sorted(step_loads)]))
    return RoutingRun(losses, torch.stack(loads))


def plot(losses: list[float], runs: dict[str, RoutingRun], path: Path) -> None:
    """Three panels: the overfitted batch, idle experts, the busiest expert."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.semilogy(losses)
    left.set(title="Config A on one batch", xlabel="step", ylabel="cross-entropy, nats")
    for name, run in runs.items():
        idle = run.idle()
        middle.plot(range(WINDOW, WINDOW + len(idle)), idle, label=name)
        right.semilogy(run.busiest(), label=name)
    middle.set(title=f"Experts idle for {WINDOW} steps, of {4 * 112}", xlabel="step")
    right.set(title="Busiest expert / mean load", xlabel="step")
    middle.legend()
    right.legend()
    figure.savefig(path, dpi=110)


def page(losses: list[float], runs: dict[str, RoutingRun], seconds: float) -> str:
    """The numbers as markdown."""
    rows = [
        f"| {name} | {int(run.idle()[0])} | {int(run.idle()[-1])} | {float(run.busiest()[0]):.1f} | "
        f"{float(run.busiest()[-WINDOW:].median()):.1f} | {sum(run.losses[-WINDOW:]) / WINDOW:.3f} |"
        for name, run in runs.items()
    ]
    reached = next((step for step, loss in enumerate(losses) if loss < 0.01), None)
    table = "\n".join(rows)
    return f"""# Training checks of the reference model

`python benchmarks/model_checks.py`, torch {torch.__version__}, CPU, 1 thread, {seconds:.0f} s on a shared
machine. Weights and data from fixed seeds.

![overfitted batch, idle experts, busiest expert](model-checks.png)

## One batch, config A

8 x 64 random tokens, AdamW 3e-3: cross-entropy {losses[0]:.2f} at the start, {losses[-1]:.5f} after
{len(losses)} steps, below 0.01 from step {reached} on.

## Sparsity 56: 112 experts, 2 a token, 4 MoE layers

1024 tokens a step, {ROUTING_STEPS} steps: 18.3 tokens an expert at uniform load. Idle: experts, of 448,
without a token in {WINDOW} steps. Busiest: its load over the mean, in the worst layer. Loss: mean of the
last {WINDOW}.

| routing | idle, first {WINDOW} | idle, last {WINDOW} | busiest, step 0 | median, last {WINDOW} | loss |
|---|---|---|---|---|---|
{table}
"""


def main() -> int:
    """Run both checks and write the page and the plot."""
    parser = argparse.ArgumentParser(description="Overfit one batch; starve experts, or not.")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    start = time.monotonic()
    losses = overfit()
    runs = {name: routing(balanced) for name, balanced in ROUTES.items()}
    out.mkdir(parents=True, exist_ok=True)
    plot(losses, runs, out / "model-checks.png")
    text = page(losses, runs, time.monotonic() - start)
    (out / "model-checks.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    starved = int(runs["plain top-k"].idle()[-1])
    kept = int(runs["quantile balancing"].idle()[-1])
    return 0 if losses[-1] < 0.01 and starved > 0 and kept == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

"""The training run: step-based schedule, log, checkpoints to resume from, replay pass rate at intervals.

Equal data, configuration and seed give equal weights on one machine and thread count. Everything a step
draws follows from its number, so a run that is resumed continues as if it had not stopped.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.nn import functional

from k3eval_local.errors import CheckpointError
from k3eval_local.model.balancing import QuantileBalancer
from k3eval_local.model.decoder import K3Model
from k3eval_local.tokenizer import Tokenizer
from k3eval_local.train.batches import CONTEXT_WEIGHT, Batch, Batches
from k3eval_local.train.forward import LayerCarry, Precision, hidden, logits
from k3eval_local.train.measure import head_carry, pass_rate, replay, turn_rates
from k3eval_local.train.muon import Optimizers, Rates
from k3eval_local.train.render import Example

LOG = "log.jsonl"
STATE = "state.pt"


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    ``warm_up`` steps, constant to step ``hold``, then a cosine down to 3 % of the peak at ``steps``; the
    weight of tokens that are only read follows it. A run that was started with a later end can be resumed
    with an earlier one, as long as ``hold`` lies ahead.
    ``drills`` steps at the start are mostly copy drills; ``excerpts`` is the share of shortened examples.
    """

    steps: int
    hold: int
    tokens: int = 3200
    rates: Rates = field(default_factory=Rates)
    warm_up: int = 20
    drills: int = 40
    excerpts: float = 0.8
    clip: float = 1.0
    evaluate_every: int = 250
    save_every: int = 100

    def rate(self, step: int) -> float:
        """Share of the peak learning rate at ``step``."""
        if step < self.hold:
            return min(1.0, (step + 1) / self.warm_up)
        along = (step + 1 - self.hold) / (self.steps - self.hold)
        return 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * along))


@dataclass(frozen=True)
class Inputs:
    """What a run trains on, and held-out examples to measure with."""

    train: Sequence[Example]
    held_out: Sequence[Example]


class Run:
    """A training run in the folder ``out``."""

    def __init__(
        self,
        model: K3Model,
        tokenizer: Tokenizer,
        inputs: Inputs,
        schedule: Schedule,
        *,
        seed: int,
        out: Path,
        precision: Precision,
    ) -> None:
        self.model, self.inputs, self.schedule, self.out = model, inputs, schedule, out
        self._pad, self._precision = tokenizer.control.pad, precision
        self._batches = Batches(
            inputs.train,
            tokenizer,
            tokens=schedule.tokens,
            seed=seed,
            drill_steps=schedule.drills,
            excerpts=schedule.excerpts,
        )
        self._optimizers = Optimizers(model, schedule.rates)
        self._balancer = QuantileBalancer(model, "exact", ema=0.5)
        self._seed = seed
        self.step = 0
        self.tokens = 0
        out.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Continue from the folder's saved state, if there is one.

        Raises:
            CheckpointError: it is damaged, of another configuration, or beyond the schedule's end.
        """
        path = self.out / STATE
        if not path.exists():
            return False
        try:
            state = torch.load(path, weights_only=True)
            model, optimizers = state["model"], state["optimizers"]
            step, tokens = state["step"], state["tokens"]
            if not (isinstance(step, int) and isinstance(tokens, int) and step >= 0 and tokens >= 0):
                raise TypeError("step and tokens must be counts")
        except Exception as error:  # torch raises whatever damaged bytes lead to
            raise CheckpointError(
                f"{path} is damaged or no state of a run; start anew without --resume"
            ) from error
        if step > self.schedule.steps:
            raise CheckpointError(
                f"{path} is at step {step}, beyond the last one; resume with --steps {step} or more"
            )
        try:
            self.model.load_state_dict(model)
            self._optimizers.load_state_dict(optimizers)
        except Exception as error:  # as above
            raise CheckpointError(
                f"{path} is of another configuration; resume with the --config and --ranks of its run"
            ) from error
        self.step, self.tokens = step, tokens
        return True

    def save(self) -> None:
        """Write the state to resume from, whole or not at all.

        Raises:
            CheckpointError: it cannot be written.
        """
        state = {
            "model": self.model.state_dict(),
            "optimizers": self._optimizers.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
        }
        scratch = self.out / (STATE + ".new")
        try:
            torch.save(state, scratch)
            scratch.replace(self.out / STATE)
        except (OSError, RuntimeError) as error:  # torch's writer has no OSError
            raise CheckpointError(f"cannot write {self.out / STATE}: {error}") from error
        finally:
            scratch.unlink(missing_ok=True)

    def run(self, until: int | None = None) -> None:
        """Train to the end of the schedule, or to step ``until``."""
        last = self.schedule.steps if until is None else min(until, self.schedule.steps)
        window, started, seen = [], time.monotonic(), self.tokens
        while self.step < last:
            rate = self.schedule.rate(self.step)
            # what is read has much that nobody can predict: late in training that would only be noise
            batches = self._batches.batches(self.step, CONTEXT_WEIGHT * rate)
            loss, norm, loads = self._train_step(batches, rate)
            window.append(loss)
            self.step += 1
            if self.step % 20 == 0 or self.step == last:
                seconds = time.monotonic() - started
                self._log(
                    loss=round(sum(window) / len(window), 4),
                    grad_norm=round(norm, 3),
                    tokens_per_s=round((self.tokens - seen) / seconds),
                    busiest_expert=round(max(loads, default=0.0), 3),
                )
                window, started, seen = [], time.monotonic(), self.tokens
            if self.step % self.schedule.evaluate_every == 0 or self.step == last:
                self.measure()
                started, seen = time.monotonic(), self.tokens
            if self.step % self.schedule.save_every == 0 or self.step == last:
                self.save()
                self._log(weights_sha256=self.weights_digest())

    def measure(self) -> float:
        """Replay pass rate on the held-out examples; also logged."""
        scores = replay(self.model, self.inputs.held_out, pad=self._pad, precision=self._precision)
        rate = pass_rate(scores)
        tokens = max(1, sum(score.tokens for score in scores))
        self._log(
            replay_pass_rate=round(rate, 4),
            turns=[round(share, 3) for share in turn_rates(scores)],
            held_out_loss=round(sum(score.loss for score in scores) / tokens, 4),
        )
        return rate

    def _train_step(self, batches: Sequence[Batch], rate: float) -> tuple[float, float, list[float]]:
        """One update: loss of the written tokens, gradient norm, busiest expert of each layer (1 = even)."""
        weight = sum(float(batch.weights.sum()) for batch in batches)
        carries: dict[tuple[int, ...], list[LayerCarry] | None] = {}
        written_loss, written_count = 0.0, 0
        for batch in batches:
            if batch.head not in carries:
                carries[batch.head] = head_carry(self.model, batch.head, self._precision)
            out, _ = hidden(
                self.model,
                batch.ids,
                carries[batch.head],
                precision=self._precision,
                observer=self._balancer,
                valid=batch.valid,
            )
            scores = logits(self.model, out.flatten(0, 1)[batch.positions], self._precision)
            losses = functional.cross_entropy(scores, batch.targets, reduction="none")
            torch.autograd.backward((losses * batch.weights).sum() / weight)
            written = batch.weights == 1.0
            written_loss += float(losses.detach()[written].sum())
            written_count += int(written.sum())
            self.tokens += int(batch.valid.sum())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.schedule.clip)
        if not math.isfinite(float(norm)):
            self.model.zero_grad(set_to_none=True)
            self._log(skipped="the gradient is not finite")
        else:
            self._optimizers.step(rate)
        loads = self._balancer.step()
        busiest = [float(load.max() * len(load) / load.sum()) for load in loads.values()]
        return written_loss / max(1, written_count), float(norm), busiest

    def weights_digest(self) -> str:
        """SHA-256 of every parameter's bytes: equal runs have equal digests."""
        digest = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _log(self, **values: object) -> None:
        entry = {"step": self.step, "tokens": self.tokens, **values}
        with (self.out / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
        print(json.dumps(entry), flush=True)  # noqa: T201  # progress of a command

    def describe(self) -> dict[str, object]:
        """Settings, for the log and the model card."""
        return {
            "seed": self._seed,
            "schedule": asdict(self.schedule),
            "examples": len(self.inputs.train),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
        }

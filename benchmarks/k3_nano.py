"""What the bundled model can do: replay pass rates by shape, and jobs that were run through the product.

    python benchmarks/k3_nano.py [--model k3-nano] [--seed 900001] [--only rare,recall-16k] [--jobs DIR ...]

Replay: fresh conversations of a series that is not in the training data, scored as in
``k3eval_local.train.measure``. Jobs: folders that ``k3eval run --task repo-fix-mini`` left; all that were
made with one model belong here, not the best. Writes ``replay.json``, ``live.json`` (whichever was measured
now) and ``README.md`` (from both) to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3eval_harness.results.load import load_job
from k3eval_harness.stats import wilson
from k3eval_harness.task.mini.episodes import SHAPES, EpisodeShape, episodes
from k3eval_harness.task.mini.project import make_project
from k3eval_local.checkpoint import open_model, resolve
from k3eval_local.model.decoder import K3Model
from k3eval_local.tokenizer import Tokenizer
from k3eval_local.train.evaluate import evaluate
from k3eval_local.train.measure import replay
from k3eval_local.train.render import render, share_openings


@dataclass(frozen=True)
class Part:
    """``count`` conversations of a shape, of each the first ``turns`` turns (None: all)."""

    shape: str
    count: int
    what: str
    turns: int | None = None


_BETWEEN = "between the failing test's name and its use"
PARTS = (
    Part("plain", 300, "what `k3eval run --task repo-fix-mini` asks"),
    Part("invented", 100, "all names from made-up words, as in training"),
    Part("rare", 100, "all names from real words that are never in the training data"),
    Part("listing-2x", 100, "twice as many tests listed"),
    Part("listing-4x", 100, "four times as many tests listed"),
    Part("noise-500", 100, "500 tokens of unrelated output before the failing test"),
    Part("noise-500-after", 100, f"500 tokens {_BETWEEN}"),
    Part("recall-1k", 60, f"1k tokens {_BETWEEN}, twice"),
    Part("recall-4k", 40, f"4k tokens {_BETWEEN}, twice"),
    Part("recall-1k", 100, f"recall alone: 1k tokens {_BETWEEN}", 2),
    Part("recall-4k", 100, f"recall alone: 4k tokens {_BETWEEN}", 2),
    Part("recall-16k", 60, f"recall alone: 16k tokens {_BETWEEN}", 2),
    Part("recall-64k", 20, f"recall alone: 64k tokens {_BETWEEN}", 2),
)


def measure(model: K3Model, weights: str, tokenizer: Tokenizer, part: Part, seed: int) -> dict[str, Any]:
    """One row of the replay table, with kinds and turns."""
    shape = SHAPES[part.shape]
    records = episodes(seed, part.count, shape)
    examples = share_openings([render(record, tokenizer) for record in records])
    result = evaluate(weights, replay(model, examples, pad=tokenizer.control.pad, turns=part.turns))
    lengths = sorted(len(each.ids if part.turns is None else each.first(part.turns).ids) for each in examples)
    return {"part": asdict(part), "tokens": lengths[len(lengths) // 2], **asdict(result)}


def live(folders: Sequence[Path]) -> dict[str, Any]:
    """Jobs of the product, together, by kind and by shape."""
    kinds: dict[str, Counter[bool]] = {}
    jobs: list[dict[str, Any]] = []
    calls = wrong = void = 0
    for folder in folders:
        job = load_job(folder)
        own: Counter[bool] = Counter()
        for trial in job.trials:
            calls += sum(len(turn.tool_calls) for turn in trial.turns)
            wrong += sum(turn.tool_errors for turn in trial.turns)
            if trial.outcome == "void":
                void += 1
                continue
            label, kind = kind_of(trial.task.name)
            own[trial.outcome == "passed"] += 1
            if not label:
                kinds.setdefault(kind, Counter())[trial.outcome == "passed"] += 1
        interval = wilson(own[True], own.total())
        facts = {"task": label or "plain", "passed": own[True], "n": own.total()}
        jobs.append({"job": folder.name, **facts, "low": interval.low, "high": interval.high})
    plain = [job for job in jobs if job["task"] == "plain"]
    passed, total = sum(job["passed"] for job in plain), sum(job["n"] for job in plain)
    interval = wilson(passed, total)
    return {
        "passed": passed,
        "n": total,
        "void": void,
        "low": interval.low,
        "high": interval.high,
        "calls": calls,
        "calls_not_valid": wrong,
        "kinds": {kind: [count[True], count.total()] for kind, count in sorted(kinds.items())},
        "jobs": jobs,
    }


def kind_of(name: str) -> tuple[str, str]:
    """Shape (empty: the usual one) and kind of bug of a generated task, from its name."""
    found = re.fullmatch(r".*mini-(?:(.+)-)?(\d+)-(\d+)", name)
    if found is None:
        raise SystemExit(f"{name} is not a generated task")
    label, seed, index = found.groups(default="")
    shape = SHAPES[label or "plain"]
    if not isinstance(shape, EpisodeShape):
        raise SystemExit(f"{name}: tasks are not made of a mixture")
    return label, make_project(int(seed), int(index), shape.project).kind


def rate_cells(passed: int, total: int) -> tuple[str, str, str, str]:
    """Passed, n, rate and Wilson interval, as cells."""
    span = wilson(passed, total)
    return str(passed), str(total), f"{passed / total:.1%}", f"{span.low:.1%} - {span.high:.1%}"


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table after an empty line."""
    every = [head, ["---"] * len(head), *rows]
    return ["", *(f"| {' | '.join(cells)} |" for cells in every)]


RATE = ("passed", "n", "rate", "95 %")


def report(replayed: Sequence[dict[str, Any]], lived: dict[str, Any] | None) -> str:
    """The report. Intervals are Wilson's."""
    lines = ["# k3-nano, measured", ""]
    if lived:
        passed, total, rate, span = rate_cells(lived["passed"], lived["n"])
        lines += [
            "Through the whole product (local server, k3 agent, Docker, hidden tests), on fresh series.",
            "Every job that was run with these weights counts.",
            "",
            f"**{passed} of {total} passed: {rate}, 95 % {span}**; {lived['void']} void;",
            f"{lived['calls']} tool calls, {lived['calls_not_valid']} not valid (grammar on).",
        ]
        jobs = lived["jobs"]
        cells = ((job["job"], job["task"], *rate_cells(job["passed"], job["n"])) for job in jobs)
        lines += grid(("job", "tasks", *RATE), cells)
        lines += grid(
            ("kind of bug", *RATE), ((k, *rate_cells(*count)) for k, count in lived["kinds"].items())
        )
        lines.append("")
    lines += [
        "Replay pass rate: the share of conversations whose every turn greedy writing reproduces exactly,",
        "from one parallel pass. Up to rounding it bounds the live rate from below: another right way, or a",
        "second try, is a miss. For recall the first two turns count: the second repeats the failing test's",
        "name.",
    ]
    shapes = (
        (f"`{part['shape']}`", part["what"], str(row["tokens"]), *rate_cells(rate["passed"], rate["n"]))
        for row, part, rate in ((row, row["part"], row["all"]) for row in replayed)
    )
    lines += grid(("shape", "what", "tokens", *RATE), shapes)
    for row in replayed:
        if row["part"]["shape"] == "plain" and row["kinds"]:
            kinds = ((kind, *rate_cells(rate["passed"], rate["n"])) for kind, rate in row["kinds"].items())
            lines += ["", "`plain` by kind of bug, replay:", *grid(("kind of bug", *RATE), kinds)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure what is asked for, then write the report of everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="k3-nano", help="bundled name or checkpoint folder")
    parser.add_argument("--seed", type=int, default=900_001, help="series of the replayed conversations")
    parser.add_argument("--only", help="shapes to replay, joined by commas; 'none' for none")
    parser.add_argument("--jobs", type=Path, nargs="+", default=[], help="folders of jobs that were run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/k3-nano"))
    options = parser.parse_args()

    import torch

    torch.set_num_threads(options.threads)
    model, weights = open_model(options.model)
    found = resolve(options.model)
    tokenizer = Tokenizer.for_checkpoint(found if isinstance(found, Path) else None, model.config.vocab_size)
    options.out.mkdir(parents=True, exist_ok=True)
    replay_file, live_file = options.out / "replay.json", options.out / "live.json"
    known = json.loads(replay_file.read_text(encoding="utf-8")) if replay_file.exists() else []
    rows = {json.dumps(row["part"]): row for row in known}
    for part in PARTS:
        if options.only is None or part.shape in options.only.split(","):
            row = measure(model, weights, tokenizer, part, options.seed)
            rows[json.dumps(asdict(part))] = row
            sys.stderr.write(f"{part.shape} {part.turns or ''}: {row['all']} turns {row['turns']}\n")
    ordered = [rows[key] for part in PARTS if (key := json.dumps(asdict(part))) in rows]
    replay_file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    if options.jobs:
        live_file.write_text(json.dumps(live(options.jobs), indent=1) + "\n", encoding="utf-8")
    lived = json.loads(live_file.read_text(encoding="utf-8")) if live_file.exists() else None
    (options.out / "README.md").write_text(report(ordered, lived), encoding="utf-8")


if __name__ == "__main__":
    main()

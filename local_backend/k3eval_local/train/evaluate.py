"""Measure a checkpoint on conversations that it was not trained on.

    python -m k3eval_local.train.evaluate --model k3-nano --data FILE|- [--json FILE]

The measure is the replay pass rate (see ``measure``), with 95 % Wilson intervals, in all, by kind and by
turn. ``--turns 2`` on a ``recall`` shape measures recall: the second turn repeats the name of the failing
test, which stands only before the unrelated output. Live rates: ``k3eval run --task repo-fix-mini``.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k3eval_local.command import MAX_THREADS, Parser, whole
from k3eval_local.train.command import called, check_target, one_line, opened

if TYPE_CHECKING:
    from k3eval_local.train.measure import Score


@dataclass(frozen=True)
class Rate:
    """A share with its 95 % Wilson interval."""

    passed: int
    n: int
    rate: float
    low: float
    high: float

    @classmethod
    def of(cls, passed: int, n: int) -> "Rate":
        """From counts; ``n`` is at least 1."""
        from scipy.stats import binomtest

        interval = binomtest(passed, n).proportion_ci(method="wilson")
        return cls(passed, n, passed / n, float(interval.low), float(interval.high))


@dataclass(frozen=True)
class Evaluation:
    """What is reported of one data file."""

    weights: str
    all: Rate
    kinds: dict[str, Rate]
    turns: list[Rate]
    loss: float


def evaluate(weights: str, scores: Sequence["Score"]) -> Evaluation:
    """Sum up scores; raises ValueError when there are none."""
    from k3eval_local.train.measure import turn_columns

    if not scores:
        raise ValueError("there is nothing to evaluate: the data hold no conversation")
    kinds = {
        kind: [score.passed for score in scores if score.kind == kind]
        for kind in sorted({score.kind for score in scores})
    }
    return Evaluation(
        weights,
        Rate.of(sum(score.passed for score in scores), len(scores)),
        {kind: Rate.of(sum(passed), len(passed)) for kind, passed in kinds.items()},
        [Rate.of(sum(column), len(column)) for column in turn_columns(scores)],
        sum(score.loss for score in scores) / max(1, sum(score.tokens for score in scores)),
    )


def table(result: Evaluation) -> str:
    """The result as a Markdown table."""
    lines = ["| kind | passed | n | rate | 95 % |", "|---|---|---|---|---|"]
    for name, rate in [*result.kinds.items(), ("all", result.all)]:
        interval = f"{rate.low:.1%} - {rate.high:.1%}"
        lines.append(f"| {name} | {rate.passed} | {rate.n} | {rate.rate:.1%} | {interval} |")
    lines += ["", "| turn | reproduced | n | rate | 95 % |", "|---|---|---|---|---|"]
    for number, rate in enumerate(result.turns, 1):
        lines.append(
            f"| {number} | {rate.passed} | {rate.n} | {rate.rate:.1%} | {rate.low:.1%} - {rate.high:.1%} |"
        )
    return "\n".join([*lines, "", f"loss: {result.loss:.4f}"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate and print the table."""
    parser = Parser(prog="k3eval_local.train.evaluate", description="Measure a checkpoint.")
    parser.add_argument("--model", default="k3-nano", help="bundled name or checkpoint folder")
    parser.add_argument("--data", required=True, help="conversations, JSONL; - is standard input")
    parser.add_argument("--turns", type=whole(1), help="only the first so many turns; the whole by default")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--threads", type=whole(1, MAX_THREADS), default=1, help="CPU threads")
    options = parser.parse_args(arguments)
    with one_line():
        run(options)


def run(options: argparse.Namespace) -> None:
    """One evaluation with parsed options.

    Raises:
        LocalError: it cannot be done as asked; says why.
    """
    if options.json:
        check_target("--json", options.json)
    from k3eval_local.model.names import resolve

    found = resolve(options.model)
    import torch

    from k3eval_local.checkpoint import open_model
    from k3eval_local.tokenizer import Tokenizer
    from k3eval_local.train.measure import replay
    from k3eval_local.train.render import DataError, read_examples, share_openings

    torch.set_num_threads(options.threads)
    model, weights = open_model(options.model)
    folder = found if isinstance(found, Path) else None
    tokenizer = Tokenizer.for_checkpoint(folder, model.config.vocab_size)
    with opened(options.data) as lines:
        examples = share_openings(list(read_examples(lines, tokenizer, called(options.data))))
    if not examples:
        raise DataError(f"--data {options.data} holds no conversation; at least 1 is needed")
    result = evaluate(weights, replay(model, examples, pad=tokenizer.control.pad, turns=options.turns))
    print(table(result))  # noqa: T201  # the result of a command
    if options.json:
        options.json.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Two jobs on their common tasks: a paired comparison, because the tasks' difficulty is shared."""

from __future__ import annotations

from collections.abc import Sequence

from k3eval_harness import stats
from k3eval_harness.report.build import task_results
from k3eval_harness.results.schema import Interval, Record, TrialRecord


class Comparison(Record):
    """Second job minus first job."""

    first: str
    second: str
    common_tasks: int
    """Tasks with a valid result in both jobs."""
    first_score: float | None
    """Mean over the common tasks."""
    second_score: float | None
    difference: float | None
    interval: Interval | None
    no_interval: str | None
    """Why tasks were compared and there is no interval."""
    mcnemar_p: float | None
    """Exact, two-sided; null unless every common task has exactly one valid attempt in both jobs."""
    only_first: tuple[str, ...]
    """Tasks that only the first job passed (more than half of the valid attempts)."""
    only_second: tuple[str, ...]
    changed_tasks: tuple[str, ...]
    """Common names whose content differs between the jobs: compared, but not the same task."""


def compare(
    first: Sequence[TrialRecord], second: Sequence[TrialRecord], names: tuple[str, str]
) -> Comparison:
    """Paired bootstrap of the difference by task, and McNemar's exact test with one attempt a task."""
    left, right = task_results(first), task_results(second)
    paired = stats.paired_bootstrap(left, right)
    common = paired.tasks if paired else ()
    passes = {task: (_mean(left[task]) > 0.5, _mean(right[task]) > 0.5) for task in common}
    only_first = tuple(task for task, (a, b) in passes.items() if a and not b)
    only_second = tuple(task for task, (a, b) in passes.items() if b and not a)
    single = bool(common) and all(len(left[t]) == len(right[t]) == 1 for t in common)
    digests = {(t.task.name, t.task.digest) for t in first}, {(t.task.name, t.task.digest) for t in second}
    return Comparison(
        first=names[0],
        second=names[1],
        common_tasks=len(common),
        first_score=_mean([_mean(left[t]) for t in common]) if common else None,
        second_score=_mean([_mean(right[t]) for t in common]) if common else None,
        difference=paired.difference if paired else None,
        interval=paired.interval if paired else None,
        no_interval=_no_interval(paired) if paired else None,
        mcnemar_p=stats.mcnemar_exact(len(only_first), len(only_second)) if single else None,
        only_first=only_first,
        only_second=only_second,
        changed_tasks=tuple(sorted({name for name, _ in digests[0] ^ digests[1] if name in common})),
    )


def _no_interval(paired: stats.PairedDifference) -> str | None:
    if paired.interval:
        return None
    count = len(paired.tasks)
    if count == 1:
        return "no interval: one common task says nothing about others"
    return (
        f"no interval: all {count} common tasks show the same difference, so a bootstrap over them has no "
        "spread; more tasks are needed"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

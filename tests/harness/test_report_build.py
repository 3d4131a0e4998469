"""The report's figures and its Markdown, on jobs that are complete, interrupted, void or empty."""

from __future__ import annotations

from decimal import Decimal
from io import StringIO

import pytest
from rich.console import Console
from surface_samples import summary, trial, turn

from k3eval_harness.report.build import COMPLETE, JobReport, build_report, pass_rates, total_costs
from k3eval_harness.report.compare import compare
from k3eval_harness.report.markdown import comparison_markdown, report_markdown
from k3eval_harness.report.table import print_report, summary_lines
from k3eval_harness.results.schema import Costs, Outcome

PASSED, FAILED, VOID = Outcome.PASSED, Outcome.FAILED, Outcome.VOID


def full_job() -> JobReport:
    trials = [
        trial("one", turns=(turn(1, 1500, 0.010), turn(2, 5000, 0.014))),
        trial("two", outcome=FAILED, detail="2 hidden | tests failed", turns=(turn(1, 1600, 0.012),)),
        trial("three", outcome=VOID, cause="sandbox", detail="the container\nwas lost"),
        trial("four", outcome=FAILED, turns=(turn(1, 40_000, None),)),
    ]
    return build_report(trials, summary(planned=4), "job-1")


def test_void_is_no_failure_and_lowers_only_the_coverage() -> None:
    report = full_job()
    assert (report.passed, report.failed, report.void, report.missing) == (1, 2, 1, 0)
    assert report.score == pytest.approx(1 / 3)
    assert report.coverage == 0.75
    assert report.worst_case_score == 0.25
    assert report.void_causes == {"sandbox": 1}
    assert report.state == COMPLETE
    assert report.score_interval is not None
    assert report.score_interval.method == "wilson, n=3"


def test_tokens_costs_and_times_are_sums_over_trials() -> None:
    report = full_job()
    assert report.tokens.prompt == 1500 + 5000 + 1600 + 40_000
    assert report.tokens.cache_read == 4 * 500
    assert report.tokens.output_reasoning == 4 * 40
    assert report.costs == Costs(
        billed=Decimal("0.08"), computed=Decimal("0.100"), ideal_cache=Decimal("0.04")
    )
    assert report.model_seconds == 6.0


def test_decode_is_reported_by_context_and_void_replies_by_reason() -> None:
    report = full_job()
    assert [(b.low, b.seconds_per_token.n) for b in report.decode.bins] == [(1024, 2), (4096, 1)]
    assert report.decode.bins[0].seconds_per_token.median == pytest.approx(0.011)
    assert report.decode.void == {"a single event": 1}
    assert report.contexts is not None
    assert report.contexts.largest == 40_000
    assert report.contexts.turns_by_bin == {"1024-2047": 2, "4096-8191": 1, "32768-65535": 1}


def test_an_interrupted_job_says_what_is_missing() -> None:
    report = build_report([trial("one")], summary(planned=5, interrupted=True), "job-1")
    assert report.missing == 4
    assert report.coverage == 0.2
    assert report.worst_case_score == 0.2
    assert report.state == "interrupted: 4 of 5 trials have no result"
    assert "4 of 5" in report_markdown(report)


def test_a_job_without_summary_is_reported_from_its_trials() -> None:
    report = build_report([trial("one"), trial("two", outcome=FAILED)], None, "killed-job")
    assert report.job_id == "job-1"
    assert report.score == 0.5
    assert "not finished" in report.state
    known = build_report([trial("one")], None, "killed-job", planned=4)
    assert (known.missing, known.coverage, known.worst_case_score) == (3, 0.25, 0.25)
    assert known.state == "not finished: the job wrote no summary, 3 of 4 trials have no result"


def test_a_job_without_any_trial_has_no_score_and_still_renders() -> None:
    report = build_report([], None, "killed-job")
    assert (report.job_id, report.score, report.score_interval, report.coverage) == (
        "killed-job", None, None, None,
    )  # fmt: skip
    assert "Report on killed-job" in report_markdown(report)
    assert summary_lines(report)[0] == "No valid trial of 0: there is no score."


def test_all_trials_void_is_no_score_not_zero() -> None:
    report = build_report([trial(outcome=VOID, cause="provider")], summary(planned=1), "job-1")
    assert report.score is None
    assert report.score_interval is None
    assert report.coverage == 0.0


def test_several_attempts_give_pass_rates_and_a_cluster_interval() -> None:
    trials = [trial("one", attempt, PASSED if attempt != 2 else FAILED) for attempt in (1, 2, 3, 4)]
    trials += [trial("two", attempt, FAILED) for attempt in (1, 2)]
    report = build_report(trials, summary(planned=6), "job-1")
    assert [(r.k, r.tasks) for r in report.pass_rates] == [(1, 2), (2, 2), (4, 1)]
    assert report.pass_rates[0].any_passes == pytest.approx((3 / 4 + 0) / 2)
    assert report.pass_rates[1].any_passes == pytest.approx((1 + 0) / 2)
    assert report.pass_rates[1].all_pass == pytest.approx((3 / 6 + 0) / 2)
    assert report.score_interval is not None
    assert "cluster bootstrap" in report.score_interval.method
    assert pass_rates({}) == ()


def test_markdown_holds_every_part_and_keeps_tables_whole() -> None:
    text = report_markdown(full_job())
    for heading in ("Outcome", "Tokens and cost", "Decode speed", "Context lengths", "Tasks", "claims"):
        assert heading in text
    assert "33.3 %" in text
    assert "2 hidden \\| tests failed" in text
    assert "the container was lost" in text
    assert "abc123" in text
    assert "$0.0800" in text
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in rows}) <= 1, block


def test_unknown_costs_are_dashes_and_other_currencies_are_not_added() -> None:
    report = build_report([trial("one")], summary(planned=1), "job-1")
    assert report.costs.billed is None
    assert "$0.0" not in report_markdown(report)
    known = trial("one", turns=(turn(),))
    yuan = known.model_copy(update={"costs": Costs(billed=Decimal(1), currency="CNY")})
    assert total_costs([known, yuan]) == Costs(currency="mixed")
    lost = known.model_copy(update={"costs": Costs(computed=Decimal(2))})
    assert total_costs([known, lost]).billed is None
    assert total_costs([known, trial("no model call")]) == total_costs([known])


@pytest.mark.parametrize(("width", "columns"), [(80, 8), (120, 11)])
def test_task_names_stay_whole_on_a_narrow_terminal(width: int, columns: int) -> None:
    console = Console(width=width, file=StringIO(), record=True)
    print_report(console, build_report([trial("k3eval/mini-7-00000", turns=(turn(),))], None, "x"))
    head, row = console.export_text().splitlines()[:2]
    assert row.startswith("k3eval/mini-7-00000 ")
    assert len(head.split()) == len(row.split()) == columns


def test_markup_in_task_names_and_details_is_shown_as_it_is() -> None:
    report = build_report([trial("a[bold]b", outcome=VOID, cause="user", detail="{{ 7*7 }}")], None, "x")
    text = report_markdown(report)
    assert "a[bold]b" in text
    assert "{{ 7*7 }}" in text


def test_random_weights_are_named_as_what_they_are() -> None:
    lines = summary_lines(full_job())
    assert any("weights: random, seed 0. Random weights solve nothing" in line for line in lines)
    assert any(line.startswith("Tokens: 46100 miss, 2000 read, - written, 400 output") for line in lines)


def test_vendor_claims_are_marked_as_such() -> None:
    text = report_markdown(full_job())
    before, _, after = text.partition("## Vendors' claims, not measured here")
    assert "6.3x" in after
    assert "6.3x" not in before


def test_a_report_survives_json() -> None:
    report = full_job()
    assert JobReport.model_validate_json(report.model_dump_json()) == report


def test_comparison_is_paired_on_common_tasks() -> None:
    names = [f"t{i}" for i in range(8)]
    first = [trial(n, outcome=FAILED) for n in names] + [trial("only-here")]
    second = [trial(n, outcome=PASSED if i < 6 else FAILED) for i, n in enumerate(names)]
    found = compare(first, second, ("old", "new"))
    assert found.common_tasks == 8
    assert found.difference == pytest.approx(0.75)
    assert found.mcnemar_p == pytest.approx(2 * 0.5**6)
    assert found.only_second == tuple(names[:6])
    assert found.interval is not None
    assert found.interval.low > 0
    text = comparison_markdown(found)
    assert "+75.0 points" in text
    assert "p = 0.0312" in text


def test_comparison_with_several_attempts_has_no_mcnemar() -> None:
    first = [trial("a", 1, FAILED), trial("a", 2, PASSED), trial("b", 1, FAILED)]
    second = [trial("a", 1, PASSED), trial("b", 1, FAILED, digest="d2")]
    found = compare(first, second, ("old", "new"))
    assert found.mcnemar_p is None
    assert found.difference == pytest.approx(0.25)
    assert found.changed_tasks == ("b",)
    assert "do not compare like with like: b" in comparison_markdown(found)


@pytest.mark.parametrize(
    ("tasks", "reason"),
    [
        ("a", "one common task says nothing about others"),
        ("abc", "all 3 common tasks show the same difference"),
    ],
)
def test_a_comparison_without_an_interval_says_why(tasks: str, reason: str) -> None:
    found = compare(
        [trial(task, outcome=FAILED) for task in tasks], [trial(task) for task in tasks], ("old", "new")
    )
    assert found.interval is None
    assert f"+100.0 points (no interval: {reason}" in comparison_markdown(found)


def test_comparison_without_common_tasks() -> None:
    found = compare([trial("a")], [trial("a", outcome=VOID, cause="sandbox")], ("old", "new"))
    assert (found.common_tasks, found.difference, found.first_score) == (0, None, None)
    assert "nothing to compare" in comparison_markdown(found)

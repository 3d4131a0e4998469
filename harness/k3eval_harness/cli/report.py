"""``k3eval report``: what a job's folder says, finished or not; several jobs are compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3eval_harness.cli.common import one_line_errors, out_option

if TYPE_CHECKING:
    from k3eval_harness.report.build import JobReport
    from k3eval_harness.report.compare import Comparison

FORMATS = ("md", "json")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(report)


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Job folders; the later ones are compared with the first."),
    ],
    form: Annotated[str, typer.Option("--format", help="md or json.")] = "md",
    out: Annotated[Path | None, out_option("File to write instead of stdout.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """Report on a job: pass rate with its interval, coverage, tokens, costs, decode speed by context."""
    with one_line_errors():
        from k3eval_harness.cli.render import write_text
        from k3eval_harness.errors import UsageError
        from k3eval_harness.report.build import build_report
        from k3eval_harness.report.compare import compare
        from k3eval_harness.results import load_job

        if form not in FORMATS:
            raise UsageError(f"--format must be one of {', '.join(FORMATS)}, not {form!r}")
        jobs = [(folder.name, load_job(folder)) for folder in folders]
        reports = [build_report(job.trials, job.summary, name, job.planned) for name, job in jobs]
        first = jobs[0]
        pairs = [compare(first[1].trials, job.trials, (first[0], name)) for name, job in jobs[1:]]
        as_json = json or form == "json"
        write_text(_json_text(reports, pairs) if as_json else _markdown(reports, pairs), out)


def _json_text(reports: list[JobReport], pairs: list[Comparison]) -> str:
    """One report as one object; several as ``{"reports": [...], "comparisons": [...]}``."""
    import json

    documents = [item.model_dump(mode="json") for item in reports]
    compared = [item.model_dump(mode="json") for item in pairs]
    data = documents[0] if len(documents) == 1 else {"reports": documents, "comparisons": compared}
    return json.dumps(data, ensure_ascii=False, indent=2) + "\n"


def _markdown(reports: list[JobReport], pairs: list[Comparison]) -> str:
    from k3eval_harness.report.markdown import comparison_markdown, report_markdown

    return "\n".join([*map(comparison_markdown, pairs), *map(report_markdown, reports)])

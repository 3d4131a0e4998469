"""Markdown of a report or a comparison. It formats; the figures are computed in ``build`` and ``compare``."""

from __future__ import annotations

from decimal import Decimal

from k3eval_harness.progress import known_cost, money
from k3eval_harness.report.build import JobReport
from k3eval_harness.report.compare import Comparison
from k3eval_harness.results.schema import Interval


def report_markdown(report: JobReport) -> str:
    """One job's report."""
    return _render("report.md.j2", r=report)


def comparison_markdown(comparison: Comparison) -> str:
    """Two jobs side by side."""
    return _render("comparison.md.j2", c=comparison)


def _render(template: str, **values: JobReport | Comparison) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Markdown, not HTML: cells are made safe by `cell`, and no value is ever evaluated as a template.
    environment = Environment(  # noqa: S701 - see above
        loader=PackageLoader("k3eval_harness.report"),
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=False,
    )
    environment.filters |= {
        "cell": _cell,
        "fine": _fine,
        "interval": _interval,
        "known_cost": known_cost,
        "money": _money,
        "number": _number,
        "points": _points,
        "seconds": _seconds,
        "share": _share,
    }
    return environment.get_template(template).render(**values).strip() + "\n"


def _cell(text: str) -> str:
    """One line, short, with no character that would end a table cell."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= 160 else line[:159] + "…"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} points"


def _interval(interval: Interval) -> str:
    return f"{_share(interval.low)} to {_share(interval.high)} at {interval.level:.0%}, {interval.method}"


def _fine(value: float) -> str:
    return f"{value:.3g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _money(amount: Decimal | None, currency: str) -> str:
    return money(amount, currency)

"""What the engine's and the server's benchmarks share: figures, the machine, the two result files."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch


@dataclass(frozen=True)
class Measured:
    """One figure."""

    section: str
    case: str
    value: float
    unit: str


def say(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def machine(script: str, threads: int) -> dict[str, str]:
    """What the figures depend on. script: the benchmark's path, as it is called."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown")
    usable = len(os.sched_getaffinity(0))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", script, *sys.argv[1:]]),
        "cpu": f"{cpu}, {os.cpu_count()} cores, {usable} of them allowed, {threads} thread(s) used",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
        "load": f"1-minute load average {os.getloadavg()[0]:.1f} at the start",
    }


def write(
    rows: Sequence[Measured], facts: Mapping[str, str], out: Path, name: str, title: str, notes: Sequence[str]
) -> None:
    """The tables under ``title`` and ``notes`` as ``name.md``, and the same figures as ``name.json``."""
    out.mkdir(parents=True, exist_ok=True)
    data = {"facts": dict(facts), "rows": [asdict(row) for row in rows]}
    (out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in facts.items()), "", *notes, ""]
    section = None
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", f"## {section}", "", "| case | figure | unit |", "|---|---|---|"]
        whole = row.value == round(row.value) or abs(row.value) >= 1000
        shown = f"{row.value:.0f}" if whole else f"{row.value:.4g}"
        lines.append(f"| {row.case} | {shown} | {row.unit} |")
    (out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")

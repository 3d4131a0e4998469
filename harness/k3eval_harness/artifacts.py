"""Keeps what a trial leaves behind: /logs/artifacts and declared artifacts, below ``artifacts/``.

A work tree that is declared as an artifact is not kept whole: it crosses over to grading, and
``agent/changes.patch`` says what the agent did to it. ``artifacts/manifest.json`` has Harbor's form.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from k3eval_harness.errors import SizeLimitExceeded
from k3eval_harness.grade import LOGS_ARTIFACTS, CapturedPath
from k3eval_harness.results.layout import write_json
from k3eval_harness.sandbox.archive import extract
from k3eval_harness.task import Task
from k3eval_harness.task.config import ArtifactTable

ARTIFACTS_LIMIT: Final = 256 * 1024**2


def keep_artifacts(task: Task, captured: Sequence[CapturedPath], workdir: str, folder: Path) -> None:
    """Write the declared artifacts and /logs/artifacts below ``folder``, and their manifest."""
    by_path = {item.path: item for item in captured}
    wanted = [*task.artifacts]
    if LOGS_ARTIFACTS in by_path and not any(item.source == LOGS_ARTIFACTS for item in wanted):
        wanted.append(ArtifactTable(source=LOGS_ARTIFACTS))
    entries = [_keep(item, by_path, workdir, folder) for item in wanted]
    write_json(folder / "manifest.json", entries)


def _keep(
    item: ArtifactTable, by_path: dict[str, CapturedPath], workdir: str, folder: Path
) -> dict[str, object]:
    destination = item.destination or item.source.lstrip("/")
    found = by_path.get(str(PurePosixPath(item.source)))
    status = "skipped"
    if found is not None and found.archive is None:
        status = "failed"
    elif found is not None and found.archive is not None and found.path != workdir:
        status = _extract(found.archive, folder / destination, item.exclude)
    return {
        "source": item.source,
        "destination": destination,
        "type": "file" if status == "ok" and (folder / destination).is_file() else "directory",
        "status": status,
        "service": None,
        "exclude": list(item.exclude),
    }


def _extract(archive: Path, into: Path, exclude: Sequence[str]) -> str:
    try:
        with archive.open("rb") as file:
            names = extract(file, into, ARTIFACTS_LIMIT)
    except SizeLimitExceeded:
        return "failed"
    for name in names:
        if any(fnmatch.fnmatch(name, pattern) for pattern in exclude):
            (into / name).unlink()
    return "ok" if names else "empty"

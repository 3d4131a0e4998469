"""Where results come from: versions and the checkout's commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Final

from k3eval import __version__
from k3eval_harness.results.schema import Provenance

_GIT_SECONDS: Final = 10.0


def collect_provenance(engine_version: str | None, prices_checked_on: str | None) -> Provenance:
    """What a sceptic needs to repeat a trial. Never raises; unknown is null."""
    return Provenance(
        k3eval_version=__version__,
        git_commit=_checkout_commit(Path(__file__).resolve().parents[2]),
        python=platform.python_version(),
        platform=platform.platform(),
        engine_version=engine_version,
        prices_checked_on=prices_checked_on,
    )


def _checkout_commit(root: Path) -> str | None:
    """Commit of the k3eval checkout at ``root``, with ``-dirty`` when tracked files are changed."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

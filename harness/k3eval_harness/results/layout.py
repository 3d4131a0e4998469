"""Where results lie and how they are written: atomically, and never with a secret in them.

The layout is Harbor's; ``job.json``, ``trial.json`` and the journals are k3eval's own.

    JOB/
      config.json lock.json result.json job.log     Harbor's
      job.json journal.jsonl ledger.sqlite          k3eval's
      TRIAL/
        config.json lock.json result.json           Harbor's
        trial.log exception.txt
        trial.json journal.jsonl                    k3eval's
        agent/        trajectory.json (ATIF), changes.patch, the agent's own files
        verifier/     test-stdout.txt, reward.txt or reward.json, what the tests left in /logs/verifier
        artifacts/    manifest.json, collected files under their absolute paths
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from k3eval.redact import redact, remember_secret
from k3eval_harness.task.env import looks_like_credential


@dataclass(frozen=True, slots=True)
class TrialLayout:
    """Paths of one trial."""

    root: Path

    @property
    def config_json(self) -> Path:
        """Harbor's TrialConfig."""
        return self.root / "config.json"

    @property
    def lock_json(self) -> Path:
        """Harbor's TrialLock."""
        return self.root / "lock.json"

    @property
    def result_json(self) -> Path:
        """Harbor's TrialResult."""
        return self.root / "result.json"

    @property
    def trial_json(self) -> Path:
        """TrialRecord."""
        return self.root / "trial.json"

    @property
    def journal(self) -> Path:
        """What was about to happen and what happened."""
        return self.root / "journal.jsonl"

    @property
    def log(self) -> Path:
        """Readable log."""
        return self.root / "trial.log"

    @property
    def exception(self) -> Path:
        """Traceback, where one exists."""
        return self.root / "exception.txt"

    @property
    def agent_dir(self) -> Path:
        """The agent's files."""
        return self.root / "agent"

    @property
    def trajectory_json(self) -> Path:
        """The conversation in ATIF."""
        return self.agent_dir / "trajectory.json"

    @property
    def changes_patch(self) -> Path:
        """What the agent changed in the work tree."""
        return self.agent_dir / "changes.patch"

    @property
    def verifier_dir(self) -> Path:
        """Grading's files."""
        return self.root / "verifier"

    @property
    def artifacts_dir(self) -> Path:
        """Collected files."""
        return self.root / "artifacts"

    def make(self) -> None:
        """Make the folders."""
        for folder in (self.agent_dir, self.verifier_dir, self.artifacts_dir):
            folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class JobLayout:
    """Paths of one job."""

    root: Path

    @property
    def config_json(self) -> Path:
        """Harbor's JobConfig."""
        return self.root / "config.json"

    @property
    def lock_json(self) -> Path:
        """Harbor's JobLock."""
        return self.root / "lock.json"

    @property
    def result_json(self) -> Path:
        """Harbor's JobResult."""
        return self.root / "result.json"

    @property
    def job_json(self) -> Path:
        """JobSummary."""
        return self.root / "job.json"

    @property
    def journal(self) -> Path:
        """What was about to happen and what happened."""
        return self.root / "journal.jsonl"

    @property
    def ledger(self) -> Path:
        """Every model call with what it cost."""
        return self.root / "ledger.sqlite"

    @property
    def log(self) -> Path:
        """Readable log."""
        return self.root / "job.log"

    def trial(self, trial_id: str) -> TrialLayout:
        """Paths of one of its trials."""
        return TrialLayout(self.root / trial_id)


def remember_secrets(environ: Mapping[str, str]) -> None:
    """Have the values of variables that look like credentials masked in everything that is written."""
    for name, value in environ.items():
        if looks_like_credential(name):
            remember_secret(value)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` with secrets masked. A reader sees the whole old or the whole new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="replace") as file:
            file.write(redact(text))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_json(path: Path, data: object) -> None:
    """Write ``data`` (a record or plain JSON values) as indented JSON."""
    if isinstance(data, BaseModel):
        data = data.model_dump(mode="json")
    write_text(path, json.dumps(data, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def append_line(path: Path, text: str) -> None:
    """Append one line with secrets masked and wait until it is on disk."""
    line = redact(re.sub(r"[\r\n]+", " ", text)) + "\n"
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

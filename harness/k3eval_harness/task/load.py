"""Read a task folder: ``task.toml``, the instruction, the digest of every file.

``load_task`` refuses what cannot be run or is unsafe to read (TaskError with file, key and what to do);
what is merely doubtful becomes a Finding that travels with the task.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from k3eval_harness.errors import TaskError
from k3eval_harness.task.config import ArtifactTable, K3EvalTable, TaskConfig, unknown_keys

Level = Literal["error", "warning", "info"]

_CANARY: Final = re.compile(r"\s*(<!--.*\bcanary\b.*-->|#.*\bcanary\b.*)\s*", re.IGNORECASE)
_IGNORED_DIRS: Final = frozenset({"__pycache__", ".git"})
_MAX_FILES: Final = 20_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One remark about a task. ``error`` means that it cannot give a verdict."""

    level: Level
    where: str
    """File and key, relative to the task folder."""
    message: str


@dataclass(frozen=True, slots=True)
class Task:
    """One task folder, read and checked."""

    name: str
    """``org/name`` from ``[task]`` where given, else the folder's name."""
    family: str | None
    path: Path
    config: TaskConfig
    extras: K3EvalTable
    instruction: str
    """Without canary lines."""
    digest: str
    """SHA-256 (hex) over names, modes and contents of the task's files."""
    findings: tuple[Finding, ...] = ()
    """Unknown keys and the like, found while reading."""

    @property
    def short_name(self) -> str:
        """The name without its organisation."""
        return self.name.rpartition("/")[2]

    @property
    def environment_dir(self) -> Path:
        """Build context."""
        return self.path / "environment"

    @property
    def dockerfile(self) -> Path:
        """May be absent when ``docker_image`` is set."""
        return self.environment_dir / "Dockerfile"

    @property
    def tests_dir(self) -> Path:
        """Hidden tests, seen by the grading container only."""
        return self.path / "tests"

    @property
    def solution_dir(self) -> Path:
        """The oracle's material."""
        return self.path / "solution"

    @property
    def artifacts(self) -> tuple[ArtifactTable, ...]:
        """Declared artifacts."""
        return tuple(self.config.artifacts)


def load_task(path: Path) -> Task:
    """Read the task in the folder ``path``.

    Raises TaskError for a missing or malformed file, a wrong value, a symlink that leaves the folder.
    """
    path = path.resolve()
    toml_path = path / "task.toml"
    if not toml_path.is_file():
        raise TaskError(f"{path}: no task.toml; a task is a folder in Harbor's format")
    config = _read_config(toml_path)
    extras = _read_extras(toml_path, config)
    digest = _digest(path)
    instruction = ""
    if not config.steps:
        instruction = strip_canary(_read_text(path / "instruction.md", "the agent needs an instruction"))
        if not instruction.strip():
            raise TaskError(f"{path / 'instruction.md'}: the instruction is empty")
    findings = [
        Finding("warning", f"task.toml: {key}", _unknown_message(near)) for key, near in unknown_keys(config)
    ] + [
        # a free table beside the extras that are read: only what looks like a slip of the pen is remarked
        Finding("warning", f"task.toml: metadata.k3eval.{key}", _unknown_message(near))
        for key, near in unknown_keys(extras)
        if near
    ]
    family = extras.family or (path.parent.name if path.parent.name != "tasks" else None)
    return Task(
        name=config.task.name if config.task else path.name,
        family=family,
        path=path,
        config=config,
        extras=extras,
        instruction=instruction,
        digest=digest,
        findings=tuple(findings),
    )


def strip_canary(text: str) -> str:
    """Drop leading canary lines (HTML comment or ``#`` line) and the blank lines after them."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start]):
        start += 1
    if start:
        while start < len(lines) and not lines[start].strip():
            start += 1
    return "\n".join(lines[start:])


def _unknown_message(near: str | None) -> str:
    hint = f"; did you mean {near}?" if near else ""
    return f"unknown key, it has no effect{hint}"


def _read_text(path: Path, why: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"{path}: missing; {why}") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from error


def _read_config(toml_path: Path) -> TaskConfig:
    text = _read_text(toml_path, "a task needs one")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{toml_path}: not valid TOML: {error}") from error
    except RecursionError:
        raise TaskError(f"{toml_path}: not valid TOML: nested too deeply") from None
    try:
        return TaskConfig.model_validate(data)
    except ValidationError as error:
        raise TaskError(f"{toml_path}: {_first_error(error)}") from error


def _read_extras(toml_path: Path, config: TaskConfig) -> K3EvalTable:
    try:
        return K3EvalTable.model_validate(config.metadata.get("k3eval", {}))
    except ValidationError as error:
        raise TaskError(f"{toml_path}: {_first_error(error, 'metadata.k3eval')}") from error


def _first_error(error: ValidationError, prefix: str = "") -> str:
    """The first error as ``[table] key: reason``; says how many more there are."""
    details = error.errors(include_url=False)
    text = _one_error(details[0], prefix)
    return text if len(details) == 1 else f"{text} (and {len(details) - 1} more)"


def _one_error(detail: ErrorDetails, prefix: str) -> str:
    *tables, key = [str(part) for part in detail["loc"]] or [""]
    table = ".".join(part for part in (prefix, *tables) if part)
    where = " ".join(part for part in (f"[{table}]" if table else "", key) if part)
    if detail["type"] == "missing":
        return f"{where}: missing"
    reason = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    shown = "" if detail["type"] == "value_error" else f", not {detail['input']!r}"
    return f"{where}: {reason}{shown}"


def _digest(path: Path) -> str:
    """SHA-256 over the sorted files; refuses symlinks that leave the folder and special files."""
    total = hashlib.sha256()
    for count, file in enumerate(sorted(_files(path))):
        if count >= _MAX_FILES:
            raise TaskError(f"{path}: more than {_MAX_FILES} files; a task folder holds one task")
        name = file.relative_to(path).as_posix()
        executable = os.access(file, os.X_OK)
        total.update(f"{len(name)}:{name}:{int(executable)}:".encode())
        try:
            total.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError as error:
            raise TaskError(f"{file}: cannot be read: {error.strerror}") from error
    return total.hexdigest()


def _files(path: Path) -> list[Path]:
    found: list[Path] = []
    for folder, dirs, names in os.walk(path):
        dirs[:] = sorted(name for name in dirs if name not in _IGNORED_DIRS)
        for name in [*dirs, *names]:
            entry = Path(folder) / name
            if entry.is_symlink() and not entry.resolve().is_relative_to(path):
                raise TaskError(f"{entry}: a symlink that leaves the task folder; copy the file instead")
        for name in names:
            entry = Path(folder) / name
            if not entry.is_file():
                raise TaskError(f"{entry}: neither a file nor a folder; remove it")
            if not name.endswith(".pyc"):
                found.append(entry)
    return found

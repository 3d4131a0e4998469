"""The journal of a job or a trial: what is about to happen is on disk before it happens, its end after it.

One JSON object a line: ``{"at": UTC, "kind": "intent" | "result" | "error", "act": NAME, ...}``. After a
crash an intent without a result says what was in flight; a torn last line is ignored.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from k3eval_harness.results.layout import append_line

Kind = Literal["intent", "result", "error"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line."""

    at: str
    kind: Kind
    act: str
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Act:
    """What the result of an act in progress will say."""

    details: dict[str, object] = field(default_factory=dict)


def utc_now() -> datetime:
    """The wall clock, in UTC."""
    return datetime.now(UTC)


class Journal:
    """Appends to one file; thread-safe."""

    def __init__(self, path: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._path = path
        self._now = now
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: Kind, act: str, details: Mapping[str, object]) -> None:
        """Append one entry and wait until it is on disk. ``details`` are plain JSON values."""
        entry = {"at": self._now().isoformat(), "kind": kind, "act": act, **details}
        with self._lock:
            append_line(self._path, json.dumps(entry, ensure_ascii=False, separators=(",", ":")))

    @contextmanager
    def act(self, name: str, **details: object) -> Iterator[Act]:
        """Write the intent, run the block, write the result or the error."""
        self.write("intent", name, details)
        act = Act()
        try:
            yield act
        except BaseException as error:
            self.write("error", name, {"error": type(error).__name__, "message": str(error)})
            raise
        self.write("result", name, act.details)


def read_journal(path: Path) -> tuple[Entry, ...]:
    """All whole entries, in order; empty when there is no file."""
    if not path.is_file():
        return ()
    entries: list[Entry] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            data = json.loads(line)
            at, kind, act = data.pop("at"), data.pop("kind"), data.pop("act")
        except (ValueError, KeyError, AttributeError):
            continue  # torn by a crash
        entries.append(Entry(at=at, kind=kind, act=act, details=data))
    return tuple(entries)


def unfinished(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Intents that have neither a result nor an error, oldest first."""
    open_acts: list[Entry] = []
    for entry in entries:
        if entry.kind == "intent":
            open_acts.append(entry)
            continue
        for index in range(len(open_acts) - 1, -1, -1):
            if open_acts[index].act == entry.act:
                del open_acts[index]
                break
    return tuple(open_acts)

"""Warnings that matter, each given once: privacy of a host, a stale price, an output cap that may leave no
answer.

They go to Python's ``warnings`` as ``K3EvalWarning`` unless a client is given its own ``notify``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from k3eval.redact import redact


class K3EvalWarning(UserWarning):
    """Category of every warning of this package."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One warning."""

    code: str
    """Stable word: ``privacy``, ``stale_price``, ``small_cap``, ``one_at_a_time``, ``pinned_sampling``, ...
    """
    message: str


Notify: TypeAlias = Callable[[Notice], None]


def warn(notice: Notice) -> None:
    """Show a notice as a Python warning."""
    warnings.warn(f"{notice.message} [{notice.code}]", K3EvalWarning, stacklevel=2)


class Notices:
    """Passes each distinct notice on once."""

    def __init__(self, notify: Notify = warn) -> None:
        self._notify = notify
        self._seen: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def once(self, code: str, key: str, message: str) -> None:
        """Give a notice unless one with this code and key was given before."""
        with self._lock:
            if (code, key) in self._seen:
                return
            self._seen.add((code, key))
        self._notify(Notice(code, redact(message)))

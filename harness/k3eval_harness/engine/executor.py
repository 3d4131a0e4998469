"""Engines that run trials. ``Executor`` is the seam for others; threads of this process are the default.

Trials are few, long and wait for containers and models: threads fit, and money and results stay here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

STOP_SECONDS: Final = 60.0
"""How long running trials may take to wind up; one that hangs longer (in an engine call) is left behind."""
_POLL_SECONDS: Final = 0.1


class Executor(Protocol):
    """Runs trials, each a callable that never raises."""

    def run(
        self,
        trials: Sequence[Callable[[], None]],
        stop: threading.Event,
        poll: Callable[[], None],
        interrupt: Callable[[], None],
    ) -> None:
        """Run all trials and return when the last one started has ended, or STOP_SECONDS after ``stop``.

        ``poll`` is called about ten times a second on the calling thread; it may set ``stop``, after which no
        further trial starts. On Ctrl-C ``interrupt`` is called, which sets ``stop`` too; when ``stop`` is
        set already, KeyboardInterrupt goes through.
        """


class ThreadExecutor:
    """Up to ``concurrency`` trials at once, each on a thread of this process."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = max(1, concurrency)

    def run(
        self,
        trials: Sequence[Callable[[], None]],
        stop: threading.Event,
        poll: Callable[[], None],
        interrupt: Callable[[], None],
    ) -> None:
        """See ``Executor``."""
        waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for trial in trials:
            waiting.put(trial)

        def work() -> None:
            while not stop.is_set():
                try:
                    trial = waiting.get_nowait()
                except queue.Empty:
                    return
                trial()

        threads = [
            threading.Thread(target=work, name=f"k3eval-trial-{number}", daemon=True)
            for number in range(min(self._concurrency, len(trials)))
        ]
        for thread in threads:
            thread.start()
        give_up = float("inf")
        while any(thread.is_alive() for thread in threads) and time.monotonic() < give_up:
            if stop.is_set():
                give_up = min(give_up, time.monotonic() + STOP_SECONDS)
            try:
                poll()
                for thread in threads:
                    thread.join(_POLL_SECONDS / len(threads))
            except KeyboardInterrupt:
                if stop.is_set():
                    raise
                interrupt()

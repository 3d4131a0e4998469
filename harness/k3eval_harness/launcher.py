"""Starts and stops the local backend's server for a run. The only harness module that knows its command line.

The server is a subprocess on a free port. It is stopped when the context ends, also by an error or Ctrl-C,
and it stops by itself when this process is gone.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Final

from k3eval_harness.errors import Cancelled, HarnessError, UsageError

READY_SECONDS: Final = 180.0
STOP_SECONDS: Final = 5.0
_USAGE_EXIT: Final = 2


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server that answers."""

    base_url: str
    model: str
    weights: str
    """``random, seed 0``, a checkpoint's digest, or both."""
    ended: Callable[[], str | None]
    """Why the server is gone, in a few words; None while it runs."""


@contextmanager
def local_server(
    name: str,
    seed: int = 0,
    *,
    options: Sequence[str] = (),
    ready_s: float = READY_SECONDS,
    cancel: threading.Event | None = None,
) -> Iterator[LocalServer]:
    """Serve the local model ``name`` for the length of the context.

    ``options`` are further command-line options of the server. Raises UsageError when the server refuses
    its arguments (unknown model, port in use, broken checkpoint), HarnessError when it is not ready in time,
    Cancelled when ``cancel`` is set meanwhile.
    """
    command = [sys.executable, "-m", "k3eval_local.server", "--model", name, "--seed", str(seed)]
    command += ["--port", "0", "--parent-pid", str(os.getpid()), *options]
    with tempfile.TemporaryFile() as errors:
        # a session of its own: Ctrl-C reaches the harness first, which then stops the server in order
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        try:
            yield _wait_ready(process, errors, name, ready_s, cancel)
        finally:
            _stop(process)


def _wait_ready(
    process: subprocess.Popen[bytes],
    errors: IO[bytes],
    name: str,
    ready_s: float,
    cancel: threading.Event | None,
) -> LocalServer:
    lines: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_pump, args=(process, lines), name="k3eval-local-server", daemon=True).start()
    deadline = time.monotonic() + ready_s
    while time.monotonic() < deadline:
        if cancel is not None and cancel.is_set():
            raise Cancelled("stopped by the user")
        try:
            line = lines.get(timeout=0.1)
        except queue.Empty:
            continue
        if not line:
            code = process.wait(STOP_SECONDS)
            reason = _last_line(errors) or f"it ended with exit code {code}"
            problem = f"the local backend cannot serve {name!r}: {reason}"
            raise UsageError(problem) if code == _USAGE_EXIT else HarnessError(problem)
        try:
            event = json.loads(line)
            if event["event"] == "ready":
                return LocalServer(
                    base_url=str(event["base_url"]),
                    model=str(event["model"]),
                    weights=str(event["weights"]),
                    ended=partial(_ended, process, errors),
                )
        except (ValueError, KeyError, TypeError):
            continue  # not the announcement
    raise HarnessError(f"the local backend was not ready to serve {name!r} within {ready_s:.0f} s")


def _pump(process: subprocess.Popen[bytes], lines: queue.Queue[bytes]) -> None:
    """Hand on every line of stdout, then b"" at its end; reading on keeps the pipe from filling up."""
    if process.stdout is not None:
        for line in process.stdout:
            lines.put(line)
    lines.put(b"")


def _ended(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str | None:
    code = process.poll()
    if code is None:
        return None
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return _last_line(errors) or f"it ended with exit code {code}"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("k3eval: ")[:300] if lines else ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    if process.stdout is not None:
        process.stdout.close()

"""One persistent shell over a byte channel, with framing that a command's output cannot forge.

After each command the shell prints an end mark with 128 random bits that were sent only after the command,
its exit code and the working directory. Commands read from /dev/null, so none can eat the shell's own input.
At a time limit the whole process tree is killed through ``kill_all`` and the next command gets a fresh shell
in the same directory.
"""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from k3eval_harness.errors import SandboxError
from k3eval_harness.sandbox.protocol import DEFAULT_OUTPUT_LIMIT, CommandResult

FLOOD_LIMIT: Final = 128 * 1024 * 1024
"""A command that prints more than this is killed: reading on would only burn the engine's CPU."""
START_SECONDS: Final = 30.0
_DRAIN_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.5


class Channel(Protocol):
    """Both ends of a shell process."""

    def send(self, data: bytes, timeout_s: float) -> None:
        """Write all of ``data``; SandboxError when the shell is gone."""

    def receive(self, timeout_s: float) -> bytes:
        """Next bytes of output; b"" at its end; TimeoutError when nothing came in time."""

    def exit_code(self) -> int | None:
        """Exit code of the shell process once it ended; None when unknown."""

    def close(self) -> None:
        """Give the channel up. Never raises."""


class HeadTail:
    """Keeps the first and the last half of a byte stream that may be longer than ``limit``."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    def result(self) -> tuple[bytes, int]:
        """What was kept, with a mark in the middle where bytes are missing, and how many are."""
        tail = bytes(self._tail[-self._half :])
        missing = self.total - len(self._head) - len(tail)
        if not missing:
            return bytes(self._head) + tail, 0
        return bytes(self._head) + f"\n[... {missing} bytes left out ...]\n".encode() + tail, missing


class EndMark:
    """Finds the end mark of one command in a stream that arrives in pieces."""

    def __init__(self) -> None:
        nonce = secrets.token_hex(16)
        self._start = b"\x1e" + nonce.encode() + b" "
        self._pattern = re.compile(re.escape(self._start) + rb"(\d+) (.*?)\x1e\n", re.DOTALL)
        self._pending = b""
        # printf builds the control characters, so that a shell that echoes its input prints no end mark
        self.command = f'printf \'\\036%s %d %s\\036\\n\' {nonce} "$?" "$PWD"\n'.encode()

    def feed(self, data: bytes) -> tuple[bytes, tuple[int, str] | None]:
        """Return the output that certainly belongs to the command, and (exit code, directory) at the end."""
        self._pending += data
        at = self._pending.find(self._start)
        if at >= 0:
            match = self._pattern.match(self._pending, at)
            output, self._pending = self._pending[:at], self._pending[at:]
            if match is None:
                return output, None
            return output, (int(match[1]), match[2].decode("utf-8", "surrogateescape"))
        keep = min(len(self._pending), len(self._start) - 1)
        output, self._pending = self._pending[: len(self._pending) - keep], self._pending[-keep:]
        return output, None

    def rest(self) -> bytes:
        """What is left when the stream ends without the mark."""
        return self._pending


class PersistentShell:
    """A shell that lives from command to command. Not thread-safe: one command at a time.

    ``open_channel`` starts a shell process; ``kill_all`` kills every process of the shell's user.
    """

    def __init__(self, open_channel: Callable[[], Channel], kill_all: Callable[[], None], cwd: str) -> None:
        self._open_channel = open_channel
        self._kill_all = kill_all
        self._cwd = cwd
        self._channel: Channel | None = None

    @property
    def cwd(self) -> str:
        """Working directory after the last command that ended by itself."""
        return self._cwd

    def run(
        self, command: str, *, timeout_s: float, output_limit: int = DEFAULT_OUTPUT_LIMIT
    ) -> CommandResult:
        """Run one command; see ``Shell.run``. Raises SandboxError when no shell can be had."""
        if "\0" in command:
            return CommandResult(output=b"the command holds a NUL byte", exit_code=2, cwd=self._cwd)
        deadline = time.monotonic() + timeout_s
        channel = self._channel or self._start()
        mark = EndMark()
        channel.send(f"eval {shlex.quote(command)} </dev/null\n".encode() + mark.command, START_SECONDS)
        kept = HeadTail(output_limit)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or kept.total > FLOOD_LIMIT:
                return self._killed(channel, mark, kept, flooded=left > 0)
            try:
                data = channel.receive(left)
            except TimeoutError:
                continue
            if not data:
                return self._ended(channel, mark, kept)
            output, end = mark.feed(data)
            kept.feed(output)
            if end is not None:
                code, self._cwd = end
                text, missing = kept.result()
                return CommandResult(text, code, truncated_bytes=missing, cwd=self._cwd)

    def close(self) -> None:
        """End the shell. Never raises. From another thread it ends the command in flight."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _start(self) -> Channel:
        # known from the start, so that close() from another thread reaches it
        channel = self._channel = self._open_channel()
        try:
            mark = EndMark()
            setup = f"exec 2>&1\ncd -- {shlex.quote(self._cwd)} 2>/dev/null\n"
            channel.send(setup.encode("utf-8", "surrogateescape") + mark.command, START_SECONDS)
            deadline = time.monotonic() + START_SECONDS
            seen = HeadTail(1000)
            while (left := deadline - time.monotonic()) > 0:
                try:
                    data = channel.receive(left)
                except TimeoutError:
                    break
                output, end = mark.feed(data)
                seen.feed(output)
                if end is not None:
                    self._cwd = end[1]
                    return channel
                if not data:
                    seen.feed(mark.rest())
                    break
        except BaseException:
            self.close()
            raise
        self.close()
        reason = " ".join(seen.result()[0].decode("utf-8", "replace").split()) or "it said nothing"
        raise SandboxError(f"no shell starts in the container: {reason}")

    def _killed(self, channel: Channel, mark: EndMark, kept: HeadTail, *, flooded: bool) -> CommandResult:
        # read on meanwhile: an engine with output that nobody takes may start no process, not even this one
        with ThreadPoolExecutor(1) as pool:
            kill = pool.submit(self._kill_all)
            deadline, drained = None, 0
            while not kill.done() or deadline is None or time.monotonic() < deadline:
                if deadline is None and kill.done():
                    deadline, drained = time.monotonic() + _DRAIN_SECONDS, 0
                if deadline is not None and drained >= FLOOD_LIMIT:
                    break
                try:
                    data = channel.receive(_POLL_SECONDS)
                except TimeoutError:
                    continue
                if not data:
                    break
                drained += len(data)
                kept.feed(mark.feed(data)[0])
            kill.result()
        kept.feed(mark.rest())
        self.close()
        text, missing = kept.result()
        return CommandResult(
            text,
            None,
            timed_out=not flooded,
            flooded=flooded,
            truncated_bytes=missing,
            shell_restarted=True,
            cwd=self._cwd,
        )

    def _ended(self, channel: Channel, mark: EndMark, kept: HeadTail) -> CommandResult:
        kept.feed(mark.rest())
        code = channel.exit_code()
        self.close()
        text, missing = kept.result()
        return CommandResult(text, code, truncated_bytes=missing, shell_restarted=True, cwd=self._cwd)

"""The engine in a process of its own, as the server sees it.

An engine and an event loop in one process share the interpreter and wait for each other at every step. Here
a step is one message: its tokens arrive on the loop, which hands them to their `Generation`s. The worker ends
when this process does, however that ends: it reads the end of their socket. Nothing here needs torch.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from k3eval_local.engine.check import check
from k3eval_local.engine.errors import EngineClosed, EngineError
from k3eval_local.engine.generation import Generation
from k3eval_local.engine.request import GenerationRequest, GenerationResult, TokenEvent, TopLogprob
from k3eval_local.engine.runner import CacheLayout
from k3eval_local.engine.stats import EngineStats
from k3eval_local.protocol.grammar import MessageGrammar, OrdinaryTokens

if TYPE_CHECKING:
    from k3eval_local.engine.engine import Kernels
    from k3eval_local.kernels.native.pack import WeightType

ORDINARY = ""
"""In place of a grammar's text: any ordinary token."""
_SEND_BUFFER_BYTES = 4 * 1024**2
"""So that a step's tokens never wait for a loop that is busy for a moment."""
_REAP_S = 0.5
_LENGTH = struct.Struct("=Q")


@dataclass(frozen=True)
class WorkerOptions:
    """What the worker loads and runs; names and meanings are those of ``--help``."""

    model: str
    seed: int
    tokenizer: Path | None
    memory_bytes: int
    max_batch: int
    threads: int | None
    kernels: Kernels
    weights: WeightType
    device: str
    log_level: str


@dataclass(frozen=True)
class Ready:
    """From the worker, first: the engine runs."""

    layout: CacheLayout
    weights: str
    """``random, seed 0`` or a checkpoint's digest."""
    stats: EngineStats


@dataclass(frozen=True)
class Failed:
    """From the worker, instead of `Ready`: one line says why."""

    reason: str


@dataclass(frozen=True)
class Submit:
    """To the worker: a request, and its grammar as text: `ORDINARY`, or what it was compiled from."""

    key: int
    request: GenerationRequest
    grammar: str | None


@dataclass(frozen=True)
class Cancel:
    """To the worker."""

    key: int


Token = tuple[int, int, float | None, tuple[TopLogprob, ...], int]
"""Key of the request, then the members of `TokenEvent`."""


@dataclass(frozen=True)
class Step:
    """From the worker: what a step made, in order."""

    tokens: list[Token]
    ends: list[tuple[int, GenerationResult]]
    stats: EngineStats | None
    """Now and then, and whenever something ends."""


class RemoteEngine:
    """Starts the worker and speaks with it. ``wait_ready`` and ``attach`` come before everything else, which
    happens on the event loop.
    """

    layout: CacheLayout
    weights: str
    """``random, seed 0`` or a checkpoint's digest."""
    _stats: EngineStats

    def __init__(self, options: WorkerOptions) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "k3eval_local.server.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._wire = Wire(mine)
        self._live: dict[int, Generation] = {}
        self._keys: dict[Generation, int] = {}
        self._numbers = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_death: Callable[[], None] = lambda: None
        self._unsent = bytearray()
        self.dead: str | None = None
        """Why the engine can do nothing any more."""
        self.died = False
        """Whether it ended by itself."""
        with suppress(OSError):  # told by wait_ready
            self._wire.send(options)

    def wait_ready(self) -> None:
        """Until the model is loaded and the engine runs.

        Raises:
            EngineError: it cannot be; one line says why.
            EngineClosed: its process ended without a word.
        """
        try:
            first = self._wire.receive()
        except (EOFError, OSError):
            raise EngineClosed(_ended(self._process.wait())) from None
        if not isinstance(first, Ready):
            raise EngineError(first.reason if isinstance(first, Failed) else f"the worker sent {first!r}")
        self.layout, self.weights, self._stats = first.layout, first.weights, first.stats

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def attach(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> None:
        """Read from the worker on ``loop`` from now on; ``on_death`` is called when it ends by itself."""
        self._loop, self._on_death = loop, on_death
        loop.add_reader(self._wire.fileno(), self._read)

    def close(self) -> None:
        """End the worker, whatever it does; nothing that it has is kept. Safe to repeat."""
        self.give_up()
        self._process.kill()
        self._process.wait()

    def give_up(self) -> None:
        """End what still runs, without asking the worker."""
        self._lose("the engine was closed")

    def submit(self, request: GenerationRequest) -> Generation:
        """See `EngineCore.submit`."""
        check(request, self.layout)
        if self.dead is not None:
            raise EngineClosed(self.dead)
        key = next(self._numbers)
        generation = Generation(request, submitted_ns=time.monotonic_ns(), on_cancel=self._cancel)
        self._live[key], self._keys[generation] = generation, key
        self._send(Submit(key, replace(request, grammar=None), _text(request)))
        return generation

    def stats(self) -> EngineStats:
        """As the worker last said."""
        return self._stats

    def _cancel(self, generation: Generation) -> None:
        key = self._keys.get(generation)
        if key is not None:
            self._send(Cancel(key))

    def _send(self, message: Submit | Cancel) -> None:
        """What the socket does not take at once goes later: the loop waits for no worker."""
        if self._loop is None or self.dead is not None:
            return
        waiting = bool(self._unsent)
        self._unsent += encoded(message)
        if waiting:
            return
        self._send_rest()
        if self._unsent:
            self._loop.add_writer(self._wire.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        try:
            del self._unsent[: self._wire.send_some(self._unsent)]
        except OSError:
            self._died()
            return
        if not self._unsent and self._loop is not None:
            self._loop.remove_writer(self._wire.fileno())

    def _read(self) -> None:
        """All steps that are there: when the loop has fallen behind, it goes through their tokens once."""
        try:
            steps = self._wire.receive_all()
        except (EOFError, OSError):
            self._died()
            return
        for step in steps:
            if not isinstance(step, Step):
                raise TypeError(f"the worker sent {type(step).__name__}")
            self._stats = step.stats or self._stats
            for key, token, logprob, top, at_ns in step.tokens:
                generation = self._live[key]
                generation.publish(TokenEvent(token, logprob, top, at_ns))
                generation.wake()
            for key, result in step.ends:
                generation = self._live.pop(key)
                del self._keys[generation]
                generation.finish(result)

    def _died(self) -> None:
        if self.dead is not None:
            return
        with suppress(subprocess.TimeoutExpired):  # its socket closes a little before it can be waited for
            self._process.wait(_REAP_S)
        self.died = True
        self._lose(_ended(self._process.poll()))
        self._on_death()

    def _lose(self, reason: str) -> None:
        """Let go of the worker; what still runs ends with the reason."""
        if self.dead is not None:
            return
        self.dead = reason
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._wire.fileno())
            self._loop.remove_writer(self._wire.fileno())
        self._unsent.clear()
        self._wire.close()
        for generation in list(self._live.values()):
            generation.finish(GenerationResult((), "error", 0, 0, 0, 0, (), error=reason))
        self._live.clear()
        self._keys.clear()


def _ended(code: int | None) -> str:
    """``code`` as `subprocess.Popen` has it."""
    if code is None:
        how = ""
    elif code < 0:
        try:
            how = f": it was killed by {signal.Signals(-code).name}"
        except ValueError:  # real-time signals have no name
            how = f": it was killed by signal {-code}"
    else:
        how = f" with exit code {code}"
    return f"the engine's process ended{how}"


def _text(request: GenerationRequest) -> str | None:
    """The grammar as text."""
    grammar = request.grammar
    if grammar is None:
        return None
    if isinstance(grammar, OrdinaryTokens):
        return ORDINARY
    if isinstance(grammar, MessageGrammar):
        return grammar.lark
    raise TypeError(f"a {type(grammar).__name__} cannot be sent to another process")


def encoded(message: object) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Wire:
    """Messages over a socket: their length, then their pickle. Both ends are this program."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        self._buffer = bytearray()

    def fileno(self) -> int:
        """Of the socket."""
        return self._wire.fileno()

    def close(self) -> None:
        """Close this end."""
        self._wire.close()

    def send(self, message: object) -> None:
        """Wait until it is sent. Raises OSError when the other side is gone."""
        self._wire.sendall(encoded(message))

    def send_some(self, data: bytes | bytearray) -> int:
        """Bytes that the socket takes now. Raises OSError when the other side is gone."""
        try:
            return self._wire.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def receive(self) -> object:
        """Wait for one message. Raises EOFError or OSError when the other side is gone."""
        while (message := self._next()) is None:
            self._fill()
        return message

    def receive_all(self) -> list[object]:
        """Once the socket is readable: every message that is whole by now. Raises as `receive`."""
        self._fill()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _fill(self) -> None:
        data = self._wire.recv(1 << 20)
        if not data:
            raise EOFError
        self._buffer += data

    def _next(self) -> object | None:
        start = _LENGTH.size
        if len(self._buffer) < start:
            return None
        end = start + int(_LENGTH.unpack_from(self._buffer)[0])
        if len(self._buffer) < end:
            return None
        message: object = pickle.loads(memoryview(self._buffer)[start:end])  # noqa: S301 - see the class
        del self._buffer[:end]
        return message

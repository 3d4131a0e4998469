"""From options to a running server and back: socket, model, engine, signals, the parent's life.

The socket is bound first, so that a port in use is reported before a model is loaded. Only :func:`launch`
is called from outside; it returns when the server has stopped and everything is closed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from k3eval_local.engine.errors import EngineClosed, EngineError
from k3eval_local.errors import LocalError
from k3eval_local.model.names import resolve
from k3eval_local.protocol.chaos import Chaos
from k3eval_local.protocol.dialects import DIALECTS, AnyDialect, DialectOptions
from k3eval_local.protocol.prices import Limits
from k3eval_local.server.remote import RemoteEngine, WorkerOptions
from k3eval_local.server.settings import MIB, ServerSettings
from k3eval_local.tokenizer import Tokenizer

if TYPE_CHECKING:
    from k3eval_local.engine.engine import Kernels
    from k3eval_local.kernels.native.pack import WeightType

_PARENT_POLL_S = 0.5
_CANCEL_S = 0.5
"""For what runs to end in order when the server stops."""


class LaunchError(Exception):
    """The server cannot start; one line says why and what to do."""

    code = 2
    """The program's exit code: something about its arguments."""


class EngineDied(LaunchError):
    """The engine's process ended by itself, while it loaded or later."""

    code = 3


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The command line, parsed. Names and meanings are those of ``--help``."""

    model: str
    host: str
    port: int
    seed: int
    dialect: str
    key: str | None
    served_name: list[str]
    tokenizer: Path | None
    context: int | None
    default_max_tokens: int
    memory_mib: int
    max_batch: int
    threads: int | None
    kernels: Kernels
    weights: WeightType
    device: str
    max_body_mib: int
    free: bool
    prices: bool
    credit: Decimal
    tier: str | None
    reasoning_field: str
    repeat_finish: bool
    keep_alive: float
    chaos: str | None
    chaos_silence: float
    parent_pid: int | None
    log_level: str


def launch(options: LaunchOptions) -> None:
    """Serve until SIGTERM, SIGINT or the parent's end.

    Raises:
        LaunchError: an option, the model or the port cannot be used.
        EngineDied: the engine's process ended by itself.
    """
    logging.basicConfig(
        stream=sys.stderr, level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    if options.parent_pid is not None:
        _follow(options.parent_pid)
    chaos = _chaos(options.chaos)
    dialect = DIALECTS[options.dialect](
        DialectOptions(
            options.prices, options.reasoning_field, options.repeat_finish, _temperature(options.model)
        )
    )
    limits = _limits(dialect, options.tier)
    listener = _bind(options.host, options.port)
    try:
        with _start_engine(options) as engine:
            from k3eval_local.server import app  # noqa: F401 - while the engine loads

            tokenizer = _wait_ready(engine, options)
            most = engine.layout.max_positions
            settings = ServerSettings(
                dialect=dialect,
                model=options.model,
                weights=engine.weights,
                context_length=min(options.context or most, most),
                served_names=_names(options, dialect),
                default_max_tokens=options.default_max_tokens,
                key=options.key,
                limits=limits,
                credit=options.credit,
                chaos=chaos,
                silence_s=options.chaos_silence,
                keep_alive_s=options.keep_alive,
                max_body_bytes=options.max_body_mib * MIB,
                structured=not options.free,
            )
            gc.freeze()  # what is loaded by now stays: a full collection would hold up every stream
            _serve(settings, tokenizer, engine, listener)
    finally:
        listener.close()


def _temperature(name: str) -> float:
    """From the checkpoint's ``generation_config.json``: 0 without sampling, else its temperature."""
    try:
        found = resolve(name)
    except LocalError:
        return 1.0  # reported when the model is loaded
    path = found / "generation_config.json" if isinstance(found, Path) else None
    if path is None or not path.is_file():
        return 1.0
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        value = float(data.get("temperature", 1.0)) if data.get("do_sample", True) else 0.0
        if not 0.0 <= value <= 2.0:
            raise ValueError(f"a temperature of {value} is not between 0 and 2")
        return value
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LaunchError(f"{path} is not usable: {error}") from error


def _start_engine(options: LaunchOptions) -> RemoteEngine:
    try:
        resolve(options.model)
    except LocalError as error:
        raise LaunchError(str(error)) from error
    return RemoteEngine(
        WorkerOptions(
            model=options.model,
            seed=options.seed,
            tokenizer=options.tokenizer,
            memory_bytes=options.memory_mib * MIB,
            max_batch=options.max_batch,
            threads=options.threads,
            kernels=options.kernels,
            weights=options.weights,
            device=options.device,
            log_level=options.log_level,
        )
    )


def _wait_ready(engine: RemoteEngine, options: LaunchOptions) -> Tokenizer:
    found = resolve(options.model)
    folder = found if isinstance(found, Path) else None
    try:
        engine.wait_ready()
        return Tokenizer.for_checkpoint(folder, engine.layout.vocab_size, options.tokenizer)
    except EngineClosed as error:
        raise EngineDied(str(error)) from error
    except (LocalError, EngineError) as error:
        raise LaunchError(str(error)) from error


def _serve(
    settings: ServerSettings, tokenizer: Tokenizer, engine: RemoteEngine, listener: socket.socket
) -> None:
    from k3eval_local.server.app import ChatServer, build_app
    from k3eval_local.server.generate import Generator

    generator = Generator(
        engine,
        tokenizer,
        context_length=settings.context_length,
        default_max_tokens=settings.default_max_tokens,
        structured=settings.structured,
    )
    chat = ChatServer(settings, generator)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    def died() -> None:
        server.should_exit = True

    def announce() -> None:
        engine.attach(asyncio.get_running_loop(), died)
        ready = {
            "event": "ready",
            "base_url": f"http://{shown}:{port}/v1",
            "model": settings.model,
            "weights": settings.weights,
        }
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()

    def stop() -> None:
        chat.cancel_all()
        # a worker that hangs would never say that they have ended
        asyncio.get_running_loop().call_later(_CANCEL_S, engine.give_up)

    server = Server(build_app(chat), on_ready=announce, on_stop=stop)
    logging.getLogger("uvicorn.error").addFilter(_worth_telling)
    server.run(sockets=[listener])
    if engine.died:
        raise EngineDied(engine.dead)


def _worth_telling(record: logging.LogRecord) -> bool:
    """A response that is left incomplete is a fault on purpose, or was cut by the server's own stop."""
    return not record.getMessage().startswith(("ASGI callable returned without completing", "Cancel "))


class Server(uvicorn.Server):
    """uvicorn that tells when it is ready, ends what runs when it stops, and then simply returns."""

    def __init__(self, app: ASGIApp, *, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="auto",  # httptools where it is installed, else h11
                loop="asyncio",  # uvloop was no faster here
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
                timeout_keep_alive=60,
            )
        )
        self._on_ready = on_ready
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End running generations, so that their connections can close."""
        self._on_stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop in order. The signal is not raised again: a stop that was asked for is a success."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's delay off only where the protocol is named: 40 ms before the first token else
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; "
            "choose another --port, or 0 for a free one"
        ) from error
    return listener


def _chaos(text: str | None) -> Chaos | None:
    if text is None:
        return None
    try:
        return Chaos.parse(text)
    except LocalError as error:
        raise LaunchError(str(error)) from error


def _limits(dialect: AnyDialect, tier: str | None) -> Limits | None:
    if tier is None:
        return None
    if tier not in dialect.tiers:
        known = ", ".join(dialect.tiers) or "none"
        raise LaunchError(f"--tier {tier!r}: the {dialect.name} dialect has these tiers: {known}")
    return dialect.tiers[tier]


def _names(options: LaunchOptions, dialect: AnyDialect) -> tuple[str, ...]:
    names = (options.model, f"local/{options.model}", *dialect.aliases, *options.served_name)
    return tuple({name.lower(): name for name in reversed(names)}.values())[::-1]


def _follow(pid: int) -> None:
    """Send this process SIGTERM when process ``pid`` is gone."""
    born_under = os.getppid()

    def gone() -> bool:
        if born_under == pid and os.getppid() != pid:
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def poll() -> None:
        while not gone():
            time.sleep(_PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=poll, name="follow-parent", daemon=True).start()

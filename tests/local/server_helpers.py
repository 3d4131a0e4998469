"""Engines that need no model, and a server in a thread, for the tests of protocol and server."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import httpx
import numpy as np

from k3eval_local.engine.generation import Generation
from k3eval_local.engine.request import (
    Finish,
    GenerationRequest,
    GenerationResult,
    TokenEvent,
    TopLogprob,
)
from k3eval_local.engine.stats import EngineStats
from k3eval_local.protocol.chaos import Chaos
from k3eval_local.protocol.dialects import DIALECTS, DialectOptions
from k3eval_local.protocol.prices import Limits
from k3eval_local.server.app import ChatServer, build_app
from k3eval_local.server.generate import Generator
from k3eval_local.server.lifecycle import Server
from k3eval_local.server.settings import ServerSettings
from k3eval_local.tokenizer import Tokenizer

TOKENIZER = Tokenizer.for_vocab(512)
HTTP = httpx.Client(
    timeout=30,
    trust_env=False,
    limits=httpx.Limits(max_keepalive_connections=0),
    verify=ssl.create_default_context(),
)
"""One client for all tests (making one takes longer than a request); it keeps no connection."""


class _Engine(ABC):
    """Publishes the tokens that ``choose`` gives, on a thread of its own when it must wait."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.generations: list[Generation] = []
        self.delay_s = 0.0
        self.fail_after: int | None = None
        self.cached = 0

    @abstractmethod
    def choose(self, request: GenerationRequest) -> Iterator[int]:
        """The tokens of one request."""

    def submit(self, request: GenerationRequest) -> Generation:
        generation = Generation(request, submitted_ns=time.monotonic_ns(), on_cancel=lambda _: None)
        self.requests.append(request)
        self.generations.append(generation)
        if self.delay_s:
            threading.Thread(target=self._run, args=(generation,), daemon=True).start()
        else:
            self._run(generation)
        return generation

    def _run(self, generation: Generation) -> None:
        request = generation.request
        ids: list[int] = []
        times: list[int] = []
        finish: Finish = "stop"
        for token in self.choose(request):
            if self.delay_s:
                time.sleep(self.delay_s)
            if generation.cancel_requested:
                finish = "cancelled"
                break
            if self.fail_after is not None and len(ids) == self.fail_after:
                finish = "error"
                break
            ids.append(token)
            now = time.monotonic_ns()
            times.append(now - generation.submitted_ns)
            top = () if request.sampling.logprobs is None else (TopLogprob(token, -0.5), TopLogprob(65, -2.0))
            generation.publish(TokenEvent(token, -0.5, top, now))
            generation.wake()
            if token in request.stop_ids:
                break
            if len(ids) == request.max_tokens:
                finish = "length"
                break
        generation.finish(
            GenerationResult(
                ids=tuple(ids),
                finish=finish,
                cached_tokens=self.cached,
                written_tokens=len(request.prompt_ids) - self.cached,
                queue_ns=1,
                prefill_ns=2,
                token_ns=tuple(times),
                error="broken on purpose" if finish == "error" else None,
            )
        )

    def stats(self) -> EngineStats:
        return EngineStats(**{field.name: 0 for field in fields(EngineStats)})


class ScriptedEngine(_Engine):
    """Says ``ids``, whatever is asked."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        super().__init__()
        self.ids = tuple(ids)

    def choose(self, request: GenerationRequest) -> Iterator[int]:
        return iter(self.ids)


class NoiseEngine(_Engine):
    """Draws tokens that the grammar allows, control tokens ``eager`` times as often as others."""

    def __init__(self, seed: int = 0, eager: float = 20.0) -> None:
        super().__init__()
        self._seed = seed
        self._eager = eager

    def choose(self, request: GenerationRequest) -> Iterator[int]:
        seed = request.sampling.seed if request.sampling.seed is not None else self._seed + len(self.requests)
        rng = np.random.default_rng(seed)
        weights = np.where(np.arange(TOKENIZER.vocab_size) < TOKENIZER.n_ranks, 1.0, self._eager)
        while True:
            mask = request.grammar.allowed() if request.grammar is not None else None
            p = weights if mask is None else weights * np.asarray(mask)
            token = int(rng.choice(len(p), p=p / p.sum()))
            if request.grammar is not None:
                request.grammar.accept(token)
            yield token


def spoken(
    text: str = "",
    *,
    reasoning: str | None = None,
    calls: Sequence[tuple[str, Sequence[tuple[str, str, str]]]] = (),
    tokenizer: Tokenizer = TOKENIZER,
) -> list[int]:
    """The ids of a well-formed message. A call is a name and (key, type, body) triples."""
    c, e = tokenizer.control, tokenizer.encode

    def opened(header: str) -> list[int]:
        return [c.open, *e(header), c.sep]

    def closed(name: str) -> list[int]:
        return [c.close, *e(name), c.sep]

    ids = [*e(reasoning), *closed("think"), *opened("response")] if reasoning is not None else []
    ids += [*e(text), *closed("response")]
    if calls:
        ids += opened("tools")
        for index, (name, arguments) in enumerate(calls, start=1):
            ids += opened(f'call tool="{name}" index="{index}"')
            for key, kind, body in arguments:
                ids += [*opened(f'argument key="{key}" type="{kind}"'), *e(body), *closed("argument")]
            ids += closed("call")
        ids += closed("tools")
    return [*ids, *closed("message"), c.end_of_msg]


@dataclass
class Served:
    """A running server."""

    url: str
    """Base URL with ``/v1``."""
    port: int
    chat: ChatServer

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")


def settings(dialect: str = "vllm", **changes: object) -> ServerSettings:
    """Settings for tests; ``options`` goes to the dialect, everything else to the settings."""
    options = changes.pop("options", DialectOptions())
    assert isinstance(options, DialectOptions)
    made = DIALECTS[dialect](options)
    base = ServerSettings(
        dialect=made,
        model="a",
        weights="random, seed 0",
        context_length=4096,
        served_names=("a", "local/a", *made.aliases),
        default_max_tokens=256,
        max_body_bytes=256 * 1024,
        keep_alive_s=0.05,
        silence_s=0.2,
    )
    return replace(base, **changes)


def chat_server(engine: object, dialect: str = "vllm", **changes: object) -> ChatServer:
    """The handlers over ``engine``."""
    made = settings(dialect, **changes)
    generator = Generator(
        engine,
        TOKENIZER,
        context_length=made.context_length,
        default_max_tokens=made.default_max_tokens,
        structured=made.structured,
    )
    return ChatServer(made, generator)


@contextmanager
def serve(engine: object, dialect: str = "vllm", **changes: object) -> Iterator[Served]:
    """A real HTTP server in a thread, stopped at the end."""
    chat = chat_server(engine, dialect, **changes)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ready = threading.Event()
    server = Server(build_app(chat), on_ready=ready.set, on_stop=chat.cancel_all)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert ready.wait(20)
        yield Served(f"http://127.0.0.1:{port}/v1", port, chat)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until ``condition`` holds; False when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


__all__ = [
    "HTTP",
    "TOKENIZER",
    "Chaos",
    "Limits",
    "NoiseEngine",
    "ScriptedEngine",
    "Served",
    "chat_server",
    "serve",
    "settings",
    "spoken",
    "until",
]

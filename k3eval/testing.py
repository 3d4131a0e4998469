"""Fakes for tests of code that calls K3: no network, no key, no patching. All serve sync and async clients.

``ScriptedTransport`` plays the replies it is given; ``ChaosTransport`` disturbs another transport, the same
way for the same seed; ``RecordingTransport`` writes exchanges down and ``ReplayTransport`` plays them back.
Pass one as ``transport=`` to ``K3``, ``AsyncK3``, ``openai_client`` or ``metered_http_client``.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

import httpx

from k3eval.jsontypes import JsonObject, JsonValue, read_object, write_json
from k3eval.messages import ToolCall
from k3eval.redact import redact

Usage: TypeAlias = Mapping[str, JsonValue]
_DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP reply: status, headers, and the packets of the body."""

    packets: tuple[bytes, ...]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    """The connection breaks after the last packet."""

    @property
    def body(self) -> bytes:
        """All packets joined."""
        return b"".join(self.packets)


def answer(
    text: str | None = "ok",
    *,
    reasoning: str | None = None,
    tool_calls: Sequence[ToolCall] = (),
    usage: Usage | None = None,
    finish: str | None = None,
    model: str = "kimi-k3",
    **members: JsonValue,
) -> Reply:
    """Return a whole chat completion. Further members go to its top level."""
    message: JsonObject = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = [call.to_json() for call in tool_calls]
    data: JsonObject = {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "model": model,
        "choices": [{"index": 0, "finish_reason": _finish(finish, tool_calls), "message": message}],
        "usage": _usage(usage),
        "created": 1_764_547_200,
        **members,
    }
    return Reply((write_json(data),), headers={"content-type": "application/json"})


def streamed(
    pieces: Sequence[str] = ("o", "k"),
    *,
    reasoning: Sequence[str] = (),
    tool_calls: Sequence[ToolCall] = (),
    usage: Usage | None = None,
    finish: str | None = None,
    model: str = "kimi-k3",
) -> Reply:
    """Return a streamed chat completion, one packet an event."""
    deltas: list[JsonObject] = [{"role": "assistant"}]
    deltas += [{"reasoning_content": piece} for piece in reasoning]
    deltas += [{"content": piece} for piece in pieces]
    for index, call in enumerate(tool_calls):
        head: JsonObject = {
            "index": index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        }
        half = len(call.arguments) // 2
        deltas.append({"tool_calls": [head]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
            for part in (call.arguments[:half], call.arguments[half:])
        ]
    chunks: list[JsonObject] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": _finish(finish, tool_calls)}]})
    chunks.append({"choices": [], "usage": _usage(usage)})
    head = {
        "id": "chatcmpl-scripted",
        "object": "chat.completion.chunk",
        "created": 1_764_547_200,
        "model": model,
    }
    return events({**head, **chunk} for chunk in chunks)


def events(chunks: Iterable[JsonObject], *, done: bool = True, cut: bool = False) -> Reply:
    """Return a stream of the given chunks, one packet an event."""
    packets = tuple(b"data: " + write_json(chunk) + b"\n\n" for chunk in chunks)
    headers = {"content-type": "text/event-stream"}
    return Reply(packets + ((_DONE,) if done else ()), headers=headers, cut=cut)


def failure(status: int, error: JsonObject | str, **headers: str) -> Reply:
    """Return an error reply: an error object, or a page as it is. ``retry_after="1"`` becomes a header."""
    body = error.encode() if isinstance(error, str) else write_json({"error": error})
    kind = "text/html" if isinstance(error, str) else "application/json"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply((body,), status, {"content-type": kind, **named})


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request that a fake received."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: JsonObject
    """Empty where the request has no JSON body."""


Answer: TypeAlias = Reply | Exception | Callable[[SeenRequest], Reply]
"""What a script plays: a reply, an exception to raise, or a function of the request."""


class _Fake(httpx.BaseTransport, httpx.AsyncBaseTransport, ABC):
    """A transport that needs no waiting, for both kinds of client."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return _response(self.reply_to(request))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return _response(self.reply_to(request))

    @abstractmethod
    def reply_to(self, request: httpx.Request) -> Reply:
        """The reply of one request."""


class ScriptedTransport(_Fake):
    """Plays answers in order, the last one again with ``repeat``. ``requests`` holds what came in."""

    def __init__(self, *script: Answer, repeat: bool = False) -> None:
        self._script = script
        self._repeat = repeat
        self._lock = threading.Lock()
        self.requests: list[SeenRequest] = []

    def reply_to(self, request: httpx.Request) -> Reply:
        """Return the next answer."""
        seen = _seen(request)
        with self._lock:
            number = len(self.requests)
            self.requests.append(seen)
        if number >= len(self._script) and not (self._repeat and self._script):
            raise AssertionError(f"request {number + 1} came, the script has {len(self._script)} answers")
        found = self._script[min(number, len(self._script) - 1)]
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, Reply) else found(seen)


@dataclass(frozen=True, slots=True)
class ChaosProfile:
    """How often what goes wrong, as probabilities of each call."""

    rate_limited: float = 0.1
    """429 with a short Retry-After."""
    server_error: float = 0.1
    """500, 502 or 503."""
    refused_connection: float = 0.05
    error_in_stream: float = 0.05
    """An error as the first event of a stream, under HTTP 200."""
    cut: float = 0.05
    """The connection breaks in the middle of the body."""
    keep_alives: bool = True
    """Comment lines between events."""
    repackaged: bool = True
    """The bytes of a stream arrive in packets of any size."""


class ChaosTransport(_Fake):
    """Disturbs the replies of another fake; the n-th call is disturbed the same way for the same seed."""

    def __init__(self, inner: _Fake, seed: int, profile: ChaosProfile = ChaosProfile()) -> None:
        self._inner = inner
        self._seed = seed
        self._profile = profile
        self._calls = 0
        self._lock = threading.Lock()
        self.disturbances: list[str] = []

    def reply_to(self, request: httpx.Request) -> Reply:
        """Return a reply of the inner transport, or trouble."""
        with self._lock:
            number = self._calls
            self._calls += 1
        dice = random.Random(f"{self._seed}:{number}")  # noqa: S311 - reproducible trouble, no secret
        profile = self._profile
        roll = dice.random()
        for word, chance in (
            ("rate_limited", profile.rate_limited),
            ("server_error", profile.server_error),
            ("refused_connection", profile.refused_connection),
        ):
            if roll < chance:
                self.disturbances.append(word)
                return self._trouble(word, request, dice)
            roll -= chance
        reply = self._inner.reply_to(request)
        if reply.headers.get("content-type") == "text/event-stream":
            reply = self._disturbed(reply, dice)
        return reply

    def _trouble(self, word: str, request: httpx.Request, dice: random.Random) -> Reply:
        if word == "refused_connection":
            raise httpx.ConnectError("connection refused by chaos", request=request)
        if word == "rate_limited":
            return failure(
                429,
                {"type": "rate_limit_reached_error", "message": "chaos: try again after 0 seconds"},
                retry_after="0",
            )
        return failure(dice.choice((500, 502, 503)), {"type": "server_error", "message": "chaos"})

    def _disturbed(self, reply: Reply, dice: random.Random) -> Reply:
        profile = self._profile
        roll = dice.random()
        if roll < profile.error_in_stream:
            self.disturbances.append("error_in_stream")
            return events([{"choices": [], "error": {"code": 502, "message": "chaos"}}], done=False)
        body = reply.body
        if profile.keep_alives:
            body = b"".join(
                part + b"\n\n" + (b": keep-alive\n\n" if dice.random() < 0.3 else b"")
                for part in body.removesuffix(b"\n\n").split(b"\n\n")
            )
        cut = roll < profile.error_in_stream + profile.cut
        if cut:
            self.disturbances.append("cut")
            body = body[: dice.randrange(len(body) // 2, max(len(body) * 3 // 4, len(body) // 2 + 1))]
        return replace(reply, packets=packets(body, dice) if profile.repackaged else (body,), cut=cut)


def packets(body: bytes, dice: random.Random) -> tuple[bytes, ...]:
    """Cut bytes at random places."""
    count = dice.randrange(0, min(len(body), 40) + 1)
    places = sorted({0, len(body), *(dice.randrange(0, len(body) + 1) for _ in range(count))})
    return tuple(body[a:b] for a, b in itertools.pairwise(places))


class RecordingTransport(httpx.BaseTransport):
    """Passes requests on and writes each exchange to a JSONL file, keys and account ids masked."""

    def __init__(self, inner: httpx.BaseTransport, path: str | os.PathLike[str]) -> None:
        self._inner = inner
        self._path = Path(path)
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Pass one request on. Its reply is read whole before it is handed back."""
        request.read()
        response = self._inner.handle_request(request)
        try:
            parts = tuple(response.iter_bytes())
        finally:
            response.close()
        headers = {k: v for k, v in response.headers.items() if k not in _FRAMING}
        reply = Reply(parts, response.status_code, headers)
        seen = _seen(request)
        record: JsonObject = {
            "request": {"method": seen.method, "url": seen.url, "body": seen.body},
            "reply": {
                "status": reply.status,
                "headers": {k: v for k, v in headers.items() if k in _KEPT_HEADERS or k.startswith("msh-")},
                "packets": [part.decode("utf-8", "surrogateescape") for part in parts],
            },
        }
        line = redact(json.dumps(record))
        with self._lock, self._path.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
        return _response(reply)

    def close(self) -> None:
        """Close the transport underneath."""
        self._inner.close()


class ReplayTransport(_Fake):
    """Answers from a recording: the n-th call to a path gets the n-th reply recorded for that path.

    With ``strict`` a request whose body differs from the recorded one is an ``AssertionError``.
    """

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = False) -> None:
        self._strict = strict
        self._lock = threading.Lock()
        self._left: dict[str, list[tuple[JsonObject, Reply]]] = {}
        for line in Path(path).read_text("utf-8").splitlines():
            record = json.loads(line)
            request, reply = record["request"], record["reply"]
            parts = tuple(part.encode("utf-8", "surrogateescape") for part in reply["packets"])
            key = f"{request['method']} {httpx.URL(request['url']).path}"
            self._left.setdefault(key, []).append(
                (request["body"], Reply(parts, reply["status"], reply["headers"]))
            )

    def reply_to(self, request: httpx.Request) -> Reply:
        """Return the next recorded reply for this path."""
        key, seen = f"{request.method} {request.url.path}", _seen(request)
        with self._lock:
            left = self._left.get(key)
            if not left:
                raise AssertionError(f"the recording has no further reply for {key}")
            body, reply = left.pop(0)
        if self._strict and body != seen.body:
            raise AssertionError(f"the request to {key} is not the recorded one")
        return reply


_FRAMING: Final = frozenset({"content-encoding", "content-length", "transfer-encoding"})
_KEPT_HEADERS: Final = frozenset(
    {
        "content-type",
        "retry-after",
        "x-retry-after",
        "x-msh-trace-id",
        "x-request-id",
        "x-openrouter-cache-status",
    }
)


class _Packets(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The packets of a reply, in order; then the end, or a broken connection."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def __iter__(self) -> Iterator[bytes]:
        yield from self._reply.packets
        if self._reply.cut:
            raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for packet in self._reply.packets:
            yield packet
        if self._reply.cut:
            raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")


def _response(reply: Reply) -> httpx.Response:
    return httpx.Response(reply.status, headers=dict(reply.headers), stream=_Packets(reply))


def _seen(request: httpx.Request) -> SeenRequest:
    try:
        body = read_object(request.content)
    except ValueError:
        body = {}
    return SeenRequest(request.method, str(request.url), dict(request.headers), body)


def _finish(given: str | None, calls: Sequence[ToolCall]) -> str:
    return given or ("tool_calls" if calls else "stop")


def _usage(given: Usage | None) -> JsonObject:
    data: JsonObject = {"prompt_tokens": 10, "completion_tokens": 5} if given is None else dict(given)
    counted = [data.get(name) for name in ("prompt_tokens", "completion_tokens")]
    data.setdefault("total_tokens", sum(count for count in counted if isinstance(count, int)))
    return data

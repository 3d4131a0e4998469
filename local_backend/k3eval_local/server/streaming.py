"""Server-sent events over ASGI: what is there goes out at once; keep-alive, faults, and who has gone away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

import pydantic_core
from starlette.types import Receive, Scope, Send

from k3eval_local.protocol.chaos import Drawn, FrameFault, encode_frame, packets
from k3eval_local.protocol.dialects.base import Frames
from k3eval_local.protocol.messages import JsonObject
from k3eval_local.protocol.parser import Event, Reasoning, Text
from k3eval_local.protocol.reply import TokenLogprob

DONE = b"data: [DONE]\n\n"
_MARK = "\0text\0"
_MARK_JSON = pydantic_core.to_json(_MARK)

_KEEP_ALIVE_LEAST_S = 0.01

Frame = JsonObject | bytes
"""A frame, or its event as it is sent."""


class TextFrames:
    """Events of plain pieces of text: all but the text is written once a stream, by the dialect."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._around: dict[tuple[int, type[Text] | type[Reasoning]], list[bytes]] = {}

    def frames(self, choice: int, event: Event, logprobs: Sequence[TokenLogprob] | None) -> Sequence[Frame]:
        """As `Frames.event`."""
        if not isinstance(event, Text | Reasoning) or logprobs is not None:
            return self._frames.event(choice, event, logprobs)
        key = (choice, type(event))
        around = self._around.get(key)
        if around is not None:
            return (pydantic_core.to_json(event.text).join(around),) if around else ()
        first = self._frames.event(choice, event, None)  # it may have members that only a first one has
        sample = self._frames.event(choice, replace(event, text=_MARK), None)
        self._around[key] = encode_frame(sample[0], None).split(_MARK_JSON) if sample else []
        return first


class EventStream:
    """An ASGI response that sends ``frames`` as server-sent events, each list with one send.

    ``on_gone`` is called when the client closes the connection; the frames are then expected to end.
    ``on_end`` is called once, however the stream ends. A stream that a fault cuts is left without its last
    HTTP chunk, so the client sees a broken connection.
    """

    def __init__(
        self,
        frames: AsyncGenerator[Sequence[Frame]],
        *,
        headers: Mapping[str, str],
        on_gone: Callable[[], None],
        on_end: Callable[[], None],
        keep_alive: bytes | None,
        keep_alive_s: float,
        drawn: Drawn | None = None,
        silence_s: float = 0.0,
    ) -> None:
        self._frames = frames
        self._headers = headers
        self._on_gone = on_gone
        self._on_end = on_end
        self._keep_alive = keep_alive
        self._keep_alive_s = keep_alive_s
        self._drawn = drawn
        self._silence_s = silence_s
        self._sent_at = time.monotonic()
        self._lock = asyncio.Lock()
        self._gone = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; always ends the helpers that watch the connection."""
        helpers = [asyncio.create_task(watch(receive, self._leave))]
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-cache"),
                        *((name.lower().encode(), value.encode()) for name, value in self._headers.items()),
                    ],
                }
            )
            if self._keep_alive is not None:
                await self._send(send, self._keep_alive)
                helpers.append(asyncio.create_task(self._keep_alive_loop(send, self._keep_alive)))
            async with aclosing(self._frames):
                complete = await self._body(send)
            if complete:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            self._on_end()

    def _leave(self) -> None:
        self._gone.set()
        self._on_gone()

    async def _body(self, send: Send) -> bool:
        """Send the frames; False when the connection is to break without an end."""
        if self._drawn is not None:
            return await self._faulty_body(send, self._drawn)
        async for frames in self._frames:
            if frames:
                await self._send(send, b"".join([_event(frame) for frame in frames]))
        await self._send(send, DONE)
        return True

    async def _faulty_body(self, send: Send, drawn: Drawn) -> bool:
        """As `_body`, frame by frame, with the fault that was drawn; no frame is an event already."""
        strike = drawn.position
        fault = FrameFault(drawn)
        number = 0
        async for originals in self._frames:
            plain = [original for original in originals if not isinstance(original, bytes)]
            for frame in [made for original in plain for made in fault.frames(original)]:
                number += 1
                data = encode_frame(frame, drawn)
                if number == strike or _is_end(frame):
                    if drawn.name == "cut_stream":
                        await self._send(send, data[: max(1, int(len(data) * drawn.fraction))])
                        return False
                    if drawn.name == "early_end":
                        return True
                    if drawn.name == "silence" and strike:
                        strike = 0
                        with suppress(TimeoutError):  # a client that leaves ends the silence
                            await asyncio.wait_for(self._gone.wait(), self._silence_s)
                await self._send(send, data)
        if drawn.name != "no_done":
            await self._send(send, DONE)
        return True

    async def _send(self, send: Send, data: bytes) -> None:
        if self._keep_alive is None and self._drawn is None:  # the usual case: nobody else sends
            await send({"type": "http.response.body", "body": data, "more_body": True})
            return
        async with self._lock:
            for packet in packets(data, self._drawn):
                await send({"type": "http.response.body", "body": packet, "more_body": True})
                if self._drawn is not None:
                    await asyncio.sleep(0)  # a client that has left is noticed between two packets
                    if self._gone.is_set():
                        break
            self._sent_at = time.monotonic()

    async def _keep_alive_loop(self, send: Send, comment: bytes) -> None:
        while not self._gone.is_set():
            rest = self._sent_at + self._keep_alive_s - time.monotonic()
            if rest <= 0:
                await self._send(send, comment)
            await asyncio.sleep(max(rest, _KEEP_ALIVE_LEAST_S))


class CutReply:
    """An ASGI response whose connection breaks in the middle of the body."""

    def __init__(self, body: bytes, fraction: float) -> None:
        self._body = body
        self._part = body[: int(len(body) * fraction)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Announce the whole body and send a part of it."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self._body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._part, "more_body": True})


async def watch(receive: Receive, on_gone: Callable[[], None]) -> None:
    """Wait until the client has closed the connection, then call ``on_gone``."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()


def _event(frame: Frame) -> bytes:
    return frame if isinstance(frame, bytes) else encode_frame(frame, None)


def _is_end(frame: JsonObject) -> bool:
    choices = frame.get("choices")
    if not isinstance(choices, list) or not choices:
        return True
    return any(isinstance(choice, dict) and choice.get("finish_reason") is not None for choice in choices)

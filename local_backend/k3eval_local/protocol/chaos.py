"""Faults on purpose: what goes wrong between a client and a vendor, deterministic by seed.

A plan gives the n-th chat request of a server its fault, or none, from ``(seed, n)`` alone. Refusals replace
the reply; frame faults rewrite the stream's JSON frames (or the one JSON reply); byte faults change how the
bytes are sent. Each fault is one entry of :data:`FAULTS`, which is also the documentation.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pydantic_core
from pydantic import JsonValue

from k3eval_local.errors import LocalError
from k3eval_local.protocol.errors import ErrorKind, ProtocolError
from k3eval_local.protocol.messages import JsonObject

Where = Literal["refusal", "reply", "stream", "both"]


class ChaosError(LocalError, ValueError):
    """A ``--chaos`` value that cannot be used."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that can go wrong. ``where`` says which requests it can befall."""

    name: str
    where: Where
    summary: str
    refusal: ErrorKind | None = None

    def applies(self, *, stream: bool) -> bool:
        """Whether a request that streams, or not, can have this fault."""
        return self.where in ("refusal", "both") or (self.where == "stream") == stream


def _refusal(name: str, kind: ErrorKind, summary: str) -> Fault:
    return Fault(name, "refusal", summary, kind)


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        _refusal("rate_limit", ErrorKind.RATE, "429, requests a minute, with a retry hint"),
        _refusal("concurrency", ErrorKind.CONCURRENCY, "429, too many at once, with a retry hint"),
        _refusal("quota", ErrorKind.QUOTA, "429 or 402, balance used up: no retry helps"),
        _refusal("wrapped_quota", ErrorKind.WRAPPED_QUOTA, "429 whose raw text hides an upstream quota"),
        _refusal(
            "budget_in_use", ErrorKind.BUDGET_IN_USE, "402 that passes by itself (openrouter), else 429"
        ),
        _refusal("overloaded", ErrorKind.OVERLOADED, "429, 503 or 529: no capacity"),
        _refusal("http_500", ErrorKind.SERVER, "500"),
        _refusal("http_502", ErrorKind.BAD_GATEWAY, "502"),
        _refusal("http_503", ErrorKind.UNAVAILABLE, "503"),
        Fault("html_504", "refusal", "504 with an HTML page as body"),
        Fault("error_in_200", "both", "status 200, an error inside the reply or the stream"),
        Fault("silence", "both", "a long pause in the middle (--chaos-silence seconds)"),
        Fault("broken_tool_json", "both", "tool arguments cut so that they are no JSON"),
        Fault("missing_tool_id", "both", "a tool call without its id"),
        Fault("null_usage", "both", "usage is null everywhere"),
        Fault("cut_reply", "reply", "the connection breaks in the middle of the body"),
        Fault("cut_stream", "stream", "the connection breaks in the middle of a frame"),
        Fault("early_end", "stream", "the stream ends cleanly but without finish and [DONE]"),
        Fault("no_done", "stream", "everything but [DONE]"),
        Fault("one_byte", "stream", "one byte a packet"),
        Fault("crlf", "stream", "CRLF line ends, no space after data:, comments in between"),
        Fault("duplicate_finish", "stream", "the finish chunk comes twice"),
        Fault("missing_tool_index", "stream", "tool call pieces without their index"),
        Fault("zero_usage", "stream", "usage of zeros on every chunk in the middle"),
        Fault("nulls", "stream", "every absent member of a delta as null"),
        Fault("whole_arguments", "stream", "all tool arguments of a call in one late piece"),
    )
}
"""Every fault, in the order of the help text."""

PROFILES: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "all": (0.3, tuple(FAULTS)),
    "every": (1.0, tuple(FAULTS)),
    "mild": (0.1, ("rate_limit", "overloaded", "http_503", "one_byte", "crlf", "nulls", "duplicate_finish")),
    "refusals": (0.5, tuple(name for name, fault in FAULTS.items() if fault.where == "refusal")),
    "streams": (0.5, tuple(name for name, fault in FAULTS.items() if fault.where in ("stream", "both"))),
}
"""Share of requests that get a fault, and the faults to draw from."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """A plan: which request gets which fault."""

    seed: int
    rate: float
    faults: tuple[Fault, ...]

    @classmethod
    def parse(cls, text: str) -> Chaos:
        """Read ``SEED[:PROFILE][@RATE]``; PROFILE is a profile's name or faults joined by commas.

        Named faults befall every request unless a rate is given.

        Raises:
            ChaosError: no number, an unknown profile or fault, a rate outside 0 to 1.
        """
        head, _, rate_text = text.partition("@")
        seed_text, _, profile = head.partition(":")
        try:
            seed = int(seed_text)
            asked = float(rate_text) if rate_text else None
        except ValueError:
            raise ChaosError(
                f"--chaos {text!r}: write SEED[:PROFILE][@RATE], such as 7 or 7:cut_stream@0.2"
            ) from None
        if asked is not None and not 0 <= asked <= 1:
            raise ChaosError(f"--chaos {text!r}: the rate must be between 0 and 1")
        rate, names = PROFILES.get(profile or "all", (1.0, tuple(profile.split(","))))
        unknown = [name for name in names if name not in FAULTS]
        if unknown:
            known = ", ".join((*PROFILES, *FAULTS))
            raise ChaosError(f"--chaos: no profile or fault is called {unknown[0]!r}; there are {known}")
        return cls(seed, rate if asked is None else asked, tuple(FAULTS[name] for name in names))

    def draw(self, number: int, *, stream: bool) -> Drawn | None:
        """The fault of the ``number``-th chat request; ``None`` when it is to be served as it should be."""
        rng = random.Random(f"{self.seed}/{number}")  # noqa: S311 - reproducible faults, no secret
        hit = rng.random() < self.rate
        chosen = [fault for fault in self.faults if fault.applies(stream=stream)]
        if not hit or not chosen:
            return None
        return Drawn(rng.choice(chosen), position=rng.randint(1, 6), fraction=rng.random())


@dataclass(frozen=True, slots=True)
class Drawn:
    """A fault and where in the reply it strikes."""

    fault: Fault
    position: int
    """Frame of a stream, counted from 1; later than the stream is long means its last frame."""
    fraction: float
    """Place inside a body, 0 to 1."""

    @property
    def name(self) -> str:
        """The fault's name."""
        return self.fault.name

    def refusal(self) -> ProtocolError | None:
        """The error to answer with, if the fault is a refusal with the dialect's envelope."""
        if self.fault.refusal is None:
            return None
        hinted = self.fault.refusal in (
            ErrorKind.RATE, ErrorKind.CONCURRENCY, ErrorKind.WRAPPED_QUOTA, ErrorKind.BUDGET_IN_USE
        )  # fmt: skip
        return ProtocolError(
            self.fault.refusal,
            f"injected fault: {self.fault.summary}",
            retry_after_s=1 if hinted else None,
            limit=3 if self.fault.refusal is ErrorKind.RATE else None,
        )


GATEWAY_PAGE = (
    b"<html>\r\n<head><title>504 Gateway Time-out</title></head>\r\n"
    b"<body><h1>504 Gateway Time-out</h1></body>\r\n</html>\r\n"
)
"""The HTML body of a gateway that gave up."""


class FrameFault:
    """Rewrites the frames of one stream. ``frames`` is called for each frame, ``last`` before ``[DONE]``."""

    def __init__(self, drawn: Drawn | None) -> None:
        self._name = drawn.name if drawn is not None else ""
        self._held: dict[tuple[int, int], list[JsonObject]] = {}

    def frames(self, frame: JsonObject) -> list[JsonObject]:
        """What is sent instead of ``frame``."""
        rewrite = _FRAME_FAULTS.get(self._name)
        if rewrite is not None:
            rewrite(frame)
        if self._name == "duplicate_finish" and _finishes(frame):
            return [frame, copy.deepcopy(frame)]
        if self._name == "whole_arguments":
            return self._gather(frame)
        return [frame]

    def _gather(self, frame: JsonObject) -> list[JsonObject]:
        """Hold back argument pieces; release each call's as one piece before whatever else follows."""
        held = [
            ((_integer(choice.get("index")), _integer(call.get("index"))), function)
            for choice in _choices(frame)
            for call, function in _tool_pieces(choice)
            if "name" not in function
        ]
        if held:
            self._held.setdefault(held[0][0], []).append(frame)
            return []
        released = []
        for frames in self._held.values():
            merged = copy.deepcopy(frames[0])
            pieces = [
                str(function.get("arguments", ""))
                for each in frames
                for choice in _choices(each)
                for _, function in _tool_pieces(choice)
            ]
            for choice in _choices(merged):
                for _, function in _tool_pieces(choice):
                    function["arguments"] = "".join(pieces)
            released.append(merged)
        self._held.clear()
        return [*released, frame]


def rewrite_reply(drawn: Drawn, reply: JsonObject, error: JsonObject) -> JsonObject:
    """A whole (not streamed) reply with the fault in it; ``error`` is the dialect's error body."""
    reply = copy.deepcopy(reply)
    match drawn.name:
        case "error_in_200":
            for choice in _choices(reply):
                choice["finish_reason"] = "error"
                choice["error"] = error.get("error", error)
        case "broken_tool_json":
            for choice in _choices(reply):
                for _, function in _tool_pieces(choice, member="message"):
                    function["arguments"] = str(function.get("arguments", ""))[:-1]
        case "missing_tool_id":
            for choice in _choices(reply):
                for call, _ in _tool_pieces(choice, member="message"):
                    call.pop("id", None)
        case "null_usage":
            reply["usage"] = None
        case _:
            pass
    return reply


def _break_arguments(frame: JsonObject) -> None:
    for choice in _choices(frame):
        for _, function in _tool_pieces(choice):
            text = function.get("arguments")
            if isinstance(text, str):  # without closing brackets the joined text is never JSON
                function["arguments"] = text.replace("}", "").replace("]", "")


def _drop_id(frame: JsonObject) -> None:
    for choice in _choices(frame):
        for call, _ in _tool_pieces(choice):
            call.pop("id", None)


def _drop_index(frame: JsonObject) -> None:
    for choice in _choices(frame):
        for call, _ in _tool_pieces(choice):
            call.pop("index", None)


def _null_usage(frame: JsonObject) -> None:
    if "usage" in frame:
        frame["usage"] = None
    for choice in _choices(frame):
        if "usage" in choice:
            choice["usage"] = None


def _zero_usage(frame: JsonObject) -> None:
    if not _finishes(frame) and _choices(frame):
        frame["usage"] = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def _nulls(frame: JsonObject) -> None:
    members = ("role", "content", "reasoning_content", "tool_calls", "function_call", "refusal", "audio")
    for choice in _choices(frame):
        delta = choice.get("delta")
        if isinstance(delta, dict):
            for member in members:
                delta.setdefault(member, None)
    frame.setdefault("usage", None)
    frame.setdefault("system_fingerprint", None)


_FRAME_FAULTS: Mapping[str, Callable[[JsonObject], None]] = {
    "broken_tool_json": _break_arguments,
    "missing_tool_id": _drop_id,
    "missing_tool_index": _drop_index,
    "null_usage": _null_usage,
    "zero_usage": _zero_usage,
    "nulls": _nulls,
}


def encode_frame(frame: JsonObject, drawn: Drawn | None) -> bytes:
    """One SSE event."""
    text = pydantic_core.to_json(frame)
    if drawn is not None and drawn.name == "crlf":
        return b": still here\r\ndata:" + text + b"\r\n\r\n"
    return b"data: " + text + b"\n\n"


def packets(data: bytes, drawn: Drawn | None) -> Iterable[bytes]:
    """``data`` as it is handed to the socket."""
    if drawn is not None and drawn.name == "one_byte":
        return (data[index : index + 1] for index in range(len(data)))
    return (data,)


def _finishes(frame: JsonObject) -> bool:
    return any(choice.get("finish_reason") for choice in _choices(frame))


def _choices(frame: JsonObject) -> list[JsonObject]:
    choices = frame.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _tool_pieces(choice: JsonObject, member: str = "delta") -> list[tuple[JsonObject, JsonObject]]:
    delta = choice.get(member)
    calls = delta.get("tool_calls") if isinstance(delta, dict) else None
    pieces = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(call, dict) and isinstance(function, dict):
            pieces.append((call, function))
    return pieces


def _integer(value: JsonValue) -> int:
    return value if isinstance(value, int) else 0


def help_lines() -> list[str]:
    """The faults and profiles as lines for a help text."""
    lines = [f"{fault.name}: {fault.summary}" for fault in FAULTS.values()]
    for name, (rate, faults) in PROFILES.items():
        lines.append(f"profile {name}: {rate:.0%} of the requests, {len(faults)} faults")
    return lines

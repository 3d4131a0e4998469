"""The host's prefix cache, watched from outside: was the prefix stable, what should have been read, why was
it not.

A cache hit needs the same bytes from the start: tools, then message after message. Each request is reduced to
digests and compared with the requests before it; the first message that differs is the one that broke the
prefix.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from k3eval.errors import ProtocolError
from k3eval.jsontypes import JsonValue, write_json
from k3eval.messages import Message
from k3eval.meter.usage import Usage

KEPT_TURNS: Final = 512
KEPT_RIVALS: Final = 8
"""Latest requests of one opening that are compared message by message."""
MINIMUM_TOKENS: Final = 256
"""Shortest prefix that a host has been seen to cache (blocks of 128 and 256 tokens; the vendor publishes
none)."""
SLACK_TOKENS: Final = 512
TTL_S: Final[Mapping[str, float]] = {"5m": 300.0, "1h": 3600.0}
_NS: Final = 1_000_000_000
_EFFORT_MEMBERS: Final = ("reasoning_effort", "thinking", "reasoning", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A request reduced to what decides over cache hits."""

    model: str
    tools: bytes
    effort: bytes
    digests: tuple[bytes, ...]
    roles: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes of each message as sent."""
    opening: bytes
    """Digest of the first message that is not a system message: names the conversation."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that was answered."""

    prefix: Prefix
    prompt: int
    output: int
    host: str | None
    at_ns: int
    reply: bytes | None
    """Digest of the answer; ``None`` where only its bytes passed by."""


@dataclass(frozen=True, slots=True)
class PrefixCheck:
    """A request compared with the one before it in its conversation."""

    prefix: Prefix
    before: Turn | None
    common: int
    """Messages that both have in common from the start."""

    @property
    def reply_kept(self) -> bool:
        """Whether the answer to the request before was sent back as it came, next."""
        if self.before is None or self.common < len(self.before.prefix.digests):
            return False
        following = self.common < len(self.prefix.roles) and self.prefix.roles[self.common] == "assistant"
        return following and self.before.reply in (None, self.prefix.digests[self.common])

    @property
    def reply_changed(self) -> bool:
        """Whether another answer was sent back in place of the one that came: edited, or without its
        reasoning.
        """
        if self.before is None or self.common < len(self.before.prefix.digests) or self.reply_kept:
            return False
        return self.common < len(self.prefix.roles) and self.prefix.roles[self.common] == "assistant"

    @property
    def stable(self) -> bool:
        """Whether the request only adds to the one before. True for the first one."""
        return self.before is None or self.broken_by is None

    @property
    def broken_by(self) -> str | None:
        """What broke the prefix: ``tools``, ``effort``, or the message with its number (from 0) and role."""
        if self.before is None:
            return None
        if self.prefix.tools != self.before.prefix.tools:
            return "tools"
        if self.prefix.effort != self.before.prefix.effort:
            return "effort"
        if self.reply_changed or self.common < min(len(self.before.prefix.digests), len(self.prefix.digests)):
            return f"message {self.common} ({self.prefix.roles[self.common]})"
        return None

    @property
    def known_prompt(self) -> tuple[int, int]:
        """Return (tokens counted by the host in the common part, bytes that follow it).

        The reply to the request before counts as known where it was sent back next.
        """
        if (
            self.before is None
            or self.broken_by in ("tools", "effort")
            or self.common < len(self.before.prefix.digests)
        ):
            return 0, sum(self.prefix.sizes)
        tokens, start = self.before.prompt, self.common
        if self.reply_kept:
            tokens, start = tokens + self.before.output, start + 1
        return tokens, sum(self.prefix.sizes[start:])

    @property
    def seen_tokens(self) -> int:
        """Prompt tokens that a perfect prefix cache would hold."""
        if self.before is None or self.broken_by in ("tools", "effort"):
            return 0
        if self.common >= len(self.before.prefix.digests):
            return self.known_prompt[0]
        total = sum(self.before.prefix.sizes)
        return self.before.prompt * sum(self.prefix.sizes[: self.common]) // total if total else 0

    def miss_reason(
        self, usage: Usage | None, host: str | None, now_ns: int, ttl_s: float | None
    ) -> str | None:
        """Say why fewer tokens came from the cache than could have; ``None`` where all did."""
        if usage is None:
            return None
        if usage.cache_read is None:
            return "not reported by the host"
        if self.before is None:
            return None if usage.cache_read else "first call of the conversation"
        expected = min(self.before.prompt, usage.prompt)
        if usage.cache_read >= expected - max(SLACK_TOKENS, expected // 50) and usage.cache_read > 0:
            return None
        broken = self.broken_by
        if broken == "effort":
            return "effort changed"
        if broken is not None:
            return f"prefix changed at {broken}"
        if None not in (host, self.before.host) and host != self.before.host:
            return f"host flipped from {self.before.host} to {host}"
        if expected < MINIMUM_TOKENS:
            return f"below the minimum of about {MINIMUM_TOKENS} tokens"
        idle_s = (now_ns - self.before.at_ns) / _NS
        if ttl_s is not None and idle_s > ttl_s:
            return f"cache life of {ttl_s:.0f} s passed ({idle_s:.0f} s since the last call)"
        return "not kept by the host"


class PrefixWatch:
    """Remembers the latest requests of all conversations. Thread-safe.

    A request that continues a remembered one is found by the digest of its beginning; one that does not is
    compared with the latest few that open with the same message.
    """

    def __init__(self) -> None:
        self._ends: OrderedDict[tuple[str, bytes], Turn] = OrderedDict()
        self._openings: OrderedDict[tuple[str, bytes], deque[Turn]] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, prefix: Prefix) -> PrefixCheck:
        """Compare a request with those before it."""
        best: PrefixCheck | None = None
        beginnings = list(_beginnings(prefix))
        with self._lock:
            for count in range(len(beginnings), 0, -1):
                turn = self._ends.get((prefix.model, beginnings[count - 1]))
                if turn is None:
                    continue
                check = PrefixCheck(prefix, turn, count)
                if check.stable:
                    return check
                best = best or check
            rivals = tuple(self._openings.get((prefix.model, prefix.opening), ()))
        for turn in reversed(rivals):
            check = PrefixCheck(prefix, turn, _common(turn.prefix.digests, prefix.digests))
            if best is None or check.common > best.common:
                best = check
        return best or PrefixCheck(prefix, None, 0)

    def answered(
        self, check: PrefixCheck, usage: Usage, host: str | None, now_ns: int, reply: Message | None = None
    ) -> None:
        """Remember a request, what the host counted for it, and what it answered where that is known."""
        prefix = check.prefix
        digest = None if reply is None else _digest(_essence(reply))
        turn = Turn(prefix, usage.prompt, usage.output, host, now_ns, digest)
        end = b""
        for end in _beginnings(prefix):  # noqa: B007 - the last one is wanted
            pass
        with self._lock:
            self._ends[prefix.model, end] = turn
            self._ends.move_to_end((prefix.model, end))
            opened = (prefix.model, prefix.opening)
            self._openings.setdefault(opened, deque(maxlen=KEPT_RIVALS)).append(turn)
            self._openings.move_to_end(opened)
            for kept in (self._ends, self._openings):
                if len(kept) > KEPT_TURNS:
                    kept.popitem(last=False)


def _beginnings(prefix: Prefix) -> Iterator[bytes]:
    """Yield one digest for each beginning of a request: its first message, its first two, and so on."""
    chained = b""
    for digest in prefix.digests:
        chained = _digest(chained + digest)
        yield chained


def write_body(body: Mapping[str, JsonValue]) -> tuple[bytes, Prefix]:
    """Serialise a request body and reduce it to its prefix; long conversations are written once for both."""
    messages = _messages(body)
    written = [write_json(message) for message in messages]
    parts = [
        write_json(name)
        + b":"
        + (b"[" + b",".join(written) + b"]" if value is messages else write_json(value))
        for name, value in body.items()
    ]
    return b"{" + b",".join(parts) + b"}", prefix_of(body, written)


def prefix_of(body: Mapping[str, JsonValue], written: Sequence[bytes] | None = None) -> Prefix:
    """Reduce a request body to its prefix. ``written``: its messages, where they are serialised already."""
    messages = _messages(body)
    if written is None:
        written = [write_json(message) for message in messages]
    digests = tuple(_message_digest(m, data) for m, data in zip(messages, written, strict=True))
    roles = tuple(str(message.get("role")) if isinstance(message, dict) else "?" for message in messages)
    first = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
    return Prefix(
        model=str(body.get("model")),
        tools=_digest(write_json(body.get("tools"))),
        effort=_digest(write_json([body.get(member) for member in _EFFORT_MEMBERS])),
        digests=digests,
        roles=roles,
        sizes=tuple(len(data) for data in written),
        opening=digests[first] if digests else b"",
    )


def _messages(body: Mapping[str, JsonValue]) -> Sequence[JsonValue]:
    raw = body.get("messages")
    return raw if isinstance(raw, list) else ()


def _message_digest(message: JsonValue, written: bytes) -> bytes:
    """Digest what a message says. An answer's wire form differs among clients, so its content counts."""
    if isinstance(message, dict) and message.get("role") == "assistant":
        try:
            return _digest(_essence(Message.from_json(message)))
        except ProtocolError:
            pass  # not ours to judge: the host will refuse it
    return _digest(written)


def _essence(message: Message) -> bytes:
    thought = message.reasoning.text.strip() if message.reasoning is not None else ""
    calls: list[JsonValue] = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    return write_json([message.text.strip(), thought, calls])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=12).digest()


def _common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count

"""Many streaming sessions at once with every fault on purpose: nothing lost, nothing mixed, nothing leaked.

Each of a fixed set of requests is first made alone, at a server without faults. Then sessions ask them again
and again at a server that injects faults, and some of them leave in the middle. What a stream says must be
what the same request said alone, as far as its fault lets it (named in a header of the reply).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from figures import Measured, say
from in_process import InProcess
from server_process import Json, Reply, ServerProcess, StreamReply, read_reply, read_stream

_LEAVES = 0.05
"""Share of requests whose client leaves after a few packets."""
_STREAM_S = 120.0
"""A stream that takes longer is lost."""
_OPTIONS = ("--memory-mib", "48")
"""A small cache, so that it is full soon and memory that still grows is a leak."""
_GROWTH_BYTES = 8e6
"""What the allocator may keep between two measurements at rest."""
_SHARED = "You repair small projects. Read before you write, and say what you did. " * 8

_REFUSED = frozenset({
    "rate_limit", "concurrency", "quota", "wrapped_quota", "budget_in_use", "overloaded",
    "http_500", "http_502", "http_503", "html_504",
})  # fmt: skip
_CUT = frozenset({"cut_stream", "early_end", "error_in_200"})
_SAME_TEXT = frozenset({"broken_tool_json", "missing_tool_id", "missing_tool_index", "whole_arguments"})
"""Faults that change tool calls and nothing else."""
_NO_USAGE = frozenset({"null_usage", "zero_usage"})

_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": ["x", "y", "z"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
_SCHEMA: Json = {
    "type": "object",
    "properties": {"passed": {"type": "boolean"}, "grade": {"enum": ["low", "high"]}},
    "required": ["passed", "grade"],
    "additionalProperties": False,
}


def request(number: int) -> Json:
    """The ``number``-th of the requests: all different, of eight kinds, each repeatable."""
    kinds: tuple[Json, ...] = (
        {"temperature": 0, "reasoning_effort": "low"},
        {"seed": number, "reasoning_effort": "low"},
        {"seed": number, "reasoning_effort": "none", "stop": ["zq", "!?"]},
        {"seed": number, "reasoning_effort": "none", "tools": [_TOOL], "tool_choice": "required"},
        {
            "seed": number,
            "reasoning_effort": "none",
            "response_format": {"type": "json_schema", "json_schema": {"name": "v", "schema": _SCHEMA}},
        },
        {"seed": number, "reasoning_effort": "none", "logprobs": True, "top_logprobs": 2},
        {"seed": number, "n": 2, "reasoning_effort": "low"},
        {"temperature": 0, "ignore_eos": True, "reasoning_effort": "high"},
    )
    usage = {"include_usage": True, "continuous_usage_stats": number % 3 == 0}
    return {
        "model": "a",
        "messages": [
            {"role": "system", "content": _SHARED},
            {"role": "user", "content": f"Request {number}: " + "go on. " * (number % 40)},
        ],
        "stream": True,
        "stream_options": usage,
        "max_tokens": 24 + number % 97,
        **kinds[number % len(kinds)],
    }


@dataclass
class Tally:
    """What the sessions saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Replies by fault, or ``whole``; clients that left as ``left``."""
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    """Seconds between two packets of a stream without a fault."""
    first: list[float] = field(default_factory=list)
    """Seconds to the first token-bearing packet of such a stream."""
    wrong: list[str] = field(default_factory=list)


Alone = dict[int, StreamReply]
"""What the requests say alone, by number."""


@dataclass
class Received:
    """One connection's bytes and when they came."""

    reply: Reply
    at: list[float]
    left: bool


async def ask(server: ServerProcess, body: Json, leave_after: int | None = None) -> Received:
    """Make one request; leave after that many packets, if given."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(server.request(body))
        parts, at = [], [time.perf_counter()]
        while part := await reader.read(1 << 16):
            parts.append(part)
            at.append(time.perf_counter())
            if leave_after is not None and len(parts) >= leave_after:
                return Received(read_reply(b"".join(parts)), at, left=True)
    except ConnectionResetError:  # a cut, too
        pass
    finally:
        writer.transport.abort()
    return Received(read_reply(b"".join(parts)), at, left=False)


def wrong(alone: StreamReply, fault: str, reply: Reply) -> str | None:
    """Why this reply is not what its fault leaves of the request made alone; ``None`` when it is."""
    if fault in _REFUSED:
        return None if reply.status >= 400 else f"a refusal with status {reply.status}"
    if reply.status != 200:
        return f"status {reply.status}: {reply.body[:100]!r}"
    if reply.complete == (fault == "cut_stream"):
        return "the body is complete" if reply.complete else "the body is cut"
    said = read_stream(reply.body)
    if fault in _CUT:
        shorter = all(
            alone.choices[index].text.startswith(choice.reasoning)
            and alone.choices[index].content.startswith(choice.content)
            for index, choice in said.choices.items()
        )
        if not shorter or said.choices == alone.choices:
            return "a cut stream is no true beginning of the whole one"
        return None if said.error == said.done == (fault == "error_in_200") else "it ends in another way"
    if fault in _SAME_TEXT:
        same = {i: (c.text, c.finish) for i, c in said.choices.items()} == {
            i: (c.text, c.finish) for i, c in alone.choices.items()
        }
    else:
        same = said.choices == alone.choices
    if not same:
        return f"it said {said.choices}, and alone {alone.choices}"
    if fault not in _NO_USAGE and said.completion_tokens != alone.completion_tokens:
        return f"{said.completion_tokens} tokens, and {alone.completion_tokens} alone"
    return None if said.done == (fault != "no_done") else "the end mark is wrong"


async def session(
    server: ServerProcess, alone: Alone, number: int, seed: int, until: float, tally: Tally
) -> None:
    """Ask requests in an order of one's own until the time is over."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - reproducible load
    while time.perf_counter() < until:
        chosen = rng.choice(list(alone))
        leave_after = rng.randint(1, 6) if rng.random() < _LEAVES else None
        try:
            got = await asyncio.wait_for(ask(server, request(chosen), leave_after), _STREAM_S)
        except (TimeoutError, OSError) as error:
            tally.wrong.append(f"request {chosen}: {type(error).__name__} {error}")
            continue
        if got.left:
            tally.outcomes["left"] += 1
            continue
        fault = got.reply.headers.get("x-k3eval-fault", "whole")
        tally.outcomes[fault] += 1
        reason = wrong(alone[chosen], fault, got.reply)
        if reason is not None:
            tally.wrong.append(f"request {chosen}, {fault}: {reason}")
        if fault == "whole":
            tally.tokens += alone[chosen].completion_tokens or 0
            tally.first.append(got.at[2] - got.at[0] if len(got.at) > 2 else 0.0)
            tally.gaps += np.diff(got.at[2:]).tolist()


async def alone_first(count: int) -> Alone:
    """``count`` requests made alone, without faults. Those that rounding could change are left out."""
    inside = InProcess("a")
    with inside.engine:
        steady = (number for number in itertools.count() if inside.steady(request(number)))
        numbers = list(itertools.islice(steady, count))
    replies = {}
    with ServerProcess("a", *_OPTIONS) as server:
        for number in numbers:
            got = await ask(server, request(number))
            if got.reply.status != 200 or not got.reply.complete:
                raise SystemExit(f"request {number} alone: {got.reply.status} {got.reply.body[:300]!r}")
            replies[number] = read_stream(got.reply.body)
    said = [str(choice) for reply in replies.values() for choice in reply.choices.values()]
    if len(set(said)) < len(said) * 3 // 4:
        raise SystemExit("too many requests say the same: mixed streams could not be told")
    return replies


@dataclass(frozen=True)
class State:
    """What a leak would show in."""

    resident: int
    files: int
    threads: int
    metrics: dict[str, float]

    @classmethod
    async def at_rest(cls, server: ServerProcess) -> State:
        """When nothing runs, or after ten seconds."""
        for _ in range(100):
            metrics = server.metrics()
            if metrics["running"] == metrics["waiting"] == metrics["chat_in_flight"] == 0:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)  # the connection that asked is closed, too
        return cls(server.resident_bytes(), server.open_files(), server.threads(), metrics)

    def page_bytes(self) -> float:
        """Bytes of a page of the cache."""
        held = self.metrics["total_pages"] - self.metrics["free_pages"]
        return self.metrics["used_bytes"] / held if held else 0.0

    def lost_pages(self) -> float:
        """Pages that nobody holds, that are no saved prefix, and that are not free either."""
        return self.metrics["total_pages"] - self.metrics["free_pages"] - self.metrics["cached_pages"]


async def _run(seconds: float, sessions: int, requests: int, seed: int) -> tuple[list[Measured], list[str]]:
    say(f"{requests} requests alone")
    alone = await alone_first(requests)
    options = (*_OPTIONS, "--chaos", f"{seed}:all", "--chaos-silence", "1")
    with ServerProcess("a", *options) as server:

        async def together(for_seconds: float, part: int, tally: Tally) -> None:
            until = time.perf_counter() + for_seconds
            runs = (session(server, alone, n, seed + part, until, tally) for n in range(sessions))
            await asyncio.gather(*runs)

        warm = Tally()
        say(f"{sessions} sessions, {seconds / 5:.0f} s to warm up")
        await together(seconds / 5, 1, warm)
        before = await State.at_rest(server)
        tally = Tally()
        say(f"{sessions} sessions, {seconds:.0f} s")
        start = time.perf_counter()
        await together(seconds, 2, tally)
        taken = time.perf_counter() - start
        after = await State.at_rest(server)
    tally.wrong += warm.wrong
    return _rows(sessions, taken, tally, before, after), _failures(tally, before, after)


def _failures(tally: Tally, before: State, after: State) -> list[str]:
    found = list(tally.wrong)
    metrics = after.metrics
    if metrics["free_slots"] != metrics["total_slots"]:
        found.append(f"{metrics['total_slots'] - metrics['free_slots']:.0f} slots were not given back")
    if after.lost_pages():
        found.append(f"{after.lost_pages():.0f} pages were not given back")
    untouched = before.metrics["free_pages"] * before.page_bytes()  # at most: it may have been used and freed
    grown = after.resident - before.resident - untouched
    if grown > _GROWTH_BYTES:
        found.append(f"memory grew by {grown / 1e6:.1f} MB more than the cache can have")
    if metrics["running"] or metrics["waiting"] or metrics["chat_in_flight"]:
        found.append("something still runs")
    if after.files > before.files:
        found.append(f"{after.files - before.files} more open files")
    if metrics["failed_requests_total"]:
        found.append(f"{metrics['failed_requests']:.0f} requests failed in the engine")
    return found


def _rows(sessions: int, taken: float, tally: Tally, before: State, after: State) -> list[Measured]:
    section = f"{sessions} sessions for {taken:.0f} s"
    gaps, first = np.array(tally.gaps or [0.0]) * 1e3, np.array(tally.first or [0.0]) * 1e3
    whole = tally.outcomes["whole"]
    faults = sum(tally.outcomes.values()) - whole - tally.outcomes["left"]
    rows = [
        Measured(section, "streams without a fault", whole, ""),
        Measured(section, "replies with a fault", faults, ""),
        Measured(section, "clients that left in the middle", tally.outcomes["left"], ""),
        Measured(section, "streams lost, or not what the request says alone", len(tally.wrong), ""),
        Measured(section, "tokens of the streams without a fault", tally.tokens / taken, "tok/s"),
        Measured(section, "gap between packets of a stream, median", float(np.median(gaps)), "ms"),
        Measured(section, "gap, 99th percentile", float(np.percentile(gaps, 99)), "ms"),
        Measured(section, "gap, longest", float(gaps.max()), "ms"),
        Measured(section, "first token, median", float(np.median(first)), "ms"),
        Measured(section, "first token, 99th percentile", float(np.percentile(first, 99)), "ms"),
    ]
    for when, state in (("after the warm-up", before), ("at the end", after)):
        rows += [
            Measured(f"the server at rest, {when}", "resident, anonymous", state.resident / 1e6, "MB"),
            Measured(f"the server at rest, {when}", "open files", state.files, ""),
            Measured(f"the server at rest, {when}", "threads", state.threads, ""),
            Measured(f"the server at rest, {when}", "free slots", state.metrics["free_slots"], ""),
            Measured(f"the server at rest, {when}", "pages held by nobody", state.lost_pages(), ""),
            Measured(f"the server at rest, {when}", "saved prefixes", state.metrics["checkpoints"], ""),
        ]
    rows += [Measured("replies by fault", name, n, "") for name, n in sorted(tally.outcomes.items())]
    return rows


def load(seconds: float, sessions: int, requests: int, seed: int) -> tuple[list[Measured], list[str]]:
    """Runs the sessions over that many different requests.

    Returns the figures, and what was lost, mixed or leaked, one line each.
    """
    return asyncio.run(_run(seconds, sessions, requests, seed))

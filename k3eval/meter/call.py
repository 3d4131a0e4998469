"""One metered call, without input or output: plan, reserve, watch the bytes, settle, classify.

The sync and the async transport drive the same two classes. A ``Call`` is what the caller asked for; a
``Try`` is one attempt at it, written to the ledger before it is sent and after it ended, whatever happens in
between.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Final
from urllib.parse import urlsplit

import httpx

from k3eval.errors import (
    ApiError,
    ConfigError,
    K3EvalError,
    OverloadedError,
    ProtocolError,
    QuotaExceededError,
    RateLimitError,
    StreamInterruptedError,
    TransportError,
)
from k3eval.jsontypes import JsonValue, as_int, as_object, as_str, read_object
from k3eval.meter.cache import TTL_S, prefix_of
from k3eval.meter.context import CallContext, Observer
from k3eval.meter.gate import HostGate
from k3eval.meter.ledger import Reservation
from k3eval.meter.meter import Meter
from k3eval.meter.otel import Span, start_span
from k3eval.meter.pricing import PriceRow, plain, write_tier_unknown
from k3eval.meter.retry import TIMED_OUT
from k3eval.meter.scan import StreamScanner
from k3eval.meter.usage_wire import MAX_TOKENS
from k3eval.providers.base import Provider, is_k3_family
from k3eval.redact import fingerprint
from k3eval.results import Attempt, AttemptState, Cost, Timing
from k3eval.stream import Reply, StreamDecoder, read_reply

TEMPLATE_TOKENS: Final = 256
"""What a chat template may add beyond the bytes of the request."""
SMALL_CAP: Final = 4_096
"""Below this, reasoning at the highest effort may leave nothing of the cap for the answer."""
UNKNOWN_OUTPUT: Final = 131_072
"""Output tokens assumed where neither caller nor price row states a cap: the first party's default."""
GAP: Final = Decimal("0.02")
_NS: Final = 1_000_000_000
_BUFFERED_NS: Final = 50_000
"""Bytes that are handed over within this time were not waited for."""


class Call:
    """One call: what it may cost, and its attempts so far."""

    def __init__(
        self,
        meter: Meter,
        provider: Provider,
        url: str,
        body: bytes,
        key: str | None,
        context: CallContext | None,
    ) -> None:
        self.meter = meter
        self.provider = provider
        self.typed = context is not None
        self.context = CallContext() if context is None else context
        parsed = self.context.body
        if parsed is None:
            try:
                parsed = read_object(body)
            except ValueError as error:
                raise ConfigError(f"the request body is no JSON object: {error}") from error
        self.id = uuid.uuid4().hex
        self.model = as_str(parsed.get("model")) or ""
        self.stream = parsed.get("stream") is True
        self.host = provider.price_host or urlsplit(url).hostname or provider.name
        self.pinned = provider.pinned(parsed)
        self.summary = _summary(url, parsed, len(body))
        self.check = self.context.check or meter.prefixes.check(prefix_of(parsed))
        self.rows = meter.prices.worst(self.host, self.model, pinned=self.pinned)
        self.max_output = self._cap(parsed)
        known, rest = self.check.known_prompt
        self.prompt_bound = (known + rest if known else len(body)) + TEMPLATE_TOKENS
        self.worst = self._worst()
        self.currency = self.rows[0].currency if self.rows else provider.currency
        self.ttl_s = _ttl(parsed, provider)
        self.gate: HostGate = meter.gate(self.host, fingerprint(key))
        self.last_reply: tuple[int, httpx.Headers, bytes] | None = None
        """The last reply that was no success, for a client that judges for itself."""
        self._warn(parsed)
        self._span: Span | None = start_span(
            f"chat {self.model}",
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": provider.name,
                "gen_ai.request.model": self.model,
                "gen_ai.request.max_tokens": self.max_output,
                "server.address": self.host,
            },
        )

    def start(self) -> Try:
        """Reserve the worst case and begin an attempt, at a place that the gate gave.

        ``BudgetExceededError`` where the budget forbids it; the place is then given back.
        """
        try:
            return self._start()
        except BaseException:
            self.gate.leave(time.monotonic_ns())
            raise

    def _start(self) -> Try:
        budget = self.meter.budget
        if budget is not None and budget.max_cost is not None and self.worst is None:
            raise ConfigError(
                f"no price is known for {self.model} at {self.host}, so a money budget cannot be kept;"
                " give the meter a PriceTable with a row for it, or use a token budget"
            )
        attempt = Attempt(
            call_id=self.id,
            number=len(self.context.attempts) + 1,
            started_at=self.meter.now().isoformat(timespec="milliseconds"),
            ended_at=None,
            state="reserved",
            provider=self.provider.name,
            host=self.host,
            model=self.model,
            cost=Cost(currency=self.currency),
            held=self.worst,
            scope=self.meter.scope,
        )
        tokens = self.prompt_bound + self.max_output
        return Try(self, self.meter.ledger.reserve(attempt, tokens=tokens, budget=budget))

    def broken(self, attempt: Try, error: Exception) -> Exception:
        """Settle a stream that broke off under its reader, and return what the reader gets."""
        known = attempt.lost(error)
        self.close(known)
        return error if not self.typed and isinstance(error, httpx.HTTPError) else known

    def close(self, error: K3EvalError | None) -> None:
        """End the call's span."""
        span, self._span = self._span, None
        if span is None:
            return
        if self.context.attempts:
            last = self.context.attempts[-1]
            span.set_attribute("k3eval.attempts", len(self.context.attempts))
            if last.usage is not None:
                span.set_attribute("gen_ai.usage.input_tokens", last.usage.prompt)
                span.set_attribute("gen_ai.usage.output_tokens", last.usage.output)
                if last.usage.cache_read is not None:
                    span.set_attribute("gen_ai.usage.cache_read.input_tokens", last.usage.cache_read)
            if last.finish_reason is not None:
                span.set_attribute("gen_ai.response.finish_reasons", last.finish_reason)
            if last.request_id is not None:
                span.set_attribute("gen_ai.response.id", last.request_id)
            if last.cost.best is not None:
                span.set_attribute("k3eval.cost", f"{plain(last.cost.best)} {last.cost.currency}")
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
        span.end()

    def _cap(self, body: Mapping[str, JsonValue]) -> int:
        cap = as_int(body.get("max_completion_tokens")) or as_int(body.get("max_tokens"))
        if cap is not None and cap > 0:
            return min(cap, MAX_TOKENS)
        return max((row.max_output or row.context or 0 for row in self.rows), default=0) or UNKNOWN_OUTPUT

    def _worst(self) -> Decimal | None:
        if self.rows:
            costs = [row.worst_case(self.prompt_bound, self.max_output) for row in self.rows]
            return max((cost for cost in costs if cost is not None), default=None)
        return Decimal(0) if self.provider.self_hosted else None

    def _warn(self, body: Mapping[str, JsonValue]) -> None:
        once = self.meter.notices.once
        if self.provider.privacy is not None:
            once("privacy", self.host, self.provider.privacy)
        self.meter.check_age(self.rows)
        if is_k3_family(self.model) and self.max_output < SMALL_CAP and _effort(body) in (None, "max"):
            once(
                "small_cap",
                self.host,
                f"max_output={self.max_output} counts reasoning too: at the highest effort the answer may be"
                f" empty; allow {SMALL_CAP} or more, or lower the effort",
            )


class Try:
    """One attempt. It is settled once, by whatever comes first, and then gives its place back."""

    def __init__(self, call: Call, reservation: Reservation) -> None:
        self.call = call
        self.observer: Observer | None = None
        if call.stream:
            self.observer = StreamDecoder() if call.typed else StreamScanner()
            call.context.observer = self.observer
        self._reservation = reservation
        self._open = True
        self.sent_ns = time.monotonic_ns()
        self.headers: httpx.Headers = httpx.Headers()
        self.status: int | None = None
        limits = call.context.timeouts
        first_limit_s = 86_400.0 if limits is None else min(limits.first_token, limits.total)
        self._next_check_ns = self.sent_ns + int(first_limit_s * _NS)
        self._asked_ns = self.sent_ns
        self._arrived_ns = 0

    def began(self, status: int, headers: httpx.Headers) -> None:
        """Take the reply's first line and headers."""
        self.status = status
        self.headers = headers

    @property
    def begun(self) -> bool:
        """Whether an event of the stream has arrived."""
        return self.observer is not None and self.observer.started

    def timed(self, data: bytes) -> bytes:
        """Pass bytes on. ``TransportError`` when the time for the whole reply has passed."""
        limits = self.call.context.timeouts
        if limits is not None and (time.monotonic_ns() - self.sent_ns) / _NS > limits.total:
            raise TransportError(f"no complete reply within {limits.total:g} s", request=self.call.summary)
        return data

    def asked(self) -> None:
        """Note that the reader asks for the next bytes now."""
        self._asked_ns = time.monotonic_ns()

    def feed(self, data: bytes) -> None:
        """Take bytes of a stream. ``TransportError`` when a time limit has passed.

        Bytes that were there when they were asked for had come before: they keep the stamp of those before
        them. So a reader that was slow, or stopped for a while, sees one burst and not many arrivals.
        """
        now = time.monotonic_ns()
        observer = self.observer
        if observer is None:
            return
        if now - self._asked_ns > _BUFFERED_NS or not self._arrived_ns:
            self._arrived_ns = now
        try:
            observer.feed(data, self._arrived_ns)
        except ProtocolError as error:
            if self.call.typed:
                self._settle(now, observer.reply(self.headers), "broken stream")
                raise
            self.observer = None  # the foreign client judges for itself; the worst case stands
            self._settle(now, None, error.message)
            return
        if now > self._next_check_ns:
            self._check_time(now, observer)

    def _check_time(self, now: int, observer: Observer) -> None:
        limits = self.call.context.timeouts
        if limits is None or observer.complete:
            return
        waited = (now - self.sent_ns) / _NS
        if observer.first_token_ns is None and waited > limits.first_token:
            raise TransportError(f"no token within {limits.first_token:g} s", request=self.call.summary)
        if waited > limits.total:
            raise TransportError(f"no complete reply within {limits.total:g} s", request=self.call.summary)

    def whole(self, body: bytes) -> None:
        """Settle with a reply that came in one piece. Raises the error that it is or holds."""
        status = self.status or 0
        if status < 300:
            try:
                self._answered(body)
            except K3EvalError:
                self.call.last_reply = (status, self.headers, body)
                raise
        else:
            self.call.last_reply = (status, self.headers, body)
            raise self._refused(status, body)

    def first_error(self, held: bytes) -> None:
        """Settle and raise the error of a stream that begins with one."""
        if self.observer is not None and self.observer.error is not None:
            self.call.last_reply = (self.status or 200, self.headers, held)
            raise self._failed(self.observer.reply(self.headers), time.monotonic_ns())

    def ended(self) -> None:
        """Settle a stream whose bytes have ended. Raises what is wrong with it, to a typed client."""
        now = time.monotonic_ns()
        if self.observer is None or not self._open:
            return
        try:
            self.observer.finish(now)
            self._finish(self.observer.reply(self.headers), now)
        except K3EvalError as error:
            self._settle(now, None, error.message)
            self.call.close(error)
            if self.call.typed:
                raise

    def left(self) -> None:
        """Settle a stream that its reader closed: complete if all that matters had arrived, else unknown."""
        if not self._open:
            return
        now = time.monotonic_ns()
        if self.observer is not None and self.observer.complete:
            self._finish(self.observer.reply(self.headers), now)
        else:
            self._settle(now, None, "closed by the reader")
            self.call.close(None)

    def _answered(self, body: bytes) -> None:
        now = time.monotonic_ns()
        try:
            reply = read_reply(read_object(body), self.headers)
        except (ValueError, ProtocolError) as error:
            self._settle(now, None, "no chat completion")
            raise ProtocolError(
                f"{self.call.provider.name} answered 200 without a chat completion: {error}",
                request=self.call.summary,
            ) from error
        self._finish(reply, now)

    def _refused(self, status: int, body: bytes) -> K3EvalError:
        now = time.monotonic_ns()
        error = self.call.provider.error(status, self.headers, body, request=self.call.summary)
        self._tell_gate(error, now)
        self._settle(
            now, None, _word(error, status), free=status not in TIMED_OUT, request_id=error.request_id
        )
        return error

    def lost(self, error: Exception, *, sent: bool = True) -> TransportError:
        """Settle with no or half a reply and return the error. Not sent means that it cost nothing."""
        now = time.monotonic_ns()
        known = error.message if isinstance(error, K3EvalError) else f"{type(error).__name__}: {error}"
        if not self._open:
            return error if isinstance(error, TransportError) else TransportError(known)
        observer = self.observer
        self._settle(now, None, known.partition(":")[0], free=not sent)
        place = f"{self.call.provider.name} ({self.call.host})"
        if observer is not None and observer.started:
            reply = observer.reply(self.headers)
            self.call.context.reply = reply
            return StreamInterruptedError(
                f"the stream from {place} broke off: {known}",
                partial=reply.message,
                request_id=self.call.provider.request_id(self.headers, reply.id),
                request=self.call.summary,
            )
        return TransportError(f"no reply from {place}: {known}", request=self.call.summary)

    def _finish(self, reply: Reply, now: int) -> None:
        self.call.context.reply = reply
        self.call.context.timing = Timing(
            self.sent_ns,
            reply.first_token_ns,
            reply.last_token_ns,
            now,
            reply.token_events,
            reply.first_event_chars,
            reply.total_chars,
            reply.arrivals,
            reply.largest_burst,
        )
        if reply.error is not None or reply.raw_finish_reason == "error":
            raise self._failed(reply, now)
        self.call.gate.accepted(now)
        if not reply.complete:
            self._settle(now, reply, "incomplete")
            where = "the stream ended" if self.call.stream else "the reply came"
            raise StreamInterruptedError(
                f"{where} without {'usage or [DONE]' if reply.raw_finish_reason else 'a finish reason'}",
                partial=reply.message,
                request_id=self.call.provider.request_id(self.headers, reply.id),
                request=self.call.summary,
            )
        self._settle(now, reply, None)
        self.call.close(None)

    def _failed(self, reply: Reply, now: int) -> K3EvalError:
        """Settle with an error inside an HTTP 200. Without generated text it is not charged."""
        error = reply.error or {"message": "finish reason error"}
        status = as_int(error.get("code")) or as_int(error.get("http_status")) or 500
        found = self.call.provider.error_of(
            status,
            error,
            self.headers,
            request=self.call.summary,
            request_id=self.call.provider.request_id(self.headers, reply.id),
        )
        self.call.context.reply = reply
        self._tell_gate(found, now)
        nothing = reply.report is None and not reply.total_chars and not reply.token_events
        self._settle(now, reply, _word(found, status), free=nothing)
        return found

    def _tell_gate(self, error: K3EvalError, now: int) -> None:
        gate = self.call.gate
        if isinstance(error, QuotaExceededError):
            gate.close(error)
        elif isinstance(error, RateLimitError | OverloadedError):
            at_once, per_minute = self.call.provider.limits_in(error)
            gate.refused(error, at_once, per_minute, now)
            if at_once == 1:
                self.call.meter.notices.once(
                    "one_at_a_time",
                    self.call.host,
                    f"this account at {self.call.host} runs one request at a time: more workers only wait;"
                    " use --concurrency 1 or a higher tier",
                )

    def _settle(
        self,
        now: int,
        reply: Reply | None,
        error: str | None,
        *,
        free: bool = False,
        request_id: str | None = None,
    ) -> None:
        if not self._open:
            return
        self._open = False
        self.call.gate.leave(now)
        call, reserved = self.call, self._reservation.attempt
        report = None if reply is None else reply.report
        notes: list[str] = []
        cost, miss_reason = Cost(currency=call.currency), None
        if reply is not None and report is not None:
            served = reply.served_by
            row = call.meter.prices.find(call.host, call.model, served_by=served, pinned=call.pinned)
            seen = max(call.check.seen_tokens, report.usage.cache_read or 0)
            cost = Cost(
                billed=report.billed,
                computed=None if row is None else row.price(report),
                ideal_cache=None if row is None else row.price(report, ideal_read=seen),
                currency=call.currency,
                price_row=None if row is None else row.label,
            )
            miss_reason = call.check.miss_reason(report.usage, served, now, call.ttl_s)
            message = reply.message if call.typed or not call.stream else None
            call.meter.prefixes.answered(call.check, report.usage, served, now, message)
            notes = self._notes(row, reply, cost)
        state: AttemptState
        held: Decimal | None
        used: int | None
        if free:
            state, held, used = "settled", Decimal(0), 0
        elif report is not None:
            best = cost.best
            state, used = "settled", report.usage.total
            held = best if best is not None else Decimal(0) if call.provider.self_hosted else call.worst
        else:
            state, held, used = "unknown", call.worst, None
        first = None if reply is None else reply.first_token_ns
        attempt = replace(
            reserved,
            ended_at=call.meter.now().isoformat(timespec="milliseconds"),
            state=state,
            status=self.status,
            error=error,
            request_id=request_id
            or call.provider.request_id(self.headers, None if reply is None else reply.id),
            finish_reason=None if reply is None else reply.raw_finish_reason,
            served_by=None if reply is None else reply.served_by,
            usage=None if report is None else report.usage,
            cost=cost,
            held=held,
            notes=tuple(notes),
            cache_miss_reason=miss_reason,
            seconds=(now - self.sent_ns) / _NS,
            ttft_seconds=None if first is None else (first - self.sent_ns) / _NS,
        )
        call.context.attempts.append(attempt)
        call.meter.ledger.settle(self._reservation, attempt, tokens=used)
        call.meter.settled(attempt)

    def _notes(self, row: PriceRow | None, reply: Reply, cost: Cost) -> list[str]:
        notes: list[str] = []
        report = reply.report
        if report is None:
            return notes
        if report.inconsistent:
            notes.append("usage_inconsistent")
        if row is not None and write_tier_unknown(row, report):
            notes.append("write_tier_unknown")
        if self.headers.get("x-openrouter-cache-status", "").upper() == "HIT":
            notes.append("reply_cached")
        if cost.billed is not None and cost.computed is not None:
            gap = abs(cost.billed - cost.computed)
            if gap > GAP * max(cost.billed, cost.computed):
                notes.append("billed_differs")
                self.call.meter.notices.once(
                    "billed_differs",
                    cost.price_row or self.call.host,
                    f"{self.call.host} billed {plain(cost.billed)},"
                    f" the price row gives {plain(cost.computed)}",
                )
        return notes


def _word(error: K3EvalError, status: int) -> str:
    return (error.type if isinstance(error, ApiError) else None) or f"{type(error).__name__} {status}"


def _summary(url: str, body: Mapping[str, JsonValue], size: int) -> str:
    """Describe a request without its content."""
    parts = urlsplit(url)
    messages = body.get("messages")
    count = len(messages) if isinstance(messages, list) else 0
    cap = as_int(body.get("max_completion_tokens")) or as_int(body.get("max_tokens"))
    return (
        f"POST {parts.hostname}{parts.path} model={body.get('model')} messages={count} bytes={size}"
        f" max_output={cap} stream={'yes' if body.get('stream') else 'no'}"
    )


def _effort(body: Mapping[str, JsonValue]) -> str | None:
    nested = as_object(body.get("reasoning")) or as_object(body.get("chat_template_kwargs")) or {}
    thinking = as_object(body.get("thinking")) or {}
    if (
        thinking.get("type") == "disabled"
        or nested.get("enabled") is False
        or nested.get("thinking") is False
    ):
        return "off"
    return (
        as_str(body.get("reasoning_effort"))
        or as_str(nested.get("effort"))
        or as_str(nested.get("thinking_effort"))
    )


def _ttl(body: Mapping[str, JsonValue], provider: Provider) -> float | None:
    if provider.self_hosted:
        return None
    chosen = as_str((as_object(body.get("prompt_cache_options")) or {}).get("ttl"))
    return TTL_S.get(chosen or "5m")

"""What the reader had to wait for tells when text arrived: a late reader must not look like a fast host."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

from sdk_server import HttpServer

from k3eval import K3, Message, Meter, TextDelta, Timing
from k3eval.testing import Reply

EVENTS = 40
HEADERS = {"content-type": "text/event-stream"}


class Packets(tuple[bytes, ...]):
    """Packets that are sent as ``pace`` lets them through; then ``sent`` is set."""

    pace: Callable[[], object]
    sent: threading.Event

    def __iter__(self) -> Iterator[bytes]:
        for packet in super().__iter__():
            self.pace()
            yield packet
        self.sent.set()


def _packet(**chunk: object) -> bytes:
    return b"data: %s\n\n" % json.dumps({"id": "1", "model": "kimi-k3", **chunk}).encode()


def _packets(pace: Callable[[], object]) -> Packets:
    words = [_packet(choices=[{"index": 0, "delta": {"content": f"word{n} "}}]) for n in range(EVENTS)]
    usage = {"prompt_tokens": 5, "completion_tokens": EVENTS, "total_tokens": 5 + EVENTS}
    end = _packet(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}], usage=usage)
    packets = Packets([*words, end, b"data: [DONE]\n\n"])
    packets.pace, packets.sent = pace, threading.Event()
    return packets


def _read(server: HttpServer, meter: Meter, packets: Packets, seen: Callable[[int], object]) -> Timing:
    server.play(Reply(packets, headers=HEADERS))
    with (
        K3("moonshot", "kimi-k3", base_url=server.url, api_key="sk-invented-0123456789", meter=meter) as k3,
        k3.stream([Message.user("go")]) as stream,
    ):
        count = 0
        for event in stream:
            if isinstance(event, TextDelta):
                count += 1
                seen(count)
        timing = stream.completion().timing
    assert (count, timing.token_events) == (EVENTS, EVENTS)
    return timing


def test_a_reader_that_waits_sees_every_arrival(server: HttpServer, meter: Meter) -> None:
    turn = threading.Semaphore(2)

    def pace() -> None:
        turn.acquire(timeout=20)
        time.sleep(0.002)  # the reader asks first

    timing = _read(server, meter, _packets(pace), lambda _: turn.release())
    assert timing.arrivals >= EVENTS / 2
    assert timing.largest_burst <= EVENTS / 4


def test_a_late_reader_sees_one_burst(server: HttpServer, meter: Meter) -> None:
    packets = _packets(lambda: None)
    timing = _read(server, meter, packets, lambda count: packets.sent.wait(20) if count == 1 else None)
    assert timing.largest_burst > EVENTS / 4

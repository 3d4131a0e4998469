"""The server beside the engine called in process; a long prompt over HTTP; many sessions with faults.

    python benchmarks/server.py [--out results] [--models a,b] [--repeats 15] [--prompt 131000]
    python benchmarks/server.py --load SECONDS [--sessions 64] [--requests 128] [--seed 1]

The engine has one core, everything else (the server's event loop, the client) another: trust the ratios only
where two cores are free, and on a shared machine the best of each more than the medians. The engine in
process is measured twice, beside an idle and beside a busy core, because cores share more than they seem to.
Contestants take turns. Random weights, seed 0. Writes ``server-bench.md`` and ``.json``; ``--load`` writes
``server-load.md`` and ``.json`` and ends with exit code 1 when anything was lost or leaked.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from figures import Measured, machine, say, write
from in_process import InProcess
from server_load import load
from server_process import Json, ServerProcess, read_reply

from k3eval_local.model.accounting import sequence_bytes
from k3eval_local.model.config import K3Config

STREAMS = (8, 16, 64)
OUTPUT = 512
"""Tokens of each stream."""
_READ_S = 0.002
"""Between two looks of the client."""
_SPIN = "x = {i: str(i) for i in range(20000)}\nwhile True:\n    for k in x: y = x[k] + 'a'"
WARM_UP = 6000
"""Bytes of the prompt after which the server's allocator has settled."""


def body(number: int) -> Json:
    """One of the streams that run together: greedy, of a forced length."""
    return {
        "model": "kimi-k3",
        "messages": [{"role": "user", "content": f"Stream {number}: say something, and go on."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": OUTPUT,
    }


def over_http(server: ServerProcess, bodies: Sequence[Json]) -> float:
    """Seconds from the first request's first byte to the last reply's end; all run at once."""
    selector = selectors.DefaultSelector()
    running: list[tuple[socket.socket, list[bytes]]] = []
    start = time.perf_counter()
    for each in bodies:
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(server.request(each))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, len(running))
        running.append((connection, []))
    while selector.get_map():
        time.sleep(_READ_S)  # a client that is woken by every token would take the server's time
        for key, _ in selector.select():
            connection, parts = running[key.data]
            data = connection.recv(1 << 18)
            if data:
                parts.append(data)
            else:
                selector.unregister(connection)
                connection.close()
    seconds = time.perf_counter() - start
    for _, parts in running:
        frames = read_reply(b"".join(parts)).body.split(b"\n\n")
        usage = json.loads(frames[-3].removeprefix(b"data: "))["usage"]
        if usage["completion_tokens"] != OUTPUT:
            raise SystemExit(f"a stream has {usage['completion_tokens']} tokens, not {OUTPUT}")
    return seconds


def in_process(inside: InProcess, bodies: Sequence[Json]) -> float:
    """Seconds from the first submit to the last result; rendering is left out."""
    requests = [request for each in bodies for request in inside.requests(each)]
    start = time.perf_counter()
    results = inside.run(requests)
    seconds = time.perf_counter() - start
    if any(len(result.ids) != OUTPUT for result in results):
        raise SystemExit("a request in process has another length")
    return seconds


def apart(server: ServerProcess) -> None:
    """Engines on the last core, everything else on the first."""
    cores = os.sched_getaffinity(0)
    first, last = min(cores), max(cores)
    for engine in (True, False):
        for number in server.thread_ids(engine=engine):
            os.sched_setaffinity(number, {last if engine else first})
    for thread in threading.enumerate():
        os.sched_setaffinity(thread.native_id or 0, {last if thread.name == "k3-engine" else first})


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that computes for itself, as the server's event loop and the client do beside the engine."""
    process = subprocess.Popen([sys.executable, "-c", _SPIN])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def throughput(name: str, repeats: int) -> list[Measured]:
    """Output tokens a second of streams that start together, over HTTP and in process, turn by turn."""
    rows = []
    inside = InProcess(name)
    with inside.engine, ServerProcess(name) as server:
        apart(server)
        for streams in STREAMS:
            bodies = [body(number) for number in range(streams)]
            taken: list[tuple[float, ...]] = []
            for turn in range(repeats + 1):
                cpu = time.process_time(), server.cpu_seconds()
                idle = in_process(inside, bodies)
                own = time.process_time() - cpu[0]
                served = over_http(server, bodies)
                other = server.cpu_seconds() - cpu[1]
                with busy_core():
                    busy = in_process(inside, bodies)
                if turn:  # the first one warms up
                    taken.append((idle, busy, served, own, other))
            tokens = streams * OUTPUT
            idle, busy, served, own, other = (statistics.median(c) for c in zip(*taken, strict=True))
            section = f"config {name}, {streams} streams of {OUTPUT} tokens"
            rows += [
                Measured(section, "in process, median", tokens / idle, "tok/s"),
                Measured(section, "in process beside a busy core, median", tokens / busy, "tok/s"),
                Measured(section, "over HTTP, median", tokens / served, "tok/s"),
            ]
            for column, case in enumerate(("in process", "in process beside a busy core")):
                pairs = statistics.median(each[column] / each[2] for each in taken)
                best = min(each[column] for each in taken) / min(each[2] for each in taken)
                rows += [
                    Measured(section, f"over HTTP / {case}, median of the pairs", pairs, "x"),
                    Measured(section, f"over HTTP / {case}, best of each", best, "x"),
                ]
                say(f"{section}: over HTTP / {case} {pairs:.3f} (best {best:.3f})")
            rows += [
                Measured(section, "CPU in process, median", own / tokens * 1e6, "us/token"),
                Measured(
                    section, "CPU over HTTP, server and engine, median", other / tokens * 1e6, "us/token"
                ),
            ]
    return rows


def long_prompt(prompt_tokens: int) -> list[Measured]:
    """One long prompt over HTTP: prefill and decode as the client sees them, and the memory of the server."""
    output, section = 33, f"config a, a prompt of {prompt_tokens} tokens over HTTP"
    config = K3Config.scaled("a")
    with ServerProcess("a") as server:
        _ask(server, WARM_UP, output)
        before, saved = server.resident_bytes(), server.metrics()["checkpoints"]
        cpu = server.cpu_seconds()
        reply = _ask(server, prompt_tokens, output)
        cpu = server.cpu_seconds() - cpu
        used, saved = server.resident_bytes() - before, server.metrics()["checkpoints"] - saved
    sequence = sequence_bytes(config, reply.prompt + output, cache="fp32")
    states = saved * (sequence.kda_state + sequence.conv_state)
    predicted = sequence.total + states
    gaps = [after - earlier for earlier, after in zip(reply.token_s, reply.token_s[1:], strict=False)]
    return [
        Measured(section, "prompt, counted by the server", reply.prompt, "tokens"),
        Measured(section, "first token, wall clock", reply.first_s, "s"),
        Measured(section, "decode after it, wall clock, median", statistics.median(gaps) * 1e3, "ms/token"),
        Measured(section, "CPU of the server, prefill and decode", cpu, "s"),
        Measured(section, "memory, predicted by the accounting: the sequence", sequence.total / 1e6, "MB"),
        Measured(section, f"memory, predicted: states of {saved:.0f} saved prefixes", states / 1e6, "MB"),
        Measured(section, "memory, resident, measured", used / 1e6, "MB"),
        Measured(section, "memory, measured / predicted", used / predicted, "x"),
    ]


class _LongReply:
    def __init__(self, prompt: int, first_s: float, token_s: list[float]) -> None:
        self.prompt, self.first_s, self.token_s = prompt, first_s, token_s


def _ask(server: ServerProcess, prompt_bytes: int, output: int) -> _LongReply:
    asked = body(0) | {"max_tokens": output, "k3eval_timings": True}
    first = prompt_bytes * 10  # no prompt begins like another
    text = "".join(f"{number:07d} " for number in range(first, first + prompt_bytes // 8))
    asked["messages"] = [{"role": "user", "content": text}]
    start = time.perf_counter()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(server.request(asked))
        data, first_s = bytearray(), 0.0
        while part := connection.recv(65536):
            data += part
            if not first_s and data.count(b"data: ") > 1:  # after the frame that only names the role
                first_s = time.perf_counter() - start
    last = json.loads(read_reply(bytes(data)).body.split(b"\n\n")[-3].removeprefix(b"data: "))
    token_s = [at / 1e9 for at in last["k3eval_timings"]["token_ns"]]
    return _LongReply(last["usage"]["prompt_tokens"], first_s, token_s)


def main() -> int:
    """Runs the comparison and the long prompt, or the load. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--models", default="a,b", help="configurations to compare on")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--prompt", type=int, default=131_000, help="bytes of the long prompt; 0 leaves it out"
    )
    parser.add_argument("--load", type=float, metavar="SECONDS", help="only the sessions with faults")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128, help="different ones that the sessions make")
    parser.add_argument("--seed", type=int, default=1, help="of the faults and of what the sessions ask")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine("benchmarks/server.py", 1)
    if arguments.load:
        rows, failures = load(arguments.load, arguments.sessions, arguments.requests, arguments.seed)
        notes = [
            "Config A (1.2M parameters) with random weights, vLLM dialect, every fault on purpose.",
            "The sessions and the server shared the cores: gaps are those of the two together.",
        ]
        write(rows, facts, arguments.out, "server-load", "Server under load", notes)
        for failure in failures:
            say(failure)
        return 1 if failures else 0
    rows = [row for name in arguments.models.split(",") for row in throughput(name, arguments.repeats)]
    if arguments.prompt:
        say(f"prompt of {arguments.prompt} bytes")
        rows += long_prompt(arguments.prompt)
    notes = ["Random weights, seed 0. The client is a process of its own; contestants took turns."]
    write(rows, facts, arguments.out, "server-bench", "Server benchmark", notes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Client CPU of the SDK, beside the ``openai`` package on the same bytes, and start-up times.

python benchmarks/sdk_stream.py [--out results] [--repeats 7] [--chunks 3000]

Every figure is a ratio inside one interleaved run: the contestants take turns, user + system CPU of the
client process is counted (``getrusage``), the median of the repeats is reported. The server is another
process, which sends pre-rendered bytes. Writes ``sdk-bench.md`` and ``sdk-bench.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

MODEL = "kimi-k3"
PROMPT = "Say something long."


@dataclass(frozen=True)
class Row:
    """One contestant of one comparison."""

    comparison: str
    contestant: str
    median: float
    low: float
    high: float
    unit: str


def render_stream(chunks: int) -> list[bytes]:
    """Return the HTTP chunks of one streamed reply: reasoning, text and one tool call, one event a packet."""

    def event(data: object) -> bytes:
        body = b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
        return b"%x\r\n%s\r\n" % (len(body), body)

    def chunk(delta: dict[str, object], finish: str | None = None) -> dict[str, object]:
        return {
            "id": "chatcmpl-0a1b2c3d4e5f60718293a4b5",
            "object": "chat.completion.chunk",
            "created": 1764547200,
            "model": MODEL,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }

    third = chunks // 3
    packets = [event(chunk({"role": "assistant", "content": ""}))]
    packets += [event(chunk({"reasoning_content": f" thought{i}"})) for i in range(third)]
    packets += [event(chunk({"content": f" word{i}"})) for i in range(third)]
    head = {"index": 0, "id": "edit_0", "type": "function", "function": {"name": "edit", "arguments": ""}}
    packets.append(event(chunk({"tool_calls": [head]})))
    pieces = ['{"text":"', *(f"part{i} " for i in range(third)), '"}']
    packets += [
        event(chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})) for piece in pieces
    ]
    packets.append(event(chunk({}, "tool_calls")))
    usage = {"prompt_tokens": 100, "completion_tokens": chunks, "total_tokens": 100 + chunks}
    packets.append(event({**chunk({}), "choices": [], "usage": usage}))
    packets.append(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    return packets


def serve(chunks: int, ready: Connection) -> None:
    """Answer every request with the same stream, a group of packets a write; keeps connections open."""
    packets = render_stream(chunks)
    group = 8
    writes = [b"".join(packets[i : i + group]) for i in range(0, len(packets), group)]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    whole = json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1764547200,
            "model": MODEL,
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
            ],
            "usage": {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105},
        }
    ).encode()
    plain = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(whole)
    ) + whole
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ready.send(listener.getsockname()[1])
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if os.fork():
                connection.close()
                continue
            listener.close()
            while request := _read_request(connection):
                if b'"stream":true' in request.replace(b": ", b":"):
                    connection.sendall(head)
                    for part in writes:
                        connection.sendall(part)
                else:
                    connection.sendall(plain)
            os._exit(0)


def _read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        got = connection.recv(65536)
        if not got:
            return b""
        data += got
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(65536)
    return body


def cpu_s() -> float:
    """User + system CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def contest(
    name: str, contestants: dict[str, Callable[[], int]], repeats: int, per: float, unit: str
) -> list[Row]:
    """Let the contestants take turns; return the median CPU of each, divided by ``per``."""
    samples: dict[str, list[float]] = {key: [] for key in contestants}
    expected = {run() for run in contestants.values()}  # warm-up, and a check that all saw the same
    if len(expected) != 1:
        raise SystemExit(f"{name}: the contestants saw different replies: {expected}")
    for _ in range(repeats):
        for key, run in contestants.items():
            before = cpu_s()
            run()
            samples[key].append((cpu_s() - before) / per * 1e6)
    return [
        Row(name, key, statistics.median(values), min(values), max(values), unit)
        for key, values in samples.items()
    ]


def stream_contest(url: str, chunks: int, repeats: int) -> list[Row]:
    """Typed events and meter of ours, ``openai`` bare, ``openai`` on our meter."""
    import openai

    from k3eval import K3, Message, Meter, openai_client

    ours = K3("compatible", MODEL, base_url=url, meter=Meter())
    bare = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    metered = openai_client("compatible", base_url=url, meter=Meter())

    def run_ours() -> int:
        with ours.stream([Message.user(PROMPT)]) as stream:
            for _ in stream:
                pass
            done = stream.completion()
        return len(done.message.tool_calls[0].arguments) + len(done.text)

    def run_openai(client: openai.OpenAI) -> int:
        seen = 0
        for chunk in client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": PROMPT}],
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices:
                delta = chunk.choices[0].delta
                seen += len(delta.content or "")
                for call in delta.tool_calls or ():
                    if call.function is not None:
                        seen += len(call.function.arguments or "")
        return seen

    return contest(
        "streamed chunk",
        {
            "k3eval, typed events + meter": run_ours,
            "openai": lambda: run_openai(bare),
            "openai on the k3eval meter": lambda: run_openai(metered),
        },
        repeats,
        chunks,
        "us CPU",
    )


def request_contest(url: str, repeats: int) -> list[Row]:
    """One request that is not streamed."""
    import openai

    from k3eval import K3, Message, Meter

    ours = K3("compatible", MODEL, base_url=url, meter=Meter())
    bare = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    count = 50

    def run_ours() -> int:
        return sum(len(ours.chat([Message.user(PROMPT)]).text) for _ in range(count))

    def run_openai() -> int:
        return sum(
            len(
                bare.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": PROMPT}])
                .choices[0]
                .message.content
                or ""
            )
            for _ in range(count)
        )

    return contest("request", {"k3eval, meter on": run_ours, "openai": run_openai}, repeats, count, "us CPU")


def start_contest(repeats: int, inspect: str | None) -> list[Row]:
    """CPU of whole processes: bare interpreter, imports, command lines."""
    scripts = Path(sys.executable).parent
    commands: dict[str, Sequence[str]] = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import k3eval": [sys.executable, "-c", "import k3eval"],
        "from k3eval import K3": [sys.executable, "-c", "from k3eval import K3"],
        "import openai": [sys.executable, "-c", "import openai"],
        "k3eval --help": [str(scripts / "k3eval"), "--help"],
    }
    if inspect is not None:
        commands["inspect --help"] = [inspect, "--help"]

    def run(command: Sequence[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3

    samples: dict[str, list[float]] = {key: [] for key in commands}
    for command in commands.values():
        run(command)
    for _ in range(repeats):
        for key, command in commands.items():
            samples[key].append(run(command))
    return [
        Row("start", key, statistics.median(values), min(values), max(values), "ms CPU")
        for key, values in samples.items()
    ]


def ratios(rows: Sequence[Row]) -> list[tuple[str, float, str]]:
    """Return (what, ratio, goal) for each goal that the rows can answer."""
    at = {(row.comparison, row.contestant): row.median for row in rows}
    found = [
        (
            "openai / k3eval, CPU per streamed chunk",
            at["streamed chunk", "openai"] / at["streamed chunk", "k3eval, typed events + meter"],
            ">= 8",
        ),
        (
            "openai on the meter / openai bare, CPU per streamed chunk",
            at["streamed chunk", "openai on the k3eval meter"] / at["streamed chunk", "openai"],
            "<= 1.10",
        ),
        (
            "openai / k3eval, CPU per plain request",
            at["request", "openai"] / at["request", "k3eval, meter on"],
            ">= 1",
        ),
        (
            "import k3eval / bare interpreter",
            at["start", "import k3eval"] / at["start", "python -c pass"],
            "<= 4",
        ),
    ]
    if ("start", "inspect --help") in at:
        found.append(
            (
                "k3eval --help / inspect --help",
                at["start", "k3eval --help"] / at["start", "inspect --help"],
                "<= 0.33",
            )
        )
    return found


def machine() -> dict[str, str]:
    """Return what a reader needs to judge the figures."""
    from importlib.metadata import version

    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
        "python": platform.python_version(),
        "openai": version("openai"),
        "httpx": version("httpx"),
        "k3eval": version("k3eval"),
    }


def write(rows: Sequence[Row], out: Path, command: str) -> None:
    """Write the two result files."""
    out.mkdir(parents=True, exist_ok=True)
    facts, date = machine(), datetime.now(UTC).date().isoformat()
    found = ratios(rows)
    data = {
        "command": command,
        "date": date,
        "machine": facts,
        "rows": [asdict(row) for row in rows],
        "ratios": [{"what": what, "ratio": round(ratio, 3), "goal": goal} for what, ratio, goal in found],
    }
    (out / "sdk-bench.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    lines = [
        "# SDK: client CPU and start-up",
        "",
        f"`{command}` on {date}; " + ", ".join(f"{key} {value}" for key, value in facts.items()) + ".",
        "User + system CPU of the client; medians of interleaved repeats; range in brackets.",
        "",
        "| ratio | measured | goal |",
        "|---|---|---|",
        *(f"| {what} | {ratio:.2f} | {goal} |" for what, ratio, goal in found),
        "",
        "| comparison | contestant | median | range | unit |",
        "|---|---|---|---|---|",
        *(
            f"| {row.comparison} | {row.contestant} | {row.median:.2f}"
            f" | {row.low:.2f} - {row.high:.2f} | {row.unit} |"
            for row in rows
        ),
        "",
    ]
    (out / "sdk-bench.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))  # noqa: T201 - a script's own output


def main() -> None:
    """Run all comparisons and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--chunks", type=int, default=3000)
    parser.add_argument("--inspect", default=shutil.which("inspect"), help="path of inspect-ai's command")
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(
        target=serve, args=(options.chunks, theirs), daemon=True
    )
    server.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}/v1"
        rows = stream_contest(url, options.chunks, options.repeats)
        rows += request_contest(url, options.repeats)
    finally:
        server.terminate()
        server.join()
    rows += start_contest(options.repeats, options.inspect)
    shown = f"python benchmarks/sdk_stream.py --repeats {options.repeats} --chunks {options.chunks}"
    write(rows, options.out, shown)


if __name__ == "__main__":
    main()

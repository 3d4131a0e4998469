"""A server in a process of its own, what the kernel and the server say about it, and what a stream said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

Json = dict[str, object]
_TICKS = os.sysconf("SC_CLK_TCK")


class ServerProcess:
    """``python -m k3eval_local.server`` on a free port, for the length of a ``with`` block."""

    def __init__(self, model: str, *options: str, threads: int = 1) -> None:
        self._command = [sys.executable, "-m", "k3eval_local.server", "--model", model]
        self._command += ["--threads", str(threads), "--parent-pid", str(os.getpid()), *options]
        self.port = 0
        self.pid = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the server did not start: exit code {self._process.wait()}")
        self.port = int(json.loads(line)["base_url"].rsplit(":", 1)[1].partition("/")[0])
        self.pid = self._process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.communicate()

    def request(self, body: Json) -> bytes:
        """The bytes of a chat request; the connection ends with the reply."""
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}\r\n"
        return head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + data

    def metrics(self) -> dict[str, float]:
        """The engine's gauges and counters without their prefix, and ``chat_in_flight``."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as reply:
            text = reply.read().decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {
            sample.name.removeprefix("k3eval_engine_").removeprefix("k3eval_"): sample.value
            for sample in samples
            if not sample.labels
        }

    def cpu_seconds(self) -> float:
        """User and system time so far of the server and its engine's process, all threads."""
        each = [(folder / "stat").read_text().rpartition(")")[2].split() for folder in self._processes()]
        return sum(int(fields[11]) + int(fields[12]) for fields in each) / _TICKS

    def resident_bytes(self) -> int:
        """Anonymous memory in use, of both."""
        return 1024 * self._status("RssAnon")

    def threads(self) -> int:
        """Threads that live."""
        return self._status("Threads")

    def open_files(self) -> int:
        """File descriptors, sockets included."""
        return sum(len(list((folder / "fd").iterdir())) for folder in self._processes())

    def thread_ids(self, *, engine: bool) -> list[int]:
        """Threads of the engine's process, or of the server's own."""
        own, *others = self._processes()
        folders = others if engine else [own]
        return [int(path.name) for folder in folders for path in (folder / "task").iterdir()]

    def _processes(self) -> list[Path]:
        own = Path(f"/proc/{self.pid}")
        started = " ".join(path.read_text() for path in own.glob("task/*/children"))
        return [own, *(Path(f"/proc/{pid}") for pid in started.split())]

    def _status(self, name: str) -> int:
        lines = [
            line for folder in self._processes() for line in (folder / "status").read_text().splitlines()
        ]
        return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@dataclass
class Reply:
    """What came back on one connection: status, headers (lower case), body, and whether the body is whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    complete: bool


def read_reply(data: bytes) -> Reply:
    """Everything that a connection gave, from the status line to its end; cut replies are fine."""
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    status = int(first.split()[1]) if first else 0
    if headers.get("transfer-encoding") != "chunked":
        return Reply(status, headers, rest, len(rest) == int(headers.get("content-length", -1)))
    body = bytearray()
    while True:
        size, found, rest = rest.partition(b"\r\n")
        if not found:
            return Reply(status, headers, bytes(body), complete=False)
        length = int(size, 16)
        if length == 0:
            return Reply(status, headers, bytes(body), complete=True)
        body += rest[:length]
        rest = rest[length + 2 :]


@dataclass
class Said:
    """What one choice of a stream said."""

    reasoning: str = ""
    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: dict[int, str] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    """Those with log-probabilities."""
    finish: str | None = None

    @property
    def text(self) -> str:
        """Reasoning and answer, apart from each other."""
        return f"{self.reasoning}\0{self.content}"


@dataclass
class StreamReply:
    """A stream, taken apart: choices by index, the last usage, whether it was closed by ``[DONE]``."""

    choices: dict[int, Said]
    completion_tokens: int | None
    done: bool
    error: bool


def read_stream(body: bytes) -> StreamReply:
    """The events of a body, in the vLLM dialect; a cut last event is left out."""
    said = StreamReply({}, None, done=False, error=False)
    for event in body.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        for line in event.split(b"\n"):
            if line == b"data: [DONE]":
                said.done = True
            elif line.startswith(b"data:"):
                _add_frame(said, json.loads(line[5:]))
    return said


def _add_frame(said: StreamReply, frame: Json) -> None:
    said.error |= "error" in frame
    usage = frame.get("usage")
    if isinstance(usage, dict):
        said.completion_tokens = usage["completion_tokens"]
    for choice in _objects(frame.get("choices")):
        mine = said.choices.setdefault(int(str(choice["index"])), Said())
        delta = choice["delta"]
        assert isinstance(delta, dict)  # noqa: S101 - narrows the type
        mine.reasoning += delta.get("reasoning_content") or ""
        mine.content += delta.get("content") or ""
        for call in _objects(delta.get("tool_calls")):
            function = call["function"]
            assert isinstance(function, dict)  # noqa: S101 - narrows the type
            if "name" in function:
                mine.names.append(function["name"])
            place = int(str(call.get("index", 0)))
            mine.arguments[place] = mine.arguments.get(place, "") + function.get("arguments", "")
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            mine.tokens += [str(item["token"]) for item in _objects(logprobs.get("content"))]
        finish = choice.get("finish_reason")
        mine.finish = str(finish) if finish is not None else mine.finish


def _objects(value: object) -> Sequence[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []

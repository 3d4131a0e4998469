"""Fakes for tests and demos of the harness: a scripted model behind HTTP, and a sandbox without a container.

Neither needs a network, a key or Docker. ``LocalSandbox`` isolates nothing: run only your own commands in it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from select import select
from types import TracebackType
from typing import IO, Final, Self

from k3eval_harness.errors import SandboxError
from k3eval_harness.sandbox.protocol import SandboxSpec
from k3eval_harness.sandbox.shell import PersistentShell

_CHUNK: Final = 8


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the scripted model makes. ``arguments`` may be text that is no JSON."""

    name: str
    arguments: Mapping[str, object] | str = field(default_factory=dict)
    id: str | None = None

    def text(self) -> str:
        """The arguments as they go over the wire."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted reply: text, reasoning, tool calls; or an HTTP error; or a stream that breaks off."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = None
    status: int = 200
    """Anything but 200 gives an error body instead."""
    error: str = "scripted error"
    break_off: bool = False
    """Close the connection in the middle of the stream."""
    wait: threading.Event | None = None
    """Held back until the event is set."""
    usage: Mapping[str, object] | None = None
    """Usage member as it goes over the wire; default: counted roughly, with everything cached that can be."""


class ScriptedServer:
    """A chat-completions server that plays replies in order and keeps every request body.

    A request beyond the script gets ``exhausted``, by default a text without a tool call.
    """

    def __init__(self, replies: Sequence[Reply], exhausted: Reply | None = None) -> None:
        self._replies = list(replies)
        self._exhausted = exhausted or Reply(content="I have nothing more to say.")
        self._lock = threading.Lock()
        self.requests: list[dict[str, object]] = []
        """Parsed bodies, in the order of arrival."""
        self.bodies: list[bytes] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server._handle(self)

            def log_message(self, *arguments: object) -> None:
                """Keep quiet."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    @property
    def base_url(self) -> str:
        """What to give as base URL, ending in ``/v1``."""
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    @property
    def model(self) -> str:
        """What to give as ``--model``."""
        return f"compatible/scripted@{self.base_url}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length", "0")))
        with self._lock:
            number = len(self.requests)
            self.bodies.append(body)
            self.requests.append(json.loads(body))
            reply = self._replies[number] if number < len(self._replies) else self._exhausted
        if reply.wait is not None:
            reply.wait.wait()
        with contextlib.suppress(ConnectionError):
            if reply.status != 200:
                _send_error(handler, reply)
            else:
                _send_stream(handler, reply, len(body), number)


def _send_error(handler: BaseHTTPRequestHandler, reply: Reply) -> None:
    data = json.dumps({"error": {"message": reply.error, "type": "scripted"}}).encode()
    handler.send_response(reply.status)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def _send_stream(handler: BaseHTTPRequestHandler, reply: Reply, prompt_bytes: int, number: int) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("connection", "close")
    handler.end_headers()
    handler.close_connection = True

    def send(delta: Mapping[str, object], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        _write_event(handler, {"choices": [choice]}, number)

    send({"role": "assistant", "content": ""})
    for member, text in (("reasoning_content", reply.reasoning), ("content", reply.content)):
        for start in range(0, len(text), _CHUNK):
            send({member: text[start : start + _CHUNK]})
    if reply.break_off:
        return
    for index, call in enumerate(reply.calls):
        text = call.text()
        function = {"name": call.name, "arguments": ""}
        name = call.id or f"call_{number}_{index}"
        send({"tool_calls": [{"index": index, "id": name, "type": "function", "function": function}]})
        for start in range(0, len(text), _CHUNK):
            piece = {"arguments": text[start : start + _CHUNK]}
            send({"tool_calls": [{"index": index, "function": piece}]})
    send({}, reply.finish_reason or ("tool_calls" if reply.calls else "stop"))
    usage = _usage(reply, prompt_bytes, number) if reply.usage is None else reply.usage
    _write_event(handler, {"choices": [], "usage": usage}, number)
    handler.wfile.write(b"data: [DONE]\n\n")


def _write_event(handler: BaseHTTPRequestHandler, members: Mapping[str, object], number: int) -> None:
    base = {"id": f"scripted-{number}", "object": "chat.completion.chunk", "created": 0, "model": "scripted"}
    handler.wfile.write(b"data: " + json.dumps({**base, **members}).encode() + b"\n\n")
    handler.wfile.flush()


def _usage(reply: Reply, prompt_bytes: int, number: int) -> dict[str, object]:
    """Four bytes a token; from the second call on two thirds of the prompt come from the cache."""
    prompt = prompt_bytes // 4
    texts = [reply.content, *(call.text() for call in reply.calls)]
    output = sum(len(text) for text in texts) // 4 + 1
    reasoning = len(reply.reasoning) // 4
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output + reasoning,
        "total_tokens": prompt + output + reasoning,
        "prompt_tokens_details": {"cached_tokens": prompt * 2 // 3 if number else 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


class ProcessChannel:
    """``Channel`` over a shell that runs as a plain subprocess in a session of its own."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **env},
        )

    @property
    def session(self) -> int:
        """Session id of the shell and, unless they leave it, of all that it starts."""
        return self._process.pid

    def send(self, data: bytes, timeout_s: float) -> None:
        """See ``Channel``."""
        assert self._process.stdin is not None  # noqa: S101 - tells mypy what PIPE means
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError as error:
            raise SandboxError(f"the shell takes no input: {error}") from error

    def receive(self, timeout_s: float) -> bytes:
        """See ``Channel``."""
        assert self._process.stdout is not None  # noqa: S101 - likewise
        descriptor = self._process.stdout.fileno()
        if not select([descriptor], [], [], max(timeout_s, 0))[0]:
            raise TimeoutError
        return os.read(descriptor, 1 << 16)

    def exit_code(self) -> int | None:
        """See ``Channel``."""
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the shell's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """See ``Channel``."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class LocalSandbox:
    """``Sandbox`` over a folder of this machine, for tests of agents and tools. It isolates nothing."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._shells: list[PersistentShell] = []
        self._channels: list[ProcessChannel] = []
        self.id = "local"
        self.user = "nobody in particular"
        self.frozen = False

    @property
    def workdir(self) -> str:
        """See ``Sandbox``."""
        return str(self._workdir)

    def open_shell(
        self, *, user: str | None = None, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> PersistentShell:
        """See ``Sandbox``. ``user`` is ignored."""

        def open_channel() -> ProcessChannel:
            channel = ProcessChannel(env or {})
            self._channels.append(channel)
            return channel

        shell = PersistentShell(open_channel, self._kill_all, cwd or self.workdir)
        self._shells.append(shell)
        return shell

    def upload(self, source: Path, target: str, *, ignore: Sequence[str] = ()) -> None:
        """See ``Sandbox``."""
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*ignore))
        else:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)

    def upload_tar(self, archive: IO[bytes], target: str) -> None:
        """See ``Sandbox``."""
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(target)  # noqa: S202 - a test's own archive

    def download(self, path: str, sink: IO[bytes], limit: int) -> bool:
        """See ``Sandbox``."""
        if not Path(path).exists():
            return False
        with tarfile.open(fileobj=sink, mode="w") as tar:
            tar.add(path, arcname=Path(path).name)
        return True

    def read_file(self, path: str, limit: int) -> bytes | None:
        """See ``Sandbox``."""
        file = Path(path)
        return file.read_bytes()[:limit] if file.is_file() else None

    def oom_kills(self) -> int:
        """See ``Sandbox``."""
        return 0

    def freeze(self) -> None:
        """See ``Sandbox``."""
        self.frozen = True
        self._kill_all()

    def close(self) -> None:
        """See ``Sandbox``."""
        for shell in self._shells:
            shell.close()

    def _kill_all(self) -> None:
        for channel in self._channels:
            channel.kill()


class LocalProvider:
    """``SandboxProvider`` of local sandboxes, each in a folder of its own below a temporary one."""

    def __init__(self, prepare: Callable[[Path], None] = lambda folder: None) -> None:
        self._root = tempfile.TemporaryDirectory(prefix="k3eval-local-")
        self._prepare = prepare
        self.started: list[SandboxSpec] = []
        self.sandboxes: list[LocalSandbox] = []

    def start(self, spec: SandboxSpec) -> LocalSandbox:
        """See ``SandboxProvider``. ``prepare`` fills the new work folder."""
        folder = Path(self._root.name) / f"{len(self.started)}-{spec.role}"
        folder.mkdir()
        self._prepare(folder)
        self.started.append(spec)
        sandbox = LocalSandbox(folder)
        self.sandboxes.append(sandbox)
        return sandbox

    def close(self) -> None:
        """See ``SandboxProvider``."""
        for sandbox in self.sandboxes:
            sandbox.close()
        self._root.cleanup()


def tar_of(files: Mapping[str, bytes]) -> IO[bytes]:
    """A tar of regular files, for tests."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    buffer.seek(0)
    return buffer

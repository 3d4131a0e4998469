"""A shell process in a container, over the raw socket of an attached ``exec``.

The engine frames the output: 8 bytes of header (stream, three zeros, length big-endian), then the bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from k3eval_harness.errors import SandboxError
from k3eval_harness.sandbox.engine import engine_errors

if TYPE_CHECKING:
    from docker import APIClient

_HEADER: Final = struct.Struct(">BxxxL")
_READ_BYTES: Final = 1 << 16

SHELL_ARGV: Final = (
    "/bin/sh",
    "-c",
    "if command -v bash >/dev/null 2>&1; then exec bash --noprofile --norc; else exec sh; fi",
)


class Demultiplexer:
    """Takes the engine's frame headers out of a byte stream that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """Payload bytes in the order in which they came, stdout and stderr together."""
        self._buffer += data
        out = bytearray()
        while self._buffer:
            if not self._left:
                if len(self._buffer) < _HEADER.size:
                    break
                self._left = int(_HEADER.unpack_from(self._buffer)[1])
                del self._buffer[: _HEADER.size]
                continue
            piece = self._buffer[: self._left]
            out += piece
            self._left -= len(piece)
            del self._buffer[: len(piece)]
        return bytes(out)


class ExecChannel:
    """``Channel`` over one exec of the low-level docker client ``api``."""

    def __init__(
        self,
        api: APIClient,
        container_id: str,
        argv: Sequence[str],
        *,
        user: str,
        workdir: str,
        env: Mapping[str, str],
    ) -> None:
        self._api = api
        self._demultiplexer = Demultiplexer()
        self._reading = threading.Lock()
        with engine_errors("starting a shell in the container"):
            self._exec_id = str(
                api.exec_create(
                    container_id,
                    list(argv),
                    stdin=True,
                    user=user,
                    workdir=workdir,
                    environment=dict(env),
                )["Id"]
            )
            # Asked for directly and not by exec_start, which hands out the socket but not the response that
            # must be closed. A duplicate of the descriptor is an ordinary socket: it knows time limits and
            # can be shut down from another thread.
            self._response = api.post(
                f"{api.base_url}/v{api.api_version}/exec/{self._exec_id}/start",
                json={"Detach": False, "Tty": False},
                headers={"Connection": "Upgrade", "Upgrade": "tcp"},
                stream=True,
                timeout=api.timeout,
            )
            try:
                self._response.raise_for_status()
                self._socket = socket.socket(fileno=os.dup(self._response.raw.fileno()))
            except BaseException:
                self._response.close()
                raise

    def send(self, data: bytes, timeout_s: float) -> None:
        """See ``Channel``."""
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(data)
        except OSError as error:
            raise SandboxError(f"the container's shell takes no input: {error}") from error

    def receive(self, timeout_s: float) -> bytes:
        """See ``Channel``."""
        while True:
            try:
                with self._reading:
                    self._socket.settimeout(max(timeout_s, 0.001))
                    data = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                raise
            except OSError:
                return b""  # reset, or closed from another thread
            if not data:
                return b""
            if payload := self._demultiplexer.feed(data):
                return payload

    def exit_code(self) -> int | None:
        """See ``Channel``."""
        with contextlib.suppress(SandboxError), engine_errors("asking for an exit code"):
            code = self._api.exec_inspect(self._exec_id).get("ExitCode")
            return None if code is None else int(code)
        return None

    def close(self) -> None:
        """See ``Channel``. Wakes a reader in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # only when no reader is left: a descriptor that is closed under it can be given to a new connection
        # at once, and the reader would then wait on that one
        with self._reading:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._response.close()

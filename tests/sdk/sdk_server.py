"""A real HTTP server that plays a script."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

from k3eval.testing import Reply, SeenRequest

Handler = Callable[[SeenRequest], Reply]


class HttpServer(ThreadingHTTPServer):
    """Answers each request with what ``handler`` returns; counts requests and how many ran at a time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.handler: Handler = lambda _: Reply((b"{}",), 500)
        self.requests: list[SeenRequest] = []
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay quiet about clients that went away, which some tests do on purpose."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # typeshed names sockets

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def play(self, *replies: Reply) -> None:
        """Answer with these replies in order, the last one again and again."""
        left = list(replies)

        def next_reply(_: SeenRequest) -> Reply:
            with self.lock:
                return left.pop(0) if len(left) > 1 else left[0]

        self.handler = next_reply


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        server = cast("HttpServer", self.server)
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.loads(raw) if raw else {}
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = SeenRequest(self.command, self.path, headers, body)
        with server.lock:
            server.requests.append(seen)
        reply = server.handler(seen)
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for packet in reply.packets:
                if packet:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(packet), packet))
            if reply.cut:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True  # the client went away, which some tests do on purpose

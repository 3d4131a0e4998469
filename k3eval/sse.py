"""Server-sent events from bytes: any split into packets gives the same events.

Lines end at LF, CR or CRLF and nowhere else (``str.splitlines`` also breaks at U+0085 and U+2028, which occur
inside model text). Bytes are split first and decoded line by line, so a character cut by a packet is never
seen.
"""

from __future__ import annotations

from typing import Final

from k3eval.errors import ProtocolError

MAX_EVENT_BYTES: Final = 64 * 1024 * 1024
"""An event above this is no chat chunk; holding more would let a broken host eat the memory."""

DONE: Final = b"[DONE]"
_BOM: Final = b"\xef\xbb\xbf"


class SseParser:
    """Feed bytes, get the data of each completed event. Comments (keep-alives) are counted, not returned."""

    __slots__ = ("_after_cr", "_data", "_held", "_parts", "_start", "comments")

    def __init__(self) -> None:
        self.comments = 0
        self._parts: list[bytes] = []
        self._held = 0
        self._data: list[bytes] = []
        self._after_cr = False
        self._start = True

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes and return the events that they complete."""
        if not data:
            return []
        if (
            data.count(b"\n") == 2
            and data.endswith(b"\n\n")
            and data.startswith(b"data: ")
            and not (self._parts or self._data or self._after_cr)
            and b"\r" not in data
        ):
            self._start = False
            return [data[6:-2]]  # the common case: one packet, one event
        if self._after_cr:
            self._after_cr = False
            if data[:1] == b"\n":
                data = data[1:]
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in data:
            self._hold(data)
            return []
        if self._parts:
            self._parts.append(data)
            data = b"".join(self._parts)
            self._parts.clear()
            self._held = 0
        if self._start:
            self._start = False
            data = data.removeprefix(_BOM)
        lines = data.split(b"\n")
        rest = lines.pop()
        if rest:
            self._hold(rest)
        events: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data.clear()
            else:
                self._line(line)
        return events

    def finish(self) -> list[bytes]:
        """Return what the end of the bytes completes: hosts leave the last blank line out now and then."""
        if self._parts:
            self._line(b"".join(self._parts).removeprefix(_BOM if self._start else b""))
            self._parts.clear()
            self._held = 0
        if not self._data:
            return []
        event = b"\n".join(self._data)
        self._data.clear()
        return [event]

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line[:1] == b":":
            self.comments += 1
        # event:, id: and retry: carry nothing for chat completions

    def _hold(self, data: bytes) -> None:
        if data:
            self._parts.append(data)
            self._held += len(data)
            if self._held > MAX_EVENT_BYTES:
                raise ProtocolError(f"a stream event is larger than {MAX_EVENT_BYTES} bytes")

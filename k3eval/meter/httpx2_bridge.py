"""The metered transports for httpx2, the successor that newer libraries want: a thin translation, nothing
metered here.

Requests are handed to the httpx transport; replies, streams and exceptions are handed back under httpx2's
names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import cast

import httpx
import httpx2

from k3eval.meter.transport import AsyncMeteredTransport, MeteredTransport


class Httpx2Transport(httpx2.BaseTransport):
    """Meters the chat calls of any ``httpx2.Client``."""

    def __init__(self, metered: MeteredTransport) -> None:
        self._metered = metered

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Pass one request on."""
        request.read()
        try:
            response = self._metered.handle_request(_request(request))
        except httpx.RequestError as error:
            raise _translated(error, request) from error
        stream = _Stream(cast("httpx.SyncByteStream", response.stream), request)
        return httpx2.Response(response.status_code, headers=response.headers.multi_items(), stream=stream)

    def close(self) -> None:
        """Close the transport underneath."""
        self._metered.close()


class AsyncHttpx2Transport(httpx2.AsyncBaseTransport):
    """Meters the chat calls of any ``httpx2.AsyncClient``."""

    def __init__(self, metered: AsyncMeteredTransport) -> None:
        self._metered = metered

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Pass one request on."""
        await request.aread()
        try:
            response = await self._metered.handle_async_request(_request(request))
        except httpx.RequestError as error:
            raise _translated(error, request) from error
        stream = _AsyncStream(cast("httpx.AsyncByteStream", response.stream), request)
        return httpx2.Response(response.status_code, headers=response.headers.multi_items(), stream=stream)

    async def aclose(self) -> None:
        """Close the transport underneath."""
        await self._metered.aclose()


class _Stream(httpx2.SyncByteStream):
    def __init__(self, source: httpx.SyncByteStream, request: httpx2.Request) -> None:
        self._source = source
        self._request = request

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._source
        except httpx.RequestError as error:
            raise _translated(error, self._request) from error

    def close(self) -> None:
        self._source.close()


class _AsyncStream(httpx2.AsyncByteStream):
    def __init__(self, source: httpx.AsyncByteStream, request: httpx2.Request) -> None:
        self._source = source
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._source:
                yield chunk
        except httpx.RequestError as error:
            raise _translated(error, self._request) from error

    async def aclose(self) -> None:
        await self._source.aclose()


def _request(request: httpx2.Request) -> httpx.Request:
    limits = {key: value for key, value in request.extensions.items() if key == "timeout"}
    return httpx.Request(
        request.method,
        str(request.url),
        headers=request.headers.multi_items(),
        content=request.content,
        extensions=limits,
    )


def _translated(error: httpx.RequestError, request: httpx2.Request) -> httpx2.RequestError:
    """Return httpx2's exception of the same name; the two libraries share the whole tree."""
    kind = getattr(httpx2, type(error).__name__, httpx2.TransportError)
    return cast("httpx2.RequestError", kind(str(error), request=request))

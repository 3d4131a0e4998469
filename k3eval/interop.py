"""Other people's clients on the meter: an httpx client for any framework, and ordinary ``openai`` clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack, cast

from k3eval.base_client import BaseClient, ClientOptions

if TYPE_CHECKING:
    import httpx
    import httpx2
    import openai
    from openai import DefaultAsyncHttpxClient as _Async
    from openai import DefaultHttpxClient as _Sync


def metered_http_client(
    provider: str = "local",
    *,
    transport: httpx.BaseTransport | None = None,
    **options: Unpack[ClientOptions],
) -> httpx.Client:
    """Return an httpx client whose chat calls are metered, for any library that takes one.

    Switch that library's own retries off: the meter retries, and each attempt is a ledger row.
    """
    import httpx

    from k3eval.meter.transport import MeteredTransport, plain_transport

    base = BaseClient(provider, **options)
    inner = plain_transport(base.base_url) if transport is None else transport
    return httpx.Client(
        transport=MeteredTransport(base.provider, base.meter, inner=inner, retry=base.retry),
        base_url=base.base_url,
        headers=base.headers,
        timeout=_timeout(base),
    )


def metered_async_http_client(
    provider: str = "local",
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    **options: Unpack[ClientOptions],
) -> httpx.AsyncClient:
    """Like ``metered_http_client``, for asyncio."""
    import httpx

    from k3eval.meter.transport import AsyncMeteredTransport, plain_async_transport

    base = BaseClient(provider, **options)
    inner = plain_async_transport(base.base_url) if transport is None else transport
    return httpx.AsyncClient(
        transport=AsyncMeteredTransport(base.provider, base.meter, inner=inner, retry=base.retry),
        base_url=base.base_url,
        headers=base.headers,
        timeout=_timeout(base),
    )


def metered_httpx2_client(provider: str = "local", **options: Unpack[ClientOptions]) -> httpx2.Client:
    """Like ``metered_http_client``, for libraries that want an httpx2 client."""
    import httpx2

    from k3eval.meter.httpx2_bridge import Httpx2Transport
    from k3eval.meter.transport import MeteredTransport, plain_transport

    base = BaseClient(provider, **options)
    metered = MeteredTransport(
        base.provider, base.meter, inner=plain_transport(base.base_url), retry=base.retry
    )
    return httpx2.Client(
        transport=Httpx2Transport(metered),
        base_url=base.base_url,
        headers=base.headers,
        timeout=httpx2.Timeout(**_timeout(base).as_dict()),
    )


def metered_async_httpx2_client(
    provider: str = "local", **options: Unpack[ClientOptions]
) -> httpx2.AsyncClient:
    """Like ``metered_async_http_client``, for libraries that want an httpx2 client."""
    import httpx2

    from k3eval.meter.httpx2_bridge import AsyncHttpx2Transport
    from k3eval.meter.transport import AsyncMeteredTransport, plain_async_transport

    base = BaseClient(provider, **options)
    metered = AsyncMeteredTransport(
        base.provider, base.meter, inner=plain_async_transport(base.base_url), retry=base.retry
    )
    return httpx2.AsyncClient(
        transport=AsyncHttpx2Transport(metered),
        base_url=base.base_url,
        headers=base.headers,
        timeout=httpx2.Timeout(**_timeout(base).as_dict()),
    )


def openai_client(
    provider: str = "local",
    *,
    transport: httpx.BaseTransport | None = None,
    **options: Unpack[ClientOptions],
) -> openai.OpenAI:
    """Return an ordinary ``openai.OpenAI`` whose chat calls are metered; its own retries are off.

    A call that the budget forbids is answered with HTTP 402, which ``openai`` raises as ``APIStatusError``.
    """
    import openai

    base = BaseClient(provider, **options)
    http = metered_http_client(provider, transport=transport, **options)
    return openai.OpenAI(
        api_key=base.key or "none", base_url=base.base_url, http_client=cast("_Sync", http), max_retries=0
    )


def async_openai_client(
    provider: str = "local",
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    **options: Unpack[ClientOptions],
) -> openai.AsyncOpenAI:
    """Like ``openai_client``, for asyncio."""
    import openai

    base = BaseClient(provider, **options)
    http = metered_async_http_client(provider, transport=transport, **options)
    return openai.AsyncOpenAI(
        api_key=base.key or "none", base_url=base.base_url, http_client=cast("_Async", http), max_retries=0
    )


def _timeout(base: BaseClient) -> httpx.Timeout:
    import httpx

    limits = base.timeouts
    return httpx.Timeout(connect=limits.connect, read=limits.first_token, write=limits.idle, pool=None)

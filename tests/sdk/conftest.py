"""Shared by the SDK's tests: a meter that collects its warnings, a server that plays a script."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from sdk_server import HttpServer

from k3eval import Meter
from k3eval.notices import Notice


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with HttpServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join(5)


@pytest.fixture
def notices() -> list[Notice]:
    return []


@pytest.fixture
def meter(notices: list[Notice]) -> Iterator[Meter]:
    made = Meter(notify=notices.append)
    yield made
    made.ledger.close()

"""The Docker engine: connect with a message that says what to do, versions, free disk."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k3eval_harness.errors import EngineUnavailable, SandboxError

if TYPE_CHECKING:
    from docker import DockerClient

API_SECONDS: Final = 120
"""Time limit of one engine call; each read counts, so a build that talks may take longer."""
KNOCK_SECONDS: Final = 10.0
MIN_FREE_BYTES: Final = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What answers."""

    version: str
    api_version: str
    root_dir: str
    """Where the engine keeps its data, as it says."""
    cpus: int
    memory_bytes: int


def connect(timeout_s: float = API_SECONDS) -> DockerClient:
    """A client whose engine answers a ping. Raises EngineUnavailable with what to do."""
    import docker
    from docker.errors import DockerException

    where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    _knock(where)
    try:
        client = docker.from_env(timeout=int(timeout_s))
    except DockerException as error:
        raise EngineUnavailable(_what_to_do(where, error)) from error
    try:
        client.ping()
    except (DockerException, OSError) as error:
        client.close()
        raise EngineUnavailable(_what_to_do(where, error)) from error
    return client


def _knock(where: str) -> None:
    """Connect to a unix socket and hang up: the docker package leaves its own failed connections open."""
    if not where.startswith("unix://"):
        return
    with socket.socket(socket.AF_UNIX) as knock:
        knock.settimeout(KNOCK_SECONDS)
        try:
            knock.connect(where.removeprefix("unix://"))
        except OSError as error:
            raise EngineUnavailable(_what_to_do(where, error)) from error


def engine_info(client: DockerClient) -> EngineInfo:
    """Versions and size of the engine."""
    with engine_errors("the engine's info"):
        info = client.info()
        version = client.version()
    return EngineInfo(
        version=str(version.get("Version", "?")),
        api_version=str(version.get("ApiVersion", "?")),
        root_dir=str(info.get("DockerRootDir", "")),
        cpus=int(info.get("NCPU", 1)),
        memory_bytes=int(info.get("MemTotal", 0)),
    )


def disk_free(client: DockerClient, info: EngineInfo | None = None) -> int | None:
    """Free bytes where the engine keeps its data; None when that is on another machine."""
    root = (info or engine_info(client)).root_dir
    if not root or not Path(root).parent.exists():
        return None
    probe = Path(root)
    while not os.access(probe, os.X_OK) and probe != probe.parent:
        probe = probe.parent
    return shutil.disk_usage(probe).free


def check_disk(client: DockerClient, need: int = MIN_FREE_BYTES, info: EngineInfo | None = None) -> None:
    """Raise SandboxError when less than ``need`` bytes are free for images and containers."""
    free = disk_free(client, info)
    if free is not None and free < need:
        raise SandboxError(
            f"only {free / 1024**3:.1f} GiB free for Docker, {need / 1024**3:.1f} GiB are needed: "
            "free some, for example with `docker image prune` and `docker builder prune`"
        )


@contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """Turn the docker package's and the socket's errors into SandboxError: ``what`` failed, and why."""
    import requests
    from docker.errors import APIError, DockerException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except APIError as error:
        reason = error.explanation or str(error)
        raise SandboxError(f"{what} failed: {_brief(str(reason))}") from error
    except (DockerException, requests.RequestException, HTTPError, OSError) as error:
        raise SandboxError(
            f"{what} failed: {_brief(_innermost(error))}; does the Docker engine still run?"
        ) from error


def _innermost(error: BaseException) -> str:
    """What an HTTP client's error is about: the operating system's own words where it wraps them."""
    for inner in (error, *error.args):
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        if inner is not error and isinstance(inner, BaseException) and inner.args:
            return _innermost(inner)
    return str(error)


def _what_to_do(where: str, error: Exception) -> str:
    if isinstance(error, PermissionError) or "Permission denied" in str(error):
        return f"no permission to use the Docker engine at {where}: join the docker group or run with sudo"
    return (
        f"no Docker engine answers at {where}: start it (`sudo systemctl start docker` or `sudo dockerd`), "
        "install it (`sudo apt-get install docker.io`), or set DOCKER_HOST"
    )


def _brief(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:150] + " ... " + line[-140:]

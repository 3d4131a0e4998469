"""Task images: built once per content, named by a hash, with the log's tail kept when a build fails.

The hash covers every file of the build context, the stage and the ids of the base images, so a changed
Dockerfile or a new base image gives a new name and an old name never means something else.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import posixpath
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k3eval_harness.errors import Cancelled, ImageBuildError, SandboxError, TaskError
from k3eval_harness.sandbox.archive import read_single_file
from k3eval_harness.sandbox.base_image import ensure_base_image
from k3eval_harness.sandbox.engine import check_disk, engine_errors
from k3eval_harness.sandbox.lease import labels, remove
from k3eval_harness.task.dockerfile import base_references
from k3eval_harness.task.load import Task

if TYPE_CHECKING:
    from docker import APIClient, DockerClient
    from requests import Response

LOG_TAIL: Final = 8_000
MAX_PARALLEL_BUILDS: Final = 2
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
COPY_SECONDS: Final = 600.0
COPY_BYTES: Final = 256 * 1024**2
_WATCH_SECONDS: Final = 0.2

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image that is ready."""

    ref: str
    id: str
    seconds: float
    """Wall seconds that this call took."""
    cached: bool


def image_name(task: Task, base_ids: Mapping[str, str], target: str | None = None) -> str:
    """Content-hash name of a task's image; ``base_ids`` maps base references to image ids."""
    digest = hashlib.sha256()
    for path in sorted(_context_files(task.environment_dir)):
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        name = path.relative_to(task.environment_dir).as_posix()
        executable = bool(path.lstat().st_mode & stat.S_IXUSR)
        digest.update(f"{len(name)}:{name}:{int(executable)}:{len(content)}:".encode() + content)
    digest.update(repr((sorted(base_ids.items()), target)).encode())
    suffix = f"-{re.sub(r'[^a-z0-9]+', '-', target.lower())}" if target else ""
    return f"{image_repository(task)}:{digest.hexdigest()[:16]}{suffix}"


def image_repository(task: Task) -> str:
    """The image's name without its tag; a ready image is named as the task names it."""
    ready = task.config.environment.docker_image
    if ready:
        return ready
    # tasks whose files are injected differ in nothing that the image holds
    name = task.family or task.short_name if task.extras.inject else task.short_name
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "task"
    return f"k3eval/{slug[:60].strip('-')}"


class ImageBuilder:
    """Builds task images. Thread-safe: one build per name at a time, few builds at once."""

    def __init__(
        self, client: DockerClient, log: Log | None = None, cancel: threading.Event | None = None
    ) -> None:
        self._client = client
        self._log = log or (lambda text: None)
        self._cancel = cancel or threading.Event()
        self._slots = threading.Semaphore(MAX_PARALLEL_BUILDS)
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def ensure(self, task: Task, target: str | None = None, log_file: Path | None = None) -> BuiltImage:
        """The task's image, built when it is not there.

        Raises ImageBuildError (its detail is the log's tail), SandboxError when the disk is full, Cancelled.
        """
        start = time.monotonic()
        ready = task.config.environment.docker_image
        if ready and target is None:
            base = ensure_base_image(self._client, ready, self._log)
            return BuiltImage(ready, base.id, time.monotonic() - start, cached=base.origin == "present")
        if not task.dockerfile.is_file():
            raise ImageBuildError(
                f"{task.dockerfile}: missing; add one or set docker_image in [environment] of task.toml"
            )
        text = task.dockerfile.read_text(encoding="utf-8", errors="replace")
        references = base_references(text)
        bases = {ref: ensure_base_image(self._client, ref, self._log).id for ref in references}
        name = image_name(task, bases, target)
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            found = self._find(name)
            if found is not None:
                return BuiltImage(name, found, time.monotonic() - start, cached=True)
            with self._slots:
                check_disk(self._client)
                self._log(f"building {name}")
                self._build(task, name, target, log_file)
            found = self._find(name)
        if found is None:
            raise ImageBuildError(f"image {name} was built but the engine does not list it")
        return BuiltImage(name, found, time.monotonic() - start, cached=False)

    def copy_out(self, image: BuiltImage, paths: Sequence[str], into: Path) -> None:
        """Copy files of an image to the host folder ``into``, flat, without starting anything."""
        with engine_errors(f"copying out of image {image.ref}"):
            # no command is ever run in it: the name only has to be there
            labelled = labels("images", "copy-out", "copy-out", COPY_SECONDS)
            container = self._client.api.create_container(
                image.ref, command=["true"], labels=labelled, network_disabled=True
            )
        container_id = str(container["Id"])
        try:
            for path in paths:
                with engine_errors(f"copying {path} out of image {image.ref}"):
                    chunks, _ = self._client.api.get_archive(container_id, path)
                    archive = io.BytesIO(b"".join(chunks))
                content = read_single_file(archive, COPY_BYTES)
                if content is None:
                    raise TaskError(f"{path} in image {image.ref} is no regular file")
                (into / posixpath.basename(path)).write_bytes(content)
        finally:
            remove(self._client, container_id)

    def _find(self, name: str) -> str | None:
        from docker.errors import ImageNotFound

        with engine_errors(f"looking for image {name}"):
            try:
                return str(self._client.images.get(name).id)
            except ImageNotFound:
                return None

    def _build(self, task: Task, name: str, target: str | None, log_file: Path | None) -> None:
        seconds = task.config.environment.build_timeout_sec
        output: list[str] = []
        build = _AbortableBuild(self._cancel, seconds)
        where = f"{task.dockerfile}" + (f" (stage {target})" if target else "")
        try:
            with build, engine_errors(f"building {where}"):
                # a client of its own: aborting a build cuts its connection
                for event in build.api.build(
                    path=str(task.environment_dir),
                    tag=name,
                    rm=True,
                    forcerm=True,
                    target=target or "",
                    buildargs={key: os.environ[key] for key in _PROXIES if key in os.environ},
                    labels={"k3eval.image": "1", "k3eval.task": task.name},
                    timeout=int(seconds) + 30,
                    decode=True,
                ):
                    output.append(str(event.get("stream") or event.get("status") or ""))
                    if "error" in event:
                        raise ImageBuildError(
                            f"{where}: the build failed: {_brief(str(event['error']))}{_said(output)}",
                            detail=_tail(output, str(event["error"])),
                        )
        except (SandboxError, ImageBuildError) as error:
            if build.aborted == "cancelled":
                raise Cancelled("stopped by the user during an image build") from error
            if build.aborted == "time":
                raise ImageBuildError(
                    f"{where}: the build ran longer than {seconds:g} s (build_timeout_sec in [environment])",
                    detail=_tail(output),
                ) from error
            if isinstance(error, SandboxError):
                raise ImageBuildError(error.message, detail=_tail(output)) from error
            raise
        finally:
            if log_file is not None:
                log_file.parent.mkdir(parents=True, exist_ok=True)
                log_file.write_text("".join(output), encoding="utf-8")


class _AbortableBuild:
    """A docker client whose call in flight is cut by a cancel event or a time limit.

    The engine stops a build, and removes its container, when the connection that asked for it ends.
    """

    def __init__(self, cancel: threading.Event, seconds: float) -> None:
        self._cancel = cancel
        self._deadline = time.monotonic() + seconds
        self._done = threading.Event()
        self._sockets: list[socket.socket] = []
        self._responses: list[Response] = []
        self.aborted: str | None = None
        self.api: APIClient

    def __enter__(self) -> _AbortableBuild:
        import docker

        self.api = docker.from_env().api
        self.api.hooks["response"].append(self._remember)
        self._thread = threading.Thread(target=self._watch, name="k3eval-build-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._done.set()
        self._thread.join()
        for connection in self._sockets:
            connection.close()
        for response in self._responses:
            response.close()
        self.api.close()

    def _remember(self, response: Response, *unused: object, **also_unused: object) -> None:
        self._responses.append(response)
        # only the streamed reply of the build still has its connection open
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._sockets.append(socket.socket(fileno=os.dup(response.raw.fileno())))

    def _watch(self) -> None:
        while not self._done.wait(_WATCH_SECONDS):
            if self._cancel.is_set():
                self.aborted = "cancelled"
            elif time.monotonic() > self._deadline:
                self.aborted = "time"
            if self.aborted:
                for connection in self._sockets:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)


def _context_files(context: Path) -> list[Path]:
    found: list[Path] = []
    for folder, dirs, names in os.walk(context):
        found += [Path(folder) / name for name in names]
        found += [Path(folder) / name for name in dirs if (Path(folder) / name).is_symlink()]
    return found


def _tail(output: list[str], error: str = "") -> str:
    return ("".join(output) + error)[-LOG_TAIL:]


def _said(output: list[str]) -> str:
    """The last thing that the failing step printed, for the one-line message."""
    lines = [line.strip() for line in "".join(output[-40:]).splitlines() if line.strip()]
    spoken = [line for line in lines if not line.startswith(("Step ", "--->", "Removing intermediate"))]
    return f" ({spoken[-1][:160]})" if spoken else ""


def _brief(text: str) -> str:
    return " ".join(text.split())[:200]

"""The base image that task images start from: present, pulled, or made from Debian's own packages.

Where no image registry can be reached, ``python:3.11-slim-bookworm`` is made here under the same
name, so that the same Dockerfiles build in an air-gapped place: mmdebstrap (minbase) piped into the
engine's import API, then one build step with the host's CA certificates and pip settings.
Nothing that holds a credential is copied, stored or shown: it is left out and a note says so.
``python -m k3eval_harness.sandbox.base_image`` is the same from the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, Protocol

from k3eval_harness.errors import EngineUnavailable, ImageBuildError
from k3eval_harness.sandbox.host_settings import (
    CA_BUNDLE,
    AptSources,
    container_pip_settings,
    host_certificates,
    parse_apt_options,
    parse_apt_sources,
)

if TYPE_CHECKING:
    from docker import DockerClient

BASE_REF = "python:3.11-slim-bookworm"
SUITE = "bookworm"
PACKAGES = ("ca-certificates", "git", "patch", "python3", "python3-pip", "python3-venv")
FIRST_WORD_S = 20.0
"""How long a registry may take to say anything before the pull is given up."""
QUIET_S = 120.0
PULL_S = 900.0
MAKE_S = 900.0

Log = Callable[[str], None]


@dataclass(frozen=True)
class BaseImage:
    """What ``ensure_base_image`` found or made."""

    ref: str
    id: str
    origin: Literal["present", "pulled", "made"]


class Images(Protocol):
    """What this module needs of a container engine. Every call raises ``ImageBuildError`` on failure."""

    def find(self, ref: str) -> str | None:
        """The image's id, or None."""

    def pull(self, ref: str) -> Iterator[str]:
        """Pull; yields one text per progress event."""

    def import_tar(self, stream: IO[bytes], ref: str) -> None:
        """Make an image of one layer from a tar stream."""

    def build(self, context: bytes, ref: str) -> None:
        """Build a tarred context and name the result."""

    def remove(self, ref: str) -> None:
        """Remove the name; quiet when it does not exist."""


class Maker(Protocol):
    """Makes a root file system from a distribution's packages."""

    def why_not(self) -> str | None:
        """None when this machine can make one, else the reason with what to do."""

    def root_tar(self, log: Log) -> contextlib.AbstractContextManager[IO[bytes]]:
        """The root as a tar stream; leaving the context raises ``ImageBuildError`` if making it failed."""


_TRUST_HOST = '''\
"""Add the host's certificates that the image lacks, so that they outlive update-ca-certificates."""
import pathlib, re, subprocess
pem = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
have = {"".join(c.split()) for c in pem.findall(pathlib.Path("%(bundle)s").read_text())}
into = pathlib.Path("/usr/local/share/ca-certificates")
for number, cert in enumerate(pem.findall(pathlib.Path("/tmp/k3eval/host.pem").read_text())):
    if "".join(cert.split()) not in have:
        (into / f"k3eval-host-{number}.crt").write_text(cert + "\\n")
subprocess.run(["update-ca-certificates"], check=True)
''' % {"bundle": CA_BUNDLE}  # noqa: UP031 - the text has braces of its own

_DOCKERFILE = """\
FROM {root}
COPY host.pem trust_host.py /tmp/k3eval/
COPY pip.conf /etc/pip.conf
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED \\
 && ln -s /usr/bin/python3.11 /usr/local/bin/python3.11 \\
 && ln -s /usr/bin/python3.11 /usr/local/bin/python3 \\
 && ln -s /usr/bin/python3.11 /usr/local/bin/python \\
 && printf '#!/bin/sh\\nexec /usr/local/bin/python3 -m pip "$@"\\n' > /usr/local/bin/pip \\
 && chmod 755 /usr/local/bin/pip && cp /usr/local/bin/pip /usr/local/bin/pip3 \\
 && python3 /tmp/k3eval/trust_host.py && rm -rf /tmp/k3eval
ENV LANG=C.UTF-8 SSL_CERT_FILE={bundle} PIP_CERT={bundle}
LABEL k3eval.base="made" k3eval.base.how="{how}" k3eval.base.recipe="{recipe}"
CMD ["python3"]
"""


def image_context(root_ref: str, pip_conf: str, certificates: str) -> bytes:
    """The tarred build context that turns the bare root into the base image; equal input, equal bytes."""
    recipe = hashlib.sha256("\0".join([*PACKAGES, pip_conf, certificates, _DOCKERFILE, _TRUST_HOST]).encode())
    dockerfile = _DOCKERFILE.format(
        root=root_ref,
        bundle=CA_BUNDLE,
        how=f"mmdebstrap minbase {SUITE} with {' '.join(PACKAGES)}; CA and pip settings of the host",
        recipe=recipe.hexdigest()[:16],
    )
    files = {
        "Dockerfile": dockerfile,
        "host.pem": certificates,
        "trust_host.py": _TRUST_HOST,
        "pip.conf": pip_conf,
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            data = text.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def ensure_base_image(client: DockerClient, ref: str = BASE_REF, log: Log | None = None) -> BaseImage:
    """Make sure that the engine has an image: use the present one, else pull it, else make it.

    Only ``BASE_REF`` can be made. Safe to call from several processes and threads at once.

    Raises:
        ImageBuildError: it can be neither pulled nor made; the message says why and what to do.
    """
    return provide(EngineImages(client), DebianMaker(), ref, log or (lambda text: None))


def provide(
    images: Images,
    maker: Maker,
    ref: str,
    log: Log,
    *,
    remake: bool = False,
    first_word_s: float = FIRST_WORD_S,
) -> BaseImage:
    """``ensure_base_image`` over an explicit engine and maker.

    With ``remake`` it is made even where one is present or could be pulled.
    ``first_word_s``: seconds that a registry may stay silent before the pull is given up.
    """
    if not remake and (found := images.find(ref)):
        return BaseImage(ref, found, "present")
    with _one_at_a_time():
        # another process may have made it while this one waited
        if not remake:
            if found := images.find(ref):
                return BaseImage(ref, found, "present")
            problem = _pull(images, ref, log, first_word_s)
            if problem is None and (found := images.find(ref)):
                return BaseImage(ref, found, "pulled")
            log(f"{ref} cannot be pulled ({problem})")
        else:
            problem = "remake was asked for"
        if ref != BASE_REF:
            raise ImageBuildError(
                f"image {ref} is not here and cannot be pulled ({problem}): load it with 'docker load', "
                f"or start the Dockerfile from {BASE_REF}, which can be made without a registry"
            )
        if reason := maker.why_not():
            raise ImageBuildError(
                f"image {ref} cannot be pulled ({problem}) and cannot be made here: {reason}"
            )
        return _make(images, maker, ref, log)


def _make(images: Images, maker: Maker, ref: str, log: Log) -> BaseImage:
    start = time.monotonic()
    log(f"making {ref} from Debian packages (about a minute)")
    root_ref = f"k3eval-base-root:{os.getpid()}"
    try:
        with maker.root_tar(log) as stream:
            images.import_tar(stream, root_ref)
        settings = container_pip_settings(_output([sys.executable, "-m", "pip", "config", "list"]))
        for note in settings.notes:
            log(note)
        images.build(image_context(root_ref, settings.text(), host_certificates(os.environ)), ref)
    finally:
        images.remove(root_ref)
    found = images.find(ref)
    if found is None:
        raise ImageBuildError(
            f"image {ref} was built but the engine does not list it: look at the engine's log"
        )
    log(f"made {ref} in {time.monotonic() - start:.0f} s")
    return BaseImage(ref, found, "made")


def _pull(images: Images, ref: str, log: Log, first_word_s: float) -> str | None:
    """Pull within the time limits. Returns None, or in a few words why it failed.

    A thread reads, because the engine says nothing at all while a registry does not answer; the
    docker client's own read timeout ends that thread when it is left behind.
    """
    log(f"pulling {ref}")
    events: queue.Queue[str | ImageBuildError | None] = queue.Queue()

    def read() -> None:
        try:
            for event in images.pull(ref):
                events.put(event)
            events.put(None)
        except ImageBuildError as error:
            events.put(error)

    threading.Thread(target=read, name="k3eval-pull", daemon=True).start()
    deadline = time.monotonic() + PULL_S
    patience = first_word_s
    while True:
        try:
            event = events.get(timeout=patience)
        except queue.Empty:
            return f"no answer for {patience:g} s"
        if event is None:
            return None
        if isinstance(event, ImageBuildError):
            return event.message
        if time.monotonic() > deadline:
            return f"not done after {PULL_S:.0f} s"
        patience = QUIET_S


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"k3eval-base-image-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class EngineImages:
    """``Images`` over the docker package."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        self._api = client.api

    def find(self, ref: str) -> str | None:
        """See ``Images``."""
        from docker.errors import ImageNotFound

        with self._errors(f"image {ref}"):
            try:
                return str(self._client.images.get(ref).id)
            except ImageNotFound:
                return None

    def pull(self, ref: str) -> Iterator[str]:
        """See ``Images``."""
        name, _, tag = ref.rpartition(":")
        with self._errors("pull"):
            for event in self._api.pull(name, tag=tag, stream=True, decode=True):
                if "error" in event:
                    raise ImageBuildError(_brief(str(event["error"])))
                yield str(event.get("status", ""))

    def import_tar(self, stream: IO[bytes], ref: str) -> None:
        """See ``Images``."""
        name, _, tag = ref.rpartition(":")
        with self._errors("import"):
            answer = self._api.import_image_from_stream(stream, repository=name, tag=tag)
        if '"error"' in str(answer):
            raise ImageBuildError(f"the engine refused the base image: {_brief(str(answer))}")

    def build(self, context: bytes, ref: str) -> None:
        """See ``Images``."""
        with self._errors("build"):
            output: list[str] = []
            for event in self._api.build(
                fileobj=io.BytesIO(context), custom_context=True, tag=ref, rm=True, forcerm=True, decode=True
            ):
                if "error" in event:
                    raise ImageBuildError(
                        f"the base image's last step failed: {_brief(str(event['error']))}",
                        detail="".join(output),
                    )
                output.append(str(event.get("stream", "")))

    def remove(self, ref: str) -> None:
        """See ``Images``."""
        from docker.errors import ImageNotFound

        with self._errors("remove"), contextlib.suppress(ImageNotFound):
            # noprune: the made image stands on this one's layer
            self._api.remove_image(ref, noprune=True)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        import requests
        from docker.errors import APIError, DockerException

        try:
            yield
        except (DockerException, requests.RequestException, OSError) as error:
            # the engine's own words, without the address of the API call
            words = error.explanation if isinstance(error, APIError) else None
            raise ImageBuildError(f"{what}: {_brief(str(words or error))}") from error


class DebianMaker:
    """``Maker`` with mmdebstrap on a Debian or Ubuntu machine, as root or through sudo."""

    def why_not(self) -> str | None:
        """See ``Maker``."""
        if not shutil.which("apt-get"):
            return f"this is no Debian or Ubuntu machine; load it with 'docker load' and tag it {BASE_REF}"
        if root_prefix() is None:
            return (
                "that needs root or sudo without a password; run once as root, or load it with 'docker load'"
            )
        return None

    @contextlib.contextmanager
    def root_tar(self, log: Log) -> Iterator[IO[bytes]]:
        """See ``Maker``."""
        prefix = root_prefix()
        if prefix is None:
            raise ImageBuildError("making the base image needs root or sudo")
        self._install_missing(prefix, log)
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*prefix, *self._command(log)],
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
            )
            limit = threading.Timer(MAKE_S, process.kill)
            limit.start()
            try:
                assert process.stdout is not None  # noqa: S101 - tells mypy what PIPE means
                yield process.stdout
                code = process.wait()
            finally:
                limit.cancel()
                process.kill()
                process.wait()
            if code:
                errors.seek(0)
                text = errors.read().decode(errors="replace")
                said = [line for line in text.splitlines() if line.startswith("E:")] or text.splitlines()[-1:]
                raise ImageBuildError(
                    f"mmdebstrap failed ({'; '.join(said)[:300]}): can Debian's package archive be reached?",
                    detail=text[-4000:],
                )

    def _command(self, log: Log) -> list[str]:
        sources = AptSources((), ())
        if _os_release().get("VERSION_CODENAME") == SUITE:
            files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
            texts = [
                f.read_text(errors="replace")
                for f in files
                if f.suffix in (".list", ".sources") and f.is_file()
            ]
            sources = parse_apt_sources("\n\n".join(texts), SUITE)
        for note in sources.notes:
            log(note)
        command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", "--format=tar"]
        command += [f"--aptopt={option}" for option in parse_apt_options(_output(["apt-config", "dump"]))]
        command += [
            f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "info", "locale", "lintian")
        ]
        command += [
            "--dpkgopt=path-exclude=/usr/share/doc/*",
            "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        ]
        for key in sorted({m[1] for line in sources.lines if (m := re.search(r"signed-by=([^\] ]+)", line))}):
            if not key.startswith("/usr/share/keyrings/debian-archive"):
                # the image must be able to check the same signatures
                command += [
                    '--setup-hook=mkdir -p "$1"' + str(Path(key).parent),
                    f"--setup-hook=copy-in {key} {Path(key).parent}",
                ]
        return [*command, SUITE, "-", *sources.lines]

    def _install_missing(self, prefix: Sequence[str], log: Log) -> None:
        missing = [] if shutil.which("mmdebstrap") else ["mmdebstrap"]
        if not Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists():
            missing.append("debian-archive-keyring")
        if not missing:
            return
        log(f"installing {' and '.join(missing)} with apt-get")
        env = ["env", "DEBIAN_FRONTEND=noninteractive"]
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
            try:
                done = subprocess.run(
                    [*prefix, *env, "apt-get", *arguments],
                    capture_output=True, text=True, timeout=MAKE_S, check=False, stdin=subprocess.DEVNULL,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise ImageBuildError(f"apt-get {arguments[0]} took more than {MAKE_S:.0f} s") from None
            if done.returncode:
                raise ImageBuildError(
                    f"apt-get {' '.join(arguments)} failed: {_brief(done.stderr)}", detail=done.stderr[-4000:]
                )


def root_prefix() -> tuple[str, ...] | None:
    """What to put before a command to run it as root: nothing, sudo, or None when neither is possible."""
    if os.geteuid() == 0:
        return ()
    if shutil.which("sudo"):
        probe = subprocess.run(["sudo", "-n", "true"], capture_output=True, timeout=10, check=False)
        if probe.returncode == 0:
            return ("sudo", "-n")
    return None


def _os_release() -> dict[str, str]:
    path = Path("/etc/os-release")
    if not path.exists():
        return {}
    pairs = (line.partition("=") for line in path.read_text().splitlines())
    return {key: value.strip('"') for key, _, value in pairs}


def _output(command: Sequence[str]) -> str:
    """A command's stdout, or "" when it fails: used for settings that may be absent."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _brief(text: str) -> str:
    return " ".join(text.split())[-200:]


def main(argv: Sequence[str] | None = None) -> int:
    """Make sure that the base image is there and say what it is. Exit 0, or 3 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m k3eval_harness.sandbox.base_image", description=main.__doc__
    )
    parser.add_argument("ref", nargs="?", default=BASE_REF)
    parser.add_argument(
        "--remake", action="store_true", help="make it anew from this machine's packages and settings"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    log: Log = lambda text: print(f"base image: {text}", file=sys.stderr, flush=True)  # noqa: E731, T201 - the command's own output
    try:
        image = provide(EngineImages(_connect()), DebianMaker(), args.ref, log, remake=args.remake)
    except (ImageBuildError, EngineUnavailable) as error:
        print(f"k3eval: {error.message}", file=sys.stderr)  # noqa: T201 - the command's own output
        return 3
    data = {"ref": image.ref, "id": image.id, "origin": image.origin}
    print(json.dumps(data) if args.json else f"base image {image.ref}: {image.origin} ({image.id[7:19]})")  # noqa: T201 - likewise
    return 0


def _connect() -> DockerClient:
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=60)
        client.ping()
    except DockerException as error:
        raise EngineUnavailable(
            f"no Docker engine answers ({_brief(str(error))}): start one, or set DOCKER_HOST"
        ) from error
    return client


if __name__ == "__main__":
    sys.exit(main())

"""The base image: which settings of the host pass, and use / pull / make in every order of failure."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from k3eval_harness.errors import ImageBuildError
from k3eval_harness.sandbox import base_image
from k3eval_harness.sandbox.base_image import BASE_REF, Log, image_context, provide
from k3eval_harness.sandbox.host_settings import (
    container_pip_settings,
    host_certificates,
    parse_apt_options,
    parse_apt_sources,
    unusable_url,
)

PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


@dataclass
class FakeImages:
    """An engine in memory. ``pull_events``: what a pull says; an exception among them is raised."""

    present: dict[str, str] = field(default_factory=dict)
    pull_events: list[str | ImageBuildError] = field(default_factory=list)
    silence: threading.Event | None = None
    """When given, a pull says nothing until it is set, like an engine whose registry does not answer."""
    build_error: ImageBuildError | None = None
    built: list[tuple[str, bytes]] = field(default_factory=list)
    imported: list[bytes] = field(default_factory=list)

    def find(self, ref: str) -> str | None:
        return self.present.get(ref)

    def pull(self, ref: str) -> Iterator[str]:
        if self.silence:
            self.silence.wait(60)
        for event in self.pull_events:
            if isinstance(event, ImageBuildError):
                raise event
            yield event
        self.present[ref] = "sha256:pulled"

    def import_tar(self, stream: IO[bytes], ref: str) -> None:
        self.imported.append(stream.read())
        self.present[ref] = "sha256:root"

    def build(self, context: bytes, ref: str) -> None:
        if self.build_error:
            raise self.build_error
        self.built.append((ref, context))
        self.present[ref] = "sha256:made"

    def remove(self, ref: str) -> None:
        self.present.pop(ref, None)


@dataclass
class FakeMaker:
    reason: str | None = None
    failure: str | None = None

    def why_not(self) -> str | None:
        return self.reason

    @contextlib.contextmanager
    def root_tar(self, log: Log) -> Iterator[IO[bytes]]:
        yield io.BytesIO(b"root")
        if self.failure:
            raise ImageBuildError(self.failure)


def no_registry() -> list[str | ImageBuildError]:
    return [ImageBuildError("no such host")]


def provided(
    images: FakeImages, maker: FakeMaker, ref: str = BASE_REF, remake: bool = False
) -> tuple[str, list[str]]:
    said: list[str] = []
    return provide(images, maker, ref, said.append, remake=remake).origin, said


def test_a_present_image_is_used_without_a_word() -> None:
    images = FakeImages(present={BASE_REF: "sha256:old"}, pull_events=no_registry())
    assert provided(images, FakeMaker()) == ("present", [])


def test_a_registry_that_answers_is_used() -> None:
    images = FakeImages(pull_events=["Pulling", "Done"])
    origin, _ = provided(images, FakeMaker(reason="must not be asked"))
    assert (origin, images.built) == ("pulled", [])


def test_without_a_registry_the_image_is_made_and_nothing_else_is_left() -> None:
    images = FakeImages(pull_events=no_registry())
    origin, said = provided(images, FakeMaker())
    assert origin == "made"
    assert images.imported == [b"root"]
    assert images.present == {BASE_REF: "sha256:made"}
    assert any("no such host" in line for line in said)


def test_a_registry_that_says_nothing_is_given_up() -> None:
    silence = threading.Event()
    images = FakeImages(pull_events=no_registry(), silence=silence)
    said: list[str] = []
    try:
        assert provide(images, FakeMaker(), BASE_REF, said.append, first_word_s=0.05).origin == "made"
    finally:
        silence.set()
    assert any("no answer for 0.05 s" in line for line in said)


def test_remake_ignores_what_is_there() -> None:
    images = FakeImages(present={BASE_REF: "sha256:old"}, pull_events=["Done"])
    assert provided(images, FakeMaker(), remake=True)[0] == "made"


def test_a_machine_that_cannot_make_it_is_told_why() -> None:
    with pytest.raises(ImageBuildError, match=r"no such host.*cannot be made here: needs root"):
        provided(FakeImages(pull_events=no_registry()), FakeMaker(reason="needs root"))


def test_another_image_cannot_be_made() -> None:
    with pytest.raises(ImageBuildError, match=r"ubuntu:22\.04.*docker load"):
        provided(FakeImages(pull_events=no_registry()), FakeMaker(), ref="ubuntu:22.04")


@pytest.mark.parametrize("where", ["maker", "build"])
def test_a_failure_on_the_way_leaves_no_image(where: str) -> None:
    images = FakeImages(pull_events=no_registry())
    if where == "build":
        images.build_error = ImageBuildError("it broke")
    with pytest.raises(ImageBuildError, match="it broke"):
        provided(images, FakeMaker(failure="it broke" if where == "maker" else None))
    assert images.present == {}


def test_the_build_context_is_reproducible_and_holds_the_settings() -> None:
    context = image_context("root:1", "[global]\ntimeout = 9\n", PEM)
    assert context == image_context("root:1", "[global]\ntimeout = 9\n", PEM)
    with tarfile.open(fileobj=io.BytesIO(context)) as tar:
        files = {m.name: tar.extractfile(m).read().decode() for m in tar}  # type: ignore[union-attr] # all are files
    assert files["pip.conf"] == "[global]\ntimeout = 9\n"
    assert files["host.pem"] == PEM
    assert files["Dockerfile"].startswith("FROM root:1\n")
    assert 'LABEL k3eval.base="made"' in files["Dockerfile"]
    compile(files["trust_host.py"], "trust_host.py", "exec")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://packages.example/simple", None),
        ("https://user:secret@packages.example/simple", "credentials"),
        ("token@packages.example", "credentials"),
        ("file:///opt/index", "folder"),
        ("/opt/wheels", "folder"),
        ("http://localhost:3141/simple", "loopback"),
        ("127.0.0.1:3128", "loopback"),
    ],
)
def test_urls_that_are_of_no_use_in_a_container(url: str, reason: str | None) -> None:
    said = unusable_url(url)
    assert (said is None) if reason is None else (said is not None and reason in said)
    assert "secret" not in (said or "")


def test_pip_settings_that_pass() -> None:
    settings = container_pip_settings(
        "global.index-url='https://mirror.example/simple'\n"
        "global.extra-index-url='file:///opt/a https://extra.example/simple'\n"
        "global.trusted-host='mirror.example'\n"
        "global.timeout='30'\n"
        ":env:.default-timeout='180'\n"
    )
    assert settings.text().splitlines() == [
        "[global]",
        "cert = /etc/ssl/certs/ca-certificates.crt",
        "disable-pip-version-check = true",
        "root-user-action = ignore",
        "index-url = https://mirror.example/simple",
        "extra-index-url = https://extra.example/simple",
        "trusted-host = mirror.example",
        "timeout = 180",
    ]
    assert settings.notes == (
        "pip's extra-index-url of the host is left out: it is a folder of this machine",
    )


def test_pip_settings_that_do_not_pass() -> None:
    settings = container_pip_settings(
        "global.index-url='https://me:hunter2@private.example/simple'\n"
        "global.find-links='/opt/wheels'\n"
        "global.no-index='true'\n"
        "global.constraint='/etc/pip/constraints.txt'\n"
        "global.cert='/somewhere/else.pem'\n"
        "download.timeout='1'\n"
        "not a setting\n"
        "global.retries=not-quoted\n"
    )
    assert settings.options == ()
    assert len(settings.notes) == 3
    everything = settings.text() + "".join(settings.notes)
    assert "hunter2" not in everything
    assert "private.example" not in everything
    assert "else.pem" not in everything


def test_apt_sources_of_both_formats() -> None:
    sources = parse_apt_sources(
        """\
Types: deb deb-src
# a comment
URIs: http://mirror.example/debian
 http://second.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/k.gpg

Types: deb
URIs: https://vendor.example/apt
Suites: stable
Components: main

Types: deb
Enabled: no
URIs: http://off.example/debian
Suites: bookworm
Components: main

# deb http://commented.example/debian bookworm main
deb [arch=amd64 signed-by=/etc/apt/keyrings/x.gpg] http://one.example/debian bookworm-security main # note
deb http://two.example/debian trixie main
deb-src http://three.example/debian bookworm main
""",
        "bookworm",
    )
    key = "[signed-by=/usr/share/keyrings/k.gpg]"
    assert sources.lines == (
        f"deb {key} http://mirror.example/debian bookworm main contrib",
        f"deb {key} http://mirror.example/debian bookworm-updates main contrib",
        f"deb {key} http://second.example/debian bookworm main contrib",
        f"deb {key} http://second.example/debian bookworm-updates main contrib",
        "deb [signed-by=/etc/apt/keyrings/x.gpg] http://one.example/debian bookworm-security main",
    )
    assert sources.notes == ()


def test_apt_sources_with_credentials_or_on_this_machine_are_left_out() -> None:
    sources = parse_apt_sources(
        "deb https://u:hunter2@private.example/debian bookworm main\n"
        "deb file:/srv/mirror bookworm main\n"
        "deb http://ok.example/debian bookworm main\n",
        "bookworm",
    )
    assert sources.lines == ("deb http://ok.example/debian bookworm main",)
    assert len(sources.notes) == 2
    assert "hunter2" not in "".join(sources.notes)


def test_an_embedded_key_is_not_taken_for_a_path() -> None:
    text = "Types: deb\nURIs: http://m.example/d\nSuites: bookworm\nComponents: main\n"
    text += "Signed-By:\n -----BEGIN PGP\n .\n"
    assert parse_apt_sources(text, "bookworm").lines == ("deb http://m.example/d bookworm main",)


def test_apt_options_that_a_download_needs() -> None:
    dump = (
        'Acquire::http::Proxy "http://proxy.example:3128";\n'
        'Acquire::https::Proxy "http://u:hunter2@proxy.example:3128";\n'
        'Acquire::Check-Date "false";\n'
        'Acquire::http::Proxy "";\n'
        'APT::Install-Recommends "1";\n'
    )
    assert parse_apt_options(dump) == (
        'Acquire::http::Proxy "http://proxy.example:3128"',
        'Acquire::Check-Date "false"',
    )


def test_certificates_come_from_the_bundle_in_use(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text(f"# a comment\n{PEM}# private notes\n{PEM}")
    assert host_certificates({"SSL_CERT_FILE": str(bundle)}) == PEM * 2


def test_the_module_says_in_one_line_that_no_engine_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", base_image.__name__],
        env={"DOCKER_HOST": f"unix://{tmp_path}/none.sock", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("k3eval: no Docker engine answers")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.docker
def test_the_image_has_what_task_images_build_on() -> None:
    import docker

    client = docker.from_env(timeout=120)
    try:
        image = base_image.ensure_base_image(client)
        assert image.id.startswith("sha256:")
        output = client.containers.run(
            image.ref,
            [
                "sh",
                "-c",
                "python3 --version && python --version && pip --version && test ! -e /sys/class/net/eth0",
            ],
            network_mode="none",
            remove=True,
        )
    finally:
        client.close()
    assert output.decode().splitlines()[0].startswith("Python 3.11.")
    assert output.decode().splitlines()[2].startswith("pip ")

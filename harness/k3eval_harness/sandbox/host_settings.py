"""What of this machine's settings goes into the base image: apt sources, pip settings, CA certificates.

Pure functions over text. Nothing that holds a credential passes, and nothing that makes sense on this
machine only (folders, loopback addresses); each thing left out gives a note, which never quotes it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True)
class PipSettings:
    """The host's pip settings that make sense inside a container."""

    options: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """The container's pip.conf."""
        lines = [
            "[global]",
            f"cert = {CA_BUNDLE}",
            "disable-pip-version-check = true",
            "root-user-action = ignore",
        ]
        return "\n".join([*lines, *(f"{key} = {value}" for key, value in self.options)]) + "\n"


_PIP_URL_KEYS = ("index-url", "extra-index-url", "proxy")
_PIP_PLAIN_KEYS = ("trusted-host", "timeout", "retries")


def unusable_url(url: str) -> str | None:
    """Why a URL of the host is of no use inside a container, or None. The reason never quotes the URL."""
    if url.startswith(("/", ".", "~", "file:", "cdrom:", "copy:")):
        return "it is a folder of this machine"
    parts = urlsplit(url if "//" in url else f"//{url}")
    if "@" in parts.netloc:
        return "it holds credentials"
    if parts.hostname is None or parts.hostname == "localhost" or parts.hostname.startswith("127."):
        return "it is on this machine's loopback interface"
    return None


def container_pip_settings(listing: str) -> PipSettings:
    """Filter the output of ``pip config list``: the environment wins, no URL of this machine only."""
    found: dict[str, str] = {}
    for from_env in (False, True):
        for line in listing.splitlines():
            name, _, raw = line.partition("=")
            section, _, key = name.strip().rpartition(".")
            if (section == ":env:") != from_env or section not in (":env:", "global", "install"):
                continue
            try:
                value = ast.literal_eval(raw.strip())
            except (ValueError, SyntaxError):
                continue
            found[key.removeprefix("default-") if key == "default-timeout" else key] = str(value)
    options: list[tuple[str, str]] = []
    notes: list[str] = []
    for key in _PIP_URL_KEYS:
        kept = []
        for url in found.get(key, "").split():
            reason = unusable_url(url)
            if reason:
                notes.append(f"pip's {key} of the host is left out: {reason}")
            else:
                kept.append(url)
        if kept:
            options.append((key, " ".join(kept)))
    options += [(key, " ".join(found[key].split())) for key in _PIP_PLAIN_KEYS if found.get(key)]
    notes += [f"pip's {key} of the host is left out" for key in ("find-links", "no-index") if found.get(key)]
    return PipSettings(tuple(options), tuple(dict.fromkeys(notes)))


@dataclass(frozen=True)
class AptSources:
    """One-line apt sources for the suite, empty for the tool's own default mirror."""

    lines: tuple[str, ...]
    notes: tuple[str, ...]


def parse_apt_sources(text: str, suite: str) -> AptSources:
    """The binary sources in one-line or deb822 format that belong to a suite, as one-line sources.

    Other people's repositories (another suite name), disabled entries and URLs with credentials are left out.
    """
    lines: list[str] = []
    notes: list[str] = []

    def add(uris: Sequence[str], suites: Sequence[str], components: Sequence[str], signed_by: str) -> None:
        wanted = [s for s in suites if s == suite or s.startswith((f"{suite}-", f"{suite}/"))]
        for uri in uris:
            if wanted and (reason := unusable_url(uri)):
                notes.append(f"an apt source of the host is left out: {reason}")
                continue
            option = f"[signed-by={signed_by}] " if signed_by.startswith("/") else ""
            lines.extend(f"deb {option}{uri} {s} {' '.join(components)}".rstrip() for s in wanted)

    for paragraph in re.split(r"\n\s*\n", text):
        fields = _deb822(paragraph)
        if "uris" in fields:
            if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes") != "no":
                add(
                    fields["uris"].split(),
                    fields.get("suites", "").split(),
                    fields.get("components", "").split(),
                    fields.get("signed-by", ""),
                )
            continue
        for match in re.finditer(r"^deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)(.*)$", paragraph, re.MULTILINE):
            options = dict(item.partition("=")[::2] for item in (match[1] or "").split())
            components = match[4].partition("#")[0].split()
            add([match[2]], [match[3]], components, options.get("signed-by", ""))
    return AptSources(tuple(dict.fromkeys(lines)), tuple(dict.fromkeys(notes)))


def _deb822(paragraph: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    key = ""
    for line in paragraph.splitlines():
        if line.startswith("#"):
            continue
        if line[:1] in (" ", "\t"):
            if key:
                fields[key] += " " + line.strip()
        elif re.match(r"[A-Za-z][A-Za-z-]*:", line):
            name, _, value = line.partition(":")
            key = name.lower()
            fields[key] = value.strip()
    return fields


def parse_apt_options(dump: str) -> tuple[str, ...]:
    """The lines of ``apt-config dump`` that a download needs: proxies without credentials, date checks."""
    kept = []
    for match in re.finditer(
        r'^(Acquire::(?:https?::Proxy|Check-Valid-Until|Check-Date)) "([^"]*)";$', dump, re.MULTILINE
    ):
        is_proxy = match[1].endswith("Proxy")
        if match[2] and not (is_proxy and match[2] != "DIRECT" and unusable_url(match[2])):
            kept.append(f'{match[1]} "{match[2]}"')
    return tuple(kept)


_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)


def host_certificates(environ: Mapping[str, str]) -> str:
    """The PEM certificates of the bundle that this machine's tools trust ("" when there is none)."""
    for name in (environ.get("SSL_CERT_FILE"), environ.get("PIP_CERT"), CA_BUNDLE):
        if name and Path(name).is_file():
            return "".join(_PEM.findall(Path(name).read_text(encoding="ascii", errors="ignore")))
    return ""

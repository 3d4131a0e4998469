"""Real source code to cut prompts from: the sources of a package that is installed anyway.

Named with version and SHA-256 so that a figure can be repeated. The package is read, never imported.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from k3eval_harness.errors import UsageError

DEFAULT_PACKAGE = "pandas"
"""A dependency of k3eval, so it is always there, and large: some millions of tokens."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Concatenated sources of one package at one version."""

    package: str
    version: str
    sha256: str
    text: str

    def cut(self, start: int, length: int) -> str:
        """``length`` characters from ``start``; past the end it goes on at the beginning."""
        start %= len(self.text)
        piece = self.text[start : start + length]
        while len(piece) < length:
            piece += self.text[: length - len(piece)]
        return piece


def load_corpus(package: str = DEFAULT_PACKAGE) -> Corpus:
    """Read all of an installed package's ``.py`` files except its tests, in order of their paths.

    Raises:
        UsageError: the package is not installed or holds no Python sources.
    """
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise UsageError(f"package {package!r} is not installed; name one that is") from None
    parts: list[str] = []
    for file in sorted(distribution.files or (), key=str):
        if file.suffix == ".py" and not _is_test(file):
            source = Path(str(file.locate())).read_text(encoding="utf-8", errors="replace")
            parts.append(f"# {file}\n{source}\n")
    text = "".join(parts)
    if not text:
        raise UsageError(f"package {package!r} has no Python sources to cut prompts from; name another")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Corpus(package=package, version=distribution.version, sha256=digest, text=text)


def _is_test(file: PurePosixPath) -> bool:
    return "tests" in file.parts or ".." in file.parts

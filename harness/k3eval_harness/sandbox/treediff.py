"""What an agent changed: two tars of the same folder, before and after, compared on the host.

Nothing of the agent's runs for this: its git configuration, hooks and filters have no say.
"""

from __future__ import annotations

import difflib
import hashlib
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Final

TEXT_LIMIT: Final = 512 * 1024
"""Larger files are named, not shown."""
PATCH_LIMIT: Final = 4 * 1024**2
_SKIPPED: Final = frozenset(
    {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
)


@dataclass(frozen=True, slots=True)
class TreeDiff:
    """Relative names, sorted, and a unified diff of what can be shown."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    patch: str


@dataclass(frozen=True, slots=True)
class _Entry:
    member: str
    digest: str
    size: int


def diff_trees(before: IO[bytes], after: IO[bytes]) -> TreeDiff:
    """Compare two seekable tars whose entries share one top folder. Caches and ``.git`` are left out."""
    old, new = _read(before), _read(after)
    added = tuple(sorted(new.keys() - old.keys()))
    removed = tuple(sorted(old.keys() - new.keys()))
    changed = tuple(sorted(name for name in old.keys() & new.keys() if old[name].digest != new[name].digest))
    pieces: list[str] = []
    size = 0
    before.seek(0)
    after.seek(0)
    with tarfile.open(fileobj=before) as old_tar, tarfile.open(fileobj=after) as new_tar:
        for name in sorted((*added, *removed, *changed)):
            piece = _file_patch(
                name, _text(old_tar, old.get(name)), _text(new_tar, new.get(name)), name in old, name in new
            )
            size += len(piece)
            if size > PATCH_LIMIT:
                pieces.append(f"# {name} and what follows is left out: the patch is too long\n")
                break
            pieces.append(piece)
    return TreeDiff(added, removed, changed, "".join(pieces))


def _read(archive: IO[bytes]) -> Mapping[str, _Entry]:
    archive.seek(0)
    entries: dict[str, _Entry] = {}
    with tarfile.open(fileobj=archive) as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            if not name or member.isdir() or _SKIPPED.intersection(name.split("/")) or name.endswith(".pyc"):
                continue
            if member.isreg():
                file = tar.extractfile(member)
                content = hashlib.sha256(file.read() if file else b"").hexdigest()
            else:
                content = f"{member.type!r} {member.linkname}"
            executable = bool(member.mode & 0o100)
            entries[name] = _Entry(member.name, f"{content} {executable}", member.size)
    return entries


def _text(tar: tarfile.TarFile, entry: _Entry | None) -> list[str] | None:
    """Lines of a text file; empty for no file; None for what cannot be shown."""
    if entry is None:
        return []
    member = tar.getmember(entry.member)
    if member.issym():
        return [f"symbolic link to {member.linkname}\n"]
    file = tar.extractfile(member) if member.isreg() and entry.size <= TEXT_LIMIT else None
    if file is None:
        return None
    try:
        return file.read().decode("utf-8").splitlines(keepends=True)
    except UnicodeDecodeError:
        return None


def _file_patch(name: str, old: list[str] | None, new: list[str] | None, in_old: bool, in_new: bool) -> str:
    before, after = f"a/{name}" if in_old else "/dev/null", f"b/{name}" if in_new else "/dev/null"
    if old is None or new is None:
        return f"Binary or long files {before} and {after} differ\n"
    return "".join(_ended(difflib.unified_diff(old, new, before, after))) or f"mode of {name} changed\n"


def _ended(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"

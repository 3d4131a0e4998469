"""Tar streams between host and container: packing a folder, and checking what comes out of a container.

What an agent leaves behind is untrusted: names that climb or are absolute, device nodes and pipes are
dropped, set-user-id bits are cleared, and hard links may not point outside the tree.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, Final

from k3eval_harness.errors import SizeLimitExceeded

MAX_MEMBERS: Final = 500_000
_PERMISSIONS: Final = 0o777


@dataclass(frozen=True, slots=True)
class TreeStats:
    """What a checked tar holds."""

    files: int
    bytes: int
    dropped: tuple[str, ...]
    """Names left out, the first twenty."""


def pack(source: Path, sink: IO[bytes], name: str, *, ignore: Sequence[str] = ()) -> None:
    """Write a file or a folder with its content to ``sink`` as a tar owned by root, under the path ``name``.

    ``ignore`` holds glob patterns over relative paths and base names. Symlinks stay symlinks.
    """
    with tarfile.open(fileobj=sink, mode="w") as tar:
        tar.add(source, arcname=name, recursive=False, filter=_as_root)
        if source.is_file():
            return
        for path in sorted(_walk(source)):
            relative = path.relative_to(source).as_posix()
            if not any(fnmatch(relative, pattern) or fnmatch(path.name, pattern) for pattern in ignore):
                tar.add(path, arcname=f"{name}/{relative}", recursive=False, filter=_as_root)


def check(source: IO[bytes], sink: IO[bytes], limit: int) -> TreeStats:
    """Copy the tar ``source`` to ``sink`` without what must not cross over.

    Raises SizeLimitExceeded beyond ``limit`` bytes of content or MAX_MEMBERS entries.
    """
    files = size = 0
    dropped: list[str] = []
    links: set[PurePosixPath] = set()
    with (
        tarfile.open(fileobj=source, mode="r|") as incoming,
        tarfile.open(fileobj=sink, mode="w") as outgoing,
    ):
        for count, member in enumerate(incoming):
            if count >= MAX_MEMBERS:
                raise SizeLimitExceeded(f"more than {MAX_MEMBERS} files to copy out of the container")
            name = PurePosixPath(member.name)
            if not is_safe(member) or links.intersection(name.parents):
                dropped.append(member.name)
                continue
            if member.issym():
                links.add(name)
            size += member.size if member.isreg() else 0
            if size > limit:
                raise SizeLimitExceeded(f"more than {limit // 1024**2} MiB to copy out of the container")
            files += member.isreg()
            member.mode &= _PERMISSIONS
            member.pax_headers = {}  # extended attributes: capabilities of files must not cross over
            outgoing.addfile(member, incoming.extractfile(member) if member.isreg() else None)
    return TreeStats(files=files, bytes=size, dropped=tuple(dropped[:20]))


def is_safe(member: tarfile.TarInfo) -> bool:
    """Whether an entry may cross over: a file, folder or link whose name stays inside the tree."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\0" in member.name:
        return False
    if member.islnk():
        target = PurePosixPath(member.linkname)
        return not target.is_absolute() and ".." not in target.parts
    return member.isreg() or member.isdir() or member.issym()


def read_single_file(archive: IO[bytes], limit: int) -> bytes | None:
    """Content of the only entry of a tar if it is a regular file, its first ``limit`` bytes."""
    with tarfile.open(fileobj=archive, mode="r:") as tar:
        member = tar.next()
        if member is None or not member.isreg():
            return None
        file = tar.extractfile(member)
        return file.read(limit) if file else None


def extract(archive: IO[bytes], into: Path, limit: int) -> tuple[str, ...]:
    """Write the regular files of an untrusted tar below ``into``; returns their relative names.

    The archive's top folder is left out of the names; an archive of one file is written to ``into`` itself.
    Links and everything else are skipped. Raises SizeLimitExceeded beyond ``limit`` bytes.
    """
    written: list[str] = []
    size = 0
    with tarfile.open(fileobj=archive, mode="r|") as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts[1:]
            if not (member.isreg() and is_safe(member)):
                continue
            size += member.size
            if size > limit or len(written) > MAX_MEMBERS:
                raise SizeLimitExceeded(f"more than {limit // 1024**2} MiB to copy out of the container")
            file = tar.extractfile(member)
            if file is None:
                continue
            target = into.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as sink:
                shutil.copyfileobj(file, sink)
            written.append("/".join(parts))
    return tuple(written)


def _walk(source: Path) -> list[Path]:
    found: list[Path] = []
    for folder, dirs, names in os.walk(source):
        found += [Path(folder) / name for name in [*dirs, *names]]
    return found


def _as_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    info.mode |= 0o555 if info.isdir() or info.name.endswith(".sh") else 0o444
    return info

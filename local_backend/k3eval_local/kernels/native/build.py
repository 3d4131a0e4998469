"""Build and load the native step: C beside this file, the system compiler, a user cache, ctypes.

The library is built at first use (a few seconds) and kept under the source's hash, the compiler and the
instruction set, with a checksum that is verified before loading. Whatever is missing (compiler, AVX2, a
writable cache) gives ``NativeUnavailable`` with a one-line reason; the torch path serves then.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from k3eval_local.errors import LocalError

Isa = Literal["avx512", "avx2"]

_SOURCES = ("step.c", "kda.h", "mla.h", "gemm.h", "simd.h")
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
_ISA_FLAGS: dict[Isa, tuple[str, ...]] = {
    "avx512": (
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx2",
        "-mfma",
        "-mprefer-vector-width=512",
    ),
    "avx2": ("-mavx2", "-mfma"),
}
_NEEDS: dict[Isa, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma"}),
    "avx2": frozenset({"avx2", "fma"}),
}
PANEL: dict[Isa, int] = {"avx512": 64, "avx2": 32}
"""Outputs of a packed weight panel (NR in simd.h)."""
_BUILD_LIMIT_S = 120


class NativeUnavailable(LocalError):
    """The native step cannot be used here; the message is the one-line reason."""


@dataclass(frozen=True)
class NativeLibrary:
    """A loaded library and what it was built for."""

    handle: ctypes.CDLL
    isa: Isa
    path: Path


def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of this CPU as Linux names them; empty where they cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset()
    )


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/k3eval/native``, or the same under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k3eval" / "native"


def choose_isa(flags: frozenset[str]) -> Isa:
    """The widest instruction set that this CPU has.

    Raises:
        NativeUnavailable: neither AVX-512 nor AVX2 with FMA.
    """
    for isa in ("avx512", "avx2"):
        if _NEEDS[isa] <= flags:
            return isa
    raise NativeUnavailable("this CPU has neither AVX-512 nor AVX2 with FMA")


def load(*, isa: Isa | None = None, cache: Path | None = None, compiler: str | None = None) -> NativeLibrary:
    """Load the library, building it when the cache has none that fits.

    Args:
        isa: instruction set; the widest of this CPU by default.
        cache: folder of built libraries; ``default_cache()`` by default.
        compiler: C compiler; ``$CC``, else the first of cc, gcc, clang on PATH.

    Raises:
        NativeUnavailable: with the reason.
    """
    flags = cpu_flags()
    isa = isa or choose_isa(flags)
    if not _NEEDS[isa] <= flags:
        raise NativeUnavailable(
            f"this CPU lacks {', '.join(sorted(_NEEDS[isa] - flags))}, which the {isa} build needs"
        )
    folder = cache or default_cache()
    source = Path(__file__).parent
    digest = hashlib.sha256()
    for part in (*_FLAGS, *_ISA_FLAGS[isa], *((source / name).read_text() for name in _SOURCES)):
        digest.update(part.encode())
    path = folder / f"step-{isa}-{digest.hexdigest()[:20]}.so"
    if not intact(path):
        flags_of = (*_FLAGS, *_ISA_FLAGS[isa], "-I", str(source))
        compile_library(source / "step.c", path, flags_of, compiler=compiler)
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the built library does not load: {error}") from error
    if int(handle.k3_panel_width()) != PANEL[isa]:
        raise NativeUnavailable(
            f"the built library at {path.name} was built for another instruction set; delete it"
        )
    return NativeLibrary(handle, isa, path)


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def intact(path: Path) -> bool:
    """Whether the cached library is there and is what the build wrote: a damaged one could crash the
    process.
    """
    mark = path.with_suffix(".sha256")
    try:
        return mark.read_text().strip() == _checksum(path)
    except OSError:
        return False


def compile_library(source: Path, path: Path, flags: Sequence[str], *, compiler: str | None = None) -> None:
    """Compile one C file into the shared library ``path``, with its checksum beside it, all or nothing.

    Raises:
        NativeUnavailable: no compiler, a folder that cannot be written, or a compiler that fails.
    """
    name = (
        compiler or os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    )
    if name is None or shutil.which(name) is None:
        raise NativeUnavailable(f"no C compiler ({name or 'cc, gcc or clang'}) on PATH")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=path.parent)
    except OSError as error:
        raise NativeUnavailable(
            f"the cache folder {path.parent} cannot be written: {error.strerror}"
        ) from error
    with scratch as folder:
        built = Path(folder) / path.name
        command = [name, *flags, str(source), "-o", str(built), "-lm"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeUnavailable(f"the compiler {name} did not finish: {error}") from error
        if done.returncode or not built.exists():
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "no output")
            raise NativeUnavailable(f"the compiler {name} failed: {reason.strip()}")
        # the checksum goes first: a library without a matching one is never loaded
        mark = Path(folder) / "checksum"
        mark.write_text(_checksum(built))
        mark.replace(path.with_suffix(".sha256"))
        built.replace(path)

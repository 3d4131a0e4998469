"""What the commands of this package share: bad input is one line on stderr and exit code 2.

Ctrl-C ends with exit code 130. Nothing here needs torch, so that a wrong option is answered at once.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from k3eval_local.command import fail
from k3eval_local.errors import LocalError

INTERRUPTED = 130


@contextmanager
def one_line(hint: Callable[[], str] = str) -> Iterator[None]:
    """Turn expected errors of the block into one line and an exit code.

    ``hint`` says how to go on after Ctrl-C; it is asked only then.
    """
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted{hint()}", INTERRUPTED)
    except LocalError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot use {error.filename}: {error.strerror}" if error.filename else str(error))


def called(data: str) -> str:
    """The name of ``--data`` in errors."""
    return "standard input" if data == "-" else data


@contextmanager
def opened(data: str) -> Iterator[TextIO]:
    """The lines of ``--data``; ``-`` is standard input. Bytes that are no UTF-8 become lone surrogates."""
    try:
        source: str | int = 0 if data == "-" else data
        with open(  # a file number too
            source, encoding="utf-8", errors="surrogateescape", closefd=source != 0
        ) as lines:
            yield lines
    except OSError as error:
        fail(f"cannot read --data {data}: {error.strerror}; give a JSONL file of conversations")


def check_target(option: str, path: Path) -> None:
    """Refuse a file that cannot be written because of where it is."""
    if path.is_dir():
        fail(f"{option} {path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        fail(f"{option} {path}: there is no folder {path.parent}; make it first")


@contextmanager
def folder(out: Path) -> Iterator[None]:
    """Make ``out``; where the block fails, what was made goes again unless something is in it."""
    made: list[Path] = []
    try:
        try:
            made = [path for path in (out, *out.parents) if not path.exists()]
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):
                pass
        except FileExistsError:
            fail(f"--out {out} is a file; give a folder")
        except OSError as error:
            fail(f"cannot write in --out {out}: {error.strerror}; choose another folder")
        yield
    except BaseException:
        for path in made:
            try:
                path.rmdir()
            except OSError:
                break
        raise

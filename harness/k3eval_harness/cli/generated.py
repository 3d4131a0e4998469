"""Where the generated tasks of a run lie: shared by runs at the same time, gone where no job came to be."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "generated"
_TRIES = 100


@contextmanager
def generated_home(out: Path, seed: int) -> Iterator[Path]:
    """The folder of the series ``seed`` beside the results in ``out`` that name its tasks.

    What was made in it goes again at the end, with the folders above, unless something new lies in ``out``
    (a job, of this run or another one, which may name the tasks) or another run uses the series.
    """
    home = out / FOLDER / f"series-{seed}"
    absent = [folder for folder in (home, *home.parents) if not folder.exists()]
    jobs, tasks = _names(out) | {FOLDER}, _names(home)
    shared = _share(home)
    try:
        yield home
    finally:
        with suppress(OSError):
            if _names(out) <= jobs and _alone(shared):
                for name in _names(home) - tasks:
                    shutil.rmtree(home / name)
                for folder in absent:
                    folder.rmdir()
        os.close(shared)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _share(folder: Path) -> int:
    """Make the folder and hold it so that no other run removes it; returns the descriptor to close."""
    from k3eval_harness.errors import UsageError

    for _ in range(_TRIES):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another run removes it or one above
            continue
        except OSError as error:
            raise UsageError(
                f"cannot write tasks to {folder}: {error.strerror}; choose another --out"
            ) from None
        with suppress(OSError):  # a file system without locks: then nothing is ever removed
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        os.close(descriptor)
    raise UsageError(f"cannot write tasks to {folder}: it goes again and again; choose another --out")


def _alone(descriptor: int) -> bool:
    """Whether no other run holds the folder; from then on none can until the descriptor is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

"""From a name on the command line to tasks.

A selector is a path, a task's name, a family (a folder of tasks) or a glob over names and families.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from k3eval_harness.errors import UsageError
from k3eval_harness.task.load import Task, load_task

_DEPTH: Final = 3
_SHOWN: Final = 200


def default_roots() -> tuple[Path, ...]:
    """``./tasks`` where it exists, else the ``tasks`` folder of the checkout that this module is part of."""
    here = Path.cwd() / "tasks"
    if here.is_dir():
        return (here,)
    bundled = Path(__file__).resolve().parents[3] / "tasks"
    return (bundled,) if bundled.is_dir() else ()


def find_tasks(selector: str, *, roots: Sequence[Path] | None = None) -> tuple[Task, ...]:
    """Load the tasks that ``selector`` names, sorted by family and name.

    Raises UsageError when nothing matches (near names are listed), TaskError when a match cannot be read.
    """
    if not selector.strip():
        raise UsageError("an empty task name; see `k3eval tasks list`")
    as_path = Path(selector)
    try:
        as_path = as_path.expanduser()
        exists, is_folder = as_path.exists(), as_path.is_dir()
    except (OSError, RuntimeError, ValueError):  # longer than a path can be, no such user's home, a NUL byte
        exists = is_folder = False
    if exists and (os.sep in selector or selector in (".", "..")):
        return _from_path(as_path)
    folders = _task_folders(default_roots() if roots is None else roots)
    chosen = [folder for folder, names in folders.items() if any(_matches(selector, name) for name in names)]
    if not chosen and is_folder:
        return _from_path(as_path)
    if not chosen and "/" in selector:  # the full name in task.toml, as tables print it: org/name
        last = selector.rsplit("/", 1)[1]
        likely = [folder for folder in folders if last and _matches(last, folder.name)]
        chosen = [folder for folder in likely if _matches(selector, load_task(folder).name)]
    if not chosen:
        raise UsageError(_not_found(selector, folders))
    return tuple(load_task(folder) for folder in chosen)


def _from_path(path: Path) -> tuple[Task, ...]:
    if path.is_file() and path.name == "task.toml":
        path = path.parent
    if (path / "task.toml").exists() or not path.is_dir():
        return (load_task(path),)
    folders = list(_task_folders((path,)))
    if not folders:
        raise UsageError(f"{path}: no task.toml in this folder or below it")
    return tuple(load_task(folder) for folder in folders)


def _task_folders(roots: Sequence[Path]) -> dict[Path, tuple[str, ...]]:
    """Each task folder with the names it answers to: its own, its family's, ``family/name``."""
    found: dict[Path, tuple[str, ...]] = {}
    for root in roots:
        for folder, dirs, names in os.walk(root):
            here = Path(folder)
            relative = here.relative_to(root)
            if "task.toml" in names:
                dirs.clear()
                families = [parent.as_posix() for parent in relative.parents if parent.parts]
                found[here] = (here.name, relative.as_posix(), *families)
            elif len(relative.parts) >= _DEPTH:
                dirs.clear()
            dirs.sort()
    return found


def _matches(selector: str, name: str) -> bool:
    return name == selector.rstrip("/") or fnmatchcase(name, selector)


def _not_found(selector: str, folders: dict[Path, tuple[str, ...]]) -> str:
    from k3eval_harness.task.mini.folder import how_to_make

    if generated := how_to_make(selector):
        return f"no task named {selector!r} here, but it can be generated: {generated}"
    names = sorted({name for group in folders.values() for name in group})
    if not names:
        return f"no task named {selector!r}, and no tasks folder here; give a path or run in the checkout"
    selector = selector if len(selector) <= _SHOWN else f"{selector[:_SHOWN]}..."
    near = difflib.get_close_matches(selector, names, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else "; see `k3eval tasks list`"
    return f"no task named {selector!r}{hint}"

"""The folder of generated tasks: kept for a job, gone again where none came to be, shared with care."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3eval_harness.cli.generated import generated_home
from k3eval_harness.errors import UsageError


def interrupted(out: Path, *, made: str = "mini-3-00000", also: Path | None = None) -> None:
    """A run that makes a task and is then stopped; ``also`` appears meanwhile."""
    with generated_home(out, 3) as home:
        (home / made / "tests").mkdir(parents=True)
        if also is not None:
            also.mkdir()
        raise KeyboardInterrupt


def test_without_a_job_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_stays(tmp_path: Path) -> None:
    old = tmp_path / "generated" / "series-3" / "mini-3-00007"
    old.mkdir(parents=True)
    (tmp_path / "earlier-job").mkdir()
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path)
    assert list(old.parent.iterdir()) == [old]
    assert {path.name for path in tmp_path.iterdir()} == {"generated", "earlier-job"}


def test_with_a_job_the_tasks_stay(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path, also=tmp_path / "job")
    assert (tmp_path / "generated" / "series-3" / "mini-3-00000").is_dir()


def test_what_another_run_uses_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with generated_home(out, 3) as home:
        with pytest.raises(KeyboardInterrupt):
            interrupted(out)
        assert (home / "mini-3-00000").is_dir()
        (out / "job").mkdir()
    assert (home / "mini-3-00000").is_dir()


def test_a_series_can_be_made_again_after_it_went(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            interrupted(tmp_path / "out")
    with generated_home(tmp_path / "out", 3) as home:
        assert home.is_dir()
        (tmp_path / "out" / "job").mkdir()
    assert home.is_dir()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "generated").touch()
    with pytest.raises(UsageError, match="cannot write tasks to"), generated_home(tmp_path, 3):
        pass

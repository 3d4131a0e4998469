"""Generated projects: the same from the same seed, no two alike, each a fair task."""

from __future__ import annotations

import io
import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k3eval_harness.errors import UsageError
from k3eval_harness.task import lint_task, load_task
from k3eval_harness.task.mini import (
    KINDS,
    MiniProject,
    NoiseShape,
    Shape,
    generate,
    make_project,
    write_episodes,
)
from k3eval_harness.task.mini import folder as mini_folder
from k3eval_harness.task.mini.check import prove
from k3eval_harness.task.mini.project import _draw_function, differs, run
from k3eval_harness.task.mini.words import known_words, rare_words

SERIES = 31


@pytest.fixture(scope="module")
def projects() -> list[MiniProject]:
    return [make_project(SERIES, index) for index in range(150)]


def test_equal_seeds_give_equal_projects_and_no_two_are_alike(projects: list[MiniProject]) -> None:
    assert [make_project(SERIES, at).files() for at in (0, 7)] == [projects[at].files() for at in (0, 7)]
    assert len({tuple(project.files().items()) for project in projects}) == len(projects)
    assert make_project(SERIES + 1, 0).files() != projects[0].files()


def test_a_parameter_may_bear_the_name_of_a_local_variable() -> None:
    names = ("total", "item", "count", "value", "number", "entry", "found", "step")
    for seed in range(300):
        words = itertools.cycle(names)
        function, visible, hidden = _draw_function(random.Random(seed), words, None)
        assert run(function.source(), function.name, visible.arguments) == visible.expected
        assert hidden


def test_every_kind_of_bug_occurs(projects: list[MiniProject]) -> None:
    assert len(KINDS) >= 11
    assert {project.kind for project in projects} == set(KINDS)


def test_the_hidden_cases_tell_the_right_line_from_every_wrong_one(projects: list[MiniProject]) -> None:
    for project in projects:
        for module in project.modules:
            for function, visible, hidden in zip(
                module.functions, module.visible, module.hidden, strict=True
            ):
                assert all(
                    run(function.source(), function.name, case.arguments) == case.expected for case in hidden
                )
                assert all(case.arguments != visible.arguments for case in hidden)
                for slip in function.slips:
                    wrong = function.source(slip)
                    assert any(
                        differs(run(wrong, function.name, case.arguments), case.expected) for case in hidden
                    )


def test_the_text_to_replace_is_unique_and_the_edit_restores_the_function(
    projects: list[MiniProject],
) -> None:
    for project in projects:
        fixed = project.files(project.fix)[project.path]
        assert project.broken.source() in fixed
        assert project.files()[project.path].count(project.fix.old) == 1


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1, 2])
def test_pytest_agrees(index: int) -> None:
    project = make_project(SERIES, index, Shape(modules=(2, 2), noise=NoiseShape(share=1.0)))
    proof = prove(project)
    assert proof.near_misses
    assert proof.sound


def test_a_proof_fails_for_a_task_that_is_not_fair() -> None:
    proof = prove(make_project(SERIES, 3, Shape(modules=(1, 1), functions=(1, 1))))
    assert proof.sound
    assert not proof.__class__(True, True, False, True, ()).sound
    assert not proof.__class__(False, True, False, True, (False, True)).sound


def test_names_come_from_the_words_asked_for() -> None:
    rare = make_project(SERIES, 0, Shape(rare=True))
    words = {word for function in rare.modules[0].functions for word in function.name.split("_")}
    assert words <= set(rare_words())
    assert not set(known_words()) & set(rare_words())
    invented = make_project(SERIES, 0, Shape(invented=1.0))
    words = {word for function in invented.modules[0].functions for word in function.name.split("_")}
    assert not words & (set(known_words()) | set(rare_words()))


def test_generated_folders_load_clean_and_share_one_image(tmp_path: Path) -> None:
    folders = generate(3, SERIES, tmp_path / "one")
    tasks = [load_task(folder) for folder in folders]
    assert [lint_task(task) for task in tasks] == [()] * 3
    assert {task.family for task in tasks} == {"repo-fix-mini"}
    assert len({task.dockerfile.read_text() for task in tasks}) == 1
    again = generate(3, SERIES, tmp_path / "two")
    assert [load_task(folder).digest for folder in again] == [task.digest for task in tasks]


def test_bad_requests_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        generate(0, 1, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        generate(1, 1, tmp_path / "file")
    with pytest.raises(UsageError, match="at least 1"):
        write_episodes(0, 1, io.StringIO())


def test_episodes_are_the_same_from_the_same_seed_and_can_be_made_in_parts() -> None:
    whole, first, second = io.StringIO(), io.StringIO(), io.StringIO()
    assert write_episodes(4, 5, whole) == 4
    write_episodes(2, 5, first)
    write_episodes(2, 5, second, start=2)
    assert whole.getvalue() == first.getvalue() + second.getvalue()
    assert [json.loads(line)["id"] for line in whole.getvalue().splitlines()] == [
        f"repo-fix-mini/5/{index}" for index in range(4)
    ]


def test_a_task_that_is_there_is_not_touched_and_another_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = generate(1, SERIES, tmp_path)[0]
    before = folder.stat().st_ino
    assert generate(1, SERIES, tmp_path) == (folder,)
    assert folder.stat().st_ino == before
    whole = (folder / "instruction.md").read_text()
    (folder / "instruction.md").write_text("changed")
    (folder / "more").touch()
    generate(1, SERIES, tmp_path)
    assert folder.stat().st_ino != before
    assert (folder / "instruction.md").read_text() == whole
    assert not (folder / "more").exists()
    (folder / "tests" / "test.sh").chmod(0o644)
    generate(1, SERIES, tmp_path)
    assert (folder / "tests" / "test.sh").stat().st_mode & 0o777 == 0o755
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("same", [True, False])
def test_a_folder_that_appears_meanwhile_stays_where_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    files = {"a.txt": "1", "deep/run.sh": "true\n"}
    folder = tmp_path / "task"
    write = mini_folder.write_files

    def slow(made: Path, texts: dict[str, str]) -> None:
        write(made, texts)
        write(folder, files if same else files | {"a.txt": "2"})

    monkeypatch.setattr(mini_folder, "write_files", slow)
    mini_folder.place(folder, files)
    assert (folder / "a.txt").read_text() == "1"
    assert list(tmp_path.iterdir()) == [folder]


def test_runs_at_once_share_the_tasks_of_a_series(tmp_path: Path) -> None:
    def digests(_: int) -> list[str]:
        return [load_task(folder).digest for folder in generate(3, SERIES, tmp_path)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(digests, range(16)))
    assert all(each == found[0] for each in found)
    assert len(list(tmp_path.iterdir())) == 3

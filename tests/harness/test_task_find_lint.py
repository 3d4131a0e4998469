"""From names to tasks, and remarks about tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness_tasks import TEST, TOML, write_task

from k3eval_harness.errors import TaskError, UsageError
from k3eval_harness.task import find_tasks, lint_task, load_task, unsupported
from k3eval_harness.task.dockerfile import base_references, stage_names
from k3eval_harness.task.env import resolve_env


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for family, name in (("fix", "alpha"), ("fix", "beta"), ("mini", "gamma")):
        write_task(tmp_path / "tasks" / family, name)
    return tmp_path / "tasks"


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("alpha", ["alpha"]),
        ("fix", ["alpha", "beta"]),
        ("fix/", ["alpha", "beta"]),
        ("fix/beta", ["beta"]),
        ("*a", ["alpha", "beta", "gamma"]),
        ("mini/*", ["gamma"]),
    ],
)
def test_names_families_and_globs(root: Path, selector: str, names: list[str]) -> None:
    assert [task.name for task in find_tasks(selector, roots=[root])] == names


def test_paths_need_no_root(root: Path) -> None:
    assert [task.name for task in find_tasks(str(root / "fix" / "alpha"), roots=[])] == ["alpha"]
    assert [task.name for task in find_tasks(str(root / "fix"), roots=[])] == ["alpha", "beta"]
    assert [task.name for task in find_tasks(str(root / "mini/gamma/task.toml"), roots=[])] == ["gamma"]


def test_the_full_name_that_tables_print_is_found() -> None:
    (task,) = find_tasks("k3eval/networkx-subclass-args")
    assert task.name == "k3eval/networkx-subclass-args"
    with pytest.raises(UsageError, match="no task named"):
        find_tasks("other/networkx-subclass-args")


def test_an_unknown_name_lists_near_ones(root: Path) -> None:
    with pytest.raises(UsageError, match="no task named 'alpah'; did you mean alpha"):
        find_tasks("alpah", roots=[root])
    with pytest.raises(UsageError, match="see `k3eval tasks list`"):
        find_tasks("zzz", roots=[root])
    with pytest.raises(UsageError, match="an empty task name"):
        find_tasks(" ", roots=[root])
    (root / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no task\.toml in this folder"):
        find_tasks(str(root / "empty"), roots=[])


@pytest.mark.parametrize("selector", ["/" + "x" * 5000, "x" * 5000, "~nobody-of-that-name/x", "a\0b/"])
def test_what_no_file_can_be_called_is_an_unknown_name(root: Path, selector: str) -> None:
    with pytest.raises(UsageError, match="no task named") as raised:
        find_tasks(selector, roots=(root,))
    assert len(raised.value.message) < 300


def test_a_sound_task_has_no_errors_or_warnings(tmp_path: Path) -> None:
    toml = TOML.replace("docker_image", "#")
    task = load_task(write_task(tmp_path, toml=toml, dockerfile="FROM debian:12.7\n"))
    assert [finding for finding in lint_task(task) if finding.level != "info"] == []
    assert unsupported(task) is None


@pytest.mark.parametrize(
    ("change", "level", "where", "words"),
    [
        ({"dockerfile": None}, "error", "environment/Dockerfile", "missing"),
        ({"test": None}, "error", "tests/test.sh", "missing"),
        ({"solve": None}, "warning", "solution/solve.sh", "missing"),
        ({"dockerfile": "FROM debian\n"}, "warning", "environment/Dockerfile", "no fixed version"),
        ({"dockerfile": "FROM a:latest\n"}, "warning", "environment/Dockerfile", "no fixed version"),
        ({"test": TEST + "pip install x\n"}, "warning", "tests/test.sh:8", "needs a network"),
        ({"test": TEST + "apt-get install -y curl\n"}, "warning", "tests/test.sh:8", "needs a network"),
        ({"test": "#!/bin/sh\ntrue\n"}, "warning", "tests/test.sh", "nothing in tests/ writes"),
        ({"toml": ""}, "warning", "task.toml: agent.timeout_sec", "no time limit"),
        ({"toml": "[agent]\nuser = 'root'\n"}, "warning", "task.toml: agent.user", "runs as root"),
        ({"toml": "[agent]\ntimeoutsec = 1\n"}, "warning", "task.toml: agent.timeoutsec", "unknown key"),
        ({"toml": "[environment]\nnetwork_mode = 'public'\n"}, "warning", "network_mode", "no network"),
        ({"toml": "[environment]\nskills_dir = '/skills'\n"}, "warning", "skills_dir", "no skills here"),
        ({"toml": "[[steps]]\nname = 's'\n"}, "error", "task.toml: steps", "multi-step"),
        ({"toml": "[environment]\nos = 'windows'\n"}, "error", "environment.os", "Windows"),
        (
            {"toml": "[metadata.k3eval]\noracle_stage = 'o'\noracle_files = ['/f/x']\n"},
            "error",
            "environment/Dockerfile",
            "no stage named o",
        ),
    ],
)
def test_each_remark(
    tmp_path: Path, change: dict[str, str | None], level: str, where: str, words: str
) -> None:
    parts: dict[str, str | None] = {
        "toml": TOML.replace("docker_image", "#"),
        "dockerfile": "FROM debian:12.7\n",
        "test": TEST,
        "solve": "true\n",
    }
    parts |= change
    task = load_task(
        write_task(
            tmp_path,
            toml=parts["toml"] or "",
            dockerfile=parts["dockerfile"],
            test=parts["test"],
            solve=parts["solve"],
        )
    )
    matching = [item for item in lint_task(task) if where in item.where and words in item.message]
    assert [item.level for item in matching] == [level]
    if level == "error" and words != "no stage named o":
        assert words in (unsupported(task) or "")


def test_a_harborignore_is_said_to_have_no_effect(tmp_path: Path) -> None:
    folder = write_task(tmp_path, toml=TOML)
    (folder / ".harborignore").write_text("*.log\n")
    assert [item.level for item in lint_task(load_task(folder)) if item.where == ".harborignore"] == [
        "warning"
    ]


def test_an_offline_install_in_tests_is_fine(tmp_path: Path) -> None:
    test = TEST + "pip install --no-index --find-links /wheels x\n# pip install y\n"
    task = load_task(write_task(tmp_path, test=test))
    assert not [item for item in lint_task(task) if "network at grade time" in item.message]


def test_dockerfile_bases_and_stages() -> None:
    text = "ARG V=3.11\nFROM --platform=linux/amd64 python:${V}-slim AS Base\nFROM base AS two\nFROM two\n"
    assert base_references(text) == ("python:3.11-slim",)
    assert stage_names(text) == ("Base", "two")


def test_host_values_are_filled_in_and_credentials_refused() -> None:
    host = {"A": "1", "MY_API_KEY": "sesame"}
    assert resolve_env({"X": "a${A}b", "Y": "${B:-two}"}, host, "t") == {"X": "a1b", "Y": "two"}
    with pytest.raises(TaskError, match="looks like a credential"):
        resolve_env({"X": "${MY_API_KEY}"}, host, "t")
    with pytest.raises(TaskError, match="not set on this machine"):
        resolve_env({"X": "${NOPE}"}, host, "t")

"""The bundled repo-fix tasks: shared parts as rendered, faults that end in reward 0, no leak of the fix."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from docker import DockerClient

ROOT = Path(__file__).resolve().parents[2]
TASKS = sorted(path.parent for path in (ROOT / "tasks" / "repo-fix").glob("*/task.toml"))
GRADE = ROOT / "scripts" / "repo_fix" / "grade.py"


def test_five_tasks_one_of_them_large() -> None:
    sizes = [tomllib.loads((t / "task.toml").read_text())["metadata"]["k3eval"]["size_lines"] for t in TASKS]
    assert len(sizes) >= 5
    assert max(sizes) > 50_000


def test_shared_parts_are_as_rendered() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "repo_fix_tasks.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_check_finds_a_difference(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text((TASKS[0] / "task.toml").read_text())
    command = [sys.executable, str(ROOT / "scripts" / "repo_fix_tasks.py"), "--check", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert not (tmp_path / "environment").exists()


@pytest.fixture
def verdict(tmp_path: Path) -> Iterator[Path]:
    """A folder with grade.py, its list of expected tests and a junit report in which all of them passed."""
    (tmp_path / "grade.py").write_text(GRADE.read_text())
    (tmp_path / "expected.json").write_text(json.dumps({"fail_to_pass": ["a"], "pass_to_pass": ["b[1]"]}))
    (tmp_path / "junit.xml").write_text('<x><testcase name="a"/><testcase name="b[1]"/></x>')
    (tmp_path / "regression.xml").write_text(
        '<x><testcase name="c"/><testcase name="d"><skipped/></testcase></x>'
    )
    return tmp_path


def graded(folder: Path, hidden: str = "0", regression: str = "0") -> str:
    subprocess.run(
        [sys.executable, str(folder / "grade.py"), hidden, regression, str(folder)],
        capture_output=True,
        timeout=60,
        check=True,
    )
    return (folder / "reward.txt").read_text().strip()


def test_reward_when_all_is_well(verdict: Path) -> None:
    assert graded(verdict) == "1"


@pytest.mark.parametrize(("hidden", "regression"), [("1", "0"), ("0", "1"), ("0", "none"), ("124", "none")])
def test_no_reward_for_an_exit_code(verdict: Path, hidden: str, regression: str) -> None:
    assert graded(verdict, hidden, regression) == "0"


@pytest.mark.parametrize("child", ["failure", "error", "skipped"])
def test_no_reward_for_a_test_that_did_not_pass(verdict: Path, child: str) -> None:
    report = f'<x><testcase name="a"/><testcase name="b[1]"><{child}/></testcase></x>'
    (verdict / "junit.xml").write_text(report)
    assert graded(verdict) == "0"
    assert json.loads((verdict / "report.json").read_text())["not_passed"] == ["b[1]"]


def test_no_reward_without_a_report_or_for_a_test_that_never_ran(verdict: Path) -> None:
    (verdict / "junit.xml").write_text('<x><testcase name="a"/></x>')
    assert graded(verdict) == "0"
    (verdict / "junit.xml").write_text("<x><testcase")
    assert graded(verdict) == "0"
    (verdict / "junit.xml").unlink()
    assert graded(verdict) == "0"


@pytest.mark.parametrize(
    "report",
    ["<x/>", '<x><testcase name="c"/><testcase name="d"><failure/></testcase></x>', "<x><testcase", None],
)
def test_no_reward_for_a_regression_run_that_shows_nothing(verdict: Path, report: str | None) -> None:
    path = verdict / "regression.xml"
    path.unlink() if report is None else path.write_text(report)
    assert graded(verdict) == "0"


@pytest.mark.docker
@pytest.mark.slow
def test_the_agents_image_holds_nothing_of_the_fix() -> None:
    import docker

    from k3eval_harness.sandbox.base_image import ensure_base_image

    task = next(t for t in TASKS if t.name == "tomlkit-emptied-aot")
    facts = tomllib.loads((task / "task.toml").read_text())["metadata"]["k3eval"]
    client = docker.from_env(timeout=300)
    try:
        ensure_base_image(client)
        oracle = _files(client, task, "oracle", "/tmp/tree")
        fixed = {oracle[f"tree/{name}"] for name in facts["files_changed_by_fix"]}
        agent = _files(client, task, None, "/")
    finally:
        client.close()
    assert f"app/{facts['files_changed_by_fix'][0]}" in agent
    assert not fixed & set(agent.values())
    assert not [n for n in agent if "/.cache/pip/" in n or n.startswith(("solution/", "tmp/"))]


def _files(client: DockerClient, task: Path, target: str | None, where: str) -> dict[str, str]:
    """Regular files below a path of the built image, with the sha256 of each."""
    image, _ = client.images.build(path=str(task / "environment"), target=target, rm=True, forcerm=True)
    container = client.containers.create(image.id, network_mode="none", labels={"k3eval.test": "1"})
    try:
        stream, _ = container.get_archive(where)
        data = io.BytesIO(b"".join(stream))
    finally:
        container.remove(force=True)
    found = {}
    with tarfile.open(fileobj=data) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                found[member.name.removeprefix("./").lstrip("/")] = hashlib.sha256(content.read()).hexdigest()
    return found

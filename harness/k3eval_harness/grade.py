"""Grading in a fresh container that the agent never touched: only the captured work tree crosses over.

The order is fixed: kill every process of the agent, copy the tree out of the dead container, check it, lay
it over a new container of the same image, upload the hidden tests there, run them, kill everything, read the
reward.
"""

from __future__ import annotations

import json
import math
import os
import posixpath
import shlex
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k3eval_harness.errors import SandboxError, SizeLimitExceeded, TaskError, VerifierError
from k3eval_harness.results.layout import write_text
from k3eval_harness.results.schema import Outcome, TestCounts, main_reward
from k3eval_harness.sandbox.archive import TreeStats, check, extract
from k3eval_harness.sandbox.protocol import Sandbox, SandboxProvider, SandboxSpec, Shell
from k3eval_harness.sandbox.treediff import diff_trees
from k3eval_harness.task import Task
from k3eval_harness.task.env import resolve_env

TREE_LIMIT: Final = 2 * 1024**3
LOGS_LIMIT: Final = 64 * 1024**2
LOGS_ARTIFACTS: Final = "/logs/artifacts"
"""Harbor's convention: always collected, and seen by the hidden tests."""
REWARD_BYTES: Final = 64 * 1024
_STEP_SECONDS: Final = 120.0
_MAX_NAMES: Final = 200


@dataclass(frozen=True, slots=True)
class CapturedPath:
    """One path of the agent's container, checked, as a tar on the host."""

    path: str
    archive: Path | None
    """None when the agent removed it."""
    stats: TreeStats


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one work tree."""

    outcome: Outcome
    rewards: Mapping[str, float]
    tests: TestCounts | None
    detail: str | None


def capture_paths(task: Task, workdir: str) -> tuple[str, ...]:
    """What crosses over: ``capture`` or else the working directory, declared artifacts, LOGS_ARTIFACTS."""
    chosen = list(task.extras.capture) or [workdir]
    chosen += [item.source for item in task.artifacts if item.source.startswith("/")]
    chosen.append(LOGS_ARTIFACTS)
    paths = dict.fromkeys(posixpath.normpath(path) for path in chosen)
    if "/" in paths:
        raise TaskError(
            f"{task.path / 'task.toml'}: the working directory is /, which cannot be captured; "
            "set [environment] workdir or [metadata.k3eval] capture"
        )
    return tuple(path for path in paths if not any(path.startswith(f"{other}/") for other in paths))


def capture(sandbox: Sandbox, paths: tuple[str, ...], folder: Path) -> tuple[CapturedPath, ...]:
    """Copy ``paths`` out of a frozen sandbox into tars below ``folder``.

    Raises SizeLimitExceeded when the agent left more than TREE_LIMIT bytes.
    """
    captured: list[CapturedPath] = []
    for number, path in enumerate(paths):
        with tempfile.TemporaryFile(dir=folder) as raw:
            if not sandbox.download(path, raw, TREE_LIMIT + TREE_LIMIT // 4):
                captured.append(CapturedPath(path, None, TreeStats(0, 0, ())))
                continue
            raw.seek(0)
            archive = folder / f"{number}.tar"
            with archive.open("wb") as checked:
                stats = check(raw, checked, TREE_LIMIT)
        captured.append(CapturedPath(path, archive, stats))
    return tuple(captured)


def grade(
    task: Task,
    provider: SandboxProvider,
    spec: SandboxSpec,
    captured: tuple[CapturedPath, ...],
    verifier_dir: Path,
    changes: Path,
    check_cancelled: Callable[[], None],
) -> Grade:
    """Run the hidden tests over ``captured`` in a new container described by ``spec``.

    What the tests leave in /logs/verifier is copied to ``verifier_dir``, what the agent changed is written to
    ``changes`` as a patch. Raises VerifierError when there is no usable reward, SandboxError when the
    container fails.
    """
    verifier = task.config.verifier
    user = str(verifier.user) if verifier.user is not None else "0"
    env = resolve_env(verifier.env, os.environ, f"{task.path / 'task.toml'}: verifier.env")
    sandbox = provider.start(spec)
    try:
        root = sandbox.open_shell(user="0", cwd="/")
        _write_changes(sandbox, captured, changes)
        _lay_over(sandbox, root, captured)
        check_cancelled()
        owner = shlex.quote(user)
        _must(
            root, f"rm -rf /logs/verifier /tests && mkdir -p /logs/verifier && chown {owner} /logs/verifier"
        )
        sandbox.upload(task.tests_dir, "/tests", ignore=("__pycache__", "*.pyc"))
        root.close()
        shell = sandbox.open_shell(user=user, env=env)
        start = time.monotonic()
        result = shell.run(
            "/tests/test.sh > /logs/verifier/test-stdout.txt 2>&1", timeout_s=verifier.timeout_sec
        )
        seconds = time.monotonic() - start
        # everything dies before the reward is read: what the tests started cannot change it any more
        sandbox.freeze()
        check_cancelled()
        left = _collect(sandbox, verifier_dir)
        if result.timed_out:
            raise VerifierError(
                f"the hidden tests ran longer than {verifier.timeout_sec:g} s (timeout_sec in [verifier])"
            )
        rewards = read_rewards({name: verifier_dir / name for name in left})
        if rewards is None:
            raise VerifierError(
                f"the hidden tests left no /logs/verifier/reward.txt or reward.json after {seconds:.0f} s"
                f" (exit code {result.exit_code}){_killed(sandbox)}"
            )
    finally:
        sandbox.close()
    tests = read_junit(verifier_dir / "junit.xml")
    reward = main_reward(rewards)
    passed = reward >= task.extras.pass_threshold
    detail = None if passed else f"reward {reward:g} below {task.extras.pass_threshold:g}"
    return Grade(Outcome.PASSED if passed else Outcome.FAILED, rewards, tests, detail)


def read_rewards(files: Mapping[str, Path]) -> dict[str, float] | None:
    """Harbor's rule: ``reward.json`` (a flat object of numbers) first, else ``reward.txt`` (one number).

    ``files`` maps the names found in /logs/verifier to host paths. None when neither exists. Raises
    VerifierError for anything else, NaN and infinity included.
    """
    raw = _reward_bytes(files, "reward.json")
    if raw is not None:
        try:
            data = json.loads(raw)
        except ValueError as error:
            raise VerifierError(f"reward.json is not JSON: {error}") from error
        if not isinstance(data, dict) or not data:
            raise VerifierError("reward.json must be a flat object of numbers, with at least one")
        return {str(key): _number(value, f"reward.json: {key}") for key, value in data.items()}
    raw = _reward_bytes(files, "reward.txt")
    if raw is None:
        return None
    text = raw.decode("utf-8", errors="replace").strip()
    if not text:
        raise VerifierError("reward.txt is empty")
    try:
        return {"reward": _number(float(text), "reward.txt")}
    except ValueError as error:
        raise VerifierError(f"reward.txt holds no number: {text[:80]!r}") from error


def _reward_bytes(files: Mapping[str, Path], name: str) -> bytes | None:
    path = files.get(name)
    if path is None:
        return None
    if path.stat().st_size > REWARD_BYTES:
        raise VerifierError(f"{name} is longer than {REWARD_BYTES} bytes")
    return path.read_bytes()


def read_junit(path: Path) -> TestCounts | None:
    """Counts of a JUnit XML report; None when there is none or it cannot be read."""
    if not path.is_file():
        return None
    try:
        root = ET.parse(path).getroot()  # noqa: S314 - expat has guards against entity bombs and the file is size-limited
    except (ET.ParseError, OSError):
        return None
    passed = failed = skipped = 0
    names: list[str] = []
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed += 1
            names.append("::".join(part for part in (case.get("classname"), case.get("name")) if part))
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return TestCounts(passed=passed, failed=failed, skipped=skipped, failed_names=tuple(names[:_MAX_NAMES]))


def _write_changes(sandbox: Sandbox, captured: tuple[CapturedPath, ...], changes: Path) -> None:
    """Compare each captured tree with the image's own, before it is laid over."""
    patches: list[str] = []
    for item in captured:
        if item.archive is None or item.path == LOGS_ARTIFACTS:
            continue
        with tempfile.TemporaryFile() as before, item.archive.open("rb") as after:
            if sandbox.download(item.path, before, TREE_LIMIT):
                patches.append(diff_trees(before, after).patch)
    write_text(changes, "".join(patches))


def _lay_over(sandbox: Sandbox, root: Shell, captured: tuple[CapturedPath, ...]) -> None:
    """Replace each captured path: what the agent deleted must not reappear from the image."""
    for item in captured:
        if item.path == LOGS_ARTIFACTS and not item.stats.files:
            continue
        parent = posixpath.dirname(item.path)
        _must(root, f"rm -rf -- {shlex.quote(item.path)} && mkdir -p -- {shlex.quote(parent)}")
        if item.archive is not None:
            with item.archive.open("rb") as archive:
                sandbox.upload_tar(archive, parent)
    _must(root, f"mkdir -p -- {shlex.quote(sandbox.workdir)}")


def _must(shell: Shell, command: str) -> None:
    result = shell.run(command, timeout_s=_STEP_SECONDS)
    if result.exit_code != 0:
        raise SandboxError(f"preparing the grading container failed: {' '.join(result.text.split())[-200:]}")


def _collect(sandbox: Sandbox, verifier_dir: Path) -> tuple[str, ...]:
    """Copy /logs/verifier to the host; returns the names of the regular files in it."""
    with tempfile.TemporaryFile() as archive:
        try:
            if not sandbox.download("/logs/verifier", archive, LOGS_LIMIT):
                return ()
            archive.seek(0)
            return extract(archive, verifier_dir, LOGS_LIMIT)
        except SizeLimitExceeded as error:
            raise VerifierError(f"the hidden tests wrote too much: {error.message}") from error


def _killed(sandbox: Sandbox) -> str:
    return "; the memory limit killed a process" if sandbox.oom_kills() else ""


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise VerifierError(f"{where} must be a finite number, not {value!r}")
    return float(value)

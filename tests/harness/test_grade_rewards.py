"""Reward files and reports: what counts as a verdict and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness_tasks import TOML, write_task

from k3eval_harness.errors import TaskError, VerifierError
from k3eval_harness.grade import LOGS_ARTIFACTS, capture_paths, main_reward, read_junit, read_rewards
from k3eval_harness.task import load_task


def _files(folder: Path, **contents: str) -> dict[str, Path]:
    files = {}
    for name, text in contents.items():
        path = folder / name.replace("_", ".")
        path.write_text(text)
        files[path.name] = path
    return files


def test_json_comes_before_text(tmp_path: Path) -> None:
    files = _files(tmp_path, reward_json='{"reward": 1, "style": 0.5}', reward_txt="0")
    assert read_rewards(files) == {"reward": 1.0, "style": 0.5}
    assert read_rewards(_files(tmp_path, reward_txt=" 0.25\n")) == {"reward": 0.25}
    assert read_rewards({}) is None


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("reward_json", "{", "not JSON"),
        ("reward_json", "[1]", "flat object"),
        ("reward_json", "{}", "flat object"),
        ("reward_json", '{"reward": true}', "finite number"),
        ("reward_json", '{"reward": "1"}', "finite number"),
        ("reward_json", '{"reward": {"a": 1}}', "finite number"),
        ("reward_json", '{"reward": NaN}', "finite number"),
        ("reward_txt", "", "empty"),
        ("reward_txt", "yes", "holds no number"),
        ("reward_txt", "inf", "finite number"),
        ("reward_txt", "1" * 100_000, "longer than"),
    ],
)
def test_anything_else_is_no_verdict(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(VerifierError) as caught:
        read_rewards(_files(tmp_path, **{name: text}))
    assert words in caught.value.message


def test_without_the_main_key_every_reward_must_reach_the_threshold() -> None:
    assert main_reward({"reward": 0.5, "other": 0.0}) == 0.5
    assert main_reward({"a": 1.0, "b": 0.2}) == 0.2


def test_junit_counts(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="c" name="a"/><testcase name="b"><failure/></testcase>'
        '<testcase classname="c" name="d"><error/></testcase><testcase name="e"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    counts = read_junit(path)
    assert counts is not None
    assert (counts.passed, counts.failed, counts.skipped) == (1, 2, 1)
    assert counts.failed_names == ("b", "c::d")
    path.write_text("<testsuites>")
    assert read_junit(path) is None
    assert read_junit(tmp_path / "none.xml") is None


def test_what_crosses_over(tmp_path: Path) -> None:
    plain = load_task(write_task(tmp_path, "plain"))
    assert capture_paths(plain, "/app") == ("/app", LOGS_ARTIFACTS)
    with pytest.raises(TaskError, match="working directory is /"):
        capture_paths(plain, "/")
    toml = 'artifacts = ["/app/out", "/var/x", "/app"]\n' + TOML
    assert capture_paths(load_task(write_task(tmp_path, "a", toml=toml)), "/app") == (
        "/app", "/var/x", LOGS_ARTIFACTS,
    )  # fmt: skip
    chosen = TOML + '[metadata.k3eval]\ncapture = ["/srv/", "/opt/x"]\n'
    assert capture_paths(load_task(write_task(tmp_path, "c", toml=chosen)), "/") == (
        "/srv", "/opt/x", LOGS_ARTIFACTS,
    )  # fmt: skip

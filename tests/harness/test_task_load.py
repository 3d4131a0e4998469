"""Reading a task folder: every field, every refusal with file and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness_tasks import TOML, write_task

from k3eval_harness.errors import TaskError
from k3eval_harness.task import load_task
from k3eval_harness.task.load import strip_canary


def test_a_plain_task_reads_with_its_values(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "family", "hello"))
    assert (task.name, task.family, task.config.agent.timeout_sec) == ("hello", "family", 60.0)
    assert task.config.verifier.timeout_sec == 60.0
    assert task.findings == ()


def test_defaults_are_harbors(tmp_path: Path) -> None:
    config = load_task(write_task(tmp_path, toml="")).config
    assert config.verifier.timeout_sec == 600.0
    assert config.environment.build_timeout_sec == 600.0
    assert config.agent.timeout_sec is None
    assert config.environment.network_mode is None


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_schema_versions_and_the_legacy_key(tmp_path: Path, version: str) -> None:
    assert load_task(write_task(tmp_path, "new", toml=f'schema_version = "{version}"')).findings == ()
    old = load_task(write_task(tmp_path, "old", toml=f'version = "{version}"'))
    assert old.config.schema_version == version
    assert old.findings == ()


def test_legacy_sizes_and_network_key(tmp_path: Path) -> None:
    toml = '[environment]\nmemory = "4G"\nstorage = "512M"\nallow_internet = false\n'
    environment = load_task(write_task(tmp_path, toml=toml)).config.environment
    assert (environment.memory_mb, environment.storage_mb) == (4096, 512)
    assert environment.network_mode == "no-network"


def test_a_full_file_reads_without_remarks(tmp_path: Path) -> None:
    toml = """
schema_version = "1.3"
source = "elsewhere"
artifacts = ["/app/out", {source = "/var/log", destination = "log", exclude = ["*.tmp"]}]
[task]
name = "org/the-task"
version = "1"
description = "d"
authors = [{name = "A"}]
keywords = ["k"]
[metadata]
anything = {goes = [1, 2]}
[agent]
timeout_sec = 5
user = 1000
[verifier]
env = {A = "b"}
user = "root"
environment_mode = "separate"
collect = [{command = "true"}]
[environment]
cpus = 0.5
gpus = 0
mcp_servers = []
env = {X = "${HOME:-none}"}
healthcheck = {command = "true", retries = 1}
os = "Linux"
[solution]
env = {S = "1"}
[metadata.k3eval]
family = "f"
kind = "k"
oracle_stage = "oracle"
oracle_files = ["/solution/fix.patch"]
package = "free provenance"
"""
    task = load_task(write_task(tmp_path, toml=toml))
    assert task.findings == ()
    assert (task.name, task.short_name, task.family) == ("org/the-task", "the-task", "f")
    assert [item.source for item in task.artifacts] == ["/app/out", "/var/log"]
    assert task.extras.oracle_files == ["/solution/fix.patch"]


def test_unknown_keys_are_remarked_with_the_nearest_name(tmp_path: Path) -> None:
    toml = "typo = 1\n[agent]\ntimeout_secs = 5\n[verifier.network]\nmode = 'no-network'\n"
    task = load_task(write_task(tmp_path, toml=toml))
    found = {finding.where: finding.message for finding in task.findings}
    assert found.keys() == {"task.toml: typo", "task.toml: agent.timeout_secs", "task.toml: verifier.network"}
    assert "did you mean timeout_sec?" in found["task.toml: agent.timeout_secs"]
    assert "did you mean network_mode?" in found["task.toml: verifier.network"]


def test_a_slip_in_the_extras_is_remarked_but_provenance_is_not(tmp_path: Path) -> None:
    toml = "[metadata.k3eval]\norcale_stage = 'x'\nlicence = 'MIT'\n"
    task = load_task(write_task(tmp_path, toml=toml))
    assert [finding.where for finding in task.findings] == ["task.toml: metadata.k3eval.orcale_stage"]


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[agent\n", "task.toml: not valid TOML: "),
        (
            "[agent]\ntimeout_sec = 'long'",
            "task.toml: [agent] timeout_sec: must be a valid number, not 'long'",
        ),
        ("[agent]\ntimeout_sec = 0", "task.toml: [agent] timeout_sec: must be greater than 0, not 0"),
        ("[environment]\nmemory = '4X'", "task.toml: environment: '4X' is not a size such as '4G' or '512M'"),
        ("[environment]\nmemory = '1G'\nmemory_mb = 5", "memory = '1G' contradicts memory_mb = 5"),
        (
            "[environment]\nnetwork_mode = 'pubic'",
            "[environment] network_mode: must be 'public', 'no-network' or",
        ),
        ("schema_version = '9'", "schema_version: '9' is not one of 1.0, 1.1, 1.2, 1.3, 1.4"),
        ("[task]\nname = 'no-org'", "[task] name: "),
        ("artifacts = [{source = '/a/../b'}]", "must not contain '..'"),
        ("[[steps]]\nagent = {}", "[steps.0] name: missing"),
        (
            "[metadata.k3eval]\noracle_stage = 'o'",
            "[metadata.k3eval]: oracle_stage and oracle_files go together",
        ),
        ("[metadata.k3eval]\ncapture = ['app']", "[metadata.k3eval] capture: 'app' must be an absolute path"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]", "drop one of them"),
    ],
)
def test_wrong_values_name_file_and_key(tmp_path: Path, toml: str, expected: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(write_task(tmp_path, toml=toml))
    assert expected in caught.value.message
    assert "\n" not in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no task\.toml"):
        load_task(tmp_path)
    path = write_task(tmp_path)
    (path / "instruction.md").unlink()
    with pytest.raises(TaskError, match=r"instruction\.md: missing"):
        load_task(path)
    (path / "instruction.md").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="not UTF-8"):
        load_task(path)
    (path / "instruction.md").write_text(" \n")
    with pytest.raises(TaskError, match="instruction is empty"):
        load_task(path)


def test_canary_lines_are_stripped_only_at_the_top() -> None:
    canary = "<!-- some CANARY guid 1 -->\n# canary: 2\n\n\nDo it.\n# canary stays here\n"
    assert strip_canary(canary) == "Do it.\n# canary stays here\n"
    assert strip_canary("\n# Title\n") == "\n# Title\n"


def test_a_symlink_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    (path / "tests" / "inside").symlink_to("test.sh")
    load_task(path)
    (path / "tests" / "outside").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="symlink that leaves"):
        load_task(path)


def test_the_digest_follows_names_contents_and_modes(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    first = load_task(path).digest
    assert load_task(write_task(tmp_path / "copy")).digest == first
    (path / "tests" / "__pycache__").mkdir()
    (path / "tests" / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert load_task(path).digest == first
    (path / "tests" / "test.sh").chmod(0o755)
    executable = load_task(path).digest
    (path / "tests" / "test.sh").write_text("other")
    assert len({first, executable, load_task(path).digest}) == 3


def test_a_special_file_is_refused(tmp_path: Path) -> None:
    import os

    path = write_task(tmp_path, toml=TOML)
    os.mkfifo(path / "pipe")
    with pytest.raises(TaskError, match="neither a file nor a folder"):
        load_task(path)


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    toml = f"x = {'[' * 3000}{']' * 3000}\n"
    with pytest.raises(TaskError, match="nested too deeply"):
        load_task(write_task(tmp_path, toml=toml))


def test_memory_beyond_any_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="memory_mb: must be less than"):
        load_task(write_task(tmp_path, toml=TOML.replace("memory_mb = 256", f"memory_mb = {10**30}")))

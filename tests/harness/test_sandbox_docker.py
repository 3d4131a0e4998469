"""The docker sandbox itself: its walls, its limits, its end."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from k3eval_harness.errors import EngineUnavailable, SandboxError, SizeLimitExceeded
from k3eval_harness.sandbox.base_image import BASE_REF, ensure_base_image
from k3eval_harness.sandbox.container import DockerProvider, DockerSandbox
from k3eval_harness.sandbox.engine import check_disk, connect, disk_free, engine_errors, engine_info
from k3eval_harness.sandbox.lease import MARK, Owner, is_left_over, labels, reap
from k3eval_harness.sandbox.protocol import SandboxLimits, SandboxSpec
from k3eval_harness.testing import tar_of

if TYPE_CHECKING:
    from docker import DockerClient

LIMITS = SandboxLimits(cpus=1, memory_mb=96, pids=48, lifetime_s=300)


@pytest.fixture(scope="module")
def client() -> Iterator[DockerClient]:
    client = connect()
    ensure_base_image(client, BASE_REF)
    yield client
    client.close()


def _spec(trial: str, **changes: object) -> SandboxSpec:
    spec = SandboxSpec(
        image=BASE_REF,
        trial_id=f"{trial}-{time.time_ns()}",
        job_id="test",
        role="agent",
        workdir="/app",
        limits=LIMITS,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]  # a test's own keywords


@pytest.fixture(scope="module")
def sandbox(client: DockerClient) -> Iterator[DockerSandbox]:
    provider = DockerProvider(client)
    yield provider.start(_spec("shared"))
    provider.close()


def _exists(client: DockerClient, container: str) -> bool:
    listed = client.api.containers(all=True, filters={"id": container})
    return bool(listed)


@pytest.mark.docker
class TestWalls:
    def test_the_agent_is_nobody_special(self, sandbox: DockerSandbox) -> None:
        shell = sandbox.open_shell()
        assert shell.run("id -u; pwd; touch ok && echo can write here", timeout_s=20).text == (
            "1000\n/app\ncan write here\n"
        )
        assert shell.run("touch /etc/x", timeout_s=20).exit_code == 1
        status = shell.run("grep -E '^(CapEff|CapPrm|NoNewPrivs)' /proc/self/status", timeout_s=20).text
        assert status.split() == ["CapPrm:", "0" * 16, "CapEff:", "0" * 16, "NoNewPrivs:", "1"]

    def test_root_has_few_capabilities(self, sandbox: DockerSandbox) -> None:
        text = sandbox.open_shell(user="0").run("grep CapEff /proc/self/status", timeout_s=20).text
        chown, dac_override, fowner, kill, setgid, setuid = 0, 1, 3, 5, 6, 7
        allowed = sum(1 << bit for bit in (chown, dac_override, fowner, kill, setgid, setuid))
        assert int(text.split()[1], 16) == allowed

    def test_there_is_no_network(self, sandbox: DockerSandbox) -> None:
        shell = sandbox.open_shell()
        assert shell.run("ls /sys/class/net", timeout_s=20).text == "lo\n"
        connect_out = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
        result = shell.run(f'python3 -c "{connect_out}"', timeout_s=20)
        assert "Network is unreachable" in result.text

    def test_the_lease_cannot_be_killed_by_the_agent(self, sandbox: DockerSandbox) -> None:
        assert "not permitted" in sandbox.open_shell().run("kill -9 1", timeout_s=20).text

    def test_no_variable_of_the_host_is_inside(
        self, sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MOONSHOT_API_KEY", "canary-key-0815")
        assert "canary-key-0815" not in sandbox.open_shell().run("env", timeout_s=20).text


@pytest.mark.docker
class TestLimits:
    def test_a_time_limit_kills_the_whole_tree(self, sandbox: DockerSandbox) -> None:
        shell = sandbox.open_shell()
        command = "mkdir -p deep; cd deep; setsid sleep 301 & (sleep 302 &) ; nohup sleep 303 & sleep 304"
        shell.run("mkdir -p there; cd there", timeout_s=20)
        result = shell.run(command, timeout_s=1)
        assert result.timed_out
        look = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 30[1-4]'; pwd"
        assert shell.run(look, timeout_s=20).text == "0\n/app/there\n"

    def test_a_fork_bomb_is_stopped_and_the_shell_comes_back(self, sandbox: DockerSandbox) -> None:
        shell = sandbox.open_shell()
        shell.run("bomb() { bomb | bomb & }; bomb; sleep 30", timeout_s=2)
        result = shell.run("echo alive", timeout_s=30)
        if not result.text.endswith("alive\n"):  # the first shell after it may have died with the bomb
            result = shell.run("echo alive", timeout_s=30)
        assert result.text.endswith("alive\n")

    def test_the_memory_limit_is_enforced_and_seen(self, sandbox: DockerSandbox) -> None:
        before = sandbox.oom_kills()
        result = sandbox.open_shell().run("python3 -c 'x = bytearray(500_000_000)'", timeout_s=60)
        assert result.exit_code == 137
        assert sandbox.oom_kills() > before

    def test_output_is_capped(self, sandbox: DockerSandbox) -> None:
        result = sandbox.open_shell().run("seq 1 1000000", timeout_s=60, output_limit=1000)
        assert len(result.output) < 1100
        assert result.truncated_bytes == 6888896 - 1000

    def test_a_copy_out_is_capped(self, sandbox: DockerSandbox) -> None:
        sandbox.open_shell().run("head -c 3000000 /dev/zero > /tmp/big", timeout_s=60)
        with pytest.raises(SizeLimitExceeded):
            sandbox.download("/tmp/big", io.BytesIO(), 1_000_000)
        assert sandbox.download("/nowhere", io.BytesIO(), 1) is False


@pytest.mark.docker
class TestFiles:
    def test_uploads_belong_to_root(self, sandbox: DockerSandbox, tmp_path: Path) -> None:
        (tmp_path / "src").mkdir()
        (tmp_path / "src" / "run.sh").write_text("echo ran")
        sandbox.upload(tmp_path / "src", "/opt/deep/er")
        sandbox.upload(tmp_path / "src" / "run.sh", "/opt/one/renamed.txt")
        shell = sandbox.open_shell()
        assert shell.run("stat -c '%U %n' /opt/deep/er/run.sh /opt/one/renamed.txt", timeout_s=20).text == (
            "root /opt/deep/er/run.sh\nroot /opt/one/renamed.txt\n"
        )
        assert shell.run("/opt/deep/er/run.sh", timeout_s=20).text == "ran\n"

    def test_files_come_out_also_when_everything_is_dead(self, client: DockerClient) -> None:
        provider = DockerProvider(client)
        sandbox = provider.start(_spec("frozen"))
        try:
            shell = sandbox.open_shell()
            shell.run("echo content > /app/f; ln -s /etc/passwd /app/link; sleep 300 &", timeout_s=20)
            sandbox.upload_tar(tar_of({"up": b"1"}), "/app")
            sandbox.freeze()
            assert client.api.inspect_container(sandbox.id)["State"]["Running"] is False
            out = io.BytesIO()
            assert sandbox.download("/app", out, 1_000_000)
            out.seek(0)
            with tarfile.open(fileobj=out) as tar:
                assert sorted(tar.getnames()) == ["app", "app/f", "app/link", "app/up"]
            assert sandbox.read_file("/app/f", 100) == b"content\n"
            assert sandbox.read_file("/app/link", 100) is None
            assert sandbox.oom_kills() == 0
            with pytest.raises(SandboxError):
                sandbox.open_shell().run("true", timeout_s=5)
        finally:
            sandbox.close()
        assert not _exists(client, sandbox.id)
        sandbox.close()


@pytest.mark.docker
class TestEnds:
    def test_a_container_ends_by_itself(self, client: DockerClient) -> None:
        provider = DockerProvider(client)
        sandbox = provider.start(_spec("lease", limits=replace(LIMITS, lifetime_s=2)))
        try:
            result = sandbox.open_shell().run("kill -9 -1; sleep 100", timeout_s=60)
            assert result.shell_restarted
            client.api.wait(sandbox.id, timeout=60)
            assert client.api.inspect_container(sandbox.id)["State"]["Status"] == "exited"
        finally:
            provider.close()
        assert not _exists(client, sandbox.id)

    @pytest.mark.parametrize(
        ("act", "said"),
        [
            ("kill", r"stopped from outside while it was in use \(exit code 137\)"),
            ("remove", "No such container"),
            ("restart", "restarted from outside"),
        ],
    )
    def test_what_was_touched_from_outside_is_never_captured(
        self, client: DockerClient, act: str, said: str
    ) -> None:
        provider = DockerProvider(client)
        sandbox = provider.start(_spec("touched"))
        try:
            if act == "kill":
                client.api.kill(sandbox.id)
                client.api.wait(sandbox.id, timeout=60)
            elif act == "remove":
                client.api.remove_container(sandbox.id, force=True)
            else:
                client.api.restart(sandbox.id, timeout=0)
            with pytest.raises(SandboxError, match=said):
                sandbox.freeze()
        finally:
            provider.close()

    def test_an_agent_cannot_end_its_container_but_by_running_out_of_memory(
        self, client: DockerClient
    ) -> None:
        provider = DockerProvider(client)
        sandbox = provider.start(_spec("inside"))
        try:
            root = sandbox.open_shell(user="0")
            root.run("kill -9 1; kill -TERM 1; kill -STOP 1", timeout_s=20)
            assert client.api.inspect_container(sandbox.id)["State"]["Running"]
            # several of middle size, so that the kernel's choice falls on process 1
            hog = "python3 -c 'import time; x = b\"x\" * (40 << 20); time.sleep(20)'"
            root.run(f"echo 1000 > /proc/1/oom_score_adj; {hog} & {hog} & {hog} & wait", timeout_s=30)
            client.api.wait(sandbox.id, timeout=60)
            sandbox.freeze()  # the agent's own doing: it is graded
            assert sandbox.oom_kills() == 1
        finally:
            provider.close()

    def test_a_closed_provider_starts_nothing(self, client: DockerClient) -> None:
        provider = DockerProvider(client)
        provider.close()
        with pytest.raises(SandboxError, match="being stopped"):
            provider.start(_spec("late"))
        assert not client.api.containers(all=True, filters={"name": "k3eval-late"})

    def test_a_missing_image_is_one_line(self, client: DockerClient) -> None:
        with pytest.raises(SandboxError) as caught:
            DockerProvider(client).start(_spec("none", image="k3eval/no-such-image:1"))
        assert "k3eval/no-such-image" in caught.value.message
        assert "\n" not in caught.value.message

    def test_a_killed_runs_containers_are_reaped_and_a_live_ones_are_not(
        self, client: DockerClient, sandbox: DockerSandbox
    ) -> None:
        script = (
            "import os, signal\n"
            "from k3eval_harness.sandbox.container import DockerProvider\n"
            "from k3eval_harness.sandbox.engine import connect\n"
            "from k3eval_harness.sandbox.protocol import SandboxLimits, SandboxSpec\n"
            f"spec = SandboxSpec({BASE_REF!r}, 'dead-{time.time_ns()}', 'j', 'agent', "
            "limits=SandboxLimits(cpus=1))\n"
            "print(DockerProvider(connect()).start(spec).id, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
        )
        left_over = done.stdout.strip()
        assert _exists(client, left_over), done.stderr
        assert any(name.startswith("k3eval-dead-") for name in reap(client))
        assert not _exists(client, left_over)
        assert _exists(client, sandbox.id)

    def test_engine_facts(self, client: DockerClient) -> None:
        info = engine_info(client)
        assert info.cpus >= 1
        free = disk_free(client)
        if free is not None:
            with pytest.raises(SandboxError, match="GiB free for Docker"):
                check_disk(client, need=free * 2)


class _Interrupted:
    """An engine whose first removal is cut short by Ctrl-C."""

    def __init__(self) -> None:
        self.api = self
        self.removals = 0

    def remove_container(self, container: str, **options: object) -> None:
        self.removals += 1
        if self.removals == 1:
            raise KeyboardInterrupt


def test_a_removal_that_ctrl_c_cuts_short_is_made_up_for() -> None:
    engine = _Interrupted()
    closed: list[str] = []
    sandbox = DockerSandbox(
        engine,  # type: ignore[arg-type]  # only what closing needs
        "c1", user="", workdir="/", env={}, on_close=closed.append,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        sandbox.close()
    assert closed == []
    for _ in range(2):
        sandbox.close()
    assert (engine.removals, closed) == (2, ["c1"])


def test_an_engine_that_is_gone_is_said_in_plain_words() -> None:
    import requests
    from urllib3.exceptions import ProtocolError

    cause = FileNotFoundError(2, "No such file or directory")
    error = requests.ConnectionError(ProtocolError("Connection aborted.", cause))
    with pytest.raises(SandboxError) as caught, engine_errors("listing containers"):
        raise error
    assert caught.value.message == (
        "listing containers failed: No such file or directory; does the Docker engine still run?"
    )


def test_no_engine_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(EngineUnavailable) as caught:
        connect()
    assert "start it" in caught.value.message
    assert f"{tmp_path}/none.sock" in caught.value.message
    assert "\n" not in caught.value.message


def test_ownership_is_read_from_labels() -> None:
    now = time.time()
    mine = labels("j", "t", "agent", 100)
    assert mine[MARK] == "1"
    assert not is_left_over(mine, now)
    assert is_left_over(mine, now + 1000)
    me = Owner.current()
    assert Owner.parse(str(me)) == me
    assert not me.is_dead()
    assert Owner(me.host, me.pid, me.started + 1).is_dead()
    assert not Owner("another-host", 1, 1).is_dead()
    assert Owner.parse("nonsense") is None
    assert not is_left_over({}, now)

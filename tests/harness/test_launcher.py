"""Starting and stopping the local backend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3eval import K3, Message, ModelRef
from k3eval_harness.cli.app import app
from k3eval_harness.errors import Cancelled, UsageError
from k3eval_harness.launcher import local_server


def _children() -> set[str]:
    """Processes that this one's main thread started and that still run."""
    started = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {pid for pid in started if _alive(pid)}


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _ask_and_fail(before: set[str]) -> None:
    with local_server("a", seed=1) as server:
        assert server.weights == "random, seed 1"
        client = K3.from_ref(ModelRef("local", server.model, server.base_url))
        try:
            reply = client.chat([Message.user("hello")], max_output=4)
        finally:
            client.close()
        assert reply.usage is not None
        assert reply.usage.output > 0
        assert len(_children() - before) == 1
        raise ZeroDivisionError


@pytest.mark.slow
def test_it_answers_and_is_gone_afterwards_also_after_an_error() -> None:
    before = _children()
    with pytest.raises(ZeroDivisionError):
        _ask_and_fail(before)
    assert _children() - before == set()


@pytest.mark.slow
def test_a_checkpoint_folder_that_holds_random_weights_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    made = CliRunner().invoke(app, ["model", "init", "--config", "a", "--out", str(folder)])
    assert made.exit_code == 0, made.output
    with local_server(str(folder)) as server:
        assert server.weights.startswith("random, seed 0 (sha256:")


@pytest.mark.slow
def test_a_server_that_is_killed_says_so() -> None:
    before = _children()
    with local_server("a") as server:
        assert server.ended() is None
        (pid,) = _children() - before
        os.kill(int(pid), signal.SIGKILL)
        deadline = time.monotonic() + 20
        while server.ended() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.ended() == "it was killed by SIGKILL"


@pytest.mark.slow
def test_an_unknown_model_is_one_line_and_leaves_nothing() -> None:
    before = _children()
    with pytest.raises(UsageError) as caught, local_server("no-such-model"):
        pass
    assert "no-such-model" in caught.value.message
    assert "\n" not in caught.value.message
    assert _children() - before == set()


def test_waiting_can_be_cancelled() -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled), local_server("a", cancel=cancel):
        pass


@pytest.mark.slow
def test_the_server_does_not_outlive_a_killed_harness() -> None:
    script = (
        "import os, signal\n"
        "from k3eval_harness.launcher import local_server\n"
        "with local_server('a'):\n"
        "    print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    pids = done.stdout.split()
    assert pids, done.stderr
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in pids)

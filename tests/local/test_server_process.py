"""The server as a process: the ready line, how it stops, and what it refuses to start with."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from server_helpers import HTTP, until
from typer.testing import CliRunner

from k3eval_harness.cli.app import app
from k3eval_local.protocol.chaos import FAULTS, PROFILES
from k3eval_local.server.__main__ import main

COMMAND = (sys.executable, "-m", "k3eval_local.server")
ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'local_backend'}:{ROOT / 'harness'}",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def running(
    *options: str, folder: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A server in a session of its own; ``folder`` is where it starts and where its temporary files go."""
    process = subprocess.Popen(
        [*COMMAND, "--model", "a", "--threads", "1", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT if folder is None else ENVIRONMENT | {"TMPDIR": str(folder)},
        cwd=folder,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line with which the command line refuses ``options``."""
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("k3eval: ")
    return line


def test_ready_line_then_answers_then_sigterm_with_a_stream_open() -> None:
    with running("--port", "0") as (process, ready):
        assert ready == {
            "event": "ready",
            "base_url": ready["base_url"],
            "model": "a",
            "weights": "random, seed 0",
        }
        url = ready["base_url"]
        assert url.startswith("http://127.0.0.1:")
        assert url.endswith("/v1")
        body = {
            "model": "a",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "ignore_eos": True,
        }
        with HTTP.stream("POST", f"{url}/chat/completions", json=body | {"max_tokens": 100_000}) as response:
            pieces = response.iter_bytes()
            assert b"data:" in next(pieces)
            process.send_signal(signal.SIGTERM)
            try:
                rest = b"".join(pieces)
            except httpx.RemoteProtocolError:
                rest = b""
            assert b'"finish_reason":"stop"' not in rest
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == ""
    assert err == ""


def in_session(leader: int) -> list[int]:
    """Processes that belong to the session of ``leader`` and live."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it ended meanwhile
            continue
        if int(session) == leader and state != "Z":
            found.append(int(entry.parent.name))
    return found


def test_killed_in_the_middle_of_streams_it_starts_again_on_the_same_port(tmp_path: Path) -> None:
    body = {"model": "a", "messages": [{"role": "user", "content": "go on"}], "temperature": 0, "n": 2}
    endless = body | {"stream": True, "ignore_eos": True, "max_tokens": 500_000, "n": 1}
    with running("--port", "0", folder=tmp_path) as (process, ready):
        url = ready["base_url"]
        before = HTTP.post(f"{url}/chat/completions", json=body | {"max_tokens": 40}).json()["choices"]
        with ExitStack() as streams:
            open_ones = [
                streams.enter_context(HTTP.stream("POST", f"{url}/chat/completions", json=endless))
                for _ in range(4)
            ]
            pieces = [response.iter_bytes() for response in open_ones]
            assert all(b"data:" in next(each) for each in pieces)
            assert len(in_session(process.pid)) == 2  # the server and its engine
            process.send_signal(signal.SIGKILL)
            for each in pieces:
                with pytest.raises(httpx.TransportError):
                    for _ in each:
                        pass
        assert process.wait(20) == -signal.SIGKILL
    assert until(lambda: in_session(process.pid) == [])
    assert list(tmp_path.iterdir()) == []
    port = url.removesuffix("/v1").rpartition(":")[2]
    with running("--port", port, folder=tmp_path) as (process, ready):
        assert ready["base_url"] == url
        after = HTTP.post(f"{url}/chat/completions", json=body | {"max_tokens": 40}).json()["choices"]
        assert after == before
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.communicate() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_server_whose_engine_dies_says_so_and_ends() -> None:
    body = {"model": "a", "messages": [{"role": "user", "content": "go on"}], "stream": True}
    endless = body | {"ignore_eos": True, "max_tokens": 500_000}
    with running("--port", "0") as (process, ready):
        url = f"{ready['base_url']}/chat/completions"
        with HTTP.stream("POST", url, json=endless) as response:
            pieces = response.iter_bytes()
            assert b"data:" in next(pieces)
            (engine,) = (pid for pid in in_session(process.pid) if pid != process.pid)
            os.kill(engine, signal.SIGKILL)
            rest = b"".join(pieces)
        assert b'"error"' in rest
        assert b'"finish_reason":"stop"' not in rest
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "")
    assert err.splitlines()[-1] == "k3eval: the engine's process ended: it was killed by SIGKILL"
    assert in_session(process.pid) == []


def test_an_engine_that_hangs_holds_up_neither_the_loop_nor_a_stop() -> None:
    body = {"model": "a", "messages": [{"role": "user", "content": "word and other " * 30_000}]}
    with running("--port", "0") as (process, ready), ThreadPoolExecutor(6) as pool:
        url = str(ready["base_url"])
        (engine,) = (pid for pid in in_session(process.pid) if pid != process.pid)
        os.kill(engine, signal.SIGSTOP)
        calls = [pool.submit(HTTP.post, f"{url}/chat/completions", json=body) for _ in range(6)]
        metrics = url.removesuffix("/v1") + "/metrics"
        assert until(lambda: "k3eval_chat_in_flight 6.0" in HTTP.get(metrics).text, 120)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert {call.result().status_code for call in calls} <= {500, 503}
    assert (process.returncode, out, err) == (0, "", "")
    assert in_session(process.pid) == []


def test_a_stop_while_a_request_is_still_arriving() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\n"
    with running("--port", "0") as (process, ready):
        port = int(str(ready["base_url"]).rsplit(":", 1)[1].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(head + b'{"model":')
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            reply = connection.recv(65536)
        out, err = process.communicate(timeout=60)
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_it_loads(number: signal.Signals) -> None:
    command = [*COMMAND, "--model", "a", "--threads", "1", "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert until(lambda: len(in_session(process.pid)) == 2, 60)  # the engine's process has begun
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "", "")
        assert in_session(process.pid) == []
    finally:
        process.kill()
        process.communicate()


def test_the_shortest_time_between_keep_alive_comments_leaves_time_for_the_reply() -> None:
    body = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 50}
    with running("--port", "0", "--dialect", "openrouter", "--keep-alive", "0.01") as (_, ready):
        reply = HTTP.post(
            f"{ready['base_url']}/chat/completions", json=body | {"model": "moonshotai/kimi-k3"}
        )
    assert reply.text.endswith("data: [DONE]\n\n")


def test_it_follows_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with running("--parent-pid", str(parent.pid)) as (process, _):
            parent.kill()
            parent.wait()
            assert until(lambda: process.poll() is not None, 60)
            assert process.returncode == 0
    finally:
        parent.kill()


def test_a_port_in_use_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*COMMAND, "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"port {port}" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "70000"), "65535"),
        (("--port", "x"), "must be a whole number"),
        (("--seed", "99999999999999999999999"), "must be "),
        (("--context", "-5"), "must be "),
        (("--default-max-tokens", "0"), "must be "),
        (("--max-batch", "0"), "must be 1 to 4096"),
        (("--threads", "0"), "must be "),
        (("--max-body-mib", "-1"), "must be "),
        (("--memory-mib", "99999999999"), "memory"),
        (("--parent-pid", "0"), "must be "),
        (("--keep-alive", "0"), "no number of seconds"),
        (("--keep-alive", "nan"), "no number of seconds"),
        (("--chaos-silence", "-1"), "no number of seconds"),
        (("--credit", "nan"), "amount"),
        (("--credit", "-5"), "amount"),
        (("--key", ""), "empty"),
        (("--chaos", "1:nonsense"), "nonsense"),
        (("--tier", "7", "--dialect", "moonshot"), "1, 10, 20, 100, 1000, 3000"),
        (("--tier", "1"), "none"),
        (("--credit", "much"), "amount"),
        (("--dialect", "french"), "invalid choice"),
        (("--bogus",), "unrecognized"),
        (("--host", "256.1.1.1"), "cannot listen"),
        (("--model", "nonesuch"), "nonesuch"),
        (("--memory-mib", "1"), "budget"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], options: Sequence[str], message: str) -> None:
    assert message in refused(capsys, *options)


def test_broken_checkpoints_and_rank_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refused(capsys, "--model", str(tmp_path))
    ranks = tmp_path / "ranks"
    ranks.write_text("AA== 0\n")
    assert "255 of the 256" in refused(capsys, "--tokenizer", str(ranks))


def test_the_help_of_k3eval_serve_lists_every_fault() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"])
    assert result.exit_code == 0
    assert "usage: k3eval serve" in result.stdout
    missing = [name for name in (*FAULTS, *PROFILES) if f"{name}:" not in result.stdout]
    assert missing == []


def test_neither_help_nor_bad_options_import_torch() -> None:
    code = (
        "import sys\nfrom k3eval_local.server.__main__ import main\n"
        "try:\n    main(['--chaos', 'x'])\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
    )
    assert done.stdout == "False\n"

"""The persistent shell's framing, over a plain subprocess: no container is needed to get this right."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3eval_harness.errors import SandboxError
from k3eval_harness.sandbox.channel import Demultiplexer
from k3eval_harness.sandbox.shell import EndMark, HeadTail, PersistentShell
from k3eval_harness.testing import LocalSandbox


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[PersistentShell]:
    sandbox = LocalSandbox(tmp_path)
    yield sandbox.open_shell()
    sandbox.close()


def test_state_stays_from_command_to_command(shell: PersistentShell, tmp_path: Path) -> None:
    assert shell.run("mkdir sub; cd sub; x=5", timeout_s=10).cwd == str(tmp_path / "sub")
    result = shell.run("echo $x $PWD; false", timeout_s=10)
    assert (result.text, result.exit_code) == (f"5 {tmp_path}/sub\n", 1)


def test_output_without_a_newline_and_binary_output(shell: PersistentShell) -> None:
    assert shell.run("printf abc", timeout_s=10).output == b"abc"
    assert shell.run(r"printf '\377\000\001x\n'", timeout_s=10).output == b"\xff\x00\x01x\n"
    assert shell.run("true", timeout_s=10).output == b""


def test_stderr_comes_in_order_with_stdout(shell: PersistentShell) -> None:
    result = shell.run("echo one; echo two >&2; echo three", timeout_s=10)
    assert result.text == "one\ntwo\nthree\n"


def test_multi_line_commands_quotes_and_here_documents(shell: PersistentShell) -> None:
    result = shell.run("cat <<'X'\nit's \"$HOME\"\nX\nfor i in 1 2; do\n  echo $i\ndone", timeout_s=10)
    assert result.text == 'it\'s "$HOME"\n1\n2\n'


def test_a_command_that_reads_stdin_gets_nothing_and_eats_nothing(shell: PersistentShell) -> None:
    assert shell.run("cat; read line; echo done", timeout_s=10).text == "done\n"
    assert shell.run("echo next", timeout_s=10).text == "next\n"


def test_syntax_errors_are_results(shell: PersistentShell) -> None:
    assert shell.run("if then", timeout_s=10).exit_code == 2
    assert shell.run("echo 'open", timeout_s=10).exit_code == 2
    assert shell.run("echo fine", timeout_s=10).text == "fine\n"


def test_output_cannot_forge_the_end(shell: PersistentShell) -> None:
    forged = "\x1e" + "0" * 32 + " 0 /tmp\x1e\n"
    result = shell.run(f"printf %s {shlex.quote(forged)}; exit_code=7; (exit 7)", timeout_s=10)
    assert (result.output, result.exit_code) == (forged.encode(), 7)


def test_tracing_does_not_print_an_end_mark(shell: PersistentShell) -> None:
    shell.run("set -x", timeout_s=10)
    result = shell.run("echo traced; false", timeout_s=10)
    assert result.exit_code == 1
    assert b"\x1e" not in result.output
    assert shell.run("set +x", timeout_s=10).exit_code == 0


def test_exit_ends_the_shell_and_a_new_one_follows(shell: PersistentShell, tmp_path: Path) -> None:
    shell.run("mkdir d; cd d; x=1", timeout_s=10)
    result = shell.run("echo bye; exit 3", timeout_s=10)
    assert (result.text, result.exit_code, result.shell_restarted) == ("bye\n", 3, True)
    assert shell.run("echo [$x] $PWD", timeout_s=10).text == f"[] {tmp_path}/d\n"


def test_a_time_limit_kills_what_the_command_started(shell: PersistentShell, tmp_path: Path) -> None:
    shell.run("mkdir d; cd d", timeout_s=10)
    result = shell.run("echo start; sleep 300 & echo $! > pid; sleep 300", timeout_s=0.5)
    assert (result.text, result.timed_out, result.exit_code) == ("start\n", True, None)
    # a killed process that nobody has waited for yet has no command line any more
    look = "pwd; grep -q sleep /proc/$(cat pid)/cmdline 2>/dev/null && echo alive || echo dead"
    after = shell.run(look, timeout_s=10)
    assert after.text == f"{tmp_path}/d\ndead\n"


def test_long_output_keeps_head_and_tail(shell: PersistentShell) -> None:
    result = shell.run("seq 1 100000", timeout_s=30, output_limit=100)
    assert result.text.startswith("1\n2\n")
    assert result.text.endswith("99999\n100000\n")
    mark = re.search(r"\[\.\.\. (\d+) bytes left out \.\.\.\]", result.text)
    assert mark is not None
    assert int(mark[1]) == result.truncated_bytes == 588895 - 100


def test_endless_output_is_killed(shell: PersistentShell) -> None:
    result = shell.run("yes", timeout_s=60, output_limit=100)
    assert result.flooded
    assert not result.timed_out
    assert shell.run("echo ok", timeout_s=10).text == "ok\n"


def test_background_output_lands_in_a_later_command(shell: PersistentShell) -> None:
    shell.run("(while [ ! -e go ]; do sleep 0.01; done; echo late) & ", timeout_s=10)
    assert "late" in shell.run("touch go; wait", timeout_s=10).text


def test_a_nul_byte_is_refused(shell: PersistentShell) -> None:
    assert shell.run("echo \0", timeout_s=10).exit_code == 2


def test_a_vanished_directory_is_survived(shell: PersistentShell, tmp_path: Path) -> None:
    shell.run("mkdir gone; cd gone", timeout_s=10)
    shell.run("rm -rf ../gone; exit 1", timeout_s=10)
    assert shell.run("echo ok", timeout_s=10).text == "ok\n"


class _DeadChannel:
    def send(self, data: bytes, timeout_s: float) -> None: ...

    def receive(self, timeout_s: float) -> bytes:
        return b""

    def exit_code(self) -> int | None:
        return 127

    def close(self) -> None: ...


def test_no_shell_is_a_sandbox_error() -> None:
    with pytest.raises(SandboxError, match="no shell starts"):
        PersistentShell(_DeadChannel, lambda: None, "/").run("true", timeout_s=1)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_the_end_mark_is_found_in_pieces_of_any_size(size: int) -> None:
    mark = EndMark()
    nonce = mark.command.split()[4].decode()
    stream = b"out\x1eput" + f"\x1e{nonce} 12 /a b\nc\x1e\n".encode()
    seen, end = b"", None
    for start in range(0, len(stream), size):
        output, end = mark.feed(stream[start : start + size])
        seen += output
    assert (seen, end) == (b"out\x1eput", (12, "/a b\nc"))


@pytest.mark.parametrize("size", [1, 5, 9, 100])
def test_frames_are_taken_apart_in_pieces_of_any_size(size: int) -> None:
    parts = ((1, b"abc"), (2, b"de"), (1, b""), (1, b"f"))
    frames = b"".join(
        bytes([stream, 0, 0, 0]) + len(text).to_bytes(4, "big") + text for stream, text in parts
    )
    demultiplexer = Demultiplexer()
    pieces = (frames[start : start + size] for start in range(0, len(frames), size))
    assert b"".join(demultiplexer.feed(piece) for piece in pieces) == b"abcdef"


def test_head_and_tail_of_a_short_stream_are_the_stream() -> None:
    kept = HeadTail(10)
    for piece in (b"abc", b"defg", b"hij"):
        kept.feed(piece)
    assert kept.result() == (b"abcdefghij", 0)
    kept.feed(b"k")
    assert kept.result() == (b"abcde\n[... 1 bytes left out ...]\nghijk", 1)


class _StalledEngine:
    """A shell that floods, in an engine that starts no process before its output is read."""

    def __init__(self) -> None:
        self.read_on = threading.Event()
        self.killing = threading.Event()
        self._started = False

    def send(self, data: bytes, timeout_s: float) -> None:
        if not self._started:
            nonce = re.search(rb"[0-9a-f]{32}", data)
            assert nonce is not None
            self._mark = b"\x1e" + nonce[0] + b" 0 /\x1e\n"

    def receive(self, timeout_s: float) -> bytes:
        if not self._started:
            self._started = True
            return self._mark
        if self.killing.is_set():
            self.read_on.set()
            return b""
        return b"y" * (32 * 1024 * 1024)

    def exit_code(self) -> int | None:
        return None

    def close(self) -> None:
        pass

    def kill_all(self) -> None:
        self.killing.set()
        assert self.read_on.wait(20)


def test_output_is_read_on_while_a_flood_is_killed() -> None:
    engine = _StalledEngine()
    result = PersistentShell(lambda: engine, engine.kill_all, "/").run("yes", timeout_s=60)
    assert (result.flooded, result.timed_out, result.exit_code) == (True, False, None)

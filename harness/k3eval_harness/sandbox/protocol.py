"""What a trial needs of a sandbox. The docker implementation is one; ``k3eval_harness.testing`` has another.

A sandbox is one container: started for one trial, without a network, with limits, removed by ``close``.
Every call has a time limit and raises SandboxError when the sandbox itself fails; a failing command is a
result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Protocol

DEFAULT_OUTPUT_LIMIT: Final = 30_000
"""Bytes of one command's output that are kept: half from its head, half from its tail."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """One command's end."""

    output: bytes
    """stdout and stderr as they came, at most the output limit, with a mark where bytes were left out."""
    exit_code: int | None
    """None when the command was killed or took the shell down without a code."""
    timed_out: bool = False
    flooded: bool = False
    """The command was killed because it printed without end."""
    truncated_bytes: int = 0
    shell_restarted: bool = False
    """The command ended the shell; the next one runs in a fresh shell."""
    cwd: str | None = None
    """Working directory after the command."""

    @property
    def text(self) -> str:
        """The output as text; bytes that are no UTF-8 are shown as U+FFFD."""
        return self.output.decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one container may use."""

    cpus: float = 2.0
    memory_mb: int = 4096
    pids: int = 512
    lifetime_s: float = 7200.0
    """The container ends by itself after this long, whatever happens to the harness."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """One container to start."""

    image: str
    trial_id: str
    job_id: str
    role: str
    """``agent`` or ``grade``; a label."""
    user: str | None = None
    """Name or uid for shells; None = the image's own non-root user, else uid 1000."""
    workdir: str | None = None
    """None = the image's WORKDIR."""
    env: Mapping[str, str] = field(default_factory=dict)
    limits: SandboxLimits = field(default_factory=SandboxLimits)


class Shell(Protocol):
    """One persistent shell: directory, variables and background jobs stay from command to command."""

    def run(
        self, command: str, *, timeout_s: float, output_limit: int = DEFAULT_OUTPUT_LIMIT
    ) -> CommandResult:
        """Run one command. At its time limit every process of the shell's user in the container is killed."""

    def close(self) -> None:
        """End the shell. Never raises."""


class Sandbox(Protocol):
    """One running container."""

    @property
    def id(self) -> str:
        """Container id, for logs."""

    @property
    def workdir(self) -> str:
        """Absolute path where shells start."""

    @property
    def user(self) -> str:
        """User that shells run as unless asked otherwise."""

    def open_shell(
        self, *, user: str | None = None, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Shell:
        """Start another persistent shell."""

    def upload(self, source: Path, target: str, *, ignore: Sequence[str] = ()) -> None:
        """Copy a file to the path ``target``, or a folder's content into the folder ``target``, as root."""

    def upload_tar(self, archive: IO[bytes], target: str) -> None:
        """Unpack a tar into the folder ``target``."""

    def download(self, path: str, sink: IO[bytes], limit: int) -> bool:
        """Write ``path`` as a tar to ``sink``; False when it does not exist.

        Works after ``freeze``. Raises SizeLimitExceeded when the tar is longer than ``limit`` bytes.
        """

    def read_file(self, path: str, limit: int) -> bytes | None:
        """Content of one regular file, its first ``limit`` bytes; None when there is none."""

    def oom_kills(self) -> int:
        """How many processes the memory limit has killed so far; after ``freeze`` 1 stands for any number."""

    def freeze(self) -> None:
        """Kill every process. The file system stays readable until ``close``.

        Raises SandboxError when the container was stopped, restarted or removed from outside meanwhile.
        """

    def close(self) -> None:
        """Remove the container. Never raises; may be called twice and from another thread."""


class SandboxProvider(Protocol):
    """Starts sandboxes and prepares their images."""

    def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a container; raises SandboxError or EngineUnavailable, leaving nothing behind."""

    def close(self) -> None:
        """Remove every container that this provider started. Never raises."""

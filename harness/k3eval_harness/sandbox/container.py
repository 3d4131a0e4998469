"""The docker sandbox: one locked-down container for one trial.

No network, all capabilities dropped but the few that root needs to handle files and processes, no new
privileges, limits on memory, cpu and processes, shells as a non-root user. The container's main process is
its own lease: it ends after the lifetime even when the harness is gone.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import shlex
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Final

from k3eval_harness.errors import SandboxError, SizeLimitExceeded
from k3eval_harness.sandbox.archive import pack, read_single_file
from k3eval_harness.sandbox.channel import SHELL_ARGV, ExecChannel
from k3eval_harness.sandbox.engine import engine_errors
from k3eval_harness.sandbox.lease import LEASE_SCRIPT, labels, remove
from k3eval_harness.sandbox.protocol import SandboxSpec
from k3eval_harness.sandbox.shell import PersistentShell

if TYPE_CHECKING:
    from docker import DockerClient

CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""Kept for root in set-up and grading; a non-root user with no-new-privileges cannot use them."""
SPOOL_BYTES: Final = 32 * 1024**2
DEFAULT_UID: Final = 1000
SETUP_SECONDS: Final = 120.0
_NOT_FOUND: Final = 404
_CHUNK_BYTES: Final = 1024**2
_KILL_ARGV: Final = ["/bin/sh", "-c", "kill -9 -1"]
_QUIET_ENV: Final = {"PAGER": "cat", "GIT_PAGER": "cat", "TERM": "dumb", "DEBIAN_FRONTEND": "noninteractive"}
_OOM: Final = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)

# Prints the name of the user that shells run as. $1: the wanted user, may be empty; $2: uid for a new one;
# $3: working directory; $4: 1 to hand the directory over to that user.
_SETUP: Final = r"""
set -e
mkdir -p /logs/agent /logs/verifier /logs/artifacts "$3"
chmod 777 /logs/agent /logs/artifacts
chmod "$([ "$4" = 1 ] && echo 777 || echo 755)" /logs/verifier
user=$1
if [ -z "$user" ] && grep -q '^agent:' /etc/passwd; then user=agent; fi
if [ -z "$user" ]; then user=$(awk -F: -v uid="$2" '$3 == uid { print $1; exit }' /etc/passwd); fi
if [ -z "$user" ]; then
  user=agent
  echo "agent:x:$2:$2::/home/agent:/bin/sh" >> /etc/passwd
  echo "agent:x:$2:" >> /etc/group
  mkdir -p /home/agent && chown "$2:$2" /home/agent
fi
uid=$(id -u "$user" 2>/dev/null || echo "$user")
case $3 in
  /|/bin|/etc|/lib|/root|/usr|/var) own=0 ;;
  *) own=$4 ;;
esac
if [ "$own" = 1 ] && [ "$uid" != 0 ] && [ "$(stat -c %u "$3")" != "$uid" ]; then chown -R "$uid" "$3"; fi
echo "k3eval-user=$user"
"""


class DockerSandbox:
    """See ``Sandbox``. Made by ``DockerProvider.start``."""

    def __init__(
        self,
        client: DockerClient,
        container_id: str,
        *,
        user: str,
        workdir: str,
        env: Mapping[str, str],
        on_close: Callable[[str], None],
    ) -> None:
        self._client = client
        self._id = container_id
        self._user = user
        self._workdir = workdir
        self._env = {**_QUIET_ENV, **env}
        self._on_close = on_close
        self._shells: list[PersistentShell] = []
        self._closed = threading.Lock()
        self._frozen = False
        self._started_at = ""

    @property
    def id(self) -> str:
        """See ``Sandbox``."""
        return self._id

    @property
    def workdir(self) -> str:
        """See ``Sandbox``."""
        return self._workdir

    @property
    def user(self) -> str:
        """See ``Sandbox``."""
        return self._user

    def open_shell(
        self, *, user: str | None = None, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> PersistentShell:
        """See ``Sandbox``."""
        run_as = user or self._user
        variables = {**self._env, **(env or {})}

        return self._new_shell(SHELL_ARGV, run_as, variables, cwd or self._workdir)

    def upload(self, source: Path, target: str, *, ignore: Sequence[str] = ()) -> None:
        """See ``Sandbox``."""
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as archive:
            # the engine makes missing parent folders when it unpacks
            pack(source, archive, posixpath.normpath(target).lstrip("/"), ignore=ignore)
            archive.seek(0)
            self.upload_tar(archive, "/")

    def upload_tar(self, archive: IO[bytes], target: str) -> None:
        """See ``Sandbox``."""
        with engine_errors(f"copying into {target} of the container"):
            self._client.api.put_archive(self._id, target, archive)

    def download(self, path: str, sink: IO[bytes], limit: int) -> bool:
        """See ``Sandbox``."""
        api = self._client.api
        with engine_errors(f"copying {path} out of the container"):
            # asked for directly and not by get_archive, whose response cannot be closed before its end
            url = f"{api.base_url}/v{api.api_version}/containers/{self._id}/archive"
            with api.get(url, params={"path": path}, stream=True, timeout=api.timeout) as response:
                if response.status_code == _NOT_FOUND:
                    return False
                response.raise_for_status()
                size = 0
                for chunk in response.iter_content(_CHUNK_BYTES):
                    size += len(chunk)
                    if size > limit:
                        raise SizeLimitExceeded(f"{path} holds more than {limit // 1024**2} MiB")
                    sink.write(chunk)
        return True

    def read_file(self, path: str, limit: int) -> bytes | None:
        """See ``Sandbox``."""
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as archive:
            # room for the tar's own blocks beside the content
            if not self.download(path, archive, limit + 64 * 1024):
                return None
            archive.seek(0)
            return read_single_file(archive, limit)

    def oom_kills(self) -> int:
        """See ``Sandbox``."""
        if self._frozen:
            with engine_errors("inspecting the container"):
                return int(bool(self._state()["OOMKilled"]))
        _, text = self.run_once(
            "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null",
            user="0",
            timeout_s=SETUP_SECONDS,
        )
        match = _OOM.search(text.encode())
        return int(match[1]) if match else 0

    def freeze(self) -> None:
        """See ``Sandbox``."""
        from docker.errors import APIError

        if self._frozen:
            return
        self._close_shells()
        self._check_untouched()
        self._frozen = True
        with engine_errors("stopping the container"):
            # 409: it has ended already, by running out of memory
            with contextlib.suppress(APIError):
                self._client.api.kill(self._id)
            self._client.api.wait(self._id, timeout=int(SETUP_SECONDS))
        self._check_untouched()

    def close(self) -> None:
        """See ``Sandbox``."""
        if not self._closed.acquire(blocking=False):
            return
        try:
            self._close_shells()
            remove(self._client, self._id)
        except BaseException:  # Ctrl-C: the container may still be there, the next call shall remove it
            self._closed.release()
            raise
        self._on_close(self._id)

    def start(self) -> None:
        """Start the container, which was just created."""
        with engine_errors("starting a container"):
            self._client.api.start(self._id)
            self._started_at = str(self._state()["StartedAt"])

    def set_up(self, user: str | None, *, hand_over: bool) -> None:
        """Make the log folders, the working directory and the user; ``hand_over`` gives it that directory."""
        arguments = shlex.join([user or "", str(DEFAULT_UID), self._workdir, str(int(hand_over))])
        code, text = self.run_once(f"set -- {arguments}\n{_SETUP}", user="0", timeout_s=SETUP_SECONDS)
        found = re.search(r"^k3eval-user=(.+)$", text, re.MULTILINE)
        if code or not found:
            raise SandboxError(f"the container cannot be set up: {' '.join(text.split())[-300:]}")
        self._user = found[1]

    def run_once(self, script: str, *, user: str, timeout_s: float) -> tuple[int | None, str]:
        """Run a short script of our own in a shell of its own; returns (exit code, output)."""
        shell = self._new_shell(["/bin/sh"], user, self._env, "/")
        try:
            result = shell.run(script, timeout_s=timeout_s)
        finally:
            shell.close()
        return result.exit_code, result.text

    def _new_shell(self, argv: Sequence[str], user: str, env: Mapping[str, str], cwd: str) -> PersistentShell:
        def open_channel() -> ExecChannel:
            channel = ExecChannel(self._client.api, self._id, argv, user=user, workdir="/", env=env)
            if self._closed.locked():
                # closed from another thread meanwhile: a shell of a removed container may never say a word
                channel.close()
                raise SandboxError("the container was removed")
            return channel

        shell = PersistentShell(open_channel, lambda: self._kill_all(user), cwd)
        self._shells.append(shell)
        return shell

    def _state(self) -> Mapping[str, object]:
        """What the engine says of the container now: Running, ExitCode, OOMKilled, StartedAt."""
        found: Mapping[str, object] = self._client.api.inspect_container(self._id)["State"]
        return found

    def _check_untouched(self) -> None:
        """Raise SandboxError when the container was ended or restarted from outside: its files tell nothing.

        Nobody inside can do that: process 1 is root's and takes no signal from its own container.
        """
        with engine_errors("inspecting the container"):
            state = self._state()
        if state["StartedAt"] != self._started_at:
            raise SandboxError("the container was restarted from outside while it was in use")
        if not (state["Running"] or state["OOMKilled"] or self._frozen):
            raise SandboxError(
                f"the container was stopped from outside while it was in use (exit code {state['ExitCode']})"
            )

    def _close_shells(self) -> None:
        # with a shell still attached, removal waits for it more than a second
        for shell in self._shells:
            shell.close()

    def _kill_all(self, user: str) -> None:
        """Kill every process of ``user``, which is everything its commands started, daemons included.

        ``kill -9 -1`` by that user is atomic against forks. Where even that cannot start (a fork bomb at
        the process limit), the container is restarted: its files stay.
        """
        try:
            with engine_errors("killing a command"):
                exec_id = self._client.api.exec_create(self._id, _KILL_ARGV, user=user)["Id"]
                self._client.api.exec_start(exec_id)
                if self._client.api.exec_inspect(exec_id)["ExitCode"] in (0, 137):
                    return
        except SandboxError:
            pass  # the restart below either helps or says why not
        with engine_errors("restarting the container"):
            self._client.api.restart(self._id, timeout=0)
            self._started_at = str(self._state()["StartedAt"])


class DockerProvider:
    """See ``SandboxProvider``. Thread-safe."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        self._guard = threading.Lock()
        self._open: dict[str, DockerSandbox] = {}
        self._closed = False

    def start(self, spec: SandboxSpec) -> DockerSandbox:
        """See ``SandboxProvider``."""
        image_user, image_workdir = self._image_defaults(spec.image)
        workdir = str(PurePosixPath("/") / (spec.workdir or image_workdir or "/"))
        container_id = self._create(spec)
        sandbox = DockerSandbox(
            self._client,
            container_id,
            user=spec.user or "",
            workdir=workdir,
            env=spec.env,
            on_close=self._forget,
        )
        try:
            with self._guard:
                if self._closed:
                    raise SandboxError("the run is being stopped")
                self._open[container_id] = sandbox
            sandbox.start()
            sandbox.set_up(spec.user or image_user, hand_over=spec.role == "agent")
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def close(self) -> None:
        """See ``SandboxProvider``."""
        with self._guard:
            self._closed = True
            left = list(self._open.values())
        for sandbox in left:
            sandbox.close()

    def _forget(self, container_id: str) -> None:
        with self._guard:
            self._open.pop(container_id, None)

    def _image_defaults(self, image: str) -> tuple[str | None, str | None]:
        with engine_errors(f"inspecting image {image}"):
            config = self._client.images.get(image).attrs.get("Config") or {}
        user = str(config.get("User") or "").partition(":")[0]
        return (None if user in ("", "0", "root") else user), config.get("WorkingDir") or None

    def _create(self, spec: SandboxSpec) -> str:
        from docker.types import LogConfig

        limits = spec.limits
        api = self._client.api
        with engine_errors("creating a container"):
            memory = f"{limits.memory_mb}m"
            host = api.create_host_config(
                network_mode="none",
                cap_drop=["ALL"],
                cap_add=list(CAPABILITIES),
                security_opt=["no-new-privileges"],
                pids_limit=limits.pids,
                mem_limit=memory,
                memswap_limit=memory,
                nano_cpus=int(limits.cpus * 1e9),
                log_config=LogConfig(type=LogConfig.types.NONE),
            )
            created = api.create_container(
                spec.image,
                name=re.sub(r"[^A-Za-z0-9_.-]", "-", f"k3eval-{spec.trial_id}-{spec.role}"),
                entrypoint=["/bin/sh", "-c", LEASE_SCRIPT, "k3eval-lease", str(int(limits.lifetime_s))],
                user="0",
                working_dir="/",
                healthcheck={"test": ["NONE"]},
                labels=labels(spec.job_id, spec.trial_id, spec.role, limits.lifetime_s),
                host_config=host,
            )
        return str(created["Id"])

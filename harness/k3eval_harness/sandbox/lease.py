"""Who owns a container, and which ones are left over.

Every container carries labels: job, trial, role, owner process and expiry. It ends by itself at its expiry;
``reap`` removes what a dead owner or an expired lease left behind, and never touches a live run's containers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k3eval_harness.errors import SandboxError
from k3eval_harness.sandbox.engine import engine_errors

if TYPE_CHECKING:
    from docker import DockerClient

MARK: Final = "k3eval.sandbox"
_GRACE_SECONDS: Final = 60

LEASE_SCRIPT: Final = (
    'end=$(($(date +%s) + $1)); while now=$(date +%s); [ "$now" -lt "$end" ]; do sleep $((end - now)); done'
)
"""Main process of every container. It outlives a killed ``sleep`` and reaps orphans as process 1."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process on a machine; its start time tells it from a later one with the same number."""

    host: str
    pid: int
    started: int
    """Clock ticks since boot."""

    @classmethod
    def current(cls) -> Owner:
        """The calling process."""
        return cls(_this_machine(), os.getpid(), _start_ticks(os.getpid()) or 0)

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Read a label; None when it is no owner."""
        host, _, rest = text.rpartition("/")
        pid, _, started = rest.partition("@")
        if not (host and pid.isdigit() and started.isdigit()):
            return None
        return cls(host, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.host}/{self.pid}@{self.started}"

    def is_dead(self) -> bool:
        """Certainly gone: on this machine, and no such process runs."""
        return self.host == _this_machine() and _start_ticks(self.pid) != self.started


def labels(job_id: str, trial_id: str, role: str, lifetime_s: float) -> dict[str, str]:
    """Labels of a container that starts now."""
    return {
        MARK: "1",
        "k3eval.job": job_id,
        "k3eval.trial": trial_id,
        "k3eval.role": role,
        "k3eval.owner": str(Owner.current()),
        "k3eval.expires": str(int(time.time() + lifetime_s)),
    }


def is_left_over(found: Mapping[str, str], now: float) -> bool:
    """Whether a container with these labels belongs to nobody any more."""
    owner = Owner.parse(found.get("k3eval.owner", ""))
    if owner is not None and owner.is_dead():
        return True
    expires = found.get("k3eval.expires", "")
    return expires.isdigit() and int(expires) + _GRACE_SECONDS < now


def reap(client: DockerClient) -> tuple[str, ...]:
    """Remove left-over containers; returns their names. Raises SandboxError when the engine fails."""
    with engine_errors("listing left-over containers"):
        listed = client.api.containers(all=True, filters={"label": MARK})
    removed: list[str] = []
    for entry in listed:
        if not is_left_over(entry.get("Labels") or {}, time.time()):
            continue
        if remove(client, str(entry["Id"])):
            removed.append(str((entry.get("Names") or [entry["Id"]])[0]).lstrip("/"))
    return tuple(removed)


def remove(client: DockerClient, container_id: str) -> bool:
    """Kill and remove a container with its volumes; False when it was gone or cannot be removed now."""
    try:
        with engine_errors("removing a container"):
            client.api.remove_container(container_id, v=True, force=True)
    except SandboxError:
        return False
    return True


def _this_machine() -> str:
    """Host name and process namespace: only within one does a process number mean one process."""
    return f"{socket.gethostname()}:{Path('/proc/self/ns/pid').stat().st_ino}"


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the command name in parentheses may hold spaces; start time is field 22 of the line
    return int(stat.rpartition(")")[2].split()[19])

"""``task.toml`` in Harbor's format, schema 1.0 to 1.4, with the legacy keys.

Unknown keys never change behaviour and never pass in silence: they are kept aside by the models and
reported by ``unknown_keys`` with the nearest known name. k3eval's own extras live in ``[metadata.k3eval]``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

SCHEMA_VERSIONS: Final = ("1.0", "1.1", "1.2", "1.3", "1.4")
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"
DEFAULT_VERIFIER_SECONDS: Final = 600.0
DEFAULT_BUILD_SECONDS: Final = 600.0

MAX_MB: Final = 2**40
"""In bytes it still is a number that the engine can read."""
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
User = str | int
NetworkMode = Literal["public", "no-network", "allowlist"]
_SIZE: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMG])B?\s*$", re.IGNORECASE)
_UNITS_MB: Final = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class TomlTable(BaseModel):
    """Base of all tables: strict types, unknown keys kept for the warning."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class Author(TomlTable):
    """One author of a task."""

    name: str
    email: str | None = None


class PackageTable(TomlTable):
    """``[task]``: who made it and how it is called in a registry."""

    name: str = Field(pattern=NAME_PATTERN)
    """``org/name``."""
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []


class PhaseTable(TomlTable):
    """Network keys of a phase. k3eval runs every container without a network, whatever they say."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class AgentTable(PhaseTable):
    """``[agent]``."""

    timeout_sec: Seconds | None = None
    """Wall seconds for the agent; none = no limit of the task's."""
    user: User | None = None
    """Name or uid that the agent runs as."""


class HealthcheckTable(TomlTable):
    """``[environment.healthcheck]``: a command that must succeed before the agent starts."""

    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: Seconds = 5.0
    retries: int = Field(default=3, ge=1)


class TpuTable(TomlTable):
    """``[environment.tpu]``: parsed, but no container here offers one."""

    type: str
    topology: str


class McpServerTable(TomlTable):
    """``[[environment.mcp_servers]]``: parsed, but the sandbox has no network."""

    name: str
    transport: Literal["sse", "streamable-http", "http", "stdio"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}


class EnvironmentTable(PhaseTable):
    """``[environment]``: the image and the container's limits."""

    build_timeout_sec: Seconds = DEFAULT_BUILD_SECONDS
    docker_image: str | None = None
    """A ready image; ``environment/Dockerfile`` may then be absent."""
    os: Annotated[Literal["linux", "windows"], BeforeValidator(_lower)] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0, le=MAX_MB)
    storage_mb: int | None = Field(default=None, gt=0, le=MAX_MB)
    gpus: int | None = Field(default=None, ge=0)
    gpu_types: list[str] | None = None
    tpu: TpuTable | None = None
    mcp_servers: list[McpServerTable] = []
    env: dict[str, str] = {}
    """May hold ``${VAR}`` and ``${VAR:-default}``, taken from the host at run time."""
    skills_dir: str | None = None
    healthcheck: HealthcheckTable | None = None
    workdir: str | None = None
    memory: str | None = None
    """Legacy spelling of ``memory_mb``: ``"4G"``."""
    storage: str | None = None
    """Legacy spelling of ``storage_mb``."""
    allow_internet: bool | None = None
    """Legacy spelling of ``network_mode``."""

    @field_validator("cpus")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @model_validator(mode="before")
    @classmethod
    def _legacy(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        table = dict(data)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if isinstance(table.get(old), str):
                size = megabytes(table[old])
                if table.setdefault(new, size) != size:
                    raise ValueError(f"{old} = {table[old]!r} contradicts {new} = {table[new]!r}; keep {new}")
        if isinstance(table.get("allow_internet"), bool) and "network_mode" not in table:
            table["network_mode"] = "public" if table["allow_internet"] else "no-network"
        return table


class CollectTable(TomlTable):
    """``[[verifier.collect]]``: a command that snapshots state after the agent ends."""

    command: str
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: User | None = None


class VerifierTable(PhaseTable):
    """``[verifier]``: how the hidden tests run."""

    timeout_sec: Seconds = DEFAULT_VERIFIER_SECONDS
    env: dict[str, str] = {}
    user: User | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    """k3eval always grades in a fresh container of the task's image."""
    environment: EnvironmentTable | None = None
    collect: list[CollectTable] = []

    @model_validator(mode="after")
    def _mode(self) -> VerifierTable:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError(
                "environment_mode = 'shared' contradicts [verifier.environment]; drop one of them"
            )
        return self


class SolutionTable(TomlTable):
    """``[solution]``."""

    env: dict[str, str] = {}


class ArtifactTable(TomlTable):
    """One entry of ``artifacts``: a path of the container that is kept with the results."""

    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        if ".." in PurePosixPath(value).parts:
            raise ValueError("must not contain '..'")
        return value

    @field_validator("destination")
    @classmethod
    def _destination(cls, value: str | None) -> str | None:
        if value is None:
            return None
        path = PurePosixPath(value)
        if path.is_absolute() or ".." in path.parts or "\\" in value or not path.parts:
            raise ValueError("must be a relative path without '..'")
        if value.rstrip("/") == "manifest.json":
            raise ValueError("manifest.json is reserved")
        return value


def _artifact_table(value: object) -> object:
    return {"source": value} if isinstance(value, str) else value


Artifact = Annotated[ArtifactTable, BeforeValidator(_artifact_table)]
"""A table, or its ``source`` alone as a string."""


class StepTable(TomlTable):
    """``[[steps]]`` of a multi-step task."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckTable | None = None
    artifacts: list[Artifact] = []


class K3EvalTable(TomlTable):
    """``[metadata.k3eval]``: k3eval's own extras; other readers of the format ignore them.

    Further keys are allowed as provenance.
    """

    family: str | None = None
    """Name of the group the task belongs to; default: the folder above the task."""
    kind: str | None = None
    """What sort of bug or work it is, for reports."""
    oracle_stage: str | None = None
    """Stage of the Dockerfile that holds material for the solution and never reaches the agent."""
    oracle_files: list[str] = []
    """Absolute paths in that stage, uploaded beside ``solve.sh`` to ``/solution``."""
    pass_threshold: float = Field(default=1.0, gt=0)
    """Reward from which the trial counts as passed."""
    capture: list[str] = []
    """Absolute paths that cross over to grading; default: the working directory."""
    inject: str | None = None
    """Folder of the task whose content is laid into the agent's working directory when the sandbox starts, so
    that many tasks share one image."""

    @field_validator("inject")
    @classmethod
    def _inside(cls, value: str | None) -> str | None:
        if value is not None:
            pure = PurePosixPath(value)
            if pure.is_absolute() or ".." in pure.parts or not pure.parts:
                raise ValueError(f"{value!r} must be a folder inside the task, without '..'")
        return value

    @field_validator("oracle_files", "capture")
    @classmethod
    def _absolute(cls, value: list[str]) -> list[str]:
        for path in value:
            pure = PurePosixPath(path)
            if not pure.is_absolute() or ".." in pure.parts or len(pure.parts) < 2:
                raise ValueError(f"{path!r} must be an absolute path below / without '..'")
        return value

    @model_validator(mode="after")
    def _stage(self) -> K3EvalTable:
        if bool(self.oracle_stage) != bool(self.oracle_files):
            raise ValueError("oracle_stage and oracle_files go together: set both or neither")
        return self


class TaskConfig(TomlTable):
    """The whole ``task.toml``."""

    schema_version: str = "1.4"
    task: PackageTable | None = None
    metadata: dict[str, object] = {}
    """Free table; its member ``k3eval`` is read as K3EvalTable."""
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    source: str | None = None
    artifacts: list[Artifact] = []
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepTable] = []

    @model_validator(mode="before")
    @classmethod
    def _legacy_version(cls, data: object) -> object:
        if isinstance(data, Mapping) and "version" in data:
            table = dict(data)
            table.setdefault("schema_version", table.pop("version"))
            return table
        return data

    @field_validator("schema_version")
    @classmethod
    def _known_version(cls, value: str) -> str:
        if value not in SCHEMA_VERSIONS:
            raise ValueError(f"{value!r} is not one of {', '.join(SCHEMA_VERSIONS)}")
        return value


def megabytes(text: str) -> int:
    """Legacy size ``"4G"``, ``"512M"`` or ``"1024K"`` in MiB."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as '4G' or '512M'")
    return int(float(match[1]) * _UNITS_MB[match[2].upper()])


def unknown_keys(table: BaseModel, where: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield (dotted key, nearest known name of the same table or None) for every key nobody reads."""
    names = sorted(type(table).model_fields)
    for key in sorted(table.model_extra or {}):
        near = difflib.get_close_matches(key, names, n=1)
        yield f"{where}{key}", near[0] if near else None
    for name in names:
        value = getattr(table, name)
        if isinstance(value, BaseModel):
            yield from unknown_keys(value, f"{where}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from unknown_keys(item, f"{where}{name}[{index}].")

"""``k3eval doctor``: what this machine has of what k3eval needs. Keys are only ever present or absent."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from k3eval_harness.cli.common import Exit, fail, one_line_errors, print_json

if TYPE_CHECKING:
    from docker import DockerClient

Status = Literal["ok", "missing", "note"]

PACKAGES = ("docker", "httpx", "openai", "pandas", "pydantic", "rich", "scipy", "tiktoken", "typer")
LOCAL_PACKAGES = ("starlette", "uvicorn", "safetensors", "llguidance", "triton")
PROVIDERS = ("moonshot", "moonshot-cn", "openrouter")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``missing`` is what ``k3eval run`` cannot do without; ``note`` may be absent."""

    name: str
    status: Status
    detail: str


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(doctor)


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Check engine, base image, disk, keys, torch, GPU. Exit 3 when something needed is missing."""
    with one_line_errors():
        from k3eval_harness.cli.render import print_table

        checks = [*python_checks(), *engine_checks(), *task_checks(), *key_checks(), *torch_checks()]
        missing = [check.name for check in checks if check.status == "missing"]
        if json:
            print_json({"ok": not missing, "checks": [asdict(check) for check in checks]})
        else:
            print_table(("check", "status", "detail"), [(c.name, c.status, c.detail) for c in checks])
        if missing:
            raise fail(f"needed and missing: {', '.join(missing)}", Exit.VOID)


def python_checks() -> Iterator[Check]:
    """Interpreter and packages."""
    enough = sys.version_info >= (3, 11)
    where = f"{platform.python_version()} on {platform.platform()}"
    yield Check("python", "ok" if enough else "missing", where if enough else f"{where}; 3.11 is needed")
    yield Check("k3eval", "ok", _version("k3eval") or "not installed, run from its sources")
    absent = [name for name in PACKAGES if _version(name) is None]
    found = ", ".join(f"{name} {_version(name)}" for name in PACKAGES if name not in absent)
    yield Check("packages", "missing" if absent else "ok", f"no {', '.join(absent)}" if absent else found)


def engine_checks() -> Iterator[Check]:
    """Docker engine, free disk, base image."""
    from k3eval_harness.errors import HarnessError
    from k3eval_harness.sandbox import engine

    try:
        client = engine.connect(timeout_s=10)
    except HarnessError as error:
        yield Check("engine", "missing", error.message)
        return
    try:
        info = engine.engine_info(client)
        memory = f"{info.memory_bytes / 2**30:.1f} GiB memory"
        yield Check(
            "engine", "ok", f"Docker {info.version}, API {info.api_version}, {info.cpus} CPUs, {memory}"
        )
        yield _disk(client)
        yield _base_image(client)
    except HarnessError as error:
        yield Check("engine", "missing", error.message)
    finally:
        client.close()


def task_checks() -> Iterator[Check]:
    """The tasks folder."""
    from k3eval_harness.errors import HarnessError
    from k3eval_harness.task import find_tasks

    try:
        yield Check("tasks", "ok", f"{len(find_tasks('*'))} found")
    except HarnessError as error:
        yield Check("tasks", "note", error.message)


def key_checks() -> Iterator[Check]:
    """API keys by their variables' names. The values are neither read into a message nor shown in part."""
    from k3eval.providers import provider_named

    for name in PROVIDERS:
        variables = provider_named(name).key_env
        present = [variable for variable in variables if os.environ.get(variable)]
        detail = f"present in {present[0]}" if present else f"absent (set {' or '.join(variables)})"
        yield Check(f"key for {name}", "ok" if present else "note", detail)


def torch_checks() -> Iterator[Check]:
    """What the local backend needs, and the accelerator that it could use."""
    absent = [name for name in LOCAL_PACKAGES if _version(name) is None]
    if _version("torch") is None or absent:
        lacking = ", ".join(absent if _version("torch") else ["torch", *absent])
        yield Check("local backend", "note", f"no {lacking}; for local models: pip install 'k3eval[local]'")
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check("local backend", "note", f"torch cannot be loaded: {' '.join(str(error).split())}")
        return
    yield Check("local backend", "ok", f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    yield _native_step()
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        yield Check("GPU", "ok", f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB")
    else:
        yield Check("GPU", "note", "none that torch can use; local models run on the CPU")


def _native_step() -> Check:
    """Builds it where that has not been done yet, in a few seconds."""
    from k3eval_local.kernels.native.build import NativeUnavailable, load

    try:
        return Check("native step", "ok", f"built for {load().isa}")
    except NativeUnavailable as error:
        reason = " ".join(str(error).split())
        return Check("native step", "note", f"{reason}; local models run on plain torch, which is slower")


def _disk(client: DockerClient) -> Check:
    from k3eval_harness.sandbox.engine import MIN_FREE_BYTES, disk_free

    free = disk_free(client)
    if free is None:
        return Check("disk", "note", "the engine is on another machine; its disk cannot be seen")
    enough = free >= MIN_FREE_BYTES
    need = "" if enough else f", {MIN_FREE_BYTES / 2**30:.0f} are needed: `docker image prune` may free some"
    return Check("disk", "ok" if enough else "missing", f"{free / 2**30:.1f} GiB free for images{need}")


def _base_image(client: DockerClient) -> Check:
    from k3eval_harness.sandbox.base_image import BASE_REF, EngineImages
    from k3eval_harness.sandbox.engine import engine_errors

    with engine_errors("looking for the base image"):
        found = EngineImages(client).find(BASE_REF)
    detail = (
        f"{BASE_REF} ({found[:19]})" if found else f"{BASE_REF} is not here yet; the first run provides it"
    )
    return Check("base image", "ok" if found else "note", detail)


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

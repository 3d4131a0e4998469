"""What a model name means: a scaled config, a shipped checkpoint or a folder. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from k3eval_local.errors import ModelConfigError
from k3eval_local.model.config import SCALED_NAMES, K3Config

BUNDLED = Path(__file__).parents[1] / "checkpoints"
"""Checkpoints that are shipped with the package, one folder each."""


def resolve(name: str) -> Path | K3Config:
    """A checkpoint folder, a shipped checkpoint, or a scaled config (any case, also with ``-mla``).

    Raises:
        ModelConfigError: none of these; the message lists what there is.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    bundled = sorted(path.parent.name for path in BUNDLED.glob("*/config.json"))
    if name.lower() in bundled:
        return BUNDLED / name.lower()
    if folder.is_dir():
        raise ModelConfigError(f"{name} is not a checkpoint folder: it holds no config.json")
    if name.lower().removesuffix("-mla") in SCALED_NAMES:
        return K3Config.scaled(name)
    known = ", ".join([*SCALED_NAMES, *bundled])
    raise ModelConfigError(
        f"no model is called {name!r}: use {known}, a scaled name with -mla, or a checkpoint folder"
    )


def config_of(name: str) -> K3Config:
    """The sizes behind a name: as ``resolve``, and also ``full`` (the released K3) and a config.json file."""
    if name.lower() == "full":
        return K3Config.full()
    if name.lower() == "full-mla":
        return K3Config.full().mla_twin()
    if Path(name).expanduser().is_file():
        return K3Config.read(Path(name).expanduser())
    found = resolve(name)
    return K3Config.read(found / "config.json") if isinstance(found, Path) else found

"""Checkpoints in the layout of the released Kimi K3: config.json, safetensors shards and their index.

Tensor names are the published ones (``language_model.model.layers.N...``), one tensor an expert, ``A_log``
padded with zeros, and fp32 where the release keeps fp32. Saving is all or nothing; loading is strict and
names everything that does not fit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3eval_local.errors import CheckpointError
from k3eval_local.model.config import K3Config
from k3eval_local.model.decoder import K3Model
from k3eval_local.model.mxfp4 import dequantize, quantize
from k3eval_local.model.names import resolve as resolve

PREFIX = "language_model."
INDEX = "model.safetensors.index.json"
_ORIGIN = "k3eval.weights"
"""Key in the shards' free metadata, which other loaders ignore and other writers drop with the tensors."""
_FP32 = re.compile(r"(A_log|dt_bias|e_score_correction_bias|_conv1d\.weight|o_norm\.weight)$")
_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
_STACKED = re.compile(r"(.*\.experts\.)(w[123])(?:_(packed|scale))?$")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(w[123])\.weight(?:_(packed|scale))?$")


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class _Tensors(Protocol):
    """The part of safetensors' reader that is used here; the package has no types for it."""

    def metadata(self) -> dict[str, str] | None: ...

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _Slice: ...


def open_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[K3Model, str]:
    """The model of a name, and where its weights come from: ``random, seed 0`` or ``sha256:...``.

    A checkpoint that was saved with an origin says both: ``random, seed 0 (sha256:...)``.
    """
    found = resolve(name)
    if isinstance(found, Path):
        model, digest, origin = load(found, dtype), fingerprint(found), origin_of(found)
        return model, f"{origin} ({digest})" if origin else digest
    return K3Model(found, dtype).init_weights(seed), f"random, seed {seed}"


def fingerprint(folder: Path) -> str:
    """``sha256:`` and the digest of config.json and all shards, in order of their names."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def origin_of(folder: Path) -> str | None:
    """What ``save`` was told of where the weights come from; None where not every shard says the same.

    Raises:
        CheckpointError: the folder or a shard is damaged.
    """
    said = set()
    for file in _shards(folder):
        with _opened(file) as tensors:
            said.add((tensors.metadata() or {}).get(_ORIGIN))
    return said.pop() if len(said) == 1 else None


def save(
    model: K3Model,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    mxfp4: bool = False,
    shard_bytes: int = 4_000_000_000,
    extra_files: Sequence[Path] = (),
    origin: str | None = None,
) -> None:
    """Write a new checkpoint folder, complete or not at all.

    Args:
        model: dense or with packed experts (those stay packed).
        folder: must not exist, or be empty.
        dtype: of the matrices, the model's own by default; what K3 keeps in fp32 stays fp32.
        mxfp4: pack the routed experts.
        shard_bytes: a new shard is begun above this size.
        extra_files: copied into the folder (a tokenizer).
        origin: where the weights come from, if their bytes cannot tell: ``random, seed 0``.

    Raises:
        CheckpointError: the folder is in use or cannot be written.
        ModelConfigError: the experts cannot be packed.
    """
    config = replace(model.config, mxfp4=model.config.mxfp4 or mxfp4)
    with new_folder(folder) as partial:
        shards: list[dict[str, Tensor]] = [{}]
        size = 0
        for name, tensor in _published(model, config.mxfp4, dtype):
            if size + tensor.nbytes > shard_bytes and shards[-1]:
                shards.append({})
                size = 0
            shards[-1][name] = tensor
            size += tensor.nbytes
        weight_map: dict[str, str] = {}
        metadata = {"format": "pt"} | ({_ORIGIN: origin} if origin else {})
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, partial / file, metadata=metadata)
            weight_map |= dict.fromkeys(shard, file)
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for extra in extra_files:
            shutil.copyfile(extra, partial / extra.name)
        data = config.to_dict()
        data["dtype"] = str(dtype or model.dtype).removeprefix("torch.")
        text = json.dumps(data, indent=2)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")


def load(folder: Path, dtype: torch.dtype = torch.float32, *, unpack: bool = False) -> K3Model:
    """Read a checkpoint folder strictly.

    Args:
        folder: with config.json and safetensors.
        dtype: of the model's matrices, whatever the file holds.
        unpack: turn MXFP4 experts into plain matrices; otherwise they stay packed and run so.

    Raises:
        CheckpointError: names every missing, unexpected and misshaped tensor, or the damaged file.
        ModelConfigError: config.json cannot make a model.
    """
    config = K3Config.read(folder / "config.json")
    files = _shards(folder)
    _check(config, folder, files)
    model = K3Model(replace(config, mxfp4=False) if unpack else config, dtype)
    own = model.state_dict()
    with torch.no_grad():
        for file, names in files.items():
            with _opened(file) as tensors:
                for name in sorted(names):
                    _fill(own, name, tensors.get_tensor(name), config.mxfp4 and unpack, tensors)
    return model


def expected_shapes(config: K3Config) -> dict[str, tuple[int, ...]]:
    """Published name and shape of every tensor of a model; ``A_log`` with its padding."""
    model = K3Model(config, torch.bfloat16, device="meta")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        stacked = _STACKED.fullmatch(name)
        if stacked:
            for expert in range(tensor.shape[0]):
                shapes[_expert_name(stacked, expert)] = tuple(tensor.shape[1:])
        elif name.endswith(".A_log"):
            shapes[PREFIX + name] = (_padded_heads(config),)
        else:
            shapes[PREFIX + name] = tuple(tensor.shape)
    return shapes


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder under a temporary name beside the target; it gets its name when the block ends well.

    Raises:
        CheckpointError: the target holds something, or the disk does not play along.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists; choose a new folder")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _padded_heads(config: K3Config) -> int:
    """The release stores 96 heads in 128 entries: a multiple of the head size."""
    heads, step = config.linear_attn.num_heads, config.linear_attn.head_dim
    return -(-heads // step) * step


def _expert_name(stacked: re.Match[str], expert: int) -> str:
    start, matrix, part = stacked.groups()
    return f"{PREFIX}{start}{expert}.{matrix}.weight" + (f"_{part}" if part else "")


def _published(model: K3Model, mxfp4: bool, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model under its published name."""
    for name, tensor in model.state_dict().items():
        stacked = _STACKED.fullmatch(name)
        if stacked and mxfp4 and not stacked[3]:
            packed, scale = quantize(tensor)
            for expert in range(tensor.shape[0]):
                plain = _expert_name(stacked, expert)
                yield f"{plain}_packed", packed[expert].clone()
                yield f"{plain}_scale", scale[expert].clone()
        elif stacked:
            for expert in range(tensor.shape[0]):
                matrix = tensor[expert]
                kept = dtype if dtype is not None and matrix.is_floating_point() else matrix.dtype
                yield _expert_name(stacked, expert), matrix.to(kept, copy=True)
        else:
            if name.endswith(".A_log"):
                heads = _padded_heads(model.config)
                tensor = torch.nn.functional.pad(tensor, (0, heads - tensor.shape[0]))
            kept = tensor.dtype if dtype is None else torch.float32 if _FP32.search(name) else dtype
            yield PREFIX + name, tensor.to(kept).contiguous()


def _shards(folder: Path) -> dict[Path, set[str]]:
    """The shard files and the names that the index promises in each."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if not index.is_file() and single.is_file():
        with _opened(single) as tensors:
            return {single: set(tensors.keys())}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged: it holds no weight_map") from error
    files: dict[Path, set[str]] = {}
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} is damaged: weight_map must give a file name for each tensor")
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise CheckpointError(f"{index} is damaged: {file!r} is not a file name")
        files.setdefault(folder / file, set()).add(name)
    return files


@contextmanager
def _opened(file: Path) -> Iterator[_Tensors]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield cast(_Tensors, tensors)
    except (SafetensorError, OSError) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged or truncated: {error}"
        raise CheckpointError(f"{file} {what}") from error


def _check(config: K3Config, folder: Path, files: Mapping[Path, set[str]]) -> None:
    """Compare names, shapes and kinds of number before anything is loaded."""
    expected = expected_shapes(config)
    found: set[str] = set()
    unexpected: list[str] = []
    misshaped: list[str] = []
    for file, promised in files.items():
        with _opened(file) as tensors:
            names = set(tensors.keys())
            found |= names & promised
            unexpected += sorted((names | promised) - set(expected)) + sorted(
                names - promised & set(expected)
            )
            for name in sorted(names & promised & set(expected)):
                view = tensors.get_slice(name)
                shape, kind = tuple(view.get_shape()), view.get_dtype()
                if not _fits(name, shape, expected[name], config):
                    misshaped.append(f"{name} is {list(shape)}, not {list(expected[name])}")
                elif kind not in ({"U8"} if name.endswith(("_packed", "_scale")) else _FLOATS):
                    misshaped.append(f"{name} holds {kind}")
                elif name.endswith(".A_log") and bool(
                    tensors.get_tensor(name)[config.linear_attn.num_heads :].any()
                ):
                    misshaped.append(f"{name} has values in its padding")
    missing = sorted(set(expected) - found)
    parts = (("missing", missing), ("unexpected", unexpected), ("misshaped", misshaped))
    problems = [f"{what}: {', '.join(names)}" for what, names in parts if names]
    if problems:
        raise CheckpointError(f"{folder} does not fit its config.json; {'; '.join(problems)}")


def _fits(name: str, shape: tuple[int, ...], expected: tuple[int, ...], config: K3Config) -> bool:
    if name.endswith(".A_log"):
        return len(shape) == 1 and shape[0] >= config.linear_attn.num_heads
    return shape == expected


def _fill(own: Mapping[str, Tensor], name: str, tensor: Tensor, unpack: bool, tensors: _Tensors) -> None:
    """Copy one published tensor into the model's state dict (whose tensors are the parameters themselves)."""
    expert = _EXPERT.fullmatch(name.removeprefix(PREFIX))
    if not expert:
        target = own[name.removeprefix(PREFIX)]
        target.copy_(tensor[: target.shape[0]] if name.endswith(".A_log") else tensor)
        return
    start, number, matrix, part = expert.groups()
    if not (part and unpack):
        own[f"{start}{matrix}" + (f"_{part}" if part else "")][int(number)].copy_(tensor)
    elif part == "packed":
        scale = tensors.get_tensor(name.removesuffix("packed") + "scale")
        own[f"{start}{matrix}"][int(number)].copy_(dequantize(tensor, scale))

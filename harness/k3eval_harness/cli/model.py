"""``k3eval model``: make, describe, run and convert checkpoints of the local reference model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3eval_harness.cli.common import Exit, fail, help_without_command, out_option, print_json

if TYPE_CHECKING:
    import torch

    from k3eval_local.model.accounting import ModelReport

CONTEXTS = (4096, 32768, 131072, 1048576)
LARGEST_INIT = 8_000_000_000
"""Parameters; in fp32 this is 32 GB of memory."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
OutOption = Annotated[Path, out_option("What to write; it must not exist yet.")]


class Stored(StrEnum):
    """Types of cache and state."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"


class Matrices(StrEnum):
    """Types of the matrices in a checkpoint."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Target(StrEnum):
    """What ``convert`` can write."""

    FP32 = "fp32"
    BF16 = "bf16"
    MXFP4 = "mxfp4"
    GGUF = "gguf"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    group = typer.Typer(
        help="Make, describe, run and convert K3 checkpoints.",
        callback=help_without_command,
        invoke_without_command=True,
    )
    for command in (init, info, logits, convert):
        group.command()(command)
    app.add_typer(group, name="model")


def init(
    config: Annotated[
        str, typer.Option(help="a, b, c, d, c56, d56, one of these with -mla, or a config.json.")
    ],
    out: OutOption,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
    dtype: Annotated[Matrices, typer.Option(help="Type of the matrices.")] = Matrices.BF16,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint with random weights."""
    with _one_line_errors():
        from k3eval_local.checkpoint import save
        from k3eval_local.model.accounting import count_parameters
        from k3eval_local.model.decoder import K3Model
        from k3eval_local.model.names import config_of

        sizes = config_of(config)
        _check_size(count_parameters(sizes).total)
        model = K3Model(replace(sizes, mxfp4=False)).init_weights(seed)
        origin = f"random, seed {seed}"
        save(model, out, dtype=_torch_dtype(dtype), mxfp4=sizes.mxfp4, origin=origin)
        _say(as_json, {"path": str(out), "weights": origin}, f"wrote {out}: {origin}")


def info(
    model: Annotated[
        str, typer.Argument(help="A checkpoint folder, a config name (also full), or a config.json.")
    ],
    context: Annotated[list[int] | None, typer.Option(min=1, help="Context length; repeatable.")] = None,
    cache: Annotated[Stored, typer.Option(help="Type of the MLA cache.")] = Stored.BF16,
    state: Annotated[Stored, typer.Option(help="Type of the KDA state.")] = Stored.FP32,
    as_json: JsonOption = False,
) -> None:
    """Parameters, cache and state bytes, break-even, against the all-MLA twin."""
    with _one_line_errors():
        from k3eval_local.model.accounting import report
        from k3eval_local.model.names import config_of

        found = report(config_of(model), context or CONTEXTS, cache.value, state.value)
        if as_json:
            print_json(asdict(found))
        else:
            _show(model, found)


def logits(
    folder: Annotated[str, typer.Argument(help="A checkpoint folder, or a scaled config (random weights).")],
    ids: Annotated[Path, typer.Option(help="JSON list of token ids.")],
    out: OutOption,
    seed: Annotated[int, typer.Option(min=0, help="Seed, for a scaled config.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Write the logits of every position, float32 [T, V], as one .npy file."""
    with _one_line_errors():
        import numpy as np
        import torch

        from k3eval_local.checkpoint import open_model

        if out.exists():
            raise fail(f"{out} exists; choose a new file")
        model, weights = open_model(folder, seed)
        tokens = _read_ids(ids, model.config.vocab_size)
        with torch.inference_mode():
            values = model.all_logits(torch.tensor([tokens]))[0].numpy()
        with _new_file(out) as partial, partial.open("wb") as file:
            np.save(file, values)
        found = {"path": str(out), "shape": list(values.shape), "weights": weights}
        _say(as_json, found, f"wrote {out}: {values.shape[0]} positions, {weights}")


def convert(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    to: Annotated[Target, typer.Option(help="What to write: a folder, or one file for gguf.")],
    out: OutOption,
    matrices: Annotated[Matrices, typer.Option(help="Type of the matrices, for gguf.")] = Matrices.FP32,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint in another form: bf16, fp32, MXFP4 experts, or GGUF for llama.cpp."""
    with _one_line_errors():
        from k3eval_local.model.convert import to_folder, to_gguf

        if to is Target.GGUF:
            to_gguf(folder, out, matrices.value)
        else:
            to_folder(folder, out, to)
        _say(as_json, {"path": str(out), "format": to.value}, f"wrote {out}: {to.value}")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    from k3eval_local.errors import LocalError

    try:
        yield
    except LocalError as error:
        raise fail(" ".join(str(error).split())) from error
    except ModuleNotFoundError as error:
        raise fail(f"{error.name} is not installed; install k3eval with its extra 'local'") from error
    except OSError as error:
        raise fail(f"{error.filename or 'disk'}: {error.strerror or error}") from error
    except KeyboardInterrupt:
        raise fail("interrupted", Exit.INTERRUPTED) from None


def _say(as_json: bool, data: Mapping[str, object], line: str) -> None:
    if as_json:
        print_json(data)
    else:
        typer.echo(line)


def _check_size(parameters: int) -> None:
    if parameters > LARGEST_INIT:
        raise fail(f"{parameters:,} parameters are too many to make here; the limit is {LARGEST_INIT:,}")


def _torch_dtype(name: Matrices) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name.value]


def _read_ids(path: Path, vocab: int) -> list[int]:
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise fail(f"{path} is not JSON: {error}") from error
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise fail(f"{path} must hold a JSON list of at least one token id")
    outside = [token for token in ids if not 0 <= token < vocab]
    if outside:
        raise fail(f"{path} holds the id {outside[0]}, outside the vocabulary of {vocab}")
    return ids


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A temporary name beside the target, renamed when the block ends well."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _bytes(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _show(name: str, found: ModelReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{name}: {found.parameters_total:,} parameters, {found.parameters_active:,} active a token; "
        f"{found.layers} layers, {found.kda_layers} KDA + {found.mla_layers} MLA"
    )
    console.print(
        f"{found.cache_type} cache {found.cache_bytes_per_token:,} bytes a token "
        f"(all-MLA twin {found.twin_cache_bytes_per_token:,}); "
        f"{found.state_type} state {found.state_bytes:,} bytes a sequence"
    )
    if found.break_even_tokens is not None:
        console.print(f"stores less than its all-MLA twin from {found.break_even_tokens:,} tokens on")
    table = Table("context", "memory", "twin", "ratio", "decode/token", "twin", "ratio")
    for row in found.contexts:
        memory, decode = row.memory / row.twin_memory, row.decode / row.twin_decode
        cells = (row.memory, row.twin_memory, memory, row.decode, row.twin_decode, decode)
        table.add_row(
            f"{row.context:,}", *(_bytes(cell) if isinstance(cell, int) else f"{cell:.3f}" for cell in cells)
        )
    console.print(table)

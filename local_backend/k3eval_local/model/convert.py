"""Checkpoints in other forms: other matrix types, MXFP4 experts, GGUF. A tokenizer goes along."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from k3eval_local.checkpoint import load, origin_of, save
from k3eval_local.errors import CheckpointError
from k3eval_local.model.config import K3Config
from k3eval_local.tokenizer import RANK_FILE, Tokenizer, TokenizerError, control_name

if TYPE_CHECKING:
    from k3eval_local.model.gguf import MatrixType, Vocabulary


def to_folder(source: Path, target: Path, form: str) -> None:
    """Write a new checkpoint folder from another one.

    ``form``: fp32, bf16 or mxfp4 (bf16 with packed experts). Packed experts are unpacked for the others.

    Raises:
        CheckpointError: the source is damaged, or the target is in use.
        ModelConfigError: the experts' sizes do not allow MXFP4.
    """
    if form not in {"fp32", "bf16", "mxfp4"}:
        raise CheckpointError(f"cannot convert to {form!r}; there are fp32, bf16 and mxfp4")
    model = load(source, unpack=form != "mxfp4")
    extra = [source / RANK_FILE] if (source / RANK_FILE).is_file() else []
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    save(model, target, dtype=dtype, mxfp4=form == "mxfp4", extra_files=extra, origin=origin_of(source))


def to_gguf(source: Path, target: Path, matrices: MatrixType = "fp32") -> None:
    """Write a GGUF file for llama.cpp, with the checkpoint's vocabulary.

    Raises:
        CheckpointError: the source is damaged, or the target exists.
    """
    from k3eval_local.model.gguf import export

    if target.exists():
        raise CheckpointError(f"{target} exists; choose a new file")
    model = load(source, unpack=True)
    export(model, target, matrices=matrices, vocabulary=_vocabulary(source, model.config))


def _vocabulary(folder: Path, config: K3Config) -> Vocabulary:
    from k3eval_local.model.gguf import Vocabulary

    try:
        tokenizer = Tokenizer.for_checkpoint(folder, config.vocab_size)
    except TokenizerError:
        if (folder / RANK_FILE).is_file():
            raise
        return Vocabulary.made_up(config)
    ordinary = [tokenizer.token_bytes(token) for token in range(tokenizer.n_ranks)]
    control = [control_name(offset) for offset in range(config.vocab_size - tokenizer.n_ranks)]
    return Vocabulary.of(ordinary, control)

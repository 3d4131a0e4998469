"""The local backend's error tree. Every message is one line: what is wrong and what to do.

LocalError
ModelConfigError      a config.json or a size that cannot make a model; names the field
CheckpointError       a checkpoint folder that cannot be read or written; names files and tensors
"""

from __future__ import annotations


class LocalError(Exception):
    """Base of every error that the local backend raises on purpose."""


class ModelConfigError(LocalError, ValueError):
    """A configuration that cannot make a model. The message names the field."""


class CheckpointError(LocalError, ValueError):
    """A checkpoint that cannot be read or written. The message names the files or tensors."""

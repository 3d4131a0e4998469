"""The reference model in plain torch: the specification for every faster path.

Read in this order: ``config``, ``kda``, ``mla``, ``situ``, ``moe`` with ``balancing``, ``attn_res``,
``decoder``; then ``state``, ``accounting``, ``mxfp4``, ``gguf``. The names below are loaded on first use,
so that ``config`` and ``accounting`` work without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3eval_local.model.config import K3Config as K3Config
    from k3eval_local.model.config import LinearAttnConfig as LinearAttnConfig
    from k3eval_local.model.decoder import K3Model as K3Model
    from k3eval_local.model.state import KDAState as KDAState
    from k3eval_local.model.state import MLAState as MLAState
    from k3eval_local.model.state import ModelState as ModelState

_HOME = {
    "K3Config": "config",
    "LinearAttnConfig": "config",
    "K3Model": "decoder",
    "KDAState": "state",
    "MLAState": "state",
    "ModelState": "state",
}
__all__ = ["K3Config", "K3Model", "KDAState", "LinearAttnConfig", "MLAState", "ModelState"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

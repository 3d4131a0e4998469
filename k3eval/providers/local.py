"""The local backend: a scaled K3 on this machine, in the dialect of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from k3eval.providers.compatible import Compatible


@dataclass(frozen=True, kw_only=True)
class Local(Compatible):
    """``k3eval serve``. Forced lengths and server timings go through ``extra``."""

    estimate_path: ClassVar[str | None] = "/tokenizers/estimate-token-count"


LOCAL: Final = Local(
    name="local",
    base_url="http://127.0.0.1:8000/v1",
    key_env=("K3EVAL_LOCAL_API_KEY",),
    key_required=False,
    self_hosted=True,
)


def local(base_url: str | None = None) -> Local:
    """Return the provider, at another address when one is given."""
    return LOCAL if base_url is None else replace(LOCAL, base_url=base_url)

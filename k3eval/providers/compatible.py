"""Any server that speaks chat completions: vLLM, SGLang, a gateway."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from k3eval.jsontypes import JsonObject, as_object
from k3eval.notices import Notices
from k3eval.options import ChatRequest
from k3eval.providers.base import Provider


@dataclass(frozen=True, kw_only=True)
class Compatible(Provider):
    """A server given by its URL. Reasoning is replayed under the member in which it came."""

    def extend(self, data: JsonObject, request: ChatRequest, notices: Notices) -> None:
        """Effort goes to the chat template, as vLLM's and SGLang's K3 recipes want it."""
        if request.effort is None:
            return
        off = request.effort == "off"
        switches: JsonObject = (
            {"thinking": False} if off else {"thinking": True, "thinking_effort": request.effort}
        )
        given = as_object(request.extra.get("chat_template_kwargs")) or {}
        data["chat_template_kwargs"] = {**switches, **given}

    def body(self, request: ChatRequest, notices: Notices) -> JsonObject:
        """As everywhere; template switches of the caller are joined with those of ``effort``."""
        data = super().body(request, notices)
        if request.effort is not None and "chat_template_kwargs" in request.extra:
            self.extend(data, request, notices)
        return data


def is_private(base_url: str) -> bool:
    """Whether a URL points at this machine or a private network, where tokens cost no money."""
    name = (urlsplit(base_url).hostname or "").lower()
    if name.endswith((".local", ".internal", ".localhost")):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return "." not in name  # a bare name: localhost, or a machine of the own network
    return address.is_private or address.is_loopback or address.is_link_local


def compatible(base_url: str) -> Compatible:
    """Return the provider for a server's URL."""
    private = is_private(base_url)
    return Compatible(
        name="compatible",
        base_url=base_url,
        key_env=("K3EVAL_COMPATIBLE_API_KEY",),
        key_required=False,
        self_hosted=private,
        privacy=None
        if private
        else f"Prompts go to {urlsplit(base_url).hostname}: check its terms on storage and training",
    )

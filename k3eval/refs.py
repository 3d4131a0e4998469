"""Names of models as users write them: ``provider/model``, or ``compatible/ID@URL``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from k3eval.errors import ConfigError

PROVIDER_NAMES: Final = ("openrouter", "moonshot", "moonshot-cn", "local", "compatible")

FORMS: Final = "local/NAME, moonshot/kimi-k3, moonshot-cn/kimi-k3, openrouter/moonshotai/kimi-k3, compatible/ID@http://HOST:PORT/v1"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model behind a provider. ``str(ref)`` gives the text that ``parse`` reads."""

    provider: str
    model: str
    base_url: str | None = None

    def __str__(self) -> str:
        return f"{self.provider}/{self.model}" + (f"@{self.base_url}" if self.base_url else "")

    @classmethod
    def parse(cls, text: str) -> ModelRef:
        """Read ``provider/model[@URL]``; ``ConfigError`` names the accepted forms."""
        provider, slash, rest = text.strip().partition("/")
        if not slash or not rest or provider not in PROVIDER_NAMES:
            raise ConfigError(f"unknown model {text!r}; write one of: {FORMS}")
        model, base_url = rest, None
        for scheme in ("@http://", "@https://"):
            head, found, tail = rest.partition(scheme)
            if found:
                model, base_url = head, scheme[1:] + tail
        if not model or any(c.isspace() for c in rest) or (base_url or "x").endswith("://"):
            raise ConfigError(f"unknown model {text!r}; write one of: {FORMS}")
        if provider == "compatible" and base_url is None:
            raise ConfigError(f"{text!r} names no server; write compatible/ID@http://HOST:PORT/v1")
        return cls(provider, model, base_url)

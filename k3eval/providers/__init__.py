"""One module a host: what each provider states about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3eval.errors import ConfigError
from k3eval.refs import PROVIDER_NAMES

if TYPE_CHECKING:
    from k3eval.providers.base import Provider


def provider_named(name: str, base_url: str | None = None) -> Provider:
    """Return the provider of a name, at another address when one is given; ``ConfigError`` names the known
    ones.
    """
    from dataclasses import replace

    if name == "compatible":
        from k3eval.providers.compatible import compatible

        if base_url is None:
            raise ConfigError("provider 'compatible' needs base_url, such as http://HOST:PORT/v1")
        return compatible(base_url)
    if name == "local":
        from k3eval.providers.local import local

        return local(base_url)
    found: Provider
    if name == "openrouter":
        from k3eval.providers.openrouter import OPENROUTER

        found = OPENROUTER
    elif name in ("moonshot", "moonshot-cn"):
        from k3eval.providers.moonshot import MOONSHOT, MOONSHOT_CN

        found = MOONSHOT if name == "moonshot" else MOONSHOT_CN
    else:
        raise ConfigError(f"unknown provider {name!r}; known: {', '.join(PROVIDER_NAMES)}")
    return found if base_url is None else replace(found, base_url=base_url)

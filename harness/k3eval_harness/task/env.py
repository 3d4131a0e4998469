"""Values of ``env`` tables: ``${VAR}`` and ``${VAR:-default}`` are taken from the host.

Task material runs beside untrusted code, so a reference to what looks like a credential is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from k3eval_harness.errors import TaskError

_REFERENCE: Final = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}")
_CREDENTIAL: Final = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def looks_like_credential(name: str) -> bool:
    """Whether an environment variable of this name probably holds a secret."""
    return bool(_CREDENTIAL.search(name))


def resolve_env(table: Mapping[str, str], host: Mapping[str, str], where: str) -> dict[str, str]:
    """Fill in host variables. Raises TaskError for a credential or for a missing one without a default."""

    def fill(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if looks_like_credential(name):
            raise TaskError(f"{where}: ${{{name}}} looks like a credential, which never enters a sandbox")
        value = host.get(name, default)
        if value is None:
            raise TaskError(f"{where}: ${{{name}}} is not set on this machine and has no default")
        return value

    return {key: _REFERENCE.sub(fill, value) for key, value in table.items()}

"""Takes secrets out of text before it reaches a log, an exception, a repr or a file.

Known shapes are replaced wherever they stand: API keys (``sk-...``), bearer tokens, account ids
(``org-...``), access-key ids (``<ak-...>``). Exact keys that a client was given are replaced as well.
"""

from __future__ import annotations

import re

MASK = "[redacted]"

_SHAPES = re.compile(
    r"""
      \bsk-[A-Za-z0-9_\-.]{6,}                    # API keys, also sk-or-v1-..., sk-kimi-...
    | (?<=[Bb]earer\ )[A-Za-z0-9_\-.~+/=]{4,}     # whatever stands in an Authorization header
    | \borg-[A-Za-z0-9]{4,}                       # organisation ids in quota messages
    | \b(?:proj|uid|user)-[A-Za-z0-9]{12,}        # project and user ids
    | <?\bak-[A-Za-z0-9]{4,}>?                    # access-key ids, with or without their brackets
    """,
    re.VERBOSE,
)

_secrets: set[str] = set()
_MIN_SECRET = 8
"""Shorter keys (``EMPTY``, ``none``) are placeholders, and replacing them would garble ordinary text."""


def remember_secret(secret: str | None) -> None:
    """Have an exact key masked from now on, whatever its shape. Short placeholders are ignored."""
    if secret and len(secret) >= _MIN_SECRET:
        _secrets.add(secret)


def redact(text: str) -> str:
    """Return the text with every known secret masked."""
    for secret in tuple(_secrets):
        if secret in text:
            text = text.replace(secret, MASK)
    return _SHAPES.sub(MASK, text)


def fingerprint(secret: str | None) -> str:
    """Return a short stable name for a key, so that limits can be kept per account without the key itself."""
    import hashlib

    return "none" if not secret else hashlib.sha256(secret.encode()).hexdigest()[:8]

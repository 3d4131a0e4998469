"""What we need to know of a Dockerfile without building it: base images and stage names."""

from __future__ import annotations

import re
from typing import Final

_FROM: Final = re.compile(
    r"^\s*FROM\s+(?:--\S+\s+)*(?P<image>\S+)(?:\s+AS\s+(?P<stage>\S+))?\s*$", re.IGNORECASE | re.MULTILINE
)
_ARG: Final = re.compile(r"^\s*ARG\s+(?P<name>\w+)=(?P<value>\S+)\s*$", re.IGNORECASE | re.MULTILINE)


def stage_names(text: str) -> tuple[str, ...]:
    """Names given with ``FROM ... AS name``."""
    return tuple(match["stage"] for match in _FROM.finditer(text) if match["stage"])


def base_references(text: str) -> tuple[str, ...]:
    """External images that the Dockerfile starts from, in order, each once; ARG defaults are filled in."""
    arguments = {match["name"]: match["value"].strip("'\"") for match in _ARG.finditer(text)}
    stages: set[str] = set()
    found: dict[str, None] = {}
    for match in _FROM.finditer(text):
        image = re.sub(
            r"\$\{?(\w+)(?::-([^}]*))?\}?", lambda m: arguments.get(m[1], m[2] or m[0]), match["image"]
        )
        if image.lower() not in stages and image.lower() != "scratch":
            found[image] = None
        if match["stage"]:
            stages.add(match["stage"].lower())
    return tuple(found)

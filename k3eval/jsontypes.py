"""JSON as a type, and the two ways in which this package writes and reads it.

Written: UTF-8, no spaces, members in the order given, no NaN - the same value always gives the same bytes.
Read: NaN and Infinity are refused, duplicate members keep the last one, as every other reader does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias, cast

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
JsonObject: TypeAlias = "dict[str, JsonValue]"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
_raw_decode = _decoder.raw_decode


def read_json(data: str | bytes) -> JsonValue:
    """Parse JSON text; ``ValueError`` says what is wrong (bad UTF-8 and too deep nesting included)."""
    text = data if isinstance(data, str) else data.decode("utf-8")
    try:
        return cast("JsonValue", _decoder.decode(text))
    except RecursionError:
        raise ValueError("JSON is nested too deep") from None


def read_object(data: str | bytes) -> JsonObject:
    """Parse JSON text that must be an object; ``ValueError`` otherwise."""
    text = data if isinstance(data, str) else data.decode("utf-8")
    if text[:1] == "{":  # the common case, without the decoder's search for white space on both sides
        try:
            found, end = _raw_decode(text)
        except RecursionError:
            raise ValueError("JSON is nested too deep") from None
        if end == len(text):
            return cast("JsonObject", found)
    value = read_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value


def write_json(value: JsonValue) -> bytes:
    """Serialise to stable bytes. Lone surrogates (half an emoji) are escaped rather than refused."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def as_object(value: JsonValue) -> Mapping[str, JsonValue] | None:
    """Return the value where it is an object, else ``None``."""
    return value if isinstance(value, dict) else None


def as_str(value: JsonValue) -> str | None:
    """Return the value where it is a string, else ``None``."""
    return value if isinstance(value, str) else None


def as_int(value: JsonValue) -> int | None:
    """Return the value where it is a whole number (``12`` or ``12.0``), else ``None``."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None

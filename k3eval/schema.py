"""JSON schemas in the dialect that Moonshot accepts: flattened where that is possible, refused where it is
not.

The dialect (vendor documents): the root is an object; every property has a type or an ``anyOf`` and never
both; ``$ref`` stands alone and points into ``#/$defs``; ``required`` names properties that exist; no tuple
items. Checked before the first paid call, because a refused tool list costs a whole trial.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from k3eval.errors import SchemaError
from k3eval.jsontypes import JsonObject, JsonValue
from k3eval.tools import ToolSpec

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_DEFS: Final = "#/$defs/"
_JSON_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")


def check_tools(tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Return the tools, sorted and with flattened schemas; ``SchemaError`` names what cannot be sent."""
    if len(tools) > MAX_TOOLS:
        raise SchemaError(f"{len(tools)} tools given; the host accepts {MAX_TOOLS}")
    names = [spec.name for spec in tools]
    for name in names:
        if not _NAME.fullmatch(name):
            raise SchemaError(
                f"tool name {name!r} is not accepted: letters, digits, _ and -, no digit first, up to 64"
            )
        if names.count(name) > 1:
            raise SchemaError(f"two tools are called {name!r}")
    return tuple(
        ToolSpec(spec.name, spec.description, flatten(spec.parameters, where=f"tool {spec.name}"))
        for spec in sorted(tools, key=lambda spec: spec.name)
    )


def flatten(schema: Mapping[str, JsonValue], *, where: str = "schema") -> JsonObject:
    """Return an equivalent schema in the dialect; ``SchemaError`` where there is none."""
    definitions: dict[str, JsonValue] = {}
    for member in ("definitions", "$defs"):
        found = schema.get(member)
        if isinstance(found, dict):
            definitions.update(found)
    work = _Flattener(definitions)
    root = {key: value for key, value in schema.items() if key not in ("definitions", "$defs")}
    if not root:
        root = {"type": "object", "properties": {}}
    if "type" not in root and "$ref" not in root and "anyOf" not in root and "allOf" not in root:
        root["type"] = "object"
    flat = work.node(root, where, () if "$ref" in root else ("",))
    if flat.get("type") != "object":
        raise SchemaError(f"{where}: the root must be an object")
    flat.setdefault("properties", {})
    if work.kept:
        flat["$defs"] = {name: work.kept[name] for name in sorted(work.kept)}
    if problems := find_problems(flat):
        raise SchemaError(f"{where}: {problems[0]}")
    return flat


def find_problems(schema: Mapping[str, JsonValue]) -> list[str]:
    """Return what the dialect forbids in a schema, empty where it may be sent."""
    problems: list[str] = []
    if schema.get("type") != "object":
        problems.append("the root must be an object")
    definitions = schema.get("$defs")
    names = set(definitions) if isinstance(definitions, dict) else set()
    _check(schema, "", names, problems)
    return problems


class _Flattener:
    """Inlines references (recursive ones stay), merges ``allOf``, gives every property a type."""

    def __init__(self, definitions: Mapping[str, JsonValue]) -> None:
        self.definitions = definitions
        self.recursive = {name for name in definitions if name in _reachable(name, definitions)}
        self.kept: dict[str, JsonValue] = {}

    def node(self, node: JsonValue, where: str, trail: tuple[str, ...]) -> JsonObject:
        if node is True:
            raise SchemaError(f"{where}: any value is allowed here; give it a type")
        if not isinstance(node, dict):
            raise SchemaError(f"{where}: expected a schema")
        data: JsonObject = dict(node)
        reference = data.pop("$ref", None)
        if isinstance(reference, str):
            return self._reference(reference, data, where, trail)
        for member in ("not", "if", "patternProperties", "dependentSchemas"):
            if member in data:
                raise SchemaError(f"{where}: {member!r} is not accepted by the host")
        if "allOf" in data:
            data = self._merged(data, where, trail)
        if "oneOf" in data:
            data["anyOf"] = data.pop("oneOf")
        kinds = data.get("type")
        if isinstance(kinds, list):
            data.pop("type")
            data = _one_of_types(data, kinds, where)
        if "const" in data:
            data["enum"] = [data.pop("const")]
        if "type" not in data and "anyOf" not in data:
            data["type"] = _inferred(data, where)
        if "anyOf" in data:
            return self._union(data, where, trail)
        return self._children(data, where, trail)

    def _reference(
        self, reference: str, siblings: JsonObject, where: str, trail: tuple[str, ...]
    ) -> JsonObject:
        name = reference.rsplit("/", 1)[-1]
        if reference not in (_DEFS + name, "#/definitions/" + name) or name not in self.definitions:
            raise SchemaError(f"{where}: cannot resolve {reference!r}")
        target = self.definitions[name]
        if not isinstance(target, dict):
            raise SchemaError(f"{where}: {reference!r} is not a schema")
        if name not in self.recursive or not trail:  # the root must be an object, so it is always inlined
            return self.node({**target, **siblings}, where, (*trail, name))
        if name not in self.kept:
            self.kept[name] = {}
            self.kept[name] = self.node(target, name, (name,))
        return {"$ref": _DEFS + name}

    def _merged(self, data: JsonObject, where: str, trail: tuple[str, ...]) -> JsonObject:
        parts = data.pop("allOf")
        if not isinstance(parts, list):
            raise SchemaError(f"{where}: allOf must be a list")
        merged: JsonObject = {}
        for part in (*parts, data):
            flat = self.node(part, where, trail) if part is not data else data
            for key, value in flat.items():
                known = merged.get(key)
                if key == "properties" and isinstance(known, dict) and isinstance(value, dict):
                    merged[key] = {**known, **value}
                elif key == "required" and isinstance(known, list) and isinstance(value, list):
                    merged[key] = [*known, *(name for name in value if name not in known)]
                elif key == "type" and known is not None and known != value:
                    raise SchemaError(f"{where}: allOf joins {known!r} and {value!r}")
                else:
                    merged[key] = value
        return merged

    def _union(self, data: JsonObject, where: str, trail: tuple[str, ...]) -> JsonObject:
        branches = data.pop("anyOf")
        if not isinstance(branches, list) or not branches:
            raise SchemaError(f"{where}: anyOf must be a list of schemas")
        outer = data.pop("type", None)
        shared = {
            key: data.pop(key)
            for key in ("properties", "required", "items", "additionalProperties", "enum")
            if key in data
        }
        flat: list[JsonValue] = []
        for branch in branches:
            if not isinstance(branch, dict):
                raise SchemaError(f"{where}: anyOf must be a list of schemas")
            full = {**shared, **branch}
            if outer is not None and not {"type", "$ref", "anyOf", "allOf", "oneOf"} & set(full):
                full["type"] = outer
            done = self.node(full, where, trail)
            inner = done.get("anyOf")
            if isinstance(inner, list) and len(done) == 1:
                flat.extend(item for item in inner if item not in flat)
            elif done not in flat:
                flat.append(done)
        if len(flat) == 1 and isinstance(flat[0], dict):
            return {**flat[0], **data}
        return {"anyOf": flat, **data}

    def _children(self, data: JsonObject, where: str, trail: tuple[str, ...]) -> JsonObject:
        properties = data.get("properties")
        if isinstance(properties, dict):
            data["properties"] = {
                name: self.node(value, f"{where}.{name}", trail) for name, value in properties.items()
            }
        rest = data.get("additionalProperties")
        if isinstance(rest, dict):
            data["additionalProperties"] = self.node(rest, f"{where}.*", trail) if rest else True
        items = data.pop("items", None)
        prefix = data.pop("prefixItems", None)
        if isinstance(items, list):
            items, prefix = None, items
        kinds = list(prefix) if isinstance(prefix, list) else []
        if isinstance(items, dict) and items:
            kinds.append(items)
        if kinds:
            unique = [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]
            data["items"] = self.node(
                unique[0] if len(unique) == 1 else {"anyOf": unique}, f"{where}[]", trail
            )
        return data


def _reachable(name: str, definitions: Mapping[str, JsonValue]) -> set[str]:
    """Return the definitions that one refers to, directly or through others."""
    found: set[str] = set()
    waiting = [definitions[name]]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(node)
        elif isinstance(node, dict):
            reference = node.get("$ref")
            target = reference.rsplit("/", 1)[-1] if isinstance(reference, str) else ""
            if target in definitions and target not in found:
                found.add(target)
                waiting.append(definitions[target])
            waiting.extend(node.values())
    return found


def _one_of_types(data: JsonObject, kinds: Sequence[JsonValue], where: str) -> JsonObject:
    if len(kinds) == 1:
        return {**data, "type": kinds[0]}
    if "anyOf" in data:
        raise SchemaError(f"{where}: a list of types beside anyOf")
    outer: JsonObject = {key: data.pop(key) for key in ("description", "default", "title") if key in data}
    return {
        "anyOf": [{"type": kind} if kind == "null" else {"type": kind, **data} for kind in kinds],
        **outer,
    }


def _inferred(data: Mapping[str, JsonValue], where: str) -> str:
    values = data.get("enum")
    if isinstance(values, list) and values:
        kinds = {_type_of(value) for value in values}
        if kinds == {"integer", "number"}:
            kinds = {"number"}
        if len(kinds) == 1:
            return kinds.pop()
        raise SchemaError(f"{where}: enum mixes {' and '.join(sorted(kinds))}; give it a type")
    if "properties" in data or "additionalProperties" in data:
        return "object"
    if "items" in data or "prefixItems" in data:
        return "array"
    raise SchemaError(f"{where}: has no type; the host wants one for every property")


def _type_of(value: JsonValue) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    return "object" if isinstance(value, Mapping) else "array"


def _check(node: Mapping[str, JsonValue], where: str, names: set[str], problems: list[str]) -> None:
    at = where or "root"
    reference = node.get("$ref")
    if reference is not None:
        known = (
            isinstance(reference, str)
            and reference.startswith(_DEFS)
            and reference.removeprefix(_DEFS) in names
        )
        if not known:
            problems.append(f"{at}: $ref must point into {_DEFS}")
        if len(node) > 1:
            problems.append(f"{at}: nothing may stand beside $ref")
        return
    union = node.get("anyOf")
    if union is not None and "type" in node:
        problems.append(f"{at}: type beside anyOf")
    if union is None and node.get("type") not in _JSON_TYPES:
        problems.append(f"{at}: has no type")
    for branch in union if isinstance(union, list) else ():
        if isinstance(branch, dict):
            _check(branch, f"{where}|", names, problems)
    properties = node.get("properties")
    children = properties if isinstance(properties, dict) else {}
    for name, child in children.items():
        if isinstance(child, dict):
            _check(child, f"{where}.{name}", names, problems)
        else:
            problems.append(f"{at}.{name}: expected a schema")
    required = node.get("required")
    problems.extend(
        f"{at}: required names {name!r}, which is no property"
        for name in (required if isinstance(required, list) else ())
        if name not in children
    )
    items = node.get("items")
    if isinstance(items, list) or "prefixItems" in node:
        problems.append(f"{at}: tuple items")
    elif isinstance(items, dict):
        _check(items, f"{where}[]", names, problems)
    definitions = node.get("$defs")
    for name, child in definitions.items() if isinstance(definitions, dict) else ():
        if isinstance(child, dict):
            _check(child, f"$defs.{name}", names, problems)

"""The server's own OpenAPI description, made from the dialect's request model."""

from __future__ import annotations

from k3eval_local.protocol.dialects import AnyDialect
from k3eval_local.protocol.messages import JsonObject
from k3eval_local.protocol.wire import CountBody, WireModel

_REF = "#/components/schemas/{model}"


def describe(dialect: AnyDialect, paths: dict[str, tuple[str, str]]) -> JsonObject:
    """The document for ``paths``: path to (method, summary)."""
    schemas: JsonObject = {}
    chat = _schema(dialect.body, schemas)
    count = _schema(CountBody, schemas)
    described: JsonObject = {}
    for path, (method, summary) in paths.items():
        operation: JsonObject = {
            "summary": summary,
            "responses": {
                "200": {"description": "OK"},
                "default": {"description": f"An error in the envelope of the {dialect.name} dialect"},
            },
        }
        if method == "post":
            schema = chat if path.endswith("/chat/completions") else count
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        names = [part.strip("{}").partition(":")[0] for part in path.split("/") if part.startswith("{")]
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        described[path] = {method: operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"k3eval local backend, {dialect.name} dialect", "version": "1"},
        "paths": described,
        "components": {"schemas": schemas},
    }


def _schema(model: type[WireModel], schemas: JsonObject) -> JsonObject:
    schema = model.model_json_schema(ref_template=_REF)
    definitions = schema.pop("$defs", {})
    schemas |= definitions
    schemas[model.__name__] = schema
    return {"$ref": _REF.format(model=model.__name__)}

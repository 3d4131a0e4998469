"""Tools that a model may call: described by hand (``ToolSpec``) or made from a function (``@tool``)."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import (
    Annotated,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from k3eval.errors import ConfigError, ToolArgumentsError
from k3eval.jsontypes import JsonObject, JsonValue, write_json
from k3eval.messages import ToolCall

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What the model is told of a tool."""

    name: str
    description: str
    parameters: Mapping[str, JsonValue]
    """JSON schema of the arguments object."""

    def to_json(self) -> JsonObject:
        """Return the wire form."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


class Tool(Generic[P, R]):
    """A function with its specification. Calling it calls the function."""

    def __init__(self, function: Callable[P, R], *, name: str | None = None) -> None:
        from pydantic import ConfigDict, create_model
        from pydantic.errors import PydanticSchemaGenerationError

        self.function = function
        self.__name__ = name or function.__name__
        self.__doc__ = function.__doc__
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, object] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(
                    f"tool {self.__name__}: parameter {parameter.name} must be usable by keyword"
                )
            if parameter.name not in hints:
                raise ConfigError(f"tool {self.__name__}: parameter {parameter.name} needs a type")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (_described(hints[parameter.name]), default)
        make = cast("Callable[..., object]", create_model)
        try:
            model = make(self.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        except PydanticSchemaGenerationError as error:
            raise ConfigError(f"tool {self.__name__}: {str(error).splitlines()[0]}") from error
        self._model = cast("_Model", model)
        schema = dict(self._model.model_json_schema())
        schema.pop("title", None)
        self.spec = ToolSpec(self.__name__, inspect.cleandoc(function.__doc__ or "").strip(), schema)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.__name__})"

    def arguments(self, call: ToolCall) -> dict[str, object]:
        """Return the validated arguments of a call; ``ToolArgumentsError`` says what is wrong with them."""
        from pydantic import ValidationError

        try:
            model = self._model.model_validate(call.parsed())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ToolArgumentsError(f"arguments of {call.name}: {where}: {first['msg']}") from error
        return {name: getattr(model, name) for name in self._model.model_fields}

    def invoke(self, call: ToolCall) -> object:
        """Validate the arguments of a call and run the function with them."""
        run = cast("Callable[..., object]", self.function)
        return run(**self.arguments(call))


AnyTool = Tool[..., object]
"""A tool of any signature."""


class _Model(Protocol):
    """The part of a pydantic model class that is used here."""

    @property
    def model_fields(self) -> Mapping[str, object]: ...
    def model_json_schema(self) -> Mapping[str, JsonValue]: ...
    def model_validate(self, value: object) -> object: ...


@overload
def tool(function: Callable[P, R]) -> Tool[P, R]: ...


@overload
def tool(*, name: str) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None, *, name: str | None = None
) -> Tool[P, R] | Callable[[Callable[P, R]], Tool[P, R]]:
    """Make a tool of a typed function; its docstring is the description.

    Describe a parameter with ``Annotated[str, "what it is"]``.
    """
    if function is not None:
        return Tool(function)
    return lambda wrapped: Tool(wrapped, name=name)


def specs_of(tools: Iterable[ToolSpec | AnyTool]) -> tuple[ToolSpec, ...]:
    """Return the specifications of tools and specifications, mixed."""
    return tuple(item if isinstance(item, ToolSpec) else item.spec for item in tools)


def result_text(value: object) -> str:
    """Return a tool's result as the text that the model reads: strings as they are, the rest as JSON."""
    if isinstance(value, str):
        return value
    if hasattr(value, "model_dump_json"):
        return str(value.model_dump_json())
    try:
        return write_json(cast("JsonValue", value)).decode("utf-8")
    except (TypeError, ValueError):
        return str(value)


def run_call(tools: Mapping[str, AnyTool], call: ToolCall) -> str:
    """Run one call and return what the model is told; a bad call or a failing tool is told as an error."""
    found = tools.get(call.name)
    if found is None:
        return _unknown(tools, call)
    try:
        result = found.invoke(call)
    except ToolArgumentsError as error:
        return f"error: {error.message}"
    except Exception as error:  # noqa: BLE001 - a tool's failure is the model's to handle, not the loop's
        return f"error: {type(error).__name__}: {error}"
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigError(f"tool {call.name} is a coroutine; use AsyncK3")
    return result_text(result)


async def run_call_async(tools: Mapping[str, AnyTool], call: ToolCall) -> str:
    """Like ``run_call``, and awaits tools that are coroutines."""
    found = tools.get(call.name)
    if found is None:
        return _unknown(tools, call)
    try:
        result = found.invoke(call)
        if inspect.isawaitable(result):
            result = await cast("Awaitable[object]", result)
    except ToolArgumentsError as error:
        return f"error: {error.message}"
    except Exception as error:  # noqa: BLE001 - as above
        return f"error: {type(error).__name__}: {error}"
    return result_text(result)


def _unknown(tools: Mapping[str, AnyTool], call: ToolCall) -> str:
    return f"error: there is no tool {call.name!r}; there are: {', '.join(sorted(tools))}"


def _described(hint: object) -> object:
    """Turn ``Annotated[str, "text"]`` into a field with that description."""
    if get_origin(hint) is Annotated:
        base, *notes = get_args(hint)
        texts = [note for note in notes if isinstance(note, str)]
        if texts:
            from pydantic import Field

            rest = [note for note in notes if not isinstance(note, str)]
            return Annotated[(base, *rest, Field(description=" ".join(texts)))]
    return hint

"""One small generated Python project with one seeded bug: its files, tests, right edit and wrong edits.

`make_project(seed, index)` always gives the same project. The seeded bug makes exactly one visible test fail;
the hidden tests call every function with other inputs and tell the right edit from every near miss.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from k3eval_harness.task.mini.functions import BUILDERS, KINDS, Arguments, Function, Slip, Value, Words
from k3eval_harness.task.mini.noise import Noise, NoiseShape, conftest_source
from k3eval_harness.task.mini.words import word_source

_DRAWS = 24
_HIDDEN_INPUTS = 5


@dataclass(frozen=True)
class Shape:
    """What projects look like.

    ``modules`` and ``functions`` are inclusive ranges (functions a module). ``invented`` is the share of
    names built from invented words, ``rare`` takes all of them from the words kept out of training.
    ``noise`` is printed by the test run.
    """

    modules: tuple[int, int] = (2, 5)
    functions: tuple[int, int] = (2, 4)
    invented: float = 0.0
    rare: bool = False
    kinds: tuple[str, ...] = KINDS
    noise: NoiseShape = field(default_factory=NoiseShape)


@dataclass(frozen=True)
class Edit:
    """Replace ``old``, which occurs exactly once in the file ``path``, by ``new``."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Case:
    """One call and what it must return."""

    arguments: Arguments
    expected: Value


@dataclass(frozen=True)
class Module:
    """One module: functions with the case shown in the visible test and those of the hidden test."""

    path: str
    functions: tuple[Function, ...]
    visible: tuple[Case, ...]
    hidden: tuple[tuple[Case, ...], ...]

    @property
    def dotted(self) -> str:
        """The name to import."""
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def test_path(self) -> str:
        """The visible test file."""
        return f"tests/test_{self.path.rsplit('/', 1)[-1]}"


@dataclass(frozen=True)
class MiniProject:
    """A project with the bug ``slip`` in ``broken``, which belongs to module ``module``."""

    seed: int
    index: int
    modules: tuple[Module, ...]
    extra_files: Mapping[str, str]
    noise: Noise
    module: int
    broken: Function
    slip: Slip

    @property
    def kind(self) -> str:
        """The kind of the seeded bug."""
        return self.slip.kind

    @property
    def path(self) -> str:
        """The file with the bug."""
        return self.modules[self.module].path

    @property
    def fix(self) -> Edit:
        """The oracle's edit."""
        return Edit(self.path, self.slip.text.strip(), self.broken.body[self.slip.line].strip())

    @property
    def near_misses(self) -> tuple[Edit, ...]:
        """Edits of the same line that a careless repair might make; each fails a hidden test."""
        found: dict[str, Edit] = {}
        for other in self.broken.slips:
            if other.line == self.slip.line and other.text != self.slip.text:
                found[other.text] = Edit(self.path, self.slip.text.strip(), other.text.strip())
        return tuple(found.values())

    def files(self, edit: Edit | None = None) -> dict[str, str]:
        """Path to text of the project as the agent finds it, or after ``edit``."""
        made = dict(self.extra_files)
        for at, module in enumerate(self.modules):
            sources = [
                function.source(self.slip if at == self.module and function is self.broken else None)
                for function in module.functions
            ]
            made[module.path] = "\n\n".join(sources)
            made[module.test_path] = test_source(module, [[case] for case in module.visible])
        if edit is not None:
            if made[edit.path].count(edit.old) != 1:
                raise ValueError(f"the text to replace does not occur exactly once in {edit.path}")
            made[edit.path] = made[edit.path].replace(edit.old, edit.new)
        return dict(sorted(made.items()))

    def hidden_test(self) -> dict[str, str]:
        """The hidden test files: other inputs than the visible ones, for every function."""
        return {
            f"test_hidden_{at}.py": test_source(module, module.hidden)
            for at, module in enumerate(self.modules)
        }


def test_source(module: Module, cases: list[list[Case]] | tuple[tuple[Case, ...], ...]) -> str:
    """A test file with one test a function."""
    names = ", ".join(function.name for function in module.functions)
    parts = [f"from {module.dotted} import {names}\n"]
    for function, own in zip(module.functions, cases, strict=True):
        lines = [f"def test_{function.name}():"]
        for case in own:
            call = f"{function.name}({', '.join(map(literal, case.arguments))})"
            lines.append(f"    assert {call} == {literal(case.expected)}")
        parts.append("\n".join(lines) + "\n")
    return "\n\n".join(parts)


test_source.__test__ = False  # type: ignore[attr-defined]  # pytest must not collect this helper as a test


def literal(value: Value) -> str:
    """Python source of a value, strings and keys in double quotes."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}": {item}' for key, item in value.items()) + "}"
    return repr(value)


def run(source: str, name: str, arguments: Arguments) -> Value | Exception:
    """Call one generated function; an exception it raises is the result.

    Only sources made by this package are run here: they have no loops but over their own arguments.
    """
    try:
        result: Value = _callable(source, name)(*arguments)
    except (ArithmeticError, LookupError, TypeError) as error:
        return error
    return result


@lru_cache(maxsize=4096)
def _callable(source: str, name: str) -> Callable[..., Value]:
    namespace: dict[str, Callable[..., Value]] = {}
    exec(compile(source, "generated", "exec"), namespace)  # noqa: S102  # the text was written by this package
    return namespace[name]


def make_project(seed: int, index: int, shape: Shape | None = None) -> MiniProject:
    """The project ``index`` of the series ``seed``: equal arguments give an equal project."""
    shape = shape or Shape()
    rng = random.Random(f"repo-fix-mini/{seed}/{index}")  # noqa: S311  # reproducible, not secret
    while True:
        project = _attempt(rng, seed, index, shape)
        if project is not None:
            return project


def _attempt(rng: random.Random, seed: int, index: int, shape: Shape) -> MiniProject | None:
    """One draw; None when the text to replace would not be unique in its file."""
    words = word_source(rng, invented=shape.invented, rare=shape.rare)
    kind = rng.choice(shape.kinds)
    paths, extra = _layout(rng, words, rng.randint(*shape.modules))
    sizes = [rng.randint(*shape.functions) for _ in paths]
    module = rng.randrange(len(paths))
    position = rng.randrange(sizes[module])
    modules = []
    for at, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        drawn = [
            _draw_function(rng, words, kind if (at, place) == (module, position) else None)
            for place in range(size)
        ]
        functions, visible, hidden = zip(*drawn, strict=True)
        modules.append(Module(path, functions, visible, hidden))
    broken = modules[module].functions[position]
    shown = modules[module].visible[position]
    slips = [
        slip
        for slip in broken.slips
        if slip.kind == kind
        and differs(run(broken.source(slip), broken.name, shown.arguments), shown.expected)
    ]
    if not slips:
        return None
    noise = shape.noise.draw(rng, words)
    if noise:
        extra["conftest.py"] = conftest_source(noise)
    project = MiniProject(seed, index, tuple(modules), extra, noise, module, broken, rng.choice(slips))
    edit = project.fix
    return project if project.files()[edit.path].count(edit.old) == 1 else None


def _layout(rng: random.Random, words: Words, count: int) -> tuple[list[str], dict[str, str]]:
    """Paths of the modules, and the files beside them."""
    form = rng.choice(("flat", "package", "nested"))
    title = next(words)
    extra = {"README.md": f"# {title}\n\nSmall helpers. Run the tests with `python -m pytest`.\n"}
    if form == "flat":
        return [f"{next(words)}.py" for _ in range(count)], extra
    package = next(words)
    extra[f"{package}/__init__.py"] = ""
    if form == "package":
        return [f"{package}/{next(words)}.py" for _ in range(count)], extra
    inner = [f"{package}/{next(words)}" for _ in range(2)]
    chosen = [rng.choice(inner) for _ in range(count)]
    extra |= {f"{folder}/__init__.py": "" for folder in set(chosen)}
    return [f"{folder}/{next(words)}.py" for folder in chosen], extra


def _draw_function(
    rng: random.Random, words: Words, kind: str | None
) -> tuple[Function, Case, tuple[Case, ...]]:
    """A function with its visible case and its hidden cases.

    Of its slips only those that some hidden case exposes are kept; with ``kind`` there is one of that kind,
    and the visible case exposes it.
    """
    name = f"{next(words)}_{next(words)}"
    while True:
        function = rng.choice(BUILDERS)(rng, name, words)
        if kind is not None and all(slip.kind != kind for slip in function.slips):
            continue
        right = function.source()
        pool = [function.draw(rng) for _ in range(_DRAWS)]
        results = {repr(arguments): run(right, name, arguments) for arguments in pool}
        cases = [
            Case(arguments, result)
            for arguments in pool
            if not isinstance(result := results[repr(arguments)], Exception)
        ]
        if not cases:  # a parameter bears the name of a variable of the body
            continue
        exposing = {
            slip: [
                case
                for case in cases
                if differs(run(function.source(slip), name, case.arguments), case.expected)
            ]
            for slip in function.slips
        }
        kept = tuple(slip for slip in function.slips if exposing[slip])
        wanted = [slip for slip in kept if slip.kind == kind]
        if kind is not None and not wanted:
            continue
        visible = exposing[wanted[0]][0] if wanted else cases[0]
        hidden = _hidden(visible, cases, [exposing[slip] for slip in kept])
        if hidden is not None:
            return replace(function, slips=kept), visible, hidden


def _hidden(visible: Case, cases: list[Case], exposing: list[list[Case]]) -> tuple[Case, ...] | None:
    """Cases with other inputs than the visible one; every list in ``exposing`` is represented."""
    chosen: dict[str, Case] = {}
    shown = repr(visible.arguments)
    for group in [*exposing, cases]:
        if any(repr(case.arguments) in chosen for case in group) and group is not cases:
            continue
        others = [
            case for case in group if repr(case.arguments) not in chosen and repr(case.arguments) != shown
        ]
        if not others and group is not cases:
            return None
        for case in others[: 1 if group is not cases else max(0, _HIDDEN_INPUTS - len(chosen))]:
            chosen[repr(case.arguments)] = case
    return tuple(chosen.values()) or None


def differs(result: Value | Exception, expected: Value) -> bool:
    """Whether a test that expects ``expected`` fails on ``result``."""
    return isinstance(result, Exception) or result != expected

"""What the two commands of a repair print, computed without running anything.

`TEST_COMMAND` runs the visible tests, `locate_command` shows a function and the file it is in. The texts
equal those of a real shell with pytest 9 on an 80-column terminal; a test compares them.
"""

import reprlib
from dataclasses import dataclass

from k3eval_harness.task.mini.functions import Function, Slip, Value
from k3eval_harness.task.mini.project import Case, Edit, MiniProject, differs, run

TEST_COMMAND = "python -m pytest -qq --tb=no"
"""Quiet enough to print no duration, so that equal projects give equal text."""

_WIDTH = 80
_RULE = " short test summary info ".center(_WIDTH, "=")


@dataclass(frozen=True)
class Printed:
    """Output of a command and its exit code."""

    text: str
    exit_code: int


def locate_command(name: str) -> str:
    """Print the path of the file that defines ``name``, then the function up to the next empty line."""
    return f"f=$(grep -rl 'def {name}(' .); echo $f; sed -n '/def {name}(/,/^$/p' $f"


def locate(project: MiniProject, edit: Edit | None = None) -> Printed:
    """Output of ``locate_command`` for the broken function, after ``edit`` if given."""
    source = project.files(edit)[project.path]
    start = source.index(f"def {project.broken.name}(")
    end = source.find("\n\n", start)
    text = source[start:] if end < 0 else source[start : end + 2]
    return Printed(f"./{project.path}\n{text}", 0)


def run_tests(project: MiniProject, edit: Edit | None = None) -> Printed:
    """Output of ``TEST_COMMAND``, after ``edit`` of the broken function if given."""
    dots, failures = "", []
    for module in sorted(project.modules, key=lambda module: module.test_path):
        for function, case in zip(module.functions, module.visible, strict=True):
            source = function.source()
            if function is project.broken:
                source = _edited(project.broken, project.slip, edit)
            result = run(source, function.name, case.arguments)
            failed = differs(result, case.expected)
            dots += "F" if failed else "."
            if failed:
                node = f"FAILED {module.test_path}::test_{function.name}"
                failures.append(node + _reason(node, _message(function.name, case, result)))
    lines = [dots + "[100%]".rjust(_WIDTH - 1 - len(dots)), *project.noise.before]
    if failures:
        lines += [_RULE, *failures]
    lines += project.noise.after
    return Printed("".join(f"{line}\n" for line in lines), 1 if failures else 0)


def _edited(function: Function, slip: Slip, edit: Edit | None) -> str:
    source = function.source(slip)
    return source if edit is None else source.replace(edit.old, edit.new)


def _message(name: str, case: Case, result: Value | Exception) -> str:
    """First line of the reason that pytest gives."""
    if isinstance(result, Exception):
        return f"{type(result).__name__}: {result}"
    expected = case.expected
    if isinstance(result, list | dict | str) and type(result) is type(expected):
        shown = f"{_short(result)} == {_short(expected)}"
    else:
        shown = f"{_repr(result)} == {_repr(expected)}"
    # pytest drops the exception's name only when its repr opens with a single quote, which it does
    # not when the text (with the call shown below it) holds single quotes.
    quoted = any("'" in repr(value) for value in (*case.arguments, result, expected))
    return f"{'AssertionError: ' if quoted else ''}assert {shown}"


class _Repr(reprlib.Repr):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = self.maxstring = self.maxother = most

    def repr_dict(self, x: dict[str, int], level: int) -> str:
        return "{" + ", ".join(f"{key!r}: {value!r}" for key, value in x.items()) + "}"

    def repr(self, x: object) -> str:
        text = super().repr(x)
        if len(text) <= self.most:
            return text
        head = max(0, (self.most - 3) // 2)
        return f"{text[:head]}...{text[len(text) - max(0, self.most - 3 - head) :]}"


def _short(value: Value) -> str:
    return _Repr((_WIDTH - 15 - 2 - 2) // 2).repr(value)


def _repr(value: Value) -> str:
    return _Repr(240).repr(value)


def _reason(node: str, message: str) -> str:
    """The message behind the test's name, cut to the terminal's width."""
    room = _WIDTH - len(node)
    if len(" - ...") > room:
        return ""
    text = f" - {message}"
    return text if len(text) <= room else f"{text[: room - 3]}..."

"""What the k3 agent is told after each tool call: pure functions, short, stable, without a clock.

The same results give the same bytes on every run, so that prompt prefixes can be cached and the
bundled checkpoint can be trained on exactly these texts.
"""

from __future__ import annotations

from collections.abc import Sequence


def bash_observation(
    output: str,
    exit_code: int | None,
    timed_out: bool = False,
    truncated_bytes: int = 0,
    *,
    timeout_s: float | None = None,
    note: str | None = None,
) -> str:
    """The result of one command: its output, then its exit code on a line of its own.

    ``truncated_bytes`` were cut out of the middle of ``output``, where the caller put a mark.
    """
    lines = [output.rstrip("\n")] if output.strip("\n") else []
    if truncated_bytes:
        lines.append(f"[{truncated_bytes} bytes of output left out]")
    if note:
        lines.append(f"[{note}]")
    if timed_out:
        limit = "its time limit" if timeout_s is None else f"{timeout_s:g} seconds"
        lines.append(f"[killed after {limit}; the shell was restarted]")
    else:
        lines.append(f"[exit code {'unknown' if exit_code is None else exit_code}]")
    return "\n".join(lines)


def read_observation(path: str, lines: Sequence[str], start: int, total: int) -> str:
    """Lines ``start``.. of a file of ``total`` lines, numbered; says where more can be read."""
    if not total:
        return f"[{path} is empty]"
    if not lines:
        return f"[{path} has {total} lines; there is no line {start}]"
    end = start + len(lines) - 1
    body = [f"{number}\t{line}" for number, line in enumerate(lines, start=start)]
    body.append(f"[lines {start}-{end} of {total}]")
    return "\n".join(body)


def edit_observation(path: str, created: bool, line: int = 1) -> str:
    """A finished edit; ``line`` is where the replaced text began."""
    return f"[created {path}]" if created else f"[edited {path} at line {line}]"


def edit_refused(path: str, count: int) -> str:
    """An edit whose ``old_str`` occurs ``count`` times instead of once."""
    if count == 0:
        return f"[error: old_str does not occur in {path}; nothing was changed]"
    return f"[error: old_str occurs {count} times in {path}; add context so that it occurs once]"


def error_observation(message: str) -> str:
    """A call that could not be carried out."""
    return f"[error: {message}]"


def submit_observation() -> str:
    """The last tool result of a trial that was handed in."""
    return "[submitted]"


def no_tool_call_message() -> str:
    """The user message after a reply without a tool call."""
    return "Your reply called no tool. Call a tool to go on, or call submit when the work is done."

"""Repairs of generated projects as chat conversations, to train a model on.

Every text that the agent loop would send or receive is made by the functions that the loop itself uses, or
computed by ``shell``; a test compares the two byte by byte. One conversation is one JSON object:
``{"id", "kind", "tools", "messages", "untrained"}``, in chat-completions form; ``untrained`` lists the
assistant messages that are mistakes, to be read but not imitated.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TextIO

from k3eval_harness.agent.observations import (
    bash_observation,
    edit_observation,
    edit_refused,
    submit_observation,
)
from k3eval_harness.agent.tools import TOOLS
from k3eval_harness.errors import UsageError
from k3eval_harness.task.mini.functions import KINDS
from k3eval_harness.task.mini.noise import NoiseShape
from k3eval_harness.task.mini.opening import opening_messages
from k3eval_harness.task.mini.project import Edit, MiniProject, Shape, make_project
from k3eval_harness.task.mini.shell import TEST_COMMAND, Printed, locate, locate_command, run_tests


@dataclass(frozen=True)
class EpisodeShape:
    """How conversations vary.

    project: what the projects look like.
    second_try: share of episodes whose first edit is wrong or refused and is repaired after a red test.
    other_opening: share of episodes with other system and user texts than the product's own.
    """

    project: Shape
    second_try: float = 0.0
    other_opening: float = 0.0


@dataclass(frozen=True)
class Mixture:
    """Several distributions; each conversation is of one of them, chosen by ``parts``' shares (sum 1)."""

    parts: tuple[tuple[float, EpisodeShape], ...]

    def part(self, rng: random.Random) -> EpisodeShape:
        """The distribution of the next conversation."""
        return rng.choices([shape for _, shape in self.parts], [share for share, _ in self.parts])[0]


_LEARNT = (*KINDS, "swap", "constant", "function")
"""Kinds that take longest to learn come twice."""
_SOME_NOISE = NoiseShape(share=0.3, lines=(1, 40))
_LONG_NOISE = NoiseShape(share=1.0, lines=(40, 220), after=0.85)
TRAINING = Mixture(
    (
        (0.53, EpisodeShape(Shape(invented=0.15, kinds=_LEARNT, noise=_SOME_NOISE), 0.12, 0.2)),
        (0.42, EpisodeShape(Shape(invented=1.0, kinds=_LEARNT, noise=_SOME_NOISE), 0.12, 0.2)),
        (0.05, EpisodeShape(Shape(invented=0.5, kinds=_LEARNT, noise=_LONG_NOISE))),
    )
)
"""What the bundled model is trained on: mostly known names, new names only, and long unrelated output."""

SHAPES: Final[Mapping[str, EpisodeShape | Mixture]] = {
    "training": TRAINING,
    "plain": EpisodeShape(Shape()),
    "invented": EpisodeShape(Shape(invented=1.0)),
    "rare": EpisodeShape(Shape(rare=True)),
    "listing-2x": EpisodeShape(Shape(modules=(4, 7), functions=(3, 5))),
    "listing-4x": EpisodeShape(Shape(modules=(6, 10), functions=(4, 6))),
    "noise-500": EpisodeShape(Shape(noise=NoiseShape(1.0, (40, 45), after=0.0))),
    "noise-500-after": EpisodeShape(Shape(noise=NoiseShape(1.0, (40, 45), after=1.0))),
    "recall-1k": EpisodeShape(Shape(noise=NoiseShape(1.0, (85, 85), after=1.0))),
    "recall-4k": EpisodeShape(Shape(noise=NoiseShape(1.0, (340, 340), after=1.0))),
    "recall-16k": EpisodeShape(Shape(noise=NoiseShape(1.0, (1360, 1360), after=1.0))),
    "recall-64k": EpisodeShape(Shape(noise=NoiseShape(1.0, (5440, 5440), after=1.0))),
}
"""Named distributions to measure on. ``plain`` is what ``generate`` writes. ``listing-N`` lists N times as
many tests, ``noise-500`` puts about 500 tokens of unrelated output before the failing test's name,
``recall-N`` about N between it and its use.
"""


class _Writer:
    """Collects messages; call ids are opaque and count up."""

    def __init__(self, messages: list[dict[str, object]]) -> None:
        self.messages = messages
        self.untrained: list[int] = []
        self.calls = 0

    def turn(
        self, calls: list[tuple[str, dict[str, object], str]], *, reasoning: str = "", mistake: bool = False
    ) -> None:
        """One assistant message and the results of its calls."""
        if mistake:
            self.untrained.append(len(self.messages))
        made = []
        for name, arguments, _ in calls:
            self.calls += 1
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            made.append({"id": f"call_{self.calls}", "type": "function", "function": function})
        message: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": made}
        if reasoning:
            message["reasoning_content"] = reasoning
        self.messages.append(message)
        for call, (_, _, result) in zip(made, calls, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def episode(project: MiniProject, rng: random.Random, shape: EpisodeShape) -> dict[str, object]:
    """One repair of ``project`` from the instruction to the hand-in."""
    other = rng.random() < shape.other_opening
    writer = _Writer(opening_messages(project, rng if other else None))
    writer.turn([_bash(TEST_COMMAND, run_tests(project))])
    command, current = locate_command(project.broken.name), None
    if rng.random() < shape.second_try and (mistake := _mistake(project, rng)) is not None:
        edit, current = mistake
        writer.turn([_bash(command, locate(project))])
        line = _line_of(project, project.fix.old, None)
        told = (
            edit_observation(edit.path, created=False, line=line) if current else edit_refused(edit.path, 0)
        )
        _repair(writer, project, edit, told, current, mistake=True)
    writer.turn([_bash(command, locate(project, current))])
    final = Edit(project.path, project.fix.old if current is None else current.new, project.fix.new)
    told = edit_observation(final.path, created=False, line=_line_of(project, final.old, current))
    _repair(writer, project, final, told, project.fix, mistake=False)
    writer.turn([("submit", {}, submit_observation())])
    return {
        "id": f"repo-fix-mini/{project.seed}/{project.index}",
        "kind": project.kind,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                },
            }
            for tool in sorted(TOOLS, key=lambda tool: tool.name)  # the order in which the SDK sends them
        ],
        "messages": writer.messages,
        "untrained": writer.untrained,
    }


def _repair(
    writer: _Writer, project: MiniProject, edit: Edit, told: str, result: Edit | None, *, mistake: bool
) -> None:
    """An edit and a test run; ``result`` is the edit of the original file that is then in force."""
    arguments: dict[str, object] = {"path": f"./{edit.path}", "old_str": edit.old, "new_str": edit.new}
    told = told.replace(edit.path, f"./{edit.path}")
    writer.turn(
        [("edit", arguments, told), _bash(TEST_COMMAND, run_tests(project, result))],
        reasoning=project.broken.doc,
        mistake=mistake,
    )


def _mistake(project: MiniProject, rng: random.Random) -> tuple[Edit, Edit | None] | None:
    """A wrong first edit that leaves a test red, and the edit that is then in force (None: refused)."""
    red = [
        edit
        for edit in project.near_misses
        if run_tests(project, edit).exit_code and project.files(edit)[edit.path].count(edit.new) == 1
    ]
    if not red or rng.random() < 0.3:
        fix = project.fix
        missing = fix.new if fix.new not in project.files()[fix.path] else f"{fix.old} "
        return Edit(fix.path, missing, fix.new), None
    chosen = rng.choice(red)
    return chosen, chosen


def _line_of(project: MiniProject, text: str, edit: Edit | None) -> int:
    source = project.files(edit)[project.path]
    return source.count("\n", 0, source.index(text)) + 1


def _bash(command: str, printed: Printed) -> tuple[str, dict[str, object], str]:
    return "bash", {"command": command}, bash_observation(printed.text, printed.exit_code)


def episodes(
    seed: int, count: int, shape: EpisodeShape | Mixture = TRAINING, *, start: int = 0
) -> Iterator[dict[str, object]]:
    """Conversations ``start`` .. ``start + count - 1`` of the series ``seed``."""
    for index in range(start, start + count):
        rng = random.Random(f"repo-fix-mini/episode/{seed}/{index}")  # noqa: S311  # reproducible, not secret
        own = shape.part(rng) if isinstance(shape, Mixture) else shape
        yield episode(make_project(seed, index, own.project), rng, own)


def write_episodes(
    count: int, seed: int, out: TextIO, *, start: int = 0, shape: EpisodeShape | Mixture = TRAINING
) -> int:
    """Write conversations as JSON lines; returns how many.

    Raises:
        UsageError: ``count`` is below 1.
    """
    if count < 1:
        raise UsageError(f"cannot generate {count} conversations; give at least 1")
    made = episodes(seed, count, shape, start=start)
    out.writelines(json.dumps(conversation, ensure_ascii=False) + "\n" for conversation in made)
    return count

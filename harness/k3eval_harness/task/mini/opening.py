"""How a repair begins: the product's own system text and instruction, or other ones for variety."""

import random
from typing import Final

from k3eval_harness.agent.prompts import render
from k3eval_harness.task.mini.project import MiniProject
from k3eval_harness.task.mini.words import word_source

WORKDIR: Final = "/app"
INSTRUCTIONS: Final = (
    "A test of this Python project fails. Find the bug, fix it and submit.",
    "One of the tests fails. Fix the code, not the test, then submit.",
    "Run the tests. One fails because of a bug in the code. Repair it and submit.",
)


def instruction(project: MiniProject) -> str:
    """The text of the task's ``instruction.md``."""
    return INSTRUCTIONS[project.index % len(INSTRUCTIONS)] + "\n"


def opening_messages(project: MiniProject, rng: random.Random | None) -> list[dict[str, object]]:
    """System and user message; drawn at random with ``rng``."""
    if rng is None:
        system = render("system.md.j2", workdir=WORKDIR)
        user = render("task.md.j2", instruction=instruction(project).strip())
    else:
        system, user = _other(rng)
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


_STARTS = ("You are", "Act as", "You work as", "This is")
_ROLES = ("a careful programmer", "an assistant for code", "a repair tool", "an agent", "a helper")
_RULES = (
    "Answer briefly.",
    "Keep changes small.",
    "Do not change tests.",
    "Use the tools that exist.",
    "Read before you write.",
    "Check your work.",
    "The project is called {}.",
    "Ask {} if in doubt.",
    "Never touch the {}.",
)
_REQUESTS = (
    "Something is broken. Please repair it.",
    "A test fails. Make it pass.",
    "Fix the bug in {}.",
    "The code has a bug. Find it and fix it.",
    "Since the change of {} one test is red. Repair the code and submit.",
)


def _other(rng: random.Random) -> tuple[str, str]:
    words = word_source(rng, invented=0.3, rare=False)
    rules = [rule.format(next(words)) for rule in rng.sample(_RULES, rng.randint(0, 6))]
    system = " ".join([f"{rng.choice(_STARTS)} {rng.choice(_ROLES)}.", *rules])
    user = rng.choice((*INSTRUCTIONS, *_REQUESTS)).format(next(words))
    return system, user

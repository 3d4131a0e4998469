"""Unrelated text that a project's test run prints: warnings, log lines, a coverage table, remarks.

A `Noise` is written into the project's ``conftest.py``, so a real test run prints it before and after
pytest's own summary; `NoiseShape` says how often and how much.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Noise:
    """Lines printed ``before`` the summary of failures and ``after`` it."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is printed."""
        return bool(self.before or self.after)


@dataclass(frozen=True)
class NoiseShape:
    """``share`` of the projects print some ``lines`` (a range), ``after`` of them behind the summary."""

    share: float = 0.0
    lines: tuple[int, int] = (1, 8)
    after: float = 0.33

    def draw(self, rng: random.Random, words: Iterator[str]) -> Noise:
        """The noise of one project."""
        if rng.random() >= self.share:
            return Noise()
        style = rng.choice((_warning, _log, _table, _remark))
        least, most = self.lines  # small amounts are the commonest
        count = round(least * (most / least) ** rng.random())
        made = tuple(style(rng, words) for _ in range(count))
        cut = 0 if rng.random() < self.after else len(made)
        return Noise(made[:cut], made[cut:])


def _warning(rng: random.Random, words: Iterator[str]) -> str:
    reason = rng.choice(("is deprecated, use", "will be removed, see", "shadows"))
    return f"Warning: {next(words)}_{next(words)} {reason} {next(words)}"


def _log(rng: random.Random, words: Iterator[str]) -> str:
    level = rng.choice(("INFO", "DEBUG", "WARNING"))
    event = rng.choice(("loaded", "closed", "cached"))
    return f"{level} {next(words)}: {event} {next(words)} {rng.randint(1, 999)}"


def _table(rng: random.Random, words: Iterator[str]) -> str:
    return f"{next(words)}/{next(words)}.py {rng.randint(5, 99)} {rng.randint(0, 9)} {rng.randint(50, 100)}%"


def _remark(rng: random.Random, words: Iterator[str]) -> str:
    subject: Callable[[str], str] = rng.choice(
        (
            "The {} of this project was checked.".format,
            "No {} was found, so the default is used.".format,
            "See the {} for more information.".format,
        )
    )
    return subject(next(words))


def conftest_source(noise: Noise) -> str:
    """A ``conftest.py`` that prints the noise at the right moments."""
    parts = []
    if noise.before:
        body = "\n".join(f"    terminalreporter.write_line({line!r})" for line in noise.before)
        parts.append(f"def pytest_terminal_summary(terminalreporter):\n{body}\n")
    if noise.after:
        body = "\n".join(f"    print({line!r})" for line in noise.after)
        parts.append(f"def pytest_unconfigure(config):\n{body}\n")
    return "\n\n".join(parts)

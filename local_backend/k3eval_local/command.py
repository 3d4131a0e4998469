"""What the command lines of this package share: one line for what is wrong, and whole numbers with limits."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

USAGE = 2
MAX_SEED = 2**63 - 1
MAX_THREADS = 1024


def fail(message: str, code: int = USAGE) -> NoReturn:
    """Print one line on stderr and end with this exit code."""
    sys.stderr.write(f"k3eval: {' '.join(message.split())}\n")
    raise SystemExit(code)


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        """End the command."""
        fail(message)


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """An option's type: a whole number from ``low`` to ``high``, both included."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
        if value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"must be {limits}, not {text}")
        return value

    return number

"""The command line, ``k3eval``. One module a command: parse, call, render; ``app`` puts them together.

Only the standard library's small modules are imported here, so that ``main`` is in charge early.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

_INTERRUPTED = 130  # Exit.INTERRUPTED; its module is too much to load here


def main() -> None:
    """Entry point of the console script. Ctrl-C at any time, also while modules load, ends with exit 130."""
    watch = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job ignores it
    if watch:
        signal.signal(signal.SIGINT, _leave)
    from k3eval_harness.cli.app import start

    if watch:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        start()
    except KeyboardInterrupt:  # outside of the commands' own handling
        raise SystemExit(_INTERRUPTED) from None
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        if watch:
            signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: object) -> None:
    """End at once: there is nothing yet, or nothing any more, to clean up.

    An exception could be swallowed by what is being imported or taken down, or be shown as a traceback.
    """
    os._exit(_INTERRUPTED)

"""``python -m k3eval_local.server``: serve a local K3 over HTTP.

When ready, one JSON line on stdout names the base URL; logs go to stderr. SIGTERM and SIGINT stop it within
two seconds with exit code 0, also while it loads. What cannot work (unknown model, port in use, broken
checkpoint) is one line on stderr and exit code 2; what can be checked without torch is checked before it is
imported. An engine that dies by itself is exit code 3.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import FrameType

from k3eval_local.command import MAX_SEED, MAX_THREADS, Parser, fail, whole

DIALECT_NAMES = ("vllm", "moonshot", "openrouter")


class _Parser(Parser):
    """The help lists the faults, which are only imported for it."""

    def format_help(self) -> str:
        from k3eval_local.protocol.chaos import help_lines

        self.epilog = "faults and profiles of --chaos:\n" + "\n".join(f"  {line}" for line in help_lines())
        return super().format_help()


def seconds(least: float) -> Callable[[str], float]:
    """An option's type: a finite number, ``least`` or more."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, {least:g} or more")
        return value

    return read


def amount(text: str) -> Decimal:
    """An option's type: money."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    if not (value.is_finite() and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount, 0 or more")
    return value


def parser(prog: str) -> argparse.ArgumentParser:
    """The command line."""
    made = _Parser(
        prog=prog,
        description="Serve a local K3 model behind an OpenAI-compatible API.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--model",
        default="a",
        help="a, b, c, d (random weights), each also NAME-mla; a checkpoint's name or folder",
    )
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    made.add_argument(
        "--port", type=whole(0, 65535), default=0, help="port to listen on; 0 takes a free one (%(default)s)"
    )
    made.add_argument(
        "--seed",
        type=whole(0, MAX_SEED),
        default=0,
        help="seed of random weights and of sampling without a seed (%(default)s)",
    )
    made.add_argument(
        "--dialect", choices=DIALECT_NAMES, default="vllm", help="whose wire format to speak (%(default)s)"
    )
    made.add_argument(
        "--key", default=os.environ.get("K3EVAL_SERVE_KEY"), help="ask for this key (or set K3EVAL_SERVE_KEY)"
    )
    made.add_argument(
        "--served-name",
        action="append",
        default=[],
        metavar="ID",
        help="a further model id to answer to; may be repeated",
    )
    made.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tiktoken rank file, instead of the checkpoint's or the built-in one",
    )
    made.add_argument(
        "--context", type=whole(1), metavar="TOKENS", help="context length, at most the model's own"
    )
    made.add_argument(
        "--default-max-tokens",
        type=whole(1),
        default=4096,
        metavar="TOKENS",
        help="output limit of requests without one (%(default)s)",
    )
    made.add_argument(
        "--memory-mib", type=whole(1), default=2048, help="budget for caches and states (%(default)s)"
    )
    made.add_argument(
        "--max-batch",
        type=whole(1, 4096),
        default=64,
        help="requests that run at the same time (%(default)s)",
    )
    made.add_argument(
        "--threads", type=whole(1, MAX_THREADS), help="threads of torch; its own default otherwise"
    )
    made.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs (%(default)s)"
    )
    made.add_argument(
        "--kernels",
        choices=("auto", "torch", "native", "triton"),
        default="auto",
        help="what runs it: Triton on a GPU, the native step on a CPU, or one of them by name (%(default)s)",
    )
    made.add_argument(
        "--weights",
        choices=("fp32", "bf16", "int8"),
        default="fp32",
        help="of the native step; narrow ones are used where they are faster (%(default)s)",
    )
    made.add_argument(
        "--max-body-mib", type=whole(1, 65536), default=64, help="largest request body (%(default)s)"
    )
    made.add_argument("--free", action="store_true", help="do not force well-formed messages while sampling")
    made.add_argument("--prices", action="store_true", help="apply the published prices to the local tokens")
    made.add_argument(
        "--credit",
        type=amount,
        default="100",
        metavar="USD",
        help="the account's balance, used up with --prices (%(default)s)",
    )
    made.add_argument(
        "--tier", help="rate limits: moonshot 1, 10, 20, 100, 1000, 3000; openrouter free, free-10"
    )
    made.add_argument(
        "--reasoning-field",
        choices=("reasoning_content", "reasoning"),
        default="reasoning_content",
        help="vllm: name of the reasoning member",
    )
    made.add_argument(
        "--repeat-finish",
        action="store_true",
        help="openrouter: end streams in the form that repeats the finish chunk",
    )
    made.add_argument(
        "--keep-alive",
        type=seconds(0.01),
        default=10.0,
        metavar="S",
        help="openrouter: seconds of silence before a comment (%(default)s)",
    )
    made.add_argument(
        "--chaos",
        metavar="SEED[:PROFILE][@RATE]",
        help="inject faults, see below; PROFILE may be faults joined by commas",
    )
    made.add_argument(
        "--chaos-silence",
        type=seconds(0),
        default=30.0,
        metavar="S",
        help="length of the fault 'silence' (%(default)s)",
    )
    made.add_argument("--parent-pid", type=whole(1), metavar="PID", help="stop when this process is gone")
    made.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="of the log on stderr (%(default)s)",
    )
    made.add_argument("--json", action="store_true", help="the ready line is JSON in any case")
    return made


def main(argv: Sequence[str] | None = None, prog: str = "python -m k3eval_local.server") -> None:
    """Run the server until it is told to stop.

    Raises SystemExit: code 2 for what cannot work, 3 when the engine's process has ended by itself.
    """
    options = parser(prog).parse_args(argv)
    if options.key == "":
        fail("--key (or K3EVAL_SERVE_KEY) is empty; leave it out to ask for no key")
    values = vars(options)
    del values["json"]
    with stops_are_success():
        from k3eval_local.server.lifecycle import LaunchError, LaunchOptions, launch

        try:
            launch(LaunchOptions(**values))
        except LaunchError as error:
            fail(str(error), error.code)


@contextmanager
def stops_are_success() -> Iterator[None]:
    """SIGTERM and SIGINT end the block and the program, with exit code 0."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
    # Everything is closed by now; the interpreter's own end would spend 0.7 s on unloading torch.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

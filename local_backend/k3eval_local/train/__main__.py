"""Train a model.

    python -m k3eval_local.train --config nano --data FILE|- --ranks FILE --seed S --out DIR

DIR gets the log (one JSON object a line), the state to resume from, and at the end the checkpoint in the
layout of the released Kimi K3 with its rank file. What cannot work is one line on stderr and exit code 2.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from k3eval_local.command import MAX_SEED, MAX_THREADS, Parser, fail, whole
from k3eval_local.train.command import called, folder, one_line, opened

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "67108864"}
"""glibc gives freed memory back at every step otherwise, and page faults cost a third of the time."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and save."""
    parser = Parser(prog="k3eval_local.train", description=__doc__)
    parser.add_argument("--config", choices=("nano", "micro"), default="nano", help="sizes and schedule")
    parser.add_argument("--data", required=True, help="conversations, JSONL; - is standard input")
    parser.add_argument(
        "--ranks", type=Path, required=True, help="rank file, see k3eval_local.train.vocabulary"
    )
    parser.add_argument(
        "--seed", type=whole(0, MAX_SEED), default=0, help="of the weights, the order and the drills"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for log, state and checkpoint")
    parser.add_argument("--threads", type=whole(1, MAX_THREADS), default=1, help="CPU threads")
    parser.add_argument("--steps", type=whole(1), help="steps in all, instead of the configuration's")
    parser.add_argument("--hold", type=whole(1), help="step from which the rate falls")
    parser.add_argument("--resume", action="store_true", help="continue from the state in --out")
    options = parser.parse_args(arguments)

    def saved() -> str:
        state = options.out / "state.pt"
        return f"; --resume continues from {state}" if state.is_file() else ", nothing was saved yet"

    with one_line(saved), folder(options.out):
        train(options)


def train(options: argparse.Namespace) -> None:
    """One run with parsed options.

    Raises:
        LocalError: it cannot be done as asked; says why.
    """
    checkpoint = options.out / "checkpoint"
    if checkpoint.exists() and (not checkpoint.is_dir() or any(checkpoint.iterdir())):
        fail(f"{checkpoint} exists; move it away or choose another --out")

    import torch

    from k3eval_local.checkpoint import save
    from k3eval_local.model.decoder import K3Model
    from k3eval_local.tokenizer import RANK_FILE, Tokenizer
    from k3eval_local.train.forward import Precision
    from k3eval_local.train.initial import initialise
    from k3eval_local.train.loop import LOG, STATE, Inputs, Run
    from k3eval_local.train.render import DataError, read_examples, share_openings
    from k3eval_local.train.settings import PRESETS

    preset = PRESETS[options.config]
    steps = options.steps if options.steps is not None else preset.schedule.steps
    hold = options.hold if options.hold is not None else min(preset.schedule.hold, steps)
    if hold > steps:
        fail(f"--hold must be at most the {steps} steps of the run, not {hold}")
    for name in (LOG, STATE):
        if (options.out / name).is_dir():
            fail(f"{options.out / name} is a folder; move it away or choose another --out")
    if options.resume and not (options.out / STATE).is_file():
        fail(f"--resume: there is no {STATE} in {options.out}; leave --resume out to start anew")
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(options.ranks)
    with opened(options.data) as lines:
        examples = share_openings(list(read_examples(lines, tokenizer, called(options.data))))
    least = preset.held_out + 1
    if len(examples) < least:
        raise DataError(
            f"--data {options.data} holds {len(examples)} conversations; --config {options.config} needs at "
            f"least {least}, because the first {preset.held_out} are kept out of training"
        )
    model = K3Model(preset.config(tokenizer.vocab_size))
    initialise(model, options.seed)
    run = Run(
        model,
        tokenizer,
        Inputs(examples[preset.held_out :], examples[: preset.held_out]),
        replace(preset.schedule, steps=steps, hold=hold),
        seed=options.seed,
        out=options.out,
        precision=Precision(torch.bfloat16),
    )
    if options.resume:
        run.resume()
    print(json.dumps(run.describe()), flush=True)  # noqa: T201  # progress of a command
    run.run()
    save(model, checkpoint, dtype=torch.bfloat16)
    tokenizer.save(checkpoint / RANK_FILE)
    # a model this small is only right where it is sure
    (checkpoint / "generation_config.json").write_text('{"do_sample": false}\n', encoding="utf-8")
    print(checkpoint, flush=True)  # noqa: T201  # the result of a command


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        # the allocator reads these when the process starts
        command = [sys.executable, "-m", "k3eval_local.train", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ALLOCATOR)  # noqa: S606  # no shell is the point
    main()

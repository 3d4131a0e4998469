"""Train a model.

    python -m k3eval_local.train --config nano --data FILE|- --ranks FILE --seed S --out DIR

DIR gets the log (one JSON object a line), the state to resume from, and at the end the checkpoint in the
layout of the released Kimi K3 with its rank file.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "67108864"}
"""glibc gives freed memory back at every step otherwise, and page faults cost a third of the time."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(prog="k3eval_local.train", description=__doc__)
    parser.add_argument("--config", choices=("nano", "micro"), default="nano", help="sizes and schedule")
    parser.add_argument("--data", required=True, help="conversations, JSONL; - is standard input")
    parser.add_argument(
        "--ranks", type=Path, required=True, help="rank file, see k3eval_local.train.vocabulary"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order and the drills")
    parser.add_argument("--out", type=Path, required=True, help="folder for log, state and checkpoint")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--steps", type=int, help="steps in all, instead of the configuration's")
    parser.add_argument("--hold", type=int, help="step from which the rate falls")
    parser.add_argument("--resume", action="store_true", help="continue from the state in --out")
    options = parser.parse_args(arguments)
    train(options)


def train(options: argparse.Namespace) -> None:
    """One run with parsed options."""
    import torch

    from k3eval_local.checkpoint import save
    from k3eval_local.model.decoder import K3Model
    from k3eval_local.tokenizer import RANK_FILE, Tokenizer
    from k3eval_local.train.forward import Precision
    from k3eval_local.train.initial import initialise
    from k3eval_local.train.loop import Inputs, Run
    from k3eval_local.train.render import read_examples, share_openings
    from k3eval_local.train.settings import PRESETS

    torch.set_num_threads(options.threads)
    preset = PRESETS[options.config]
    tokenizer = Tokenizer.from_file(options.ranks)
    with sys.stdin if options.data == "-" else Path(options.data).open(encoding="utf-8") as lines:
        examples = share_openings(list(read_examples(lines, tokenizer)))
    model = K3Model(preset.config(tokenizer.vocab_size))
    initialise(model, options.seed)
    steps = options.steps or preset.schedule.steps
    hold = options.hold or min(preset.schedule.hold, steps)
    run = Run(
        model,
        tokenizer,
        Inputs(examples[preset.held_out :], examples[: preset.held_out]),
        replace(preset.schedule, steps=steps, hold=hold),
        seed=options.seed,
        out=options.out,
        precision=Precision(torch.bfloat16),
    )
    print(json.dumps(run.describe()), flush=True)  # noqa: T201  # progress of a command
    if options.resume:
        run.resume()
    run.run()
    folder = options.out / "checkpoint"
    save(model, folder, dtype=torch.bfloat16)
    tokenizer.save(folder / RANK_FILE)
    # a model this small is only right where it is sure
    (folder / "generation_config.json").write_text('{"do_sample": false}\n', encoding="utf-8")
    print(folder, flush=True)  # noqa: T201  # the result of a command


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        # the allocator reads these when the process starts
        command = [sys.executable, "-m", "k3eval_local.train", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ALLOCATOR)  # noqa: S606  # no shell is the point
    main()

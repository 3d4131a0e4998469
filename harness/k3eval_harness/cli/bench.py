"""``k3eval bench decode``: what a token costs to generate, in seconds and money, at real context lengths."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3eval_harness.cli.common import (
    Exit,
    fail,
    help_without_command,
    one_line_errors,
    out_option,
    print_json,
)

if TYPE_CHECKING:
    from k3eval import Meter, ModelRef
    from k3eval_harness.decode.corpus import Corpus
    from k3eval_harness.decode.live import LiveModel
    from k3eval_harness.decode.records import SweepCall, SweepResult
    from k3eval_harness.decode.sweep import SweepPlan
    from k3eval_harness.results.schema import ModelInfo

INTERRUPTED = "interrupted"
MAX_REPEATS = 10_000
MAX_FAILED = 0.1
"""Share of calls that may fail; as with the trials of a run, more is no measurement."""

commands = typer.Typer(
    help="Measure decode cost against context length.",
    callback=help_without_command,
    invoke_without_command=True,
)
"""A group although it has one command yet."""


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(commands, name="bench")


@commands.command("decode")
def decode(
    contexts: Annotated[str, typer.Option(help="Context lengths in tokens; 1k is 1024.")] = "4k,32k",
    model: Annotated[
        list[str] | None, typer.Option(help="One or two models; a bare NAME is local/NAME. Default: local/a.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Prompts per context, each sent cold and warm.")] = 3,
    output_tokens: Annotated[int, typer.Option(help="Output tokens of each call.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the cuts, the order and random weights.")] = 0,
    package: Annotated[
        str, typer.Option(help="Installed package whose sources fill the prompts.")
    ] = "pandas",
    max_cost: Annotated[str | None, typer.Option(help="Money cap of the sweep, in USD.")] = None,
    out: Annotated[Path | None, out_option("JSON file to write, and a table beside it (.md).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure TTFT, seconds per token and the cost of 1,000 tokens at each context length."""
    with one_line_errors():
        import secrets

        from k3eval_harness.cli.run import money_cap
        from k3eval_harness.decode.corpus import load_corpus
        from k3eval_harness.decode.prompts import parse_contexts
        from k3eval_harness.decode.sweep import SweepPlan

        _check(repeats, output_tokens, model or [], seed, out)
        plan = SweepPlan(parse_contexts(contexts), repeats, output_tokens, seed, secrets.token_hex(8))
        references = _references(model or ["a"])
        result = measure(plan, references, load_corpus(package), money_cap(max_cost))
        _write(result, out)
        _show(result, as_json=json)
        if problem := _problem(result):
            raise fail(*problem)


def _problem(result: SweepResult) -> tuple[str, Exit] | None:
    """Why the sweep is not whole, and the exit code that says so; None when it is."""
    if result.stopped:
        code = Exit.INTERRUPTED if result.stopped == INTERRUPTED else Exit.BUDGET
        return f"{result.stopped}; what was measured until then is shown", code
    errors = [" ".join(call.error.split()) for call in result.calls if call.error]
    if len(errors) > MAX_FAILED * len(result.calls):
        return f"{len(errors)} of {len(result.calls)} calls failed: {errors[0]}", Exit.VOID
    return None


def measure(
    plan: SweepPlan, references: Sequence[ModelRef], corpus: Corpus, max_cost: Decimal | None
) -> SweepResult:
    """Serve the local models, run the sweep and summarise it.

    Ctrl-C or a spent budget ends it early with what is there.
    """
    from k3eval import Budget, BudgetExceededError, Meter
    from k3eval_harness.decode.live import costs_of, model_price
    from k3eval_harness.decode.records import CorpusInfo, SweepResult
    from k3eval_harness.decode.summary import context_rows, model_fits, twin_rows
    from k3eval_harness.decode.sweep import run_sweep
    from k3eval_harness.provenance import collect_provenance

    calls: list[SweepCall] = []
    started, stopped = datetime.now(UTC), None
    meter = Meter(budget=None if max_cost is None else Budget(max_cost=max_cost))

    def done(call: SweepCall) -> None:
        calls.append(call)
        step(call)

    with ExitStack() as stack, _progress(plan, len(references)) as step:
        served = [stack.enter_context(_served(reference, plan.seed, meter)) for reference in references]
        try:
            run_sweep(plan, [live for live, _ in served], corpus, done)
        except (KeyboardInterrupt, BudgetExceededError) as error:
            if not calls:
                raise
            stopped = INTERRUPTED if isinstance(error, KeyboardInterrupt) else error.message
    names = [info.name for _, info in served]
    hosts = {call.model: call.host for call in calls if call.host}
    prices = {str(r): model_price(r, hosts.get(str(r))) for r in references}
    return SweepResult(
        command=shlex.join(["k3eval", *sys.argv[1:]]),
        started_at=started,
        finished_at=datetime.now(UTC),
        stopped=stopped,
        seed=plan.seed,
        repeats=plan.repeats,
        output_tokens=plan.output_tokens,
        contexts=plan.contexts,
        models=tuple(info for _, info in served),
        corpus=CorpusInfo(package=corpus.package, version=corpus.version, sha256=corpus.sha256),
        costs=costs_of(meter.total.cost),
        price_rows=tuple(price.row for price in prices.values() if price.row),
        rows=context_rows(calls, prices),
        fits=model_fits(calls),
        twin=twin_rows(calls, names[0], names[1]) if len(names) == 2 else (),
        calls=tuple(calls),
        provenance=collect_provenance(None, None),
    )


@contextmanager
def _served(reference: ModelRef, seed: int, meter: Meter) -> Iterator[tuple[LiveModel, ModelInfo]]:
    """A client for the model; a local model without an address is served for the length of the context."""
    from k3eval import K3
    from k3eval_harness.decode.live import LiveModel
    from k3eval_harness.launcher import local_server
    from k3eval_harness.results.schema import ModelInfo

    with ExitStack() as stack:
        at, weights = reference, None
        if reference.provider == "local" and reference.base_url is None:
            server = stack.enter_context(local_server(reference.model, seed))
            at, weights = replace(reference, base_url=server.base_url), server.weights
        client = K3.from_ref(at, meter=meter)
        stack.callback(client.close)
        info = ModelInfo(
            name=str(reference), provider=at.provider, model=at.model, base_url=at.base_url, weights=weights
        )
        yield LiveModel(str(reference), client, reference, seed), info


@contextmanager
def _progress(plan: SweepPlan, models: int) -> Iterator[Callable[[SweepCall], None]]:
    """One line on stderr per call: how far, what, how fast."""
    from k3eval_harness.cli.render import console

    screen, total = console(stderr=True), len(plan.units()) * models * 2
    count = itertools.count(1)

    def step(call: SweepCall) -> None:
        speed = call.sample.seconds_per_token if call.sample else None
        said = call.error or (f"{1000 * speed:.3g} ms/token" if speed else "not measured")
        where = f"{call.model} context={call.context} repeat={call.repeat + 1} {call.cache}"
        screen.print(f"call {next(count)} of {total}: {where}: {said}", markup=False)

    yield step


def _check(repeats: int, output_tokens: int, models: Sequence[str], seed: int, out: Path | None) -> None:
    from k3eval_harness.cli.run import MAX_SEED
    from k3eval_harness.decode.sample import MIN_OUTPUT_TOKENS
    from k3eval_harness.errors import UsageError

    if repeats < 1:
        raise UsageError(f"--repeats must be 1 or more, not {repeats}")
    if repeats > MAX_REPEATS:
        raise UsageError(f"--repeats must be {MAX_REPEATS} or less, not {repeats}")
    if output_tokens < MIN_OUTPUT_TOKENS:
        raise UsageError(f"--output-tokens must be {MIN_OUTPUT_TOKENS} or more, not {output_tokens}")
    if not 0 <= seed < MAX_SEED:
        raise UsageError(f"--seed must be 0 or more and below 2^63, not {seed}")
    if len(models) > 2:
        raise UsageError(f"--model can be given twice at most, not {len(models)} times")
    if out is not None and (out.is_dir() or out.suffix != ".json"):
        raise UsageError(f"--out must be a .json file, not {out}")
    if out is not None and not os.access(out.parent, os.W_OK):
        raise UsageError(f"cannot write into {out.parent}; choose another --out")


def _references(names: Sequence[str]) -> list[ModelRef]:
    from k3eval_harness.cli.models import check_local_model
    from k3eval_harness.errors import UsageError

    references = [_reference(name) for name in names]
    for reference in references:
        if reference.provider == "local" and reference.base_url is None:
            check_local_model(reference.model)
    if len(set(references)) < len(references):
        raise UsageError(f"--model names {references[0]} twice; give two different models")
    return references


def _reference(name: str) -> ModelRef:
    """A full name, or the bare name of a local model, or a checkpoint's folder."""
    from k3eval import ModelRef
    from k3eval.refs import PROVIDER_NAMES

    full = name.partition("/")[0] in PROVIDER_NAMES and "/" in name
    reference = ModelRef.parse(name if full else f"local/{name}")
    if full or Path(name).expanduser().is_dir():
        return reference
    return replace(reference, model=reference.model.lower())


def _write(result: SweepResult, out: Path | None) -> None:
    from k3eval_harness.cli.render import write_text
    from k3eval_harness.decode.render import markdown

    if out is not None:
        write_text(result.model_dump_json(indent=2) + "\n", out)
        write_text(markdown(result), out.with_suffix(".md"))


def _show(result: SweepResult, *, as_json: bool) -> None:
    from k3eval_harness.cli.render import print_table, say
    from k3eval_harness.decode.render import COLUMNS, FIGURES, notes, table_rows

    if as_json:
        return print_json(result.model_dump(mode="json"))
    print_table(COLUMNS, table_rows(result), right=FIGURES)
    return say("\n" + "\n".join(notes(result)))

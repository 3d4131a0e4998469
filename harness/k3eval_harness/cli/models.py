"""``k3eval models``: what ``--model`` takes: local models with their sizes, priced ones with their dates."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3eval_harness.cli.common import one_line_errors, print_json

if TYPE_CHECKING:
    from k3eval.meter.pricing import PriceRow

FORMS = "local/NAME, moonshot/kimi-k3, openrouter/moonshotai/kimi-k3, compatible/ID@http://HOST:PORT/v1"
SIZED_AT = 32_768
"""Context at which the memory of one sequence is shown."""

Facts = dict[str, str | int | bool | None]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(models)


def models(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """List known models: local ones with sizes, paid ones with dated prices and limits."""
    with one_line_errors():
        from k3eval_harness.cli.render import print_table, say

        local, priced = local_models(), priced_models(datetime.now(UTC).date())
        if json:
            return print_json({"forms": FORMS, "local": local, "priced": priced})
        print_table(LOCAL_COLUMNS, map(_local_cells, local), right=LOCAL_COLUMNS[1:], title="Local, no cost")
        print_table(
            PRICED_COLUMNS,
            map(_priced_cells, priced),
            right=PRICED_COLUMNS[1:7],
            title="\nPer million tokens, as last seen",
        )
        return say(f"\n--model takes {FORMS}. A dash is unknown.")


LOCAL_COLUMNS = ("model", "parameters", "active", "KDA", "MLA", "context", "MiB a sequence at 32k")
PRICED_COLUMNS = (
    "model",
    "input",
    "cache read",
    "output",
    "currency",
    "context",
    "max output",
    "served by",
    "seen",
)


def local_models() -> list[Facts]:
    """Scaled configs, their all-MLA twins, and the checkpoints that are bundled; no torch is imported."""
    import k3eval_local
    from k3eval_local.model.accounting import count_parameters, sequence_bytes
    from k3eval_local.model.config import SCALED_NAMES, K3Config

    configs = {name: K3Config.scaled(name) for name in SCALED_NAMES}
    configs |= {f"{name}-mla": config.mla_twin() for name, config in configs.items()}
    bundled = sorted(Path(k3eval_local.__path__[0]).glob("checkpoints/*/config.json"))
    configs |= {path.parent.name: K3Config.read(path) for path in bundled}
    return [
        {
            "model": f"local/{name}",
            "parameters": (count := count_parameters(config)).total,
            "active_parameters": count.active,
            "kda_layers": config.layer_kinds.count("kda"),
            "mla_layers": config.layer_kinds.count("mla"),
            "context": config.max_position_embeddings,
            "sequence_bytes_at_32k": sequence_bytes(config, SIZED_AT).total,
        }
        for name, config in configs.items()
    ]


def check_local_model(name: str) -> None:
    """Refuse an unknown local model at once: the server would say so only after it has loaded torch.

    Raises:
        UsageError: neither a known name nor a folder.
    """
    from k3eval_harness.errors import UsageError

    known = [str(facts["model"]).removeprefix("local/") for facts in local_models()]
    if name.lower() not in known and not Path(name).expanduser().is_dir():
        short = ", ".join(model for model in known if not model.endswith("-mla"))
        raise UsageError(
            f"no local model is called {name!r}: use {short}, one of these with -mla, or a checkpoint folder"
        )


def priced_models(today: date) -> list[Facts]:
    """The SDK's price rows; a row older than the SDK's limit is marked stale."""
    from k3eval.meter.pricing import STALE_DAYS, PriceTable

    return [
        {
            "model": _name(row),
            "served_by": row.tag or row.served_by,
            "currency": row.currency,
            "input": _amount(row.input),
            "cache_read": _amount(row.cache_read),
            "cache_write_5m": _amount(row.cache_write_5m),
            "cache_write_1h": _amount(row.cache_write_1h),
            "output": _amount(row.output),
            "context": row.context,
            "max_output": row.max_output,
            "checked_on": row.checked_on.isoformat(),
            "stale": row.age_days(today) > STALE_DAYS,
            "source": row.source,
        }
        for row in PriceTable.bundled().rows
    ]


def _name(row: PriceRow) -> str:
    """The row's model as ``--model`` takes it."""
    known = {
        "api.moonshot.ai": "moonshot/",
        "api.moonshot.cn": "moonshot-cn/",
        "openrouter.ai": "openrouter/moonshotai/",
    }
    if row.host in known:
        return known[row.host] + row.model
    host = f"REGION{row.host}" if row.host.startswith(".") else row.host
    return f"compatible/{row.model}@https://{host}/..."


def _amount(amount: Decimal | None) -> str | None:
    return None if amount is None else str(amount)


def _local_cells(facts: Facts) -> tuple[str, ...]:
    sizes = (_size(facts["parameters"]), _size(facts["active_parameters"]))
    memory = f"{int(facts['sequence_bytes_at_32k'] or 0) / 2**20:.1f}"
    layers = (str(facts["kda_layers"]), str(facts["mla_layers"]), str(facts["context"]), memory)
    return (str(facts["model"]), *sizes, *layers)


def _priced_cells(facts: Facts) -> tuple[str, ...]:
    names = ("model", "input", "cache_read", "output", "currency", "context", "max_output", "served_by")
    cells = ["-" if facts[name] is None else str(facts[name]) for name in names]
    return (*cells, f"{facts['checked_on']}{' (old)' if facts['stale'] else ''}")


def _size(count: str | int | bool | None) -> str:
    number = int(count or 0)
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"

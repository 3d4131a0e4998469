"""Errors become one line and the right exit code."""

from __future__ import annotations

import pytest
import typer

from k3eval.errors import BudgetExceededError, ConfigError
from k3eval_harness.cli.common import Exit, one_line_errors
from k3eval_harness.errors import Cancelled, EngineUnavailable, UsageError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no such task"), Exit.USAGE),
        (ConfigError("no key"), Exit.USAGE),
        (EngineUnavailable("start docker"), Exit.VOID),
        (Cancelled("stopped by the user"), Exit.INTERRUPTED),
        (BudgetExceededError("too dear"), Exit.BUDGET),
        (KeyboardInterrupt(), Exit.INTERRUPTED),
        (OSError(28, "No space left on device", "results"), Exit.VOID),
    ],
)
def test_exit_codes(error: BaseException, code: Exit, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as raised, one_line_errors():
        raise error
    assert raised.value.exit_code == code
    assert len(capsys.readouterr().err.splitlines()) == 1

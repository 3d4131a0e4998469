"""``k3eval serve``: the local backend's own command line under this project's name.

The options, their help and the list of injectable faults live in ``k3eval_local.server``; this command only
passes them on, so that there is one place to read and to change.
"""

from __future__ import annotations

import typer

from k3eval_harness.cli.common import fail

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command(context_settings=_PASS_ON, add_help_option=False)
    def serve(context: typer.Context) -> None:
        """Serve a local K3 model over HTTP; see `k3eval serve --help` for its options and faults."""
        try:
            from k3eval_local.server.__main__ import main
        except ImportError as error:
            raise fail(f"serving needs the extra 'local': pip install 'k3eval[local]' ({error})") from error
        main(context.args, prog="k3eval serve")

"""The command `crossbn`: one file per verb, imported when the verb is called."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "demo": ("Try", "Train BN, GN and CBN side by side at a tiny batch."),
    "check": ("Try", "Check whether cross-iteration norms are right and fast on this device."),
    "train": ("Train", "Train a classifier or a detector with any norm."),
    "predict": ("Train", "Draw the boxes and masks that a trained detector finds in images."),
    "data": ("Train", "Show the data sets, or get one."),
    "diagnose": ("Measure", "Measure how close the remembered statistics of a model are to the true ones."),
    "cost": ("Measure", "Measure time, memory and FLOPs of BN, GN and CBN."),
    "reproduce": ("Show", "Reproduce a table or figure of the paper."),
    "report": ("Show", "Make a page of the records that other commands left in a folder."),
}
"""Verbs with their group and what `crossbn --help` says of them; `crossbn.cli.VERB` has a function or Typer VERB."""


def main() -> None:
    """Run the command with the arguments of this process."""
    try:
        _run()
    except KeyboardInterrupt:  # before the command itself listens
        print("crossbn: interrupted", file=sys.stderr)
        sys.exit(130)


def _run() -> None:
    from crossbn.cli.extras import require  # here, so that `main` hears Ctrl-C meanwhile
    from crossbn.cli.version import installation

    if sys.argv[1:2] == ["--version"]:  # after `pip install crossbn` alone there is no typer to ask
        print(installation())
        return
    require("rich", "typer")
    make_app()()


def make_app() -> typer.Typer:
    """Return the command with all its verbs."""
    import typer  # here, so that `main` can say what is missing

    from crossbn.cli.group import LazyGroup, describe

    # Plain text instead of boxes: an error is one sentence that a script can read, too.
    app = typer.Typer(
        name="crossbn",
        cls=LazyGroup,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(describe)
    for verb, (panel, summary) in COMMANDS.items():
        app.command(verb, help=summary, rich_help_panel=panel)(lambda: None)  # its name and summary, for the help
    return app

"""The command `crossbn`: one file per verb."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossbn.cli.extras import require

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command with the arguments of this process."""
    require("rich", "typer")
    make_app()()


def make_app() -> typer.Typer:
    """Return the command with all its verbs."""
    import typer  # here, so that `main` can say what is missing

    from crossbn.cli.check import check
    from crossbn.cli.cost import cost
    from crossbn.cli.data import data
    from crossbn.cli.demo import demo
    from crossbn.cli.diagnose import diagnose
    from crossbn.cli.predict import predict
    from crossbn.cli.report import report
    from crossbn.cli.reproduce import reproduce
    from crossbn.cli.train import train
    from crossbn.cli.version import describe

    # Plain text instead of boxes: an error is one sentence that a script can read, too.
    app = typer.Typer(
        name="crossbn",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(describe)
    app.command()(check)
    app.command()(cost)
    app.add_typer(data, name="data")
    app.command()(demo)
    app.command()(diagnose)
    app.command()(predict)
    app.command()(report)
    app.command()(reproduce)
    app.add_typer(train, name="train")
    return app

"""Verbs that are imported when they are called, so that nobody waits for torch to read the help."""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from crossbn.cli.version import installation

INTERRUPTED = 130
"""The status after Ctrl-C, as shells have it: 128 and the signal's number."""


class LazyGroup(TyperGroup):
    """Lists stand-ins and calls the verb of the same name in `crossbn.cli`; Ctrl-C ends any of them with 130."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the verb's name, what it does, and the arguments after it."""
        name, found, rest = super().resolve_command(ctx, args)
        if name is None or found is None:
            return name, found, rest
        command = _load(name)
        if "--help" in rest:
            _use_rich(command)
        return name, command, rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, verbs in groups."""
        self.rich_markup_mode = "markdown"  # of the help alone: errors stay plain sentences
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Call the verb."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("crossbn: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except typer.Exit as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # the verb has said what is kept
                raise typer.Exit(INTERRUPTED) from None
            raise


def _tell(wanted: bool) -> None:
    if wanted:
        typer.echo(installation())
        raise typer.Exit


def describe(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell, is_eager=True, help="Tell versions and what is compiled.")
    ] = False,
) -> None:
    """Cross-iteration batch normalization: networks with BatchNorm that train well on tiny batches."""
    del version  # answered before a verb is asked for


def _load(name: str) -> Any:
    verb = getattr(import_module(f"crossbn.cli.{name}"), name)
    if isinstance(verb, typer.Typer):
        return get_group(verb)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name)(verb)
    return get_command(app)


def _use_rich(command: Any) -> None:
    if isinstance(command, TyperCommand | TyperGroup):
        command.rich_markup_mode = "markdown"
    for each in getattr(command, "commands", {}).values():
        _use_rich(each)

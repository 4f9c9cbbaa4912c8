"""What commands say: tables on the terminal, and the sentence that a mistake ends with."""

from collections.abc import Sequence
from typing import Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table as Shown

from crossbn.lab.report.table import Table


def print_tables(
    tables: Sequence[Table], columns: int, justify: Literal["left", "right"] = "right", no_wrap: bool = False
) -> None:
    """Print tables one below the other.

    Args:
        tables: cut in parts where they are wide.
        columns: of a part beside the first, at most.
        justify: all columns but the first.
        no_wrap: whether the first column keeps its width, however narrow the terminal.
    """
    console = Console()
    for part in (part for table in tables for part in table.cut(columns)):
        shown = Shown(title=part.title or None, title_justify="left")
        for i, column in enumerate(part.columns):
            shown.add_column(column, justify=justify if i else "left", no_wrap=no_wrap and not i)
        for row in part.rows:
            shown.add_row(*row)
        console.print(shown)


def print_texts(*texts: str) -> None:
    """Print paragraphs, as wide as the terminal and with a blank line before each."""
    for text in texts:
        Console(highlight=False).print(f"\n{text}", markup=False)


def fail(sentence: str) -> NoReturn:
    """End the command with a sentence for what is not the program's fault."""
    typer.echo(f"crossbn: {sentence}", err=True)
    raise typer.Exit(1)

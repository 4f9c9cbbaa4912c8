"""What commands say: tables on the terminal, and the sentence that a mistake ends with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as Shown

from crossbn.cli.folding import fit
from crossbn.lab.records import DamagedError, RecordError
from crossbn.lab.report.table import Table


def print_tables(tables: Sequence[Table], columns: int = 99, justify: Literal["left", "right"] = "right") -> None:
    """Print tables one below the other.

    Args:
        tables: cut in parts where they are wider than the terminal.
        columns: of a part beside the first, at most.
        justify: numbers, which is all columns but the first and those with words.
    """
    console = Console()
    for table in tables:
        for number, part in enumerate(fit(table, console.width, columns)):
            shown = Shown(title=None if number else part.title or None, title_justify="left")
            for i, column in enumerate(part.columns):
                is_number = i and i not in part.word_columns
                shown.add_column(column, justify=justify if is_number else "left", no_wrap=bool(is_number or not i))
            for row in part.rows:
                shown.add_row(*row)
            console.print(shown)


def print_texts(*texts: str) -> None:
    """Print paragraphs, as wide as the terminal and with a blank line before each."""
    for text in texts:
        Console(highlight=False).print(f"\n{text}", markup=False)


def make_bars(*more: ProgressColumn) -> Progress:
    """Return bars for the error output: what is done, how much of it, for how long, and whatever else."""
    columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, *more, console=Console(stderr=True))


def fail(sentence: str) -> NoReturn:
    """End the command with a sentence for what is not the program's fault."""
    typer.echo(f"crossbn: {sentence}", err=True)
    raise typer.Exit(1)


@contextmanager
def mistakes_told(*told: type[Exception], interrupted: str, fresh: bool = False) -> Iterator[None]:
    """End the command with a sentence for what is not the program's fault.

    Args:
        told: errors whose message is for the user, beside those of files.
        interrupted: what there is after Ctrl-C.
        fresh: whether the command has --fresh, which helps where a file of records is damaged.
    """
    for_user: tuple[type[Exception], ...] = (RecordError, *told)
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted; {interrupted}")  # the group of the commands ends with the status for that
    except DamagedError as error:
        fail(f"{error}; {'--fresh starts anew' if fresh else 'take the line out, or take another --output'}")
    except for_user as error:
        fail(str(error))
    except OSError as error:
        what = error.strerror or str(error).partition("\n")[0]  # decoders raise theirs without a number
        fail(f"{what}: {error.filename}" if error.filename else what)

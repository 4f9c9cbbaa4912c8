"""`crossbn report`: tables, figures and a page from the records of other commands."""

from pathlib import Path
from typing import Annotated

import typer

from crossbn.cli.extras import require
from crossbn.cli.printing import mistakes_told
from crossbn.lab.records import write_whole


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="Of the records.")],
    output: Annotated[
        Path | None, typer.Option("--output", "--out", dir_okay=False, help="The page.", show_default="DIR/report.html")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page.", show_default="Results in DIR")] = None,
) -> None:
    """Make a page of the records that other commands left in a folder and in those below it.

    One HTML file with tables, figures and settings that needs no other: for a screen, a phone, or paper. Records of
    demo, reproduce, train, cost and diagnose are known by what is in them; a file that is something else is named and
    left out.
    """
    require("matplotlib")
    from crossbn.lab.report.folder import make_page  # matplotlib is slow to import

    path = output or folder / "report.html"
    with mistakes_told(interrupted="nothing was written"):
        page = make_page(folder, title)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page.html().encode())
    for problem in page.problems:
        typer.echo(f"crossbn: {problem}", err=True)
    typer.echo("\n- ".join([f"{path} shows:", *(section.title for section in page.sections)]))

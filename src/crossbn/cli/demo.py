"""`crossbn demo`: the norms side by side at a tiny batch."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from crossbn.cli.extras import require
from crossbn.cli.printing import print_tables, print_texts
from crossbn.cli.progress import complete, mistakes_told
from crossbn.lab.experiments.demo import TRAIN_IMAGES, Demo, caption, findings
from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.records import Record, write_whole
from crossbn.lab.report.comparison import comparison_table

_PICTURE = "curves.png"


def demo(
    batch_size: Annotated[int, typer.Option(min=1, help="Images per step.")] = 2,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each norm.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 4,
    train_images: Annotated[int, typer.Option(min=1, max=TRAIN_IMAGES, help="Images to train on.")] = 500,
    window: Annotated[
        int | None, typer.Option(min=1, help="Steps that CBN pools.", show_default="16 / batch size, at most 8")
    ] = None,
    out: Annotated[Path, typer.Option("--output", "--out", file_okay=False, help="Directory of the results.")] = Path(
        "demo-results"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the records in the directory.")] = False,
) -> None:
    """Train BN, GN and CBN side by side at a tiny batch.

    The images are scikit-learn's digits, which need no download, and BN at batch size 32 is the ceiling. Prints a
    table and writes records.jsonl, curves.png and index.html. Runs that records.jsonl has already are not repeated.
    """
    require("matplotlib", "sklearn")
    try:
        experiment = Demo(batch_size, epochs, train_images, window)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with mistakes_told():
        records = complete(experiment, experiment.configs(Scale.SMALL, seeds), out / "records.jsonl", fresh)
        page = out / "index.html"
        if not _shows(page, records):
            _write(page, records)
    print_tables([comparison_table("", experiment.measures, experiment.rows(records))])
    print_texts(caption(records), *findings(records))
    typer.echo(f"{page} shows the table and the curves.")


def _shows(page: Path, records: Sequence[Record]) -> bool:
    """Tell whether a page, with its picture, is of these records and no others."""
    is_there = page.exists() and page.with_name(_PICTURE).exists()
    return is_there and page.read_text(encoding="utf-8").endswith(_mark(records))


def _mark(records: Sequence[Record]) -> str:
    told = "".join(record.to_json() for record in records)
    return f"<!-- of records {hashlib.sha256(told.encode()).hexdigest()} -->\n"


def _write(page: Path, records: Sequence[Record]) -> None:
    from crossbn.lab.report.demo_section import demo_section, plot_curves  # matplotlib is slow to import
    from crossbn.lab.report.figure import save_png
    from crossbn.lab.report.page import Page

    save_png(plot_curves(records), page.with_name(_PICTURE))
    section = demo_section(records, page.parent, "records.jsonl")
    write_whole(page, f"{Page(section.title, [section]).html()}{_mark(records)}".encode())

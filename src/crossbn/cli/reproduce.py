"""`crossbn reproduce`: one table or figure of the paper, next to the paper's numbers where they are known."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from crossbn.cli.extras import require
from crossbn.cli.options import DataFolder
from crossbn.cli.printing import print_tables, print_texts
from crossbn.cli.progress import complete, mistakes_told
from crossbn.lab.data import FOLDER_VARIABLE
from crossbn.lab.experiments import coco, runner
from crossbn.lab.experiments.detection import SHAPES, find_data
from crossbn.lab.experiments.estimates import in_words
from crossbn.lab.experiments.experiment import Experiment, Scale, UnavailableError
from crossbn.lab.experiments.registry import EXPERIMENTS
from crossbn.lab.records import Record, Task, by_name, on_their_data, read
from crossbn.lab.report.comparison import comparison_table, surroundings
from crossbn.lab.report.context import in_text
from crossbn.lab.report.experiment_figures import FIGURES
from crossbn.lab.report.markdown import write_markdown
from crossbn.lab.report.table import Table

_MOST_ROWS = 30  # of a plan, so that it fits a screen
_LEAST_SETTINGS = 20  # letters of them that are worth a column
_FRAME = 13  # what lines and blanks take of a row
_WORDS = {"looks": "measurements", "probes": "random projections"}  # in place of a setting's name


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Of the table or figure; --list shows all.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Show the names and what they stand for.")] = False,
    scale: Annotated[Scale, typer.Option(help="What two cores can do, or what the paper did.")] = Scale.SMALL,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs and about how long each takes.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Make the table of what there is, and run nothing.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Of each run.", show_default="as the table needs")] = None,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Do only runs whose name has this in it.")] = "",
    output: Annotated[
        Path, typer.Option("--output", "--out", file_okay=False, help="Directory of the results.")
    ] = Path("reproduce-results"),
    data: Annotated[
        str | None,
        typer.Option(help="A folder in COCO's format, for detection at small scale.", show_default="nuclei or shapes"),
    ] = None,
    data_folder: DataFolder = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what earlier calls have of these runs.")] = False,
) -> None:
    """Reproduce a table or figure of the paper, next to the paper's numbers where we know them.

    Writes NAME-SCALE.jsonl with a line for each run, NAME-SCALE.md with the table and, for some, NAME-SCALE.png. Runs
    that the first has already are not repeated, so a call that was interrupted goes on where it stopped. Tables of
    trained classifiers share their runs: these are in classification-SCALE.jsonl. A table shows all seeds that there
    are, whatever --seeds and --only ask for.
    """
    if list_all:
        titles = tuple((key, each.title) for key, each in EXPERIMENTS.items())
        print_tables([Table("", ("name", "what it is"), titles)], justify="left")
        return
    name, experiment = _find(name)
    if scale not in experiment.scales:
        scales = " or ".join(each.value for each in experiment.scales)
        raise typer.BadParameter(f"{name} has no {scale.value} scale, but {scales}", param_hint="--scale")
    require("matplotlib", "sklearn")
    if not show:
        require("torchvision", extra="train")
    if data_folder is not None:
        os.environ[FOLDER_VARIABLE] = str(data_folder)  # the runs are processes of their own
    tasks = experiment.configs(scale, seeds) if data is None else _on(data, name, scale, seeds)
    chosen = [task for task in tasks if only.lower() in task.name.lower()]
    if not chosen:
        raise typer.BadParameter(f"no run of {name} has {only!r} in its name; --dry-run shows all", param_hint="--only")
    path = output / f"{tasks[0].kind}-{scale.value}.jsonl"
    with mistakes_told():
        if dry_run:
            _print_plan(experiment, runner.Progress.read(chosen, path))
            return
        if show and data is None:
            tasks = list(on_their_data(tasks, read(path)))
        else:
            complete(experiment, chosen, path, fresh)
        records = runner.Progress.read(tasks, path).shown
        if not records:
            raise UnavailableError(f"{path} has no record of {name}: without --show its runs are done")
        notes = [*_missing(tasks, records), *experiment.notes(scale), surroundings(records)]
        table = _write(name, scale, output, records, notes, anew=show)
    print_tables([table])
    print_texts(*notes)


def _find(name: str | None) -> tuple[str, Experiment]:
    if name is not None and name in EXPERIMENTS:
        return name, EXPERIMENTS[name]
    near = get_close_matches(name or "", EXPERIMENTS, n=3, cutoff=0.5)
    problem = "a name is missing" if name is None else f"there is no {name!r}"
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    raise typer.BadParameter(f"{problem}{meant} `crossbn reproduce --list` shows all", param_hint="NAME")


def _on(data: str, name: str, scale: Scale, seeds: int | None) -> list[Task]:
    """Return the runs of a table of detection on images of the user's choice."""
    if name not in coco.TABLES or scale is not Scale.SMALL:
        what = f"{', '.join(coco.TABLES)} at small scale"
        raise typer.BadParameter(
            f"{name} at {scale.value} scale has data of its own: it is for {what}", param_hint="--data"
        )
    if data != SHAPES:
        with mistakes_told():
            place = find_data(data)
        os.environ[FOLDER_VARIABLE], data = str(place.parent), place.name
    tasks = coco.TABLES[name].configs(scale, seeds)
    return [replace(task, settings={**task.settings, "data": data}) for task in tasks]


def _print_plan(experiment: Experiment, progress: runner.Progress) -> None:
    """Print a line for each cell: how many of its runs are to do, and about how long they take."""
    todo = {task.key for task in progress.todo}
    cells: dict[str, list[Task]] = {}
    for task in sorted(progress.tasks, key=lambda task: task.key not in todo):  # what is to do comes first
        cells.setdefault(task.name, []).append(task)
    seconds = progress.seconds(experiment.estimate_seconds)
    first = progress.tasks[0].settings
    shared = [name for name in first if all(task.settings.get(name) == first[name] for task in progress.tasks)]
    rows = []
    for name, tasks in list(cells.items())[:_MOST_ROWS]:
        missing = sum(task.key in todo for task in tasks)
        own = {key: value for key, value in tasks[0].settings.items() if key not in shared}
        about = in_words(missing * seconds[tasks[0].cell]) if missing else "done"
        rows.append((name, f"{missing} of {len(tasks)}", about, _describe(own)))
    room = Console().width - sum(max(map(len, column)) for column in list(zip(*rows, strict=True))[:3]) - _FRAME
    most = 4 if room >= _LEAST_SETTINGS else 3  # columns: a name says what differs, too
    fitting = tuple((*told, _cut(own, room))[:most] for *told, own in rows)
    print_tables([Table(experiment.title, ("run", "to do", "about", "settings")[:most], fitting)], justify="left")
    if len(cells) > _MOST_ROWS:
        typer.echo(f"And {len(cells) - _MOST_ROWS} more like these.")
    if shared:
        typer.echo(f"All runs: {_describe({name: first[name] for name in shared})}.")
    processes = runner.processes_of(experiment)
    each = [seconds[task.cell] for task in progress.todo]
    total = in_words(max(sum(each) / processes, *each, 0.0))
    beside = f", {processes} at once" if processes > 1 else ""
    typer.echo(f"{len(todo)} of {len(progress.tasks)} runs to do{beside}: about {total} on this machine.")


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(room - 1, 0)]}…"


def _describe(settings: Mapping[str, Any]) -> str:
    """Return settings as people write them, without those that are not set; options stand by themselves."""
    told = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            # An option that is there was chosen: of `positions`, the only one that may be None, that is all of them.
            told.append(_describe({option: "all" if each is None else each for option, each in value.items()}))
        elif value is not None:
            told.append(f"{_WORDS.get(name, name.replace('_', ' '))} {in_text(value)}")
    return ", ".join(filter(None, told))


def _missing(tasks: Sequence[Task], records: Sequence[Record]) -> list[str]:
    missing = list(dict.fromkeys(task.name for task in tasks if task.name not in by_name(records)))
    more = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
    return [f"Not finished: {'; '.join(missing[:3])}{more} still to be run."] if missing else []


def _write(
    name: str, scale: Scale, folder: Path, records: Sequence[Record], notes: Sequence[str], *, anew: bool
) -> Table:
    """Return the table, after writing it and its picture: anew, or if the file says something else."""
    experiment, path = EXPERIMENTS[name], folder / f"{name}-{scale.value}.md"
    title = f"{experiment.title} ({scale.value} scale)"
    table = comparison_table(title, experiment.measures, experiment.rows(records))
    pictures = {path.with_suffix(".png").name: lambda: FIGURES[name](records)} if name in FIGURES else {}
    shown = [f"![{title}]({picture})" for picture in pictures]
    write_markdown(path, [table, *shown, *notes], pictures, anew)
    return table

"""`crossbn reproduce`: one table or figure of the paper, next to the paper's numbers where they are known."""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from crossbn.cli.extras import require
from crossbn.cli.printing import fail, print_tables
from crossbn.lab.data import FOLDER_VARIABLE
from crossbn.lab.experiments import runner
from crossbn.lab.experiments.estimates import in_words
from crossbn.lab.experiments.experiment import Experiment, Scale, UnavailableError
from crossbn.lab.experiments.registry import EXPERIMENTS, scales_of
from crossbn.lab.experiments.tasks import Result, Task
from crossbn.lab.experiments.workers import WorkerError
from crossbn.lab.records import RecordError
from crossbn.lab.report.comparison import comparison_table, surroundings
from crossbn.lab.report.context import in_text
from crossbn.lab.report.table import Table

_COLUMNS = 7  # that fit a terminal
_WORDS = {"looks": "measurements", "probes": "random projections"}  # in place of a setting's name


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Of the table or figure; --list shows all.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Show the names and what they stand for.")] = False,
    scale: Annotated[Scale, typer.Option(help="What two cores can do, or what the paper did.")] = Scale.SMALL,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs and about how long each takes.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Of each run.", show_default="as the table needs")] = None,
    output: Annotated[
        Path, typer.Option("--output", "--out", file_okay=False, help="Directory of the results.")
    ] = Path("reproduce-results"),
    data: Annotated[
        Path | None, typer.Option(help="Directory of the data sets.", envvar=FOLDER_VARIABLE, show_default="data")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what earlier calls have of these runs.")] = False,
) -> None:
    """Reproduce a table or figure of the paper, next to the paper's numbers where we know them.

    Writes NAME-SCALE.jsonl with a line for each run, NAME-SCALE.md with the table and, for some, NAME-SCALE.png. Runs
    that the first has already are not repeated, so a call that was interrupted goes on where it stopped. Tables of
    trained classifiers share their runs: these are in classification-SCALE.jsonl.
    """
    if list_all:
        titles = tuple((key, each.TITLE) for key, each in EXPERIMENTS.items())
        print_tables([Table("", ("name", "what it is"), titles)], _COLUMNS, "left", no_wrap=True)
        return
    if name not in EXPERIMENTS:
        problem = "a name is missing" if name is None else f"there is no {name!r}"
        raise typer.BadParameter(f"{problem}; there is {', '.join(EXPERIMENTS)}", param_hint="NAME")
    if scale not in scales_of(name):
        scales = " or ".join(each.value for each in scales_of(name))
        raise typer.BadParameter(f"{name} has no {scale.value} scale, but {scales}", param_hint="--scale")
    require("matplotlib", "sklearn")
    require("torchvision", extra="vision")
    if data is not None:
        os.environ[FOLDER_VARIABLE] = str(data)  # the runs are processes of their own
    experiment = EXPERIMENTS[name]
    tasks = experiment.configs(scale, seeds)
    path = output / f"{tasks[0].experiment}-{scale.value}.jsonl"
    with _mistakes_told():
        begin = runner.Progress.anew if fresh and not dry_run else runner.Progress.read
        progress = begin(tasks, path)
        if dry_run:
            _print_plan(experiment, progress)
            return
        _carry_on(experiment, progress)
        table = _write(name, experiment, scale, progress)
    print_tables([table], _COLUMNS, no_wrap=True)
    for note in [*experiment.notes(scale), surroundings(progress.results)]:
        typer.echo(f"\n{note}")


def _print_plan(experiment: Experiment, progress: runner.Progress) -> None:
    todo = {task.key for task in progress.todo}
    seconds = {task.key: experiment.estimate_seconds(task) for task in progress.tasks}
    first = progress.tasks[0].settings
    shared = [name for name in first if all(task.settings.get(name) == first[name] for task in progress.tasks)]
    rows = [
        (
            f"{task.name}, seed {task.seed}",
            _describe({name: value for name, value in task.settings.items() if name not in shared}),
            in_words(seconds[task.key]) if task.key in todo else "done",
        )
        for task in progress.tasks
    ]
    print_tables([Table(experiment.TITLE, ("run", "settings", "about"), tuple(rows))], _COLUMNS, "left", no_wrap=True)
    if shared:
        typer.echo(f"All runs: {_describe({name: first[name] for name in shared})}.")
    processes = runner.processes_of(experiment)
    missing = [seconds[key] for key in todo]
    total = in_words(max(sum(missing) / processes, *missing, 0.0))
    beside = f", {processes} at once" if processes > 1 else ""
    typer.echo(f"{len(todo)} of {len(progress.tasks)} runs to do{beside}: about {total} on this machine.")


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


def _carry_on(experiment: Experiment, progress: runner.Progress) -> None:
    if progress.found:
        done = f"{len(progress.found)} of {len(progress.tasks)} runs are in {progress.path} already."
        typer.echo(done, err=True)
    if not progress.todo:
        return
    experiment.check(progress.todo)  # before anything is shown or written
    progress.path.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        whole = shown.add_task("all runs", total=float(len(progress.todo)))
        bars: dict[str, TaskID] = {}  # of the runs under way
        with closing(runner.carry_on(experiment, progress)) as events:
            for task, news in events:
                if isinstance(news, Result):
                    shown.console.print(f"{_label(task)}: done in {in_words(news.seconds)}")
                    shown.advance(whole)
                    if task.key in bars:
                        shown.remove_task(bars.pop(task.key))
                    continue
                if task.key not in bars:
                    bars[task.key] = shown.add_task(_label(task), total=1.0)
                told = f"{_label(task)}: {news.phrase}"
                shown.update(bars[task.key], completed=news.share, description=told)


def _label(task: Task) -> str:
    return f"{task.name}, seed {task.seed}"


def _write(name: str, experiment: Experiment, scale: Scale, progress: runner.Progress) -> Table:
    from crossbn.lab.report.experiment_figures import FIGURES  # matplotlib is slow to import
    from crossbn.lab.report.figure import save_png

    results, written = progress.results, progress.path.with_name(f"{name}-{scale.value}.jsonl")
    title = f"{experiment.TITLE} ({scale.value} scale)"
    table = comparison_table(title, experiment.MEASURES, experiment.rows(results))
    parts = [table.markdown(), *experiment.notes(scale), surroundings(results)]
    if name in FIGURES:
        picture = written.with_suffix(".png")
        save_png(FIGURES[name](results), picture)
        parts.insert(1, f"![{title}]({picture.name})")
    written.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return table


@contextmanager
def _mistakes_told() -> Iterator[None]:
    """End the command with a sentence for what is not the program's fault."""
    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted; the same command again does the runs that are missing")
    except OSError as error:
        fail(f"{error.strerror}: {error.filename}")
    except RecordError as error:
        fail(f"{error}; --fresh starts anew")
    except (UnavailableError, WorkerError) as error:
        fail(str(error))

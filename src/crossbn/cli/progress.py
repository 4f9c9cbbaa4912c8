"""Bars that show how far runs are."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from crossbn.lab.experiments.records import Point, Record, Run


def follow(events: Iterable[tuple[Run, Point | Record]], runs: Sequence[Run]) -> Iterator[Record]:
    """Show a bar for each name among `runs`, moved by the points among `events`; yield the records among them."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {name: progress.add_task(name, total=total) for name, total in _epochs(runs).items()}
        reached: dict[str, dict[int, float]] = {name: {} for name in bars}
        for run, news in events:
            if isinstance(news, Record):
                progress.console.print(f"{run.name}, seed {run.seed}: {news.accuracy:.1%} in {news.seconds:.0f} s")
                yield news
            else:
                reached[run.name][run.seed] = news.epoch
                progress.update(bars[run.name], completed=sum(reached[run.name].values()))


def _epochs(runs: Sequence[Run]) -> dict[str, float]:
    total: dict[str, float] = {}
    for run in runs:
        total[run.name] = total.get(run.name, 0.0) + run.settings["epochs"]
    return total

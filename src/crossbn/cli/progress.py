"""Bars that show how far runs are."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from crossbn.experiments.records import Point, Record, Run


def follow(events: Iterable[tuple[Run, Point | Record]], runs: Sequence[Run]) -> Iterator[Record]:
    """Show a bar for each name among `runs`, moved by the points among `events`; yield the records among them."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {name: progress.add_task(name, total=0.0) for name in dict.fromkeys(run.name for run in runs)}
        for run in runs:
            bar = progress.tasks[bars[run.name]]
            progress.update(bar.id, total=(bar.total or 0.0) + run.settings["epochs"])
        reached: dict[tuple[str, int], float] = {}
        for run, news in events:
            if isinstance(news, Record):
                progress.console.print(f"{run.name}, seed {run.seed}: {news.accuracy:.1%} in {news.seconds:.0f} s")
                yield news
            else:
                key = (run.name, run.seed)
                progress.advance(bars[run.name], news.epoch - reached.get(key, 0.0))
                reached[key] = news.epoch

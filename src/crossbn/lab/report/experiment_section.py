"""Results of `crossbn reproduce` as sections of a page."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.experiments.registry import EXPERIMENTS, scales_of
from crossbn.lab.experiments.tasks import Result, by_name
from crossbn.lab.report.comparison import comparison_table
from crossbn.lab.report.context import origin, surroundings
from crossbn.lab.report.experiment_figures import FIGURES
from crossbn.lab.report.page import Section
from crossbn.lab.report.reading import REPRODUCE, Problem, Source
from crossbn.lab.report.sections import attempt
from crossbn.lab.report.settings import common, settings_table


class Share(NamedTuple):
    """What a file has for a table.

    Attributes:
        experiment: the table's name.
        scale: None if it is not known.
        results: in the order of the table's runs.
        missing: names of the runs that the file has no result of.
        foreign: whether these are runs that the experiment would not ask for today.
    """

    experiment: str
    scale: Scale | None
    results: list[Result]
    missing: list[str]
    foreign: bool = False

    @property
    def keys(self) -> set[str]:
        """The results' tasks."""
        return {result.task.key for result in self.results}


def experiment_sections(source: Source) -> Iterator[Section | Problem]:
    """Yield a section for each table or figure that the results of a file make.

    Tables may share runs, so that those of one are a part of several others: an incomplete table is shown if it has a
    result that no complete one has.
    """
    latest = {result.task.key: result for result in source.records[REPRODUCE]}
    shares = [share for name in EXPERIMENTS for share in _shares(name, latest, source.path)]
    explained = {key for share in shares if not share.missing for key in share.keys}
    for share in shares:
        if not share.missing or share.keys - explained:
            yield attempt(partial(_section, share, source), source.name)
    unused = latest.keys() - {key for share in shares for key in share.keys}
    for name in dict.fromkeys(result.task.experiment for key, result in latest.items() if key in unused):
        yield Problem(f"{source.name} has results of {name!r}, of which this version of crossbn has no table.")


def _shares(name: str, latest: dict[str, Result], path: Path) -> Iterator[Share]:
    """Yield what a table can have: the runs that it would ask for at each scale, then others that name it."""
    rest = {key: result for key, result in latest.items() if result.task.experiment == name}
    seeds = 1 + max(result.task.seed for result in latest.values())
    for scale in scales_of(name):
        asked = {task.key: task for task in EXPERIMENTS[name].configs(scale, seeds)}
        found = [latest[key] for key in asked if key in latest]
        rest = {key: result for key, result in rest.items() if key not in asked}
        if found:
            missing = dict.fromkeys(task.name for task in asked.values() if task.name not in by_name(found))
            yield Share(name, scale, found, list(missing))
    if rest:
        told = path.stem.rpartition("-")[2]
        scales = {scale.value: scale for scale in Scale}
        yield Share(name, scales.get(told), list(rest.values()), [], foreign=True)


def _section(share: Share, source: Source) -> Section:
    experiment, results, scale = EXPERIMENTS[share.experiment], share.results, share.scale
    groups = by_name(results)
    seeds = _seeds([len(group) for group in groups.values()])
    differing = settings_table({label: group[0].task.settings for label, group in groups.items()})
    figures = [FIGURES[share.experiment](results)] if share.experiment in FIGURES else []
    return Section(
        title=experiment.TITLE if scale is None else f"{experiment.TITLE} ({scale.value} scale)",
        findings=[f"Not finished: {'; '.join(share.missing)} still to be run."] if share.missing else [],
        tables=[comparison_table(seeds, experiment.MEASURES, experiment.rows(results))],
        figures=figures,
        notes=_notes(share),
        settings={
            **common([result.task.settings for result in results]),
            **surroundings(results),
            **origin(source.name, len(results), sum(result.seconds for result in results)),
        },
        setting_tables=[] if differing is None else [differing],
        command=_command(share, source.path.parent),
    )


def _notes(share: Share) -> list[str]:
    notes = [] if share.scale is None else EXPERIMENTS[share.experiment].notes(share.scale)
    if share.foreign:
        notes.append("These runs have other settings than this version of crossbn would choose on this machine.")
    return notes


def _command(share: Share, folder: Path) -> list[str]:
    scale = [] if share.scale is None else ["--scale", share.scale.value]
    return ["crossbn", "reproduce", share.experiment, *scale, "--out", str(folder)]


def _seeds(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    if high == 1:
        return "One run each (n = 1)"
    return f"Mean ± standard deviation over seeds, n = {low if low == high else f'{low} to {high}'}"

"""Records of `crossbn reproduce` as sections of a page."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.experiments.registry import EXPERIMENTS
from crossbn.lab.records import Record, by_name, of_cells, on_their_data
from crossbn.lab.report.comparison import comparison_table
from crossbn.lab.report.context import common, describe_origin, settings_tables, span
from crossbn.lab.report.experiment_figures import FIGURES
from crossbn.lab.report.page import Section
from crossbn.lab.report.reading import Problem, Source


class Share(NamedTuple):
    """What a file has for a table.

    Attributes:
        experiment: the table's name.
        scale: None if it is not known.
        records: in the order of the table's runs, all seeds that there are.
        missing: names of the runs that the file has no record of.
        foreign: whether these are runs that the experiment would not ask for today.
    """

    experiment: str
    scale: Scale | None
    records: list[Record]
    missing: list[str]
    foreign: bool = False

    @property
    def keys(self) -> set[str]:
        """Of the records."""
        return {record.key for record in self.records}


def experiment_sections(source: Source) -> Iterator[Callable[[], Section] | Problem]:
    """Yield a section for each table or figure that the records of a file make.

    Tables may share runs, so that those of one are a part of several others: an incomplete table is shown if it has a
    record that no complete one has.
    """
    latest = source.latest
    shares = [share for name in EXPERIMENTS for share in _shares(name, latest, source.name)]
    explained = {key for share in shares if not share.missing for key in share.keys}
    for share in shares:
        if not share.missing or share.keys - explained:
            yield partial(_section, share, source)
    used = {key for share in shares for key in share.keys}
    for kind in dict.fromkeys(record.kind for record in latest if record.key not in used):
        yield Problem(f"{source.name} has results of {kind!r}, of which this version of crossbn has no table.")


def _shares(name: str, latest: Sequence[Record], file: str) -> Iterator[Share]:
    """Yield what a table can have: the runs that it would ask for at each scale, then others that name it."""
    experiment = EXPERIMENTS[name]
    rest = {record.key: record for record in latest if record.kind == name}
    for scale in experiment.scales:
        asked = on_their_data(experiment.configs(scale), latest)
        found = of_cells(latest, asked)
        rest = {key: record for key, record in rest.items() if record not in found}
        if found:
            missing = dict.fromkeys(task.name for task in asked if task.name not in by_name(found))
            yield Share(name, scale, found, list(missing))
    if rest:
        told = Path(file).stem.rpartition("-")[2]
        scales = {scale.value: scale for scale in Scale}
        yield Share(name, scales.get(told), list(rest.values()), [], foreign=True)


def _section(share: Share, source: Source) -> Section:
    experiment, records, scale = EXPERIMENTS[share.experiment], share.records, share.scale
    groups = by_name(records)
    notes = [] if scale is None else experiment.notes(scale)
    if share.foreign:
        notes.append("These runs have other settings than this version of crossbn would choose on this machine.")
    told = [] if scale is None else ["--scale", scale.value]
    return Section(
        title=experiment.title if scale is None else f"{experiment.title} ({scale.value} scale)",
        findings=list(unfinished(share.missing)),
        tables=[comparison_table(_say_seeds(groups.values()), experiment.measures, experiment.rows(records))],
        figures=[FIGURES[share.experiment](records)] if share.experiment in FIGURES else [],
        notes=notes,
        settings={**common([record.settings for record in records]), **describe_origin(records, source.name)},
        setting_tables=settings_tables({label: group[0].settings for label, group in groups.items()}),
        command=["crossbn", "reproduce", share.experiment, *told, "--output", source.folder],
        rank=2 * list(EXPERIMENTS).index(share.experiment) + bool(share.missing),  # unfinished ones behind finished
    )


def unfinished(missing: Sequence[str]) -> Iterator[str]:
    """Yield a sentence if runs are missing."""
    if missing:
        more = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
        yield f"Not finished: {'; '.join(missing[:3])}{more} still to be run."


def _say_seeds(groups: Iterable[Sequence[Record]]) -> str:
    counts = span(map(len, groups))
    return "One run each (n = 1)" if counts == "1" else f"Mean ± standard deviation over seeds, n = {counts}"

"""Records of `crossbn diagnose` as a section of a page."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from crossbn.lab.fidelity.recommendation import verdict
from crossbn.lab.fidelity.records import (
    SAME_LAYER,
    WHOLE_NETWORK,
    Averages,
    CauseRecord,
    FidelityRecord,
    average_causes,
    by_age,
    by_layer,
    by_progress,
)
from crossbn.lab.records import Record
from crossbn.lab.report.context import describe_origin, headline, in_text
from crossbn.lab.report.fidelity_table import cause_table, explanation, fidelity_tables
from crossbn.lab.report.figure import COLOURS, GREY, LINES, add_legend, begin, tidy
from crossbn.lab.report.page import Section
from crossbn.lab.report.reading import Problem, Source

_OWN = ("step", "layer", "age", "truth")  # of a record; all else that it was told it shares with the others
_ERRORS = {"naive": (COLOURS[0], "naive_var_error"), "compensated": (COLOURS[1], "compensated_var_error")}
_FLOOR = 1e-4  # of the logarithmic axis: a hundredth of a percent


def fidelity_sections(source: Source) -> Iterator[Callable[[], Section] | Problem]:
    """Yield a section for each run of a file."""
    runs: dict[str, list[Record]] = {}
    for record in source.records:
        runs.setdefault(in_text({**_told(record), "seed": record.seed}), []).append(record)
    told = [{**_told(records[0]), "seed": records[0].seed} for records in runs.values()]
    for own, records in zip(told, runs.values(), strict=True):
        differs = {name: value for name, value in own.items() if any(value != other.get(name) for other in told)}
        found, problems = source._replace(records=records).parse(FidelityRecord.of)
        yield from problems
        if found:
            yield partial(_section, [each for one in found for each in one], source._replace(records=records), differs)


def _told(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.settings.items() if name not in _OWN}


def _section(records: Sequence[FidelityRecord], source: Source, differs: Mapping[str, Any]) -> Section:
    told = _told(source.records[0]) or _context(source.path)
    which = f": {in_text(differs).replace('_', ' ')}" if differs else ""
    model = f" of {told['model']}" if "model" in told else ""
    window = int(told.get("window", 1 + max(record.age for record in records)))
    burn_in = int(told.get("burn_in", told.get("burn-in", 0)))
    causes = [cause for record in source.records for cause in CauseRecord.of(record)]
    return Section(
        title=f"How close remembered statistics{model} are to the true ones{which}",
        findings=[verdict(records, causes, window, burn_in)],
        tables=[*fidelity_tables(records), *([cause_table(average_causes(causes))] if causes else [])],
        figures=[plot_fidelity(records)],
        notes=[explanation()],
        settings={
            "Measurements": f"{len({record.step for record in records})}, each of all layers and ages",
            **{headline(name): text for name, value in told.items() if (text := in_text(value))},
            **describe_origin(source.records, source.name),
        },
    )


def _context(path: Path) -> Mapping[str, str]:
    """Return what the command was told and ran on: earlier versions wrote that beside the records."""
    beside = path.with_name("context.json")
    return json.loads(beside.read_bytes()) if beside.is_file() else {}


def plot_fidelity(records: Sequence[FidelityRecord]) -> Figure:
    """Return the errors of naive and compensated variances, by age, by layer and during training."""
    title = "How far remembered variances are from the true ones at today's weights"
    figure, panels = begin(title, 3, width=10.8, height=4.0)
    layers = dict(enumerate(by_layer(records).values(), start=1))
    _draw_panel(panels[0], "Age of the statistics, steps", by_age(records))
    _draw_panel(panels[1], "Layer, in the order of the network", layers)
    _draw_panel(panels[2], "Training step", by_progress(records))
    panels[0].set_yscale("log")
    panels[0].set_ylim(bottom=max(_FLOOR, panels[0].get_ylim()[0]))
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    panels[0].set_ylabel("Error of the variance")
    add_legend(figure, 3)
    return figure


def _draw_panel(axes: Axes, label: str, found: Mapping[int, Averages]) -> None:
    for truth, line in zip((WHOLE_NETWORK, SAME_LAYER), LINES, strict=False):
        shown = {place: each[truth] for place, each in found.items() if truth in each}
        for name, (colour, error) in _ERRORS.items() if shown else ():
            drawn = [max(getattr(each, error), _FLOOR) for each in shown.values()]
            axes.plot(
                list(shown), drawn, color=colour, linestyle=line, marker="o", markersize=3, label=f"{name}, {truth}"
            )
    whole = {place: each[WHOLE_NETWORK].batch_noise for place, each in found.items() if WHOLE_NETWORK in each}
    noise = {place: each for place, each in whole.items() if each is not None}
    if noise:
        axes.plot(
            list(noise), list(noise.values()), color=GREY, linestyle=":", label="single batches from their average"
        )
    tidy(axes, label, found)

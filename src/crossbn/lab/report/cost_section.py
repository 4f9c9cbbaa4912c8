"""Records of `crossbn cost` as a section of a page."""

from collections.abc import Callable, Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from crossbn.lab.cost.cases import BASELINE, Case, Growth
from crossbn.lab.cost.records import CostRecord, find_baseline
from crossbn.lab.cost.suites import SUITES, Goal, make_suite
from crossbn.lab.report.context import describe_origin, headline
from crossbn.lab.report.cost_table import case_table, explanation, ratio, rounds, suite_table
from crossbn.lab.report.figure import GREY, LINES, add_legend, begin, choose_styles, tidy
from crossbn.lab.report.page import Section
from crossbn.lab.report.reading import Problem, Source
from crossbn.lab.report.table import Table
from crossbn.schedules import window_for

_LABELS = {"window": "Window, steps", "batch size": "Batch size", "image size": "Image size, pixels"}


def cost_sections(source: Source) -> Iterator[Callable[[], Section] | Problem]:
    """Yield the section of a file, and what it lacks."""
    records, problems = source.parse(CostRecord.of)
    yield from problems
    latest = {(record.case, record.norm, record.compiled): record for record in records}
    whole = [r for (case, _, compiled), r in latest.items() if (case, BASELINE, compiled) in latest]
    if len(whole) < len(latest):
        missing = dict.fromkeys(str(record.case) for record in latest.values() if record not in whole)
        yield Problem(f"{source.name} lacks BN's record to compare with: {'; '.join(missing)}.")
    if whole:
        yield lambda: _section(whole, source)


def _section(records: Sequence[CostRecord], source: Source) -> Section:
    cases = list(dict.fromkeys(record.case for record in records))
    tables = [case_table([record for record in records if record.case == case]) for case in cases]
    if len(cases) > 1:
        tables = [*_overview(cases, records), *tables]
    facts = {
        "norms": {", ".join(case.norms) for case in cases},
        "positions": {"all" if case.positions is None else f"{case.positions}" for case in cases},
        "device": {case.device for case in cases},
        "threads": {f"{case.threads}" for case in cases},
    }
    return Section(
        title="Costs: time, memory and FLOPs" + (f" of {cases[0]}" if len(cases) == 1 else ""),
        findings=list(_findings(records)),
        tables=tables,
        figures=list(_figures(cases, records)),
        notes=[explanation()],
        settings={
            **{headline(name): "; ".join(sorted(values)) for name, values in facts.items()},
            "Repetitions": rounds(records),
            **describe_origin(source.records, source.name),
        },
    )


def _findings(records: Sequence[CostRecord]) -> Iterator[str]:
    """Say what a training step takes with CBN, or with another norm where there is none, relative to BN."""
    norms = sorted({record.norm for record in records} - {BASELINE}, key=lambda norm: norm != "cbn")
    shown = [record for record in records if norms and record.norm == norms[0]]
    eager = [record for record in shown if not record.compiled] or shown
    if not eager:
        return
    name, timings = norms[0].upper().replace("_", " "), [record.timings["train"] for record in eager]
    peaks = [f"{record.peak_bytes / find_baseline(record, records).peak_bytes:.2f}" for record in eager]
    memory = f"{min(peaks)} to {max(peaks)}" if min(peaks) < max(peaks) else peaks[0]
    if len(eager) == 1:
        yield f"A training step with {name} takes {ratio(timings[0])} times BN's time and {memory} times its memory."
        return
    low, high = (choose(timings, key=lambda timing: timing.ratio) for choose in (min, max))
    cases = [eager[timings.index(each)].case for each in (low, high)]
    yield (
        f"In {len(eager)} cases a training step with {name} takes {low.ratio:.2f} ({cases[0]}) to {high.ratio:.2f} "
        f"({cases[1]}) times BN's time and {memory} times its memory."
    )


def _overview(cases: Sequence[Case], records: Sequence[CostRecord]) -> Iterator[Table]:
    """Yield CBN relative to BN in all cases, targets in brackets where there are some."""
    targets = {_sizes(goal.case): goal.targets for suite in SUITES for goal in make_suite(suite)}
    goals = [Goal(case, targets.get(_sizes(case), {})) for case in cases]
    table = suite_table(goals, records)
    if not any(goal.targets for goal in goals):
        table = table._replace(columns=("CBN / BN", *table.columns[1:]))
    if table.rows:
        yield table


def _sizes(case: Case) -> tuple[object, ...]:
    return case.model, case.input_shape, case.batch_size, case.window, case.positions


def _figures(cases: Sequence[Case], records: Sequence[CostRecord]) -> Iterator[Figure]:
    for model in dict.fromkeys(case.model for case in cases):
        growth = _growth([case for case in cases if case.model == model])
        shown = {case for found in growth.values() for case in found}
        if growth:
            yield plot_growth(growth, [record for record in records if record.case in shown])


def _growth(cases: Sequence[Case]) -> Growth:
    """Return the cases that differ from the first in one size, by that size; a sweep measures it first."""
    base = cases[0]
    alike = [case for case in cases if _others(case) == _others(base)]
    follows = any(case.window != base.window for case in alike if case.batch_size != base.batch_size)
    found = {
        "window": [c for c in alike if (c.batch_size, c.input_shape) == (base.batch_size, base.input_shape)],
        "batch size": [
            c
            for c in alike
            if c.input_shape == base.input_shape and c.window == (window_for(c.batch_size) if follows else base.window)
        ],
        "image size": [c for c in alike if (c.batch_size, c.window) == (base.batch_size, base.window)],
    }
    return {size: chosen for size, chosen in found.items() if len(chosen) > 1 and base in chosen}


def _others(case: Case) -> tuple[object, ...]:
    return case.norms, case.positions, case.compile, case.device, case.threads, case.precision


def plot_growth(growth: Growth, records: Sequence[CostRecord]) -> Figure:
    """Return the time of a training step relative to BN, a panel for each size that grows.

    Args:
        growth: the cases, by the size that they differ in.
        records: of these cases.
    """
    title = "Time of a training step, band: 95 % interval"
    figure, panels = begin(title, len(growth), width=1.2 + 3.2 * len(growth), height=3.6)
    for axes, (size, cases) in zip(panels, growth.items(), strict=True):
        _draw_panel(axes, size, cases, records)
    panels[0].set_ylabel("Relative to BN")
    add_legend(figure, 1 + 2 * len(growth))
    return figure


def _draw_panel(axes: Axes, size: str, cases: Sequence[Case], records: Sequence[CostRecord]) -> None:
    axes.axhline(1, color=GREY, linewidth=1, label="BN")
    ordered = sorted(cases, key=lambda case: _value(case, size))
    values = [_value(case, size) for case in ordered]
    kinds = list(dict.fromkeys((r.norm, r.compiled) for r in records if r.norm != BASELINE))
    for (norm, compiled), style in zip(kinds, choose_styles([norm for norm, _ in kinds]), strict=True):
        found = {r.case: r for r in records if (r.norm, r.compiled) == (norm, compiled)}
        timings = [found[case].timings["train"] for case in ordered]
        drawn = {**style, "linestyle": LINES[int(compiled)], "markersize": 4}
        axes.plot(values, [timing.ratio for timing in timings], **drawn, label=found[ordered[0]].name)
        low, high = [timing.ratio_low for timing in timings], [timing.ratio_high for timing in timings]
        axes.fill_between(values, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_title(_constants(size, ordered), fontsize=8, loc="left", color="#555555")
    tidy(axes, _LABELS[size], values, log=True)


def _constants(size: str, cases: Sequence[Case]) -> str:
    """Say what stays the same."""
    first = cases[0]
    parts = {
        "window": f"window {first.window}" if len({case.window for case in cases}) == 1 else "the paper's window",
        "batch size": f"batch {first.batch_size}",
        "image size": f"{first.input_shape[-1]} px",
    }
    return ", ".join([first.model, *(part for name, part in parts.items() if name != size)])


def _value(case: Case, size: str) -> int:
    values = {"window": case.window, "batch size": case.batch_size, "image size": case.input_shape[-1]}
    return values[size]

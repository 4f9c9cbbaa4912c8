"""Records of `crossbn cost` as a section of a page."""

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure

from crossbn.lab.cost.cases import BASELINE, Case
from crossbn.lab.cost.records import CostRecord
from crossbn.lab.cost.suites import SUITES, Goal, Ratios, make_suite
from crossbn.lab.cost.sweep import Growth
from crossbn.lab.report.context import headline, origin, surroundings
from crossbn.lab.report.cost_figure import plot_growth
from crossbn.lab.report.cost_table import case_table, explanation, rounds, suite_table
from crossbn.lab.report.page import Section
from crossbn.lab.report.reading import COST, Problem, Source
from crossbn.lab.report.sections import attempt
from crossbn.lab.report.table import Table
from crossbn.schedules import window_for


def cost_sections(source: Source) -> Iterator[Section | Problem]:
    """Yield the section of a file, and what it lacks."""
    latest = {(record.case, record.norm, record.compiled): record for record in source.records[COST]}
    whole = [r for (case, _, compiled), r in latest.items() if (case, BASELINE, compiled) in latest]
    if len(whole) < len(latest):
        missing = dict.fromkeys(str(record.case) for record in latest.values() if record not in whole)
        yield Problem(f"{source.name} lacks BN's record to compare with: {'; '.join(missing)}.")
    if whole:
        yield attempt(lambda: _section(whole, source.name), source.name)


def _section(records: Sequence[CostRecord], source: str) -> Section:
    cases = list(dict.fromkeys(record.case for record in records))
    tables = [case_table([record for record in records if record.case == case]) for case in cases]
    if len(cases) > 1:
        tables = [*_overview(cases, records), *tables]
    return Section(
        title="Costs: time, memory and FLOPs" + (f" of {cases[0]}" if len(cases) == 1 else ""),
        tables=tables,
        figures=list(_figures(cases, records)),
        notes=[explanation()],
        settings={**_settings(cases, records), **surroundings(records), **origin(source, len(records))},
    )


def _overview(cases: Sequence[Case], records: Sequence[CostRecord]) -> Iterator[Table]:
    """Yield CBN relative to BN in all cases, targets in brackets where there are some."""
    targets = {_sizes(goal.case): goal.target for suite in SUITES for goal in make_suite(suite)}
    goals = [Goal(case, targets.get(_sizes(case), Ratios())) for case in cases]
    table = suite_table(goals, records)
    if not any(goal.target != Ratios() for goal in goals):
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


def _settings(cases: Sequence[Case], records: Sequence[CostRecord]) -> dict[str, str]:
    facts = {
        "norms": {", ".join(case.norms) for case in cases},
        "positions": {"all" if case.positions is None else f"{case.positions}" for case in cases},
        "device": {case.device for case in cases},
        "threads": {f"{case.threads}" for case in cases},
    }
    told = {headline(name): "; ".join(sorted(values)) for name, values in facts.items()}
    return {**told, "Repetitions": rounds(records)}

"""Costs as text, for the terminal and for Markdown alike."""

from collections.abc import Callable, Iterable, Sequence

from crossbn.lab.cost.cases import BASELINE
from crossbn.lab.cost.records import CostRecord, find_baseline
from crossbn.lab.cost.suites import Goal, Ratios
from crossbn.lab.cost.timing import Timing
from crossbn.lab.report.context import span
from crossbn.lab.report.table import Table

_TIMES = {
    "train": "training step",
    "burn_in": "burn-in step",
    "eval": "inference",
    "folded": "folded inference",
}


def case_table(records: Sequence[CostRecord]) -> Table:
    """Return the table of a case: a column for each of its records, a row for each measure."""
    rows: list[tuple[str, ...]] = []
    for measure, label in _TIMES.items():
        timings = [record.timings.get(measure) for record in records]
        if any(timings):
            rows.append((f"{label}, ms", *(_milliseconds(timing) for timing in timings)))
            rows.append(("… relative to BN", *(_or_1(record, measure) for record in records)))
    numbers: dict[str, Callable[[CostRecord], str]] = {
        "peak memory, MB": lambda r: _millions(r.peak_bytes),
        "… relative to BN": lambda r: f"{r.peak_bytes / find_baseline(r, records).peak_bytes:.3f}",
        "of it history, MB": lambda r: _millions(r.history_bytes),
        "network forward, MFLOP": lambda r: _millions(r.network_flops.forward),
        "norms forward, MFLOP": lambda r: _millions(r.norm_flops.forward),
        "network backward, MFLOP": lambda r: _millions(r.network_flops.backward),
        "norms backward, MFLOP": lambda r: _millions(r.norm_flops.backward),
    }
    rows += [(label, *(number(record) for record in records)) for label, number in numbers.items()]
    return Table(str(records[0].case), ("", *(record.name for record in records)), tuple(rows))


def suite_table(goals: Sequence[Goal], records: Sequence[CostRecord]) -> Table:
    """Return the table of a suite: a row for each case, CBN relative to BN, targets in brackets."""
    rows = []
    for goal in goals:
        for record in records:
            if record.case == goal.case and record.norm == "cbn":
                found = Ratios.of(record, find_baseline(record, records))
                label = f"{goal.case}{', compiled' if record.compiled else ''}"
                rows.append((label, *_ratio_cells(found, goal.target, record)))
    columns = ["CBN / BN (target)", "step", "burn-in", "inference", "folded", "history / weights", "peak memory"]
    if any(goal.target.folded_to_gn is not None for goal in goals):
        columns.append("folded / GN's inference")
    return Table("CBN relative to BN", tuple(columns), tuple(rows))


def _ratio_cells(found: Ratios, target: Ratios, record: CostRecord) -> Iterable[str]:
    for measure in _TIMES:
        yield ratio(record.timings.get(measure)) + _target(getattr(target, measure))
    for value, wanted in ((found.history, target.history), (found.peak, target.peak)):
        yield ("" if value is None else f"{value:.2f}") + _target(wanted)
    if target.folded_to_gn is not None:
        yield ratio(record.timings.get("folded_to_gn")) + _target(target.folded_to_gn)


def _target(value: float | None) -> str:
    return "" if value is None else f" ({value:.2f})"


def ratio(timing: Timing | None) -> str:
    """Return the ratio to the baseline and half its interval.

    Example:
        >>> ratio(Timing.of([1.0, 1.1, 1.1, 1.1, 1.1, 1.2], [1.0] * 6)), ratio(None)
        ('1.10 ± 0.10', '')
    """
    return "" if timing is None else f"{timing.ratio:.2f} ± {(timing.ratio_high - timing.ratio_low) / 2:.2f}"


def _or_1(record: CostRecord, measure: str) -> str:
    timing = record.timings.get(measure)
    return "1" if timing is not None and record.norm == BASELINE else ratio(timing)


def _milliseconds(timing: Timing | None) -> str:
    return "" if timing is None else _three_digits(1000 * timing.seconds)


def _millions(value: int) -> str:
    return _three_digits(value / 1e6)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def caption(records: Sequence[CostRecord]) -> str:
    """Say what the numbers are, and what they were measured with."""
    first = records[0]
    made = first.environment
    facts = {**made["versions"], **({"commit": made["commit"]} if made["commit"] else {}), **made["machine"]}
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"{explanation()} {rounds(records)}, threads {first.case.threads}, device {first.case.device}; {told}."


def explanation() -> str:
    """Say what the numbers are."""
    return (
        "Times are medians; a ratio is the median of the ratios round by round, ± half its 95 % interval. A step is "
        "forward, loss, backward and SGD with momentum, the window full; in burn-in it is not open yet. Folded: norms "
        "merged into the operators before them. Peak memory is that of a step, with weights, gradients, optimizer, "
        "history and input. FLOPs are of the whole batch, two for a multiply-add."
    )


def rounds(records: Sequence[CostRecord]) -> str:
    """Say how often was measured."""
    return f"{span(timing.rounds for record in records for timing in record.timings.values())} rounds"

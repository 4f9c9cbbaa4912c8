"""Costs as text, for the terminal and for Markdown alike."""

from collections.abc import Callable, Mapping, Sequence

from crossbn.lab.cost.cases import BASELINE
from crossbn.lab.cost.records import CostRecord, find_baseline
from crossbn.lab.cost.suites import Goal, ratios_of
from crossbn.lab.cost.timing import Timing
from crossbn.lab.report.context import span
from crossbn.lab.report.table import Table

_TIMES = {
    "train": "training step",
    "burn_in": "burn-in step",
    "eval": "inference",
    "folded": "folded inference",
}
_RATIOS = {
    **{"train": "step", "burn_in": "burn-in", "eval": "inference", "folded": "folded"},
    **{"history": "history / weights", "peak": "peak memory", "folded_to_gn": "folded / GN's inference"},
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
    names = [name for name in _RATIOS if name != "folded_to_gn" or any(name in goal.targets for goal in goals)]
    rows = []
    for goal in goals:
        for record in records:
            if record.case == goal.case and record.norm == "cbn":
                found = ratios_of(record, find_baseline(record, records))
                label = f"{goal.case}{', compiled' if record.compiled else ''}"
                rows.append((label, *(_ratio_cell(name, found, goal.targets, record) for name in names)))
    columns = ("CBN / BN (target)", *(_RATIOS[name] for name in names))
    return Table("CBN relative to BN", columns, tuple(rows))


def _ratio_cell(name: str, found: Mapping[str, float], targets: Mapping[str, float], record: CostRecord) -> str:
    shown = f"{found[name]:.2f}" if name in found else ""
    target = f" ({targets[name]:.2f})" if name in targets else ""
    return f"{ratio(record.timings[name]) if name in record.timings else shown}{target}"


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

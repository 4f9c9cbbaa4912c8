"""Our numbers with the paper's beside them, as text."""

from collections.abc import Iterable, Sequence

from crossbn.lab.experiments.experiment import Comparison, Measure
from crossbn.lab.records import Record, by_name
from crossbn.lab.report.context import distinct, span
from crossbn.lab.report.table import Table
from crossbn.lab.statistics import Spread

PAPER, REMARK = "paper", "difference"


def comparison_table(title: str, measures: Sequence[Measure], rows: Sequence[Comparison]) -> Table:
    """Return a column for each measure that a row has, followed by the paper's where it has a number; remarks last.

    Example:
        >>> row = Comparison("CBN", {"size": Spread(2.0, 0.5), "time": Spread(3.0, None)}, {"time": 4.0})
        >>> comparison_table("", [Measure("size", "size, cm"), Measure("time", "time, s", ".0f")], [row])[1:]
        (('', 'size, cm', 'time, s', 'paper'), (('CBN', '2.00 ± 0.50', '3', '4'),))
    """
    measures = [measure for measure in measures if any(measure.name in row.ours for row in rows) or not rows]
    known = {measure.name for measure in measures if any(measure.name in row.paper for row in rows)}
    columns = [""]
    for measure in measures:
        columns += [measure.label, PAPER] if measure.name in known else [measure.label]
    table = Table(title, tuple(columns), tuple(tuple(_cells(row, measures, known)) for row in rows))
    if not any(row.remark for row in rows):
        return table
    remarked = [(*cells, row.remark) for cells, row in zip(table.rows, rows, strict=True)]
    return Table(title, (*columns, REMARK), tuple(remarked))


def _cells(row: Comparison, measures: Sequence[Measure], known: set[str]) -> Iterable[str]:
    yield row.name
    for measure in measures:
        yield write_spread(row.ours.get(measure.name), measure.form)
        if measure.name in known:
            paper = row.paper.get(measure.name)
            yield "" if paper is None else format(paper, measure.form)


def write_spread(spread: Spread | None, form: str) -> str:
    """Return mean and, if there is one, standard deviation.

    Example:
        >>> write_spread(Spread(0.126, 0.004), ".2f"), write_spread(Spread(2.0, None), ".0f"), write_spread(None, "")
        ('0.13 ± 0.00', '2', '')
    """
    if spread is None:
        return ""
    mean = format(spread.mean, form)
    return mean if spread.sd is None else f"{mean} ± {format(spread.sd, form)}"


def surroundings(records: Sequence[Record]) -> str:
    """Say what the numbers were made with, and how often."""
    seeds = span(len(group) for group in by_name(records).values())
    counted = "1 seed" if seeds == "1" else f"{seeds} seeds, mean ± standard deviation"
    made = [record.environment for record in records]
    commits = dict.fromkeys(f"commit {each['commit']}" for each in made if each.get("commit"))
    facts = [counted, *distinct(each["versions"] for each in made), *commits]
    facts += distinct(each["machine"] for each in made)
    return f"{'; '.join(facts)}; {sum(record.values['seconds'] for record in records):.0f} s of computing in all."

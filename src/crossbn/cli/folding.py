"""Tables on a narrow terminal: cut in parts whose numbers keep their place, with long names folded."""

import re
from collections.abc import Iterator, Sequence

from crossbn.lab.report.comparison import PAPER
from crossbn.lab.report.table import Table

_NARROWEST = 12  # letters of a name on a line
_NAME = 16  # letters of a name on a line that numbers make room for
_FEWEST, _MOST = 20, 40  # letters of a line of words
_FRAME = 3  # letters of a column beside its content


def fit(table: Table, width: int, most: int) -> list[Table]:
    """Return the table in parts that a terminal has room for; words that no part has room for are one by themselves.

    Args:
        table: with names in its first column, which each part has.
        width: letters of the terminal.
        most: columns of a part beside the first.

    Example:
        >>> table = Table("", ("", "error", "time"), (("layer2.0.downsample.1", "1.000", "2.000"),))
        >>> [(part.columns, part.rows[0][0].split()) for part in fit(table, 24, 9)]
        [(('', 'error'), ['layer2.0.', 'downsample.1']), (('', 'time'), ['layer2.0.', 'downsample.1'])]
    """
    needs = [_need(table, i) + _FRAME for i in range(len(table.columns))]
    name = min(max([_NARROWEST, *(len(row[0]) for row in table.rows)]), _NAME)
    parts: list[list[int]] = []
    for unit in _units(table.columns):
        joined = [*(parts[-1] if parts else []), *unit]
        if parts and len(joined) <= most and name + _FRAME + 1 + sum(needs[i] for i in joined) <= width:
            parts[-1] = joined
        else:
            parts.append(unit)
    return [_take(table, part, needs, width) for part in parts]


def fold(name: str, width: int) -> str:
    """Return a name in lines of at most `width` letters, cut after blanks, or after dots and before brackets."""
    lines = [""]
    for piece in re.split(r"(?<= )" if " " in name else r"(?<=\.)|(?=\[)", name):
        for part in [piece[i : i + width] for i in range(0, len(piece), width)]:
            if len((lines[-1] + part).rstrip()) <= width:
                lines[-1] += part
            else:
                lines.append(part)
    return "\n".join(line.rstrip() for line in lines)


def _need(table: Table, column: int) -> int:
    """Return the letters of a column: numbers do not wrap, words do."""
    longest = max((len(row[column]) for row in table.rows), default=0)
    if column in table.word_columns:
        longest = min(longest, max(_FEWEST, min(_MOST, longest // 4)))
    return max([longest, *map(len, table.columns[column].split())])


def _units(columns: Sequence[str]) -> Iterator[list[int]]:
    """Yield the columns that stay together: the paper's numbers are beside ours."""
    starts = [i for i in range(1, len(columns)) if columns[i] != PAPER]
    for start, end in zip(starts, [*starts[1:], len(columns)], strict=True):
        yield list(range(start, end))


def _take(table: Table, part: Sequence[int], needs: Sequence[int], width: int) -> Table:
    """Return some columns behind the names, folded, without the rows that have nothing there."""
    rows = [(row[0], *(row[i] for i in part)) for row in table.rows if any(row[i] for i in part)]
    room = max(_NARROWEST, width - 1 - _FRAME - sum(needs[i] for i in part))
    heads = [table.columns[i] for i in (0, *part)]
    if 1 + sum(_FRAME + max(map(len, column)) for column in zip(heads, *rows, strict=True)) > width:
        heads[1:] = [fold(head, needs[i] - _FRAME) for head, i in zip(heads[1:], part, strict=True)]
    return Table(table.title, tuple(heads), tuple((fold(name, room), *cells) for name, *cells in rows))

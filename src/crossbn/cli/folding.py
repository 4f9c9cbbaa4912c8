"""Long names of layers in tables on a narrow terminal."""

import re

from crossbn.lab.report.table import Table

_NARROWEST = 12  # letters of a name on a line
_FRAME = 3  # letters of a column beside its content


def fold_names(table: Table, columns: int, width: int) -> Table:
    """Return the table, names in its first column folded so that numbers keep their place.

    Args:
        table: with names in its first column.
        columns: of a part beside the first; see `Table.cut`.
        width: letters of the terminal.

    Example:
        >>> table = Table("", ("layer", "error"), (("layer2.0.downsample.1", "1.0"),))
        >>> fold_names(table, 1, width=24).rows[0][0].split()
        ['layer2.0.', 'downsample.1']
    """
    taken = max(_numbers_width(part) for part in table.cut(columns))
    room = max(_NARROWEST, width - 1 - _FRAME - taken)
    return table._replace(rows=tuple((fold(name, room), *cells) for name, *cells in table.rows))


def fold(name: str, width: int) -> str:
    """Return a name in lines of at most `width` letters, cut after dots and before brackets where possible."""
    lines = [""]
    for piece in re.split(r"(?<=\.)|(?=\[)", name):
        for part in [piece[i : i + width] for i in range(0, len(piece), width)]:
            if len(lines[-1] + part) <= width:
                lines[-1] += part
            else:
                lines.append(part)
    return "\n".join(lines)


def _numbers_width(part: Table) -> int:
    cells = zip(*[row[1:] for row in part.rows], strict=True)
    words = [max(map(len, column.split())) for column in part.columns[1:]]
    return sum(max(word, *map(len, cell)) + _FRAME for word, cell in zip(words, cells, strict=True))

"""A table as text, for the terminal, for Markdown and for the page alike."""

from collections.abc import Iterable
from typing import NamedTuple

WORDS = 22
"""Letters of a number, at most: a column with a longer cell is words, and wraps."""
_GAP = 2


class Table(NamedTuple):
    """Cells of text; the first column says what a row is."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def cut(self, most: int) -> "list[Table]":
        """Return the table in parts, none with more than `most` columns beside the first."""
        pieces = [slice(start, start + most) for start in range(1, len(self.columns), most)]
        return [
            Table(
                self.title,
                (self.columns[0], *self.columns[piece]),
                tuple((row[0], *row[piece]) for row in self.rows),
            )
            for piece in pieces
        ]

    def cut_to(self, width: int) -> "list[Table]":
        """Return the table in parts of about equally many columns, each at most `width` letters wide where possible.

        Example:
            >>> table = Table("", ("", "first", "second"), (("a", "1", "2"), ("b", "333 ± 33", "4")))
            >>> [part.columns for part in table.cut_to(15)]
            [('', 'first'), ('', 'second')]
        """
        most = columns = max(1, len(self.columns) - 1)
        while most > 1 and max(part.width for part in self.cut(most)) > width:
            most -= 1
        return self.cut(-(-columns // -(-columns // most)))

    @property
    def word_columns(self) -> set[int]:
        """The columns with words, which wrap, instead of numbers."""
        return {i for row in self.rows for i, cell in enumerate(row) if len(cell) > WORDS}

    @property
    def width(self) -> int:
        """Letters that a line takes where words wrap and numbers do not."""
        return sum(min(letters, WORDS) + _GAP for letters in self._letters([row[0] for row in self.rows]))

    @property
    def least_width(self) -> int:
        """Letters that a line takes on a phone, where gaps are small and names wrap as well."""
        return sum(
            min(letters, WORDS) + 1 for letters in self._letters([w for row in self.rows for w in row[0].split()])
        )

    def _letters(self, names: Iterable[str]) -> list[int]:
        """Return the letters of the longest piece of each column that does not wrap."""
        headlines = [max(map(len, column.split()), default=0) for column in self.columns]
        cells = [max((len(row[i]) for row in self.rows), default=0) for i in range(1, len(self.columns))]
        return [max(pair) for pair in zip(headlines, [max(map(len, names), default=0), *cells], strict=True)]

    def markdown(self) -> str:
        """Return the table under its title as a headline."""
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        return "\n".join([f"### {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines)])

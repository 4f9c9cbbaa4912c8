"""A table as text, for the terminal, for Markdown and for the page alike."""

from typing import NamedTuple


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

    def markdown(self) -> str:
        """Return the table under its title as a headline."""
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        return "\n".join([f"### {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines)])

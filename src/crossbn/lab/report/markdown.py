"""A folder's page in Markdown, with pictures beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crossbn.lab.records import write_whole
from crossbn.lab.report.figure import save_png
from crossbn.lab.report.table import Table

if TYPE_CHECKING:  # a page that is there already is left alone without it
    from matplotlib.figure import Figure


def write_markdown(
    path: Path, parts: Sequence[Table | str], pictures: Mapping[str, Callable[[], Figure]], anew: bool = False
) -> None:
    """Write tables and paragraphs one below the other, after their pictures: all of them, or nothing if they are there.

    Args:
        path: of the page.
        parts: of it.
        pictures: what draws them, by the name of the file beside the page.
        anew: whether to draw pictures again of which the page says the same as before.

    Raises:
        RecordError: if a file cannot be written.
    """
    text = "\n\n".join(part if isinstance(part, str) else part.markdown() for part in parts) + "\n"
    said = path.read_text(encoding="utf-8") if path.exists() else None
    if anew or said != text or not all(path.with_name(name).exists() for name in pictures):
        for name, draw in pictures.items():
            save_png(draw(), path.with_name(name))
        write_whole(path, text.encode())

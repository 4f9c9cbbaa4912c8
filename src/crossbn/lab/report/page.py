"""A page of tables, figures and settings, in one file that needs no other and no JavaScript."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import jinja2
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from crossbn.lab.report.picture import THEME, Picture, make_picture
from crossbn.lab.report.table import Table

TABLE_WIDTH, PHONE_WIDTH = 105, 49
"""Letters that fit on paper, a wider table is cut in parts; and on a phone, which says that there is more."""

_SHORT_NOTE = 120  # letters: it is about the table that it stands below


@dataclass(frozen=True)
class Section:
    """A part of a page, about records that belong together.

    Attributes:
        title: its headline.
        findings: what the numbers say, a sentence each.
        tables: of numbers.
        figures: after the first table.
        notes: what the numbers are and how they came about, a paragraph each; a long one that several sections of a
            page have is on it once.
        settings: of the runs, the software and the machine, by name.
        setting_tables: settings that differ from run to run.
        command: what to type for the same records, word by word.
        rank: where it stands among sections of its kind, the lowest first.
    """

    title: str
    findings: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    setting_tables: Sequence[Table] = ()
    command: Sequence[str] = ()
    rank: int = 0


class Shown(NamedTuple):
    """A section as the template takes it: with the notes that are its own, and figures as markup."""

    name: str
    section: Section
    notes: list[str]
    pictures: list[Picture]


@dataclass(frozen=True)
class Page:
    """What a page says.

    Attributes:
        title: its headline.
        sections: its parts; with more than one there is a list of contents.
        lead: what the page is about, a paragraph each.
        problems: what is missing on the page, a sentence each.
        command: what to type for the same page, word by word.
    """

    title: str
    sections: Sequence[Section]
    lead: Sequence[str] = ()
    problems: Sequence[str] = ()
    command: Sequence[str] = ()

    def html(self) -> str:
        """Return the page; equal records make equal pages."""
        notes = Counter(note for section in self.sections for note in section.notes)
        shared = [note for note, count in notes.items() if count > 1 and len(note) > _SHORT_NOTE]
        shown = [
            Shown(
                f"s{i}",
                section,
                [note for note in section.notes if note not in shared],
                [make_picture(figure, f"s{i}f{j}") for j, figure in enumerate(section.figures)],
            )
            for i, section in enumerate(self.sections, start=1)
        ]
        return _template().render(page=self, sections=shown, shared=shared)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals |= {"parts_of": _parts, "quote": shlex.quote, "theme": THEME, "phone_width": PHONE_WIDTH}
    environment.filters["with_code"] = _with_code
    return environment.from_string(files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8"))


def _with_code(text: str) -> Markup:
    """Return a text as markup, what stands between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _parts(tables: Sequence[Table], name: str) -> Iterator[tuple[str, Table]]:
    """Yield tables that fit on paper, each with a name that no other has."""
    for i, table in enumerate(tables):
        for j, part in enumerate(table.cut_to(TABLE_WIDTH)):
            yield f"{name}{i}-{j}", part._replace(title=f"{part.title}, continued") if j and part.title else part

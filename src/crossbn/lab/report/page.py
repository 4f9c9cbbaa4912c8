"""A page of tables, figures and settings, in one file that needs no other and no JavaScript."""

import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from string import Template

from matplotlib.figure import Figure

from crossbn.lab.report.style import STYLE
from crossbn.lab.report.svg import make_picture
from crossbn.lab.report.table import WORDS, Table

TABLE_WIDTH = 105
"""Letters that fit on paper; a wider table is cut in parts."""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header>
<h1>$title</h1>
$lead
</header>
$contents
<main>
$sections
</main>
<footer>
$footer
</footer>
</body>
</html>
""")


@dataclass(frozen=True)
class Section:
    """A part of a page, about records that belong together.

    Attributes:
        title: its headline.
        findings: what the numbers say, a sentence each.
        tables: of numbers.
        figures: after the first table.
        notes: what the numbers are and how they came about, a paragraph each.
        settings: of the runs, the software and the machine, by name.
        setting_tables: settings that differ from run to run.
        command: what to type for the same records, word by word.
    """

    title: str
    findings: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    setting_tables: Sequence[Table] = ()
    command: Sequence[str] = ()


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
        parts = [_section(each, f"s{i}", each.title == self.title) for i, each in enumerate(self.sections, start=1)]
        return _PAGE.substitute(
            title=escape(self.title),
            style=STYLE,
            lead=_paragraphs(self.lead),
            contents=_contents(self.sections) if len(self.sections) > 1 else "",
            sections="\n".join(parts),
            footer=_left_out(self.problems) + _command("How to make this page", self.command, "h2"),
        )


def _contents(sections: Sequence[Section]) -> str:
    items = "\n".join(f'<li><a href="#s{i}">{escape(each.title)}</a></li>' for i, each in enumerate(sections, start=1))
    return f'<nav aria-label="Contents">\n<ol>\n{items}\n</ol>\n</nav>'


def _section(section: Section, name: str, is_page: bool) -> str:
    headline = f"<h2>{escape(section.title)}</h2>"
    parts = [
        f'<section id="{name}" class="page">' if is_page else f'<section id="{name}">\n{headline}',
        _paragraphs([" ".join(section.findings)] if section.findings else []),
        *_tables(section.tables[:1], f"{name}t"),
        *(_figure(figure, f"{name}f{i}") for i, figure in enumerate(section.figures, start=1)),
        *_tables(section.tables[1:], f"{name}u"),
    ]
    if section.notes:
        parts += ["<h3>What the numbers are</h3>", _paragraphs(section.notes)]
    if section.settings:
        parts += ["<h3>Settings</h3>", _definitions(section.settings), *_tables(section.setting_tables, f"{name}v")]
    parts += [_command("How to make these records", section.command, "h3"), "</section>"]
    return "\n".join(filter(None, parts))


def _paragraphs(texts: Iterable[str]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)


def _tables(tables: Iterable[Table], name: str) -> Iterable[str]:
    for i, table in enumerate(tables):
        for j, part in enumerate(table.cut_to(TABLE_WIDTH)):
            yield _table(part, f"{part.title}, continued" if j else part.title, f"{name}{i}-{j}")


def _table(table: Table, title: str, name: str) -> str:
    words = {i for row in table.rows for i, cell in enumerate(row) if len(cell) > WORDS}
    head = "".join(_cell("th", column, i in words, "col") for i, column in enumerate(table.columns))
    body = "\n".join(f"<tr>{_cells(row, words)}</tr>" for row in table.rows)
    # Not a caption: that would be no wider than the table. And a box that scrolls can be reached with the keyboard.
    headline, label = f'<p class="title" id="{name}">{escape(title)}</p>\n', f'aria-labelledby="{name}"'
    if not title:
        headline, label = "", 'aria-label="Table"'
    box = f'<div class="wide" role="region" tabindex="0" {label}>'
    return f"{headline}{box}\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"


def _cells(row: Sequence[str], words: Container[int]) -> str:
    numbers = (_cell("td", text, i in words) for i, text in enumerate(row[1:], start=1))
    return _cell("th", row[0], False, "row") + "".join(numbers)


def _cell(tag: str, text: str, is_words: bool, scope: str = "") -> str:
    attributes = (f' scope="{scope}"' if scope else "") + (' class="words"' if is_words else "")
    return f"<{tag}{attributes}>{escape(text)}</{tag}>"


def _figure(figure: Figure, name: str) -> str:
    picture = make_picture(figure, name)
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>\n" if picture.caption else ""
    drawings = f'<div class="broad">{picture.wide}</div>\n<div class="narrow">{picture.narrow}</div>'
    return f"<figure>\n{caption}{drawings}\n</figure>"


def _definitions(settings: Mapping[str, object]) -> str:
    items = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in settings.items())
    return f"<dl>\n{items}\n</dl>"


def _left_out(problems: Sequence[str]) -> str:
    items = "\n".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return f"<section>\n<h2>Left out</h2>\n<ul>\n{items}\n</ul>\n</section>\n" if problems else ""


def _command(title: str, words: Sequence[str], headline: str) -> str:
    if not words:
        return ""
    # No break within a word: copied, it stays one.
    shown = " ".join(f"<span>{escape(shlex.quote(word))}</span>" for word in words)
    return f"<{headline}>{title}</{headline}>\n<pre>{shown}</pre>"

"""A page that shows a table and a picture, in one file that needs no other."""

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from crossbn.experiments.rows import Row
from crossbn.report.demo_table import COLUMNS, caption, cells

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light; }
body { max-width: 44rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #222; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
figure { margin: 1rem 0; }
img { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ccc; }
td { white-space: nowrap; }
.caption { font-size: .85rem; color: #555; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
pre { padding: .75rem; background: #f3f3f3; white-space: pre-wrap; overflow-x: auto; }
pre span { white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dd { margin: 0; }
@media (max-width: 30rem) { tr { font-size: .8rem; } th, td { padding-inline: .2rem; } }
@media print { body { max-width: none; } figure, table { break-inside: avoid; } }
</style>
</head>
<body>
<h1>$title</h1>
$findings
<figure><img src="data:image/png;base64,$picture" alt="$alternative"></figure>
<div class="wide">
$table
</div>
<p class="caption">$caption</p>
<h2>What was trained</h2>
$about
<dl>
$settings
</dl>
<h2>How to make this page</h2>
<pre>$command</pre>
</body>
</html>
""")


@dataclass(frozen=True)
class Page:
    """What a page says.

    Attributes:
        title: its headline.
        findings: what the numbers say, a sentence each.
        about: how they came about, a paragraph each.
        settings: of the runs, the software and the machine, by name.
        command: what to type for the same page, word by word.
    """

    title: str
    findings: Sequence[str]
    about: Sequence[str]
    settings: Mapping[str, object]
    command: Sequence[str]

    def write(self, path: Path, rows: Sequence[Row], picture: Path) -> None:
        """Write the page with the table of `rows` and the PNG file `picture` inside."""
        curves = ", ".join(row.name for row in rows)
        path.write_text(
            _PAGE.substitute(
                title=escape(self.title),
                findings=_paragraphs([" ".join(self.findings)]),
                picture=base64.b64encode(picture.read_bytes()).decode(),
                alternative=escape(f"Test accuracy during training: {curves}. The table below has the final values."),
                table=_table(rows),
                caption=escape(caption(rows)),
                about=_paragraphs(self.about),
                settings="\n".join(
                    f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in self.settings.items()
                ),
                command=" ".join(f"<span>{escape(shlex.quote(word))}</span>" for word in self.command),
            ),
            encoding="utf-8",
        )


def _paragraphs(texts: Sequence[str]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"

"""The documentation site, `make docs`: pages of docs/, benchmarks/ and the root, so that links hold here and there."""

import subprocess
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert as mathml_of
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

import crossbn

ROOT = Path(__file__).parent.parent
EXTRA = ROOT / "build" / "site-extra"
"""Files that are made for the site and are no pages of it."""
COLUMNS, SENTENCE, NAME = 4, 60, 16
"""A table has sentences if it has no more columns, and in a cell more characters than these; one of more columns has
names if the first has cells of more characters."""
EXTRA.mkdir(parents=True, exist_ok=True)

project = "crossbn"
author = "The crossbn authors"
project_copyright = author
version = release = crossbn.__version__

root_doc = "docs/index"
include_patterns = ["docs/*.md", "benchmarks/**.md", "CHANGELOG.md", "CONTRIBUTING.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]  # as GitHub writes formulas
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # tables that commands write begin with a heading of the third level
autodoc_member_order = "bysource"
default_role = "code"  # docstrings write `names` as Markdown does
autodoc_mock_imports = ["transformers"]
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"crossbn {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_extra_path = [str(EXTRA)]
html_math_renderer = "mathml"
html_copy_source = html_show_sourcelink = False


def make_extra(_: Sphinx) -> None:
    """Write the page of all committed records, and an index that leads to the pages of docs/."""
    words = ["report", "benchmarks", "--output", str(EXTRA / "report.html"), "--title", "All records"]
    command = [sys.executable, "-c", "from crossbn.cli import main; main()", *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    start = f"{root_doc}.html"
    index = f'<!doctype html><meta http-equiv="refresh" content="0; url={start}"><a href="{start}">crossbn</a>\n'
    (EXTRA / "index.html").write_text(index)


def inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula as MathML, which browsers show without a script."""
    translator.body.append(mathml_of(node.astext()))
    raise nodes.SkipNode


def display_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula on lines of its own; one that is too wide for a phone scrolls."""
    translator.body.append(f'<div class="formula">{mathml_of(node.astext(), display="block")}</div>\n')
    raise nodes.SkipNode


def mark_sentences(_: Sphinx, document: nodes.document) -> None:
    """Mark tables of a few columns with sentences: on a phone their rows become paragraphs, cells with a label.

    Tables of many columns whose rows have long names are marked, too: these get some room.
    """
    for table in document.findall(nodes.table):
        head, *rows = ([*row.children] for row in table.findall(nodes.row))
        if len(head) > COLUMNS and any(len(row[0].astext()) > NAME for row in rows):
            table["classes"].append("named")
        if len(head) > COLUMNS or not any(len(cell.astext()) > SENTENCE for row in rows for cell in row):
            continue
        table["classes"].append("sentences")
        labels = [cell.astext() for cell in head] if len(head) > 2 else []
        for row in rows:
            for label, cell in list(zip(labels, row, strict=False))[1:]:
                if label and cell.astext():
                    cell.children[0].insert(0, nodes.inline("", f"{label}: ", classes=["label"]))


def keep_spreads_together(_: Sphinx, document: nodes.document) -> None:
    """Let no line of a table end between a number and its spread."""
    for table in document.findall(nodes.table):
        for text in list(table.findall(nodes.Text)):
            text.parent.replace(text, nodes.Text(text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")))


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("doctree-read", mark_sentences)
    app.connect("doctree-read", keep_spreads_together)
    app.connect("builder-inited", make_extra)
    app.add_html_math_renderer("mathml", (inline_math, None), (display_math, None))

"""What tests of one section need."""

from pathlib import Path

from crossbn.lab.report.folder import make_page
from crossbn.lab.report.page import Section


def only_section(folder: Path) -> Section:
    """The section of a folder that has no more, and nothing that is left out."""
    page = make_page(folder)
    assert page.problems == []
    (section,) = page.sections
    return section

"""Records of `crossbn check` as a section of a page."""

from collections.abc import Callable, Iterator
from functools import partial

from crossbn.lab.records import Record
from crossbn.lab.report.context import describe_origin
from crossbn.lab.report.page import Section
from crossbn.lab.report.reading import Source
from crossbn.lab.report.table import Table

WORDS = {True: "right", False: "wrong", None: "-"}


def check_sections(source: Source) -> Iterator[Callable[[], Section]]:
    """Yield a section for each check in a file."""
    for record in source.latest:
        yield partial(_section, record, source.name)


def _section(record: Record, name: str) -> Section:
    rows = tuple((each, WORDS[it["passed"]], it["sentence"]) for each, it in record.values["findings"].items())
    return Section(
        title=f"Whether the norms are right and fast on {record.settings['device']}",
        findings=[record.values["verdict"]],
        tables=[Table("", ("check", "", "finding"), rows)],
        settings=describe_origin([record], name),
        command=["crossbn", "check", "--device", record.settings["device"]],
    )

import re

import pytest
from matplotlib.figure import Figure

from crossbn.lab.report.page import TABLE_WIDTH, Page, Section
from crossbn.lab.report.table import Table
from tests.lab.report.reader import Reader


def drawing() -> Figure:
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes in figure.subplots(1, 2, sharey=True):
        axes.plot([1, 2], [3, 4], label="a line")
        axes.set_xlabel("time")
    figure.axes[0].set_ylabel("height")
    figure.suptitle("Heights <&> times")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center")
    return figure


def section(title: str = "First") -> Section:
    return Section(
        title,
        findings=["One & all.", "Two."],
        tables=[Table("Numbers", ("", "a"), (("row", "1 ± 2"),)), Table("", ("", "b"), (("line", "3"),))],
        figures=[drawing()],
        notes=["Told <how>."],
        settings={"Epochs": 4},
        setting_tables=[Table("Where they differ", ("run", "window"), (("one", "8"),))],
        command=["crossbn", "demo", "--out", "a b"],
    )


def test_page_is_whole_in_itself() -> None:
    page = Page(
        "A <title>", [section(), section("Second")], ["Two parts."], ["x.jsonl is empty."], ["crossbn", "report"]
    )
    source = page.html()
    reader = Reader(source)
    assert reader.open == []
    assert [each for each in reader.loaded if not each.startswith("#")] == []
    assert not re.search(r"url\((?!#)|@import|<script|https?:", source)
    assert len(reader.names) == len(set(reader.names))
    assert {each[1:] for each in reader.loaded} <= set(reader.names)
    assert (reader.tags["table"], reader.tags["figure"], reader.tags["svg"], reader.tags["h2"]) == (6, 2, 4, 4)
    for expected in (
        "A <title>",
        "Two parts. First Second",
        "One & all. Two.",
        "Numbers a row 1 ± 2",
        "Heights <&> times",
        "Told <how>.",
        "Epochs 4",
        "Where they differ run window one 8",
        "crossbn demo --out 'a b'",
        "x.jsonl is empty.",
    ):
        assert expected in reader.text


def test_a_section_that_is_the_page_has_no_second_headline() -> None:
    reader = Reader(Page("First", [section()]).html())
    assert "h2" not in reader.tags
    assert "nav" not in reader.tags
    assert reader.text.count("First") == 2  # of the window and of the page
    other = Reader(Page("Other", [section()]).html())
    assert other.tags["h2"] == 1


def test_what_the_numbers_are_is_said_once() -> None:
    long, short = "Times are medians. " * 10, "The paper has no such table."
    parts = [Section(name, notes=[long, short, f"Of {name}, see `reproduce cost`."]) for name in ("one", "two")]
    source = Page("All", parts).html()
    text = Reader(source).text
    assert text.count(long.strip()) == 1
    assert text.count(short) == 2, "a short sentence is about its own table"
    assert (text.count("Of one, see"), text.count("Of two, see")) == (1, 1)
    assert "see <code>reproduce cost</code>." in source
    assert source.count("<h2>What the numbers are</h2>") == 1
    assert source.count('<a href="#numbers">') == 3, "in the contents and in both sections"
    alone = Page("Other", parts[:1]).html()
    assert alone.count("What the numbers are</h3>") == 1
    assert "#numbers" not in alone


def test_a_table_too_wide_for_a_phone_says_so() -> None:
    numbers = ("1.234 ± 0.567",) * 4
    narrow, wide = (Table("", ("", *("a" * count)), (("name", *numbers[:count]),)) for count in (2, 4))
    sources = [Page("a", [Section("b", tables=[table])]).html() for table in (narrow, wide)]
    assert [source.count('class="more"') for source in sources] == [0, 1]
    assert (narrow.least_width, wide.least_width) == (33, 61)


def test_equal_pages_are_equal_files() -> None:
    assert Page("a", [section()]).html() == Page("a", [section()]).html() != Page("a", [section("b")]).html()


def test_wide_tables_are_cut_and_words_wrap() -> None:
    columns = ("run", *(f"measure {i}" for i in range(12)))
    table = Table("Wide", columns, (("name", *["1.234 ± 0.567"] * 11, "+4.0 to BN, -0.4 to GN (?), +1.2 to BRN"),))
    assert table.width > TABLE_WIDTH
    source = Page("a", [Section("b", tables=[table])]).html()
    reader = Reader(source)
    assert reader.tags["table"] == 2
    assert "Wide, continued" in reader.text
    assert reader.text.count("name 1.234 ± 0.567") == 2
    assert source.count('<td class="words">+4.0 to BN') == 1


@pytest.mark.parametrize(
    ("width", "parts"),
    [(100, [4]), (30, [2, 2]), (14, [1, 1, 1, 1]), (1, [1, 1, 1, 1]), (33, [2, 2])],
)
def test_parts_have_about_equally_many_columns(width: int, parts: list[int]) -> None:
    table = Table("", ("", "a", "b", "c", "d"), (("row", *["12345678"] * 4),))
    found = table.cut_to(width)
    assert [len(part.columns) - 1 for part in found] == parts
    assert [cell for part in found for cell in part.rows[0][1:]] == ["12345678"] * 4


def test_a_table_without_rows_can_be_shown() -> None:
    assert Table("", ("", "a"), ()).width == 5
    assert "a" in Reader(Page("t", [Section("s", tables=[Table("", ("", "a"), ())])]).html()).text

from pathlib import Path

from matplotlib.figure import Figure

from crossbn.lab.report.markdown import write_markdown
from crossbn.lab.report.table import Table


def test_a_page_and_its_pictures_are_written_when_they_say_something_new(tmp_path: Path) -> None:
    drawn: list[str] = []

    def draw() -> Figure:
        drawn.append("drawn")
        return Figure()

    page, picture = tmp_path / "table.md", tmp_path / "growth.png"
    table = Table("title", ("", "a"), (("row", "1"),))
    first, second = ["First.", table.markdown()], [table.markdown(), "Last."]
    for parts, anew, pictures in [(first, False, 1), (first, False, 1), (first, True, 2), (second, False, 3)]:
        write_markdown(page, parts, {picture.name: draw}, anew)
        assert len(drawn) == pictures
    assert page.read_text() == "### title\n\n|  | a |\n| --- | ---: |\n| row | 1 |\n\nLast.\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    write_markdown(page, [table, "Last."], {picture.name: draw})
    assert len(drawn) == 4
    assert picture.exists()

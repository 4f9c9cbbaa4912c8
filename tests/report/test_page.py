import base64
from html.parser import HTMLParser
from pathlib import Path

from crossbn.experiments.demo import rows
from crossbn.report.demo_table import caption, cells
from crossbn.report.page import Page
from tests.experiments.handmade import three_norms


def test_cells_are_the_numbers_rounded() -> None:
    table = [cells(row) for row in rows(three_norms())]
    assert table == [
        ("BN at batch 32", "", "3", "95.0 ± 1.0", "3.0"),
        ("BN at batch 2", "", "3", "41.0 ± 4.0", "3.0"),
        ("CBN at batch 2", "8", "3", "94.0 ± 1.0", "3.0"),
    ]
    assert caption(rows(three_norms())).startswith("Accuracy on 200 test images at the end of training")


class Reader(HTMLParser):
    """Collects the text of a page and whatever it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.loaded: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_is_whole_in_itself(tmp_path: Path) -> None:
    picture, index = tmp_path / "curves.png", tmp_path / "index.html"
    picture.write_bytes(b"not really a picture")
    page = Page("A <title>", ["One & all."], ["Told how."], {"Epochs": 4}, ["crossbn", "demo", "--out", "a b"])
    page.write(index, rows(three_norms()), picture)
    source = index.read_text(encoding="utf-8")
    reader = Reader(source)
    assert reader.open == []
    assert reader.loaded == [f"data:image/png;base64,{base64.b64encode(b'not really a picture').decode()}"]
    text = " ".join("".join(reader.text).split())
    assert "url(" not in source
    for expected in ("A <title>", "One & all.", "Told how.", "Epochs4", "crossbn demo --out 'a b'", "94.0 ± 1.0"):
        assert expected in text

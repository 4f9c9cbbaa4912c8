"""The page of a folder with records of every command, in a real browser."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from crossbn.lab.experiments.registry import EXPERIMENTS
from crossbn.lab.report.experiment_figures import FIGURES
from crossbn.lab.report.folder import make_page
from tests.lab.experiments import pretended
from tests.lab.report import on_disk
from tests.lab.report.browser import DARK, measure, open_in_browser
from tests.lab.report.test_picture import panels

pytestmark = pytest.mark.slow
PHONE, DESK = 360, 1200


class Seen(NamedTuple):
    """Facts about the page on a phone and on a desk, and what was on the console."""

    phone: dict[str, Any]
    desk: dict[str, Any]
    console: list[str]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("records")
    on_disk.write_all(folder)
    (folder / "foreign.jsonl").write_text('{"loss": 1}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXPERIMENTS, "pretended", pretended)
        patch.setitem(FIGURES, "pretended", lambda results: panels(len(results)))
        return make_page(folder, "Everything").html()


@pytest.fixture(scope="module")
def seen(page: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    (phone, desk), console = measure(page, [PHONE, DESK], tmp_path_factory.mktemp("browser"))
    return Seen(phone, desk, console)


def test_nothing_sticks_out(seen: Seen) -> None:
    for facts, width in ((seen.phone, PHONE), (seen.desk, DESK)):
        assert facts["width"] == width
        assert facts["scroll_width"] <= width
        assert facts["outside"] == 0
    assert seen.phone["scrolling_tables"] > 0, "else nothing was tried"
    assert seen.phone["without_cue"] == 0, "a cue says that there is more"
    assert seen.desk["scrolling_tables"] == 0


def test_everything_is_there(seen: Seen) -> None:
    assert seen.console == ["measured"]
    for facts in (seen.phone, seen.desk):
        assert (facts["tables"], facts["figures"], facts["loaded"]) == (15, 5, 0)
        assert len(facts["drawings"]) == 5, "one of the two drawings of each figure"
        for number in ("94.0 ± 1.0", "2.50 ± 0.71", "49.0 ± 1.4", "1.50 ± 0.01", "20.0 → 10.0"):
            assert number in facts["text"]
        assert "foreign.jsonl is not a file of crossbn's records." in facts["text"]


def test_letters_in_figures_can_be_read(seen: Seen) -> None:
    assert max(seen.phone["drawings"]) < 340 < max(seen.desk["drawings"])
    assert seen.phone["letters"] > 9, "pixels of letters of 10 points"
    assert seen.desk["letters"] > 10


def test_dark_by_night(page: str, seen: Seen, tmp_path: Path) -> None:
    (night,), _ = measure(page, [PHONE], tmp_path, DARK)
    assert (seen.phone["background"], seen.phone["ink"]) == ("rgb(255, 255, 255)", "rgb(0, 0, 0)")
    assert (night["background"], night["ink"]) == ("rgb(21, 24, 28)", "rgb(230, 230, 230)")


def test_paper(page: str, tmp_path: Path) -> None:
    source, paper = tmp_path / "page.html", tmp_path / "page.pdf"
    source.write_text(page, encoding="utf-8")
    open_in_browser(source, tmp_path / "profile", f"--print-to-pdf={paper}", DARK)
    pages = len(re.findall(rb"/Type /Page\b(?!s)", paper.read_bytes()))
    assert 4 <= pages <= 12

import doctest
import io

import pytest
from rich.console import Console

from crossbn.cli import folding, printing
from crossbn.cli.folding import fit, fold
from crossbn.lab.report.table import Table

LONG = "features.denseblock3.denselayer12.norm1[0:64]"
WORDS = "+4.6 ± 1.6 to BN, +1.5 ± 1.4 to equal, -0.1 ± 1.8 to decay 0.85 (?)"
TITLE, NUMBERS = "Fine-tuning", ("61.9 ± 0.8", "10.1 ± 0.4", "29.8 ± 1.2", "71.0 ± 0.5", "69.6 ± 0.9")
COLUMNS = ("", "frozen BN, %", "BN, %", "paper", "BN, momentum 0.1, %", "CBN, %", "difference")
WIDE = Table(
    TITLE,
    COLUMNS,
    (("CIFAR-10, batch 1", *NUMBERS, WORDS), ("Fashion-MNIST, rate 0.0003, the smallest", *NUMBERS, "")),
)


@pytest.mark.parametrize(
    ("name", "width", "lines"),
    [
        ("bn1", 12, ["bn1"]),
        ("layer2.0.downsample.1", 21, ["layer2.0.downsample.1"]),
        ("layer2.0.downsample.1", 20, ["layer2.0.downsample.", "1"]),
        ("layer2.0.downsample.1", 12, ["layer2.0.", "downsample.1"]),
        (LONG, 24, ["features.denseblock3.", "denselayer12.norm1[0:64]"]),
        (LONG, 20, ["features.", "denseblock3.", "denselayer12.norm1", "[0:64]"]),
        ("abcdefgh.ij", 3, ["abc", "def", "gh.", "ij"]),
        ("BN, batch 2, rate 0.0003", 20, ["BN, batch 2, rate", "0.0003"]),
        ("", 12, [""]),
    ],
)
def test_folds_after_blanks_or_dots(name: str, width: int, lines: list[str]) -> None:
    assert fold(name, width).split("\n") == lines


def test_names_take_the_room_that_numbers_leave() -> None:
    table = Table("", ("layer", "a word", "b"), ((LONG, "1.0", "22.0 → 11.0"),))
    # "word" and its frame take 7 letters, the numbers of the last column 14; the frame of the names takes 4.
    assert fit(table, 16 + 4 + 21, 9)[0].rows == ((fold(LONG, 16), "1.0", "22.0 → 11.0"),)
    assert [part.rows[0] for part in fit(table, 16 + 4 + 20, 9)] == [
        (fold(LONG, 29), "1.0"),
        (fold(LONG, 22), "22.0 → 11.0"),
    ]
    assert [part.columns for part in fit(table, 200, 1)] == [("layer", "a word"), ("layer", "b")]
    assert fit(table, 200, 2) == [table]


def test_the_papers_numbers_stay_beside_ours_and_words_stand_alone() -> None:
    assert [tuple(head.replace("\n", " ") for head in part.columns[1:]) for part in fit(WIDE, 44, 9)] == [
        ("frozen BN, %",),
        ("BN, %", "paper"),
        ("BN, momentum 0.1, %",),
        ("CBN, %",),
        ("difference",),
    ]
    # What is empty in a part is no row of it.
    assert [row[0] for row in fit(WIDE, 44, 9)[-1].rows] == ["CIFAR-10, batch 1"]


@pytest.mark.parametrize("width", [50, 60, 80, 100, 120, 200])
def test_nothing_is_cut_off_or_squeezed(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(printing, "Console", lambda: Console(file=out, width=width))
    printing.print_tables([WIDE])
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue()
    assert [line.strip() for line in lines].count(TITLE) == 1
    cells = [cell.strip() for line in lines for cell in line.split("│")]
    assert all(cells.count(number) == 2 for number in NUMBERS)


def test_example() -> None:
    assert doctest.testmod(folding).failed == 0

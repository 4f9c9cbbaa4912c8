import doctest

import pytest

from crossbn.cli import folding
from crossbn.cli.folding import fold, fold_names
from crossbn.lab.report.table import Table

LONG = "features.denseblock3.denselayer12.norm1[0:64]"


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
        ("", 12, [""]),
    ],
)
def test_folds_after_dots(name: str, width: int, lines: list[str]) -> None:
    assert fold(name, width).split("\n") == lines


def test_names_take_the_room_that_numbers_leave() -> None:
    table = Table("", ("layer", "a word", "b"), ((LONG, "1.0", "22.0 → 11.0"),))
    # Of the first part "word" and its frame take 7 letters, of the second 14; the frame of the names takes 4.
    assert fold_names(table, 1, 24 + 4 + 14).rows == ((fold(LONG, 24), "1.0", "22.0 → 11.0"),)
    assert fold_names(table, 2, 24 + 4 + 21).rows == ((fold(LONG, 24), "1.0", "22.0 → 11.0"),)
    assert fold_names(table, 2, 20).rows[0][0] == fold(LONG, 12)


def test_example() -> None:
    assert doctest.testmod(folding).failed == 0

"""The demo on a page."""

from pathlib import Path

import pytest

from crossbn.lab.report.demo_section import demo_section, plot_curves
from crossbn.lab.report.figure import save_png
from crossbn.lab.report.folder import make_page
from tests.lab.report import on_disk


def test_a_file_has_a_section_for_each_demo(tmp_path: Path) -> None:
    others = [on_disk.demo("cbn", 2, 0, 0.2, 0.3, window=4), on_disk.demo("cbn", 2, 0, 0.2, 0.3, epochs=9)]
    on_disk.write(tmp_path / "records.jsonl", [*on_disk.three_norms(), *others])
    first, second, third = make_page(tmp_path).sections
    assert [row[:2] for row in first.tables[0].rows] == [
        ("BN at batch 32", ""),
        ("BN at batch 2", ""),
        ("CBN at batch 2", "4"),
    ]
    assert second.tables[0].columns == ("", "window", "seeds", "mean ± sd, %", "seconds")
    assert second.tables[0].rows[-1] == ("CBN at batch 2", "8", "3", "94.0 ± 1.0", "3.0")
    assert second.findings[0].startswith("CBN at batch 2, with a window of 8, classified 94.0% of 200 test images")
    assert second.command == [
        *("crossbn", "demo", "--batch-size", "2", "--window", "8", "--seeds", "3"),
        *("--epochs", "2", "--train-images", "40", "--output", tmp_path.name),
    ]
    assert (third.settings["Epochs"], third.findings) == (9, [])
    assert {each.title for each in (first, second, third)} == {
        "BN, GN and CBN side by side at batch size 2: records.jsonl"
    }


def test_the_command_names_a_relative_folder_as_it_is() -> None:
    section = demo_section(on_disk.three_norms(), Path("out/demo"), "records.jsonl")
    assert section.command[-2:] == ["--output", "out/demo"]


def test_curves_are_means_in_percent_labelled_with_their_end() -> None:
    (axes,) = plot_curves(on_disk.three_norms()).axes
    ceiling, bn, cbn = axes.lines
    assert list(cbn.get_ydata()) == pytest.approx([10.0, 94.0])  # type: ignore[arg-type]
    assert [line.get_label() for line in axes.lines] == [
        "BN at batch 32: 95.0",
        "BN at batch 2: 41.0",
        "CBN at batch 2: 94.0",
    ]
    assert ceiling.get_color() == bn.get_color() != cbn.get_color()
    assert (ceiling.get_linestyle(), bn.get_linestyle(), cbn.get_linestyle()) == ("-", "--", "-")
    assert axes.get_xticks().tolist() == [1.0, 2.0]


def test_picture_depends_on_the_numbers_alone(tmp_path: Path) -> None:
    table = on_disk.three_norms()
    for name, drawn in (("a", table), ("b", table), ("c", table[:-3])):
        save_png(plot_curves(drawn), tmp_path / f"{name}.png")
    first, again, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first.startswith(b"\x89PNG")
    assert first == again != other


def test_one_seed_can_be_drawn(tmp_path: Path) -> None:
    figure = plot_curves([on_disk.demo("cbn", 2, 0, 0.1, 0.5)])
    assert figure.get_suptitle() == "During training, one seed"
    save_png(figure, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000

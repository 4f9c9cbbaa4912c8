"""Records with chosen numbers, as text and as a picture."""

from pathlib import Path

import numpy
import pytest

from crossbn.lab.fidelity import SAME_LAYER, WHOLE_NETWORK, Fidelity, FidelityRecord
from crossbn.lab.report.fidelity_section import plot_fidelity
from crossbn.lab.report.fidelity_table import caption, fidelity_tables
from crossbn.lab.report.figure import save_png


def records(compensated: float = 0.1) -> list[FidelityRecord]:
    found = {
        SAME_LAYER: Fidelity(8, 0.1, 0.0, 0.2, compensated, None, 0.25),
        WHOLE_NETWORK: Fidelity(8, 0.4, 0.3, 0.5, 0.4, 0.6, 0.25),
    }
    return [
        FidelityRecord(step, layer, age, truth, errors)
        for step in (10, 20)
        for layer in ("bn1", "bn2")
        for age in (1, 2)
        for truth, errors in found.items()
        if (layer, truth) != ("bn2", SAME_LAYER)
    ]


def test_tables() -> None:
    by_age, by_progress, by_layer = fidelity_tables(records())
    errors = (
        "20.0 → 10.0",
        "50.0",
        "10.0 → 0.0",
        "100.0",
        "25.0",
        "50.0 → 40.0",
        "20.0",
        "40.0 → 30.0",
        "25.0",
        "60.0",
    )
    assert by_age.rows == (("1", *errors), ("2", *errors))
    assert by_progress.rows == (("10", *errors), ("20", *errors))
    assert by_layer.rows == (("bn1", *errors), ("bn2", "", "", "", "", *errors[4:]))
    assert [part.columns[1] for part in by_age.cut(5)] == ["same layer: variance", "whole network: variance"]


def test_caption_says_what_was_left_out() -> None:
    left_out = {"bn2, same layer": "it is fed by a sum", "bn3, same layer": "it is fed by a sum"}
    text = caption(records(), left_out, {"window": "3"})
    assert "2 measurements. Left out: bn2, same layer, bn3, same layer: it is fed by a sum. window 3." in text
    assert "A measurement, made between two training steps, compares all steps that are remembered then." in text
    assert " 1 measurement. window 3." in caption(records()[:1], {}, {"window": "3"})


def test_a_panel_for_each_grouping() -> None:
    age, layer, step = plot_fidelity(records()).axes
    lines = {str(line.get_label()): line for line in age.lines}
    assert numpy.asarray(lines["naive, whole network"].get_ydata()) == pytest.approx([0.5, 0.5])
    assert numpy.asarray(lines["compensated, same layer"].get_ydata()) == pytest.approx([0.1, 0.1])
    assert numpy.asarray(lines["single batches from their average"].get_ydata()) == pytest.approx([0.6, 0.6])
    assert numpy.asarray(layer.lines[2].get_xdata()).tolist() == [1]  # the second has no such truth
    assert numpy.asarray(step.lines[0].get_xdata()).tolist() == [10, 20]


def test_a_measurement_of_one_batch_has_no_noise_to_draw() -> None:
    first = [FidelityRecord(1, "bn1", 1, WHOLE_NETWORK, Fidelity(8, 0.4, 0.3, 0.5, 0.4, None, 0.25))]
    _, _, step = plot_fidelity([*first, *records()]).axes
    lines = {str(line.get_label()): line for line in step.lines}
    assert numpy.asarray(lines["naive, whole network"].get_xdata()).tolist() == [1, 10, 20]
    assert numpy.asarray(lines["single batches from their average"].get_xdata()).tolist() == [10, 20]


def test_picture_depends_on_the_numbers_alone(tmp_path: Path) -> None:
    for name, error in (("a", 0.1), ("b", 0.1), ("c", 0.15)):
        save_png(plot_fidelity(records(error)), tmp_path / f"{name}.png")
    first, again, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first == again != other

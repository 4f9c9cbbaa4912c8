"""Why remembered statistics are not today's, against networks in which there is one reason."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import crossbn
from crossbn.lab.fidelity.probe import FidelityProbe
from crossbn.lab.fidelity.records import ALL, CAUSES, NORMS_BEFORE, OWN_WEIGHTS, WEIGHTS_BEFORE, average_causes
from crossbn.lab.report.fidelity_table import cause_table
from tests.lab.fidelity.networks import batch, network, trainer

FIRST, SECOND = "1", "4"


def causes(model: nn.Module, train: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Train the parameters whose names begin with `train`; return what the probe tells at the end."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(train))
    probe, step = FidelityProbe(model, every=6), trainer(model)
    for index in range(6):
        probe.step(batch(index))
        step(batch(index))
    probe.step(batch(6))
    return average_causes(probe.causes)


def test_with_frozen_weights_it_is_the_norms_before() -> None:
    model = network(window=3)
    with FidelityProbe(model, every=6) as probe:
        for index in range(7):
            model(batch(index))
    found = average_causes(probe.causes)
    assert max(max(each) for each in found[FIRST].values()) < 1e-5
    assert max(max(found[SECOND][cause]) for cause in (OWN_WEIGHTS, WEIGHTS_BEFORE)) < 1e-5
    assert found[SECOND][NORMS_BEFORE] == pytest.approx(found[SECOND][ALL], rel=1e-4)
    assert min(found[SECOND][ALL]) > 0.01


def test_the_cause_of_the_first_layer_is_its_own_weights() -> None:
    found = causes(network(window=3), train="0.")
    assert found[FIRST][ALL] == pytest.approx(found[FIRST][OWN_WEIGHTS], rel=1e-3, abs=1e-6)
    assert max(found[FIRST][cause][1] for cause in (WEIGHTS_BEFORE, NORMS_BEFORE)) < 1e-5
    assert found[SECOND][OWN_WEIGHTS][1] < 1e-5 < found[SECOND][WEIGHTS_BEFORE][1]


def test_all_is_the_distance_from_one_large_batch() -> None:
    model = network(window=3)
    step, probe = trainer(model), FidelityProbe(model, every=6)
    for index in range(6):
        probe.step(batch(index))
        step(batch(index))
    plain = copy.deepcopy(model)
    crossbn.revert_(plain)
    with torch.no_grad():
        x = plain[:4](torch.cat([batch(4), batch(5)]))
    probe.step(batch(6))
    norm: Any = model[4]
    past = norm.segments[0].past()
    expected = [
        (past.compensated_mean[row] - x[part].mean((0, 2, 3))).abs() for row, part in ((0, slice(3, 6)), (1, slice(3)))
    ]
    errors = [record.mean_error for record in probe.causes if (record.layer, record.cause) == (SECOND, ALL)]
    scale = x.var((0, 2, 3), correction=0) + 1e-5
    assert sorted(errors) == pytest.approx(sorted(float((each / scale.sqrt()).mean()) for each in expected), rel=1e-3)


def test_table() -> None:
    found = causes(network(window=3), train="")
    table = cause_table(found)
    assert table.columns == (
        "layer",
        *(f"variance: {CAUSES[0]}", *CAUSES[1:], ALL),
        *(f"mean: {CAUSES[0]}", *CAUSES[1:], ALL),
    )
    assert [row[0] for row in table.rows] == [FIRST, SECOND]
    assert table.rows[1][4] == f"{100 * found[SECOND][ALL][1]:.1f}"
    assert table.rows[1][8] == f"{100 * found[SECOND][ALL][0]:.1f}"

"""Every implementation of a step against the reference in float64: one table of cases."""

import pytest
import torch

from crossbn import ops
from crossbn.ops import NotTheOperatorsOutput, Outcome
from tests.ops.cases import (
    CASES,
    Case,
    Found,
    Situation,
    assert_near,
    expected_of,
    found_in,
    gradients_in,
    remembered,
    situation,
)

DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def found_of(given: Situation, outcome: Outcome) -> Found:
    if outcome.commit is not None:
        outcome.commit()
    found = {**found_in(outcome.statistics, given.history, given.inputs), **remembered(given.history)}
    if outcome.output is not None:
        norm = given.norm
        found |= {"output": outcome.output, "running mean": norm.running_mean, "running var": norm.running_var}
        found["batches"] = norm.num_batches_tracked
    return {name: tensor.cpu().double() for name, tensor in found.items()}


def check(case: Case, given: Situation, outcome: Outcome, dtype: torch.dtype) -> None:
    expected, got = expected_of(case), found_of(given, outcome)
    if case.known_moments or outcome.output is None:
        assert "output" not in got
        unmoved = situation(case, dtype, given.inputs.x.device.type).norm
        assert torch.equal(given.norm.running_mean, unmoved.running_mean)
        assert int(given.norm.num_batches_tracked) == 5
    assert_near(got, expected, dtype)


@pytest.mark.parametrize("name", CASES)
@DTYPE
def test_compiled_code_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    given = situation(case, dtype)
    step = ops.cpu.step
    if case.raises:
        with pytest.raises(NotTheOperatorsOutput):
            step(given.inputs, given.history.past(), given.storage, given.settings)
        assert_near(remembered(given.history), remembered(situation(case, dtype).history), torch.float64)
        return
    outcome = step(given.inputs, given.history.past(), given.storage, given.settings)
    assert (outcome is not None) == case.compiled
    if outcome is None:  # nothing has happened: the reference does it
        assert torch.equal(given.norm.running_mean, situation(case, dtype).norm.running_mean)
        outcome = ops.step(given.inputs, given.history.past(), given.storage, given.settings)
    elif not case.known_moments:
        assert outcome.output is not None
    gradients = gradients_in(given, outcome.statistics, ops)
    assert_near(gradients, expected_of(case), dtype)
    check(case, given, outcome, dtype)


@pytest.mark.parametrize("name", CASES)
@DTYPE
def test_torch_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    """Without compiled code, in either type."""
    case = CASES[name]
    given = situation(case, dtype)
    with ops.library.switched_off():
        if case.raises:
            with pytest.raises(NotTheOperatorsOutput):
                ops.step(given.inputs, given.history.past(), given.storage, given.settings)
            return
        outcome = ops.step(given.inputs, given.history.past(), given.storage, given.settings)
    check(case, given, outcome, dtype)


@pytest.mark.parametrize("name", CASES)
def test_a_history_that_is_not_looked_at(name: str) -> None:
    """As on a GPU, which is not waited for: slots without a step are there, and take no part."""
    case = CASES[name]
    given = situation(case, torch.float64)
    past = given.history.past()._replace(is_readable=False)
    if case.raises:
        with pytest.raises(NotTheOperatorsOutput):
            ops.step(given.inputs, past, given.storage, given.settings)
        return
    check(case, given, ops.step(given.inputs, past, given.storage, given.settings), torch.float64)

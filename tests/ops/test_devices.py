"""Every implementation of a step against the reference in float64: one table of cases."""

import pytest
import torch
from torch import Tensor

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


def _last(x: Tensor, spare: int = 0) -> Tensor:
    """Return `x` with its channels next to each other, before `spare` others."""
    wide = x.new_full((x.shape[0], *x.shape[2:], x.shape[1] + spare), 7.0)
    wide[..., : x.shape[1]] = x.movedim(1, -1)
    return wide.movedim(-1, 1)[:, : x.shape[1]]


@pytest.mark.parametrize("which", ["both", "input", "output", "parts of others"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.compiled and len(case.shape) > 2])
def test_compiled_code_reads_channels_last(name: str, which: str) -> None:
    case, spare = CASES[name], 3 if which == "parts of others" else 0
    given = situation(case, torch.float32)
    x, operand = given.inputs.x, given.inputs.operands[0]
    assert operand.y is not None
    if which != "input":
        x = _last(x, spare)
    if which != "output":
        operand = operand._replace(y=_last(operand.y, spare), weight=_last(operand.weight))
    given = given._replace(inputs=given.inputs._replace(x=x, operands=[operand]))
    arguments = given.inputs, given.history.past(), given.storage, given.settings
    if case.raises:
        with pytest.raises(NotTheOperatorsOutput):
            ops.cpu.step(*arguments)
        return
    outcome = ops.cpu.step(*arguments)
    assert outcome is not None
    if outcome.output is not None and which != "input":
        assert outcome.output.movedim(1, -1).is_contiguous()
        assert not outcome.output._is_view()
    gradients = gradients_in(given, outcome.statistics, ops.cpu)
    assert_near(gradients, expected_of(case), torch.float32)
    check(case, given, outcome, torch.float32)


@pytest.mark.parametrize("channels", [1, 5, 300, 700])
def test_moments_of_channels_last(channels: int) -> None:
    x = torch.randn(3, channels, 20, 11, dtype=torch.float64) * 3 + 5
    found, expected = ops.cpu.moments(_last(x.float(), 2)), torch.var_mean(x, (0, 2, 3), correction=0)
    assert found is not None
    torch.testing.assert_close(torch.stack(found).double(), torch.stack(expected[::-1]), rtol=1e-6, atol=1e-6)


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

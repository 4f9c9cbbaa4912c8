"""The operator that torch.compile sees, on the same table of cases."""

import pytest
import torch

import crossbn
from crossbn import functional as C
from crossbn import ops
from crossbn.ops import compiled, reference
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
from tests.support import draw

DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def step(case: Case, given: Situation) -> Found:
    inputs, history, storage, settings, norm = given
    if storage is not None:
        positions = inputs.x.numel() // inputs.x.shape[1]
        history.fit_(storage.shapes(inputs.x.shape[1], positions))
    burnt, past = torch.zeros(()).long(), history.past()
    rest = inputs.bias, past, burnt, storage, settings
    found = compiled.step(inputs.x, inputs.operands, *rest, True, case.remember, None if case.known_moments else norm)
    got = {**found_in(found, history, inputs), **remembered(history)}
    if not case.known_moments and not case.raises:
        got |= {"running mean": norm.running_mean, "running var": norm.running_var, "batches": norm.num_batches_tracked}
    return {name: tensor.double() for name, tensor in got.items()}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.raises])
@DTYPE
def test_operator_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    got, expected = step(case, situation(case, dtype)), expected_of(case)
    before = situation(case, dtype).norm
    if not expected["var"].isfinite().all():  # nothing is learnt from it
        expected |= {"running mean": before.running_mean.double(), "batches": before.num_batches_tracked.double()}
    if not (expected["var"].isfinite() & (expected["has_variance"] != 0)).all():
        expected["running var"] = before.running_var.double()
    assert_near(got, expected, dtype)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.raises])
def test_output_of_another_operator_is_batchnorms_and_not_remembered(name: str) -> None:
    case = CASES[name]
    given = situation(case, torch.float64)
    with pytest.warns(crossbn.ConversionWarning, match="plain BatchNorm at a compiled step"):
        got = step(case, given)
    mean, var = C.batch_moments(given.inputs.x)
    expected = {**remembered(situation(case, torch.float64).history), "mean": mean, "var": var}
    expected["share"] = torch.ones_like(mean)
    assert_near({key: got[key] for key in expected}, expected, torch.float64)


@pytest.mark.parametrize(
    "name", ["convolution", "patches", "bias", "sum", "no compensation", "detached", "automatic weights"]
)
def test_its_fake_and_its_schema_are_right(name: str) -> None:
    case = CASES[name]
    inputs, history, _, settings, norm = situation(case, torch.float64)
    past = history.past()
    arguments = (
        inputs.x,
        [operand.y for operand in inputs.operands],
        [operand.weight for operand in inputs.operands],
        inputs.bias,
        list(past.rings.values()),
        past.num_steps,
        torch.zeros(()).long(),
        list(norm[:3]),
        compiled._numbers(settings, [operand.geometry for operand in inputs.operands]),
        settings.rate,
        "",
        norm.momentum,
        True,
        True,
    )
    done = torch.library.opcheck(torch.ops.crossbn.step.default, arguments)
    assert len(done) == 4
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", ["convolution", "patches", "bias", "sum", "no compensation"])
@pytest.mark.parametrize("is_last", [False, True], ids=["contiguous", "channels last"])
def test_backward_is_an_operator(name: str, is_last: bool) -> None:
    """With the right fake and schema, and the gradients of the reference."""
    case = CASES[name]
    inputs, history, storage, settings, norm = given = situation(case, torch.float64)
    x = inputs.x.to(memory_format=torch.channels_last) if is_last else inputs.x
    found = reference.step(inputs._replace(moments=C.batch_moments(x), norm=None), history.past(), storage, settings)
    statistics = found.statistics
    jacobians = [(0, each) for each in statistics.dependence.jacobians] if statistics.dependence is not None else []
    grad = draw(8, *x.shape, dtype=torch.float64).to(x)
    assert norm.gamma is not None
    vectors = statistics.mean, statistics.var, statistics.share
    arguments = grad, x, norm.gamma, *vectors, norm.eps, *compiled._flat(jacobians)
    done = torch.library.opcheck(torch.ops.crossbn.step_backward.default, arguments)
    assert set(done.values()) == {"SUCCESS"}
    got = compiled.step_backward(grad, x, norm.gamma, norm.eps, statistics, jacobians)
    expected = gradients_in(given, statistics, ops)
    assert_near(
        {f"gradient of {key}": getattr(got, key) for key in ("x", "gamma", "beta", "mean", "var")},
        expected,
        torch.float64,
    )
    for i, weight in enumerate(got.weights):
        assert_near({f"gradient of weight {i}": weight}, expected, torch.float64)

"""The operator that torch.compile sees, on the same table of cases."""

import pytest
import torch

import crossbn
from crossbn import functional as C
from crossbn.ops import compiled
from tests.ops.cases import CASES, Case, Found, Situation, assert_near, expected_of, found_in, remembered, situation

DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def step(case: Case, given: Situation) -> Found:
    inputs, history, storage, settings, _ = given
    if storage is not None:
        positions = inputs.x.numel() // inputs.x.shape[1]
        history.fit_(storage.shapes(inputs.x.shape[1], positions))
    burnt, past = torch.zeros(()).long(), history.past()
    rest = inputs.bias, past, burnt, storage, settings
    found = compiled.step(inputs.x, inputs.operands, *rest, True, case.remember)
    return {**found_in(found, history, inputs), **remembered(history)}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.raises])
@DTYPE
def test_operator_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    assert_near(step(case, situation(case, dtype)), expected_of(case), dtype)


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
    inputs, history, _, settings, _ = situation(case, torch.float64)
    past = history.past()
    arguments = (
        inputs.x,
        [operand.y for operand in inputs.operands],
        [operand.weight for operand in inputs.operands],
        inputs.bias,
        list(past.rings.values()),
        past.num_steps,
        torch.zeros(()).long(),
        compiled._numbers(settings, [operand.geometry for operand in inputs.operands]),
        settings.rate,
        "",
        True,
        True,
    )
    done = torch.library.opcheck(torch.ops.crossbn.step.default, arguments)
    assert len(done) == 4
    assert set(done.values()) == {"SUCCESS"}

"""Moments carried through activations, sums and operators, against integrals and derivatives in float64."""

import math

import pytest
import torch
from torch import Tensor, nn

from crossbn import functional as C
from crossbn.functional.carrying import moments_of

F64 = torch.float64
GRID = torch.linspace(-12, 12, 200_001, dtype=F64)
DENSITY = (-0.5 * GRID.square()).exp() / math.sqrt(2 * math.pi) * (GRID[1] - GRID[0])

ACTIVATIONS = [
    C.Activation("Relu"),
    C.Activation("LeakyRelu", (0.1,)),
    C.Activation("Hardtanh", (0.0, 6.0)),
    C.Activation("Hardsigmoid"),
    C.Activation("Silu"),
    C.Activation("Gelu", ("none",)),
    C.Activation("Hardswish"),
    C.Activation("Tanh"),
    C.Activation("Mish"),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda each: each.kind)
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-1.5, 0.4), (2.0, 1.3), (5.0, 2.0)])
def test_moments_of_an_activation_are_integrals(activation: C.Activation, mean: float, std: float) -> None:
    values = activation(mean + std * GRID)
    expected = float(values @ DENSITY)
    variance = float(values.square() @ DENSITY) - expected**2
    found = moments_of(activation, torch.tensor([mean], dtype=F64), torch.tensor([std], dtype=F64))
    exact = activation.kind in ("Relu", "LeakyRelu", "Hardtanh", "Hardsigmoid")
    tolerance = 1e-7 if exact else 5e-3
    assert float(found[0]) == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert float(found[1]) == pytest.approx(math.sqrt(variance), rel=tolerance, abs=tolerance)


torch.manual_seed(0)  # the operators' weights are the same in every process
OPERATORS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 4, bias=False), (9, 6)),
    "padded": (nn.Conv2d(6, 4, 3, padding=1, bias=False), (3, 6, 5, 7)),
    "strided": (nn.Conv2d(6, 4, 3, stride=2, padding=1, bias=False), (3, 6, 6, 7)),
    "grouped": (nn.Conv2d(6, 4, 3, groups=2, padding=1, bias=False), (3, 6, 5, 5)),
    "depthwise": (nn.Conv2d(6, 12, 3, groups=6, bias=False), (3, 6, 5, 5)),
    "transposed": (nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2, bias=False), (3, 6, 4, 4)),
    "sequence": (nn.Conv1d(6, 4, 5, padding=2, bias=False), (3, 6, 11)),
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", OPERATORS)
def test_other_inputs_change_moments_as_autograd_says(name: str, order: int) -> None:
    torch.manual_seed(0)
    operator, shape = OPERATORS[name]
    operator = operator.double()
    y = torch.randn(shape, dtype=F64) + torch.randn(1, shape[1], *[1] * (len(shape) - 2), dtype=F64)
    geometry, weight = C.geometry_of(operator), operator.get_parameter("weight").detach()
    flat = C.flatten_weight(weight, geometry)
    scale = torch.rand(shape[1], dtype=F64) + 0.5
    offset = torch.randn(shape[1], dtype=F64) if name != "transposed" else torch.zeros(shape[1], dtype=F64)

    def moments(by: Tensor, add: Tensor) -> Tensor:
        x = operator(C.channelwise(by, y) * y + C.channelwise(add, y))
        return torch.stack(C.batch_moments(x))

    one, none = torch.ones_like(scale), torch.zeros_like(offset)
    x = operator(y).detach()
    mean, var = C.batch_moments(x)
    storage = C.make_storage([geometry], C.Settings(positions=None, order=order))
    assert storage is not None
    operand = C.Operand(geometry, weight, y, x.shape[2:])
    row, agrees = storage.remember(C.Observation(x, mean, var, None, [operand], [flat], 0, None, True))
    assert agrees
    kept = {key: value.unsqueeze(0) for key, value in row.items()}
    inside = C.share_inside(geometry, tuple(shape[2:]), tuple(x.shape[2:]), F64, x.device)

    def terms(by: Tensor, add: Tensor) -> C.TaylorTerms:
        assert storage is not None
        return storage.look_back(C.move_inputs(kept, 0, geometry, inside, by[None], add[None]), [flat]).terms

    # The mean is linear in the inputs: whatever they become, it is exact.
    assert torch.allclose(terms(scale, offset).mean_shift[0], (moments(scale, offset) - moments(one, none))[0])
    found = terms(scale, none)
    moved_var = C.compensate(mean[None], var[None], found)[1][0]
    if order == 2:  # as is the variance of what is scaled: the polynomial has no more terms
        assert torch.allclose(moved_var, moments(scale, none)[1])
        return
    jacobian = torch.func.jacrev(lambda by: moments(by, none)[1])(one)
    assert torch.allclose(found.var_slope[0], jacobian @ (scale - 1))
    assert float(found.var_slope.abs().max()) > 0.01


def test_sums_and_maps() -> None:
    number = torch.tensor([3.0, 4.0])

    def of(mean: float, std: float, new_mean: float, new_std: float, number: Tensor) -> C.Carried:
        column = torch.ones(2, 1)
        return C.Carried(mean * column, std * column, new_mean * column, new_std * column, number)

    a, b = of(1, 3, 2, 6, number), of(1, 4, 1, 8, torch.tensor([3.0, 9.0]))
    both = a.plus(b)
    assert [float(each[0]) for each in both[:4]] == [2.0, 5.0, 3.0, 10.0]
    scale, offset = both.map_at(number)
    assert scale.tolist() == [[2.0], [1.0]]  # the second steps are not of the same forward
    assert offset.tolist() == [[-1.0], [0.0]]
    assert both.map_at(torch.zeros(2))[0].tolist() == [[1.0], [1.0]]  # unknown ones are never the same

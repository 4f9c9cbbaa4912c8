"""How pooled statistics follow weights and biases: gradients, and the polynomial they are the gradients of."""

import pytest
import torch
from torch import Tensor

from crossbn import functional as C

STEPS, ROWS, CHANNELS, SIZE = 2, 4, 6, 5
GROUPS = pytest.mark.parametrize("groups", [1, 2, 6])


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def jacobian(groups: int, equal: bool = False, rest: bool = False) -> C.Jacobian:
    of_mean = draw(1).expand(STEPS, 1) if equal else draw(STEPS, CHANNELS)
    return C.Jacobian(
        draw(STEPS, ROWS, groups, SIZE), of_mean, draw(STEPS, ROWS, CHANNELS), draw(CHANNELS, SIZE) if rest else None
    )


@GROUPS
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("rest", [True, False])
def test_weight_gradient_is_the_sum_that_it_says(groups: int, equal: bool, rest: bool) -> None:
    of, (a, v) = jacobian(groups, equal, rest), draw(2, CHANNELS)
    rows = of.rows.repeat_interleave(CHANNELS // groups, 2)  # [R, M, C, I]
    of_mean = torch.einsum("rc,rci->ci", of.mean_coefficient.expand(STEPS, CHANNELS), rows[:, 0])
    of_var = torch.einsum("rmc,rmci->ci", of.var_coefficient, rows)
    if of.var_jacobian is not None:
        of_var = of_var + of.var_jacobian
    torch.testing.assert_close(of.weight_gradient(a, v), a[:, None] * of_mean + v[:, None] * of_var)


@pytest.mark.parametrize("operators", [1, 2])
@pytest.mark.parametrize("has_bias", [True, False])
def test_tensors_and_back(operators: int, has_bias: bool) -> None:
    jacobians = tuple(jacobian(2, rest=bool(i)) for i in range(operators))
    of_bias = (draw(CHANNELS), draw(CHANNELS)) if has_bias else None
    whole = C.Dependence(jacobians, draw(STEPS, CHANNELS), of_bias, True, False)
    tensors = iter([*whole.tensors(), draw(1)])
    again = C.Dependence.of_tensors(tensors, operators, True, False)
    assert len(list(tensors)) == 1  # the next one's
    assert again.is_curved
    assert not again.is_centred
    for one, other in zip(again.tensors(), whole.tensors(), strict=True):
        assert one is other


@GROUPS
@pytest.mark.parametrize("is_curved", [True, False])
@pytest.mark.parametrize("is_centred", [True, False])
def test_changes_are_zero_and_have_these_gradients(groups: int, is_curved: bool, is_centred: bool) -> None:
    of = jacobian(groups, rest=True)
    # The bias moves every remembered mean alike, so the pooled one by their weights together.
    of_bias = of.mean_coefficient.sum(0), draw(CHANNELS)
    dependence = C.Dependence((of,), draw(STEPS, CHANNELS), of_bias, is_curved, is_centred)
    weight, bias = draw(CHANNELS, SIZE).requires_grad_(), draw(CHANNELS).requires_grad_()
    geometry = C.Geometry(CHANNELS, SIZE * groups, groups)
    of_mean, of_var = dependence.changes([geometry], [weight], [bias])
    assert not of_mean.any()
    assert not of_var.any()
    a, v = draw(2, CHANNELS)
    got = torch.autograd.grad((a * of_mean + v * of_var).sum(), [weight, bias])
    torch.testing.assert_close(got[0], of.weight_gradient(a, v))
    torch.testing.assert_close(got[1], dependence.bias_gradient(a, v))

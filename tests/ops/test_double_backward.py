"""The step written out: its output, its gradients, and those of its gradients."""

import pytest
import torch
from torch import Tensor

from crossbn import functional as C
from crossbn.ops.double_backward import changes, differentiable_output
from tests.functional.test_taylor import CHANNELS, GROUPS, SIZE, STEPS, draw, jacobian


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
    of_mean, of_var = changes(dependence, [geometry], [weight], [bias])
    assert not of_mean.any()
    assert not of_var.any()
    a, v = draw(2, CHANNELS)
    got = torch.autograd.grad((a * of_mean + v * of_var).sum(), [weight, bias])
    torch.testing.assert_close(got[0], of.weight_gradient(a, v))
    torch.testing.assert_close(got[1], dependence.bias_gradient(a, v))


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 5)], ids=str)
def test_output_with_a_graph_has_the_gradients_and_their_gradients(shape: tuple[int, ...]) -> None:
    """Where nothing else is followed and all is today's, it is BatchNorm."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gamma = torch.rand(3, dtype=torch.float64, requires_grad=True)
    mean, var = (each.detach() for each in C.batch_moments(x))
    nothing, all_ = torch.zeros(3, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    got = differentiable_output(x, mean, var, gamma, all_, 1e-5, nothing, nothing)
    expected = torch.nn.functional.batch_norm(x, None, None, gamma, None, True, 0.0, 1e-5)
    torch.testing.assert_close(got, expected)

    def twice(y: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y.sin().sum(), [x, gamma], create_graph=True)
        return *first, *torch.autograd.grad(first[0].square().sum() + first[1].pow(3).sum(), [x, gamma])

    torch.testing.assert_close(twice(got), twice(expected), rtol=1e-9, atol=1e-10)

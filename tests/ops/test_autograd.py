"""Normalization as a function of the input, gamma, beta and the operators' weights and biases, against autograd."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from crossbn import functional as C
from crossbn import ops
from crossbn.ops import PackedStatistics, Statistics, library
from crossbn.ops.autograd import Context, Run, attach, normalize
from tests.ops.cases import CASES, situation
from tests.support import compiled_code

SHARE, STEPS = 0.4, 2


class Example(NamedTuple):
    """Statistics that follow two weights, of channels 0 to 2 in two groups and of 2 to 4, and a bias of the latter."""

    leaves: list[Tensor]
    context: Context
    statistics: tuple[Tensor, Tensor]
    expected: Tensor


def example() -> Example:
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    gamma, beta = (torch.rand(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    past_mean, past_var = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    weights = [torch.randn(2, 3, 1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    runs, mean_change, var_change = [], [], []
    for i, groups in enumerate((2, 1)):
        rows = torch.randn(STEPS, 1, groups, 3, dtype=torch.float64)
        of_mean, of_var = torch.rand(STEPS, 2, dtype=torch.float64), torch.rand(STEPS, 1, 2, dtype=torch.float64)
        rest = torch.randn(2, 3, dtype=torch.float64)
        of_bias = (of_mean.sum(0), torch.rand(2, dtype=torch.float64)) if i else None
        dvar_dvar = torch.rand(STEPS, 2, dtype=torch.float64)
        jacobian = C.Jacobian(rows, of_mean, of_var, rest)
        dependence = C.Dependence((jacobian,), dvar_dvar, of_bias, False, True)
        statistics = Statistics(past_mean, past_var, torch.ones(1), dependence)  # of which the dependence is used
        geometry = C.Geometry(2, 3 * groups, groups, (1,), (1,), (1,), ((0, 0),))
        runs.append(Run(2 * i, 2 * i + 2, (geometry,), statistics, (None,)))
        whole = rows[:, 0].repeat_interleave(2 // groups, 1)  # [R, C, I]
        change = (weights[i] - weights[i].detach()).flatten(1)
        mean_change.append((torch.einsum("rc,rci->ci", of_mean, whole) * change).sum(1))
        var_change.append(((torch.einsum("rc,rci->ci", of_var[:, 0], whole) + rest) * change).sum(1))
        if of_bias is not None:
            mean_change[-1] = mean_change[-1] + of_bias[0] * (bias - bias.detach())
            var_change[-1] = var_change[-1] + of_bias[1] * (bias - bias.detach())
    pooled = SHARE * x.mean((0, 2)) + (1 - SHARE) * past_mean + torch.cat(mean_change)
    # d var / d pooled mean is 0 in the pooled form: the deviations sum to nothing.
    spread = SHARE * (x - pooled.detach()[:, None]).square().mean((0, 2)) + (1 - SHARE) * past_var
    var = spread + torch.cat(var_change)
    expected = (x - pooled[:, None]) / torch.sqrt(var + 1e-5)[:, None] * gamma[:, None] + beta[:, None]
    context = Context(torch.full((4,), SHARE, dtype=torch.float64), 1e-5, runs=tuple(runs))
    return Example([x, gamma, beta, *weights, bias], context, (pooled.detach(), var.detach()), expected)


def output_of(given: Example) -> Tensor:
    x, gamma, beta, first, second, bias = given.leaves
    return normalize(x, *given.statistics, gamma, beta, given.context, [first, None, second, bias])


@pytest.mark.parametrize("native", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients(native: bool, create_graph: bool) -> None:
    given = example()
    with compiled_code(native):
        got = output_of(given)
        torch.testing.assert_close(got, given.expected)
        grad = torch.randn_like(got)
        ours = torch.autograd.grad(got, given.leaves, grad, create_graph=create_graph)
    theirs = torch.autograd.grad(given.expected, given.leaves, grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("asked", [[0], [3], [5], [1, 4], [2, 3, 5]], ids=str)
def test_only_what_is_asked_for(asked: list[int]) -> None:
    given = example()
    for i, leaf in enumerate(given.leaves):
        leaf.requires_grad_(i in asked)
    wanted = [given.leaves[i] for i in asked]
    grad = torch.randn(3, 4, 5, dtype=torch.float64)
    ours = torch.autograd.grad(output_of(given), wanted, grad)
    theirs = torch.autograd.grad(given.expected, wanted, grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_values_of_the_weights_may_change_before_backward() -> None:
    """They are not read again, as those of torch's own operators are not where nothing needs them."""
    given = example()
    got, grad = output_of(given), torch.randn(3, 4, 5, dtype=torch.float64)
    expected = torch.autograd.grad(given.expected, given.leaves[3:], grad)
    with torch.no_grad():
        given.leaves[3].mul_(2)
    torch.testing.assert_close(torch.autograd.grad(got, given.leaves[3:], grad), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["convolution", "patches", "transposed", "automatic weights"])
@pytest.mark.parametrize("has_output", [True, False])
@pytest.mark.parametrize("has_gamma", [True, False])
@pytest.mark.parametrize("create_graph", [False, True])
def test_what_a_step_has_left_is_enough(name: str, has_output: bool, has_gamma: bool, create_graph: bool) -> None:
    """The short way of the usual case against the general one, which is given the same statistics taken apart."""
    inputs, history, storage, settings, norm = situation(CASES[name], torch.float64)
    gamma = norm.gamma if has_gamma else None
    inputs = inputs._replace(norm=norm._replace(gamma=gamma))
    found, _, output, _ = ops.step(inputs, history.past(), storage, settings)
    assert isinstance(found, PackedStatistics)
    assert output is not None
    assert norm.beta is not None
    x, beta, weight = (each.clone().requires_grad_() for each in (inputs.x, norm.beta, inputs.operands[0].weight))
    scale = None if gamma is None else gamma.clone().requires_grad_()
    leaves = [each for each in (x, scale, beta, weight) if each is not None]
    run = Run(0, x.shape[1], (inputs.operands[0].geometry,), found, (None,))
    short = attach(x, scale, beta, weight, run, norm.eps, "norm", output if has_output else None)
    context = Context(found.share, norm.eps, runs=(run,))
    general = normalize(x, found.mean, found.var, scale, beta, context, [weight, None])
    torch.testing.assert_close(short, general)
    assert (short.data_ptr() == output.data_ptr()) is has_output
    grad = torch.randn_like(short)
    with library.switched_off():
        expected = torch.autograd.grad(general, leaves, grad)
    got = torch.autograd.grad(short, leaves, grad, create_graph=create_graph)
    assert all(each.requires_grad is create_graph for each in got[:1])
    torch.testing.assert_close([each.detach() for each in got], list(expected), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["mean", "var", "gamma", "beta", "share"])
def test_vectors_of_a_wrong_size_are_refused(name: str) -> None:
    vectors = {each: torch.ones(4) for each in ("mean", "var", "gamma", "beta", "share")}
    vectors[name] = torch.ones(3)
    with pytest.raises(ValueError, match=r"must have the shape \(4,\).*, got \(3,\)"):
        normalize(
            torch.randn(2, 4, 3),
            vectors["mean"],
            vectors["var"],
            vectors["gamma"],
            vectors["beta"],
            Context(vectors["share"], 1e-5),
        )


def test_batched_gradients_are_refused() -> None:
    given = example()
    got = output_of(given)
    with pytest.raises(RuntimeError, match=r"batched gradients .* are not supported"):
        torch.autograd.grad(got, given.leaves[0], torch.ones(2, *got.shape).double(), is_grads_batched=True)

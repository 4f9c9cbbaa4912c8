"""A belief among the statistics that are pooled."""

import torch
from torch import Tensor

from crossbn import functional as C

F64 = torch.float64


def test_a_mixture_has_the_moments_of_what_is_mixed() -> None:
    torch.manual_seed(0)
    window, known = torch.randn(6, 3, dtype=F64), torch.randn(2, 3, dtype=F64) + 1
    together = torch.cat([window, known])
    mean, var, share, _ = C.blend(
        *(window.mean(0), window.var(0, correction=0), torch.tensor([0.5], dtype=F64), None),
        *((known.mean(0), known.var(0, correction=0)), torch.tensor([0.25], dtype=F64)),
    )
    torch.testing.assert_close(mean, together.mean(0))
    torch.testing.assert_close(var, together.var(0, correction=0))
    torch.testing.assert_close(share, torch.tensor([0.375], dtype=F64))


def test_gradients_reach_the_weights_through_a_belief_that_follows_them() -> None:
    """The oracle: pooled statistics and belief written as functions of the weights, differentiated by autograd."""
    torch.manual_seed(0)
    steps, channels, size, beta = 3, 4, 5, torch.tensor([0.3], dtype=F64)
    weight = torch.randn(channels, size, dtype=F64, requires_grad=True)
    rows, slopes = torch.randn(steps, 1, 1, size, dtype=F64), torch.randn(steps, channels, size, dtype=F64)
    past_mean, past_var = torch.randn(steps, channels, dtype=F64), 3 + torch.rand(steps, channels, dtype=F64)
    today = torch.randn(channels, dtype=F64), 1 + torch.rand(channels, dtype=F64)
    belief = torch.randn(channels, dtype=F64), 2 + torch.rand(channels, dtype=F64)
    relative = torch.tensor([0.9, 0.5, 0.2], dtype=F64)

    def pooled(weights: Tensor) -> tuple[C.Pooled, Tensor]:
        change = weights - weight.detach()
        shift = (rows[:, 0] * change).sum(2)
        slope = (slopes * change).sum(2)
        return C.pool(*today, past_mean + shift, past_var + slope - shift.square(), relative), shift

    found, shift = pooled(weight)
    now, _ = pooled(weight.detach())
    following = (now.weight / now.weight.sum(0) * shift).sum(0)
    grown = (found.var - now.var) / ((1 - now.share) * now.var)
    mean, var = belief[0] + following, belief[1] * (1 + grown)
    mixed_mean = (1 - beta) * found.mean + beta * mean
    mixed_var = (1 - beta) * found.var + beta * var + beta * (1 - beta) * (found.mean - mean).square()
    a, v = torch.randn(2, channels, dtype=F64)
    (expected,) = torch.autograd.grad((a * mixed_mean + v * mixed_var).sum(), weight)

    rest = (now.dvar_dvar.unsqueeze(2) * slopes).sum(0)
    jacobian = C.Jacobian(rows, now.weight, now.dvar_dmean.unsqueeze(1), rest)
    dependence = C.Dependence((jacobian,), now.dvar_dvar, None, False, True)
    *values, share, blended = C.blend(now.mean, now.var, now.share, dependence, belief, beta)
    torch.testing.assert_close(values, [mixed_mean.detach(), mixed_var.detach()])
    torch.testing.assert_close(share, 0.7 * now.share)
    assert blended is not None
    torch.testing.assert_close(blended.jacobians[0].weight_gradient(a, v), expected)


def test_a_belief_is_alone_until_weights_have_moved_and_noise_was_seen() -> None:
    share, drift = torch.tensor([0.25]), torch.tensor(0.02)
    assert float(C.belief_weight(torch.tensor(0.0), 0.08, share)) == 1
    assert float(C.belief_weight(drift, 0.0, share)) == 1
    assert float(C.belief_weight(drift, torch.tensor(0.08), share)) == 0.5
    assert float(C.belief_weight(100 * drift, 0.08, share)) < 0.01


def test_the_way_is_what_is_left_of_it() -> None:
    way, one, var = torch.zeros(2, 1), torch.ones(1), torch.tensor([4.0])
    there = C.travelled(way, one, 0.6 * one, var, 0.0)
    torch.testing.assert_close(there, torch.tensor([[0.5], [0.3]]))
    assert float(C.drift_of(C.travelled(there, -one, -0.6 * one, var, 0.0))) < 1e-12

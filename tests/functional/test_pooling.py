"""Pooling of today's moments with the remembered ones, against plain arithmetic and autograd."""

import pytest
import torch
from torch import Tensor

from crossbn import functional as C

CPU = torch.device("cpu")
F64 = torch.float64


def test_pooled_variance_does_not_cancel() -> None:
    """A mean of a million and a variance of one, in float32: second moments would lose the variance altogether."""
    mean, var = torch.tensor([1e6]), torch.tensor([1.0])
    pooled = C.pool(mean, var, torch.tensor([[1e6 + 1]]), torch.tensor([[1.0]]), torch.ones(1))
    torch.testing.assert_close(pooled.mean, torch.tensor([1e6 + 0.5]), rtol=0, atol=0.1)
    torch.testing.assert_close(pooled.var, torch.tensor([1.25]))


@pytest.mark.parametrize(("invalid", "mean", "var", "share"), [("max", 2.0, 2.0, 0.5), ("drop", 1.0, 2.0, 1.0)])
def test_invalid_entries(invalid: str, mean: float, var: float, share: float) -> None:
    today, past = torch.tensor([1.0]), torch.tensor([[3.0]])
    pooled = C.pool(today, torch.tensor([2.0]), past, torch.tensor([[-0.5]]), torch.ones(1), invalid)
    assert (pooled.mean.item(), pooled.var.item(), pooled.share.item()) == (mean, var, share)


def test_absent_entries_do_not_count() -> None:
    pooled = C.pool(torch.tensor([1.0]), torch.tensor([2.0]), torch.ones(3, 1), torch.ones(3, 1), torch.zeros(3))
    assert (pooled.mean.item(), pooled.var.item(), pooled.share.item()) == (1.0, 2.0, 1.0)


@pytest.mark.parametrize("invalid", ["max", "drop"])
@pytest.mark.parametrize("present", [None, torch.tensor([1.0, 0.5, 0.25])])
def test_pooled_variance_does_not_feel_a_large_mean(invalid: str, present: torch.Tensor | None) -> None:
    past_mean, past_var = torch.randint(-4, 5, (3, 6)).float(), torch.rand(3, 6)
    mean, var = torch.zeros(6), torch.rand(6)
    near, far = (C.pool(mean + by, var, past_mean + by, past_var, present, invalid) for by in (0, 2.0**22))
    assert torch.equal(near.var, far.var)
    torch.testing.assert_close(far.mean, near.mean + 2.0**22)


@pytest.mark.parametrize("sizes", [[4], [4, 4], [3, 5, 2]], ids=str)
def test_pooled_moments_are_those_of_all_batches_of_one_size(sizes: list[int]) -> None:
    """Batches count the same; repeated until they are equally large they are one batch."""
    batches = [torch.randn(size, 3).double() for size in sizes]
    moments = [C.batch_moments(batch) for batch in batches]
    whole = torch.cat([batch.repeat(60 // len(batch), 1) for batch in batches])
    past = [torch.stack([moment[i] for moment in moments[1:]]) if moments[1:] else torch.empty(0, 3) for i in (0, 1)]
    pooled = C.pool(*moments[0], past[0].double(), past[1].double())
    torch.testing.assert_close(pooled[:2], C.batch_moments(whole), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pooled.share, torch.tensor([1 / len(sizes)]).double())


@pytest.mark.parametrize("invalid", ["max", "drop"])
@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 0.0]], ids=str)
def test_derivatives(invalid: str, weights: list[float] | None) -> None:
    mean, var = torch.randn(4).double(), torch.rand(4).double()
    past_mean = torch.randn(3, 4).double().requires_grad_()
    past_var = (torch.rand(3, 4).double() - 0.3).requires_grad_()
    step_weights = None if weights is None else torch.tensor(weights).double()

    def pooled(past_mean: torch.Tensor, past_var: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = C.pool(mean, var, past_mean, past_var, step_weights, invalid)
        return found.mean, found.var

    with torch.no_grad():
        found = C.pool(mean, var, past_mean, past_var, step_weights, invalid)
    assert (past_var < 0).any()
    of_mean = torch.autograd.grad(pooled(past_mean, past_var)[0].sum(), past_mean)[0]
    of_var = torch.autograd.grad(pooled(past_mean, past_var)[1].sum(), [past_mean, past_var])
    torch.testing.assert_close(found.weight.expand(3, 4), of_mean)
    torch.testing.assert_close((found.dvar_dmean, found.dvar_dvar), of_var)
    torch.testing.assert_close(found.share + found.weight.sum(0), torch.ones_like(found.share))


@pytest.mark.parametrize(
    ("steps", "slot", "decay", "relative"),
    [
        (0, 0, 0.5, []),
        (1, 1, 0.5, [0.5]),
        (3, 0, 0.5, [0.125, 0.25, 0.5]),
        (3, 1, 0.5, [0.5, 0.125, 0.25]),
        (3, 2, 0.1, [0.01, 0.1, 0.001]),
    ],
)
def test_weights_by_age(steps: int, slot: int, decay: float, relative: list[float]) -> None:
    found = C.weights_by_age(steps, slot, decay, torch.float64, CPU)
    assert found.relative is not None
    assert found.relative.tolist() == pytest.approx(relative)
    assert found.share.item() == pytest.approx(1 / (1 + sum(relative)))
    assert found.weight.flatten().tolist() == pytest.approx([each / (1 + sum(relative)) for each in relative])


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_equal_weights(steps: int) -> None:
    relative, weight, share = C.weights_by_age(steps, 0, 1.0, torch.float64, CPU)
    assert relative is None
    assert weight.flatten().tolist() == [1 / (1 + steps)] * steps
    assert share.tolist() == [1 / (1 + steps)]


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


def test_a_belief_drifts_as_something_that_wanders() -> None:
    one, var = torch.ones(1), torch.tensor([4.0])
    there = C.drifted(torch.zeros(()), one, 0.6 * one, var, 0.0)
    torch.testing.assert_close(there, torch.tensor(0.5**2 + 0.3**2))
    back = C.drifted(there, -one, -0.6 * one, var, 0.0)
    torch.testing.assert_close(back, 2 * there)
    of_two = C.drifted(torch.zeros(()), torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([4.0, 1.0]), 0.0)
    torch.testing.assert_close(of_two, torch.tensor(0.5**2 / 2))  # the mean over channels

"""Moments of a remembered step at other weights, products that have to cancel, and gradients of pooled statistics."""

import pytest
import torch
from torch import Tensor

from crossbn import functional as C

# Channels, numbers of a patch, groups; the last ones are no small weights.
WEIGHTS = [(8, 27, 1), (16, 9, 1), (64, 147, 1), (32, 9, 32), (12, 18, 4), (1, 7, 1), (64, 2304, 1)]


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_a_mean_patch_has_the_same_product_in_any_number_of_steps(weight: tuple[int, int, int], steps: int) -> None:
    channels, size, groups = weight
    flat = torch.rand(channels, size) + 0.5
    mean_grad = 1e4 * torch.rand(steps, groups, size)
    one_by_one = torch.cat([C.project_means(each.unsqueeze(0), flat) for each in mean_grad])
    assert torch.equal(C.project_means(mean_grad, flat), one_by_one)
    torch.testing.assert_close(one_by_one, C.project(mean_grad, flat))


@pytest.mark.parametrize("weight", WEIGHTS[:-1], ids=str)
def test_rows_of_several_steps(weight: tuple[int, int, int]) -> None:
    channels, size, groups = weight
    flat, rows = torch.rand(channels, size) + 0.5, torch.randn(3, 5, groups, size)
    rows[:, 0] += 1e4
    products = C.project_steps(rows, flat)
    torch.testing.assert_close(products, C.project(rows.flatten(0, 1), flat).reshape(3, 5, channels))
    for each, row in zip(products, rows, strict=True):
        assert torch.equal(C.project_steps(row.clone().unsqueeze(0), flat)[0, 0], each[0])


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_project_and_spread_are_adjoint(groups: int) -> None:
    """And are what they say: <row, W_j>, and the sum of rows with coefficients."""
    rows, flat = torch.randn(5, groups, 7).double(), torch.randn(6, 7).double()
    coefficient = torch.randn(5, 6).double()
    whole = rows.repeat_interleave(6 // groups, 1)  # [M, C, I]
    torch.testing.assert_close(C.project(rows, flat), torch.einsum("mci,ci->mc", whole, flat))
    torch.testing.assert_close(C.spread(coefficient, rows), torch.einsum("mc,mci->ci", coefficient, whole))
    torch.testing.assert_close((C.project(rows, flat) * coefficient).sum(), (C.spread(coefficient, rows) * flat).sum())


TERMS: dict[str, tuple[C.TaylorTerms, list[float], list[float]]] = {
    # Of a mean of 1 and 2, and a variance of 4 and 1.
    "unchanged": (C.TaylorTerms(torch.zeros(1, 2), torch.zeros(1, 2)), [1, 2], [4, 1]),
    "mean": (C.TaylorTerms(torch.tensor([[0.5, -1.0]]), torch.zeros(1, 2)), [1.5, 1], [3.75, 0]),
    "variance": (C.TaylorTerms(torch.zeros(1, 2), torch.tensor([[1.0, -3.0]])), [1, 2], [5, -2]),
    "second order": (
        C.TaylorTerms(torch.tensor([[0.5, -1.0]]), torch.tensor([[1.0, -3.0]]), torch.tensor([[0.25, 4.0]])),
        [1.5, 1],
        [5, 1],
    ),
}


@pytest.mark.parametrize("name", TERMS)
def test_compensation_by_hand(name: str) -> None:
    terms, mean, var = TERMS[name]
    got = C.compensate(torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, 1.0]]), terms)
    torch.testing.assert_close(got, (torch.tensor([mean]).float(), torch.tensor([var]).float()), rtol=0, atol=0)


def test_second_order_is_exact() -> None:
    """The moments are a polynomial of that order in the weights: of x = W y with any W."""
    y, before, after = torch.randn(50, 3).double(), torch.randn(4, 3).double(), torch.randn(4, 3).double()

    def moments(weight: Tensor) -> tuple[Tensor, Tensor]:
        return C.batch_moments(y @ weight.mT)

    mean, var = moments(before)
    change = after - before
    shift, slope = ((each * change).sum((1, 2)) for each in torch.func.jacrev(moments)(before))
    of_second_moment = ((y @ change.mT).square()).mean(0)
    got = C.compensate(mean[None], var[None], C.TaylorTerms(shift[None], slope[None], of_second_moment[None]))
    torch.testing.assert_close((got[0][0], got[1][0]), moments(after), rtol=1e-12, atol=1e-12)


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

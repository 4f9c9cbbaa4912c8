"""How much remembered steps weigh, against what costs least by linear algebra."""

import pytest
import torch
from torch import Tensor

from crossbn import functional as C
from crossbn.functional import weighting

F64 = torch.float64


def least_cost(noise: float, drift: float, count: Tensor, price: float) -> Tensor:
    """Weights by age, today's first, that sum to 1 and cost least, by the linear system that Lagrange wrote: [k]."""
    ages = torch.arange(len(count), dtype=F64)
    quadratic = noise * torch.diag(count[1:].mean() / count)
    quadratic += drift * torch.minimum(ages.unsqueeze(0), ages.unsqueeze(1))
    linear = torch.zeros_like(count)
    quadratic[0, 0] += price  # (1 - w_0)^2 = 1 - 2 w_0 + w_0^2
    linear[0] = price
    system = torch.zeros(len(count) + 1, len(count) + 1, dtype=F64)
    system[:-1, :-1], system[-1, :-1], system[:-1, -1] = quadratic, 1, 1
    return torch.linalg.solve(system, torch.cat([linear, torch.ones(1, dtype=F64)]))[:-1]


@pytest.mark.parametrize("noise", [0.4, 0.05, 1e-4])
@pytest.mark.parametrize("drift", [0.0, 0.002, 0.3])
@pytest.mark.parametrize("counts", [[4, 4, 4, 4, 4], [2, 4, 4, 4, 4], [4, 4, 2, 6, 1]])
def test_weights_cost_least(noise: float, drift: float, counts: list[float]) -> None:
    count = torch.tensor(counts, dtype=F64)
    relative = C.best_weights(torch.tensor(noise, dtype=F64), torch.tensor(drift, dtype=F64), count[1:], counts[0])
    weights = torch.cat([torch.ones(1, dtype=F64), relative]) / (1 + relative.sum())
    torch.testing.assert_close(weights, least_cost(noise, drift, count, weighting.GRADIENT_PRICE))


@pytest.mark.parametrize(
    ("variogram", "present", "noise", "drift"),
    [
        ([0.5, 0.75, 1.0, 1.25], [1, 1, 1, 1], 0.125, 0.25),
        ([0.5, 0.75, 9.0, 9.0], [1, 1, 0, 0], 0.125, 0.25),
        ([0.8, 0.6, 0.7], [1, 1, 1], 0.35, 0.0),  # falling: no drift
        ([0.0, 0.0, 0.6], [1, 1, 1], 0.0, 0.1286),  # no noise would be left: through zero
        ([0.3, 0.0], [1, 0], 0.15, 0.0),
        ([0.0, 0.0], [1, 1], 0.0, 0.0),
    ],
)
def test_line(variogram: list[float], present: list[float], noise: float, drift: float) -> None:
    found = C.fit_line(torch.tensor(variogram, dtype=F64), torch.tensor(present, dtype=F64))
    torch.testing.assert_close(torch.stack(found), torch.tensor([noise, drift], dtype=F64), rtol=0, atol=1e-4)


def test_without_drift_and_with_much_noise_weights_are_those_of_the_examples() -> None:
    weights = C.best_weights(torch.tensor(1e6, dtype=F64), torch.tensor(0.0, dtype=F64), torch.tensor([6.0, 3, 6]), 3)
    torch.testing.assert_close(weights, torch.tensor([2.0, 1, 2], dtype=F64), check_dtype=False, rtol=1e-6, atol=0)


def test_without_noise_or_with_much_drift_only_today_counts() -> None:
    count, zero, large = torch.full((3,), 8.0), torch.tensor(0.0), torch.tensor(1e9)
    assert float(C.best_weights(zero, zero, count, 8).sum()) < 1e-6
    assert float(C.best_weights(torch.tensor(0.1), large, count, 8).sum()) < 1e-6


def test_infinite_differences_do_not_stay() -> None:
    big = torch.tensor([1e30])
    found = C.squared_differences(big, big, -big.unsqueeze(0), big.unsqueeze(0), torch.tensor([float("inf")]))
    assert torch.equal(found, torch.tensor([weighting.LARGEST_DIFFERENCE]))

"""Products that have to cancel, and pooling of what is large."""

import pytest
import torch

from crossbn import functional as C

# Channels, numbers of a patch, groups; the last ones are split, and no small weights.
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


@pytest.mark.parametrize("invalid", ["max", "drop"])
@pytest.mark.parametrize("present", [None, torch.tensor([1.0, 0.5, 0.25])])
def test_pooled_variance_does_not_feel_a_large_mean(invalid: str, present: torch.Tensor | None) -> None:
    past_mean, past_var = torch.randint(-4, 5, (3, 6)).float(), torch.rand(3, 6)
    mean, var = torch.zeros(6), torch.rand(6)
    near, far = (C.pool(mean + by, var, past_mean + by, past_var, present, invalid) for by in (0, 2.0**22))
    assert torch.equal(near.var, far.var)
    torch.testing.assert_close(far.mean, near.mean + 2.0**22)

"""Moments of a batch, of several together, and whether they are finite."""

import pytest
import torch

from crossbn import functional as C

SHAPES = [(3, 5), (2, 3, 7), (2, 4, 5, 6), (1, 2, 3, 4, 5), (4, 40, 33, 33)]  # the last one is large


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_graph", [False, True])
def test_moments_are_those_in_float64(shape: tuple[int, ...], dtype: torch.dtype, with_graph: bool) -> None:
    x = (3 * torch.randn(shape) + 5).to(dtype).requires_grad_(with_graph)
    flat = x.detach().double().movedim(1, 0).flatten(1)
    mean, var = C.batch_moments(x)
    assert mean.dtype == var.dtype == C.accumulation_dtype(dtype)
    assert mean.requires_grad == with_graph
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(mean.double(), flat.mean(1), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(var.double(), flat.var(1, correction=0), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_all_finite(bad: float) -> None:
    x = torch.zeros(1000)
    assert C.all_finite(x, x) is True
    x[-1] = bad
    assert C.all_finite(torch.zeros(3), x) is False


def test_large_numbers_are_finite_though_their_sum_is_not() -> None:
    assert C.all_finite(torch.full((4,), 3e38)) is True


def test_joined_moments_are_those_of_the_whole() -> None:
    parts = [torch.randn(n, 4, 3, dtype=torch.float64) + n for n in (1, 5, 2)]
    moments = [C.batch_moments(part) for part in parts]
    counts = torch.tensor([part.numel() // 4 for part in parts])
    got = C.join_moments(torch.stack([m for m, _ in moments]), torch.stack([v for _, v in moments]), counts)
    torch.testing.assert_close(got, C.batch_moments(torch.cat(parts)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("values", [[[1.0, 2.0]], [[1.0], [3e38, 3e38]], [[1.0, torch.inf]], [[0.0], [torch.nan, 1.0]]])
def test_all_finite_where_nothing_is_looked_at(values: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; a sum would overflow where no number is infinite."""
    tensors = [torch.tensor(each) for each in values]
    expected = all(bool(each.isfinite().all()) for each in tensors)
    assert C.all_finite(*tensors) is expected
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    flag = C.all_finite(*tensors)
    assert isinstance(flag, torch.Tensor)
    assert bool(flag) is expected

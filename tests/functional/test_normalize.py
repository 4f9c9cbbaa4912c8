"""Both halves of the backward: written out, and as the native kernels of SyncBatchNorm would be called."""

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from crossbn import functional as C
from crossbn.functional import kernels


def native_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *wanted: bool
) -> tuple[Tensor | None, ...]:
    """What torch says `batch_norm_backward_reduce` returns: two sums and the parameters' gradients, as wanted."""
    dims = [0, *range(2, x.ndim)]
    product = (grad * (x - kernels.channelwise(mean, x))).sum(dims)
    sums = (grad.sum(dims), product) if wanted[0] else (None, None)
    return *sums, product * invstd if wanted[1] else None, grad.sum(dims) * weight.new_ones(()) if wanted[2] else None


def native_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    sum_grad: Tensor,
    sum_product: Tensor,
    counts: Tensor,
) -> Tensor:
    """What torch says `batch_norm_backward_elemt` returns."""
    assert counts.dtype == torch.int32
    n = counts.sum()
    mean, invstd, weight, sum_grad, sum_product = (
        kernels.channelwise(each, x) for each in (mean, invstd, weight, sum_grad, sum_product)
    )
    return (grad - sum_grad / n - (x - mean) * invstd.square() * sum_product / n) * invstd * weight


@pytest.fixture(params=["blended", "written out", "native"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Choose which of the three ways to the same gradient is taken; compiled code, a fourth, has tests of its own."""
    name: str = request.param
    if name != "blended":
        monkeypatch.setattr(sys.modules[C.normalize.__module__], "native_available", lambda _: True)
    if name == "native":
        monkeypatch.setattr(kernels, "native_available", lambda _: True)
        monkeypatch.setattr(torch, "batch_norm_backward_reduce", native_reduce)
        monkeypatch.setattr(torch, "batch_norm_backward_elemt", native_elemt)
    with library.switched_off():
        yield name


@pytest.mark.parametrize("share", [1.0, 0.25, [1.0, 0.5, 0.25, 0.2]])
@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 5), (2, 4, 3, 5)])
@pytest.mark.usefixtures("kind")
def test_gradient_of_the_input(shape: tuple[int, ...], share: float | list[float]) -> None:
    """Against autograd through the plain formula, today's batch having a share of the statistics."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gamma, beta = (torch.rand(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    past_mean, past_var = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    shares = torch.tensor(share, dtype=torch.float64).expand(4)
    dims = [0, *range(2, x.ndim)]

    def pooled() -> tuple[Tensor, Tensor]:
        own_mean, own_var = x.mean(dims), x.var(dims, correction=0)
        mean = shares * own_mean + (1 - shares) * past_mean
        var = shares * own_var + (1 - shares) * past_var
        return mean, var + shares * (1 - shares) * (own_mean - past_mean).square()

    mean, var = pooled()
    scale = gamma / torch.sqrt(var + 1e-5)
    expected = (x - kernels.channelwise(mean, x)) * kernels.channelwise(scale, x) + kernels.channelwise(beta, x)
    got = C.normalize(x, mean.detach(), var.detach(), shares, gamma, beta)
    torch.testing.assert_close(got, expected)
    towards = torch.randn_like(got)
    leaves = [x, gamma, beta]
    for ours, theirs in zip(
        torch.autograd.grad((got * towards).sum(), leaves),
        torch.autograd.grad((expected * towards).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_native_kernels_are_for_the_gpu_only() -> None:
    assert not kernels.native_available(torch.ones(1))

"""The gradients of the normalization: blended from torch's, written out, and by the kernel of SyncBatchNorm."""

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from crossbn import functional as C
from crossbn.functional.moments import native_available


def native_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *wanted: bool
) -> tuple[Tensor | None, ...]:
    """What torch says `batch_norm_backward_reduce` returns: two sums and the parameters' gradients, as wanted."""
    dims = [0, *range(2, x.ndim)]
    product = (grad * (x - C.channelwise(mean, x))).sum(dims)
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
        C.channelwise(each, x) for each in (mean, invstd, weight, sum_grad, sum_product)
    )
    return (grad - sum_grad / n - (x - mean) * invstd.square() * sum_product / n) * invstd * weight


@pytest.fixture(params=["blended", "of a group", "native"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose which of the three ways to the same gradient is taken."""
    if request.param == "of a group":  # of this process alone
        of_group: Any = partial(C.gradients, group=cast(Any, object()))
        monkeypatch.setattr(C, "gradients", of_group)
        monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
    if request.param == "native":
        monkeypatch.setattr("crossbn.functional.normalize.native_available", lambda _: True)
        monkeypatch.setattr(torch, "batch_norm_backward_reduce", native_reduce)
        monkeypatch.setattr(torch, "batch_norm_backward_elemt", native_elemt)


@pytest.mark.parametrize("share", [1.0, 0.25, [1.0, 0.5, 0.25, 0.2]], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 5), (2, 4, 3, 5)], ids=str)
@pytest.mark.usefixtures("_kind")
def test_gradients_are_those_of_the_formula(shape: tuple[int, ...], share: float | list[float]) -> None:
    """Against autograd through the plain formula, today's batch having a share of the statistics."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gamma, beta = (torch.rand(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    past_mean, past_var = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    shares = torch.tensor(share, dtype=torch.float64).expand(4).contiguous()
    added = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    dims = [0, *range(2, x.ndim)]
    own_mean, own_var = x.mean(dims), x.var(dims, correction=0)
    mean = shares * own_mean + (1 - shares) * past_mean
    var = shares * own_var + (1 - shares) * past_var + shares * (1 - shares) * (own_mean - past_mean).square()
    # Gradients of mean and variance are those of what is added to them, the input's own part left out.
    scale = gamma / torch.sqrt(var + added[1] + 1e-5)
    expected = (x - C.channelwise(mean + added[0], x)) * C.channelwise(scale, x) + C.channelwise(beta, x)
    mean, var = mean.detach(), var.detach()
    torch.testing.assert_close(C.normalized(x, mean, var, gamma, beta, 1e-5), expected)
    grad = torch.randn_like(expected)
    count = torch.tensor(x.numel() // 4)
    got = C.gradients(grad, x.detach(), mean, var, shares, gamma.detach(), 1e-5, count=count)
    of_x, of_gamma, of_beta, of_added = torch.autograd.grad(expected, [x, gamma, beta, added], grad)
    wanted = {"x": of_x, "gamma": of_gamma, "beta": of_beta, "mean": of_added[0], "var": of_added[1]}
    for name, want in wanted.items():
        torch.testing.assert_close(getattr(got, name), want, rtol=1e-9, atol=1e-11, msg=partial("{}: {}".format, name))


def test_a_lone_position_is_beta() -> None:
    """Its own mean is taken off before anything is rounded."""
    x, beta = torch.tensor([[1e7, 3.3]]), torch.tensor([0.25, -1.0])
    got = C.normalized(x, x[0], torch.zeros(2), torch.ones(2), beta, 1e-5)
    assert torch.equal(got[0], beta)


def test_native_kernels_are_for_the_gpu_only() -> None:
    assert not native_available(torch.ones(1))

"""Closed-form sensitivities and pooling against autograd and plain arithmetic."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from crossbn import functional as C
from tests.nn.test_oracle import OPERATORS, functional_form


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_the_moments(name: str) -> None:
    make, shape = OPERATORS[name]
    torch.manual_seed(0)
    module = make().double()
    geometry, operator = C.geometry_of(module), functional_form(module)
    y = torch.randn(3, *shape, dtype=torch.float64) + 0.5
    weight = module.get_parameter("weight").detach()

    def mean_and_var(w: Tensor) -> tuple[Tensor, Tensor]:
        flat = operator(y, w).movedim(1, 0).flatten(1)
        return flat.mean(1), flat.var(1, correction=0)

    mean_jacobian, var_jacobian = torch.func.jacrev(mean_and_var)(weight)
    x = operator(y, weight)
    mean, _ = C.batch_moments(x)
    channels = range(geometry.out_channels)
    flat_mean = torch.stack([C.flatten_weight(mean_jacobian[j], geometry)[j] for j in channels])
    flat_var = torch.stack([C.flatten_weight(var_jacobian[j], geometry)[j] for j in channels])
    flat = C.flatten_weight(weight, geometry)
    shared = C.mean_grad(y, geometry, x.shape[2:]).repeat_interleave(geometry.out_channels // geometry.groups, 0)
    torch.testing.assert_close(shared, flat_mean, rtol=1e-10, atol=1e-12)
    # The variance's gradient at fixed mean is that of the second moment less 2 mean d(mean): the total is the same.
    torch.testing.assert_close(C.var_grad(x, mean, y, flat, geometry), flat_var, rtol=1e-9, atol=1e-11)
    everywhere = C.sample_places(len(x), x.shape[2:].numel(), None, 0, x.device)
    centred = (C.outputs_at(x, everywhere) - mean) * (2 * x.shape[1] / x.numel())
    patches = C.patches_at(y, geometry, everywhere, x.shape[2:])
    torch.testing.assert_close(C.spread(centred, patches), flat_var, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(C.project(patches, flat), C.outputs_at(x, everywhere), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(C.unflatten_weight(flat, geometry), weight, rtol=0, atol=0)


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


def test_joined_moments_are_those_of_the_whole() -> None:
    parts = [torch.randn(n, 4, 3, dtype=torch.float64) + n for n in (1, 5, 2)]
    moments = [C.batch_moments(part) for part in parts]
    counts = torch.tensor([part.numel() // 4 for part in parts])
    got = C.join_moments(torch.stack([m for m, _ in moments]), torch.stack([v for _, v in moments]), counts)
    torch.testing.assert_close(got, C.batch_moments(torch.cat(parts)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("batch", "space"), [(1, 7), (4, 15), (61, 1)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_position_is_visited_equally_often(batch: int, space: int, as_tensor: bool) -> None:
    counts = torch.zeros(batch, space)
    for step in range(batch * space):
        places = C.sample_places(batch, space, 5, torch.tensor(step) if as_tensor else step, counts.device)
        assert len({*zip(*(each.tolist() for each in places), strict=True)}) == 5
        counts.index_put_(tuple(places), torch.ones(5), accumulate=True)
    assert torch.equal(counts, torch.full((batch, space), 5.0))


class Recorder:
    """A link that makes the weight's gradient of what is sent to it."""

    def __init__(self, start: int, stop: int, jacobian: C.Jacobian) -> None:
        self.start, self.stop, self._jacobian = start, stop, jacobian
        self.weight_gradient: Tensor | None = None

    def take_tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(self._jacobian)

    def deliver(self, tensors: Sequence[Tensor | None], grad_mean: Tensor, grad_var: Tensor) -> None:
        self.weight_gradient = C.Jacobian(*tensors).weight_gradient(grad_mean, grad_var)  # type: ignore[arg-type]  # as taken

    def follow(self, tensors: Sequence[Tensor | None]) -> Any:
        raise NotImplementedError

    def deliver_gradients(self, gradients: Sequence[tuple[Tensor | None, Tensor | None]]) -> None:
        raise NotImplementedError


def test_gradients_of_normalize_and_follow_weight() -> None:
    """Against autograd through the plain formula, with the statistics' own graph."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    gamma, beta = (torch.rand(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    flat = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    mean_grad, coefficients = torch.randn(2, 2, 6, dtype=torch.float64), torch.rand(2, 2, 4, dtype=torch.float64)
    jacobian = torch.randn(4, 6, dtype=torch.float64)
    past_mean, past_var = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    share = 0.4

    def plain() -> Tensor:
        m = x.mean((0, 2))
        mean_jacobian = torch.einsum("rgo,rgi->goi", coefficients[0].unflatten(1, (2, 2)), mean_grad).flatten(0, 1)
        var_jacobian = torch.einsum("rgo,rgi->goi", coefficients[1].unflatten(1, (2, 2)), mean_grad).flatten(0, 1)
        change = flat - flat.detach()
        pooled = share * m + (1 - share) * past_mean + (change * mean_jacobian).sum(1)
        # d var / d pooled mean is 0 in the pooled form: the deviations sum to nothing.
        spread = share * (x - pooled.detach()[:, None]).square().mean((0, 2)) + (1 - share) * past_var
        var = spread + (change * (var_jacobian + jacobian)).sum(1)
        return (x - pooled[:, None]) / torch.sqrt(var + 1e-5)[:, None] * gamma[:, None] + beta[:, None]

    with torch.no_grad():
        m = x.mean((0, 2))
        mean = share * m + (1 - share) * past_mean
        var = share * (x - mean[:, None]).square().mean((0, 2)) + (1 - share) * past_var
    jacobians = C.Jacobian(mean_grad.unsqueeze(1), coefficients[0], coefficients[1].unsqueeze(1), jacobian)
    shares = torch.full((4,), share, dtype=torch.float64)
    expected = plain()
    leaves = [x, gamma, beta, flat]
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    followed = C.follow_weight(mean, var, flat, C.Geometry(4, 12, groups=2), jacobians)
    got = C.normalize(x, *followed, shares, gamma, beta)
    torch.testing.assert_close(got, expected)
    for ours, theirs in zip(torch.autograd.grad((got * weights).sum(), leaves), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    # The same through links, one for each half of the channels.
    halves = [
        C.Jacobian(
            j[0][:, :, i : i + 1], j[1][:, 2 * i : 2 * i + 2], j[2][..., 2 * i : 2 * i + 2], jacobian[2 * i :][:2]
        )
        for i, j in enumerate([jacobians] * 2)
    ]
    links = [Recorder(0, 2, halves[0]), Recorder(2, 4, halves[1])]
    got = C.normalize_step(x, mean, var, gamma, beta, C.Context(shares, 1e-5, links=tuple(links)))
    torch.testing.assert_close(got, expected)
    assert links[0].weight_gradient is None
    for ours, theirs in zip(torch.autograd.grad((got * weights).sum(), leaves[:3]), gradients[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    sent = [link.weight_gradient for link in links]
    torch.testing.assert_close(torch.cat([part for part in sent if part is not None]), gradients[3], rtol=1e-9, atol=0)


@pytest.mark.parametrize("entries", [0, 2**13])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_mean_patch_of_large_maps(
    mode: Literal["zeros", "reflect", "replicate", "circular"],
    stride: int,
    entries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one go, from the sums at the edges, and dimension by dimension."""
    monkeypatch.setattr("crossbn.functional.taps._SMALL_TABLE_ENTRIES", entries)
    conv = torch.nn.Conv2d(4, 6, (3, 5), stride=stride, padding=(1, 2), dilation=(2, 1), groups=2, padding_mode=mode)
    geometry = C.geometry_of(conv)
    y = torch.randn(2, 4, 32, 40, dtype=torch.float64)  # large enough for the edges to be a small part
    sizes = conv.float()(y.float()).shape[2:]
    patches = C.patches_at(y, geometry, C.sample_places(2, sizes.numel(), None, 0, y.device), sizes)
    torch.testing.assert_close(C.mean_grad(y, geometry, sizes), patches.mean(0), rtol=0, atol=1e-13)

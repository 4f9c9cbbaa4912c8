"""Where the layer equals BatchNorm or a recomputation, to the last bit or to rounding; low precision, layouts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn
from crossbn import functional as C
from crossbn import nn as cnn
from tests.support import move_alike_

EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-12}

SHAPES: dict[str, tuple[type[nn.Module], type[cnn.CrossIterBatchNorm], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, cnn.CrossIterBatchNorm1d, (4, 3)),
    "1d with length": (nn.BatchNorm1d, cnn.CrossIterBatchNorm1d, (2, 3, 7)),
    "2d": (nn.BatchNorm2d, cnn.CrossIterBatchNorm2d, (2, 3, 5, 4)),
    "3d": (nn.BatchNorm3d, cnn.CrossIterBatchNorm3d, (2, 3, 3, 4, 2)),
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "bfloat16": lambda x: x.bfloat16(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every second": lambda x: torch.stack([x, 7 * x], -1).flatten(-2)[..., ::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


def run(norm: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Output, gradients and buffers after one training step."""
    x = x.detach().requires_grad_()
    norm.zero_grad()
    out = norm(x)
    weights = torch.arange(out.numel(), dtype=torch.float32).cos().reshape(out.shape)
    (out * weights).sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in norm.parameters())]
    return [out.detach(), *grads, *(buffer.clone() for buffer in norm.buffers())]


def assert_equal(got: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.3}],
    ids=str,
)
@pytest.mark.parametrize("window", [1, 4])
def test_is_batchnorm_bit_for_bit(shape: str, layout: str, options: dict[str, Any], window: int) -> None:
    """With window 1 always, else while burning in."""
    plain_kind, kind, sizes = SHAPES[shape]
    plain = plain_kind(3, **options)
    norm = kind(3, **options, window=window, burn_in=0 if window == 1 else 3)
    for parameter, other in zip(norm.parameters(), plain.parameters(), strict=True):
        nn.init.uniform_(parameter)
        other.data.copy_(parameter.data)
    for _ in range(3):
        x = LAYOUTS[layout](2 * torch.randn(sizes) + 1)
        assert_equal(run(norm, x), run(plain, x))


def test_pools_after_burn_in() -> None:
    norm, plain = cnn.CrossIterBatchNorm2d(3, window=2, burn_in=3, weights="equal").double(), nn.BatchNorm2d(3).double()
    batches = [torch.randn(2, 3, 4, 4, dtype=torch.float64) + i for i in range(5)]
    for x in batches[:3]:
        assert torch.equal(norm(x), plain(x))
    torch.testing.assert_close(norm(batches[3]), plain(batches[3]), **EXACT)  # nothing to pool with yet
    torch.testing.assert_close(norm(batches[4]), plain(torch.cat(batches[3:]))[2:], **EXACT)


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 6), nn.BatchNorm1d, (4,)),
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d, (4, 9)),
    "2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.BatchNorm2d, (4, 7, 6)),
    "3d": (lambda: nn.Conv3d(4, 6, 2, dilation=(1, 2, 1)), nn.BatchNorm3d, (4, 3, 4, 3)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.BatchNorm2d,
        (4, 4, 3),
    ),
}


def networks(name: str, **options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """The same operator and norm, converted and not."""
    make, norm, _ = CONVOLUTIONS[name]
    plain = nn.Sequential(make(), norm(6)).double()
    nn.init.uniform_(plain[1].weight)  # type: ignore[arg-type]
    nn.init.uniform_(plain[1].bias)  # type: ignore[arg-type]
    model = copy.deepcopy(plain)
    report = crossbn.convert_(model, weights="equal", **options)
    assert len(report.left) == 0
    return model, plain


def batch(name: str, amount: int = 3) -> Tensor:
    return torch.randn(amount, *CONVOLUTIONS[name][2], dtype=torch.float64) + 0.5


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("positions", [None, 9])
def test_frozen_weights_pool_like_one_large_batch(name: str, order: int, positions: int | None) -> None:
    model, plain = networks(name, window=3, order=order, positions=positions)
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.requires_grad_(False)
    batches = [batch(name) for _ in range(6)]
    for i, x in enumerate(batches):
        together = torch.cat(batches[max(0, i - 2) : i + 1])
        torch.testing.assert_close(model(x), plain(together)[-len(x) :], **EXACT)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_running_statistics_are_those_of_the_window(name: str) -> None:
    model, plain = networks(name, window=3)
    batches = [batch(name) for _ in range(5)]
    for i, x in enumerate(batches):
        model(x)
        plain(torch.cat(batches[max(0, i - 2) : i + 1]))
    for key, buffer in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], buffer, **EXACT)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_second_order_equals_recomputation(name: str) -> None:
    """However far the weights of the operator move, and whatever the batch sizes were."""
    model, plain = networks(name, window=3, order=2, positions=None)
    batches = [batch(name, amount) for amount in (3, 3, 3, 3)]
    for i, x in enumerate(batches):
        move_alike_(model[0], plain[0], size=2)
        together = torch.cat(batches[max(0, i - 2) : i + 1])
        torch.testing.assert_close(model(x), plain(together)[-len(x) :], rtol=0, atol=1e-11)


@pytest.mark.parametrize("total", [7, 24, 15, 1, 64])
@pytest.mark.parametrize("amount", [1, 3, 10])
def test_phases_visit_every_position_equally(total: int, amount: int) -> None:
    visits = torch.zeros(total, dtype=torch.int64)
    for step in range(total):
        _, positions = C.sample_places(1, total, amount, step, visits.device)
        assert len(positions) == min(amount, total)
        visits.index_add_(0, positions, torch.ones_like(positions))
    assert (visits == min(amount, total)).all()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", [name for name in CONVOLUTIONS if name != "linear"])
def test_sampled_gradient_is_unbiased(name: str, layout: torch.memory_format) -> None:
    module = CONVOLUTIONS[name][0]().double()
    y = batch(name)
    if layout == torch.channels_last and y.ndim != 4:
        layout = torch.channels_last_3d if y.ndim == 5 else torch.contiguous_format
    y = y.contiguous(memory_format=layout)
    x = module(y).detach().contiguous(memory_format=layout)
    geometry, (mean, _) = C.geometry_of(module), C.batch_moments(x)
    mean_patch, total = C.mean_grad(y, geometry, x.shape[2:]), x.numel() // x.shape[1]
    estimates = []
    for step in range(total):
        places = C.sample_places(len(x), x.shape[2:].numel(), 5, step, x.device)
        patches = C.patches_at(y, geometry, places, x.shape[2:]) - mean_patch
        estimates.append(C.spread((C.outputs_at(x, places) - mean) * (2 / 5), patches))
    weight = C.flatten_weight(module.get_parameter("weight").detach(), geometry)
    full = C.var_grad(x, mean, y, weight, geometry)
    torch.testing.assert_close(torch.stack(estimates).mean(0), full, rtol=0, atol=1e-12)
    assert not torch.allclose(estimates[0], full, atol=1e-3)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, stride=2, groups=2),
        nn.BatchNorm2d(4),
    )


def train(model: nn.Module, change: Callable[[Tensor], Tensor] = lambda x: x, steps: int = 5) -> list[Tensor]:
    """Outputs and final parameters and running statistics of a few optimizer steps."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    outputs = []
    for _ in range(steps):
        x = change(torch.randn(2, 3, 9, 9, generator=generator, dtype=torch.float64))
        out = model(x)
        outputs.append(out.detach())
        optimizer.zero_grad()
        (out * torch.arange(out.numel(), dtype=torch.float32).cos().reshape(out.shape)).sum().backward()
        optimizer.step()
    return [*outputs, *(tensor.detach() for tensor in (*model.parameters(), *model.buffers()))]


def test_bfloat16_autocast() -> None:
    """The same types as with BatchNorm, and no more error than its own."""

    def runs(convert: bool) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
        low, exact = chain(), chain()
        if convert:
            for each in (low, exact):
                crossbn.convert_(each, window=3, positions=16)
        with torch.autocast("cpu", torch.bfloat16):
            got = train(low, torch.Tensor.float)
        return low, got, train(exact, torch.Tensor.float)

    model, ours, ours_exact = runs(convert=True)
    _, theirs, theirs_exact = runs(convert=False)
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in theirs]
    assert {tensor.dtype for tensor in crossbn.history_state(model).values()} == {torch.float32, torch.int64}
    for tensor, exact, other, other_exact in zip(ours, ours_exact, theirs, theirs_exact, strict=True):
        assert tensor.isfinite().all()
        assert (tensor - exact).abs().max() <= 2 * (other - other_exact).abs().max() + 1e-3


def test_bfloat16_statistics_are_of_full_precision() -> None:
    """The mean of values that bfloat16 spaces by 2, of which there are too many for bfloat16 sums."""
    norm = cnn.CrossIterBatchNorm2d(1, window=3, momentum=1.0, weights="equal")
    x = torch.randint(250, 500, (4, 1, 64, 64)).bfloat16()
    norm(x)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_mean, x.double().mean().float().reshape(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(norm.running_var, x.double().var().float().reshape(1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("positions", [None, 16])
@pytest.mark.parametrize("order", [1, 2])
def test_memory_layout_changes_nothing(positions: int | None, order: int) -> None:
    results: list[list[Tensor]] = []
    for change in (
        lambda x: x,
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        model = chain().double()
        crossbn.convert_(model, window=3, positions=positions, order=order, weights="equal")
        if len(results) == 1:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its stubs
        results.append(train(model, change))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-10, atol=1e-10)
    assert results[1][0].is_contiguous(memory_format=torch.channels_last)


def test_large_mean_does_not_cancel() -> None:
    """A mean a thousand times the deviation costs float32 what it costs BatchNorm, not its square."""
    x = [torch.randn(2, 3, 8, 8, dtype=torch.float64) + 1000 for _ in range(3)]
    norm = cnn.CrossIterBatchNorm2d(3, window=3, weights="equal")
    for each in x:
        out = norm(each.float())
    joined = torch.cat([each.float().double() for each in x])
    expected = F.batch_norm(joined, None, None, training=True)[-2:]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)

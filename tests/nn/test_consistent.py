"""Remembered steps are moved to today's statistics of the norms before, against the same images run together."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn
from crossbn.nn import CrossIterBatchNorm
from crossbn.pairing.carrying import carried_to

F64, WINDOW, STEPS = torch.float64, 4, 9


def images(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    contrast = torch.rand(2, 3, 1, 1, generator=generator, dtype=F64) + 0.5
    brightness = torch.randn(2, 3, 1, 1, generator=generator, dtype=F64)
    return torch.randn(2, 3, 10, 10, generator=generator, dtype=F64) * contrast + brightness


def unit(before: int, after: int, activation: Callable[[], nn.Module], taps: int = 3) -> list[nn.Module]:
    return [nn.Conv2d(before, after, taps, padding=taps // 2, bias=False), nn.BatchNorm2d(after), activation()]


def plain(activation: Callable[[], nn.Module] = nn.ReLU, depth: int = 5, taps: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for i in range(depth) for m in unit(8 if i else 3, 8, activation, taps))).double()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def residual() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*unit(3, 8, nn.ReLU), nn.MaxPool2d(2), Residual(), Residual()).double()


def errors(model: nn.Sequential, consistent: bool, steps: int = STEPS) -> list[float]:
    """Of the means that norms normalize with at the last step, in standard deviations, norm by norm."""
    together = copy.deepcopy(model)
    for norm in together.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 1.0
    together(torch.cat([images(step) for step in range(steps - WINDOW, steps)]))
    crossbn.convert_(model, window=WINDOW, positions=None, weights="equal", consistent=consistent, order=2)
    norms = [norm for norm in model.modules() if isinstance(norm, CrossIterBatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    for step in range(steps):
        model(images(step))
    truths = [norm for norm in together.modules() if isinstance(norm, nn.BatchNorm2d)]
    return [_distance(norm, truth) for norm, truth in zip(norms, truths, strict=True)]


def _distance(norm: Any, truth: Any) -> float:
    return float(((norm.running_mean - truth.running_mean).square() / truth.running_var).mean().sqrt())


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Hardswish, nn.LeakyReLU])
def test_pooled_means_are_those_of_one_batch(activation: Callable[[], nn.Module]) -> None:
    without, found = errors(plain(activation), False), errors(plain(activation), True)
    assert found[0] < 1e-12  # nothing is before it
    assert min(without[1:]) > 0.02
    assert max(found[1:]) < 0.35 * max(without[1:])


def test_without_an_activation_means_are_exact() -> None:
    without, found = (errors(plain(nn.Identity, taps=1), consistent) for consistent in (False, True))
    assert max(found) < 1e-10
    assert min(without[1:]) > 0.02


def test_residual_sums_and_pooling() -> None:
    without, found = errors(residual(), False), errors(residual(), True)
    assert max(found[1:]) < 0.5 * max(without[1:])


def test_gradients_are_those_through_moved_patches() -> None:
    """Against autograd with both batches at hand, which is exact where nothing is between norm and operator."""
    model = plain(nn.Identity, depth=2, taps=1)
    # Of the second order there is nothing that the polynomial lacks.
    crossbn.convert_(model, window=2, positions=None, weights="equal", consistent=True, order=2)
    model(images(0))
    conv1, _, _, conv2, *_ = model
    assert isinstance(conv2, nn.Conv2d)
    model(images(1)).square().sum().backward()
    found = conv2.weight.grad
    # The same with both batches at hand; what is remembered has no gradient into the layers before.
    both = conv1(torch.cat([images(1), images(0)]))
    z = F.batch_norm(both, None, None, training=True)
    weight = conv2.weight.detach().requires_grad_()
    x = F.conv2d(torch.cat([z[:2], z[2:].detach()]), weight)
    old, mean = x[2:], x[:2].mean((0, 2, 3))
    mean = (mean + old.mean((0, 2, 3))) / 2
    var = (x - mean[None, :, None, None]).square().mean((0, 2, 3))
    y = (x[:2] - mean[None, :, None, None]) / (var + 1e-5).sqrt()[None, :, None, None]
    y.square().sum().backward()
    assert found is not None
    assert weight.grad is not None
    torch.testing.assert_close(found, weight.grad, rtol=1e-6, atol=1e-8)


def test_steps_of_other_forwards_are_left_as_they_are() -> None:
    model = plain(depth=2)
    crossbn.convert_(model, window=WINDOW, positions=None, weights="equal", consistent=True, order=2)
    for step in range(STEPS):
        model(images(step))
    other = copy.deepcopy(model)
    norm: Any = other[1]
    norm.segments[0].history["number"].add_(100)
    crossbn.load_history_state(copied := copy.deepcopy(model), crossbn.history_state(model))
    outputs = [each(images(STEPS)) for each in (model, copied, other)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


def test_what_is_not_known_is_not_carried() -> None:
    model = plain(depth=1)
    crossbn.convert_(model, window=2, consistent=True, order=2)
    model(images(0))
    y = model(images(1))
    known = y + 1.0 * y.detach()  # a term without a graph
    assert carried_to(y.exp().grad_fn) is not None
    assert carried_to(known.exp().grad_fn) is None
    assert carried_to(y.cumsum(1).exp().grad_fn) is None


@pytest.mark.parametrize("options", [{"order": 0}, {"order": 1}, {"order": 2, "prior": "running"}])
def test_settings_that_exclude_it(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="consistent"):
        crossbn.convert_(plain(), window=4, consistent=True, **options)


def test_it_is_said_to_be_an_experiment() -> None:
    with pytest.warns(crossbn.ConversionWarning, match="experiment: its steps take several times as long"):
        crossbn.convert_(plain(depth=1), window=4, consistent=True, order=2)

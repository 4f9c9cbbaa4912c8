"""Compiled code against torch's operators, which do the same without it."""

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn
from crossbn import functional as C
from crossbn import ops
from crossbn.convert import cross_iteration_norms
from crossbn.ops import Statistics, StepInputs, cpu, library
from crossbn.ops.autograd import Context, normalize
from tests.support import descend_, draw

DTYPES = [torch.float32, torch.float64]
SHAPES = [(3, 5), (2, 3, 7), (2, 4, 5, 6), (1, 2, 3, 4, 5), (4, 40, 33, 33)]  # the last one on several threads


def close(got: Tensor, want: Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def twice(function: Callable[[], tuple[Tensor, ...]]) -> None:
    """Run with compiled code and without, and compare."""
    got = function()
    with library.switched_off():
        wanted = function()
    for one, other in zip(got, wanted, strict=True):
        close(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_moments(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = 3 * torch.randn(shape, dtype=dtype) + 5
    twice(lambda: ops.moments(x))
    if shape[1] > 3:
        twice(lambda: ops.moments(x[:, 1:3]))  # images are not next to each other


def test_moments_far_from_zero() -> None:
    x = torch.randn(4, 2, 64, 64, dtype=torch.float64) + 1e4
    mean, var = ops.moments(x.float())
    torch.testing.assert_close(mean, x.float().double().mean([0, 2, 3]).float(), rtol=1e-7, atol=0)
    torch.testing.assert_close(var, x.float().double().var([0, 2, 3], correction=0).float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared", [True, False])
def test_backward(shape: tuple[int, ...], dtype: torch.dtype, shared: bool) -> None:
    torch.manual_seed(0)
    channels = shape[1]
    x, output_grad = torch.randn(shape, dtype=dtype) + 1, torch.randn(shape, dtype=dtype)
    mean, gamma, beta = torch.randn(3, channels, dtype=dtype)
    var, share = torch.rand(channels, dtype=dtype) + 0.5, torch.rand(1 if shared else channels, dtype=dtype)
    leaves = [leaf.clone().requires_grad_() for leaf in (x, mean, var, gamma, beta)]

    def gradients() -> tuple[Tensor, ...]:
        x, mean, var, gamma, beta = leaves
        y = normalize(x, mean, var, gamma, beta, Context(share, 1e-5))
        return torch.autograd.grad(y, leaves, output_grad)

    twice(gradients)


@pytest.mark.parametrize("groups", [1, 2, 12])
@pytest.mark.parametrize("rows", [1, 3, 130])  # the last ones are more than are added at once
@pytest.mark.parametrize("size", [5, 37, 1100])
@pytest.mark.parametrize("equal", [True, False])
def test_weight_gradient(groups: int, rows: int, size: int, equal: bool) -> None:
    torch.manual_seed(0)
    channels, draw = 12, partial(torch.randn, dtype=torch.float64)
    weight = draw(1).expand(2, 1) if equal else draw(2, channels)
    rest = draw(channels, size) if rows == 1 else None
    jacobian = C.Jacobian(draw(2, rows, groups, size), weight, draw(2, rows, channels), rest)
    x, grad, share = draw(4, channels + 3, 2), draw(4, channels + 3, 2), draw(1).abs()
    mean, gamma = draw(2, channels + 3)
    var = draw(channels + 3).abs() + 0.5
    found = ops.step_backward(grad, x, gamma, 1e-5, Statistics(mean, var, share, None), [(3, jacobian)])
    expected = C.gradients(grad, x, mean, var, share, gamma, 1e-5, [(3, jacobian)])
    close(found.weights[0], expected.weights[0])
    close(found.weights[0], jacobian.weight_gradient(found.mean[3:], found.var[3:]))
    for name in ("x", "gamma", "beta", "mean", "var"):
        close(getattr(found, name), getattr(expected, name))


class Dense(nn.Module):
    """Norms that read several producers, and producers that several norms read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 6, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(10), nn.Conv2d(10, 80, 3, stride=2, groups=2, bias=False)
        self.norm3, self.conv3 = nn.BatchNorm2d(80), nn.Conv2d(80, 80, 3, bias=False)
        self.norm4 = nn.BatchNorm2d(80)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cat([x, self.conv1(F.relu(self.norm1(x)))], 1)
        x = self.conv2(F.relu(self.norm2(x), inplace=True))
        return F.relu(self.norm4(self.conv3(F.relu(self.norm3(x), inplace=True))))


def train(network: nn.Module, channels: int = 3, **options: Any) -> tuple[Tensor, ...]:
    """Train in float64; return everything that has come of it."""
    torch.manual_seed(1)
    network = copy.deepcopy(network).double()
    crossbn.convert_(network, window=4, **options)
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    scores = []
    for step in range(7):
        images = torch.randn(2 + step % 3, channels, 11 - step % 2, 10, dtype=torch.float64)
        scores.append(network(images))
        optimizer.zero_grad()
        scores[-1].square().mean().backward()
        optimizer.step()
    history = [value for _, value in sorted(crossbn.history_state(network).items()) if isinstance(value, Tensor)]
    return *scores, *network.state_dict().values(), *history


def test_a_training_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    seen: list[str] = []
    step = cpu.step

    def watch(inputs: StepInputs, past: Any, storage: C.Storage, settings: C.Settings) -> Any:
        found = step(inputs, past, storage, settings)
        if found is not None:
            seen.append(f"{type(storage).__name__}{' and output' * (found.output is not None)}")
        return found

    monkeypatch.setattr(cpu, "step", watch)
    network = Dense()
    twice(lambda: train(network))
    # At seven steps each of four producers once, the last one, of a large weight, as patches; one of them is first
    # asked for by a norm that reads two.
    assert Counter(seen) == {"GradientStorage": 7, "GradientStorage and output": 14, "PatchStorage and output": 7}


@pytest.mark.parametrize(
    ("conv", "storage"),
    {
        "a long patch of an odd size": (nn.Conv2d(117, 35, 3, bias=False), "PatchStorage"),
        "groups of channels that are no multiple of four": (nn.Conv2d(80, 92, 3, groups=2, bias=False), "PatchStorage"),
        "all channels of a group in one": (nn.Conv2d(40, 120, 5, groups=20, bias=False), "GradientStorage"),
        "more positions than are added at once": (nn.Conv2d(6, 9, 1, bias=False), "GradientStorage"),
    }.values(),
)
@pytest.mark.parametrize("threads", [1, 3])
def test_weights_of_all_shapes(conv: nn.Conv2d, storage: str, threads: int) -> None:
    network = nn.Sequential(conv, nn.BatchNorm2d(conv.out_channels))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        twice(lambda: train(network, conv.in_channels, positions=400))
        crossbn.convert_(network, window=4, positions=400)
        assert type(cross_iteration_norms(network)["1"].segments[0].storage).__name__ == storage
    finally:
        crossbn.revert_(network)
        torch.set_num_threads(before)


def test_a_weight_that_is_part_of_another_tensor() -> None:
    torch.manual_seed(0)
    linear, whole = nn.Linear(10, 6, bias=False), torch.randn(6, 20, dtype=torch.float64)

    def train_on() -> tuple[Tensor, ...]:
        linear.weight = nn.Parameter(whole.clone()[:, :10])
        network = nn.Sequential(linear, nn.BatchNorm1d(6, dtype=torch.float64))
        crossbn.convert_(network, window=3)
        scores = []
        for step in range(4):
            scores.append(network(draw(step, 4, 10, dtype=torch.float64)))
            (grad,) = torch.autograd.grad(scores[-1].pow(3).sum(), linear.weight)
            linear.weight.data -= 0.01 * grad
        return tuple(scores)

    twice(train_on)


def steps_of(network: nn.Module, count: int, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Train on; return the outputs."""
    outputs = []
    for step in range(count):
        outputs.append(network(draw(step, *shape, dtype=dtype)))
        network.zero_grad()
        outputs[-1].pow(3).sum().backward()
        descend_(network, 0.001)
    return tuple(output.double() for output in outputs)


def converted(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(*copy.deepcopy(layers)).double()
    crossbn.convert_(network, window=3)
    return network


def test_a_change_of_type() -> None:
    def both() -> tuple[Tensor, ...]:
        network = converted(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        steps_of(network.float(), 3, 2, 3, 6, 6, dtype=torch.float32)
        crossbn.reset_history_(network)
        return steps_of(network.double(), 3, 2, 3, 6, 6)

    for one, other in zip(both(), _without(both), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # the first steps were of float32


def _without(function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    with library.switched_off():
        return function()


def test_layouts_are_not_of_the_history() -> None:
    def arranged(layout: torch.memory_format, *layers: nn.Module) -> nn.Module:
        network = converted(*layers)
        return network.to(memory_format=layout)  # type: ignore[call-overload]  # torch's types lack it

    flat = nn.Linear(300, 128, bias=False), nn.BatchNorm1d(128)  # so large that it keeps patches
    twice(lambda: steps_of(arranged(torch.channels_last, *flat), 4, 6, 300))
    deep = nn.Conv3d(40, 40, 3, bias=False), nn.BatchNorm3d(40)
    twice(lambda: steps_of(arranged(torch.channels_last_3d, *deep), 4, 2, 40, 3, 4, 4))


def test_channels_last_is_compiled_codes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights that are laid out so too; concatenations included, and outputs stay as the inputs are."""
    torch.manual_seed(0)
    network = Dense()
    expected = train(network)
    for of, name in ((ops.reference, "step"), (C, "gradients"), (C.Jacobian, "weight_gradient")):
        monkeypatch.setattr(of, name, None)
    got = train(network.to(memory_format=torch.channels_last))  # type: ignore[call-overload]  # torch's types lack it
    assert got[0].is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_another_default_device() -> None:
    """Neither that step nor what is kept of it for later ones is there."""
    images = torch.ones(2, 3, 13, 11, dtype=torch.float64)  # a size that no other test has: nothing is known of it

    def outputs() -> tuple[Tensor, ...]:
        network = converted(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
        steps_of(network, 2, 2, 3, 6, 6)
        with torch.device("meta"):
            first = network(images)
        return first, network(2 * images)

    twice(outputs)


def test_a_weight_of_another_size_in_its_place() -> None:
    """Its steps are others': a new history begins, the old one takes no part."""
    network = converted(nn.Conv2d(8, 4, 3, bias=False), nn.BatchNorm2d(4))
    steps_of(network, 2, 2, 8, 6, 6)
    weight = network[0].weight
    assert isinstance(weight, Tensor)
    weight.data = weight.data[:, :4].clone()
    fresh = converted(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4))
    fresh.load_state_dict(network.state_dict())
    for got, expected in zip(steps_of(network, 3, 2, 4, 6, 6), steps_of(fresh, 3, 2, 4, 6, 6), strict=True):
        close(got, expected)


def test_an_infinite_input_that_the_output_skips_is_not_remembered() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 4, 1, stride=2, bias=False)
    network = nn.Sequential(conv, nn.BatchNorm2d(4))
    crossbn.convert_(network, window=3)
    images = torch.randn(2, 2, 5, 5)
    network(images)
    before = copy.deepcopy(crossbn.history_state(network))
    bad = images.clone()
    bad[0, 0, 0, 1] = torch.inf
    y = network(bad)
    assert torch.isfinite(y).all()
    after = crossbn.history_state(network)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    network(images)
    assert not all(torch.equal(value, after[name]) for name, value in crossbn.history_state(network).items())

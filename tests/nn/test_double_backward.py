"""Gradients of gradients through pooled statistics: Hessians, gradient penalties, against plain torch in float64."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import functional as AF
from torch.func import functional_call, jacrev

import crossbn
from tests.reference.cross_iteration import moments
from tests.support import move_

Weights = dict[str, Tensor]


class Concatenation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 2, 3, bias=False), nn.Conv2d(2, 1, 3)

    def forward(self, y: Tensor) -> Tensor:
        return torch.cat([self.a(y), self.b(y.tanh())], 1)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.Conv2d(2, 3, 1)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.a(y) + self.b(y)
        return out


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = y + self.conv(y)
        return out


BODIES: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(3, 8, 3, bias=False), 8, (3, 5, 5)),
    "bias": (lambda: nn.Conv2d(2, 3, 3), 3, (2, 5, 4)),
    "linear": (lambda: nn.Linear(4, 3), 3, (4,)),
    "depthwise": (lambda: nn.Conv2d(3, 6, 3, groups=3, bias=False), 6, (3, 4, 5)),
    "concatenation": (Concatenation, 3, (2, 4, 4)),
    "sum": (Sum, 3, (2, 4, 4)),
    "residual": (Residual, 2, (2, 4, 4)),
}
BODY = pytest.mark.parametrize("body", BODIES)
ORDER = pytest.mark.parametrize("order", [1, 2])


class Reference:
    """Pooled moments as a function of today's weights, written so that autograd can differentiate it at will."""

    def __init__(self, body: nn.Module, order: int) -> None:
        self.body, self.order = copy.deepcopy(body), order
        self.past: list[tuple[Weights, Tensor]] = []

    def output(self, weights: Weights, y: Tensor) -> Tensor:
        out: Tensor = functional_call(self.body, {k[2:]: w for k, w in weights.items() if k[0] == "0"}, (y,))
        return out

    def past_moments(self, weights: Weights, then: Weights, y: Tensor) -> tuple[Tensor, Tensor]:
        """The moments of a remembered batch at today's weights: to first order, or exactly."""
        nothing = torch.zeros_like(y)
        bias = self.output(weights, nothing).movedim(1, 0).flatten(1).mean(1)

        def unbiased(weights: Weights) -> tuple[Tensor, Tensor]:
            return moments(self.output(weights, y) - self.output(weights, nothing))

        if self.order == 2:
            mean, second = unbiased(weights)
        else:
            mean, second = unbiased(then)
            of_mean, of_second = jacrev(unbiased)(then)
            for name, value in then.items():
                mean = mean + (of_mean[name] * (weights[name] - value)).flatten(1).sum(1)
                second = second + (of_second[name] * (weights[name] - value)).flatten(1).sum(1)
        return mean + bias, second + 2 * bias * mean + bias.square()

    def __call__(self, weights: Weights, y: Tensor) -> Tensor:
        x = self.output(weights, y)
        past = [self.past_moments(weights, *step) for step in self.past]
        mean, second = moments(x)
        mean = torch.stack([mean, *(m for m, _ in past)]).mean(0)
        second = torch.stack([second, *(torch.maximum(s, m.square()) for m, s in past)]).mean(0)
        scale = weights["1.weight"] / torch.sqrt(second - mean.square() + 1e-5)
        shape = (-1, *[1] * (x.ndim - 2))
        return (x - mean.reshape(shape)) * scale.reshape(shape) + weights["1.bias"].reshape(shape)


def batch(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(2 if len(shape) > 1 else 5, *shape, dtype=torch.float64) + 0.3


def trained(body: str, **options: Any) -> tuple[nn.Sequential, Reference]:
    """A converted network that remembers three steps, each of other weights, and its reference."""
    make, channels, shape = BODIES[body]
    norm = nn.BatchNorm2d(channels) if len(shape) > 1 else nn.BatchNorm1d(channels)
    model = nn.Sequential(make(), norm).double()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-0.5, 0.5)
    reference = Reference(model[0], options.get("order", 1))
    crossbn.convert_(model, **{"window": 4, "positions": None, "decay": 1.0, **options})
    for _ in range(3):
        y = batch(shape)
        model(y).square().sum().backward()
        weights = {name: p.detach().clone() for name, p in model.named_parameters() if name[0] == "0"}
        reference.past.append((weights, y))
        model.zero_grad()
        move_(model.parameters())
    return model, reference


def curved(out: Tensor) -> Tensor:
    return (out.sin() * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum()


def linear(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum()


def parameters_of(model: nn.Module) -> Weights:
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def products(loss: Tensor, values: list[Tensor]) -> tuple[Tensor, ...]:
    """First gradients, and the Hessian times a vector that is always the same."""
    first = torch.autograd.grad(loss, values, create_graph=True)
    vary = [gradient for gradient in first if gradient.requires_grad]  # beta's does not, if the loss is linear
    vectors = [torch.linspace(-1, 1, v.numel(), dtype=v.dtype).view_as(v) for v in vary]
    return *first, *torch.autograd.grad(vary, values, vectors, allow_unused=True, materialize_grads=True)


def assert_near(got: Any, expected: Any, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@BODY
@ORDER
@pytest.mark.parametrize("loss", [curved, linear])
def test_hessian_times_vector_of_parameters_and_input(body: str, order: int, loss: Callable[[Tensor], Tensor]) -> None:
    model, reference = trained(body, order=order)
    y = batch(BODIES[body][2]).requires_grad_()
    weights = parameters_of(model)
    expected = products(loss(reference(weights, y)), [y, *weights.values()])
    assert_near(products(loss(model(y)), [y, *model.parameters()]), expected)


@pytest.mark.parametrize("function", [AF.hvp, AF.vhp, AF.hessian])
@ORDER
def test_torchs_own_functions_of_the_input(function: Callable[..., Any], order: int) -> None:
    model, reference = trained("bias", order=order)
    y, weights = batch((2, 4, 4)), {name: w.detach() for name, w in parameters_of(model).items()}
    vector = () if function is AF.hessian else (torch.randn_like(y),)
    expected = function(lambda y: curved(reference(weights, y)), y, *vector)
    assert_near(function(lambda y: curved(model(y)), y, *vector), expected)


@pytest.mark.parametrize("function", [AF.hvp, AF.vhp, AF.hessian])
@pytest.mark.parametrize("body", ["linear", "depthwise"])
def test_torchs_own_functions_of_the_weights(function: Callable[..., Any], body: str) -> None:
    model, reference = trained(body)
    y, weights = batch(BODIES[body][2]), parameters_of(model)
    values = tuple(weights.values())
    vector = () if function is AF.hessian else (tuple(torch.randn_like(w) for w in values),)

    def of_reference(*values: Tensor) -> Tensor:
        return curved(reference(dict(zip(weights, values, strict=True)), y))

    def of_model(*values: Tensor) -> Tensor:
        return curved(functional_call(model, dict(zip(weights, values, strict=True)), (y,)))

    assert_near(function(of_model, values, *vector), function(of_reference, values, *vector))


@BODY
@ORDER
def test_gradient_penalty(body: str, order: int) -> None:
    model, reference = trained(body, order=order)
    weights, points = parameters_of(model), batch(BODIES[body][2]).requires_grad_()

    def penalty(out: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(linear(out), points, create_graph=True)
        return (slope.flatten(1).norm(dim=1) - 1).square().mean()

    penalty(model(points)).backward()
    expected = torch.autograd.grad(
        penalty(reference(weights, points)), list(weights.values()), allow_unused=True, materialize_grads=True
    )
    got = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    assert_near(got, list(expected))


def second_gradients(model: nn.Module, y: Tensor, directions: list[Tensor]) -> list[Tensor]:
    values = list(model.parameters())
    first = torch.autograd.grad(curved(model(y)), values, create_graph=True)
    return list(torch.autograd.grad(first, values, directions, allow_unused=True, materialize_grads=True))


def change_of_first_gradients(model: nn.Module, y: Tensor, directions: list[Tensor]) -> list[Tensor]:
    def first_at(distance: float) -> tuple[Tensor, ...]:
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, direction in zip(moved.parameters(), directions, strict=True):
                parameter.add_(direction, alpha=distance)
        return torch.autograd.grad(curved(moved(y)), list(moved.parameters()))

    return [(after - before) / 2e-5 for after, before in zip(first_at(1e-5), first_at(-1e-5), strict=True)]


@pytest.mark.parametrize("options", [{}, {"order": 2}, {"positions": 8}, {"positions": 8, "order": 2}], ids=str)
@pytest.mark.parametrize("body", ["bias", "depthwise", "sum"])
def test_second_gradient_is_the_change_of_the_first(body: str, options: dict[str, Any]) -> None:
    model, _ = trained(body, **options)
    y, directions = batch(BODIES[body][2]), [torch.randn_like(p) for p in model.parameters()]
    expected = change_of_first_gradients(model, y, directions)
    assert_near(second_gradients(model, y, directions), expected, 1e-5)


@BODY
@pytest.mark.parametrize("order", [0, 1, 2])
def test_first_gradients_are_the_same_with_a_graph(body: str, order: int) -> None:
    """With the default number of positions."""
    model, _ = trained(body, order=order, positions=128)
    twin, y = copy.deepcopy(model), batch(BODIES[body][2]).requires_grad_()
    expected = torch.autograd.grad(curved(twin(y)), [y, *twin.parameters()])
    assert_near(torch.autograd.grad(curved(model(y)), [y, *model.parameters()], create_graph=True), expected, 1e-10)


@pytest.fixture
def _alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def right_or_refused(name: str, got: Callable[[], Any], expected: Any, tolerance: float = 1e-8) -> None:
    """A clear refusal is as good as the right numbers."""
    try:
        found = got()
    except RuntimeError as error:
        if name not in str(error) or "double backward" not in str(error):
            raise
    else:
        assert_near(found, expected, tolerance)


@pytest.mark.usefixtures("_alone")
def test_synchronized_over_one_process() -> None:
    model, reference = trained("convolution", sync=True)
    y, weights = batch((3, 5, 5)).requires_grad_(), parameters_of(model)
    expected = products(curved(reference(weights, y)), [y, *weights.values()])
    right_or_refused("1", lambda: products(curved(model(y)), [y, *model.parameters()]), expected)

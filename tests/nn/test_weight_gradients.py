"""The gradient that weights have by way of the compensated statistics, against the slow reference."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn
from crossbn.pairing import calls
from tests.reference.cross_iteration import ReferenceNorm
from tests.support import functional_form, move_


@pytest.fixture(autouse=True, params=[0, 2**15], ids=["by a hook", "by autograd"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights' gradients are added by a hook on the convolution, small ones' by autograd."""
    monkeypatch.setattr(calls, "_LARGE_WEIGHT", request.param)


class OfPositions(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2).contiguous()).transpose(1, 2)


class OfPositionsInPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


Case = tuple[Callable[[], nn.Module], type[nn.Module], tuple[int, ...]]
OPERATORS: dict[str, Case] = {
    "convolution": (lambda: nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d, (2, 3, 6, 6)),
    "with a bias": (lambda: nn.Conv2d(3, 5, 3), nn.BatchNorm2d, (2, 3, 6, 6)),
    "depthwise": (lambda: nn.Conv2d(5, 5, 3, groups=5, bias=False), nn.BatchNorm2d, (2, 5, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 5, 2, stride=2), nn.BatchNorm2d, (2, 3, 3, 3)),
    "linear": (lambda: nn.Linear(3, 5), nn.BatchNorm1d, (6, 3)),
    "linear without a bias": (lambda: nn.Linear(3, 5, bias=False), nn.BatchNorm1d, (6, 3)),
}


def batch(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 3, 6, 6), dtype=torch.float64)


def trained(name: str = "convolution", **options: Any) -> tuple[nn.Sequential, ReferenceNorm]:
    """An operator and its norm with a full window, the weights having moved, and the reference that knows as much."""
    make, norm, shape = OPERATORS[name]
    torch.manual_seed(0)
    model = nn.Sequential(make(), norm(5)).double()
    reference = ReferenceNorm(functional_form(model[0]), window=3)
    crossbn.convert_(model, **{"window": 3, "positions": None, "decay": 1.0, **options})
    for _ in range(3):
        y = batch(*shape)
        model(y)
        out_of(reference, model, y)
        move_(model.parameters(), 0.1)
    return model, reference


def out_of(reference: ReferenceNorm, model: nn.Sequential, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The reference's output at the weights of `model`, and what it is a function of."""
    twins = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    weight, *bias, gamma, beta = twins
    return reference(y, weight, bias[0] if bias else 0.0, gamma, beta)[0], twins


def today(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).sin()


def loss(out: Tensor) -> Tensor:
    return (out * torch.linspace(0, 3, out.numel(), dtype=torch.float64).reshape(out.shape).cos()).sum()


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def backward(model: nn.Module, y: Tensor) -> list[Tensor]:
    loss(model(y)).backward()
    return gradients_of(model)


def twice(model: nn.Module, y: Tensor) -> list[Tensor]:
    value = loss(model(y))
    value.backward(retain_graph=True)
    value.backward()
    return [gradient / 2 for gradient in gradients_of(model)]


def asked_for(model: nn.Module, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss(model(y)), list(model.parameters())))


def one_by_one(model: nn.Module, y: Tensor) -> list[Tensor]:
    value = loss(model(y))
    return [torch.autograd.grad(value, parameter, retain_graph=True)[0] for parameter in model.parameters()]


def with_a_graph(model: nn.Module, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss(model(y)), list(model.parameters()), create_graph=True))


def channels_last(model: nn.Module, y: Tensor) -> list[Tensor]:
    layout = torch.channels_last if y.ndim == 4 else torch.contiguous_format
    return backward(model.to(memory_format=layout), y.to(memory_format=layout))  # type: ignore[call-overload]  # torch's types lack it


def with_a_trained_input(model: nn.Module, y: Tensor) -> list[Tensor]:
    return backward(model, y.requires_grad_())


WAYS = [backward, twice, asked_for, one_by_one, with_a_graph, channels_last, with_a_trained_input]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("gradients", WAYS)
@pytest.mark.parametrize(
    "options", [{"positions": None}, {"positions": 10_000}], ids=str
)  # the latter in compiled code
def test_equals_the_reference(
    name: str, gradients: Callable[[nn.Module, Tensor], list[Tensor]], options: dict[str, Any]
) -> None:
    model, reference = trained(name, **options)
    y = today(*OPERATORS[name][2])
    out, twins = out_of(reference, model, y)
    expected = list(torch.autograd.grad(loss(out), twins))
    torch.testing.assert_close(gradients(model, y), expected, rtol=1e-9, atol=1e-10)
    detached = backward(trained(name, backward="detached")[0], y.detach())
    assert not torch.allclose(detached[0], expected[0], rtol=1e-3)


@pytest.mark.parametrize("bias", [True, False])  # which torch adds in a node of its own to what is not dense
@pytest.mark.parametrize("kind", [OfPositions, OfPositionsInPlace])
def test_linear_layer_of_positions(kind: type[nn.Linear], bias: bool) -> None:
    """It is a convolution of size 1, whose gradient is laid out otherwise."""
    torch.manual_seed(0)
    linear = nn.Sequential(kind(3, 5, bias=bias), nn.BatchNorm1d(5)).double()
    conv = nn.Sequential(nn.Conv1d(3, 5, 1, bias=bias), nn.BatchNorm1d(5)).double()
    for model in (linear, conv):
        crossbn.convert_(model, window=3)
    for _ in range(4):
        move_(linear.parameters(), 0.1)
        with torch.no_grad():
            for ours, theirs in zip(conv.parameters(), linear.parameters(), strict=True):
                ours.copy_(theirs.reshape(ours.shape))
        shape = (2, 3, int(torch.randint(2, 9, ())))
        got, expected = asked_for(linear, today(*shape)), asked_for(conv, today(*shape))
        expected[0] = expected[0].squeeze(2)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


class Outputs(nn.Module):
    """Norms that read one convolution, and keep what it made."""

    def __init__(self, norms: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(5) for _ in range(norms))
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> list[Tensor]:
        self.seen = [self.conv(images)]
        return [(i + 1) * norm(self.seen[0]) for i, norm in enumerate(self.norms)]


def with_history(norms: int = 1) -> Outputs:
    torch.manual_seed(0)
    model = Outputs(norms).double()
    crossbn.convert_(model, window=3)
    for _ in range(2):
        model(batch())
        move_(model.parameters(), 0.1)
    model.seen.clear()
    return model


def test_what_one_backward_leaves_does_not_reach_another() -> None:
    model = with_history()
    twin, images = copy.deepcopy(model), batch()
    expected = torch.autograd.grad(twin(images)[0].pow(3).sum(), twin.conv.weight)[0]
    (y,) = model(images)
    # The norm's part of the graph, not the convolution's: what is sent does not arrive.
    torch.autograd.grad(y.pow(3).sum(), list(model.norms.parameters()), retain_graph=True)
    (got,) = torch.autograd.grad(model.seen[0].square().sum(), model.conv.weight, retain_graph=True)
    weight = model.conv.weight.detach().clone().requires_grad_()
    (alone,) = torch.autograd.grad(F.conv2d(images, weight).square().sum(), weight)
    torch.testing.assert_close(got, alone, rtol=1e-12, atol=1e-12)
    torch.autograd.grad(y.pow(3).sum(), list(model.norms.parameters()), retain_graph=True)
    (whole,) = torch.autograd.grad(y.pow(3).sum(), model.conv.weight)  # and is not there twice
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


def test_a_backward_that_fails_on_its_way() -> None:
    model = with_history()
    twin, images = copy.deepcopy(model), batch()
    expected = torch.autograd.grad(twin(images)[0].pow(3).sum(), twin.conv.weight)[0]
    value = model(images)[0].pow(3).sum()

    def fail(_: Tensor) -> None:
        raise MemoryError

    handle = model.seen[0].register_hook(fail)  # between norm and convolution
    with pytest.raises(MemoryError):
        value.backward(retain_graph=True)
    handle.remove()
    (got,) = torch.autograd.grad(value, model.conv.weight)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_several_norms_of_one_operator_add_up() -> None:
    def gradient(*which: int) -> Tensor:
        model = with_history(3)
        with torch.no_grad():
            for parameter in model.norms.parameters():
                parameter.fill_(0.7)
        outputs = model(batch())
        total = torch.stack([outputs[i].pow(3).sum() for i in which]).sum()
        return torch.autograd.grad(total, model.conv.weight)[0]

    both = gradient(0, 2)
    torch.testing.assert_close(both, gradient(0) + gradient(2), rtol=1e-10, atol=1e-12)
    # Norms with the same parameters make the same of it but for a factor, which is in the loss to the third power.
    torch.testing.assert_close(both, 28 * gradient(0), rtol=1e-10, atol=1e-10)


def test_frozen_weight_gets_none() -> None:
    model, _ = trained()
    model[0].get_parameter("weight").requires_grad_(False)
    x = batch().requires_grad_()
    model(x).sum().backward()
    assert model[0].get_parameter("weight").grad is None
    assert x.grad is not None


def test_it_goes_with_the_graph() -> None:
    """Without a backward, and without the collector of cycles."""
    (model, _), images = trained(), batch()
    gone = weakref.ref(images)
    gc.collect()
    gc.disable()
    try:
        out = model(images)
        del images
        assert gone() is not None  # kept by the convolution's node
        del out
        assert gone() is None
    finally:
        gc.enable()

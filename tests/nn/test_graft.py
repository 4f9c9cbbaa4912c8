"""The gradient through the compensation, added where the convolution makes its own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.nn.graft import Graft
from crossbn.nn.producer import Producer


def weight_of(model: nn.Sequential) -> Tensor:
    return model[0].get_parameter("weight")


def gradient_of(model: nn.Sequential) -> Tensor:
    gradient = weight_of(model).grad
    assert gradient is not None
    return gradient


def trained(**options: Any) -> nn.Sequential:
    """A convolution and its norm with a full window, the weights having moved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5)).double()
    crossbn.convert_(model, window=3, **options)
    for _ in range(3):
        model(torch.randn(2, 3, 6, 6, dtype=torch.float64))
        with torch.no_grad():
            weight = weight_of(model)
            weight += 0.1 * torch.randn_like(weight)
    return model


def by_autograd(monkeypatch: pytest.MonkeyPatch, gradient: Callable[[nn.Sequential], Tensor]) -> tuple[Tensor, Tensor]:
    """The same gradient with the graft, and with autograd's own way to the weight instead."""
    model = trained()
    twin = copy.deepcopy(model)
    grafted = gradient(model)
    monkeypatch.setattr(Graft, "onto", lambda *_: None)
    return grafted, gradient(twin)


def loss_of(model: nn.Sequential) -> Tensor:
    x = torch.linspace(-1, 1, 216, dtype=torch.float64).reshape(2, 3, 6, 6).sin()
    out: Tensor = model(x)
    return (out * torch.linspace(0, 3, out.numel(), dtype=torch.float64).reshape(out.shape).cos()).sum()


def backward(model: nn.Sequential) -> Tensor:
    loss_of(model).backward()
    return gradient_of(model)


def twice(model: nn.Sequential) -> Tensor:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return gradient_of(model)


def asked_for(model: nn.Sequential) -> Tensor:
    return torch.autograd.grad(loss_of(model), weight_of(model))[0]


def channels_last(model: nn.Sequential) -> Tensor:
    return backward(model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


@pytest.mark.parametrize("gradient", [backward, twice, asked_for, channels_last])
def test_equals_a_second_gradient(gradient: Callable[[nn.Sequential], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    grafted, beside = by_autograd(monkeypatch, gradient)
    torch.testing.assert_close(grafted, beside, rtol=1e-12, atol=1e-12)
    detached = trained(backward="detached")
    assert not torch.allclose(backward(detached), beside)


def test_frozen_weight_gets_none() -> None:
    model = trained()
    weight_of(model).requires_grad_(False)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    model(x).sum().backward()
    assert weight_of(model).grad is None
    assert x.grad is not None


def test_what_one_backward_leaves_does_not_reach_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient() -> Tensor:
        torch.manual_seed(0)
        conv, norm = nn.Conv2d(3, 8, 3, bias=False).double(), nn.BatchNorm2d(8).double()
        network = nn.Sequential(conv, norm)
        crossbn.convert_(network, window=3)
        for _ in range(2):
            network(torch.randn(2, 3, 6, 6, dtype=torch.float64))
        seen: list[Tensor] = []
        conv.register_forward_hook(lambda *call: seen.append(call[-1]))
        y = network(torch.randn(2, 3, 6, 6, dtype=torch.float64))
        torch.autograd.grad(y.pow(3).sum(), norm.weight, retain_graph=True)  # the norm's part, not the convolution's
        return torch.autograd.grad(seen[0].square().sum(), conv.weight)[0]  # the convolution's, not the norm's

    got = gradient()
    monkeypatch.setattr(Producer, "graft", lambda _: None)
    torch.testing.assert_close(got, gradient())

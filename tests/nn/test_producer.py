"""Hooks on the operators that pairing has named: there in training, away in evaluation."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import crossbn


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)).double()
    crossbn.convert_(model, window=3)
    return model


def train(model: nn.Sequential, steps: int = 4) -> Tensor:
    """Steps inside activation checkpointing, where only the hook can tell what the operator has read."""
    torch.manual_seed(1)
    outputs = []
    for _ in range(steps):
        x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
        outputs.append(checkpoint(model, x, use_reentrant=False))
        outputs[-1].square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()).double()).view_as(parameter))
    return torch.stack(outputs).detach()


def hooks_on(operator: nn.Module) -> list[int]:
    assert operator._forward_hooks.keys() == operator._forward_hooks_with_kwargs.keys()
    return list(operator._forward_hooks)


def test_hooks_come_and_go_with_the_mode() -> None:
    model = network()
    (key,) = hooks_on(model[0])
    model.eval()
    assert hooks_on(model[0]) == []
    model.train()
    assert hooks_on(model[0]) == [key]  # under another number compiled code would be compiled anew
    model[1].eval()  # a frozen norm; the operator goes on training, and may feed another
    assert hooks_on(model[0]) == [key]


def test_hooks_of_others_stay() -> None:
    model, seen = network(), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    model.eval()(torch.randn(1, 3, 6, 6, dtype=torch.float64))
    crossbn.revert_(model)
    model(torch.randn(1, 3, 6, 6, dtype=torch.float64))
    assert len(seen) == 2
    assert len(model[0]._forward_hooks) == 1


@pytest.mark.parametrize("copied", [False, True])
def test_an_evaluation_between_changes_nothing(copied: bool) -> None:
    expected = train(network())
    model = network().eval()
    if copied:
        model = copy.deepcopy(model)
    got = train(model.train())
    assert torch.equal(got, expected)
    plain = network()
    crossbn.set_window_(plain, 1)
    assert not torch.allclose(train(plain), expected)  # what is remembered takes part

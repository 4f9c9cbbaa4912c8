"""Frozen BatchNorm: what torchvision's does, with BatchNorm's checkpoints."""

import pytest
import torch
from torch import nn

from crossbn import compat
from crossbn.nn import FrozenBatchNorm


def trained() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(4)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert tensor is not None
            tensor.uniform_(0.5, 2)
    return norm


def frozen() -> FrozenBatchNorm:
    norm = FrozenBatchNorm(4)
    norm.load_state_dict(trained().state_dict())
    return norm


def test_as_torchvision() -> None:
    compat.ensure_torchvision()
    from torchvision.ops import FrozenBatchNorm2d

    ours, theirs = FrozenBatchNorm(4), FrozenBatchNorm2d(4)
    state = trained().state_dict()
    for norm in (ours, theirs):
        norm.load_state_dict(dict(state))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(ours(x), theirs(x))


def test_checkpoints_there_and_back() -> None:
    plain, norm, other = trained(), FrozenBatchNorm(4), nn.BatchNorm2d(4)
    norm.load_state_dict(plain.state_dict(), strict=True)
    other.load_state_dict(norm.state_dict(), strict=True)
    x = torch.randn(2, 4, 3, 3)
    assert torch.equal(norm(x), plain.eval()(x))
    assert torch.equal(other.eval()(x), plain(x))


def test_checkpoint_within_a_model() -> None:
    plain, model = nn.Sequential(nn.Conv2d(3, 4, 1), trained()), nn.Sequential(nn.Conv2d(3, 4, 1), FrozenBatchNorm(4))
    model.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(2, 3, 3, 3)
    assert torch.equal(model(x), plain.eval()(x))
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"1\.gain\""):
        model.load_state_dict({**plain.state_dict(), "1.gain": torch.ones(4)})


def test_nothing_moves() -> None:
    norm = frozen()
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    norm.train()(x).square().sum().backward()
    assert list(norm.parameters()) == []
    assert all(torch.equal(norm.state_dict()[key], value) for key, value in before.items())
    assert x.grad is not None
    assert (x.grad != 0).all()

"""The names that give functions and modules their meaning."""

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.pairing.dataflow import KEEP_CHANNELS, is_leaf, name_of
from tests.pairing.networks import ConvWithNormInside, UserConv2d


def cat(tensors: list[Tensor]) -> Tensor:
    """Not torch's."""
    return tensors[0]


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        (torch.cat, "cat"),
        (torch.concat, "cat"),
        (operator.add, "add"),
        (operator.iadd, "add_"),
        (torch.Tensor.add_, "add_"),
        (F.max_pool2d, "max_pool2d"),
        (torch.Tensor.__getitem__, "getitem"),
        (cat, "function cat"),
        ("add", "add"),
        ("add_", "add_"),
        ("__iadd__", "add_"),
        ("__len__", "len"),
        ("relu_", "relu_"),
        (nn.MaxPool2d, "max_pool2d"),
        (nn.ReLU, "relu"),
        (nn.LeakyReLU, "leaky_relu"),
        (nn.SiLU, "silu"),
        (nn.AdaptiveAvgPool2d, "adaptive_avg_pool2d"),
        (nn.BatchNorm2d, "batch_norm2d"),
    ],
)
def test_names(called: Any, expected: str) -> None:
    assert name_of(called) == expected


def test_leaves_are_norms_operators_and_torch_modules_without_a_norm() -> None:
    leaves: list[nn.Module] = [nn.BatchNorm1d(1), UserConv2d(1, 1, 1), nn.ReLU(), nn.MultiheadAttention(2, 1)]
    inner: list[nn.Module] = [nn.Sequential(), nn.ModuleList([nn.BatchNorm1d(1)]), ConvWithNormInside()]
    assert [is_leaf(module) for module in leaves] == [True] * 4
    assert [is_leaf(module) for module in inner] == [False] * 3


FAMILIES = {"activation", "dropout", "padding", "pooling", "upsampling"}
"""Files of torch.nn.modules whose modules keep the number of channels, but for the two below."""
KEEPING = [
    kind
    for kind in vars(nn).values()
    if isinstance(kind, type)
    and kind.__module__.rpartition(".")[2] in FAMILIES
    and kind not in (nn.GLU, nn.MultiheadAttention)
]


@pytest.mark.parametrize("kind", KEEPING)
def test_every_activation_dropout_padding_and_pooling_keeps_channels(kind: type[nn.Module]) -> None:
    assert name_of(kind) in KEEP_CHANNELS


@pytest.mark.parametrize("kind", [nn.GLU, nn.MultiheadAttention, nn.PixelShuffle, nn.Flatten, nn.Conv2d, nn.Fold])
def test_other_modules_may_change_channels(kind: type[nn.Module]) -> None:
    assert name_of(kind) not in KEEP_CHANNELS

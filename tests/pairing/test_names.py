"""The names that give functions and modules their meaning."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from crossbn.pairing.calls import function_name, method_name
from crossbn.pairing.modules import is_leaf, is_operator, keeps_channels, step_name
from tests.pairing.networks import ConvWithNormInside, UserConv2d


def cat(tensors: list[Tensor]) -> Tensor:
    """Not torch's."""
    return tensors[0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (torch.cat, "cat"),
        (operator.add, "add"),
        (operator.iadd, "add_"),
        (torch.Tensor.__radd__, "add"),
        (torch.Tensor.add_, "add_"),
        (F.max_pool2d, "max_pool2d"),
        (torch.Tensor.shape.__get__, "shape"),  # type: ignore[attr-defined]  # a C property
        (torch.Tensor.__getitem__, "getitem"),
        (cat, "function cat"),
    ],
)
def test_function_name(function: Callable[..., Any], expected: str) -> None:
    assert function_name(function) == expected


def test_method_name() -> None:
    names = [method_name(name) for name in ("add", "add_", "__iadd__", "__len__", "relu_")]
    assert names == ["add", "add_", "add_", "len", "relu_"]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.MaxPool2d(2), "max_pool2d"),
        (nn.ReLU(), "relu"),
        (nn.LeakyReLU(), "leaky_relu"),
        (nn.SiLU(), "silu"),
        (nn.AdaptiveAvgPool2d(1), "adaptive_avg_pool2d"),
        (nn.BatchNorm2d(1), "batch_norm2d"),
    ],
)
def test_step_name_is_spelled_like_the_function(module: nn.Module, expected: str) -> None:
    assert step_name(module) == expected


def test_linear_operators() -> None:
    operators: list[nn.Module] = [
        nn.Conv1d(1, 1, 1),
        nn.ConvTranspose3d(1, 1, 1),
        nn.Linear(1, 1),
        parametrizations.weight_norm(nn.Conv2d(1, 1, 1)),
    ]
    others: list[nn.Module] = [nn.Bilinear(1, 1, 1), nn.ReLU(), ConvWithNormInside(), UserConv2d(1, 1, 1)]
    assert [is_operator(module) for module in operators] == [True] * 4
    assert [is_operator(module) for module in others] == [False] * 4


def test_leaves_are_norms_operators_and_torch_modules_without_a_norm() -> None:
    leaves: list[nn.Module] = [nn.BatchNorm1d(1), UserConv2d(1, 1, 1), nn.ReLU(), nn.MultiheadAttention(2, 1)]
    inner: list[nn.Module] = [nn.Sequential(), nn.ModuleList([nn.BatchNorm1d(1)]), ConvWithNormInside()]
    assert [is_leaf(module) for module in leaves] == [True] * 4
    assert [is_leaf(module) for module in inner] == [False] * 3


def test_modules_that_keep_channels() -> None:
    keeping: list[nn.Module] = [nn.AvgPool2d(2), nn.GELU(), nn.Dropout2d(), nn.Upsample(2), nn.ZeroPad2d(1)]
    changing: list[nn.Module] = [nn.GLU(), nn.PixelShuffle(2), nn.Flatten(), nn.Conv2d(1, 2, 1)]
    assert [keeps_channels(module) for module in keeping] == [True] * 5
    assert [keeps_channels(module) for module in changing] == [False] * 4

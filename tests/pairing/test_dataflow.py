"""What tensors are made of: sums and concatenations are kept flat, widths, what counts as a use, what names mean."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.pairing import find_pairs
from crossbn.pairing.dataflow import KEEP_CHANNELS, is_leaf, name_of
from tests.pairing.networks import ConvWithNormInside, Net, UserConv2d

Body = Callable[[Any, Tensor], Any]


def read(body: Body, channels: int = 4) -> list[tuple[int, str]]:
    """Widths and reasons of what a norm reads, which is what `body` returns."""
    layers = {"third": nn.Conv2d(3, 4, 1), "wide": nn.Conv2d(3, 6, 1), "norm": nn.BatchNorm2d(channels)}
    pairing = find_pairs(Net(lambda net, x: net.norm(body(net, x)), **layers))["norm"]
    return [(segment.channels, segment.reason) for segment in pairing.segments]


@pytest.mark.parametrize(
    ("body", "channels", "expected"),
    [
        (lambda net, x: net.conv(x) + net.other(x) + net.third(x), 4, "conv + other + third"),
        (lambda net, x: (net.conv(x) + net.other(x)) + net.third(x).relu(), 4, "conv + other + rest"),
        (lambda net, x: (net.conv(x) + net.third(x).relu()) + net.other(x), 4, "conv + other + rest"),
        (lambda net, x: x + net.conv(x), 4, "conv + rest"),
        (lambda net, x: net.conv(x).relu() + x, 4, "after add"),
        (lambda net, x: net.conv(x) + net.wide(x), 6, "after add with broadcast channels"),
        (lambda net, x: (y := net.conv(x)) + net.other(x) + y, 4, "after add"),
        (lambda net, x: net.wide(x) + torch.cat([x[:, :2], net.conv(x)], 1), 6, "wide + rest"),
    ],
)
def test_sums_are_flat(body: Body, channels: int, expected: str) -> None:
    assert read(body, channels) == [(channels, expected)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda net, x: [net.conv(x), net.wide(x)], [(4, "conv"), (6, "wide")]),
        (lambda net, x: [net.wide(x), x.relu()], [(6, "wide"), (4, "after relu")]),
        (
            lambda net, x: [torch.cat([net.conv(x), F.max_pool2d(net.other(x), 1)], 1), x],
            [(4, "conv"), (4, "after max_pool2d"), (2, "input of the model")],
        ),
        (lambda net, x: [net.conv(x), net.wide(x).relu().split(2)[0]], [(4, "conv"), (6, "after split")]),
    ],
)
def test_concatenations_are_flat_and_one_width_is_what_is_left(body: Body, expected: list[tuple[int, str]]) -> None:
    assert read(lambda net, x: torch.cat(body(net, x), 1), 10) == expected


@pytest.mark.parametrize(
    ("also", "exclusive"),
    [
        (lambda _, y: y.shape, True),
        (lambda _, y: y.clone(), False),
        (lambda _, y: y.clone().relu(), False),
        (lambda net, _: net.conv.weight.sum(), False),
    ],
    ids=["a look at the shape", "a copy that is returned", "a copy that is read", "the weight"],
)
def test_what_counts_as_a_use(also: Body, exclusive: bool) -> None:
    net = Net(lambda net, x: (net.norm(y := net.conv(x)), also(net, y)))
    assert find_pairs(net)["norm"].exclusive is exclusive


def test_a_copy_that_nobody_reads_is_no_use() -> None:
    net = Net(lambda net, x: (y := net.conv(x), y.clone(), net.norm(y))[2])
    assert find_pairs(net)["norm"].exclusive


@pytest.mark.parametrize("name", ["identity", "dropout", "add", "clone"])
def test_a_module_from_outside_torch_means_nothing_by_its_name(name: str) -> None:
    kind = type(name.title(), (nn.Conv2d,), {"forward": lambda _, x: x.relu()})
    model = nn.Sequential(nn.Conv2d(3, 4, 1), kind(4, 4, 1), nn.BatchNorm2d(4))
    assert find_pairs(model)["2"].segments[0].reason == f"after {name}"


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

"""Heads that run on every level of the pyramid: each level has a history of its own."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.lab.recipes.detection import Recipe
from crossbn.lab.recipes.detection.networks import LevelHeads, build_network
from crossbn.nn import CrossIterBatchNorm2d
from tests.lab.recipes.detection.runs import SMALL
from tests.lab.recipes.detection.test_networks import batch, make

LEVELS = 5
MODELS = ("retinanet_resnet50_fpn_v2", "fcos_resnet50_fpn")


class Head(nn.Module):
    """A convolution and a norm that all levels share, as RetinaNet's are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.norm: nn.Module = nn.BatchNorm2d(6)

    def forward(self, levels: list[Tensor]) -> list[Tensor]:
        return [self.norm(self.conv(level)) for level in levels]


def test_levels_never_mix() -> None:
    head = Head()
    crossbn.convert_(head, window=3, weights="equal")
    generator = torch.Generator().manual_seed(0)
    # Levels of different size, place and spread: a step of another level would be seen at once.
    shapes = ((8, 0.0, 1.0), (4, 5.0, 0.1), (2, -30.0, 4.0))
    steps = [
        [place + scale * torch.randn(2, 4, size, size, generator=generator) for size, place, scale in shapes]
        for _ in range(5)
    ]
    for number, levels in enumerate(steps):
        outputs = head(levels)
        for level, output in enumerate(outputs):
            # Weights do not change: what is pooled is the last three batches of the level, together.
            pooled = torch.cat([head.conv(each[level]) for each in steps[max(0, number - 2) : number + 1]])
            expected = nn.functional.batch_norm(pooled, None, None, training=True)[-2:]
            torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)


def named(name: str, **more: Any) -> Recipe:
    """A small recipe of one of torchvision's detectors."""
    return replace(SMALL, model=name, backbone="resnet50", channels=256, **more)


@pytest.mark.parametrize("name", MODELS)
def test_torchvisions_detectors_have_norms_for_each_level(name: str) -> None:
    network: Any = make(named(name, window=2))
    optimizer = torch.optim.SGD(network.parameters(), 1e-4)
    images, targets = batch()
    for _ in range(3):
        loss = sum(network(images, targets).values())
        assert bool(torch.isfinite(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    heads = network.head.heads
    assert len(heads) == LEVELS
    norms = [[each for each in head.modules() if isinstance(each, CrossIterBatchNorm2d)] for head in heads]
    assert [len(each) for each in norms] == [8] * LEVELS  # four in each of two towers
    weights = list(heads[0].parameters())
    assert all(own is each for head in heads for own, each in zip(head.parameters(), weights, strict=True))
    first, *others = (each[0].get_buffer("running_mean") for each in norms)
    assert all(not torch.equal(first, other) for other in others)


class ListHead(Head):
    """The same, with what torchvision's heads return."""

    def forward(self, levels: list[Tensor]) -> Any:
        return {"outputs": torch.cat([each.flatten(2).transpose(1, 2) for each in super().forward(levels)], dim=1)}


@pytest.mark.parametrize("norm", ["bn", "cbn"])
def test_evaluation_normalizes_each_level_as_training_does(norm: str) -> None:
    heads = LevelHeads(ListHead(), 3)
    crossbn.swap_norm_(heads, norm)
    generator = torch.Generator().manual_seed(0)
    shapes = ((16, 0.0, 1.0), (12, 5.0, 0.1), (8, -30.0, 4.0))

    def deviations() -> list[float]:
        steps = [place + scale * torch.randn(8, 4, size, size, generator=generator) for size, place, scale in shapes]
        found = heads(steps)["outputs"].split([size**2 for size, _, _ in shapes], dim=1)
        return [each.std().item() for each in found]

    for _ in range(60):
        assert deviations() == pytest.approx([1.0] * 3, abs=0.1)
    assert heads.eval() is heads
    assert deviations() == pytest.approx([1.0] * 3, abs=0.1)


def test_gradients_of_all_levels_reach_the_weights_that_they_share() -> None:
    head = ListHead()
    twin, heads = copy.deepcopy(head), LevelHeads(head, 3)
    levels = [torch.randn(2, 4, size, size) for size in (8, 4, 2)]
    outputs, expected = heads(levels)["outputs"], twin(levels)["outputs"]
    torch.testing.assert_close(outputs, expected)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    assert len(list(heads.parameters())) == len(list(twin.parameters()))
    for own, other in zip(heads.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_folded_each_level_keeps_its_own_statistics() -> None:
    network: Any = make(named(MODELS[0], norm="bn"))
    images, targets = batch()
    for _ in range(2):
        network(images, targets)
    network.eval()
    folded = crossbn.fold(network, (images,))
    for ours, expected in zip(folded(images), network(images), strict=True):
        torch.testing.assert_close(ours["scores"], expected["scores"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours["boxes"], expected["boxes"], rtol=1e-3, atol=1e-2)


def test_models_by_name_train_with_batch_norm_in_their_heads() -> None:
    network: Any = build_network(named("retinanet_resnet50_fpn_v2"), 3)
    assert all(sum(isinstance(each, nn.BatchNorm2d) for each in head.modules()) == 8 for head in network.head.heads)
    assert not any(isinstance(each, nn.GroupNorm) for each in network.modules())

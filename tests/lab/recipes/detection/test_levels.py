"""Heads that run on every level of the pyramid: each level has a history of its own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.lab.recipes.detection.networks import build_network
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


@pytest.mark.parametrize("name", MODELS)
def test_torchvisions_detectors_have_a_history_for_each_level(name: str) -> None:
    network: Any = make(replace(SMALL, model=name, window=2))
    optimizer = torch.optim.SGD(network.parameters(), 1e-4)
    images, targets = batch()
    for _ in range(3):
        loss = sum(network(images, targets).values())
        assert bool(torch.isfinite(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    norms = [each for each in network.head.modules() if isinstance(each, CrossIterBatchNorm2d)]
    assert len(norms) == 8  # four in each of two towers
    state = crossbn.history_state(network)
    (prefix,) = (path for path, each in network.named_modules() if each is norms[0])
    means = [value for key, value in state.items() if key.startswith(f"{prefix}/") and key.endswith("/mean")]
    assert len(means) == LEVELS
    assert all(not torch.equal(means[0], other) for other in means[1:])


def test_models_by_name_train_with_batch_norm_in_their_heads() -> None:
    network: Any = build_network(replace(SMALL, model="retinanet_resnet50_fpn_v2"), 3)
    assert sum(isinstance(each, nn.BatchNorm2d) for each in network.head.modules()) == 8
    assert not any(isinstance(each, nn.GroupNorm) for each in network.modules())

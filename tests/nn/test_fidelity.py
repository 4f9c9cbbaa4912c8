"""What sampling costs, on a network in training: the error of the compensated variance with few and all positions."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.nn import CrossIterBatchNorm, CrossIterBatchNorm2d

WINDOW, BATCH = 4, 4


def network() -> nn.Sequential:
    """Both storages occur in it."""
    torch.manual_seed(0)
    widths = [3, 24, 48, 96, 96]
    layers: list[nn.Module] = []
    for i, (inner, outer) in enumerate(itertools.pairwise(widths)):
        conv = nn.Conv2d(inner, outer, 3, stride=1 + i % 2, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 5))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Waves whose frequency is the class."""
    generator = torch.Generator().manual_seed(step)
    target = torch.randint(0, 5, (BATCH,), generator=generator)
    phase, noise = torch.rand(BATCH, 3, 1, 1, generator=generator), torch.randn(BATCH, 3, 20, 20, generator=generator)
    wave = torch.sin(torch.linspace(0, 6, 20) * (1 + target).reshape(-1, 1, 1, 1) + 6 * phase)
    return wave + 0.5 * noise, target


@pytest.fixture(scope="module")
def errors() -> dict[str, Tensor]:
    """Mean relative error of the remembered variances over layers, channels, ages and training, by kind.

    The truth is the variance of the same images in the whole network with today's weights.
    """
    model = network()
    crossbn.convert_(model, window=WINDOW)
    norms = {i: norm for i, norm in enumerate(model) if isinstance(norm, CrossIterBatchNorm2d)}
    assert {type(norm.segments[0].storage).__name__ for norm in norms.values()} == {"GradientStorage", "PatchStorage"}
    shadows = {
        i: {
            kind: CrossIterBatchNorm2d(norm.num_features, window=WINDOW, positions=positions).attach_(model[i - 1])
            for kind, positions in (("default", 128), ("all", None))
        }
        for i, norm in norms.items()
    }
    for i, norm in norms.items():

        def look(_: nn.Module, args: tuple[Any, ...], watchers: dict[str, CrossIterBatchNorm] = shadows[i]) -> None:
            for shadow in watchers.values():
                shadow(args[0].detach())

        norm.register_forward_pre_hook(look)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    found: dict[str, list[Tensor]] = {"naive": [], "default": [], "all": []}
    for step in range(120):
        if step >= 60 and step % 4 == 0:
            truth = true_variances(model, [batch(step - age)[0] for age in range(WINDOW)])
            for i, kinds in shadows.items():
                for kind, shadow in kinds.items():
                    past = shadow.segments[0].past()
                    found[kind].append((past.compensated_var.clamp_min(0) / truth[i] - 1).abs().mean())
                found["naive"].append((past.var / truth[i] - 1).abs().mean())
        images, target = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), target).backward()
        optimizer.step()
    return {kind: torch.stack(values).mean() for kind, values in found.items()}


@torch.no_grad()
def true_variances(model: nn.Sequential, images: list[Tensor]) -> dict[int, Tensor]:
    """Of each norm's input, for all batches but the first, [age, channel]."""
    plain = copy.deepcopy(model)
    crossbn.revert_(plain)
    x, variances = torch.cat(images), {}
    for i, layer in enumerate(plain):
        layer._forward_pre_hooks.clear()
        if isinstance(layer, nn.BatchNorm2d):
            variances[i] = torch.stack([part.var((0, 2, 3), correction=0) for part in x.split(BATCH)[1:]])
        x = layer(x)
    return variances


def test_few_positions_are_nearly_as_good_as_all(errors: dict[str, Tensor]) -> None:
    assert errors["default"] < 1.1 * errors["all"]


def test_compensation_brings_the_variance_nearer(errors: dict[str, Tensor]) -> None:
    assert errors["default"] < errors["naive"]
    assert errors["all"] < errors["naive"]

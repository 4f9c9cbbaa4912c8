"""Small networks with one trait each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.pairing import Pairing, find_pairs


class Net(nn.Module):
    """A body of one's choice over a few layers; every test writes its own forward."""

    def __init__(self, body: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.other = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class PreActivationBlock(nn.Module):
    """Norm, ReLU, convolution, twice, around an identity or projected shortcut."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        same = in_channels == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv1(self.relu(self.norm1(x)))
        out = self.conv2(self.relu(self.norm2(out)))
        out += self.shortcut(x)
        return out


class PreActivationNet(nn.Module):
    """Three pre-activation blocks: the last norm reads the sum of everything since the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(PreActivationBlock(4, 4), PreActivationBlock(4, 8), PreActivationBlock(8, 8))
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.blocks(self.stem(x))))


class DataDependentNet(nn.Module):
    """Chooses its branch by looking at the data: a traceable trunk inside a model that is not traceable."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.bright = nn.Conv2d(4, 6, 1)
        self.dark = nn.Conv2d(4, 6, 1)
        self.norm = nn.BatchNorm2d(6)
        self.unused = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        features = self.trunk(x)
        branch = self.bright if x.mean() > 0 else self.dark
        return torch.relu(self.norm(branch(features)))


class UserConv2d(nn.Conv2d):
    """A convolution of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 10_000:  # a test of the data: torch.fx cannot enter here
            raise ValueError("too many examples")
        return super().forward(x)


class UserBatchNorm2d(nn.BatchNorm2d):
    """A batch norm of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 10_000:
            raise ValueError("too many examples")
        return super().forward(x)


class ConvWithNormInside(nn.Conv2d):
    """A convolution that returns something else than a convolution's output."""

    def __init__(self) -> None:
        super().__init__(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(super().forward(x)))


class Untraceable(nn.Module):
    """Keeps any model from being traced as a whole, so that pairing has to watch it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        if x.isnan().any():
            raise ValueError("the input has a NaN")
        return self.model(x)


def find_by_watching(model: nn.Module, x: Tensor) -> dict[str, Pairing]:
    """What pairing sees of one forward, under the names it has in the model itself."""
    pairings = find_pairs(Untraceable(model), (x,)).values()
    return {pairing.name.removeprefix("model."): _without_prefix(pairing) for pairing in pairings}


def structure(pairing: Pairing) -> list[tuple[object, ...]]:
    """What does not depend on how a norm's input was looked at: the reasons in words do."""
    segments = [(segment.channels, segment.producers, segment.direct) for segment in pairing.segments]
    return [(pairing.exclusive,), *segments]


def _without_prefix(pairing: Pairing) -> Pairing:
    segments = tuple(
        replace(
            segment,
            producers=tuple(name.removeprefix("model.") for name in segment.producers),
            reason=segment.reason.replace("model.", ""),
        )
        for segment in pairing.segments
    )
    return replace(pairing, name=pairing.name.removeprefix("model."), segments=segments)

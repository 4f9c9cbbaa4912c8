"""Small networks of our own: the residual ones of CIFAR, the demo's, and a ConvMixer.

Kaiming He, Xiangyu Zhang, Shaoqing Ren, Jian Sun, "Deep Residual Learning for Image Recognition", CVPR 2016,
https://arxiv.org/abs/1512.03385, section 4.2. Where a block changes the number of channels its shortcut is a
convolution of size 1 with a norm, the paper's option B.

Asher Trockman, J. Zico Kolter, "Patches Are All You Need?", TMLR 2023, https://arxiv.org/abs/2201.09792.
"""

from collections.abc import Callable
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.lab.models import ModelError

STAGES = 3
Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two convolutions with norms beside a shortcut; with `norm_last` each norm comes after the activation."""

    def __init__(
        self, in_channels: int, channels: int, stride: int, norm_last: bool = False, norm: Norm = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.norm_last = norm_last
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = norm(channels)
        self.relu: nn.Module = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            convolution = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
            between = [nn.ReLU()] if norm_last else []
            self.shortcut = nn.Sequential(convolution, *between, norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, channels, H / stride, W / stride]."""
        if self.norm_last:
            y = F.relu(self.conv2(self.norm1(self.relu(self.conv1(x)))))
        else:
            y = self.conv2(self.relu(self.norm1(self.conv1(x))))
        return F.relu(self.norm2(y) + self.shortcut(x))


def small_resnet(layers: int, channels: int, classes: int, width: int = 16, norm_last: bool = False) -> nn.Sequential:
    """Return a residual network for small images: three stages, each half as large and twice as wide.

    Args:
        layers: 8, 14, 20 and so on, 6n + 2.
        channels: of the images.
        classes: to tell apart.
        width: channels of the first stage.
        norm_last: whether norms come after activations.

    Raises:
        ModelError: for another number of layers.
    """
    stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    rest: list[nn.Module] = [nn.BatchNorm2d(width), nn.ReLU()]
    parts = [stem, *(reversed(rest) if norm_last else rest)]
    before = width
    for stage in range(STAGES):
        for block in range(_blocks(layers)):
            parts.append(Block(before, width << stage, 2 if stage and not block else 1, norm_last))
            before = width << stage
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def digits_resnet(norm: Norm = nn.BatchNorm2d, width: int = 16, channels: int = 1, classes: int = 10) -> nn.Sequential:
    """Return a network from images [N, 1, 8, 8] to the scores of ten digits.

    Its maps shrink to 1 by 1, so that in the last block a channel has as many values as the batch has images: the case
    that is hardest on statistics of one batch.

    Args:
        norm: makes a norm for a number of channels.
        width: channels at full resolution; four times as many at the end.
        channels: of the images.
        classes: to tell apart.
    """
    stem = [nn.Conv2d(channels, width, 3, padding=1, bias=False), norm(width), nn.ReLU()]
    widths = [width, *(width << stage for stage in range(STAGES))]
    blocks = [Block(before, after, 2, norm=norm) for before, after in pairwise(widths)]
    return nn.Sequential(nn.Sequential(*stem, *blocks), nn.Flatten(), nn.Linear(widths[-1], classes))


def small_plain(layers: int, channels: int, classes: int, width: int = 16) -> nn.Sequential:
    """Return the same network as `small_resnet`, without its shortcuts."""
    parts: list[nn.Module] = []
    before = channels
    for stage, count in enumerate([1 + 2 * _blocks(layers), *[2 * _blocks(layers)] * (STAGES - 1)]):
        for place in range(count):
            stride = 2 if stage and not place else 1
            convolution = nn.Conv2d(before, width << stage, 3, stride, padding=1, bias=False)
            parts += [convolution, nn.BatchNorm2d(width << stage), nn.ReLU()]
            before = width << stage
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class Residual(nn.Module):
    """Something beside its input."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, C, H, W]."""
        return self.branch(x) + x


def small_convmixer(depth: int, channels: int, classes: int, width: int = 64) -> nn.Sequential:
    """Return a ConvMixer for small images: patches of 2 by 2, kernels of 5 by 5, and each norm after a GELU."""

    def mix(convolution: nn.Conv2d) -> list[nn.Module]:
        return [convolution, nn.GELU(), nn.BatchNorm2d(width)]

    parts = mix(nn.Conv2d(channels, width, 2, stride=2))
    for _ in range(depth):
        by_channel = nn.Conv2d(width, width, 5, groups=width, padding=2)
        parts += [Residual(nn.Sequential(*mix(by_channel))), *mix(nn.Conv2d(width, width, 1))]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def _blocks(layers: int) -> int:
    """Return how many blocks a stage has."""
    blocks, rest = divmod(layers - 2, 2 * STAGES)
    if rest or blocks < 1:
        raise ModelError(f"a small residual network has 8, 14, 20, ... layers (6n + 2), got {layers}")
    return blocks

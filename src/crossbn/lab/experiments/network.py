"""A small residual network for 8 by 8 images."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two convolutions beside a projection; height and width are halved."""

    def __init__(self, in_channels: int, channels: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
        self.norm1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = norm(channels)
        self.shortcut = nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride=2, bias=False), norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, channels, H / 2, W / 2]."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def residual_network(norm: Norm, width: int = 16) -> nn.Sequential:
    """Return a network from images [N, 1, 8, 8] to the scores of ten digits.

    Its maps shrink to 1 by 1, so that in the last block a channel has as many values as the batch has images:
    the case that is hardest on statistics of one batch.

    Args:
        norm: makes a norm for a number of channels.
        width: channels at full resolution; four times as many at the end.
    """
    features = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        norm(width),
        nn.ReLU(),
        Block(width, width, norm),
        Block(width, 2 * width, norm),
        Block(2 * width, 4 * width, norm),
    )
    return nn.Sequential(features, nn.Flatten(), nn.Linear(4 * width, 10))

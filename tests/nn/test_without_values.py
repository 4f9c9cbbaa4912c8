"""Training steps on `meta`, where nothing has a value: what would make a GPU be waited for raises there.

Reading a number back does so by itself. A copy from the CPU does not, though a GPU is waited for as well: `Watch` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import crossbn
from crossbn.nn.history import History

crossbn.compat.ensure_torchvision()
from torchvision import models  # noqa: E402  # after the line before
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone  # noqa: E402

Options = dict[str, Any]
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
_FROM_PYTHON = (torch.tensor, torch.as_tensor)


class Transferred(Exception):  # noqa: N818  # of these tests
    """Something has gone to the device from elsewhere."""


class _WatchFunctions(TorchFunctionMode):
    """Refuses to make a tensor elsewhere than on the CPU from values of Python."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _FROM_PYTHON and not isinstance(args[0], Tensor) and not made.is_cpu:
            raise Transferred(f"{func.__name__}{tuple(args)} on {made.device}")
        return made


class Watch(TorchDispatchMode):
    """Refuses what reads a tensor of the CPU and gives one elsewhere, scalars that a kernel is handed aside."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        leaves = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        least = -1 if func in _COPIES else 0
        if any(each.is_cpu and each.ndim > least for each in given) and not all(each.is_cpu for each in leaves):
            raise Transferred(str(func))
        return made


def densenet() -> nn.Module:
    """DenseNet with few layers: norms read several operators, pooled maps, and the ends of blocks."""
    return models.DenseNet(growth_rate=8, block_config=(2, 3, 2), num_init_features=16)


def backbone() -> nn.Module:
    """Mask R-CNN's with fewer layers, all of it trained."""
    options: Options = {"weights": None, "norm_layer": nn.BatchNorm2d, "trainable_layers": 5}
    return resnet_fpn_backbone(backbone_name="resnet18", **options)


def train(model: nn.Module, steps: int, images: int = 2) -> None:
    for _ in range(steps):
        found = model(torch.empty(images, 3, 64, 64, device="meta"))
        torch.stack([each.sum() for each in tree_leaves(found)]).sum().backward()


def converted(make: Callable[[], nn.Module], **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = make().train()
    crossbn.convert_(model, **options)
    return model


NETWORKS = pytest.mark.parametrize(
    "make",
    [models.resnet18, densenet, backbone],
    ids=["resnet18", "densenet", "mask_rcnn_backbone"],
)


@NETWORKS
@pytest.mark.parametrize("options", [{}, {"decay": 0.7, "burn_in": 1}], ids=["automatic", "decay and burn-in"])
def test_a_training_step_reads_nothing_back(make: Callable[[], nn.Module], options: Options) -> None:
    """The first step makes tables; the next ones, with a longer window in between, neither read nor move anything."""
    model = converted(make, window=3, **options)
    train(model, 1 + options.get("burn_in", 0))
    with Watch(), _WatchFunctions():
        train(model, 1)
        crossbn.set_window_(model, 5)
        train(model, 1)
    norms = [module for module in model.modules() if isinstance(module, crossbn.nn.CrossIterBatchNorm)]
    assert {norm.plain_reason for norm in norms} == {None}  # all of them, and none was BatchNorm for a step
    segments = [segment for norm in norms for segment in norm.segments]
    assert {segment.window for segment in segments} <= {1, 5}  # 1: after pooling, DenseNet has channels of no operator
    assert all(each.history.num_steps.is_meta and each.history.slots == each.window - 1 for each in segments)


@pytest.mark.parametrize("option", [{"weights": "equal"}, {"order": 2}, {"invalid": "drop"}, {"backward": "detached"}])
def test_other_settings(option: Options) -> None:
    def make() -> nn.Module:
        small = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())  # with a bias
        return nn.Sequential(small, nn.Conv2d(8, 80, 3, bias=False), nn.BatchNorm2d(80))

    model = converted(make, window=3, **option)
    train(model, 1)
    with Watch(), _WatchFunctions():
        train(model, 2)


def test_what_would_be_waited_for_is_refused() -> None:
    on_device = torch.ones(2, device="meta")
    with Watch(), _WatchFunctions():
        assert (on_device + torch.tensor(1.0)).is_meta  # a scalar is handed to the kernel
        with pytest.raises(Transferred):
            torch.ones(2).to("meta")
        with pytest.raises(Transferred):
            on_device.copy_(torch.tensor(1.0))
        with pytest.raises(Transferred):
            torch.as_tensor(2, device="meta")
        with pytest.raises(RuntimeError, match="meta"):
            on_device.sum().item()


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("after", [0, 2, 3, 5])
@pytest.mark.parametrize("steps", [0, 2, 3, 7])
def test_another_window_keeps_the_latest_steps(before: int, after: int, steps: int) -> None:
    history = History(before, {"mean": (1,), "var": (1,), "count": (), "variogram": ()}, torch.empty(0))
    for i in range(1, 1 + steps if before else 1):
        row = {name: torch.full((1,), i) for name in ("mean", "var")}
        history.past().write_({**row, "count": torch.tensor(i), "variogram": torch.arange(1, 1 + before)})
    seen = int(history.num_steps)
    history.resize_(after)
    kept = min(seen, before, after)
    latest = [*range(seen - kept + 1, seen + 1)]
    assert int(history.num_steps) == kept
    assert history["mean"].flatten().tolist() == [*latest, *[0] * (after - kept)]
    assert history["variogram"].tolist() == [*range(1, 1 + kept), *[0] * (after - kept)]

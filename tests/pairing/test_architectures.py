"""Published architectures, traced without data: every norm is accounted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from crossbn import compat
from crossbn.pairing import Pairing, find_pairs
from tests.pairing.networks import PreActivationNet, find_by_watching, structure

compat.ensure_torchvision()
timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

models = torchvision.models

DIRECT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (models.resnet18, 20),
    "resnet50": (models.resnet50, 53),
    "resnet101": (models.resnet101, 104),
    "vgg16_bn": (models.vgg16_bn, 13),
    "mobilenet_v2": (models.mobilenet_v2, 52),
    "inception_v3": (lambda: models.inception_v3(aux_logits=True, init_weights=False), 96),
    "shufflenet_v2": (models.shufflenet_v2_x0_5, 56),
    "deeplabv3": (lambda: models.segmentation.deeplabv3_resnet50(weights_backbone=None), 60),
    "r2plus1d": (models.video.r2plus1d_18, 37),
    "timm resnet18": (lambda: timm.create_model("resnet18"), 20),
    "timm efficientnet_b0": (lambda: timm.create_model("efficientnet_b0"), 49),
}


def build_without_data(builder: Callable[..., Any], **options: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = builder(**options)
    return model


@pytest.mark.parametrize("name", DIRECT)
def test_every_norm_follows_its_operator(name: str) -> None:
    builder, count = DIRECT[name]
    model = build_without_data(builder)
    pairs = find_pairs(model)
    assert list(pairs) == [
        name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    assert len(pairs) == count
    assert [pairing.segments[0].direct for pairing in pairs.values()] == [True] * count
    assert [pairing.exclusive for pairing in pairs.values()] == [True] * count


def test_names_in_resnet() -> None:
    pairs = find_pairs(build_without_data(models.resnet18))
    producers = {name: pairing.producers for name, pairing in pairs.items()}
    assert producers["bn1"] == ("conv1",)
    assert producers["layer2.0.downsample.1"] == ("layer2.0.downsample.0",)
    assert producers["layer4.1.bn2"] == ("layer4.1.conv2",)


def test_auxiliary_head_is_reached_in_evaluation_mode_too() -> None:
    model = build_without_data(models.inception_v3, aux_logits=True, init_weights=False).eval()
    pairing = find_pairs(model)["AuxLogits.conv0.bn"]
    assert pairing.producers == ("AuxLogits.conv0.conv",)
    assert not model.training


@pytest.mark.parametrize(("name", "count"), [("fasterrcnn_resnet50_fpn_v2", 65), ("maskrcnn_resnet50_fpn_v2", 69)])
def test_detection_models_by_parts(name: str, count: int) -> None:
    pairs = find_pairs(build_without_data(getattr(models.detection, name), weights=None, weights_backbone=None))
    assert len(pairs) == count
    assert all(pairing.exclusive for pairing in pairs.values())
    assert pairs["backbone.fpn.layer_blocks.3.1"].producers == ("backbone.fpn.layer_blocks.3.0",)
    assert pairs["roi_heads.box_head.0.1"].producers == ("roi_heads.box_head.0.0",)


@pytest.fixture(scope="module")
def densenet() -> dict[str, Pairing]:
    return find_pairs(build_without_data(models.densenet121))


def test_densenet_by_slices(densenet: dict[str, Pairing]) -> None:
    assert len(densenet) == 121
    assert densenet["features.norm0"].producers == ("features.conv0",)
    assert Counter(len(pairing.segments) == 1 and pairing.segments[0].direct for pairing in densenet.values()) == {
        True: 1 + 58,  # norm0, and the second norm of each of the 6 + 12 + 24 + 16 layers
        False: 58 + 3 + 1,
    }
    third = densenet["features.denseblock2.denselayer3.norm1"]
    assert [(segment.channels, segment.reason) for segment in third.segments] == [
        (128, "after avg_pool2d"),
        (32, "features.denseblock2.denselayer1.conv2"),
        (32, "features.denseblock2.denselayer2.conv2"),
    ]
    assert [segment.direct for segment in third.segments] == [False, True, True]


def test_densenet_names_every_slice_without_operator(densenet: dict[str, Pairing]) -> None:
    slices = [segment for pairing in densenet.values() for segment in pairing.segments if not segment.producers]
    # One for every norm that reads a block from its beginning: its layers, and the norm behind it.
    assert Counter(segment.reason for segment in slices) == {
        "after max_pool2d": 6 + 1,
        "after avg_pool2d": 12 + 24 + 16 + 3,
    }
    assert densenet["features.denseblock1.denselayer1.norm1"].segments == (slices[0],)
    assert slices[0].channels == 64


def test_pre_activation_net_lists_the_flattened_sum() -> None:
    pairs = find_pairs(PreActivationNet())
    assert {name: pairing.segments[0].reason for name, pairing in pairs.items()} == {
        "blocks.0.norm1": "stem",
        "blocks.0.norm2": "blocks.0.conv1",
        "blocks.1.norm1": "blocks.0.conv2 + stem",
        "blocks.1.norm2": "blocks.1.conv1",
        "blocks.2.norm1": "blocks.1.conv2 + blocks.1.shortcut",
        "blocks.2.norm2": "blocks.2.conv1",
        "norm": "blocks.2.conv2 + blocks.1.conv2 + blocks.1.shortcut",
    }
    assert pairs["norm"].producers == ("blocks.2.conv2", "blocks.1.conv2", "blocks.1.shortcut")
    # The shortcut reads the stem as well, so nothing may be folded into it.
    assert [name for name, pairing in pairs.items() if pairing.exclusive] == [
        "blocks.0.norm2",
        "blocks.1.norm2",
        "blocks.2.norm2",
    ]


@pytest.mark.parametrize("builder", [models.resnet18, models.densenet121, PreActivationNet])
def test_watching_gives_the_same_answer_as_tracing(builder: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model, image = builder(), torch.empty(1, 3, 32, 32)
    model = model.to_empty(device="cpu").eval()
    traced, watched = find_pairs(model), find_by_watching(model, torch.zeros_like(image, device="cpu"))
    assert {name: structure(found) for name, found in watched.items()} == {
        name: structure(found) for name, found in traced.items()
    }

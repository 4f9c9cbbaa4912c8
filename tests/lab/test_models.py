"""Networks by name."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import crossbn
from crossbn.lab.models import ModelError, build_network, check_model, find_model, is_small
from crossbn.lab.networks import digits_resnet
from crossbn.lab.recipes.classification import Recipe, RecipeError
from crossbn.lab.recipes.classification.norms import give_norm_
from crossbn.lab.recipes.order import Plan


@pytest.mark.parametrize(("name", "convolutions", "width"), [("resnet8", 9, 4), ("resnet20", 21, 16)])
def test_small_networks(name: str, convolutions: int, width: int) -> None:
    network = build_network(name, 1, 7, width)
    found = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert len(found) == convolutions  # 6n + 1, and two on shortcuts
    assert (found[0].in_channels, found[0].out_channels, found[-1].out_channels) == (1, width, 4 * width)
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, 7)


def test_first_stage_keeps_the_size_and_the_others_halve_it() -> None:
    network = build_network("resnet14", 3, 10)
    sizes = []
    for module in network[3:9]:  # type: ignore[index]
        module.register_forward_hook(lambda _, __, output: sizes.append(tuple(output.shape[1:])))
    network(torch.randn(1, 3, 12, 12).repeat(2, 1, 1, 1))
    assert sizes == [(16, 12, 12)] * 2 + [(32, 6, 6)] * 2 + [(64, 3, 3)] * 2


@pytest.mark.parametrize(("name", "norms"), [("resnet8_norm_last", 9), ("convmixer4", 9)])
def test_every_norm_is_behind_the_activation_of_a_convolution(name: str, norms: int) -> None:
    network = build_network(name, 3, 10, width=2)
    before, after = (copy.deepcopy(network) for _ in range(2))
    assert crossbn.convert_(before, window=4, example_inputs=(torch.randn(2, 3, 8, 8),)).summary() == (
        f"{norms} norms: 0 compensated, 0 pooled, {norms} left alone"
    )
    through = crossbn.convert_(after, window=4, compensate_through="activations")
    assert after(torch.randn(2, 3, 8, 8)).shape == (2, 10)
    assert through.summary() == f"{norms} norms: {norms} compensated, 0 pooled, 0 left alone"


@pytest.mark.parametrize(("norm", "kind"), [("evonorm_s0", "EvoNorm2dS0"), ("frn_tlu", "FilterResponseNormTlu2d")])
def test_norms_that_are_activations_stand_for_both(norm: str, kind: str) -> None:
    network = build_network("resnet8", 3, 10, width=4)
    recipe = Recipe(model="resnet8", norm=norm, width=4)
    give_norm_(network, recipe, Plan.of(recipe, 100, 1))
    found = [module for module in network.modules() if type(module).__name__ == kind]
    assert len(found) == 9
    # The stem's and the first of each block activate; the others are before a sum.
    assert [module.apply_act for module in found] == [True, *[True, False], *[True, False, False] * 2]
    assert not any(isinstance(module, nn.ReLU | nn.BatchNorm2d) for module in network.modules())
    assert network(torch.randn(1, 3, 8, 8)).shape == (1, 10)
    with pytest.raises(RecipeError, match="our small residual networks, got convmixer4"):
        give_norm_(build_network("convmixer4", 3, 10), replace(recipe, model="convmixer4"), Plan.of(recipe, 100, 1))


def make_own(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(num_classes))


def test_a_network_of_ones_own_is_told_its_classes() -> None:
    network = build_network(f"{__name__}:make_own", 3, 7)
    assert network(torch.randn(2, 3, 4, 4)).shape == (2, 7)
    assert isinstance(find_model("torch.nn:ReLU")(), nn.ReLU)
    with pytest.raises(ModelError, match=r"torch\.nn:ReLU has no BatchNorm"):
        build_network("torch.nn:ReLU", 3, 7)


def test_a_module_that_lacks_another_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacking.py").write_text("import nowhere_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=r"'lacking:net' cannot be imported: No module named 'nowhere_at_all'"):
        find_model("lacking:net")


def test_torchvisions_have_their_own_classes_unless_told() -> None:
    assert sum(each.numel() for each in find_model("mobilenet_v3_small")().parameters()) == 2_542_856


def test_the_demos_network_shrinks_to_single_pixels() -> None:
    network = build_network("digits_resnet", 1, 10)
    assert network[0](torch.zeros(3, 1, 8, 8)).shape == (3, 64, 1, 1)  # type: ignore[index]
    groups = digits_resnet(lambda channels: nn.GroupNorm(4, channels), width=8)
    assert [module.num_channels for module in groups.modules() if isinstance(module, nn.GroupNorm)] == [
        *(8, 8, 8, 8),
        *(16, 16, 16),
        *(32, 32, 32),
    ]


def test_names_that_torchvision_has_are_its() -> None:
    assert not is_small("resnet50")
    assert is_small("resnet56")
    network = build_network("resnet18", 1, 5)
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_weights_are_of_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    first = build_network(name, 3, 4, seed=5).state_dict()
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), after)
    second, other = build_network(name, 3, 4, seed=5).state_dict(), build_network(name, 3, 4, seed=6).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_networks_with_heads_on_the_way_return_one_score() -> None:
    with torch.device("meta"):
        network = build_network("googlenet", 3, 4).train()
        assert network(torch.empty(2, 3, 64, 64)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such", r"there is no model 'no_such': there are resnet8, .* and \d+ more \(package.module:function names"),
        ("resnt18", "there is no model 'resnt18': did you mean resnet18"),
        ("resnet21", r"6n \+ 2"),
        ("alexnet", "alexnet has no BatchNorm that a norm could take the place of: take resnet18"),
        ("vit_b_16", "vit_b_16 has no BatchNorm"),
        ("fasterrcnn_resnet50_fpn", "there is no model 'fasterrcnn_resnet50_fpn'"),
        ("nowhere.models:net", "'nowhere.models:net' cannot be imported: No module named 'nowhere'"),
        ("torch.nowhere:net", r"'torch\.nowhere:net' cannot be imported: No module named 'torch\.nowhere'"),
        ("torch.nn:Convolution", r"the module 'torch\.nn' has no 'Convolution'"),
        ("torch:__version__", "which cannot be called"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_model(name)

"""What a recipe fills in and refuses."""

from typing import Any

import pytest
import torch
from torch import nn

from crossbn.convert import cross_iteration_norms
from crossbn.integrations.lightning import CrossIterationNorm
from crossbn.lab.models import build_network
from crossbn.lab.recipes.classification import Recipe, RecipeError
from crossbn.lab.recipes.classification.norms import give_norm_
from crossbn.lab.recipes.norms import switch_norm_
from crossbn.lab.recipes.order import Plan
from crossbn.nn import BatchRenorm, SparseSwitchNorm


def test_learning_rate_and_window_follow_the_batch() -> None:
    assert [Recipe(batch_size=size).effective_learning_rate() for size in (1, 4, 32)] == [0.1 / 32, 0.1 / 8, 0.1]
    assert Recipe(batch_size=4, learning_rate=0.5).effective_learning_rate() == 0.5
    assert [Recipe(batch_size=size).effective_window for size in (1, 2, 4, 16)] == [8, 8, 4, 1]
    assert Recipe(batch_size=4, window=6).effective_window == 6


def test_equal_recipes_are_the_same_work_whatever_wraps() -> None:
    assert Recipe(wrap=lambda network, _: network) == Recipe()
    assert "wrap" not in Recipe().settings()
    assert Recipe(seed=1) != Recipe()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"points": 0}, "points must be at least 1, got 0"),
        ({"learning_rate": -1}, "learning_rate must be at least 0, got -1"),
        ({"norm": "cbm"}, "there is no norm 'cbm': did you mean cbn"),
        ({"norm": None}, "there is no norm None"),
        ({"reparametrize": "xs"}, "there is no reparametrization 'xs': "),
        ({"norm": "bn", "window": 4}, "a window is of cbn and naive_cbn, got norm 'bn' and window 4: leave one"),
        (
            {"norm": "bn", "switch_norm": "cbn", "switch_epoch": 100},
            "switch_epoch 100 is not before the end, after 100",
        ),
        ({"norm": "bn", "switch_epoch": 1}, "switch_epoch and switch_options are of a switch_norm, which is not given"),
        ({"norm_options": {"foo": 1}}, "no option is called 'foo'; there are window, burn_in, order"),
        ({"precision": "8"}, "there is no precision '8': there are 32, 64, bf16-mixed"),
        ({"window": 10**9}, "window must be at most 10000, got 1000000000"),
        ({"norm": "bn", "norm_options": {"foo": 1}}, "Batch Normalization: there is no option 'foo': there are eps"),
        ({"norm_options": {"order": 3}}, "order must be one of 0, 1, 2, got 3"),
        ({"norm": "gn", "norm_options": {"foo": 1}}, "Group Normalization: there is no option 'foo': there are eps"),
        ({"norm": "bn", "switch_norm": "gn", "switch_options": {"foo": 1}}, "there is no option 'foo'"),
        ({"norm": "gn", "switch_norm": "bn"}, "not from gn to bn"),
        ({"norm": "bn", "switch_norm": "ssn"}, "not from bn to ssn"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe(**changes)


@pytest.mark.parametrize(("width", "groups"), [(16, 8), (1, 1), (5, 1), (128, 32)])
def test_group_norm_of_narrow_networks_has_fewer_groups(width: int, groups: int) -> None:
    assert Recipe(model="resnet8", width=width).default_options("gn") == {"groups": groups}
    assert Recipe(model="resnet18", width=width).default_options("gn") == {}


def test_a_window_may_be_that_of_the_other_norm() -> None:
    assert Recipe(norm="bn", switch_norm="cbn", switch_epoch=1, window=3).effective_window == 3


def given(recipe: Recipe) -> tuple[nn.Module, Plan, Any]:
    plan = Plan.of(recipe, 40, 1)
    network = build_network(recipe.model, 1, 3, recipe.width)
    return network, plan, give_norm_(network, recipe, plan)


def test_norms_whose_clock_is_the_run() -> None:
    chosen = given(Recipe(model="resnet8", norm="ssn", batch_size=4, epochs=5))[0]
    assert {m.schedule.stop for m in chosen.modules() if isinstance(m, SparseSwitchNorm)} == {50}
    renorm = given(Recipe(model="resnet8", norm="brn", batch_size=4, epochs=5))[0]
    assert {m.schedule.r_max.stop for m in renorm.modules() if isinstance(m, BatchRenorm)} == {40_000 * 50 / 160_000}


def test_cross_iteration_norms_come_with_their_callback() -> None:
    options = {"positions": 9, "history_dtype": "bfloat16"}
    recipe = Recipe(model="resnet8", norm="naive_cbn", batch_size=4, burn_in_epochs=1.5, norm_options=options)
    network, _, callback = given(recipe)
    assert isinstance(callback, CrossIterationNorm)
    assert callback.burn_in_steps == 15
    settings = {norm.settings for norm in cross_iteration_norms(network).values()}
    found = {(each.window, each.order, each.positions, each.history_dtype) for each in settings}
    assert found == {(4, 0, 9, torch.bfloat16)}


@pytest.mark.parametrize(("norm", "after"), [("bn", "cbn"), ("cbn", "bn"), ("bn", "naive_cbn"), ("bn", "gn")])
def test_switching_keeps_the_parameters(norm: str, after: str) -> None:
    recipe = Recipe(model="resnet8", norm=norm, switch_norm=after, switch_epoch=1, batch_size=4)
    network, plan, callback = given(recipe)
    before = list(network.parameters())
    switch_norm_(network, recipe, plan)
    assert all(a is b for a, b in zip(before, network.parameters(), strict=True))
    norms = cross_iteration_norms(network).values()
    assert [norm.settings.order for norm in norms][:1] == {"cbn": [1], "naive_cbn": [0]}.get(after, [])
    assert isinstance(callback, CrossIterationNorm) is (norm == "cbn")
    kinds = {"bn": nn.BatchNorm2d, "gn": nn.GroupNorm}
    if after in kinds:
        assert sum(type(module) is kinds[after] for module in network.modules()) == 9


@pytest.mark.parametrize("norm", ["gn", "cbn", "brn"])
def test_unknown_options_are_told_with_the_norm(norm: str) -> None:
    with pytest.raises(RecipeError, match="no_such_option"):
        Recipe(model="resnet8", norm=norm, norm_options={"no_such_option": 1})


def test_weights_are_reparametrized_before_the_norms_look_at_them() -> None:
    network, _, _ = given(Recipe(model="resnet8", norm="gn", reparametrize="ws"))
    weights = [m.weight for m in network.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert all(weight.flatten(1).mean(1).abs().max() < 1e-6 for weight in weights)

"""One training: what it computes, reports and writes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn
from crossbn.lab.recipes.classification import Machine, Point, Progress, Recipe, RecipeError, train
from crossbn.lab.recipes.classification.networks import build_network
from crossbn.lab.recipes.classification.order import Order, Plan
from crossbn.lab.recipes.classification.sources import load_images
from tests.lab.recipes.classification.runs import SMALL, finish


def plain_loop(recipe: Recipe) -> tuple[nn.Module, list[float]]:
    """What `train` should do, written out for one process and precision 32."""
    images = load_images(recipe)
    plan = Plan.of(recipe, len(images.train), 1)
    network = build_network(recipe.model, images.channels, images.classes, recipe.width, recipe.seed)
    if recipe.norm == "cbn":
        burn_in = round(recipe.burn_in_epochs * plan.forwards_per_epoch)
        crossbn.convert_(network, batch_size=recipe.batch_size, burn_in=burn_in)
    rate = recipe.effective_learning_rate
    optimizer = torch.optim.SGD(network.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    losses = []
    for number, draw in enumerate(Order(plan, range(plan.forwards), recipe.seed)):
        pixels, classes = images.train[draw]
        loss = F.cross_entropy(network(pixels), classes)
        losses.append(loss.item())
        (loss / recipe.accumulate).backward()
        if (number + 1) % recipe.accumulate == 0:
            step = number // recipe.accumulate
            optimizer.param_groups[0]["lr"] = rate / 2 * (1 + math.cos(math.pi * step / plan.steps))
            optimizer.step()
            optimizer.zero_grad()
    return network, losses


@pytest.mark.parametrize(
    "changes",
    [{"norm": "bn"}, {"norm": "cbn"}, {"norm": "cbn", "burn_in_epochs": 0.5, "accumulate": 3, "batch_size": 2}],
    ids=str,
)
def test_equals_a_plain_loop(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = replace(SMALL, **changes)
    outcome, checkpoint = finish(recipe, tmp_path)
    network, losses = plain_loop(recipe)
    for name, expected in network.state_dict().items():
        torch.testing.assert_close(checkpoint["state_dict"][f"network.{name}"], expected, rtol=1e-5, atol=1e-6)
    half = len(losses) // 2
    found = [point.train_loss for point in outcome.curve]
    assert found == pytest.approx([sum(losses[:half]) / half, sum(losses[half:]) / half], rel=1e-5)
    images = load_images(recipe)
    pixels, classes = images.test[next(iter(Order(Plan(30, 30, 1, 1, 1, None), range(1), 0)))]
    correct = (network.eval()(pixels).argmax(1) == classes).sum().item()
    assert outcome.accuracy == correct / 30 == outcome.curve[-1].test_accuracy


def test_equal_seeds_give_equal_runs_and_weights_at_the_start_whatever_the_norm() -> None:
    starts: dict[str, list[Tensor]] = {}

    def note(network: nn.Module, recipe: Recipe) -> nn.Module:
        starts[recipe.norm] = [each.detach().clone() for each in network.parameters()]
        return network

    curves = [train(replace(SMALL, norm=norm, wrap=note, epochs=1)).curve for norm in ("bn", "bn", "gn", "cbn")]
    assert curves[0] == curves[1]
    assert len(set(curves)) == 3
    for norm in ("gn", "cbn"):
        assert all(torch.equal(a, b) for a, b in zip(starts["bn"], starts[norm], strict=True))
    assert train(replace(SMALL, norm="bn", epochs=1, seed=1)).curve != curves[0]


def test_weights_that_are_added_are_of_the_seed_too() -> None:
    def other_head(network: nn.Module, _: Recipe) -> nn.Module:
        assert isinstance(network, nn.Sequential)
        network[-1] = nn.Linear(16, 10)
        return network

    recipe = replace(SMALL, epochs=1, wrap=other_head)
    torch.manual_seed(1)
    first = train(recipe).curve
    torch.manual_seed(2)
    assert train(recipe).curve == first


def test_random_numbers_of_the_caller_are_let_be() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    train(replace(SMALL, epochs=1))
    assert torch.equal(torch.rand(4), expected)


def test_watch_hears_points_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    from crossbn.lab.recipes.classification import clock

    monkeypatch.setattr(clock, "_SECONDS_BETWEEN_NEWS", 0.0)
    heard: list[Point | Progress] = []
    outcome = train(replace(SMALL, points=4), watch=heard.append)
    assert [each for each in heard if isinstance(each, Point)] == list(outcome.curve)
    assert [point.epoch for point in outcome.curve] == [0.5, 1.0, 1.5, 2.0]
    progress = [each for each in heard if isinstance(each, Progress)]
    # Before each forward but the first after a point, which has no loss to tell yet.
    assert [each.share for each in progress] == [pytest.approx(i / 20) for i in range(20) if i % 5]
    assert progress[0].phrase.startswith("loss 2.")
    assert outcome.test_images == 30
    assert 0 < outcome.seconds_per_step < outcome.seconds


def test_record_log_and_checkpoint(tmp_path: Path) -> None:
    recipe = replace(SMALL, norm_options={"order": 2}, seed=4)
    outcome = train(recipe, tmp_path)
    (line,) = (tmp_path / "record.jsonl").read_text().splitlines()
    record = json.loads(line)
    told = {name: record[name] for name in recipe.settings()}
    assert Recipe(**told) == recipe
    assert [Point(**point) for point in record["curve"]] == list(outcome.curve)
    assert (record["accuracy"], record["window_used"], record["processes"]) == (outcome.accuracy, 4, 1)
    assert {"crossbn", "torch", "lightning", "torchvision"} <= record["versions"].keys()
    assert {"machine", "commit", "seconds", "seconds_per_step"} <= record.keys()
    assert [path.name.startswith("events.out") for path in (tmp_path / "log").glob("events*")] == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "log", "record.jsonl"]
    again = train(recipe, tmp_path)
    assert again.curve == outcome.curve
    assert (tmp_path / "record.jsonl").read_text().splitlines() == [line]


def test_log_has_the_curve_and_the_learning_rate(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    outcome = train(SMALL, tmp_path)
    events = event_accumulator.EventAccumulator(str(tmp_path / "log")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("test_accuracy")]
    assert found == [
        (10, pytest.approx(outcome.curve[0].test_accuracy)),
        (20, pytest.approx(outcome.curve[1].test_accuracy)),
    ]
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert [step for step, _ in losses] == [9, 19]
    assert losses[1][1] == pytest.approx(plain_loop(SMALL)[1][19], rel=1e-4)
    rates = [event.value for event in events.Scalars("lr-SGD")]
    assert rates == pytest.approx([0.01 * (1 + math.cos(math.pi * step / 20)) for step in (9, 19)])


@pytest.mark.parametrize("precision", ["bf16-mixed", "64"])
def test_precision(precision: str) -> None:
    kinds = set()

    class Probe(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kinds.add(x.dtype)
            return x

    def probe(network: nn.Module, _: Recipe) -> nn.Module:
        assert isinstance(network, nn.Sequential)
        network.insert(1, Probe())  # after the first convolution
        return network

    outcome = train(replace(SMALL, norm="bn", epochs=1, precision=precision, wrap=probe))
    assert kinds == {torch.bfloat16 if precision == "bf16-mixed" else torch.float64}
    assert outcome.curve[0].train_loss == pytest.approx(
        train(replace(SMALL, norm="bn", epochs=1)).curve[0].train_loss, rel=0.05
    )


def test_grey_images_for_a_network_that_takes_three_channels() -> None:
    recipe = replace(SMALL, model="squeezenet1_1", norm="bn", image_size=33, train_images=8, epochs=1)
    assert len(train(recipe).curve) == 1


def test_one_value_per_channel_is_told() -> None:
    recipe = replace(SMALL, norm="bn", batch_size=1, image_size=4, train_images=4)
    with pytest.raises(RecipeError, match=r"Batch Normalization has a single value per channel .* batch of 1"):
        train(recipe)


@pytest.mark.parametrize(
    ("recipe", "machine", "message"),
    [
        (replace(SMALL, precision="31"), Machine(), "Precision '31' is invalid"),
        (replace(SMALL, data="no_such"), Machine(), "there is no data set 'no_such': there are imagenet, cifar10"),
        (SMALL, Machine(accelerator="abacus"), "accelerator"),
        (SMALL, Machine(devices=2, strategy="ddp_spawn"), "cannot bring results back"),
        (replace(SMALL, train_images=3), Machine(), "3 training images do not fill a step"),
    ],
)
def test_what_cannot_be_had_is_told(recipe: Recipe, machine: Machine, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        train(recipe, machine=machine)

"""One training: what it computes, reports and writes."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossbn
from crossbn.lab.models import build_network
from crossbn.lab.recipes.classification import Machine, Point, Progress, Recipe, RecipeError, train
from crossbn.lab.recipes.classification.images import load_images
from crossbn.lab.recipes.order import Order, Plan
from crossbn.lab.recipes.recipe import DivergedError
from crossbn.lab.records import Record, RecordError, locked
from tests.lab.data.test_folders import write_images
from tests.lab.recipes.classification.runs import SMALL, finish

NAMES = [".lock", "last.ckpt", "log", "previous.ckpt", "record.jsonl"]


def plain_loop(recipe: Recipe) -> tuple[nn.Module, list[float]]:
    """What `train` should do, written out for one process and precision 32."""
    images = load_images(recipe)
    plan = Plan.of(recipe, len(images.train), 1)
    network = build_network(recipe.model, images.channels, images.classes, recipe.width, recipe.seed)
    if recipe.norm == "cbn":
        burn_in = round(recipe.burn_in_epochs * plan.forwards_per_epoch)
        crossbn.convert_(network, batch_size=recipe.batch_size, burn_in=burn_in)
    rate = recipe.effective_learning_rate()
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
    from crossbn.lab.recipes import clock

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
    record = Record.from_json(line)
    assert (record.kind, record.seed, record.settings["processes"]) == ("classify", 4, 1)
    told = {name: value for name, value in record.settings.items() if name != "processes"}
    assert Recipe(**told, seed=record.seed) == recipe
    assert [Point(**point) for point in record.values["curve"]] == list(outcome.curve)
    assert (record.values["accuracy"], record.values["window_used"]) == (outcome.accuracy, 4)
    assert record.values["learning_rate_used"] == 0.02
    assert {"tested_images", "seconds", "seconds_per_step", "waiting_share"} <= record.values.keys()
    assert {"crossbn", "torch", "lightning", "torchvision"} <= record.environment["versions"].keys()
    assert [path.name.startswith("events.out") for path in (tmp_path / "log").glob("events*")] == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    again = train(recipe, tmp_path)
    assert again == outcome
    assert (tmp_path / "record.jsonl").read_text().splitlines() == [line]


def test_a_finished_run_is_told_without_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = train(SMALL, tmp_path)
    for path in (tmp_path / "last.ckpt", tmp_path / "previous.ckpt"):
        path.unlink()
    monkeypatch.setitem(sys.modules, "crossbn.lab.recipes.run", None)
    assert train(SMALL, tmp_path) == outcome


def test_a_damaged_record_is_noticed_before_training(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text('{"kind": "classify", "na')
    with pytest.raises(RecordError, match=r"line 1 of .*record\.jsonl is not a record of crossbn's"):
        train(SMALL, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["record.jsonl"]
    train(replace(SMALL, epochs=1), tmp_path, fresh=True)
    assert len((tmp_path / "record.jsonl").read_text().splitlines()) == 1


def test_a_record_of_before_counts(tmp_path: Path) -> None:
    outcome = train(SMALL, tmp_path)
    record = Record.from_json((tmp_path / "record.jsonl").read_text())
    made = {name: record.environment[name] for name in ("versions", "machine", "commit")}
    values = {name: value for name, value in record.values.items() if name != "waiting_share"}
    old = {**record.settings, "seed": record.seed, **values, **made}
    (tmp_path / "record.jsonl").write_text(json.dumps(old) + "\n")
    (tmp_path / "last.ckpt").unlink()
    assert train(SMALL, tmp_path) == replace(outcome, waiting_share=0.0)


def test_two_processes_do_not_work_in_one_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(RecordError, match=f"another process works in {tmp_path}: wait for it, or"):
        train(SMALL, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def explode(network: nn.Module, _: Recipe) -> nn.Module:
    class Explosion(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += self.training
            return x * math.inf if self.training and self.calls == 13 else x

    assert isinstance(network, nn.Sequential)
    return nn.Sequential(network, Explosion())


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    recipe = replace(SMALL, norm="bn", wrap=explode)
    sentence = r"the loss is not finite after \d+ steps: a learning rate below 0\.02 may help, or a larger batch"
    with pytest.raises(DivergedError, match=f"{sentence}$"):
        train(recipe)
    with pytest.raises(DivergedError, match=f"{sentence}; the last checkpoint is from before$"):
        train(recipe, tmp_path, machine=Machine(checkpoint_steps=1))
    kept = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert kept["global_step"] == 12
    assert all(value.isfinite().all() for value in kept["state_dict"].values())
    assert not (tmp_path / "record.jsonl").exists()


def test_who_keeps_going_gets_a_record_without_nan(tmp_path: Path) -> None:
    outcome = train(replace(SMALL, norm="bn", wrap=explode), tmp_path, machine=Machine(keep_going=True))
    assert math.isnan(outcome.curve[-1].train_loss)
    (line,) = (tmp_path / "record.jsonl").read_text().splitlines()
    assert "NaN" not in line
    assert Record.from_json(line).values["curve"][-1]["train_loss"] is None
    again = train(replace(SMALL, norm="bn"), tmp_path)
    assert math.isnan(again.curve[-1].train_loss)


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
    recipe = replace(SMALL, model="shufflenet_v2_x0_5", norm="bn", image_size=33, train_images=8, epochs=1)
    assert len(train(recipe).curve) == 1


def test_one_value_per_channel_is_told() -> None:
    recipe = replace(SMALL, norm="bn", batch_size=1, image_size=4, train_images=4)
    with pytest.raises(RecipeError, match=r"Batch Normalization has a single value per channel .* batch of 1"):
        train(recipe)


@pytest.mark.parametrize(
    ("recipe", "machine", "message"),
    [
        (replace(SMALL, data="no_such"), Machine(), "there is no data set 'no_such': there are imagenet, cifar10"),
        (SMALL, Machine(accelerator="abacus"), "accelerator"),
        (SMALL, Machine(devices=2, strategy="ddp_spawn"), "cannot bring results back"),
        (replace(SMALL, train_images=3), Machine(), "3 training images do not fill a step"),
    ],
)
def test_what_cannot_be_had_is_told(recipe: Recipe, machine: Machine, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        train(recipe, machine=machine)


def test_training_does_not_depend_on_who_prepares_the_batches(tmp_path: Path) -> None:
    recipe = replace(
        SMALL, data=str(write_images(tmp_path)), batch_size=2, image_size=8, train_images=None, test_images=None
    )
    alone, helped = (train(recipe, machine=Machine(workers=workers)) for workers in (0, 2))
    assert alone.curve == helped.curve
    assert (len(alone.curve), alone.test_images) == (2, 4)

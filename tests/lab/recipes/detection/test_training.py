"""One training: what it computes, reports and writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import crossbn
from crossbn.lab.data.drawing import Draw, mix
from crossbn.lab.recipes.detection import Machine, Point, Progress, Recipe, RecipeError, train
from crossbn.lab.recipes.detection.images import load_images
from crossbn.lab.recipes.detection.networks import build_network
from crossbn.lab.recipes.detection.recipe import learning_rate_factor
from crossbn.lab.recipes.detection.scores import ScoreKeeper
from crossbn.lab.recipes.order import Order, Plan
from crossbn.lab.records import Record
from tests.lab.recipes.detection.runs import SMALL, finish, write_folder


def plain_loop(recipe: Recipe) -> tuple[nn.Module, list[float], float | None]:
    """What `train` should do, written out for one process and precision 32; with the score at the end."""
    images = load_images(recipe)
    plan = Plan.of(recipe, len(images.train), 1)
    network = build_network(recipe, len(images.classes))
    if recipe.norm == "cbn":
        crossbn.convert_(network, batch_size=recipe.batch_size)
    rate = 0.02 * recipe.batch_size / 16
    optimizer = torch.optim.SGD(network.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    torch.manual_seed(mix(recipe.seed, 0))
    losses = []
    for step, draw in enumerate(Order(plan, range(plan.forwards), recipe.seed)):
        optimizer.param_groups[0]["lr"] = rate * learning_rate_factor(step, plan.steps, plan.steps_per_epoch)
        loss = sum(network(*images.train[draw]).values())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    keeper = ScoreKeeper(masks=recipe.has_masks)
    network.eval()
    for number in range(len(images.test)):
        pixels, targets = images.test[Draw(torch.tensor([number]), 0)]
        with torch.no_grad():
            keeper.add(network(pixels), targets)
    return network, losses, keeper.scores()["AP"]


@pytest.mark.parametrize("changes", [{"norm": "bn"}, {"norm": "cbn", "model": "mask_rcnn"}], ids=str)
def test_equals_a_plain_loop(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = replace(SMALL, **changes)
    outcome, checkpoint = finish(recipe, tmp_path)
    network, losses, score = plain_loop(recipe)
    for name, expected in network.state_dict().items():
        torch.testing.assert_close(checkpoint["state_dict"][f"network.{name}"], expected, rtol=1e-4, atol=1e-5)
    half = len(losses) // 2
    found = [point.train_loss for point in outcome.curve]
    assert found == pytest.approx([sum(losses[:half]) / half, sum(losses[half:]) / half], rel=1e-4)
    assert outcome.scores["AP"] == score


def test_learning_rate_warms_up_and_falls_after_nine_and_eleven_of_twelve_epochs() -> None:
    factors = [learning_rate_factor(step, 12 * 2000, 2000) for step in range(12 * 2000)]
    assert factors[:3] == pytest.approx([0.001, 0.002, 0.003])
    assert factors[999] == factors[9 * 2000 - 1] == 1.0
    assert factors[9 * 2000] == factors[11 * 2000 - 1] == 0.1
    assert factors[11 * 2000] == factors[-1] == 0.01
    assert learning_rate_factor(49, 1200, 100) == 0.5  # one epoch, where that is shorter


def test_learning_rate_is_in_proportion_to_the_images_of_a_step() -> None:
    assert Recipe(batch_size=4).effective_learning_rate(4) == 0.02
    assert Recipe(batch_size=2).effective_learning_rate(1) == 0.0025
    assert Recipe(batch_size=2, accumulate=8).effective_learning_rate(1) == 0.02
    assert Recipe(learning_rate=0.1).effective_learning_rate(4) == 0.1


def test_record_log_and_news(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    heard: list[Point | Progress] = []
    recipe = replace(SMALL, scales=(48,), norm_options={"order": 2}, seed=4)
    outcome = train(recipe, tmp_path, heard.append)
    assert [each for each in heard if isinstance(each, Point)] == list(outcome.curve)
    (line,) = (tmp_path / "record.jsonl").read_text().splitlines()
    record = Record.from_json(line)
    told = {name: value for name, value in record.settings.items() if name != "processes"}
    assert Recipe(**told, seed=record.seed) == recipe
    values = record.values
    assert [Point(**point) for point in values["curve"]] == list(outcome.curve)
    assert (values["window_used"], values["learning_rate_used"], values["tested_images"]) == (8, 0.0025, 3)
    assert 0 <= values["waiting_share"] < 1
    assert {"pycocotools", "faster-coco-eval", "torchvision", "crossbn"} <= record.environment["versions"].keys()
    events = event_accumulator.EventAccumulator(str(tmp_path / "log")).Reload()
    assert [event.value for event in events.Scalars("AP")] == pytest.approx([p.scores["AP"] for p in outcome.curve])
    assert train(recipe, tmp_path).curve == outcome.curve
    assert (tmp_path / "record.jsonl").read_text().splitlines() == [line]


def test_waiting_for_images_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from crossbn.lab.data.scenes import SceneImages

    quick = train(replace(SMALL, norm="bn", epochs=1)).waiting_share
    prepare = SceneImages.__getitem__

    def prepare_slowly(self: SceneImages, draw: Draw) -> Any:
        time.sleep(0.3)
        return prepare(self, draw)

    monkeypatch.setattr(SceneImages, "__getitem__", prepare_slowly)
    assert train(replace(SMALL, norm="bn", epochs=1)).waiting_share > quick + 0.2


def test_training_does_not_depend_on_who_prepares_the_batches(tmp_path: Path) -> None:
    recipe = replace(SMALL, data=str(write_folder(tmp_path)), norm="bn", batch_size=1, train_images=None, epochs=1)
    alone, helped = (train(recipe, machine=Machine(workers=workers)) for workers in (0, 2))
    assert alone.curve == helped.curve


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    recipe = replace(SMALL, backbone="efficientnet_lite0", where="heads", image_size=128, channels=32, proposals=32)
    outcome = train(replace(recipe, train_images=80, test_images=20, epochs=4, points=1, learning_rate=0.02), tmp_path)
    assert outcome.scores["AP50"] is not None
    assert outcome.scores["AP50"] > 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "xn"}, "there is no norm 'xn': there are none, bn"),
        ({"where": "nowhere"}, "where must be heads or all, got 'nowhere'"),
        ({"backbone": "vgg"}, "there is no backbone 'vgg': there are resnet18"),
        ({"norm": "none"}, 'norm "none" is for heads'),
        ({"norm": "none", "where": "heads", "model": "fcos_resnet50_fpn"}, "whose heads are built here"),
        ({"norm_momentum": -0.1}, "norm_momentum must be at least 0"),
        ({"norm": "gn", "switch_norm": "bn"}, "not from gn to bn"),
        ({"switch_norm": "xn"}, "there is no norm 'xn': there are bn"),
        ({"proposals": 0}, "proposals must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        replace(SMALL, **changes)


def test_there_must_be_images_for_a_step() -> None:
    with pytest.raises(RecipeError, match="1 training images do not fill a step"):
        train(replace(SMALL, train_images=1))

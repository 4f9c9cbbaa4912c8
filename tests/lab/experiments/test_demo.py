import pytest
import torch
from torch import nn

from crossbn.lab.experiments.demo import Demo, build_model, findings, in_order
from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.progress import Progress
from crossbn.lab.records import Record, Task
from crossbn.nn import CrossIterBatchNorm2d
from tests.lab.experiments.handmade import record, three_norms


def kinds(demo: Demo) -> list[tuple[str, int, int]]:
    tasks = demo.configs(Scale.SMALL, 1)
    return [(each.settings["norm"], each.settings["batch_size"], each.settings["window"]) for each in tasks]


def test_default_runs() -> None:
    assert kinds(Demo()) == [("bn", 32, 1), ("bn", 2, 1), ("gn", 2, 1), ("cbn", 2, 8)]
    tasks = Demo().configs()
    assert len(tasks) == len({(task.name, task.seed) for task in tasks}) == 12


def test_learning_rate_is_proportional_to_the_batch_size() -> None:
    ceiling, *rest = Demo(batch_size=4).configs(Scale.SMALL, 1)
    assert {task.settings["learning_rate"] for task in rest} == {ceiling.settings["learning_rate"] / 8}


def test_no_run_twice_and_none_that_cannot_be_done() -> None:
    assert kinds(Demo(batch_size=32)) == [("bn", 32, 1), ("gn", 32, 1), ("cbn", 32, 1)]
    assert kinds(Demo(batch_size=1, window=16)) == [("bn", 32, 1), ("gn", 1, 1), ("cbn", 1, 16)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_images": 31}, "31 training images do not fill a batch of 32"),
        ({"batch_size": 64, "train_images": 40}, "40 training images do not fill a batch of 64"),
        ({"batch_size": 1, "window": 1}, "a single value per channel"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
    ],
)
def test_refuses(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Demo(**options)


def test_rows_are_in_the_order_of_the_runs_with_means_and_standard_deviations() -> None:
    rows = Demo().rows(three_norms())
    assert [row.name for row in rows] == ["BN at batch 32", "BN at batch 2", "CBN at batch 2"]
    accuracies = [row.ours["accuracy"] for row in rows]
    assert accuracies == [pytest.approx(each) for each in ((95, 1), (41, 4), (94, 1))]
    assert [row.ours["seeds"].mean for row in rows] == [3, 3, 3]
    assert [row.ours.get("window") for row in rows] == [None, None, (8, None)]
    (alone,) = Demo().rows([record(0.2, 0.5, seconds=2.0)])
    assert (alone.ours["accuracy"], alone.ours["seconds"]) == ((50, None), (2.0, None))
    assert [(each.name, each.seed) for each in in_order(three_norms())][-2:] == [("CBN at batch 2", i) for i in (1, 2)]


def test_findings_follow_from_the_numbers() -> None:
    result, certainty = findings(three_norms())
    assert result == (
        "CBN at batch 2, with a window of 8, classified 94.0% of 200 test images correctly: "
        "1.0 points below BN at batch 32 and 53.0 points above BN at batch 2."
    )
    # Differences of 56, 53 and 50 points, and of -3, 0 and 0, with Student's t of 4.3 at three seeds.
    assert certainty == (
        "Over 3 seeds, CBN's distance to BN at batch 2 is more than chance; CBN's distance to BN at batch 32 may be "
        "chance (95% confidence, Student's t of the differences seed by seed)."
    )


def test_findings_of_one_seed_claim_nothing() -> None:
    result, certainty = findings([record(0.5), record(0.5, norm="bn")])
    assert "level with BN at batch 2" in result
    assert certainty == "One seed cannot tell a difference from chance."


def small(norm: str, **options: int) -> tuple[Demo, Task]:
    demo = Demo(**{"epochs": 2, "train_images": 40, "batch_size": 8, **options})
    return demo, next(each for each in reversed(demo.configs(Scale.SMALL, 1)) if each.settings["norm"] == norm)


@pytest.mark.parametrize(
    ("norm", "kind"), [("bn", nn.BatchNorm2d), ("gn", nn.GroupNorm), ("cbn", CrossIterBatchNorm2d)]
)
def test_every_norm_of_the_network_is_the_run_s(norm: str, kind: type[nn.Module]) -> None:
    found = [module for module in build_model(norm, 4).modules() if isinstance(module, kind)]
    assert len(found) == 10
    assert all(each.num_groups == 8 for each in found if isinstance(each, nn.GroupNorm))


def test_equal_seeds_give_equal_weights_and_an_equal_order_of_images() -> None:
    states = []
    for norm in ("bn", "gn", "cbn"):
        torch.manual_seed(3)
        weights = [p.detach() for p in build_model(norm, 2).parameters() if p.ndim == 4]
        states.append([*weights, torch.randperm(100)])
    for other in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))


@pytest.mark.parametrize("norm", ["bn", "gn", "cbn"])
def test_a_run_can_be_repeated_exactly(norm: str) -> None:
    demo, task = small(norm)
    seen: list[Progress] = []
    first = demo.work(task, seen.append)
    assert [each.phrase for each in seen] == [f"{point['test_accuracy']:.1%}" for point in first["curve"]]
    assert first["curve"] == demo.work(task, lambda _: None)["curve"]
    assert first["curve"] != demo.work(Task(task.kind, task.name, 1, task.settings), lambda _: None)["curve"]
    assert (first["test_images"], first["accuracy"]) == (797, first["curve"][-1]["test_accuracy"])


def test_points_are_evenly_spaced_as_far_as_there_are_steps() -> None:
    for size, expected in ((8, [0.4, 0.6, 0.8, 1.0, 1.4, 1.6, 1.8, 2.0]), (40, [1.0, 2.0])):
        demo, task = small("bn", batch_size=size)
        assert [point["epoch"] for point in demo.work(task, lambda _: None)["curve"]] == expected


def test_cbn_learns_at_batch_size_2() -> None:
    demo, task = small("cbn", batch_size=2, train_images=200, epochs=1)
    assert demo.work(task, lambda _: None)["accuracy"] > 0.6


def test_a_record_of_the_earlier_shape_answers_its_run() -> None:
    earlier = (
        '{"experiment": "demo", "name": "CBN at batch 2", "norm": "cbn", "batch_size": 2, "window": 8, "seed": 0, '
        '"settings": {"epochs": 4, "train_images": 500, "learning_rate": 0.0015625, "momentum": 0.9}, "accuracy": 0.5, '
        '"curve": [[0.25, 0.1], [4.0, 0.5]], "test_images": 797, "seconds": 3.5, "versions": {}, "machine": {}}'
    )
    found = Record.from_json(earlier)
    assert found.key == Demo().configs(Scale.SMALL, 1)[-1].key
    assert (found.values["accuracy"], found.values["seconds"]) == (0.5, 3.5)
    assert found.values["curve"][-1] == {"epoch": 4.0, "test_accuracy": 0.5}

from dataclasses import replace

import pytest
import torch
from torch import nn

from crossbn.lab.experiments.demo import configs
from crossbn.lab.experiments.digits import Images
from crossbn.lab.experiments.network import residual_network
from crossbn.lab.experiments.records import Point, Run
from crossbn.lab.experiments.training import accuracy, build_model, train
from crossbn.nn import CrossIterBatchNorm2d


def run_of(norm: str, **options: int) -> Run:
    runs = configs(seeds=1, **{"epochs": 2, "train_images": 40, "batch_size": 8, **options})
    return next(run for run in reversed(runs) if run.norm == norm)


def test_last_map_is_1_by_1() -> None:
    features = residual_network(nn.BatchNorm2d)[0]
    assert features(torch.zeros(3, 1, 8, 8)).shape == (3, 64, 1, 1)


@pytest.mark.parametrize(
    ("norm", "kind"), [("bn", nn.BatchNorm2d), ("gn", nn.GroupNorm), ("cbn", CrossIterBatchNorm2d)]
)
def test_every_norm_of_the_network_is_the_run_s(norm: str, kind: type[nn.Module]) -> None:
    model = build_model(run_of(norm))
    assert sum(type(module) is kind for module in model.modules()) == 10


def test_equal_seeds_give_equal_weights_and_an_equal_order_of_images() -> None:
    states = []
    for norm in ("bn", "gn", "cbn"):
        torch.manual_seed(3)
        weights = [p.detach() for p in build_model(run_of(norm)).parameters() if p.ndim == 4]
        states.append([*weights, torch.randperm(100)])
    for other in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))


def test_accuracy_counts_and_leaves_the_model_training() -> None:
    scores = nn.Linear(64, 10).requires_grad_(False)
    scores.weight.zero_()
    scores.bias.zero_()[7] = 1.0  # says 7 to everything
    model = nn.Sequential(nn.Flatten(), scores)
    assert accuracy(model, Images(torch.zeros(4, 1, 8, 8), torch.tensor([7, 1, 7, 7]))) == 0.75
    assert model.training


@pytest.mark.parametrize("norm", ["bn", "gn", "cbn"])
def test_a_run_can_be_repeated_exactly(norm: str) -> None:
    seen: list[Point] = []
    first = train(run_of(norm), seen.append)
    assert tuple(seen) == first.curve == train(run_of(norm)).curve
    assert first.curve != train(replace(run_of(norm), seed=1)).curve
    assert first.test_images == 797


def test_points_are_evenly_spaced_as_far_as_there_are_steps() -> None:
    assert [point.epoch for point in train(run_of("bn")).curve] == [0.4, 0.6, 0.8, 1.0, 1.4, 1.6, 1.8, 2.0]
    assert [point.epoch for point in train(run_of("bn", batch_size=40)).curve] == [1.0, 2.0]


def test_cbn_learns_at_batch_size_2() -> None:
    record = train(run_of("cbn", batch_size=2, train_images=200, epochs=1))
    assert record.accuracy > 0.6

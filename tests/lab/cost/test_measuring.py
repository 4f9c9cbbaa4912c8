from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import crossbn
from crossbn.lab.cost import CaseError, Flops
from crossbn.lab.cost.factory import put_norm_, take_norms_out_
from crossbn.lab.cost.measuring import measure
from tests.lab.cost.handmade import case, tiny_network

E = 2 * 8 * 16, 2 * 4 * 16  # elements of the two norms
WEIGHTS = 8 * 3 * 9, 4 * 8


def test_every_norm_is_measured() -> None:
    news: list[str] = []
    bn, gn, cbn = measure(case(), tiny_network, news.append)
    assert [record.norm for record in (bn, gn, cbn)] == ["bn", "gn", "cbn"]
    assert set(bn.timings) == {"train", "eval", "folded", "folded_to_gn"}
    assert set(gn.timings) == {"train", "eval"}
    assert set(cbn.timings) == {"train", "burn_in", "eval", "folded", "folded_to_gn"}
    assert all(timing.rounds == 6 for record in (bn, gn, cbn) for timing in record.timings.values())
    assert {bn.timings[name].ratio for name in ("train", "eval", "folded")} == {1.0}
    assert all(timing.seconds > 0 for timing in cbn.timings.values())
    assert "training, round 5" in news
    assert any(each.startswith("inference, round 6, ± ") for each in news)


def test_folded_inference_is_compared_with_gn_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleave(work: dict[tuple[str, Any], object], *_: object, **__: object) -> object:
        return {(name, variant): [2.0 if variant.norm == "gn" else 1.0] * 6 for name, variant in work}

    monkeypatch.setattr("crossbn.lab.cost.measuring.interleave", interleave)
    _, _, cbn = measure(case(), tiny_network)
    assert (cbn.timings["folded_to_gn"].ratio, cbn.timings["folded"].ratio) == (0.5, 1.0)
    _, cbn = measure(case(norms=("bn", "cbn")), tiny_network)
    assert "folded_to_gn" not in cbn.timings


def test_memory_and_flops() -> None:
    bn, gn, cbn = measure(case(), tiny_network)
    assert {record.paired_weight_bytes for record in (bn, gn, cbn)} == {4 * sum(WEIGHTS)}
    assert (bn.history_bytes, gn.history_bytes) == (0, 0)
    assert cbn.history_bytes >= 2 * 4 * sum(WEIGHTS)
    assert cbn.peak_bytes - bn.peak_bytes >= cbn.history_bytes
    forward = 2 * E[0] * 3 * 9 + 2 * E[1] * 8
    backward = 2 * E[0] * 3 * 9 + 2 * (2 * E[1] * 8)  # the first convolution's input needs no gradient
    assert {record.network_flops for record in (bn, gn, cbn)} == {Flops(forward, backward)}
    assert bn.norm_flops == Flops(6 * sum(E), 9 * sum(E))
    assert gn.norm_flops == Flops(6 * sum(E), 7 * sum(E))
    assert cbn.norm_flops.forward > bn.norm_flops.forward
    assert cbn.norm_flops.backward > bn.norm_flops.backward


def test_the_window_is_full_when_a_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def interleave(work: dict[tuple[str, object], Callable[[], None]], *_: object, **options: int) -> object:
        calls.append(options["warm_up"])
        return {key: [1.0] * 6 for key in work}

    monkeypatch.setattr("crossbn.lab.cost.measuring.interleave", interleave)
    measure(case(window=7), tiny_network)
    measure(case(window=1), tiny_network)
    assert calls == [7, 7, 3, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch's compiler
def test_compiled_beside_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    found = measure(case(compile=True, norms=("bn", "cbn")), tiny_network)
    assert [(record.norm, record.compiled) for record in found] == [
        ("bn", False),
        ("cbn", False),
        ("bn", True),
        ("cbn", True),
    ]
    assert found[2].timings["train"].ratio == 1.0
    assert set(found[3].timings) == {"train", "burn_in", "eval", "folded"}
    assert found[3].norm_flops == found[1].norm_flops


def test_threads_are_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    measure(case(threads=2, norms=("bn",)), tiny_network)
    with pytest.raises(CaseError):
        measure(case(threads=3), nn.ReLU)
    assert calls == [2, 5, 3, 5]


def test_measuring_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    measure(case(norms=("bn",)), tiny_network)
    assert torch.rand(1) == expected


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: nn.Linear(5, 5), "tiny, input 3x6x6, batch 2, window 3: the model does not run: mat1 and mat2"),
        (lambda: nn.Conv2d(3, 4, 3), "tiny, input 3x6x6, batch 2, window 3: the model has no BatchNorm"),
    ],
)
def test_models_that_cannot_be_measured(build: Callable[[], nn.Module], complaint: str) -> None:
    with pytest.raises(CaseError, match=complaint):
        measure(case(), build)


class OwnNorm(nn.BatchNorm2d):
    """Might do anything."""


def test_a_norm_that_stays_is_not_passed_over() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), OwnNorm(4))
    with pytest.raises(CaseError, match=r"window 3: gn cannot replace 1: .*OwnNorm is a subclass"):
        put_norm_(model, "gn", case(), torch.ones(2, 3, 6, 6))


def test_norms_get_the_case_s_settings() -> None:
    model = tiny_network()
    put_norm_(model, "cbn", case(window=5, positions=7), torch.ones(2, 3, 6, 6), burn_in=9)
    assert isinstance(model[1], crossbn.nn.CrossIterBatchNorm2d)
    assert (model[1].settings.window, model[1].settings.positions, model[1].settings.burn_in) == (5, 7, 9)
    untouched = tiny_network()
    put_norm_(untouched, "bn", case(), torch.ones(2, 3, 6, 6))
    assert type(untouched[1]) is nn.BatchNorm2d
    take_norms_out_(untouched)
    assert [type(untouched[i]) for i in (1, 4)] == [nn.Identity, nn.Identity]


@pytest.mark.filterwarnings("ignore::crossbn.ConversionWarning")
def test_norms_that_cannot_be_compensated_are_measured_with_the_others() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.BatchNorm2d(4))
    put_norm_(model, "cbn", case(), torch.ones(2, 3, 6, 6))
    assert isinstance(model[1], crossbn.nn.CrossIterBatchNorm2d)
    with pytest.raises(CaseError, match="cbn cannot replace 1: after max_pool2d"):
        put_norm_(nn.Sequential(nn.MaxPool2d(2), nn.BatchNorm2d(3)), "cbn", case(), torch.ones(2, 3, 6, 6))

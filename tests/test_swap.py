"""Replacing the norms of a model."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn import nn as cnn
from crossbn.nn import NORMS

OWN: dict[str, dict[str, Any]] = {
    "gn": {"groups": 2},
    "brn": {"schedule": cnn.RenormSchedule().scaled(1e-3)},
    "ssn": {"steps": 20},
}


class Network(nn.Module):
    """A residual block with a projection, as in torchvision's ResNet, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, eps=1e-3, momentum=0.2)
        self.conv1, self.norm1 = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.projection = nn.Sequential(nn.Conv2d(4, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm0(self.stem(x)).relu()
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        out: Tensor = self.head((y + self.projection(x)).relu().mean((2, 3)))
        return out


NAMES = ("norm0", "norm1", "norm2", "projection.1")


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 2, 8, 8, generator=generator), torch.arange(8) % 3


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 25) -> list[float]:
    x, labels = data()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", NORMS)
def test_training_with_an_optimizer_made_before(name: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    gammas = {key: model.get_parameter(f"{key}.weight") for key in NAMES}
    report = crossbn.swap_norm_(model, name, **OWN.get(name, {}))
    assert report.replaced == NAMES
    assert report.left == {}
    losses = fit(model, optimizer)
    assert losses[-1] < (0.95 if name == "frozen_bn" else 0.35) * losses[0]
    for key, gamma in gammas.items():
        if name == "frozen_bn":
            assert torch.equal(gamma, torch.ones_like(gamma))
        else:
            assert model.get_parameter(f"{key}.weight") is gamma
            assert not torch.equal(gamma, torch.ones_like(gamma))


@pytest.mark.parametrize("name", NORMS)
def test_what_is_handed_over(name: str) -> None:
    model = network().double()
    fit_once = model(data()[0].double())
    fit_once.sum().backward()
    model.norm0.eval()
    old = copy.deepcopy(model)
    crossbn.swap_norm_(model, name)
    new = model.norm0
    assert new.eps == 1e-3
    assert getattr(new, "momentum", 0.2) == 0.2
    assert [module.training for module in (new, model.norm1)] == [False, True]
    state = new.state_dict()
    assert all(value.dtype == torch.float64 for value in state.values() if value.is_floating_point())
    for key in state.keys() & old.norm0.state_dict().keys():
        assert torch.equal(state[key], old.norm0.state_dict()[key]), key
    if "running_mean" in state:
        assert state["running_mean"].abs().min() > 0


def test_frozen_norms_share_nothing_with_the_old() -> None:
    model = network()
    gamma = model.norm0.weight
    crossbn.swap_norm_(model, "frozen_bn")
    with torch.no_grad():
        gamma.fill_(7)
    assert torch.equal(model.norm0.weight, torch.ones(4))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_affine_is_kept(name: str, affine: bool) -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, affine=affine))
    crossbn.swap_norm_(model, name)
    assert {"1.weight", "1.bias"} <= model.state_dict().keys() if affine else "1.weight" not in model.state_dict()
    assert model(torch.randn(3, 2, 9)).shape == (3, 4, 7)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (2, 6, 5)),
        (nn.BatchNorm2d, (2, 6, 5, 5)),
        (nn.BatchNorm3d, (2, 6, 3, 3, 3)),
        (nn.SyncBatchNorm, (2, 6, 5, 5)),
    ],
)
@pytest.mark.parametrize("name", NORMS)
def test_every_kind_of_batch_norm(name: str, kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Identity(), kind(6))
    options: dict[str, Any] = {"unpaired": "pool"} if name == "cbn" else {}
    assert crossbn.swap_norm_(model, name, **options).replaced == ("1",)
    dims = len(shape) - 2
    direct = crossbn.nn.make_norm(name, 6, dims if kind is not nn.SyncBatchNorm else None)
    assert type(model[1]) is type(direct)
    x = torch.randn(shape)
    torch.testing.assert_close(model(x), direct(x))


def test_a_norm_that_no_operator_feeds_is_left() -> None:
    model = nn.Sequential(nn.Conv2d(2, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.BatchNorm2d(6))
    report = crossbn.swap_norm_(model, "cbn")
    assert (report.replaced, report.left) == (("1",), {"3": "after relu"})
    assert [type(model[i]) for i in (1, 3)] == [cnn.CrossIterBatchNorm2d, nn.BatchNorm2d]


def test_cross_iteration_norms_are_replaced_and_their_hooks_taken_off() -> None:
    model, plain = network(), network()
    crossbn.convert_(model, window=3)
    crossbn.swap_norm_(model, "gn")
    assert [type(model.get_submodule(name)) for name in NAMES] == [nn.GroupNorm] * 4
    assert not any(module._forward_hooks for module in model.modules())
    crossbn.swap_norm_(plain, "gn")
    x, _ = data()
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize(("name", "order"), [("cbn", 1), ("naive_cbn", 0)])
def test_cross_iteration_norms_are_paired(name: str, order: int) -> None:
    model = network()
    crossbn.swap_norm_(model, name)
    norm = model.norm1
    assert isinstance(norm, cnn.CrossIterBatchNorm)
    assert (norm.settings.window, norm.settings.order) == (4, order)
    assert [producer.module for source in norm.segments for producer in source.producers] == [model.conv1]
    crossbn.swap_norm_(model, name, batch_size=2)
    assert norm.settings.window == 8


def test_from_norm_to_norm_and_back() -> None:
    model, plain = network(), network()
    for name in ("brn", "sn", "kn", "sync_bn", "bin", "cbn", "ssn", "bn"):
        assert crossbn.swap_norm_(model, name).replaced == NAMES
    assert [type(model.get_submodule(name)) for name in NAMES] == [nn.BatchNorm2d] * 4
    assert list(model.state_dict()) == list(plain.state_dict())
    x, _ = data()
    assert torch.equal(model(x), plain(x))


def test_kalman_norms_are_chained() -> None:
    """The projection and the block read the same features: both follow the norm before the block."""
    model = network()
    crossbn.swap_norm_(model, "kn", gain=0.5)
    links: dict[str, tuple[nn.Module, ...] | None] = {}
    for name in NAMES:
        norm = model.get_submodule(name)
        assert isinstance(norm, cnn.KalmanNorm)
        assert norm.gain == 0.5
        links[name] = norm._link and tuple(norm._link)
    assert links.pop("norm0") is None
    expected: dict[str, tuple[nn.Module, ...]] = {
        "norm1": (model.norm0, model.conv1),
        "norm2": (model.norm1, model.conv2),
        "projection.1": (model.norm0, model.projection[0]),
    }
    assert links == expected


def test_kalman_norms_follow_the_nearest_that_fits() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())))
    crossbn.swap_norm_(model, "kn")
    first, second, third = (norm for norm in model if isinstance(norm, cnn.KalmanNorm))
    assert (first.previous, second.previous, third.previous) == (None, first, second)
    crossbn.swap_norm_(model, "kn", filter_fn=lambda *_: False)
    assert third.previous is second


class Backwards(nn.Module):
    """Two branches that run in another order than they were made in, as those of a feature pyramid do."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.early = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        early: Tensor = self.early(x)
        return early + self.late(x) if bool((x == x).all()) else early  # nothing can trace it


def test_kalman_norms_take_nothing_from_another_forward() -> None:
    model = Backwards()
    plain = copy.deepcopy(model)
    crossbn.swap_norm_(model, "kn")
    follower: Any = model.early[1]
    assert follower.previous is model.late[1]
    for training in (True, False, True):
        model.train(training)
        plain.train(training)
        x = torch.randn(2, 3, 4, 4)
        torch.testing.assert_close(model(x), plain(x))
        model(x).sum().backward()
        plain(x)


def test_filter() -> None:
    model = network()
    report = crossbn.swap_norm_(model, "gn", filter_fn=lambda _, name: name != "norm1")
    assert report.left == {"norm1": "filter_fn says so"}
    assert type(model.norm1) is nn.BatchNorm2d
    assert str(report) == "3 norms are gn now, 1 left alone\nnorm1: filter_fn says so"


def test_filter_leaves_cross_iteration_norms_alone() -> None:
    model = network()
    crossbn.convert_(model, window=3)
    crossbn.swap_norm_(model, "in", filter_fn=lambda _, name: name == "norm0")
    assert isinstance(model.norm1, cnn.CrossIterBatchNorm2d)


def test_shared_norm_stays_shared() -> None:
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Conv2d(4, 4, 1), norm)
    crossbn.swap_norm_(model, "brn")
    assert isinstance(model[1], cnn.BatchRenorm)
    assert model[1] is model[3]


def test_unknown_subclass_is_left_alone_and_reported() -> None:
    class Special(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.Conv2d(2, 4, 1), Special(4))
    report = crossbn.swap_norm_(model, "gn")
    assert report.replaced == ()
    assert "Special is a subclass whose behaviour might be lost" in report.left["1"]


@pytest.mark.parametrize(
    ("model", "name", "options", "error", "message"),
    [
        (network(), "batch", {}, ValueError, "there is no norm 'batch'"),
        (network(), "cbm", {}, ValueError, "there is no norm 'cbm': did you mean cbn"),
        (network(), "gn", {"window": 4}, TypeError, "no option 'window': there are eps, momentum, .* groups"),
        (
            network(),
            "gn",
            {"groups": 3},
            ValueError,
            r"the norm '[\w.]+': \d+ channels cannot be in 3 groups: give one of 1, 2, 4",
        ),
        (network(), "cbn", {"window": 10**9}, ValueError, "window must be at most 10000, got 1000000000"),
        (network(), "cbn", {"groups": 4}, TypeError, "groups"),
        (network(), "naive_cbn", {"order": 1}, TypeError, "order"),
        (nn.BatchNorm2d(4), "gn", {}, ValueError, r"the model is a norm itself, BatchNorm2d\(4"),
        (
            nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False)),
            "brn",
            {},
            ValueError,
            "the norm '0': BatchRenorm needs running statistics",
        ),
    ],
)
def test_wrong(model: nn.Module, name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    before = repr(model)
    with pytest.raises(error, match=message):
        crossbn.swap_norm_(model, name, **options)
    assert repr(model) == before


@pytest.mark.parametrize("name", ["sync_bn", "brn", "kn"])
def test_folding(name: str) -> None:
    """Norms that are BatchNorm in evaluation fold like it."""
    model = network()
    crossbn.swap_norm_(model, name, **OWN.get(name, {}))
    fit(model, torch.optim.SGD(model.parameters(), 0.05), 3)
    folded = crossbn.fold(model)
    assert isinstance(folded.get_submodule("norm1"), nn.Identity)
    x, _ = data()
    torch.testing.assert_close(folded(x), model.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bin", "sn", "ssn", "gn"])
def test_norms_that_do_not_fold_are_kept(name: str) -> None:
    model = network()
    crossbn.swap_norm_(model, name)
    x, _ = data()
    torch.testing.assert_close(crossbn.fold(model)(x), model.eval()(x))

"""Population statistics."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import crossbn


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4, track_running_stats=False),
    ).double()


def uneven_batches() -> list[Tensor]:
    """Of several sizes, one of a single example, far from the origin."""
    return [torch.randn(n, 2, 5, 6, dtype=torch.float64) * n + 3 for n in (4, 1, 7, 2)]


def plain(model: nn.Sequential) -> nn.Sequential:
    return model


def converted(model: nn.Sequential) -> nn.Sequential:
    crossbn.convert_(model, window=3)
    return model


@pytest.mark.parametrize("prepare", [plain, converted])
def test_equals_the_statistics_of_all_data(prepare: Callable[[nn.Sequential], nn.Sequential]) -> None:
    model = prepare(network())
    batches = uneven_batches()
    crossbn.recalibrate_(model, batches)
    x = model[0](torch.cat(batches)).detach()
    state = model.state_dict()
    torch.testing.assert_close(state["1.running_mean"], x.mean((0, 2, 3)), rtol=0, atol=1e-12)
    torch.testing.assert_close(state["1.running_var"], x.var((0, 2, 3)), rtol=1e-12, atol=0)


def test_splitting_the_data_otherwise_changes_nothing() -> None:
    model = network()
    other = copy.deepcopy(model)
    everything = torch.cat(uneven_batches())
    crossbn.recalibrate_(model, everything.split(1))
    crossbn.recalibrate_(other, [(everything, "labels")])
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-12, atol=1e-12)


def test_second_norm_sees_the_first_one_recalibrated() -> None:
    """On one batch: the second one's statistics are those behind the first one's, as evaluation has them."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)).double()
    (x,) = uneven_batches()[:1]
    crossbn.recalibrate_(model, [x])
    y = model[:2].eval()(x).detach()
    torch.testing.assert_close(model.state_dict()["2.running_mean"], y.mean((0, 2, 3)), rtol=0, atol=1e-12)
    torch.testing.assert_close(model.state_dict()["2.running_var"], y.var((0, 2, 3)), rtol=1e-12, atol=0)


def test_nothing_else_changes() -> None:
    model = converted(network())
    for _ in range(2):
        model(torch.randn(2, 2, 5, 6, dtype=torch.float64)).sum().backward()
    model[3].eval()
    state, history = copy.deepcopy(model.state_dict()), crossbn.history_state(model)
    flags = {name: module.training for name, module in model.named_modules()}
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    batches = uneven_batches()
    random = torch.get_rng_state()
    crossbn.recalibrate_(model, batches)
    assert torch.equal(torch.get_rng_state(), random)
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    torch.testing.assert_close(crossbn.history_state(model), history, rtol=0, atol=0)
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])]
    assert changed == ["1.running_mean", "1.running_var"]


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    model = converted(network())
    undisturbed = copy.deepcopy(model)
    model[3].p = undisturbed[3].p = 0.0  # type: ignore[assignment]
    x, y = (torch.randn(2, 2, 5, 6, dtype=torch.float64) for _ in range(2))
    model(x)
    undisturbed(x)
    crossbn.recalibrate_(model, uneven_batches())
    assert torch.equal(model(y), undisturbed(y))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_single_values(momentum: float | None) -> None:
    norm = nn.BatchNorm1d(1, momentum=momentum)
    crossbn.recalibrate_(norm, iter(torch.tensor([[[1.0]], [[2.0]], [[6.0]]])))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert float(norm.running_mean) == 3
    assert float(norm.running_var) == pytest.approx(7)


def test_no_batch() -> None:
    model = converted(network())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="needs at least one batch"):
        crossbn.recalibrate_(model, [])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(module.training for module in model.modules())


def test_failing_model_is_left_as_it_was() -> None:
    model = network()
    with pytest.raises(RuntimeError, match="channels"):
        crossbn.recalibrate_(model, [torch.zeros(1, 5, 6, 6, dtype=torch.float64)])
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_broken_batch_does_not_count() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3).double()
    good = [torch.randn(4, 3, dtype=torch.float64) for _ in range(2)]
    crossbn.recalibrate_(norm, [good[0], torch.full((4, 3), float("nan"), dtype=torch.float64), good[1]])
    torch.testing.assert_close(norm.running_var, torch.cat(good).var(0))


def test_one_tensor_is_not_an_iterable_of_batches() -> None:
    with pytest.raises(TypeError, match=r"got one tensor of shape \(4, 3\)"):
        crossbn.recalibrate_(nn.BatchNorm1d(3), torch.randn(4, 3))

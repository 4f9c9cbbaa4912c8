import copy
import io

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.analysis.variants import (
    VARIANTS,
    ExtrapolatingHistory,
    Growing,
    Recalibrated,
    Span,
    extrapolate_,
    give_votes_,
)
from crossbn.convert import cross_iteration_norms
from crossbn.nn import CrossIterBatchNorm1d
from tests.analysis.networks import batch, network, train

WINDOW = 4


def one_layer(**options: object) -> nn.Sequential:
    """A linear layer and its norm, whose running statistics are those of the last step."""
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5, momentum=1.0)).double()
    crossbn.convert_(model, **{"window": WINDOW, **options})  # type: ignore[arg-type]  # of all kinds
    return model


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, dtype=torch.float64, generator=generator) * (1 + i) + i for i in range(count)]


def running_mean(model: nn.Sequential) -> Tensor:
    norm = model[1]
    assert isinstance(norm, CrossIterBatchNorm1d)
    assert norm.running_mean is not None
    return norm.running_mean


def test_a_window_that_has_grown_is_that_of_the_norm() -> None:
    plain, voting = network(window=3), network(window=3)
    give_votes_(voting, Growing(3, Span(steps=6, burn_in=0)))
    steps = [batch(step) for step in range(6)]
    torch.testing.assert_close(train(voting, steps), train(plain, steps))


def test_the_window_grows_as_the_learning_rate_falls() -> None:
    span = Span(steps=400, burn_in=100)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, span.steps)
    rates = []
    for _ in range(span.steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    growing = Growing(2, span)
    windows = [int(growing.window(torch.tensor(pushed))) for pushed in range(300)]
    assert windows == [max(2, int(2 * rates[100] / rate)) for rate in rates[100:]]
    assert [windows.index(size) for size in (2, 3, 4, 8)] == [0, 83, 119, 178]
    assert windows == sorted(windows)
    assert growing.window(torch.tensor(400)) > 1e6  # beyond the end, all there is


def test_a_growing_window_pools_its_steps() -> None:
    model = one_layer(burn_in=5)
    growing = Growing(2, Span(steps=20, burn_in=5))
    give_votes_(model, growing)
    seen: list[Tensor] = []
    sizes = []
    for step, y in enumerate(inputs(20)):
        model(y)
        seen.insert(0, model[0](y).detach())
        window = min(WINDOW, int(growing.window(torch.tensor(step - 5)))) if step > 5 else 1
        sizes.append(window)
        torch.testing.assert_close(running_mean(model), torch.stack([x.mean(0) for x in seen[:window]]).mean(0))
    assert sizes == [1] * 6 + [2] * 4 + [3] + [4] * 9


def test_extrapolation_follows_a_steady_drift() -> None:
    drift = torch.tensor([0.5, -2.0, 0.0], dtype=torch.float64)
    model, lagging = one_layer(), one_layer()
    extrapolate_(model, 0.1)
    start = inputs(1)[0]
    for step in range(300):
        for each in (model, lagging):
            each(start + step * drift)
    today = model[0](start + 299 * drift).mean(0).detach()
    a_step = model[0](drift).detach()
    torch.testing.assert_close(running_mean(model), today)
    mean_age = sum(range(WINDOW)) / WINDOW
    late = lagging[0](start + (299 - mean_age) * drift).mean(0).detach()
    torch.testing.assert_close(running_mean(lagging), late)
    history = cross_iteration_norms(model)["1"].sources[0].history
    assert isinstance(history, ExtrapolatingHistory)
    torch.testing.assert_close(history.slopes["mean"], a_step)
    torch.testing.assert_close(history.slopes["var"], torch.zeros(5, dtype=torch.float64))


def test_slopes_begin_when_all_places_are_filled() -> None:
    model = one_layer()
    extrapolate_(model, 0.1)
    history = cross_iteration_norms(model)["1"].sources[0].history
    assert isinstance(history, ExtrapolatingHistory)
    x = []
    for y in inputs(WINDOW):
        assert not history.slopes["mean"].any()
        model(y)
        x.append(model[0](y).detach())
    for name, moment in (("mean", Tensor.mean), ("var", lambda each, _: each.var(0, correction=0))):
        lacking = moment(x[-1], 0) - torch.stack([moment(each, 0) for each in x[:-1]]).mean(0)
        torch.testing.assert_close(history.slopes[name], 0.1 * lacking / 2)  # the mean of the ages 1, 2, 3
    crossbn.reset_history_(model)
    assert not history.slopes["var"].any()


def test_nothing_is_learned_from_a_step_that_is_not_remembered() -> None:
    model = one_layer()
    extrapolate_(model, 0.1)
    for y in inputs(5):
        model(y)
    before = crossbn.history_state(model)
    model(inputs(1)[0] * float("inf"))
    after = crossbn.history_state(model)
    assert {"1/0/mean_slope", "1/0/var_slope"} < after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_recalibration_is_that_of_the_last_batches() -> None:
    plain = network(window=3)
    wrapped = Recalibrated(copy.deepcopy(plain), batches=4)
    steps = [batch(step) for step in range(6)]
    assert train(wrapped, steps) == train(plain, steps)  # training is not touched
    crossbn.recalibrate_(plain, [torch.cat(steps[2:])])
    expected = plain.eval()(batch(9))
    assert torch.equal(wrapped.eval()(batch(9)), expected)
    norm = wrapped.network[4]  # type: ignore[index]  # a Sequential
    norm.running_mean.add_(1)
    assert not torch.equal(wrapped(batch(9)), expected)  # once is enough while nothing is trained
    train(wrapped.train(), [batch(7)])
    crossbn.load_history_state(plain, crossbn.history_state(wrapped.network))
    plain.load_state_dict(wrapped.network.state_dict())
    crossbn.recalibrate_(plain, [torch.cat([*steps[3:], batch(7)])])
    assert torch.equal(wrapped.eval()(batch(9)), plain(batch(9)))


def test_recalibration_remembers_training_steps_only() -> None:
    wrapped = Recalibrated(network(window=3))
    with torch.no_grad():
        wrapped(batch(0))
    before = copy.deepcopy(wrapped.network)
    assert torch.equal(wrapped.eval()(batch(1)), before.eval()(batch(1)))


def saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"weights": model.state_dict(), "history": crossbn.history_state(model)}, file)
    file.seek(0)
    return file


def made(name: str) -> nn.Module:
    return VARIANTS[name](network(window=3, burn_in=2), Span(steps=12, burn_in=2))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("copied", [False, True], ids=["saved", "copied"])
def test_goes_on_from_its_state(name: str, copied: bool) -> None:
    model = made(name)
    train(model, [batch(step) for step in range(7)])
    if copied:
        again = copy.deepcopy(model)
    else:
        again = made(name)
        state = torch.load(saved(model), weights_only=True)
        again.load_state_dict(state["weights"])
        crossbn.load_history_state(again, state["history"])
    rest = [batch(step) for step in range(7, 12)]
    assert train(again, rest) == train(model, rest)
    assert torch.equal(again.eval()(batch(0)), model.eval()(batch(0)))


def test_variants_of_norms_need_norms() -> None:
    with pytest.raises(ValueError, match="this one has no cross-iteration norm"):
        give_votes_(nn.Sequential(nn.BatchNorm1d(2)), Growing(2, Span(steps=6, burn_in=0)))

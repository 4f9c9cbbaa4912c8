"""weights="auto": how much each remembered step weighs is seen while training."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.functional import weighting
from crossbn.nn.history import History
from crossbn.ops import Past, reference
from tests.ops.test_cpu import Dense, train, twice
from tests.support import compiled_code, history_of, last_pooled, norm_of

F64 = torch.float64


class Oracle:
    """What a norm should do with frozen weights, from whole batches, one number at a time."""

    def __init__(self, conv: nn.Module, slots: int) -> None:
        self.conv, self.slots = conv, slots
        self.moments: list[tuple[Tensor, Tensor, int]] = []  # the latest first
        self.averages: list[float] = [0.0] * slots
        self.seen = [0] * slots

    def step(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pooled mean and variance, and remember the batch."""
        x = self.conv(batch).detach().transpose(0, 1).flatten(1)
        mean, var, past = x.mean(1), x.var(1, correction=0), self.moments[: self.slots]
        noise, drift = self.line(len(past))
        noise = max(noise, 1e-300)  # nothing is known yet
        usual = sum(count for *_, count in past) / max(len(past), 1)
        price = weighting.GRADIENT_PRICE if len(batch) > 1 else 0.0
        worth, factors = 0.0, list[float]()
        for age in range(len(past), 0, -1):
            worth += past[age - 1][2] / usual
            factors.insert(0, noise / (noise + worth * (drift + (price if age == 1 else 0))))
            worth *= factors[0]
        weights, since = [1.0], 1.0
        for factor, (*_, count) in zip(factors, past, strict=True):
            since *= factor
            weights.append(since * count / x.shape[1])
        steps = [(mean, var, x.shape[1]), *past]
        pooled = sum(weight * m for weight, (m, _, _) in zip(weights, steps, strict=True)) / sum(weights)
        moment = sum(weight * (v + m**2) for weight, (m, v, _) in zip(weights, steps, strict=True)) / sum(weights)
        unit = moment - pooled**2
        for i, (m, v, _) in enumerate(past):
            found = float((((m - mean) ** 2 + (v.sqrt() - var.sqrt()) ** 2) / unit).clamp_max(16).mean())
            self.seen[i] += 1
            self.averages[i] += max(1 / self.seen[i], weighting.AVERAGING_RATE) * (found - self.averages[i])
        self.moments = [(mean, var, x.shape[1]), *past]
        return pooled, unit

    def line(self, ages: int) -> tuple[float, float]:
        if ages < 2:
            return sum(self.averages[:ages]) / 2, 0.0
        rows = torch.tensor([[1.0, age] for age in range(1, ages + 1)], dtype=F64)
        values = torch.tensor(self.averages[:ages], dtype=F64)
        intercept, slope = torch.linalg.lstsq(rows, values.unsqueeze(1)).solution.flatten().tolist()
        if slope < 0:
            return float(values.mean()) / 2, 0.0
        if intercept < 0:
            return 1e-38, float(rows[:, 1] @ values / rows[:, 1].square().sum())
        return intercept / 2, slope


def batches(steps: int, walk: float, images: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(max(1, images - (step % 5 == 4)), 2, 5, 6, generator=generator, dtype=F64) + walk * step
        for step in range(steps)
    ]


@pytest.mark.parametrize("images", [4, 1])
@pytest.mark.parametrize("walk", [0.0, 0.2])
@pytest.mark.parametrize("path", ["compiled", "reference", "tensors only"])
@pytest.mark.parametrize("wide", [True, False])
def test_every_step_is_the_oracles(
    images: int, walk: float, path: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighting, "AVERAGING_RATE", 0.15)
    if path == "tensors only":  # as on a GPU and in a compiled step
        past = History.past

        def unread(history: History) -> Past:
            return past(history)._replace(is_readable=False)

        monkeypatch.setattr(History, "past", unread)
    model = last_pooled(wide, weights="auto")
    oracle, norm = Oracle(model[0], 3), norm_of(model)
    with compiled_code(path == "compiled"):
        for step, batch in enumerate(batches(16, walk, images)):
            model(batch)
            mean, var = oracle.step(batch)
            torch.testing.assert_close(norm.running_mean, mean)
            counted = sum(count for *_, count in oracle.moments)
            torch.testing.assert_close(norm.running_var, var * counted / (counted - 1))
            filled = min(step, 3)
            expected = torch.tensor(oracle.averages, dtype=F64)
            torch.testing.assert_close(history_of(model)["variogram"][:filled], expected[:filled])


@pytest.mark.parametrize("compiled", [True, False])
def test_drift_takes_the_weight_of_old_steps(compiled: bool) -> None:
    shares = []
    for walk in (0.0, 0.5):
        model = last_pooled(weights="auto")
        with compiled_code(compiled):
            for batch in batches(12, walk):
                model(batch)
        history = history_of(model)
        kept, is_there = history.past().recall(1.0, F64)
        found, _ = reference.best_weights(history.past(), kept, is_there, 80, weighting.GRADIENT_PRICE)
        shares.append(float(1 / (1 + found.sum())))
    assert shares[0] < 0.8 * shares[1]


def test_compiled_code_trains_the_same() -> None:
    """With segments, shared segments of several norms, batches and images of several sizes."""
    torch.manual_seed(0)
    made = Dense()
    twice(lambda: train(made, weights="auto"))


@pytest.mark.parametrize("options", [{"order": 2}, {"order": 0}, {"invalid": "drop"}, {"positions": None}])
def test_other_settings(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    made = Dense()
    equal, auto = (train(made, weights=weights, **options) for weights in ("equal", "auto"))
    assert torch.equal(equal[0], auto[0])  # nothing is remembered yet
    assert not torch.allclose(equal[2], auto[2])
    assert all(tensor.isfinite().all() for tensor in auto)


def test_equal_weights_are_those_of_the_concatenated_batches() -> None:
    model, whole = last_pooled(weights="equal"), []
    for _ in range(6):
        whole.append(torch.randn(4, 2, 5, 6, dtype=F64))
        model(whole[-1])
    x = model[0](torch.cat(whole[-4:])).detach()
    torch.testing.assert_close(norm_of(model).running_mean, x.mean([0, 2, 3]))
    torch.testing.assert_close(norm_of(model).running_var, x.var([0, 2, 3]))


@pytest.mark.parametrize("steps", [2, 9])
def test_saved_and_resumed(steps: int) -> None:
    model = last_pooled(weights="auto")
    for batch in batches(steps, 0.1):
        model(batch)
    other = last_pooled(weights="auto")
    crossbn.load_history_state(other, crossbn.history_state(model))
    batch = torch.randn(4, 2, 5, 6, dtype=F64)
    assert torch.equal(model(batch), other(batch))
    assert torch.equal(model(batch), copy.deepcopy(other)(batch))


@pytest.mark.parametrize(("saved", "loading"), [("auto", "equal"), ("equal", "auto")])
def test_a_history_of_other_weights_is_refused(saved: str, loading: str) -> None:
    model, other = last_pooled(weights=saved), last_pooled(weights=loading)
    model(torch.randn(4, 2, 5, 6, dtype=F64))
    before = crossbn.history_state(other)
    with pytest.raises(ValueError, match=f'is of weights="{saved}", this one of weights="{loading}"'):
        crossbn.load_history_state(other, crossbn.history_state(model))
    assert all(torch.equal(before[name], value) for name, value in crossbn.history_state(other).items())


def test_another_window() -> None:
    """Ages that both windows have go on with what was seen of them."""
    model = last_pooled(weights="auto")
    for batch in batches(9, 0.1):
        model(batch)
    before = history_of(model)["variogram"].clone()
    crossbn.set_window_(model, 3)
    assert torch.equal(history_of(model)["variogram"], before[:2])
    crossbn.set_window_(model, 6)
    assert torch.equal(history_of(model)["variogram"], torch.cat([before[:2], torch.zeros(3, dtype=F64)]))
    for batch in batches(9, 0.1):
        model(batch)
    assert (history_of(model)["variogram"] > 0).all()


def test_forgetting() -> None:
    model = last_pooled(weights="auto")
    for batch in batches(3, 0.1):
        model(batch)
    crossbn.reset_history_(model)
    assert not history_of(model)["variogram"].any()


def test_changing_the_setting_forgets() -> None:
    """A history without a variogram does not tell what its steps are worth."""
    model = last_pooled(weights="equal")
    for batch in batches(3, 0.1):
        model(batch)
    crossbn.convert_(model, window=4, weights="auto")
    assert int(history_of(model).num_steps) == 0
    assert norm_of(model).settings.weights == "auto"


def test_channels_without_variance_say_nothing() -> None:
    model = last_pooled(weights="auto")
    with torch.no_grad():
        next(model.parameters())[1] = 0
    for compiled in (True, False):
        with compiled_code(compiled):
            for batch in batches(6, 0.1):
                assert model(batch).isfinite().all()
        assert history_of(model)["variogram"].isfinite().all()


def test_default() -> None:
    """Automatic weights, but for a fixed rate, and where nothing is compensated."""
    chosen: list[tuple[dict[str, Any], str]] = [
        ({}, "auto"),
        ({"decay": 0.7}, "equal"),
        ({"order": 0}, "equal"),
        ({"weights": "equal"}, "equal"),
    ]
    for options, weights in chosen:
        norm = crossbn.nn.CrossIterBatchNorm2d(3, **options)
        assert norm.settings.weights == weights
        assert ("weights='equal'" in repr(norm)) == (weights == "equal")


def test_wrong_settings() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
    with pytest.raises(ValueError, match="weights must be one of 'equal', 'auto', got 'kalman'"):
        crossbn.convert_(model, window=2, weights="kalman")
    with pytest.raises(ValueError, match=r"finds its own rate, got decay=0.7 as well"):
        crossbn.convert_(model, window=2, weights="auto", decay=0.7)


def test_files_of_equal_weights_are_what_they_were() -> None:
    """Only a history with a variogram is of another version."""
    for options, version in (({"weights": "equal"}, 1), ({"decay": 0.7}, 1), ({}, 2)):
        state = crossbn.history_state(last_pooled(**options))
        assert int(state["1/0/layout"][0]) == version
        assert ("1/0/variogram" in state) == (version == 2)


def test_a_file_without_layout_is_refused_all_the_same() -> None:
    """As the first releases wrote them."""
    old = {
        name: value
        for name, value in crossbn.history_state(last_pooled(weights="equal")).items()
        if not name.endswith("layout")
    }
    crossbn.load_history_state(last_pooled(weights="equal"), old)
    crossbn.load_history_state(last_pooled(decay=0.7), old)
    with pytest.raises(
        ValueError, match=r'of weights="equal", this one of weights="auto": convert with weights="equal"'
    ):
        crossbn.load_history_state(last_pooled(), old)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_variogram_that_cannot_be_is_refused(value: float) -> None:
    model = last_pooled(weights="auto")
    state = {name: tensor.clone() for name, tensor in crossbn.history_state(model).items()}
    state["1/0/variogram"][0] = value
    with pytest.raises(ValueError, match="variogram is"):
        crossbn.load_history_state(model, state)

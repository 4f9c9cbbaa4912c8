"""Compensation over two layers: its history, saved, cleared and left alone, and lower precision."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.lab.experiments.two_layer import extend_
from tests.lab.experiments.test_two_layer import assert_near, batch, network
from tests.support import history_of, move_


def test_resume() -> None:
    case = "conv, relu"
    model = network(case)
    torch.manual_seed(2)
    for size in (3, 2, 4):
        model(batch(case, size))
        move_(model.parameters())
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "history": crossbn.history_state(model)}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["history"]["4/0/1.mean_grad"].shape == (2, 4, 3 * 2 * 9)
    other = network(case)
    other.load_state_dict(saved["model"])
    crossbn.load_history_state(other, saved["history"])
    copied = copy.deepcopy(model)
    for _ in range(2):
        y = batch(case, 3)
        out = model(y)
        assert torch.equal(other(y), out)
        assert torch.equal(copied(y), out)
    before = crossbn.history_state(shallow := network(case, layers=1))
    with pytest.raises(ValueError, match=r"4/0: the saved history and this one do not share 1\.mean_grad, 1\.var_grad"):
        crossbn.load_history_state(shallow, saved["history"])
    torch.testing.assert_close(crossbn.history_state(shallow), before, rtol=0, atol=0)


def test_replaced_weights_are_forgotten() -> None:
    case = "conv, relu"

    def remembered(model: nn.Sequential) -> int:
        return int(history_of(model, "4").num_steps)

    model = network(case)
    model(batch(case, 3))
    assert remembered(model) == 1
    model[0].load_state_dict(model[0].state_dict())
    assert remembered(model) == 0
    model(batch(case, 3))
    model(batch(case, 3))
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))  # type: ignore[arg-type]
    model(batch(case, 3))
    assert remembered(model) == 1
    crossbn.revert_(model)
    assert not model[0]._load_state_dict_post_hooks
    assert type(model[4]) is nn.BatchNorm2d


def test_converting_again() -> None:
    case = "conv, relu"
    model = network(case)
    model(batch(case, 3))
    crossbn.convert_(model, window=3, positions=None, invalid="drop", weights="equal")
    extend_(model)
    assert int(history_of(model, "4").num_steps) == 1  # kept
    crossbn.set_window_(model, 2)
    model(batch(case, 3))
    with pytest.raises(ValueError, match="4: two layers are compensated with order=1, got order=2"):
        crossbn.convert_(model, window=3, order=2)
    crossbn.revert_(model)
    crossbn.convert_(model, window=3, positions=None)
    assert "1.mean_grad" not in history_of(model, "4").rings
    assert not [hook for hook in model[0]._load_state_dict_post_hooks.values() if "TwoLayer" in repr(hook)]
    assert not model[4]._forward_pre_hooks
    model(batch(case, 3))
    extend_(model)
    assert "1.mean_grad" in history_of(model, "4").rings


def test_without_gradients_nothing_is_remembered() -> None:
    case = "conv, relu"
    model = network(case)
    model(batch(case, 3))
    move_(model.parameters())
    y = batch(case, 2)
    with torch.no_grad():
        looked = model(y)
    assert int(history_of(model, "4").num_steps) == 1
    assert_near(looked, model(y))


def test_a_broken_batch_does_no_harm() -> None:
    case = "conv, relu"
    model = network(case)
    model(batch(case, 3))
    before = crossbn.history_state(model)
    model(batch(case, 3).fill_(float("nan")))
    torch.testing.assert_close(crossbn.history_state(model), before, rtol=0, atol=0)


def test_autocast_and_narrow_history() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    wide = copy.deepcopy(model)
    crossbn.convert_(model, window=3, history_dtype=torch.bfloat16)
    crossbn.convert_(wide, window=3)
    extend_(model)
    extend_(wide)
    for _ in range(4):
        y, seed = torch.randn(3, 2, 7, 7), torch.seed()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(y)
        expected = wide(y)
        torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
        out.float().square().sum().backward()
        for each in (model, wide):
            torch.manual_seed(seed)
            move_(each.parameters(), 0.02)
    history = history_of(model, "4")
    assert history["1.mean_grad"].dtype == torch.bfloat16
    assert history["mean_at"].dtype == torch.float32


class Root(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return (y * (y > 0)).sqrt()  # of 0, whose gradient is not finite


def test_gradients_that_are_not_finite_are_not_remembered() -> None:
    case = "conv, relu"
    two, one = network(case), network(case, layers=1)
    torch.manual_seed(2)
    first, second = batch(case, 3), batch(case, 2)
    two(first)
    two[2] = Root()
    out = two(second)
    assert out.isfinite().all()
    assert int(history_of(two, "4").num_steps) == 1
    one(first)
    one[2] = Root()
    assert torch.equal(out, one(second))  # pooled all the same

"""Compensation over two layers: its history, saved, cleared and left alone, and lower precision."""

import copy
import io

import pytest
import torch
from torch import nn

import crossbn
from tests.nn.test_layers import assert_near, batch, move_, network, norm_of


def test_resume() -> None:
    case = "conv, relu"
    model = network(case)
    torch.manual_seed(2)
    for size in (3, 2, 4):
        model(batch(case, size))
        move_(model, 0.05)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "history": crossbn.history_state(model)}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["history"]["4/0/earlier.mean_grad"].shape == (2, 4, 3 * 2 * 9)
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
    with pytest.raises(
        ValueError, match=r"1/0: it was saved with other settings: \[1, 1, 0, 2, 0\] for \[1, 1, 0, 1, 0\]"
    ):
        crossbn.load_history_state(shallow, saved["history"])
    torch.testing.assert_close(crossbn.history_state(shallow), before, rtol=0, atol=0)


def test_replaced_weights_are_forgotten() -> None:
    case = "conv, relu"

    def remembered(model: nn.Sequential) -> int:
        return int(norm_of(model).sources[0].history.num_steps)

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
    crossbn.convert_(model, window=3, positions=None, layers=2, invalid="drop")
    assert int(norm_of(model).sources[0].history.num_steps) == 1  # kept
    crossbn.set_window_(model, 2)
    model(batch(case, 3))
    crossbn.convert_(model, window=3, positions=None)
    assert "earlier.weight" not in norm_of(model).sources[0].history.rings
    assert not [hook for hook in model[0]._load_state_dict_post_hooks.values() if "Deeper" in repr(hook)]
    model(batch(case, 3))
    crossbn.convert_(model, window=3, positions=None, layers=2)
    assert "earlier.weight" in norm_of(model).sources[0].history.rings


def test_without_gradients_nothing_is_remembered() -> None:
    case = "conv, relu"
    model = network(case)
    model(batch(case, 3))
    move_(model, 0.05)
    y = batch(case, 2)
    with torch.no_grad():
        looked = model(y)
    assert int(norm_of(model).sources[0].history.num_steps) == 1
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
    crossbn.convert_(model, window=3, layers=2, history_dtype=torch.bfloat16)
    crossbn.convert_(wide, window=3, layers=2)
    for _ in range(4):
        y, seed = torch.randn(3, 2, 7, 7), torch.seed()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(y)
        expected = wide(y)
        torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
        out.float().square().sum().backward()
        for each in (model, wide):
            torch.manual_seed(seed)
            move_(each, 0.02)
    history = norm_of(model).sources[0].history
    assert history["earlier.mean_grad"].dtype == torch.bfloat16
    assert history["earlier.weight"].dtype == torch.float32

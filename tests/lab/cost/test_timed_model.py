import pytest
import torch
from torch import Tensor, nn

from crossbn import convert_, history_state
from crossbn.lab.cost.timed_model import TimedModel
from tests.lab.cost.handmade import tiny_network

BATCH = torch.linspace(-1, 1, 2 * 3 * 36).reshape(2, 3, 6, 6)


def test_persistent_bytes_by_hand() -> None:
    model = TimedModel(nn.Sequential(nn.Linear(5, 3, bias=False), nn.BatchNorm1d(3)), torch.randn(2, 5))
    weights, affine, buffers, batch = 15, 6, 6, 10
    once = 4 * (weights + affine + buffers + batch) + 8  # num_batches_tracked
    assert model.persistent_bytes() == once
    model.train_step()
    assert model.persistent_bytes() == once + 2 * 4 * (weights + affine)  # gradients and momentum


def test_history_is_counted_once() -> None:
    model = TimedModel(tiny_network(), BATCH)
    before = model.persistent_bytes()
    convert_(model.model, window=3)
    history = sum(tensor.nbytes for tensor in history_state(model.model).values())
    assert model.history_bytes() == history > 2 * 4 * (3 * 8 * 9 + 8 * 4)
    assert model.persistent_bytes() == before + history


def test_peak_of_a_step_is_weights_three_times_where_they_outweigh_the_rest() -> None:
    model = TimedModel(nn.Linear(500, 500, bias=False), torch.randn(1, 500))
    model.train_step()
    assert 3 * 10**6 <= model.peak_bytes() <= 3 * 10**6 + 20 * 2000


def test_a_step_learns() -> None:
    model = TimedModel(tiny_network(), BATCH)
    before = model.loss().item()
    for _ in range(20):
        model.train_step()
    assert 0 < model.loss().item() < before


def test_folding() -> None:
    model = TimedModel(tiny_network(), BATCH)
    model.train_step()
    model.model.eval()
    folded = model.folded()
    assert folded is not None
    assert isinstance(folded.model[1], nn.Identity)  # type: ignore[index]
    assert torch.allclose(folded.model(BATCH), model.model(BATCH), atol=1e-6)
    assert TimedModel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), BATCH).folded() is None


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"out": self.factor * x, "auxiliary": (x, [x.sum(), "a word"])}


def test_every_output_counts() -> None:
    model = TimedModel(Several(), torch.ones(3))
    assert model.loss().item() == pytest.approx(4 + 1 + 9)

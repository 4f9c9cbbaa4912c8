import pytest
import torch
from torch import Tensor, nn

from crossbn import convert_, history_state
from crossbn.lab.cost.subject import Subject
from tests.lab.cost.handmade import tiny_network

BATCH = torch.linspace(-1, 1, 2 * 3 * 36).reshape(2, 3, 6, 6)


def test_persistent_bytes_by_hand() -> None:
    subject = Subject(nn.Sequential(nn.Linear(5, 3, bias=False), nn.BatchNorm1d(3)), torch.randn(2, 5))
    weights, affine, buffers, batch = 15, 6, 6, 10
    once = 4 * (weights + affine + buffers + batch) + 8  # num_batches_tracked
    assert subject.persistent_bytes() == once
    subject.train_step()
    assert subject.persistent_bytes() == once + 2 * 4 * (weights + affine)  # gradients and momentum


def test_history_is_counted_once() -> None:
    subject = Subject(tiny_network(), BATCH)
    before = subject.persistent_bytes()
    convert_(subject.model, window=3)
    history = sum(tensor.nbytes for tensor in history_state(subject.model).values())
    assert subject.history_bytes() == history > 2 * 4 * (3 * 8 * 9 + 8 * 4)
    assert subject.persistent_bytes() == before + history


def test_peak_of_a_step_is_weights_three_times_where_they_outweigh_the_rest() -> None:
    subject = Subject(nn.Linear(500, 500, bias=False), torch.randn(1, 500))
    subject.train_step()
    assert 3 * 10**6 <= subject.peak_bytes() <= 3 * 10**6 + 20 * 2000


def test_a_step_learns() -> None:
    subject = Subject(tiny_network(), BATCH)
    before = subject.loss().item()
    for _ in range(20):
        subject.train_step()
    assert 0 < subject.loss().item() < before


def test_folding() -> None:
    subject = Subject(tiny_network(), BATCH)
    subject.train_step()
    subject.model.eval()
    folded = subject.folded()
    assert folded is not None
    assert isinstance(folded.model[1], nn.Identity)  # type: ignore[index]
    assert torch.allclose(folded.model(BATCH), subject.model(BATCH), atol=1e-6)
    assert Subject(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), BATCH).folded() is None


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"out": self.factor * x, "auxiliary": (x, [x.sum(), "a word"])}


def test_every_output_counts() -> None:
    subject = Subject(Several(), torch.ones(3))
    assert subject.loss().item() == pytest.approx(4 + 1 + 9)

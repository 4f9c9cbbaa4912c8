"""The ring of remembered steps."""

import pytest
import torch
from torch import Tensor

from crossbn.nn.history import History


def history(slots: int = 3) -> History:
    return History(slots, {"mean": (2,), "var": (2,), "count": ()}, torch.zeros(1))


def row(value: int) -> dict[str, Tensor]:
    return {"mean": torch.full((2,), float(value)), "var": torch.full((2,), value + 0.5), "count": torch.tensor(value)}


def means(ring: History) -> Tensor:
    """What a step reads, [R, 2]."""
    return ring.past().recall(1.0, torch.float32)[0]["mean"]


def test_the_oldest_goes_first() -> None:
    ring = history()
    for value in range(1, 6):
        ring.past().write_(row(value), True)
    assert sorted(ring["mean"][:, 0].tolist()) == [3.0, 4.0, 5.0]
    assert len(means(ring)) == 3


def test_filled_slots_are_present() -> None:
    ring = history()
    assert len(means(ring)) == 0
    ring.past().write_(row(1), True)
    assert means(ring).tolist() == [[1.0, 1.0]]


def test_writing_without_looking_is_the_same() -> None:
    """What a GPU does, step by step with what the CPU does."""
    looking, blind = history(), history()
    for value, accept in enumerate([True, True, False, True, True, False, True]):
        looking.past().write_(row(value), accept)
        blind.past().write_(row(value), torch.tensor(accept))
        for (name, ours), (_, theirs) in zip(looking.state(), blind.state(), strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(("slots", "kept"), [(1, [5.0]), (2, [4.0, 5.0]), (5, [3.0, 4.0, 5.0])])
def test_resizing_keeps_the_latest(slots: int, kept: list[float]) -> None:
    ring = history()
    for value in range(1, 6):
        ring.past().write_(row(value), True)
    ring.resize_(slots)
    assert means(ring)[:, 0].tolist() == kept
    ring.past().write_(row(6), True)
    latest = ([*kept, 6.0])[-slots:]
    assert sorted(means(ring)[:, 0].tolist()) == latest


def test_precision_is_not_halved() -> None:
    ring = history()
    ring.past().write_(row(1), True)
    ring.apply_(lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor)
    assert ring["mean"].dtype == torch.float32
    ring.apply_(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    assert ring["mean"].dtype == torch.float64
    assert ring["mean"][0].tolist() == [1.0, 1.0]

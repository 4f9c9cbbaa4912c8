"""Statistics of segments side by side."""

import torch

from crossbn.ops import Statistics, joined


def make(value: float, channels: int, **rest: object) -> Statistics:
    vector = torch.full((channels,), value, dtype=torch.float64)
    return Statistics(vector, vector + 1, vector[:1] / 10, None, **rest)  # type: ignore[arg-type]


def test_one_segment_is_as_it_was() -> None:
    alone = make(1.0, 2)
    assert joined([alone]) is alone


def test_what_is_the_same_for_all_stays_a_number() -> None:
    both = joined([make(1.0, 2, bessel=1.5, positions=6), make(2.0, 3, bessel=1.5, positions=6)])
    assert both.mean.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert both.var.tolist() == [2.0, 2.0, 3.0, 3.0, 3.0]
    assert both.share.tolist() == [0.1, 0.1, 0.2, 0.2, 0.2]
    assert (both.bessel, both.has_variance, both.finite, both.positions) == (1.5, True, True, 6)


def test_what_is_not_is_repeated_for_channels_in_its_type() -> None:
    third = 1 + 1 / 3  # which float32 does not hold
    parts = [make(1.0, 1, bessel=third), make(2.0, 2, bessel=torch.tensor([1.0, 2.0], dtype=torch.float64))]
    both = joined([*parts, make(3.0, 1, has_variance=False)])
    assert isinstance(both.bessel, torch.Tensor)
    assert both.bessel.tolist() == [third, 1.0, 2.0, 1.0]
    assert isinstance(both.has_variance, torch.Tensor)
    assert both.has_variance.tolist() == [True, True, True, False]


def test_vectors_are_put_side_by_side_in_one() -> None:
    parts = [make(1.0, 2), make(2.0, 1)]
    for part in parts:
        part.share, part.bessel = part.mean / 10, part.mean * 2
    both = joined(parts)
    found = torch.stack([both.mean, both.var, both.share, torch.as_tensor(both.bessel)])
    assert found.tolist() == [[1.0, 1.0, 2.0], [2.0, 2.0, 3.0], [0.1, 0.1, 0.2], [2.0, 2.0, 4.0]]
    assert both.mean.data_ptr() < both.var.data_ptr() < both.share.data_ptr()  # of one tensor
    assert both.mean.untyped_storage().data_ptr() == both.share.untyped_storage().data_ptr()


def test_they_are_finite_if_all_are() -> None:
    assert joined([make(1.0, 1), make(2.0, 1, finite=False)]).finite is False
    assert joined([make(1.0, 1, finite=torch.tensor(True)), make(2.0, 1)]).finite == torch.tensor(True)

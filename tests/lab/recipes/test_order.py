"""Which images a step sees."""

import pytest
import torch

from crossbn.lab.recipes.classification import Recipe, RecipeError
from crossbn.lab.recipes.order import Order, Plan


def plan(images: int = 21, processes: int = 1, **changes: int) -> Plan:
    return Plan.of(Recipe(**{"batch_size": 2, "epochs": 3, **changes}), images, processes)  # type: ignore[arg-type]


def draws(plan: Plan, rank: int = 0, seed: int = 0) -> list[list[int]]:
    return [draw.images.tolist() for draw in Order(plan, range(plan.forwards), seed, rank)]


def test_counts() -> None:
    accumulating = plan(accumulate=3)
    assert (accumulating.steps_per_epoch, accumulating.forwards_per_epoch) == (3, 9)
    assert (accumulating.steps, accumulating.forwards) == (9, 27)
    assert plan(processes=2).steps_per_epoch == 5


@pytest.mark.parametrize(
    ("points", "accumulate", "ends"),
    [(None, 1, [10, 20, 30]), (1, 1, [30]), (4, 1, [8, 15, 23, 30]), (100, 10, [10, 20, 30]), (2, 3, [15, 27])],
)
def test_spans_end_with_whole_steps_and_with_the_run(points: int | None, accumulate: int, ends: list[int]) -> None:
    spans = plan(points=points, accumulate=accumulate).spans  # type: ignore[arg-type]
    assert [span.stop for span in spans] == ends
    assert [span.start for span in spans] == [0, *ends[:-1]]


def test_an_epoch_has_each_image_once_at_most_and_another_order() -> None:
    first, second = draws(plan())[:10], draws(plan())[10:20]
    for epoch in (first, second):
        seen = [number for draw in epoch for number in draw]
        assert len(set(seen)) == len(seen) == 20
        assert set(seen) <= set(range(21))
    assert first != second


def test_order_is_of_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = draws(plan())
    torch.manual_seed(2)
    assert draws(plan()) == before
    assert draws(plan(), seed=1) != before


def test_a_span_goes_on_anywhere_with_the_same_draws() -> None:
    whole = list(Order(plan(), range(8, 23), 0))
    rest = Order(plan(), range(8, 23), 0)
    rest.done = 6
    assert len(rest) == 15
    assert [draw.seed for draw in rest] == [draw.seed for draw in whole[6:]]
    assert all(torch.equal(a.images, b.images) for a, b in zip(rest, whole[6:], strict=True))
    assert len({draw.seed for draw in whole}) == 15


def test_processes_share_the_batch_that_one_would_have() -> None:
    two = plan(processes=2)
    alone = plan(batch_size=4)
    joined = [a + b for a, b in zip(draws(two, 0), draws(two, 1), strict=True)]
    assert joined == draws(alone)


def test_too_few_images_are_refused() -> None:
    with pytest.raises(
        RecipeError, match="7 training images do not fill a step: 4 batches of 2 in each of 1 processes"
    ):
        plan(7, accumulate=4)

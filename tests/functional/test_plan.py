"""What is remembered of which layer."""

import pytest

from crossbn.functional import Geometry, Plan, choose_plan

DEPTHWISE = Geometry(576, 576, 576, kernel=(3, 3))
EARLY, DEEP = Geometry(64, 64, kernel=(3, 3)), Geometry(512, 512, kernel=(3, 3))


@pytest.mark.parametrize(
    ("geometry", "positions", "slots", "order", "plan"),
    [
        (EARLY, 128, 3, 1, Plan("gradient", 128)),
        (EARLY, 16, 3, 1, Plan("gradient", 16)),
        (EARLY, None, 3, 1, Plan("gradient", None)),
        (EARLY, None, 3, 2, Plan("samples", None)),
        (EARLY, 128, 3, 2, Plan("samples", 128)),
        (DEPTHWISE, 128, 3, 1, Plan("gradient", 25)),
        (DEEP, None, 3, 1, Plan("gradient", None)),
        (DEEP, 128, 3, 1, Plan("samples", 10)),
        (DEEP, 128, 7, 1, Plan("samples", 4)),
        (DEEP, 128, 15, 1, Plan("samples", 4)),
        (DEEP, 128, 1, 1, Plan("samples", 28)),
        (DEEP, 128, 0, 1, Plan("samples", 28)),
        (DEEP, 2, 3, 1, Plan("gradient", 2)),
        (DEEP, 128, 3, 2, Plan("samples", 10)),
    ],
)
def test_plans(geometry: Geometry, positions: int | None, slots: int, order: int, plan: Plan) -> None:
    assert choose_plan(geometry, positions, slots, order) == plan

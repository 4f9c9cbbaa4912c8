"""What is remembered of which layer."""

import pytest

from crossbn.functional import Geometry, Plan, choose_plan

DEPTHWISE = Geometry(96, 96, 96, kernel=(3, 3))
EARLY, DEEP = Geometry(32, 3, kernel=(3, 3)), Geometry(512, 512, kernel=(3, 3))


@pytest.mark.parametrize(
    ("geometry", "positions", "slots", "order", "plan"),
    [
        (EARLY, 128, 3, 1, Plan("gradient", 128)),
        (EARLY, 16, 3, 1, Plan("gradient", 16)),
        (EARLY, None, 3, 1, Plan("gradient", None)),
        (EARLY, None, 3, 2, Plan("patches", None)),
        (EARLY, 128, 3, 2, Plan("patches", 128)),
        (DEPTHWISE, 128, 3, 1, Plan("gradient", 37)),
        (Geometry(960, 960, 960, kernel=(3, 3)), 128, 3, 1, Plan("gradient", 16)),
        (DEEP, None, 3, 1, Plan("gradient", None)),
        (DEEP, 128, 3, 1, Plan("patches", 10)),
        (DEEP, 128, 7, 1, Plan("patches", 6)),
        (DEEP, 128, 15, 1, Plan("patches", 6)),
        (DEEP, 128, 1, 1, Plan("patches", 32)),
        (DEEP, 128, 0, 1, Plan("patches", 32)),
        (DEEP, 2, 3, 1, Plan("patches", 2)),
        (DEEP, 128, 3, 2, Plan("patches", 10)),
    ],
)
def test_plans(geometry: Geometry, positions: int | None, slots: int, order: int, plan: Plan) -> None:
    assert choose_plan(geometry, positions, slots, order) == plan

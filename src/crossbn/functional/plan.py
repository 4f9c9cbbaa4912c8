"""What is remembered of a step's variance gradient, and from how many positions: a cost model.

Remembering the gradient [C, I] itself costs, per weight, one product for each position it is estimated on, and reading
it again for each of the R remembered steps, twice (its value, the gradient through it). Remembering the P patches it
would be made of costs no gradient at all, but R * P products with today's weight, twice. Per weight on two CPU cores:

| storage | nanoseconds | numbers kept per step |
|---|---|---|
| gradient, P positions | P / 75 + 1.5 R | C * I |
| patches, P positions | R * P / 35 | P * (I + 2 C) |

So a few samples are the cheaper the larger the weight is; for a small one only the number of operations counts, and
there is room for many positions.
"""

from typing import Literal, NamedTuple

from crossbn.functional.geometry import Geometry

_SMALL_WEIGHT = 2**15
_CHEAP_NUMBERS = 2**15  # gathered from the input: a twentieth of a millisecond
_FEWEST_POSITIONS = 16
_WINDOW_SAMPLES = 32
_FEWEST_SAMPLES = 6


class Plan(NamedTuple):
    """How a step is remembered."""

    storage: Literal["gradient", "patches"]
    positions: int | None
    """Output positions over the batch; None for all of them."""


def choose_plan(geometry: Geometry, positions: int | None, slots: int, order: int = 1) -> Plan:
    """Choose what to remember of an operator, and how many output positions to look at.

    - `positions=None` looks at all of them: order 1 keeps the gradient (the paper's exact form), order 2 the patches.
    - Otherwise at most `positions`, fewer where a patch is so large (a depthwise kernel over many channels) that
      gathering them would be felt; 16 in any case.
    - A weight of up to 2^15 numbers (most layers of MobileNet-v2, the first ones of any network) keeps the gradient.
    - For a larger one (nearly all of a ResNet) the patches are kept, 32 over the whole window but no less than 6 per
      step. The pooled variance averages over the window: neither its noise nor its cost grows with it.

    None of this depends on the batch or the map, so what is remembered has the same shape at every step. A batch
    with fewer positions is looked at whole.

    Args:
        geometry: the operator's.
        positions: wanted.
        slots: steps that are remembered, R.
        order: of the Taylor polynomial; the second needs the patches.

    Example:
        >>> choose_plan(Geometry(32, 3, kernel=(3, 3)), 128, slots=3)
        Plan(storage='gradient', positions=128)
        >>> choose_plan(Geometry(512, 512, kernel=(3, 3)), 128, slots=3)
        Plan(storage='patches', positions=10)
    """
    if positions is None:
        return Plan("patches" if order == 2 else "gradient", None)
    affordable = max(_FEWEST_POSITIONS, _CHEAP_NUMBERS // (geometry.in_channels * geometry.taps))
    small = geometry.out_channels * geometry.patch_size <= _SMALL_WEIGHT
    if not small:
        affordable = max(_FEWEST_SAMPLES, _WINDOW_SAMPLES // max(slots, 1))
    return Plan("gradient" if small and order == 1 else "patches", min(positions, affordable))

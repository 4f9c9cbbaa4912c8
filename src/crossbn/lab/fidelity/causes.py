"""Why remembered statistics differ from today's: the way from one to the other in steps, each with one cause.

| statistics of an old batch | what is left until the next |
|---|---|
| as they are remembered, moved to today's weights of the norm's operator | `OWN_WEIGHTS`: what the Taylor terms lack |
| of the operator's old input with today's weights (same layer) | `WEIGHTS_BEFORE`: earlier layers have trained since |
| of the old step done again with today's weights (whole network) | `NORMS_BEFORE`: norms pooled other batches then |
| of all remembered batches run together with today's weights | |

The last line is what pooling stands for: one large batch. `ALL` is the way from the first line to it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from crossbn.lab.fidelity.comparison import Moments
from crossbn.nn import CrossIterBatchNorm

OWN_WEIGHTS, WEIGHTS_BEFORE, NORMS_BEFORE, ALL = "own weights", "weights before", "norms before", "all"
CAUSES = (OWN_WEIGHTS, WEIGHTS_BEFORE, NORMS_BEFORE)


class Pair(NamedTuple):
    """A mean and a variance, [C] each."""

    mean: Tensor
    var: Tensor


class CauseRecord(NamedTuple):
    """How much one cause moves the statistics of one age, averaged over the channels of a layer.

    The mean is in standard deviations, the variance relative to itself, both of all remembered batches run together.
    """

    step: int
    layer: str
    age: int
    cause: str
    channels: int
    mean_error: float
    var_error: float


@contextmanager
def run_together(norms: Iterable[CrossIterBatchNorm]) -> Iterator[None]:
    """Let norms be batch norms over whatever they are given, without running statistics."""
    norms = list(norms)
    try:
        for norm in norms:
            norm.__dict__["_train_forward"] = lambda x, norm=norm: F.batch_norm(
                x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps
            )
        yield
    finally:
        for norm in norms:
            norm.__dict__.pop("_train_forward", None)


def tell_causes(
    step: int, layer: str, age: int, stages: Sequence[Pair], together: Moments, eps: float
) -> list[CauseRecord]:
    """Return the distance of each stage of the table above from the next, and of the first from the last.

    Args:
        step: training steps before the measurement.
        layer: the norm.
        age: of the statistics.
        stages: the statistics of a batch, one of them for each line of the table.
        together: moments of all batches run together, whose variance is the scale.
        eps: of the norm.

    Example:
        >>> stages = [Pair(torch.tensor([mean]), torch.tensor([4.0])) for mean in (0.0, 1.0, 1.0, 3.0)]
        >>> together = Moments(torch.tensor([[3.0]]), torch.tensor([[4.0]]), torch.tensor([8.0]))
        >>> [(each.cause, each.mean_error) for each in tell_causes(9, "bn1", 1, stages, together, 0.0)]
        [('own weights', 0.5), ('weights before', 0.0), ('norms before', 1.0), ('all', 1.5)]
    """
    scale = together.scale(eps)
    ways = [*zip(CAUSES, pairwise(stages), strict=True), (ALL, (stages[0], stages[-1]))]
    return [
        CauseRecord(
            step,
            layer,
            age,
            cause,
            len(scale),
            float(((here.mean - there.mean).abs() / scale.sqrt()).mean()),
            float(((here.var - there.var).abs() / scale).mean()),
        )
        for cause, (here, there) in ways
    ]


def average_causes(records: Iterable[CauseRecord]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the errors of mean and variance by layer and cause, averaged over steps and ages."""
    parts: dict[tuple[str, str], list[CauseRecord]] = {}
    for record in records:
        parts.setdefault((record.layer, record.cause), []).append(record)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for (layer, cause), those in parts.items():
        mean, var = (
            sum(values) / len(those) for values in zip(*((r.mean_error, r.var_error) for r in those), strict=True)
        )
        found.setdefault(layer, {})[cause] = mean, var
    return found

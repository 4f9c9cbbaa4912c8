"""What can be looked at in a converted model: the runs of channels that remember statistics."""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crossbn.convert import cross_iteration_norms
from crossbn.nn import CrossIterBatchNorm
from crossbn.nn.segment import Segment


class Run(NamedTuple):
    """A run of channels of a norm, and what feeds it."""

    layer: str
    """What it is called in records."""
    norm: CrossIterBatchNorm
    segment: Segment
    channels: slice

    @property
    def operator(self) -> nn.Module | None:
        """The one operator whose output the channels are, if that is known."""
        return self.segment.producers[0].module if self.segment.direct and self.segment.producers else None

    @property
    def memory(self) -> int:
        """Earlier steps that it can remember."""
        return self.segment.history.slots


def own_bias(segment: Segment) -> Tensor | float:
    """Return the part of the mean that is not remembered: the operators' biases, where they are compensated."""
    if segment.storage is None:
        return 0.0
    biases = [bias for each in segment.operators if (bias := each.bias()) is not None]
    return torch.stack(biases).sum(0).to(segment.history["mean"].dtype) if biases else 0.0


def find_runs(model: nn.Module, layers: Collection[str] | None = None) -> list[Run]:
    """Return the runs of channels that remember statistics, each under the first norm that reads it.

    Args:
        model: converted.
        layers: names of norms; None for all.

    Raises:
        ValueError: if the model has no cross-iteration norm, or none of that name.

    Example:
        >>> import crossbn
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
        >>> report = crossbn.convert_(model, window=2)
        >>> [(run.layer, run.operator) for run in find_runs(model)]
        [('1', Linear(in_features=3, out_features=8, bias=True))]
    """
    norms = cross_iteration_norms(model)
    if not norms:
        raise ValueError("the model has no cross-iteration norm to look at, see crossbn.convert_")
    if unknown := [name for name in layers or () if name not in norms]:
        raise ValueError(f"the model has no cross-iteration norm {unknown[0]!r}, it has {', '.join(norms)}")
    runs: dict[Segment, Run] = {}
    for name, norm in norms.items():
        if layers is None or name in layers:
            start = 0
            for segment in norm.segments:
                channels = slice(start, start + segment.channels)
                start = channels.stop
                label = name if len(norm.segments) == 1 else f"{name}[{channels.start}:{channels.stop}]"
                runs.setdefault(segment, Run(label, norm, segment, channels))
    return list(runs.values())

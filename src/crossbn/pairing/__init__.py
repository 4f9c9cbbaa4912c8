"""Which linear operators feed each batch norm of a model, and why not: read-only.

Norms read their operators from the autograd graph when they run. What is known before is needed for the report, by
`fold`, and where there is no graph to read: in compiled steps, and where saved tensors are packed. `forwards.py` runs a
model's forward symbolically by torch.fx, or once on example inputs, and guards the model meanwhile; `dataflow.py`
follows the tensors of a traced forward, by what it knows of torch's functions and modules.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from crossbn.pairing.dataflow import Findings, Segment, Segments, opaque
from crossbn.pairing.forwards import trace, watch
from crossbn.torch_internals import BatchNormBase

__all__ = ["Pairing", "Segment", "find_pairs"]


@dataclass(frozen=True)
class Pairing:
    """What one norm reads.

    Attributes:
        name: Qualified name of the norm, as in ``model.named_modules()``.
        segments: In channel order; their widths add up to the norm's ``num_features``.
        exclusive: The norm reads exactly its one producer's output, nothing else does, and both are called
            once: folding the norm into the producer is safe.
    """

    name: str
    segments: Segments
    exclusive: bool

    @property
    def producers(self) -> tuple[str, ...]:
        """Every operator of every segment, each once, in channel order."""
        return tuple(dict.fromkeys(name for segment in self.segments for name in segment.producers))


def find_pairs(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    operators: Collection[nn.Module] = (),
    in_training: bool = True,
) -> dict[str, Pairing]:
    """Find the linear operators that feed each batch norm of a model.

    The model is traced symbolically and left as it was. Norms that a trace of the whole model does not reach are
    looked for in one forward on the example inputs, if there are any.

    Args:
        model: The model, in any mode, on any device; meta will do if no example inputs are given.
        example_inputs: Positional arguments of one forward.
        operators: Modules that are known to be linear operators, though their forward is their own.
        in_training: Whether the trace is of a training forward, else of one in evaluation.

    Returns:
        A record for every batch norm, by qualified name in the order of ``model.named_modules()``.

    Raises:
        TypeError: `example_inputs` is not a tuple.
        ValueError: A lazy module has not seen its first input yet.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8))
        >>> [pairing.segments[0].reason for pairing in find_pairs(model).values()]
        ['0', 'after relu']
    """
    if not isinstance(example_inputs, tuple | None):
        raise TypeError(f"example_inputs must be a tuple of arguments, got {type(example_inputs).__name__}")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"{name!r} has no shape yet: run one forward through the lazy modules first")
    norms = {
        name: int(module.num_features) for name, module in model.named_modules() if isinstance(module, BatchNormBase)
    }
    traced, watched = Findings(model, operators), Findings(model, operators)
    whole = trace(model, traced, in_training)
    if example_inputs is not None and not (whole and norms.keys() <= traced.norm_inputs.keys()):
        watch(model, watched, example_inputs)
    # A trace of the whole model holds for any input; traces of parts know less than one real forward.
    first, second = (traced, watched) if whole else (watched, traced)
    return {
        name: _pairing(name, channels, first if name in first.norm_inputs else second)
        for name, channels in norms.items()
    }


def _pairing(name: str, num_features: int, findings: Findings) -> Pairing:
    segments = _segments(findings.norm_inputs.get(name, []), num_features, findings)
    direct = len(segments) == 1 and segments[0].direct
    # The norm's own reading is the one use that the operator may have.
    return Pairing(name, segments, exclusive=direct and findings.operator_uses[segments[0].producers[0]] == 1)


def _segments(inputs: list[Segments], num_features: int, findings: Findings) -> Segments:
    """Return what a norm has read in its one call, or one segment that says why that is not known."""
    found = inputs[0] if inputs else ()
    known = sum(segment.channels for segment in found)
    channels = [segment.channels or num_features - known for segment in found]
    if not inputs:
        reason = "not reached by tracing"
    elif len(inputs) > 1:
        reason = f"called {len(inputs)} times in a forward"
    elif [segment.channels for segment in found].count(0) > 1:
        reason = "channel widths unknown"
    elif min(channels) < 1 or sum(channels) != num_features:
        reason = f"{known} channels found where the norm has {num_features}"
    else:
        return tuple(_segment(each, count, findings) for each, count in zip(found, channels, strict=True))
    return opaque(reason, num_features)


def _segment(found: Segment, channels: int, findings: Findings) -> Segment:
    repeated = [name for name in found.producers if findings.operator_calls[name] > 1]
    if not repeated:
        return replace(found, channels=channels)
    # Which of several calls of an operator the norm reads is not known later, so the operator is no producer.
    once = tuple(name for name in found.producers if name not in repeated)
    return Segment(channels, once, False, f"{', '.join(repeated)} called several times in a forward", final=bool(once))

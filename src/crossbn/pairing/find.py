"""The public answer: what each batch norm of a model reads, channel by channel."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from crossbn.pairing.dataflow import Parts, Recorder
from crossbn.pairing.tracing import trace
from crossbn.pairing.vocabulary import is_norm
from crossbn.pairing.watching import watch


@dataclass(frozen=True)
class Segment:
    """A run of channels of a norm's input.

    Attributes:
        channels: Width of the run.
        producers: Qualified names of the linear operators summed into it; empty if there are none.
        direct: The run is the output of its one producer: no sum, nothing added or applied.
        reason: One phrase for people, such as ``conv1``, ``conv1 + conv2 + rest`` or ``after max_pool2d``.
        final: Nothing more is to be found: there are producers, or a closer look would find none either.
    """

    channels: int
    producers: tuple[str, ...]
    direct: bool
    reason: str
    final: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Pairing:
    """What one norm reads.

    Attributes:
        name: Qualified name of the norm, as in ``model.named_modules()``.
        segments: In channel order; their widths add up to the norm's ``num_features``.
        exclusive: The norm reads exactly its one producer's output, nothing else does, and both are called
            once: folding the norm into the producer is safe.
        origins: What the norm's one producer reads: the norms and operators that its input is computed from, by name,
            and "input of ..." for what comes from outside. Empty if there is not one producer.
    """

    name: str
    segments: tuple[Segment, ...]
    exclusive: bool
    origins: frozenset[str] = field(default=frozenset(), compare=False)

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
    norms = {name: module for name, module in model.named_modules() if is_norm(module)}
    traced, whole = trace(model, operators, in_training)
    recorders = [traced]
    if example_inputs is not None and not (whole and norms.keys() <= traced.norm_inputs.keys()):
        watched = watch(model, example_inputs, operators)
        # A trace of the whole model holds for any input; traces of parts know less than one real forward.
        recorders = [traced, watched] if whole else [watched, traced]
    pairs = {}
    for name, norm in norms.items():
        recorder = next((recorder for recorder in recorders if name in recorder.norm_inputs), traced)
        pairs[name] = _pairing(name, int(norm.num_features), recorder)
    return pairs


def _pairing(name: str, num_features: int, recorder: Recorder) -> Pairing:
    inputs = recorder.norm_inputs.get(name, [])
    if len(inputs) != 1:
        reason = f"called {len(inputs)} times in a forward" if inputs else "not reached by tracing"
        return Pairing(name, _unpaired(num_features, reason), exclusive=False)
    segments = tuple(_without_repeated(segment, recorder) for segment in _segments(inputs[0], num_features))
    pairing = Pairing(name, segments, exclusive=False)
    if len(pairing.producers) != 1:
        return pairing
    (producer,) = pairing.producers
    # The norm's own reading is the one use that the operator may have.
    exclusive = len(segments) == 1 and segments[0].direct and recorder.operator_uses[producer] == 1
    return replace(pairing, exclusive=exclusive, origins=recorder.operator_origins[producer])


def _segments(parts: Parts, num_features: int) -> tuple[Segment, ...]:
    widths = [part.channels for part in parts]
    known = sum(channels for channels in widths if channels is not None)
    if widths.count(None) > 1:
        return _unpaired(num_features, "channel widths unknown")
    channels = [num_features - known if channels is None else channels for channels in widths]
    if min(channels) < 1 or sum(channels) != num_features:
        return _unpaired(num_features, f"{known} channels found where the norm has {num_features}")
    return tuple(
        Segment(count, part.operators, part.direct, part.reason, part.final)
        for part, count in zip(parts, channels, strict=True)
    )


def _without_repeated(segment: Segment, recorder: Recorder) -> Segment:
    """Take out operators that run several times in a forward: which of its calls a norm reads is not known later."""
    repeated = [name for name in segment.producers if recorder.operator_calls[name] > 1]
    if not repeated:
        return segment
    once = tuple(name for name in segment.producers if name not in repeated)
    reason = f"{', '.join(repeated)} called several times in a forward"
    return Segment(segment.channels, once, direct=False, reason=reason, final=bool(once))


def _unpaired(num_features: int, reason: str) -> tuple[Segment, ...]:
    return (Segment(num_features, (), direct=False, reason=reason, final=False),)

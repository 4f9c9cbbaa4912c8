"""From what was seen to what is reported: one `Pairing` for every norm of a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from crossbn.pairing.description import Concatenation, Description, Operator, Sum, width
from crossbn.pairing.ledger import Ledger
from crossbn.pairing.modules import is_norm
from crossbn.pairing.records import Pairing, Segment
from crossbn.pairing.symbolic import trace
from crossbn.pairing.watching import watch


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
    _refuse_lazy_modules(model)
    norms = {name: module for name, module in model.named_modules() if is_norm(module)}
    traced, whole = trace(model, operators, in_training)
    ledgers = [traced]
    if example_inputs is not None and not (whole and norms.keys() <= traced.sightings.keys()):
        watched = watch(model, example_inputs, operators)
        # A trace of the whole model holds for any input; traces of parts know less than one real forward.
        ledgers = [traced, watched] if whole else [watched, traced]
    return {name: _pairing(name, int(norm.num_features), ledgers) for name, norm in norms.items()}


def _refuse_lazy_modules(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"{name!r} has no shape yet: run one forward through the lazy modules first")


def _pairing(name: str, num_features: int, ledgers: list[Ledger]) -> Pairing:
    """What the first ledger that saw the norm says about it."""
    ledger = next((ledger for ledger in ledgers if name in ledger.sightings), None)
    if ledger is None:
        reason = "not reached by tracing"
        return Pairing(name, _unpaired(num_features, reason), exclusive=False)
    sightings = ledger.sightings[name]
    if len(sightings) > 1:
        return Pairing(name, _unpaired(num_features, f"called {len(sightings)} times in a forward"), exclusive=False)
    segments = tuple(_without_repeated(s, ledger) for s in _segments(sightings[0].description, num_features))
    exclusive = (
        len(segments) == 1
        and segments[0].direct
        and sightings[0].value.has_one_reader
        and not ledger.parameter_reads[segments[0].producers[0]]
    )
    pairing = Pairing(name, segments, exclusive)
    if len(pairing.producers) != 1:
        return pairing
    return replace(pairing, origins=ledger.operator_origins[pairing.producers[0]])


def _without_repeated(segment: Segment, ledger: Ledger) -> Segment:
    """Take out operators that run several times in a forward: which of its calls a norm reads is not known later."""
    repeated = [name for name in segment.producers if ledger.operator_calls[name] > 1]
    if not repeated:
        return segment
    once = tuple(name for name in segment.producers if name not in repeated)
    reason = f"{', '.join(repeated)} called several times in a forward"
    return Segment(segment.channels, once, direct=False, reason=reason, final=bool(once))


def _segments(description: Description, num_features: int) -> tuple[Segment, ...]:
    parts = description.parts if isinstance(description, Concatenation) else (description,)
    widths = [width(part) for part in parts]
    known = sum(channels for channels in widths if channels is not None)
    if widths.count(None) > 1:
        return _unpaired(num_features, "channel widths unknown")
    channels = [num_features - known if channels is None else channels for channels in widths]
    if min(channels) < 1 or sum(channels) != num_features:
        return _unpaired(num_features, f"{known} channels found where the norm has {num_features}")
    return tuple(_segment(part, count) for part, count in zip(parts, channels, strict=True))


def _segment(part: Description, channels: int) -> Segment:
    if isinstance(part, Operator):
        return Segment(channels, (part.name,), direct=True, reason=part.name)
    if isinstance(part, Sum):
        producers = tuple(term.name for term in part.terms if isinstance(term, Operator))
        addends = [*producers, "rest"] if len(producers) < len(part.terms) else producers
        return Segment(channels, producers, direct=False, reason=" + ".join(addends))
    assert not isinstance(part, Concatenation)  # concatenations are flat
    return Segment(channels, (), direct=False, reason=part.reason, final=part.final)


def _unpaired(num_features: int, reason: str) -> tuple[Segment, ...]:
    return (Segment(num_features, (), direct=False, reason=reason, final=False),)

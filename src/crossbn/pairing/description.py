"""What a tensor is made of: the expression both front ends build.

    description   = operator | sum | concatenation | opaque
    concatenation = two or more of (operator | sum | opaque), side by side along the channels
    sum           = two or more of (operator | opaque), at least one of them an operator

`concatenate` and `add` keep expressions in this flat form, so that nobody downstream has to walk a tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Opaque:
    """Anything that is not a linear operator's output; `channels` is None where the width is unknown.

    `final` says that no closer look would find an operator: after an activation, a pooling, or the model's input.
    """

    reason: str
    channels: int | None = None
    final: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Operator:
    """The output of a linear operator; `dimensions` counts batch, channels and space."""

    name: str
    channels: int
    dimensions: int


@dataclass(frozen=True)
class Sum:
    """Elementwise sum of tensors of one shape."""

    terms: tuple[Operator | Opaque, ...]


@dataclass(frozen=True)
class Concatenation:
    """Tensors side by side along the channels."""

    parts: tuple[Operator | Sum | Opaque, ...]


Description: TypeAlias = Operator | Sum | Concatenation | Opaque


def width(description: Description) -> int | None:
    """The number of channels, or None where it is unknown."""
    if isinstance(description, Sum):
        # `add` lets only equal widths meet, so any known one is the width.
        return next((term.channels for term in description.terms if term.channels is not None), None)
    if isinstance(description, Concatenation):
        widths = [width(part) for part in description.parts]
        known = [channels for channels in widths if channels is not None]
        return sum(known) if len(known) == len(widths) else None
    return description.channels


def concatenate(operands: Sequence[Description], dim: int) -> Description:
    """Describe ``torch.cat(operands, dim)``."""
    parts = tuple(part for operand in operands for part in _parts(operand))
    dimensions = {operator.dimensions for part in parts for operator in _operators(part)}
    # A negative dimension counts from the end, and only the operators tell how many dimensions there are.
    along_channels = dim == 1 or {dim + count for count in dimensions} == {1}
    if not along_channels:
        return Opaque(f"after cat along dimension {dim}")
    return parts[0] if len(parts) == 1 else Concatenation(parts)


def add(operands: Sequence[Description]) -> Description:
    """Describe the elementwise sum of the operands."""
    terms = [term for operand in operands for term in _terms(operand)]
    widths = {term.channels for term in terms if term.channels is not None}
    if len(widths) > 1:
        return Opaque("after add with broadcast channels", max(widths))
    # Twice the same operator (2x, or two calls of a shared one) has another gradient than one occurrence.
    occurrences = Counter(term.name for term in terms if isinstance(term, Operator))
    terms = [
        Opaque(f"{term.name} more than once", term.channels)
        if isinstance(term, Operator) and occurrences[term.name] > 1
        else term
        for term in terms
    ]
    if not any(isinstance(term, Operator) for term in terms):
        return Opaque("after add", next(iter(widths), None))
    return Sum(tuple(terms))


def _parts(description: Description) -> tuple[Operator | Sum | Opaque, ...]:
    return description.parts if isinstance(description, Concatenation) else (description,)


def _terms(description: Description) -> tuple[Operator | Opaque, ...]:
    if isinstance(description, Sum):
        return description.terms
    if isinstance(description, Concatenation):
        return (Opaque("after cat", width(description)),)
    return (description,)


def _operators(part: Operator | Sum | Opaque) -> Iterator[Operator]:
    return (term for term in _terms(part) if isinstance(term, Operator))

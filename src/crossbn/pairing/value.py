"""A tensor that passes by: what it is made of and who reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from crossbn.pairing.description import Description


@dataclass(eq=False)
class Value:
    """One tensor of a run.

    Attributes:
        description: What it is made of now; writing in place changes it.
        readers: How many calls have read it so far; leaving the model counts as one.
        copied_from: The value it is a copy of.
        view_of: The value whose memory it shares.
        origins: The norms and operators that it is computed from without another of them in between, by name, and
            "input of ..." for what comes from outside.
    """

    description: Description
    readers: int = 0
    copied_from: Value | None = None
    view_of: Value | None = None
    origins: frozenset[str] = frozenset()

    @property
    def has_one_reader(self) -> bool:
        """Whether one call reads it, and nothing reads what it was copied from but the copying."""
        return self.readers == 1 and (self.copied_from is None or self.copied_from.has_one_reader)


def leaves(nest: object) -> Iterator[object]:
    """The leaves of a nest of lists, tuples, dicts and slices, in order."""
    if isinstance(nest, dict):
        nest = list(nest.values())
    elif isinstance(nest, slice):
        nest = (nest.start, nest.stop, nest.step)
    if isinstance(nest, list | tuple):
        for item in nest:
            yield from leaves(item)
    else:
        yield nest


def values_in(nest: object) -> Iterator[Value]:
    """The values among the leaves of a nest."""
    return (leaf for leaf in leaves(nest) if isinstance(leaf, Value))


def joint_origins(values: Iterable[Value]) -> frozenset[str]:
    """The origins of what is computed from the values."""
    return frozenset().union(*(value.origins for value in values))

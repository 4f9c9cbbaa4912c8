"""The arguments of a model's forward, and putting several of them together as one larger batch."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BatchError(ValueError):
    """Batches that cannot be put together."""


class Call(NamedTuple):
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def join_calls(calls: Sequence[Call]) -> Call:
    """Return the call with all batches in one, in their order.

    Tensors are concatenated along their first dimension, lists (of images, of targets) as lists; tuples and mappings
    are joined part by part; anything else must be the same in all calls.

    Raises:
        BatchError: if the shapes beside the first dimension, or other values, differ.

    Example:
        >>> calls = [Call((torch.ones(2, 3),), {"scale": 1}), Call((torch.ones(1, 3),), {"scale": 1})]
        >>> joined = join_calls(calls)
        >>> joined.args[0].shape, joined.kwargs
        (torch.Size([3, 3]), {'scale': 1})
    """
    return Call(_join([call.args for call in calls]), _join([call.kwargs for call in calls]))


def count_examples(call: Call) -> int:
    """Return the number of examples: the length of the first tensor or list.

    Raises:
        BatchError: if there is none.

    Example:
        >>> count_examples(Call((None, [torch.ones(3, 8), torch.ones(3, 9)]), {}))
        2
    """
    found = _first_length((call.args, call.kwargs))
    if found is None:
        raise BatchError(f"the model is called without a batch: {call}")
    return found


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.ndim:
        if len(shapes := {tuple(value.shape[1:]) for value in values}) > 1:
            raise BatchError(f"batches of different shapes cannot be joined: examples of {sorted(shapes)}")
        return torch.cat(list(values))
    if isinstance(first, list):
        return [example for value in values for example in value]
    if isinstance(first, tuple):
        return tuple(_join(part) for part in zip(*values, strict=True))
    if isinstance(first, Mapping):
        return {name: _join([value[name] for value in values]) for name in first}
    if not all(bool(value == first) for value in values):
        raise BatchError(f"batches with different arguments cannot be joined: {first!r} and others")
    return first


def _first_length(value: Any) -> int | None:
    if isinstance(value, list) or (isinstance(value, Tensor) and value.ndim):
        return len(value)
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return next((found for part in value if (found := _first_length(part)) is not None), None)
    return None

"""What the processes of a training know each for itself, brought together."""

from typing import Any

import torch.distributed as dist


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, in their order, in the first process; nothing in the others.

    Every process must call it. Without others it returns the one value. Tensors should be on the CPU.

    Example:
        >>> gather({"rank": 0})
        [{'rank': 0}]
    """
    if not _has_others():
        return [value]
    first = dist.get_rank() == 0
    values: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(value, values)
    return values or []


def gather_all(value: Any) -> list[Any]:
    """Return the values of all processes, in their order, in every process.

    Every process must call it. Without others it returns the one value. Tensors should be on the CPU.

    Example:
        >>> gather_all(3)
        [3]
    """
    if not _has_others():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

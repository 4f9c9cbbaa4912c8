"""What the processes of a training know each for itself, brought together for a checkpoint."""

from typing import Any

import torch.distributed as dist


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, in their order, in the first process; nothing in the others.

    Every process must call it. Without others it returns the one value. Tensors should be on the CPU.

    Example:
        >>> gather({"rank": 0})
        [{'rank': 0}]
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return [value]
    first = dist.get_rank() == 0
    values: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(value, values)
    return values or []

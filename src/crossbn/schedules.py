"""Which window a training step has."""

import math


def window_for(batch_size: int) -> int:
    """Return the paper's window for a batch size: about 16 examples in all, at most 8 steps.

    Raises:
        ValueError: if the batch size is no integer of at least 1.

    Example:
        >>> [window_for(size) for size in (1, 2, 4, 8, 16)]
        [8, 8, 4, 2, 1]
    """
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    return min(math.ceil(16 / batch_size), 8)

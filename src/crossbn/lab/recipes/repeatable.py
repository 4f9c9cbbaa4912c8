"""Letting a training compute the same thing each time, and leaving no trace."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def repeatable() -> Iterator[None]:
    """Leave the caller's random numbers alone, and have cuDNN compute the same thing each time."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        with torch.random.fork_rng():
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before

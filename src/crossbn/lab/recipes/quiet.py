"""Letting the engine work without its advice, compute the same thing each time, and leave no trace."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_IGNORED = (
    (".*does not have many workers.*", UserWarning),  # images in memory need none
    (".*LeafSpec.*", FutureWarning),  # the engine asks torch in an old way
    (".*`srun` command is available.*", UserWarning),  # who wants it takes it
    (".*TypedStorage is deprecated.*", UserWarning),
)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what Lightning says about itself, its tips and such warnings out of the way."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message, category in _IGNORED:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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

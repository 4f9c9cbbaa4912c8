"""Letting the engine work without its advice."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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

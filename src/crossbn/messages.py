"""What a norm says when it does something else than was asked for: once, not at every step."""

import warnings


class ConversionWarning(UserWarning):
    """A norm stays, or is for a step, plain BatchNorm where cross-iteration statistics were asked for."""


def say(message: str) -> None:
    """Warn."""
    warnings.warn(message, ConversionWarning, stacklevel=2)

"""What a norm says when it does something else than was asked for: once, not at every step."""

import warnings

import torch


class ConversionWarning(UserWarning):
    """A norm stays, or is for a step, plain BatchNorm where cross-iteration statistics were asked for."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's is
def say_while_compiling(message: str) -> bool:
    """Warn when torch.compile comes by, which it cannot do in the graph itself."""
    say(message)
    return True


def say(message: str) -> None:
    """Warn."""
    warnings.warn(message, ConversionWarning, stacklevel=2)

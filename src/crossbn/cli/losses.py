"""What a model is trained by: cross entropy, or a function of one's own."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.cli.named import MistakeError, find_function

Loss = Callable[[Any, Any], Tensor]
"""Of the model's output and the target."""

_HINT = "--loss names a function of your own"
_FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError)


def find_loss(name: str | None) -> Loss:
    """Return the function `package.module:function`, cross entropy for None.

    Raises:
        typer.BadParameter: if there is none.
    """
    return cross_entropy if name is None else find_function(name, "--loss", arguments=2)


def cross_entropy(output: Any, target: Any) -> Tensor:
    """Return the cross entropy of scores, the first of several outputs, with integer classes.

    Raises:
        TypeError: if they are something else.
    """
    scores = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(scores, Tensor):
        raise TypeError(f"the output is no tensor of scores; {_HINT}")
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        raise TypeError(f"the target is no tensor of integer classes; {_HINT}")
    return F.cross_entropy(scores, target.long())


def compute_loss(network: nn.Module, loss: Loss, given: Any, target: Any) -> Tensor:
    """Return the loss of a batch.

    Raises:
        MistakeError: if the model or the loss does not take it, or the loss is nothing to train by.
    """
    output = _attempt(lambda: network(given), f"the model does not run with input {_form(given)}")
    complaint = f"there is no loss of output {_form(output)} and target {_form(target)}"
    value = _attempt(lambda: loss(output, target), complaint)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise MistakeError(f"the loss is {_form(value)} in place of one number")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise MistakeError("the loss does not depend on the model's weights")
    return value


def _attempt(do: Callable[[], Any], complaint: str) -> Any:
    try:
        return do()
    except _FAULTS as error:
        raise MistakeError(f"{complaint}: {_first_line(error)}") from error


def _form(value: Any) -> str:
    return f"{(*value.shape,)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

"""The norms that are compared, put into a model."""

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossbn.lab.cost.cases import BASELINE, WINDOWED, Case, CaseError
from crossbn.swap import swap_norm_


def put_norm_(model: nn.Module, norm: str, case: Case, example: Tensor, burn_in: int = 0) -> None:
    """Put a norm in the place of every BatchNorm of `model`; "bn" leaves them as they are.

    Args:
        model: with BatchNorm.
        norm: one of the case's.
        case: window and positions are taken from it, for norms that have them.
        example: a batch, to pair norms with operators where the model cannot be traced.
        burn_in: steps of plain BatchNorm first, for norms with a window.

    Raises:
        CaseError: if one of the model's norms cannot be replaced.
    """
    if norm == BASELINE:
        return
    options: dict[str, Any] = {}
    if norm in WINDOWED:
        options = {"window": case.window, "burn_in": burn_in, "positions": case.positions}
    report = swap_norm_(model, norm, example_inputs=(example,), **options)
    # A cross-iteration norm that nothing could be compensated for is BatchNorm, which is measured with the others.
    if report.left and (norm not in WINDOWED or not report.replaced):
        name, reason = next(iter(report.left.items()))
        raise CaseError(f"{case}: {norm} cannot replace {name}: {reason}")


def take_norms_out_(model: nn.Module) -> None:
    """Put the identity in the place of every BatchNorm of `model`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> take_norms_out_(model)
        >>> model[1]
        Identity()
    """
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children has a shared one once only
            if isinstance(child, _BatchNorm):
                setattr(parent, name, nn.Identity())

"""Models of a case with the norms that are compared, all from the same weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossbn.lab.cost.cases import BASELINE, WINDOWED, Case, CaseError
from crossbn.lab.cost.timed_model import TimedModel
from crossbn.pairing import find_pairs
from crossbn.swap import swap_norm_

Build = Callable[[], nn.Module]


class Variant(NamedTuple):
    """One of the models that are compared."""

    norm: str
    compiled: bool


class ModelFactory:
    """Makes the models of a case."""

    def __init__(self, case: Case, build: Build) -> None:
        self._case = case
        self._build = build
        generator = torch.Generator().manual_seed(0)
        self.batch = torch.randn(case.batch_size, *case.input_shape, generator=generator).to(case.device)

    def model(self) -> nn.Module:
        """Return the model as it is."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self._build().to(self._case.device)

    def variant(self, variant: Variant, burn_in: int = 0) -> TimedModel:
        """Return the model with a variant's norm."""
        model = self.model()
        put_norm_(model, variant.norm, self._case, self.batch, burn_in)
        return TimedModel(model, self.batch, variant.compiled)

    def variants(self) -> dict[Variant, TimedModel]:
        """Return every variant: all norms, then all of them compiled if the case says so."""
        kinds = (False, True) if self._case.compile else (False,)
        return {(v := Variant(norm, kind)): self.variant(v) for kind in kinds for norm in self._case.norms}

    def without_norms(self) -> TimedModel:
        """Return the model with its norms taken out."""
        model = self.model()
        take_norms_out_(model)
        return TimedModel(model, self.batch)

    def paired_weight_bytes(self) -> int:
        """Return the size of the weights that feed the model's norms, after one step to see whether it runs.

        Raises:
            CaseError: if it does not run, or has no BatchNorm.
        """
        model = self.model()
        try:
            TimedModel(model, self.batch).train_step()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise CaseError(f"{self._case}: the model does not run: {str(error).partition(chr(10))[0]}") from error
        pairings = find_pairs(model, (self.batch,))
        if not pairings:
            raise CaseError(f"{self._case}: the model has no BatchNorm")
        producers = {name for pairing in pairings.values() for name in pairing.producers}
        weights = (model.get_submodule(name).weight for name in producers)
        return sum(weight.nbytes for weight in weights if isinstance(weight, Tensor))


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

"""Models of a case, ready to be measured."""

from typing import NamedTuple

import torch
from torch import nn

from crossbn.lab.cost.cases import Case, CaseError
from crossbn.lab.cost.models import Build
from crossbn.lab.cost.norms import put_norm_, take_norms_out_
from crossbn.lab.cost.subject import Subject
from crossbn.pairing import find_pairs


class Variant(NamedTuple):
    """One of the models that are compared."""

    norm: str
    compiled: bool


class Workshop:
    """Makes what a case needs, from the same weights for every norm."""

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

    def subject(self, variant: Variant, burn_in: int = 0) -> Subject:
        """Return the model with a variant's norm."""
        model = self.model()
        put_norm_(model, variant.norm, self._case, self.batch, burn_in)
        return Subject(model, self.batch, variant.compiled)

    def subjects(self) -> dict[Variant, Subject]:
        """Return every variant: all norms, then all of them compiled if the case says so."""
        kinds = (False, True) if self._case.compile else (False,)
        return {(v := Variant(norm, kind)): self.subject(v) for kind in kinds for norm in self._case.norms}

    def paired_weight_bytes(self) -> int:
        """Return the size of the weights that feed the model's norms, after one step to see whether it runs."""
        model = self.model()
        try:
            Subject(model, self.batch).train_step()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise CaseError(f"{self._case}: the model does not run: {str(error).partition(chr(10))[0]}") from error
        pairings = find_pairs(model, (self.batch,))
        if not pairings:
            raise CaseError(f"{self._case}: the model has no BatchNorm")
        producers = {name for pairing in pairings.values() for name in pairing.producers}
        weights = (model.get_submodule(name).weight for name in producers)
        return sum(weight.nbytes for weight in weights if isinstance(weight, torch.Tensor))

    def without_norms(self) -> Subject:
        """Return the model with its norms taken out."""
        model = self.model()
        take_norms_out_(model)
        return Subject(model, self.batch)

"""Two operators with their norms, the second norm compensated for both weights: slowly, by the paper's formulas."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.reference.cross_iteration import ReferenceNorm, Step, moments

Moments = tuple[Tensor, Tensor]
Parameters = tuple[Tensor, Tensor | float, Tensor, Tensor]
"""Weight, bias, gamma and beta of an operator and its norm."""


@dataclass
class DeepReferenceNorm(ReferenceNorm):
    """A reference norm whose past moments are a polynomial in the earlier weight as well."""

    earlier_today: Tensor | None = None
    chains: list[tuple[Callable[[Tensor, Tensor], Moments], Tensor]] = field(default_factory=list)
    """For each remembered step: its moments as a function of both weights, and the earlier weight that it had."""

    def past_moments(self, step: Step, weight: Tensor, bias: Tensor | float) -> Moments:
        """Taylor polynomial of the moments of `step` at today's weights."""
        index = next(i for i, each in enumerate(self.steps) if each is step)
        chain, earlier = self.chains[index]
        assert self.earlier_today is not None
        today = self.earlier_today if self.backward == "through" else self.earlier_today.detach()
        mean, second = chain(earlier, step.weight)
        mean_jacobians, second_jacobians = torch.func.jacrev(chain, (0, 1))(earlier, step.weight)
        for i, change in enumerate((today - earlier, weight - step.weight)):
            mean = mean + (mean_jacobians[i] * change).flatten(1).sum(1)
            second = second + (second_jacobians[i] * change).flatten(1).sum(1)
        return mean + bias, second + 2 * bias * mean + bias**2


@dataclass
class TwoLayers:
    """norm2(operator2(between(norm1(operator1(y)))))."""

    first: ReferenceNorm
    second: DeepReferenceNorm
    between: Callable[[Tensor], Tensor]

    def __call__(self, y: Tensor, first: Parameters, second: Parameters) -> Tensor:
        """Return the output of one training step, and remember it."""
        past = list(self.first.steps)
        then = tuple(each.detach().clone() if isinstance(each, Tensor) else each for each in first)

        def chain(weight1: Tensor, weight2: Tensor) -> Moments:
            norm = dataclasses.replace(self.first, steps=list(past))
            z = norm(y.detach(), weight1, *then[1:])[0]  # type: ignore[arg-type]  # Parameters without the weight
            return moments(self.second.operator(self.between(z), weight2))

        hidden = self.between(self.first(y, *first)[0])
        self.second.earlier_today = first[0]
        out = self.second(hidden, *second)[0]
        self.second.chains.append((chain, first[0].detach().clone()))
        return out

"""Cross-iteration batch normalization, slowly: float64, autograd Jacobians, the paper's own formulas."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Operator = Callable[[Tensor, Tensor], Tensor]  # (input, weight) -> output without bias


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and second moment per channel."""
    flat = x.movedim(1, 0).flatten(1)
    return flat.mean(1), flat.square().mean(1)


@dataclass
class Step:
    y: Tensor
    weight: Tensor
    bias: Tensor | float
    rest: Tensor | float
    count: int


@dataclass
class ReferenceNorm:
    """Normalizes `operator(y, weight) + rest + bias`, remembering inputs and weights of earlier steps."""

    operator: Operator
    window: int
    order: int = 1
    backward: str = "through"
    invalid: str = "max"
    eps: float = 1e-5
    steps: list[Step] = field(default_factory=list)

    def past_moments(self, step: Step, weight: Tensor, bias: Tensor | float) -> tuple[Tensor, Tensor]:
        """Taylor polynomial of the moments of `step` at today's weight; the bias only shifts."""
        mean, second = moments(self.operator(step.y, step.weight) + step.rest)
        if self.order > 0:
            change = weight - step.weight
            jacobians = torch.func.jacrev(lambda w: moments(self.operator(step.y, w) + step.rest))
            mean_jac, second_jac = jacobians(step.weight)
            dims = list(range(1, mean_jac.ndim))
            mean = mean + (mean_jac * change).sum(dims)
            second = second + (second_jac * change).sum(dims)
            if self.order == 2:
                second = second + moments(self.operator(step.y, change))[1]
        else:
            bias = step.bias  # the naive form takes nothing of today into account
        return mean + bias, second + 2 * bias * mean + bias**2

    def __call__(
        self,
        y: Tensor,
        weight: Tensor,
        bias: Tensor | float,
        gamma: Tensor,
        beta: Tensor,
        rest: Tensor | float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the output, pooled mean, pooled variance and the number of positions pooled (per channel)."""
        x = self.operator(y, weight) + rest
        shape = (-1, *[1] * (x.ndim - 2))
        x = x + (bias.reshape(shape) if isinstance(bias, Tensor) else bias)
        through = self.backward == "through"
        mean, second = moments(x)
        means, seconds, keep = [mean], [second], [torch.ones_like(mean)]
        past = self.steps[max(0, len(self.steps) - self.window + 1) :]
        for step in past:
            m, s = self.past_moments(
                step,
                weight if through else weight.detach(),
                bias if through or not isinstance(bias, Tensor) else bias.detach(),
            )
            means.append(m)
            seconds.append(torch.maximum(s, m.square()))
            keep.append(((s >= m.square()) | (self.invalid == "max")).to(m.dtype))
        kept = torch.stack(keep)
        total = kept.sum(0)
        pooled = (kept * torch.stack(means)).sum(0) / total
        var = (kept * torch.stack(seconds)).sum(0) / total - pooled.square()
        counts = x.new_tensor([x.numel() // x.shape[1], *[step.count for step in past]])
        bias, rest = (value.detach().clone() if isinstance(value, Tensor) else value for value in (bias, rest))
        self.steps.append(Step(y.detach().clone(), weight.detach().clone(), bias, rest, x.numel() // x.shape[1]))
        out = (x - pooled.reshape(shape)) / torch.sqrt(var + self.eps).reshape(shape)
        out = out * gamma.reshape(shape) + beta.reshape(shape)
        return out, pooled.detach(), var.detach(), (kept * counts.unsqueeze(1)).sum(0)

"""Compensation over two layers: the weight before the previous norm, too.

Norm l reads x = W_l * h(norm_{l-1}(W_{l-1} * y)). Its moments at a remembered step follow both weights to first order:

| quantity | formula | shape |
|---|---|---|
| mean_s(W_t) | mean_s + <dmean_s/dW_l, dW_l> + <dmean_s/dW_{l-1}, dW_{l-1}> | [C] |
| nu_s(W_t) | nu_s + <dnu_s/dW_l, dW_l> + <dnu_s/dW_{l-1}, dW_{l-1}> | [C] |

dW is today's weight less that of step s. As dnu = dvar + 2 mean dmean, the second line less the square of the first is
`functional.compensate` with mean shift and variance slope summed over the two layers.

The gradients towards W_{l-1} are the total derivatives of the step's training graph. They go through the previous norm:
through today's share of its pooled statistics and, with `backward="through"`, through the compensated rest. Autograd
makes them channel by channel, two passes each, which is slow, and they take C times the weight's memory for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.nn.forms import Influence, Rings, Shapes
from crossbn.nn.replay import Pass, may_be_replayed
from crossbn.nn.settings import Settings
from crossbn.nn.statistics import DenseJacobian, Drift
from crossbn.torch_internals import backward_is_running, graph_break_rest


class Deeper:
    """The operator before the previous norm, and how the moments of a source follow its weight."""

    def __init__(self, module: nn.Module, forget: Callable[[], None]) -> None:
        self.module = module
        self._forget = forget
        self._parameter = module._parameters["weight"]
        self._has_graph = False
        self._handles = [
            module.register_forward_hook(self._see_forward),
            module.register_load_state_dict_post_hook(self._see_load),
        ]

    def shapes(self, channels: int) -> Shapes:
        """Return what is kept of a step: both gradients, and the weight that they were taken at."""
        size = self._weight.numel()
        return {"earlier.mean_grad": (channels, size), "earlier.var_grad": (channels, size), "earlier.weight": (size,)}

    @property
    def _weight(self) -> nn.Parameter:
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight

    def forget_replaced(self) -> None:
        """Clear the history if there is another Parameter in the weight's place: it is of other weights."""
        if self._weight is not self._parameter:
            self._parameter = self._weight
            self._forget()

    def _see_forward(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        if torch.compiler.is_compiling() or not backward_is_running():
            self._has_graph = output.requires_grad

    def _see_load(self, *_: Any) -> None:
        self._forget()

    def release(self) -> None:
        """Stop watching the operator."""
        for handle in self._handles:
            handle.remove()

    def add_drift(self, rings: Rings, drift: Drift) -> Drift:
        """Return the drift of both layers, given that of the nearest."""
        # The weight itself is kept, not its product with the gradients: beside them it is small, and what has not
        # changed then drifts by 0 exactly.
        change = (self._weight.detach().flatten().to(drift.mean_shift.dtype) - rings["earlier.weight"]).unsqueeze(2)
        return Drift(
            drift.mean_shift + (rings["earlier.mean_grad"] @ change).squeeze(2),
            drift.var_slope + (rings["earlier.var_grad"] @ change).squeeze(2),
            drift.curvature,
        )

    def jacobian(self, rings: Rings, drift: Drift, influence: Influence) -> DenseJacobian:
        """Return how the pooled statistics follow the weight, by way of the remembered steps."""
        weight, own, towards = influence
        mean_grad, var_grad = rings["earlier.mean_grad"], rings["earlier.var_grad"]
        coefficient = torch.addcmul(towards, own, drift.mean_shift, value=-2)
        mean = (weight.unsqueeze(2) * mean_grad).sum(0)
        return DenseJacobian(mean, (coefficient.unsqueeze(2) * mean_grad).sum(0) + (own.unsqueeze(2) * var_grad).sum(0))

    def follow(self, mean: Tensor, var: Tensor, jacobian: DenseJacobian) -> tuple[Tensor, Tensor]:
        """Return `mean` and `var` [C] unchanged, with a graph to today's weight."""
        weight = self._weight.flatten()
        nothing = (weight - weight.detach()).to(mean.dtype)  # 0, with a gradient of 1
        return mean + (jacobian.mean * nothing).sum(1), var + (jacobian.var * nothing).sum(1)

    def remember(self, x: Tensor, mean: Tensor, norm: str) -> Rings:
        """Return today's gradients and weight; `x` has the graph of the step.

        Raises:
            RuntimeError: if the weight is trained and `x` has no graph to it.
        """
        weight = self._weight
        row = {"earlier.weight": weight.detach().flatten().to(mean.dtype)}
        if not weight.requires_grad:  # it does not change: no gradient is needed
            return row
        positions = x.numel() // x.shape[1]
        centred = x.detach() - mean.reshape(-1, *[1] * (x.ndim - 2))
        ones = torch.ones_like(x) / positions
        row["earlier.mean_grad"] = self._jacobian(x, ones, norm).to(mean.dtype)
        row["earlier.var_grad"] = self._jacobian(x, (centred * (2 / positions)).to(x.dtype), norm).to(mean.dtype)
        return row

    def _jacobian(self, x: Tensor, cotangent: Tensor, norm: str) -> Tensor:
        """Return d<cotangent_j, x_j>/dW for each channel j, [C, I]."""
        weight, rows = self._weight, []
        for channel in range(x.shape[1]):
            lone = torch.zeros_like(x)
            lone[:, channel] = cotangent[:, channel]
            # A gradient through the previous norm's compensation takes part as in any backward: it is delivered to the
            # graft on the operator's node, which runs next and takes it (see graft.py).
            grad = None
            # The weight may be in the graph for the previous norm's sake alone, if the operator ran without gradients.
            if x.requires_grad and self._has_graph:
                (grad,) = torch.autograd.grad(x, weight, lone, retain_graph=True, allow_unused=True)
            if grad is None:
                raise RuntimeError(
                    f"{norm}: layers=2 needs a graph to the weight of {self.module}, something detaches it"
                )
            rows.append(grad.flatten())
        return torch.stack(rows)


def refuse_unfit_step(norm: str, run: Pass) -> None:
    """Raise a RuntimeError where the step's own graph is out of reach."""
    # After a break of the graph, the eager rest of a compiled step has the compiler's callback set.
    if torch.compiler.is_compiling() or graph_break_rest():
        raise RuntimeError(f"{norm}: layers=2 does not work under torch.compile")
    if run is not Pass.LOOK and may_be_replayed():
        raise RuntimeError(f"{norm}: layers=2 does not work inside activation checkpointing")


def check_reach(norm: str, settings: Settings, operator: nn.Module, producers: int) -> None:
    """Raise a ValueError if the norm called `norm` cannot be compensated for the weight of `operator` as well."""
    if settings.layers != 2:
        raise ValueError(f"{norm}: an earlier operator is for layers=2, got layers={settings.layers}")
    if producers != 1:
        raise ValueError(f"{norm}: layers=2 is for a norm that reads one operator, this one reads {producers}")
    if not isinstance(operator._parameters.get("weight"), Tensor):
        raise ValueError(
            f"{norm}: layers=2 needs an earlier weight that is a plain Parameter, not that of {type(operator).__name__}"
        )

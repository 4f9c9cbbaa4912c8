"""Compensation over two layers: for the weight of the operator before the previous norm as well, the paper's ablation.

Norm l reads x = W_l * h(norm_{l-1}(W_{l-1} * y)). Its moments at a remembered step follow both weights to first order:

| quantity | formula | shape |
|---|---|---|
| mean_s(W_t) | mean_s + <dmean_s/dW_l, dW_l> + <dmean_s/dW_{l-1}, dW_{l-1}> | [C] |
| nu_s(W_t) | nu_s + <dnu_s/dW_l, dW_l> + <dnu_s/dW_{l-1}, dW_{l-1}> | [C] |

dW is today's weight less that of step s. So the earlier weight is one more operator in the sum that the norm reads: all
channels have the same weight and each has gradients of its own, as in a linear operator with a group for each channel.
Only these gradients are made here, the rest is the library's.

They are total derivatives of the step's training graph. They go through the previous norm: through today's share
of its pooled statistics and, with `backward="through"`, through the compensated rest. Autograd makes them channel by
channel, two passes each, which is slow, and they take C times the weight's memory for each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from crossbn import functional as C  # the library's F
from crossbn.convert import cross_iteration_norms
from crossbn.functional import Geometry, Settings
from crossbn.nn import CrossIterBatchNorm
from crossbn.nn.producer import Operator
from crossbn.nn.recompute import Pass, current_pass, may_be_recomputed
from crossbn.nn.segment import Calls, Segment
from crossbn.pairing import Pairing, find_pairs
from crossbn.pairing.calls import Call
from crossbn.torch_internals import BatchNormBase, backward_is_running, graph_break_rest

_NORMS_AND_OPERATORS = (BatchNormBase, *C.LINEAR_OPERATORS)


def extend_(model: nn.Module) -> dict[str, str]:
    """Compensate the norms of a converted model for the weight before their previous norm as well.

    The previous norm is the only one whose output reaches the norm's operator, with activations, dropout, pooling and
    the like in between. An operator that reads a residual sum or a concatenation has no such norm; then, and for the
    first norm, one layer is followed. Norms that change forget their steps. `revert_` undoes it, `convert_` keeps it.

    Args:
        model: after `convert_`.

    Returns:
        For each compensated norm a phrase that says which operator is followed, or why none is.

    Raises:
        ValueError: naming a norm that it cannot be done for: one that is not of order 1, is synchronized, reads several
            operators or one that another norm reads as well, or whose earlier weight is parametrized. Then nothing is
            changed.

    Example:
        >>> import crossbn
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2), nn.BatchNorm1d(2))
        >>> report = crossbn.convert_(model, window=4)
        >>> extend_(model)["4"]
        'two layers: 0 before 1, too'
    """
    norms, pairings = cross_iteration_norms(model), find_pairs(model)
    if not norms:
        raise ValueError("extend_ needs a converted model, this one has no cross-iteration norm")
    read_by, earlier, reasons = _find_origins(model), {}, {}
    feeding: dict[nn.Module, str] = {}
    for name, norm in norms.items():
        _check_settings(name, norm.settings)
        if not any(segment.producers for segment in norm.segments):
            continue
        segment = _only_segment(name, norm.segments, pairings[name])
        module = segment.producers[0].module
        if (other := feeding.setdefault(module, name)) != name:
            raise ValueError(f"{name}: two layers are for norms with an operator of their own, {other} reads it too")
        operator, reasons[name] = _find_earlier(segment, name, pairings, read_by)
        if operator is not None:
            earlier[name] = model.get_submodule(operator)
            _check_weight(name, earlier[name])
    for name, module in earlier.items():
        segment = norms[name].segments[0]
        if not isinstance(segment, TwoLayerSegment) or segment.earlier.module is not module:
            norms[name].feeds.set_main_([TwoLayerSegment(norms[name], segment, module)])
    return reasons


def _check_settings(norm: str, settings: Settings) -> None:
    if settings.order != 1:
        raise ValueError(f"{norm}: two layers are compensated with order=1, got order={settings.order}")
    if settings.sync:
        raise ValueError(f"{norm}: two layers are not compensated with sync=True, nor with a SyncBatchNorm")


def _check_weight(norm: str, operator: nn.Module) -> None:
    if not isinstance(operator._parameters.get("weight"), Tensor):
        kind = type(operator).__name__
        raise ValueError(f"{norm}: two layers need an earlier weight that is a plain Parameter, not that of {kind}")


def _only_segment(norm: str, segments: Sequence[Segment], pairing: Pairing) -> Segment:
    segment, read = segments[0], pairing.segments[0].reason
    if len(segments) > 1:
        read = "a concatenation"
    elif segment.direct or (segment.given and len(segment.producers) == 1):
        return segment
    raise ValueError(f"{norm}: two layers are for a norm that reads one operator, this one reads {read}")


class _Tracer(fx.Tracer):
    """Stops at norms and operators, whoever wrote them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _NORMS_AND_OPERATORS) or super().is_leaf_module(m, module_qualified_name)


def _find_origins(model: nn.Module) -> dict[str, list[str]]:
    """Return what each operator reads: the norms and operators that its input is computed from, or the model's input.

    What lies before another norm or operator is not counted. Nothing is known of a model that cannot be traced.
    """
    found: dict[str, list[str]] = {}
    try:
        graph = _Tracer().trace(model)
    except Exception:  # Model code that needs real tensors fails in ways of its own.
        return {}
    behind: dict[fx.Node, set[str]] = {}
    for node in graph.nodes:
        behind[node] = set().union(*(behind[each] for each in node.all_input_nodes))
        if node.op == "placeholder":
            behind[node] = {"input of the model"}
        elif node.op == "call_module" and isinstance(model.get_submodule(node.target), _NORMS_AND_OPERATORS):
            found[node.target], behind[node] = sorted(behind[node]), {node.target}
    return found


def _find_earlier(
    segment: Segment, name: str, pairings: Mapping[str, Pairing], read_by: Mapping[str, list[str]]
) -> tuple[str | None, str]:
    """Return the operator before the previous norm, None if there is none, and a phrase that says why it is that."""
    producer = next(iter(pairings[name].producers), "")
    origins = [] if segment.given else read_by.get(producer, [])
    if not origins:
        return None, "one layer: what its operator reads is not known"
    if len(origins) > 1:
        more = f" and {len(origins) - 3} more" if len(origins) > 3 else ""
        return None, f"one layer: {producer} reads a mix of {', '.join(origins[:3])}{more}"
    previous = pairings.get(origins[0])
    if previous is None:
        return None, f"one layer: {producer} reads {origins[0]}, no norm before it"
    if len(previous.segments) > 1 or not previous.segments[0].direct:
        return None, f"one layer: the norm before, {previous.name}, does not read one operator"
    return previous.producers[0], f"two layers: {previous.producers[0]} before {previous.name}, too"


class EarlierOperator(Operator):
    """The operator before the previous norm, as one of those that are summed into a segment. It has no calls there.

    Attributes:
        module: the operator itself.
        label: of the norm.
        x: the norm's input with its graph, [N, C, ...], during a step.
        has_graph: whether the latest forward of the module has a graph.
    """

    def __init__(self, module: nn.Module, label: str, channels: int) -> None:
        self.module, self.label = module, label
        inputs = channels * self.leaf.numel()
        # With a stride the step looks whether the gradients are finite, which the moments do not tell.
        super().__init__(Geometry(channels, inputs, channels, (1,), (2,), (1,), ((0, 0),)), None)
        self.x: Tensor | None = None
        self.has_graph = False

    @property
    def leaf(self) -> nn.Parameter:
        """The weight as the module has it."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight

    def weight(self, call: Call | None = None) -> Tensor:  # noqa: ARG002  # there is none
        """Return today's weight for each channel, [C, I]; their gradients add up."""
        return self.leaf.flatten().expand(self.geometry.out_channels, -1)

    def fits(self, call: Call) -> bool:  # noqa: ARG002
        """Return False: no call that the norm reads is this operator's."""
        return False

    def gradients(self, mean: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return those of mean and variance of the step, [C, I] each; None if the weight is frozen.

        Raises:
            RuntimeError: if the weight is trained and the norm's input has no graph to it.
        """
        if self.x is None or not self.leaf.requires_grad:  # it does not change: no gradient is needed
            return None
        x, positions = self.x, self.x.numel() // self.x.shape[1]
        centred = x.detach() - mean.reshape(-1, *[1] * (x.ndim - 2))
        of_mean = self._jacobian(x, torch.ones_like(x) / positions)
        return of_mean.to(mean.dtype), self._jacobian(x, (centred * (2 / positions)).to(x.dtype)).to(mean.dtype)

    def _jacobian(self, x: Tensor, cotangent: Tensor) -> Tensor:
        """Return d<cotangent_j, x_j>/dW for each channel j, [C, I]."""
        rows = []
        for channel in range(x.shape[1]):
            lone, grad = torch.zeros_like(x), None
            lone[:, channel] = cotangent[:, channel]
            # The weight may be in the graph for the previous norm's sake alone, if the operator ran without gradients.
            if x.requires_grad and self.has_graph:
                (grad,) = torch.autograd.grad(x, self.leaf, lone, retain_graph=True, allow_unused=True)
            if grad is None:
                raise RuntimeError(
                    f"{self.label}: two layers need a graph to the weight of {self.module}, something detaches it"
                )
            rows.append(grad.flatten())
        return torch.stack(rows)


class TwoLayerStorage(C.GradientStorage):
    """Keeps gradients for the weight of the nearest operator and, by autograd, for the earlier one."""

    def __init__(self, operators: Sequence[Operator], settings: Settings, earlier: EarlierOperator) -> None:
        geometries = [operator.geometry for operator in operators]
        plan = C.choose_plan(geometries[0], settings.positions, settings.window - 1, settings.order)
        super().__init__(geometries, plan.positions, settings)
        self._earlier = earlier

    def remember(self, seen: C.Observation) -> tuple[dict[str, Tensor], C.Flag]:
        """Return the gradients of both, their products with today's weights, and whether the nearest made `x`."""
        nearest = seen._replace(operands=seen.operands[:1], weights=seen.weights[:1])
        row, is_theirs = super().remember(nearest)
        if (found := self._earlier.gradients(seen.mean)) is not None:
            of_mean, of_var = (self._rounded(each).contiguous() for each in found)
            row |= {"1.mean_grad": of_mean, "1.var_grad": of_var}
            for name, projected in (
                ("mean_at", C.project_means(of_mean.unsqueeze(0), seen.weights[1])[0]),
                ("var_at", C.project(of_var.unsqueeze(0), seen.weights[1])[0]),
            ):
                row[name] = row[name] + projected if name in row else projected
        return row, is_theirs

    @staticmethod
    def mean_patch_in(row: Mapping[str, Tensor], i: int) -> Tensor | None:
        """Return what has to be finite of an operator: of the earlier one both gradients."""
        patch = C.GradientStorage.mean_patch_in(row, i)
        return patch if i == 0 or patch is None else torch.cat([patch, row["1.var_grad"]])


class TwoLayerSegment(Segment):
    """The channels of a norm, with the operator that it reads and the one before the previous norm."""

    def __init__(self, norm: CrossIterBatchNorm, nearest: Segment, module: nn.Module) -> None:
        self.earlier = EarlierOperator(module, norm.label, nearest.channels)
        self._leaf = self.earlier.leaf
        operators = nearest.operators[0], self.earlier
        super().__init__(
            nearest.channels, operators, nearest.settings, norm.feeds.like(), nearest.direct, nearest.given
        )
        self._handles = [
            norm.register_forward_pre_hook(self._see_input, with_kwargs=True),
            module.register_forward_hook(self._see_forward),
            module.register_load_state_dict_post_hook(self._see_load),
        ]

    def _make_storage(self) -> TwoLayerStorage:
        _check_settings(self.earlier.label, self.settings)
        return TwoLayerStorage(self.operators, self.settings, self.earlier)

    def _see_input(self, norm: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        if not norm.training:
            return
        # After a break of the graph, the eager rest of a compiled step has the compiler's callback set.
        if torch.compiler.is_compiling() or graph_break_rest():
            raise RuntimeError(f"{self.earlier.label}: two layers do not work under torch.compile")
        if current_pass() is not Pass.LOOK and may_be_recomputed():
            raise RuntimeError(f"{self.earlier.label}: two layers do not work inside activation checkpointing")
        self.earlier.x = args[0] if args else kwargs["x"]

    def _see_forward(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        if torch.compiler.is_compiling() or not backward_is_running():
            self.earlier.has_graph = output.requires_grad

    def _see_load(self, *_: Any) -> None:
        self.forget()

    def operands(self, x: Tensor, calls: Calls) -> tuple[list[C.Operand], Tensor | None]:
        """Return what the operators bring to a step; forget if there is another Parameter in the earlier place."""
        if self._leaf is not self.earlier.leaf:
            self._leaf = self.earlier.leaf
            self.forget()
        operands, bias = super().operands(x, calls)
        if operands:  # without an input here, the step would not compare `x` with what the nearest operator makes
            operands[1] = operands[1]._replace(y=self.earlier.x)
        return operands, bias

    def finish_step(self) -> None:
        """Let go of what hooks have seen."""
        super().finish_step()
        self.earlier.x = None

    def release(self) -> None:
        """Stop feeding the norm."""
        super().release()
        for handle in self._handles:
            handle.remove()

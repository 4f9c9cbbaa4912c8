"""Arithmetic of a training step: what the network costs without norms, and what a norm adds.

One multiplication, addition, subtraction, division or root is one FLOP, so a multiply-add is two, as in
`torch.utils.flop_counter`. Copies, gathers, comparisons, activations and integers are free. Every operator that torch
executes is counted, as it is executed; compiled code, which does the same, stands aside meanwhile:

| operator | FLOPs |
|---|---|
| convolution, matrix product | as `torch.utils.flop_counter` counts them: 2 per multiply-add |
| convolution's backward | for each of the two gradients what forward costs; torch's own count ignores groups |
| elementwise arithmetic | 1 per element of the result; 2 for addcmul and addcdiv, 3 for lerp |
| sum, mean | 1 per element summed |
| var, var_mean, batch statistics | 4 per element: mean 1; difference, square, sum 3 |
| batch norm, training | 6 per element: statistics 4, one multiply-add 2; evaluation 2 |
| its backward, training | 9 per element: two sums 4; (g - mean_g - (x - mean) c) s 5 |
| group norm | 6 per element; backward 7: two sums 3, a g + b x + c 4 |
| layer norm | 8 per element; backward 13: gamma has a factor per element |

What a norm adds is the count of the model with it less the count of the model with its norms taken out, so all that
cross-iteration normalization does is in it: moments, sampled gradients, the projections of the history on today's
weights, pooling, the gradient through the compensation.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from crossbn.lab.cost.records import Flops
from crossbn.ops import library

_PER_RESULT = {
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "neg", "reciprocal", "pow", "square", "sqrt", "rsqrt"), 1),
    **dict.fromkeys(("exp", "log"), 1),
    **dict.fromkeys(("addcmul", "addcdiv"), 2),
    "lerp": 3,
    **dict.fromkeys(("batch_norm_elemt", "_native_batch_norm_legit_no_training"), 2),
    "native_group_norm": 6,
    "native_group_norm_backward": 7,
    "native_layer_norm": 8,
    "native_layer_norm_backward": 13,
}
_PER_INPUT = {
    **dict.fromkeys(("sum", "mean"), 1),
    **dict.fromkeys(("mv", "dot", "vdot"), 2),
    **dict.fromkeys(("var", "var_mean", "std", "batch_norm_stats", "batch_norm_update_stats"), 4),
    "batch_norm_backward_reduce": 4,
    "batch_norm_backward_elemt": 5,
}
_BATCH_NORMS = {"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"}
_TRAINING = 5  # place of the flag among the arguments of all of them


class StepFlops(NamedTuple):
    """Counts of a training step: convolutions and matrix products, and everything else that is counted."""

    products: Flops
    elementwise: Flops

    @property
    def total(self) -> Flops:
        """Both kinds."""
        return self.products + self.elementwise


def count_step(forward: Callable[[], Tensor]) -> StepFlops:
    """Count a training step, from the call of `forward`, which returns the loss, to the end of backward.

    Example:
        >>> layer = nn.Linear(10, 4, bias=False)
        >>> count_step(lambda: layer(torch.ones(3, 10)).sum())
        StepFlops(products=Flops(forward=240, backward=240), elementwise=Flops(forward=12, backward=0))
    """
    with library.switched_off(), _products() as forward_products, _Elementwise() as forward_rest:
        loss = forward()
    with library.switched_off(), _products() as backward_products, _Elementwise() as backward_rest:
        loss.backward()
    products = Flops(forward_products.get_total_flops(), backward_products.get_total_flops())
    return StepFlops(products, Flops(forward_rest.flops, backward_rest.flops))


def _products() -> FlopCounterMode:
    own = {torch.ops.aten.convolution_backward: _convolution_backward, torch.ops.aten.addmm_: _product_in_place}
    return FlopCounterMode(display=False, custom_mapping=own)


def _convolution_backward(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *rest: Any, out_shape: object = None
) -> int:
    """Count from the shapes: every output position (of a transposed one, every input position) meets every weight."""
    del out_shape  # given by torch, not needed
    *_, transposed, _, _, wanted = rest  # output padding and groups; which gradients
    positions = math.prod((x if transposed else grad)[2:])
    return (int(wanted[0]) + int(wanted[1])) * 2 * grad[0] * positions * math.prod(weight)


def _product_in_place(_: Sequence[int], a: Sequence[int], b: Sequence[int], out_shape: object = None) -> int:
    """Count what torch's own counter knows under another name only."""
    del out_shape
    return 2 * math.prod(a) * b[1]


class _Elementwise(TorchDispatchMode):
    """Counts what `FlopCounterMode` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0].rstrip("_")
        self.flops += _count(name, args, result)
        return result


def _count(name: str, args: tuple[Any, ...], result: Any) -> int:
    if name.startswith("_foreach_"):  # in place it returns nothing
        return _count(name.removeprefix("_foreach_"), args, args[0] if result is None else result)
    if name in _BATCH_NORMS:
        return (6 if args[_TRAINING] else 2) * _elements(args[0])
    if name.endswith("batch_norm_backward") and name.startswith(("native", "cudnn", "miopen")):
        return _batch_norm_backward(name, args)
    if name in _PER_INPUT:
        return _PER_INPUT[name] * _elements(args[0])
    if name in _PER_RESULT:
        first = result[0] if isinstance(result, tuple) else result
        return _PER_RESULT[name] * _elements(first)
    return 0


def _batch_norm_backward(name: str, args: tuple[Any, ...]) -> int:
    if name != "native_batch_norm_backward" or args[7]:  # the others are for training only
        return 9 * _elements(args[0])
    wanted = args[9]  # gradients of the input, gamma, beta
    return (int(wanted[0]) + 4 * int(wanted[1] or wanted[2])) * _elements(args[0])


def _elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() if value.is_floating_point() else 0
    return sum(_elements(each) for each in value) if isinstance(value, list | tuple) else 0

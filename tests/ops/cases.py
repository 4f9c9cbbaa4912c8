"""Steps of a segment, one table, which every implementation has to do as the reference does in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbn import functional as C
from crossbn import ops
from crossbn.nn.history import History
from crossbn.ops import NormTensors, PackedStatistics, Statistics, StepInputs, reference
from tests.support import draw

WINDOW = 4
EPS, MOMENTUM = 1e-3, 0.3
Found = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A step: what feeds it, what is remembered, and what is odd about it.

    Attributes:
        operator: makes the operator; several are summed.
        shape: of its input.
        steps: that have been remembered before, of which the last three are left.
        options: of the norm.
        known_moments: whether they are given; else the norm's tensors are.
        compiled: whether compiled code for the CPU does such a step.
        spoil: what becomes of the operator's output.
        pooling: whether burn-in is over.
        remember: whether the step is to be remembered.
        others: further operators.
        raises: whether the output is another operator's, and that is noticed.
    """

    operator: Callable[[], nn.Module]
    shape: tuple[int, ...] = (2, 3, 6, 5)
    steps: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    known_moments: bool = False
    compiled: bool = True
    spoil: Callable[[Tensor], Tensor] = lambda x: x
    pooling: bool = True
    remember: bool = True
    others: tuple[Callable[[], nn.Module], ...] = ()
    raises: bool = False


def _conv(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(3, 4, 3, **{"bias": False, **options})


def _large() -> nn.Module:
    return nn.Conv2d(64, 60, 3, padding=1, bias=False)


def _linear() -> nn.Module:
    return nn.Linear(5, 4, bias=False)


def _with(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[0, 0] = value
    return x


_LARGE_SHAPE = (2, 64, 4, 3)
OPERATORS: dict[str, Case] = {
    "convolution": Case(_conv()),
    "stride": Case(_conv(stride=2)),
    "padding": Case(_conv(padding=(2, 1))),
    "dilation": Case(_conv(dilation=(1, 2))),
    "stride, padding and dilation": Case(_conv(stride=(2, 1), padding=1, dilation=2), (2, 3, 7, 8)),
    "reflect": Case(_conv(padding=1, padding_mode="reflect")),
    "circular": Case(_conv(padding=1, padding_mode="circular", stride=2)),
    "pointwise": Case(lambda: nn.Conv2d(3, 4, 1, bias=False)),
    "groups": Case(lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), (2, 4, 5, 5)),
    "depthwise": Case(lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False), (2, 4, 5, 4)),
    "transposed": Case(
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1, bias=False), (2, 3, 4, 3)
    ),
    "transposed groups": Case(lambda: nn.ConvTranspose2d(4, 6, (2, 3), groups=2, bias=False), (2, 4, 3, 4)),
    "linear": Case(_linear, (6, 5)),
    "one dimension": Case(lambda: nn.Conv1d(3, 4, 3, bias=False), (2, 3, 9)),
    "three dimensions": Case(lambda: nn.Conv3d(2, 4, 2, stride=(1, 2, 1), padding=1, bias=False), (2, 2, 4, 5, 3)),
    "patches": Case(_large, _LARGE_SHAPE),
    "patches, groups": Case(lambda: nn.Conv2d(80, 100, 3, groups=2, bias=False), (2, 80, 4, 4)),
    "patches, transposed": Case(lambda: nn.ConvTranspose2d(64, 60, 3, stride=2, bias=False), (2, 64, 2, 3)),
    "patches, linear": Case(lambda: nn.Linear(300, 120, bias=False), (6, 300)),
}
_ODD: dict[str, dict[str, Any]] = {
    "nothing remembered": {"steps": 0},
    "one remembered": {"steps": 1},
    "window full": {"steps": 3},
    "ring overwritten": {"steps": 7},
    "decay": {"steps": 5, "options": {"decay": 0.6}},
    "decay, partly filled": {"options": {"decay": 0.6}},
    "automatic weights": {"steps": 6, "options": {"weights": "auto"}},
    "automatic weights, nothing remembered": {"steps": 0, "options": {"weights": "auto"}},
    "automatic weights, one remembered": {"steps": 1, "options": {"weights": "auto"}},
    "automatic weights, partly filled": {"options": {"weights": "auto"}},
    "few positions": {"options": {"positions": 3}},
    "known moments": {"known_moments": True},
    "known moments, decay": {"known_moments": True, "steps": 6, "options": {"decay": 0.6}},
    "known moments, automatic weights": {"known_moments": True, "steps": 5, "options": {"weights": "auto"}},
    "automatic weights, only looking": {"remember": False, "steps": 5, "options": {"weights": "auto"}},
    "only looking": {"remember": False},
    "infinite": {"spoil": lambda x: _with(x, torch.inf), "compiled": False},
    "not a number": {"spoil": lambda x: _with(x, torch.nan), "compiled": False},
    "another operator": {"spoil": lambda x: 1.5 * x, "raises": True},
    "another operator, known moments": {"spoil": lambda x: x + 1, "raises": True, "known_moments": True},
    "burn-in": {"pooling": False, "compiled": False},
    "all positions": {"options": {"positions": None}, "compiled": False},
    "second order": {"options": {"order": 2}, "compiled": False},
    "automatic weights, second order": {"options": {"weights": "auto", "order": 2}, "compiled": False},
    "automatic weights, no compensation": {"options": {"weights": "auto", "order": 0}, "compiled": False},
    "automatic weights, dropping what is invalid": {
        "options": {"weights": "auto", "invalid": "drop"},
        "compiled": False,
    },
    "automatic weights, burn-in": {"pooling": False, "options": {"weights": "auto"}, "compiled": False},
    "no compensation": {"options": {"order": 0}, "compiled": False},
    "detached": {"options": {"backward": "detached"}, "compiled": False},
    "dropping what is invalid": {"options": {"invalid": "drop"}, "compiled": False},
    "history in bfloat16": {"options": {"history_dtype": torch.bfloat16}, "compiled": False},
}
SITUATIONS: dict[str, Case] = {
    f"{what}{name}": Case(make, shape, **options)
    for what, make, shape in (("", _conv(), (2, 3, 6, 5)), ("patches, ", _large, _LARGE_SHAPE))
    for name, options in _ODD.items()
}
OTHERS: dict[str, Case] = {
    "lone position": Case(_linear, (1, 5), compiled=False),
    "lone position, known moments": Case(_linear, (1, 5), known_moments=True),
    "lone position, nothing remembered": Case(_linear, (1, 5), steps=0, compiled=False),
    "bias": Case(_conv(bias=True), compiled=False),
    "sum": Case(_conv(padding=1), others=(lambda: nn.Conv2d(3, 4, 1, bias=False),), compiled=False),
    "sum with biases": Case(_conv(padding=1, bias=True), others=(lambda: nn.Conv2d(3, 4, 1),), compiled=False),
}
CASES: dict[str, Case] = {**OPERATORS, **SITUATIONS, **OTHERS}


class Situation(NamedTuple):
    """A case with its numbers: what a step is given."""

    inputs: StepInputs
    history: History
    storage: C.Storage | None
    settings: C.Settings
    norm: NormTensors


def situation(case: Case, dtype: torch.dtype, device: str = "cpu") -> Situation:
    """Return the numbers of a case: the same in all types but for rounding, and on all devices."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).double()

    modules = [make().double() for make in (case.operator, *case.others)]
    geometries = [C.geometry_of(module) for module in modules]
    with torch.no_grad():
        for parameter in (each for module in modules for each in module.parameters()):
            parameter.copy_(draw(*parameter.shape) / parameter[0].numel() ** 0.5)
    settings = C.Settings(**{"window": WINDOW, "weights": "equal", "burn_in": 0 if case.pooling else 1, **case.options})
    storage, channels = C.make_storage(geometries, settings), geometries[0].out_channels
    shapes = C.history_shapes(channels, storage, settings)
    history = History(settings.window - 1, shapes, torch.empty(0, dtype=torch.float64), settings.history_dtype)
    for number in range(case.steps + 1):
        y = draw(case.shape[0] + number % 2 * (number < case.steps), *case.shape[1:]) + 0.3
        inputs = _inputs(modules, geometries, y, case)
        if number == case.steps:
            break
        known = inputs._replace(moments=C.batch_moments(inputs.x), norm=None, pooling=True, remember=True)
        outcome = reference.step(known, history.past(), storage, settings)
        assert outcome.commit is not None
        outcome.commit()
        with torch.no_grad():
            for parameter in (each for module in modules for each in module.parameters()):
                parameter.add_(draw(*parameter.shape), alpha=0.1 / parameter[0].numel() ** 0.5)
    mean, gamma, beta, var = (draw(channels).to(device, dtype) for _ in range(4))
    norm = NormTensors(mean, var.abs(), torch.tensor(5, device=device), gamma, beta, EPS, MOMENTUM)
    history.apply_(lambda tensor: tensor.to(device, dtype))
    x = case.spoil(inputs.x).to(device, dtype)
    inputs = inputs._replace(
        x=x,
        moments=C.batch_moments(x) if case.known_moments else None,
        operands=[
            each._replace(weight=each.weight.to(device, dtype), y=None if each.y is None else each.y.to(device, dtype))
            for each in inputs.operands
        ],
        bias=None if inputs.bias is None else inputs.bias.to(device, dtype),
        norm=None if case.known_moments else norm,
    )
    return Situation(inputs, history, storage, settings, norm)


@torch.no_grad()
def _inputs(modules: list[nn.Module], geometries: list[C.Geometry], y: Tensor, case: Case) -> StepInputs:
    outputs = [module(y) for module in modules]
    biases = [module.get_parameter("bias").clone() for module in modules if module.bias is not None]
    operands = [
        C.Operand(geometry, module.get_parameter("weight").detach().clone(), y, output.shape[2:])
        for geometry, module, output in zip(geometries, modules, outputs, strict=True)
    ]
    bias = C.total(biases) if biases else None
    is_compensated = case.options.get("order") != 0
    return StepInputs(
        C.total(outputs),
        None,
        True,
        operands if is_compensated else (),
        bias if is_compensated else None,
        True,
        case.pooling,
        case.remember,
        None,
    )


def found_in(found: Statistics, history: History, given: StepInputs) -> Found:
    """Return what a step came to, each as a tensor in float64: how it is put does not matter."""
    channels = len(found.mean)
    tensors = {"mean": found.mean, "var": found.var}
    for name in ("share", "bessel", "has_variance", "positions", "finite"):
        tensors[name] = torch.as_tensor(getattr(found, name), dtype=torch.float64).expand(channels)
    one, zero = torch.ones(channels).double(), torch.zeros(channels).double()
    for i, operand in enumerate(given.operands):
        of_mean = of_var = torch.zeros(channels, operand.geometry.patch_size).double()
        if found.dependence is not None:
            jacobian = C.Jacobian(*(None if t is None else t.cpu().double() for t in found.dependence.jacobians[i]))  # type: ignore[arg-type]  # as taken
            of_mean, of_var = jacobian.weight_gradient(one, zero), jacobian.weight_gradient(zero, one)
        tensors |= {f"d mean / d weight {i}": of_mean, f"d var / d weight {i}": of_var}
    whole = torch.zeros(history.slots, channels).double()
    if found.dependence is not None:
        whole[: len(found.dependence.dvar_dvar)] = found.dependence.dvar_dvar
    tensors["d var / d past var"] = whole
    if given.bias is not None:
        of_bias = (zero, zero) if found.dependence is None else found.dependence.of_bias
        assert of_bias is not None
        tensors["d mean / d bias"], tensors["d var / d bias"] = (each.expand(channels) for each in of_bias)
    return {name: tensor.detach().cpu().double() for name, tensor in tensors.items()}


def gradients_in(given: Situation, statistics: Statistics, module: ModuleType) -> Found:
    """Return what an implementation, or `ops` itself, makes of a gradient of the output; nothing if it is not its own.

    The gradient is the same in all types but for rounding.
    """
    x, norm = given.inputs.x, given.norm
    grad = draw(8, *x.shape, dtype=torch.float64).to(x)
    jacobians: Any = ()
    if statistics.has_dependence:
        is_packed = isinstance(statistics, PackedStatistics)
        jacobians = None if is_packed else [(0, each) for each in statistics.derivative.jacobians]
    found = module.step_backward(grad, x, norm.gamma, norm.eps, statistics, jacobians)
    if found is None:
        return {}
    tensors = {f"gradient of {name}": getattr(found, name) for name in ("x", "gamma", "beta", "mean", "var")}
    for i, (geometry, *_) in enumerate(given.inputs.operands):
        none = torch.zeros(geometry.out_channels, geometry.patch_size)
        tensors[f"gradient of weight {i}"] = found.weights[i].flatten(1) if found.weights else none
    return {name: tensor.cpu().double() for name, tensor in tensors.items()}


def remembered(history: History) -> Found:
    """Return what is remembered, in float64."""
    return {f"history: {name}": tensor.cpu().double() for name, tensor in history.state()}


def expected_of(case: Case) -> Found:
    """Return what the reference makes of a case in float64, with what follows of it for output and running statistics.

    Raises:
        NotTheOperatorsOutput: where that is the case.
    """
    inputs, history, storage, settings, norm = situation(case, torch.float64)
    mean, var = C.batch_moments(inputs.x)
    known = inputs._replace(moments=(mean, var), finite=C.all_finite(var), norm=None)
    outcome = reference.step(known, history.past(), storage, settings)
    found = outcome.statistics
    if outcome.commit is not None:
        outcome.commit()
    assert norm.gamma is not None
    output = C.normalized(inputs.x, found.mean, found.var, norm.gamma, norm.beta, norm.eps)
    unbiased = found.var * found.bessel
    return {
        **found_in(found, history, inputs),
        **remembered(history),
        **gradients_in(Situation(inputs, history, storage, settings, norm), found, ops),
        "output": output,
        "running mean": torch.lerp(norm.running_mean, found.mean, norm.momentum),
        "running var": torch.lerp(norm.running_var, unbiased, norm.momentum),
        "batches": norm.num_batches_tracked.double() + 1,
    }


def assert_near(got: Found, expected: Found, dtype: torch.dtype) -> None:
    """Compare as closely as the type allows; the absolute part is relative to the largest value."""
    relative = 1e-9 if dtype == torch.float64 else 2e-4
    for name, value in got.items():
        want = expected[name]
        scale = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 1.0
        absolute = relative * max(scale, 1e-3)
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(value, want, rtol=relative, atol=absolute, equal_nan=True, msg=message)

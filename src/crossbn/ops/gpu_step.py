"""A whole step on a GPU: which kernels are launched, and where their results lie."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.functional import Settings, Storage
from crossbn.functional.moments import native_available
from crossbn.functional.sensitivity import jump_over
from crossbn.functional.storage import rounding_of, tolerance_of
from crossbn.ops import types
from crossbn.ops.types import NormTensors, Outcome, PackedStatistics, Past, Statistics, StepInputs, flat_strides

_MANY, _COPIED, _SAMPLES, _NUMBERS, _TILE = 256, 1024, 16, 32, 1024  # numbers that a program has at a time
_MODES = {"zeros": 0, "reflect": 1, "replicate": 2, "circular": 3}
_TRANSPOSED = 4
_SHARE, _ROWS = 2, 6
"""Where in the results they are, see `types.result_shapes`."""


OPTIONS = {"enable_fp_fusion": True} | ({"maxnreg": 168} if torch.version.hip is None else {})
"""Of compilation. Left alone, NVIDIA's assembler saves registers and spills where there is no need."""


@functools.lru_cache(1)
def kernels() -> ModuleType:
    """Return the kernels; Triton is imported now."""
    return importlib.import_module("crossbn.ops.kernels")


def launch(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch one of them, where its first argument is."""
    kernel, device = getattr(kernels(), name), arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants, **OPTIONS)
    else:
        kernel[grid](*arguments, **constants, **OPTIONS)


def _next_power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


class Results(types.Layout):
    """Where the results of a step lie. With samples today's rows are behind the others: one product is of them all.

    Today's share is one for each channel, as is what makes the variance unbiased, which is behind all else: statistics
    of segments are put side by side in one kernel.
    """

    def __init__(self, storage: Storage, past: Past) -> None:
        shapes = types.result_shapes(storage, past.rings, past.slots, 1, False)
        rows, vector = shapes[_ROWS], shapes[0]
        assert rows is not None
        shapes[_SHARE] = vector
        shapes[_ROWS] = (past.slots + (not isinstance(storage, C.GradientStorage)), *rows[1:])
        shapes.append(vector)
        super().__init__(shapes)
        self.sizes = [stop - start for start, stop in itertools.pairwise(types.starts_in_one(shapes))]
        place = self.places[_ROWS]
        assert place is not None
        self.places[_ROWS] = (rows, *place[1:])


class _Arrays(NamedTuple):
    """What a step makes. The first ones are its results, those of a bias are empty; others are needed until it ends."""

    mean: Tensor
    var: Tensor
    share: Tensor
    dvar_dvar: Tensor
    of_bias: Tensor
    of_bias_too: Tensor
    rows: Tensor
    step_weight: Tensor
    coefficient: Tensor
    jacobian: Tensor
    bessel: Tensor
    invstd: Tensor
    centred: Tensor  # today's
    products: Tensor  # of all rows; as gradients of today's mean, sample and gradient, then shift and slope
    own_rows: Tensor  # today's
    own_grad: Tensor  # today's gradient of the variance
    differences: Tensor
    keep: Tensor  # whether to remember the step, and its number, int64


class Work:
    """What is known of a step beforehand: for one operator, storage and settings, and inputs of one size and layout."""

    def __init__(self, inputs: StepInputs, past: Past, storage: Storage, settings: Settings) -> None:
        x, (geometry, _, y, _, _) = inputs.x, inputs.operands[0]
        assert y is not None
        self._key = self._key_of(inputs, past, storage, settings)
        self._settings, self._geometry, self._price = settings, geometry, C.gradient_price(len(x))
        self._is_sampled = not isinstance(storage, C.GradientStorage)
        self._eps = 0.0 if inputs.norm is None else inputs.norm.eps
        self._results = Results(storage, past)
        self._channels, self._steps, self._positions = x.shape[1], past.slots, x.numel() // x.shape[1]
        self._groups, self._patch = geometry.groups, geometry.patch_size
        self._amount = min(storage.positions or 0, self._positions)
        self._samples = types.samples_in(past.rings)  # of a remembered step
        self._row_size = self._samples * self._groups * self._patch
        self._gathered = self._samples if self._is_sampled else 1 + self._amount
        self._ages, self._width = _next_power(past.slots), 32 if self._is_sampled else 16
        self._programs = -(-self._channels // self._width)
        self._rounding = tolerance_of(x.dtype), rounding_of(x.dtype)
        self._plan_gather(x, y)
        at, rows, grad = (self._steps + 1) * self._samples, 0, 0
        if not self._is_sampled:
            at, rows = 3 + 2 * self._steps, self._gathered * self._groups * self._patch
            grad = self._channels * self._patch
        c = self._channels
        self._room = [c, self._gathered * c, at * c, rows, grad, self._programs * self._steps]

    def _plan_gather(self, x: Tensor, y: Tensor) -> None:
        geometry, dims, inputs = self._geometry, x.ndim - 2, y.shape[1]
        one, zero = (1,) * dims, (0,) * dims
        steps = geometry.kernel or one, geometry.stride or one, geometry.dilation or one
        before = tuple(width for width, _ in geometry.padding) or zero
        self._places = [number for each in (x.shape[2:], y.shape[2:], *steps) for number in (*[1] * (3 - dims), *each)]
        self._places += [*[0] * (3 - dims), *before]
        self._mode = _TRANSPOSED if geometry.transposed else _MODES[geometry.padding_mode]
        strides, copied = flat_strides(y), self._steps * self._row_size
        assert strides is not None
        if strides[2] > 1:  # channels are next to each other
            self._tall = min(64, _next_power(inputs))
            self._wide = _TILE // self._tall
        else:
            self._wide = min(_TILE, _next_power(self._positions))
            self._tall = min(_next_power(inputs), _TILE // self._wide)
        programs = geometry.taps * -(-inputs // self._tall) + -(-self._channels // self._tall) + -(-copied // _COPIED)
        self._grid, jump = (programs,), jump_over(self._positions)
        self._counts = len(x), inputs, self._channels, self._amount, self._gathered, jump, copied

    @staticmethod
    def _key_of(inputs: StepInputs, past: Past, storage: Storage, settings: Settings) -> tuple[Any, ...]:
        x, (geometry, weight, y, _, bias) = inputs.x, inputs.operands[0]
        assert y is not None
        of_x, of_y = (x.shape, x.stride(), x.dtype), (y.shape, y.stride(), y.dtype)
        usual = inputs.is_complete, inputs.bias is None and bias is None
        rest = weight.shape, past.slots, types.samples_in(past.rings), None if inputs.norm is None else inputs.norm.eps
        return storage, settings, geometry, of_x, of_y, *usual, *rest

    def is_for(self, inputs: StepInputs, past: Past, storage: Storage, settings: Settings) -> bool:
        """Tell whether it is for such a step."""
        return self._key_of(inputs, past, storage, settings) == self._key

    def step(self, inputs: StepInputs, past: Past) -> Outcome:
        """Do a step."""
        x, operand = inputs.x, inputs.operands[0]
        weight = C.flatten_weight(operand.weight.detach(), self._geometry).contiguous()
        mean, var = inputs.moments or C.batch_moments(x)
        packed = x.new_empty(self._results.size, dtype=torch.float32)
        room = x.new_empty(sum(self._room), dtype=torch.float32).split(self._room)
        made: list[Tensor] = [*packed.split(self._results.sizes), *room, x.new_empty(2, dtype=torch.int64)]
        arrays = _Arrays(*made)
        if self._is_sampled:
            of_steps = self._steps * self._row_size
            arrays = arrays._replace(own_rows=arrays.rows[of_steps : of_steps + self._row_size])
        self._gather(x, operand.y, mean, past, arrays)
        told = self._products(weight, past.rings, arrays)
        self._pool(inputs, (mean, var), past, weight, told, arrays)
        found = PackedStatistics(packed, self._results, positions=self._positions)
        found.bessel = arrays.bessel[: self._channels]
        output = None
        if inputs.moments is None:
            assert inputs.norm is not None
            output = self._normalize(x, inputs.norm, arrays)
        return Outcome(found, partial(self._remember, past, (mean, var), arrays) if inputs.remember else None, output)

    def _gather(self, x: Tensor, y: Any, mean: Tensor, past: Past, made: _Arrays) -> None:
        """Make today's rows, and keep the remembered ones, which the rings will lose."""
        ring, of_y, of_x = past.rings["0.rows" if self._is_sampled else "0.mean_grad"], flat_strides(y), flat_strides(x)
        assert of_y is not None
        assert of_x is not None
        told = y, *of_y, x, *of_x, mean, past.num_steps, ring, made.rows, made.own_rows, made.centred
        blocks = {"MODE": self._mode, "CHANNELS": self._tall, "PLACES": self._wide, "SAMPLES": _SAMPLES}
        launch("gather", self._grid, *told, *self._counts, *self._places, **blocks, COPIED=_COPIED)

    def _products(self, weight: Tensor, rings: dict[str, Tensor], made: _Arrays) -> tuple[Tensor, ...]:
        """Apply today's weights to all rows: return what `pool` reads of remembered steps and of today's."""
        c, steps, at = self._channels, self._steps, made.products
        if self._is_sampled:
            count, groups, wide = (steps + 1) * self._samples, self._groups, weight.to(torch.float32)
            rows = made.rows[: count * groups * self._patch].view(count, groups, self._patch)
            if groups == 1:
                torch.mm(rows.squeeze(1), wide.mT, out=at.view(count, c))
            else:
                at.view(count, c).copy_(C.project(rows, wide))
            return at, rings["products"], rings["centred"], at, at[steps * self._samples * c :]
        today, shift, slope = at.split([3 * c, steps * c, steps * c])
        of_rings = rings["0.mean_grad"], rings["0.var_grad"], rings["mean_at"], rings["var_at"]
        told = made.own_rows, made.centred, weight, *of_rings, steps, made.own_grad, today, shift, slope
        sizes, numbers = (c, c // self._groups, self._patch, self._amount), min(128, _next_power(self._patch))
        launch("differentiate", (c,), *told, *sizes, SAMPLES=_SAMPLES, NUMBERS=numbers)
        return shift, shift, slope, rings["0.var_grad"], today

    def _pool(
        self, inputs: StepInputs, today: Any, past: Past, weight: Tensor, told: tuple[Tensor, ...], made: _Arrays
    ) -> None:
        rings, settings, is_automatic = past.rings, self._settings, self._settings.weights == "auto"
        others = _others(inputs.finite, today[1])
        ages = rings["variogram" if is_automatic else "count"]
        of_past = rings["mean"], rings["var"], rings["count"], ages, past.num_steps
        flags = {"AUTOMATIC": is_automatic, "SAMPLED": self._is_sampled, "CHECKED": inputs.remember}
        blocks = {"AGES": self._ages, "CHANNELS": self._width, "NUMBERS": _NUMBERS, "MANY": _MANY}
        launch(
            "pool", (self._programs,),
            *today, *of_past, today[1] if others is None else others, *told, made.centred, made.own_rows, weight,
            made.mean, made.var, made.invstd, made.share, made.dvar_dvar, made.step_weight, made.coefficient,
            made.jacobian, made.differences, made.keep, made.bessel,
            self._channels, 0 if others is None else len(others),
            self._channels // self._groups, self._patch, self._samples, self._amount, self._steps,
            float(self._positions), math.log2(settings.rate), self._price, self._eps, *self._rounding,
            **flags, **blocks, LOOKED=not self._geometry.reads_every_input,
        )  # fmt: skip

    def _normalize(self, x: Tensor, norm: NormTensors, made: _Arrays) -> Tensor:
        """Normalize, and move the running statistics."""
        c, gamma, beta, eps = self._channels, norm.gamma, norm.beta, norm.eps
        mean, var = made.mean[:c], made.var[:c]
        move_running(mean, var, made.bessel, norm[:3], norm.momentum)
        if native_available(x):
            return torch.batch_norm_elemt(x, gamma, beta, mean, made.invstd[:c], eps)
        return C.normalized(x, mean, var, torch.ones_like(mean) if gamma is None else gamma, beta, eps)

    def _remember(self, past: Past, today: Any, made: _Arrays) -> None:
        """Write what the step has made into the rings, if it is to be kept."""
        rings, c, is_automatic, at = past.rings, self._channels, self._settings.weights == "auto", made.products
        if self._is_sampled:
            at = at[self._steps * self._samples * c :]
            of_rings = rings["0.rows"], rings["products"], rings["centred"], rings["mean"]
            rows = made.own_rows, at, made.centred, at
            sizes = self._row_size, self._samples * c, self._samples * c
        else:
            of_rings = rings["0.mean_grad"], rings["mean_at"], rings["0.var_grad"], rings["var_at"]
            rows, sizes = (made.own_rows, at, made.own_grad, at[2 * c :]), (self._row_size, c, c * self._patch)
        ages = rings["variogram" if is_automatic else "count"]
        told = past.num_steps, made.keep, rings["mean"], rings["var"], rings["count"], *of_rings, ages, *today, *rows
        numbers = c, *sizes, self._steps, self._programs, float(self._positions)
        flags = {"AUTOMATIC": is_automatic, "SAMPLED": self._is_sampled, "AGES": self._ages, "COPIED": _COPIED}
        with past.lock:
            launch("remember", (-(-max(c, *sizes) // _COPIED),), *told, made.differences, *numbers, **flags)


def _others(finite: Any, own: Tensor) -> Tensor | None:
    """Return the variances of other channels that a step depends on; None for none."""
    vectors = finite.vectors if isinstance(finite, types.Variances) else ()
    others = [vector for vector in vectors if vector is not own]
    return None if not others else others[0] if len(others) == 1 else torch.cat(others)


def move_running(
    mean: Tensor, var: Tensor, bessel: Tensor, running: tuple[Tensor, Tensor, Tensor], momentum: float
) -> None:
    """Move the running statistics towards the mean and the variance times `bessel`, if all stays finite."""
    launch("move_running", (1,), mean, var, bessel, *running, len(mean), momentum, MANY=_MANY)
    torch.autograd.graph.increment_version(running)


def alone(moments: tuple[Tensor, Tensor], positions: int, past: Past) -> Statistics:
    """Return the statistics of a segment that remembers nothing, as vectors; those that never change are kept."""
    mean, var = moments
    key, known = (len(mean), positions, mean.device), past.scratch[-1] if past.scratch else None
    if known is None or known[0] != key:
        known = key, torch.ones_like(mean), torch.full_like(mean, positions / (positions - 1))
        past.scratch[:] = [known]
    return Statistics(mean, var, known[1], None, known[2], positions=positions)

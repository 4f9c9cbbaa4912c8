"""What is remembered of how a step's moments change with the weights: gradients, or the patches they are made of.

A storage has no state: what is kept comes in as tensors [R, ...] by name, R remembered steps, and goes out as those of
one step. Which storage, and from how many positions, is a matter of cost (`choose_plan`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from crossbn.functional.geometry import Geometry
from crossbn.functional.moments import Flag
from crossbn.functional.pooling import Pooled
from crossbn.functional.sensitivity import mean_grad, outputs_at, patches_at, sample_places, var_grad
from crossbn.functional.settings import Settings
from crossbn.functional.taylor import Jacobian, TaylorTerms, project, project_means, project_steps, spread

Kept = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
SAMPLES = ("rows", "products", "centred")
"""Ends of names whose tensors have a row for each sampled position: fewer in a batch that has fewer."""
BY_AGE = ("variogram",)
"""Names whose tensors have a row for each age, from 1 on, and not for each step: they are written as a whole."""
_BULK = ("mean_grad", "var_grad", "rows", "centred")
_TOLERANCE, _TOLERANCE_OF_HALVES = 0.02, 0.2  # bfloat16 and float16 round the output
_SMALL_WEIGHT = 2**15
_CHEAP_NUMBERS = 2**15  # gathered from the input: a twentieth of a millisecond
_FEWEST_POSITIONS = 16
_WINDOW_SAMPLES = 32
_FEWEST_SAMPLES = 6


class Operand(NamedTuple):
    """What one operator brings to a step."""

    geometry: Geometry
    weight: Tensor  # as the operator has it
    y: Tensor | None  # [N, C_in, ...]; None for a branch that this step leaves out, or where it cannot be seen
    output_sizes: torch.Size
    bias: Tensor | None = None  # [C], where it is one more weight: an activation follows


class Observation(NamedTuple):
    """Today's step, as it is to be remembered."""

    x: Tensor  # [N, C, ...]
    mean: Tensor
    var: Tensor
    bias: Tensor | None  # [C]: the sum of the operators' biases
    operands: Sequence[Operand]
    weights: Sequence[Tensor]  # of the operators, [C, I], in the statistics' type, without a graph
    phase: int | Tensor  # number of the step, which decides on the positions to look at
    local: Tensor | None  # this process's share of the positions; None for one process
    is_whole: bool  # whether `x` is known to be nothing but what the operators make


class LookBack(NamedTuple):
    """What the remembered steps tell at today's weights."""

    terms: TaylorTerms
    rows: Sequence[Tensor]  # [R, M, groups, I] for each operator: of each step the mean patch, then others
    slope: Tensor | None  # [R, M, C]: d past_var / d <row, W> but for the mean patch's
    var_grads: Sequence[Tensor | None]  # [R, C, I] for each operator: d past_var / dW beside that


class Storage(ABC):
    """How the sensitivity of a segment's moments to the weights of its operators is kept.

    A way of remembering says which tensors it keeps (`shapes`), makes them of an operator's patches (`_keep`), applies
    weights to them (`_products`), and tells how far the weights have moved the moments since (`look_back`).
    """

    _amount: int | None = None  # positions to look at where `_keep` makes something of all of them by itself

    def __init__(self, geometries: Sequence[Geometry], positions: int | None, settings: Settings) -> None:
        self.geometries = tuple(geometries)
        self.positions = positions  # to look at; None for all
        self.order, self.narrow = settings.order, settings.history_dtype
        # The mean patch is taken off for its noise; joined processes have different means, and keep it.
        self.centres = not settings.sync

    @abstractmethod
    def shapes(self, channels: int, batch_positions: int = 0) -> Shapes:
        """Return what is kept of a step, of a batch with so many positions if all are looked at."""

    @abstractmethod
    def look_back(self, kept: Kept, weights: Sequence[Tensor]) -> LookBack:
        """Return what the weights' change since has done to each remembered step."""

    @abstractmethod
    def _keep(self, seen: Observation, i: int, mean_patch: Tensor, patches: Tensor, centred: Tensor) -> Kept:
        """Return what to keep of the `i`-th operator, from patches [P, groups, I] and outputs [P, C] at positions."""

    @abstractmethod
    def _products(self, kept: Kept, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return <what is kept, W> of each step, the sum over the operators that it has, by the name it is kept by."""

    @abstractmethod
    def _of_first(self, row: Kept, samples: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return what the weights make of the mean patch and of the first sample [1, groups, I], [C] each."""

    def remember(self, seen: Observation) -> tuple[dict[str, Tensor], Flag]:
        """Return what to keep of today, and whether the output is what the weights make of the inputs.

        The mean and one position are compared, up to rounding, where nothing else is added to the output.
        """
        x, row, rows = seen.x, dict[str, Tensor](), list[tuple[Tensor, Tensor]]()
        places = sample_places(len(x), x.shape[2:].numel(), self.positions or self._amount, seen.phase, x.device)
        centred = outputs_at(x, places).sub_(seen.mean)
        for i, (geometry, _, y, sizes, _) in enumerate(seen.operands):
            if y is not None:
                mean_patch, patches = mean_grad(y, geometry, sizes), patches_at(y, geometry, places, sizes)
                patches = patches.sub_(mean_patch) if self.centres else patches
                row |= self._keep(seen, i, mean_patch, patches, centred)
                rows.append((mean_patch.unsqueeze(0), patches[:1]))
        row = self._with_products(row, seen.weights)
        return row, not seen.is_whole or self._agrees(seen, row, rows, centred[0])

    def _with_products(self, row: Kept, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return a row as it will be read again, to the order of summation, with what the weights make of it."""
        row = {name: self._rounded(value).contiguous() for name, value in row.items()}
        if row:
            products = self._products({name: value.unsqueeze(0) for name, value in row.items()}, weights)
            row |= {name: value[0] for name, value in products.items()}
        return row

    def jacobians(self, past: LookBack, terms: TaylorTerms, pooled: Pooled) -> tuple[Jacobian, ...]:
        """Return how the pooled statistics follow each operator's weight; `terms` are those of all processes."""
        own, of_means = pooled.dvar_dvar, pooled.dvar_dmean
        if self.order == 1 or not self.centres:  # else the square of the mean's shift is in the curvature as well
            of_means = torch.addcmul(of_means, own, terms.mean_shift, value=-2)
        coefficient = of_means.unsqueeze(1)
        if past.slope is not None:
            coefficient = torch.cat([coefficient, own.unsqueeze(1) * past.slope[:, 1:]], 1)
        rests = [None if each is None else spread(own, each) for each in past.var_grads]
        pairs = zip(past.rows, rests, strict=True)
        return tuple(Jacobian(rows.clone(), pooled.weight, coefficient, rest) for rows, rest in pairs)

    @staticmethod
    def mean_patch_in(row: Kept, i: int) -> Tensor | None:
        """Return the mean patch of the `i`-th operator in a row, if it is there."""
        rows = row.get(f"{i}.rows")
        return row.get(f"{i}.mean_grad") if rows is None else rows[0]

    def _rounded(self, bulk: Tensor) -> Tensor:
        """Return a value as it will be read again."""
        return bulk if self.narrow is None else bulk.to(self.narrow).to(bulk.dtype)

    def _agrees(self, seen: Observation, row: Kept, rows: Sequence[tuple[Tensor, Tensor]], output: Tensor) -> Flag:
        """Compare <mean patch, W> with E[x - b], and what the weights make of a sample with its output [C], less E[x].

        Rounding is relative to the absolute values that products add up, in which they may cancel.
        """
        of_mean, of_sample = self._of_first(row, [sample for _, sample in rows], seen.weights)
        of_sample = of_sample if self.centres else of_sample - of_mean
        off_mean = of_mean - seen.mean if seen.bias is None else of_mean + seen.bias - seen.mean
        off, scale = [off_mean, of_sample - output], [seen.var, torch.addcmul(seen.var, output, output)]

        def magnitude() -> Tensor:
            both = [torch.cat(each).abs().cumsum(0) for each in rows]
            parts = [project(each, weight.abs()) for each, weight in zip(both, seen.weights, strict=True)]
            return total([seen.mean.abs(), *parts])

        return agree(torch.stack(off), torch.stack(scale), magnitude, seen.x)


class PatchStorage(Storage):
    """Keeps patches at a few positions, what the weights made of them, and how far the output was from its mean.

    It is for large weights, and for the second order. Today's weights applied to those patches give the change q of the
    output itself, and with it the variance's: 2 E[(x - mean) q], and E[q^2] for order 2. Of each step `rows` are the
    mean patch, then P patches (0 where a batch had fewer); `products` their <row, W>; `centred` 0, then
    2 (x - mean) / P. Order 2 squares changes, so there the factor 1 / P is split: its root goes to the rows.
    """

    def shapes(self, channels: int, batch_positions: int = 0) -> Shapes:
        """Return what is kept of a step."""
        amount = 1 + (batch_positions if self.positions is None else self.positions)
        shapes: Shapes = {"products": (amount, channels), "centred": (amount, channels)}
        for i, geometry in enumerate(self.geometries):
            shapes[f"{i}.rows"] = amount, geometry.groups, geometry.patch_size
        return shapes

    def look_back(self, kept: Kept, weights: Sequence[Tensor]) -> LookBack:
        """Return what the weights' change since has done to each remembered step."""
        change, slope = self._products(kept, weights)["products"].sub_(kept["products"]), kept["centred"]
        shift, by_samples, curvature = change[:, 0], (slope * change).sum(1), None
        if self.order == 2:
            slope, curvature = torch.add(slope, change, alpha=2), change[:, 1:].square().sum(1)
            if self.centres:
                curvature = torch.addcmul(curvature, shift, shift)
        rows = [kept[f"{i}.rows"] for i in range(len(weights))]
        return LookBack(TaylorTerms(shift, by_samples, curvature), rows, slope, [None] * len(rows))

    def _keep(self, seen: Observation, i: int, mean_patch: Tensor, patches: Tensor, centred: Tensor) -> Kept:
        share = (1 if seen.local is None else seen.local) / len(centred)
        scale = share**0.5 if self.order == 2 else 1
        deviations = torch.cat([torch.zeros_like(centred[:1]), centred * (2 * share / scale)])
        rows = [_of_local(mean_patch, seen).unsqueeze(0), patches if scale == 1 else patches * scale]
        return {f"{i}.rows": torch.cat(rows), "centred": deviations}

    def _products(self, kept: Kept, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        rows = [(kept.get(f"{i}.rows"), weight) for i, weight in enumerate(weights)]
        return {"products": total([project_steps(each, weight) for each, weight in rows if each is not None])}

    def _of_first(self, row: Kept, *_: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        products = row["products"]
        return products[0], products[1] * (len(products) - 1) ** 0.5 if self.order == 2 else products[1]


class GradientStorage(Storage):
    """Keeps the gradient of the mean, one patch, and that of the variance, of the weight's size.

    It is for small weights, and for all positions.
    """

    _amount = 1

    def shapes(self, channels: int, batch_positions: int = 0) -> Shapes:  # noqa: ARG002  # the same for any
        """Return what is kept of a step."""
        shapes: Shapes = {"mean_at": (channels,), "var_at": (channels,)}
        for i, geometry in enumerate(self.geometries):
            size = geometry.patch_size
            shapes |= {f"{i}.mean_grad": (geometry.groups, size), f"{i}.var_grad": (channels, size)}
        return shapes

    def look_back(self, kept: Kept, weights: Sequence[Tensor]) -> LookBack:
        """Return what the weights' change since has done to each remembered step."""
        shift, slope = (value.sub_(kept[name]) for name, value in self._products(kept, weights).items())
        rows = [kept[f"{i}.mean_grad"].unsqueeze(1) for i in range(len(weights))]
        grads = [kept[f"{i}.var_grad"] for i in range(len(weights))]
        return LookBack(TaylorTerms(shift, slope), rows, None, grads)

    def _keep(self, seen: Observation, i: int, mean_patch: Tensor, patches: Tensor, centred: Tensor) -> Kept:
        x, operand = seen.x, seen.operands[i]
        if self.positions is None and operand.y is not None:
            output = x if x.ndim == 2 else x.reshape(*x.shape[:2], *operand.output_sizes)
            known = mean_patch if self.centres else None
            of_var = var_grad(output, seen.mean, operand.y, seen.weights[i], operand.geometry, known)
        else:
            of_var = spread(centred * (2 / len(centred)), patches)
        return {f"{i}.mean_grad": _of_local(mean_patch, seen), f"{i}.var_grad": _of_local(of_var, seen)}

    def _products(self, kept: Kept, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        found = [i for i in range(len(weights)) if f"{i}.mean_grad" in kept]
        means = [project_means(kept[f"{i}.mean_grad"], weights[i]) for i in found]
        return {"mean_at": total(means), "var_at": total([project(kept[f"{i}.var_grad"], weights[i]) for i in found])}

    def _of_first(self, row: Kept, samples: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return row["mean_at"], total(list(map(project, samples, weights)))[0]


class Plan(NamedTuple):
    """How a step is remembered."""

    storage: Literal["gradient", "patches"]
    positions: int | None  # output positions over the batch; None for all of them


def choose_plan(geometry: Geometry, positions: int | None, slots: int, order: int = 1) -> Plan:
    """Choose what to remember of an operator, and how many output positions to look at, `positions` being wanted.

    - None looks at all of them: order 1 keeps the gradient (the paper's exact form), order 2 the patches.
    - A weight of up to 2^15 numbers (most layers of MobileNet-v2, the first ones of any network) keeps the gradient, of
      fewer positions, down to 16, where a patch is large (a depthwise kernel over many channels).
    - For a larger one (nearly all of a ResNet) the patches are kept, 32 over the window of `slots` remembered steps but
      no less than 6 each. The pooled variance averages over the window: neither its noise nor its cost grows with it.

    The reason is cost (docs/derivation.md, section 5). Batch and map do not matter, so that what is remembered has the
    same shape at every step.

    Example:
        >>> choose_plan(Geometry(32, 3, kernel=(3, 3)), 128, slots=3)
        Plan(storage='gradient', positions=128)
        >>> choose_plan(Geometry(512, 512, kernel=(3, 3)), 128, slots=3)
        Plan(storage='patches', positions=10)
    """
    if positions is None:
        return Plan("patches" if order == 2 else "gradient", None)
    affordable = max(_FEWEST_POSITIONS, _CHEAP_NUMBERS // (geometry.in_channels * geometry.taps))
    small = geometry.out_channels * geometry.patch_size <= _SMALL_WEIGHT
    if not small:
        affordable = max(_FEWEST_SAMPLES, _WINDOW_SAMPLES // max(slots, 1))
    return Plan("gradient" if small and order == 1 else "patches", min(positions, affordable))


def make_storage(geometries: Sequence[Geometry], settings: Settings) -> Storage | None:
    """Choose how to remember the operators of a segment; None if nothing is compensated."""
    if settings.order == 0 or not geometries:
        return None
    plans = [choose_plan(each, settings.positions, settings.window - 1, settings.order) for each in geometries]
    kind = PatchStorage if any(plan.storage == "patches" for plan in plans) else GradientStorage
    amounts = [plan.positions for plan in plans if plan.positions is not None]
    return kind(geometries, min(amounts, default=None), settings)


def history_shapes(channels: int, storage: Storage | None, settings: Settings) -> Shapes:
    """Return all that is kept of a step of a segment with so many channels, by name, in the order of the history."""
    shapes: Shapes = {"mean": (channels,), "var": (channels,), "count": ()}
    if settings.weights == "auto":
        shapes["variogram"] = ()
    if settings.consistent:
        shapes |= {"pooled": (2, channels), "number": ()}
    return shapes if storage is None else shapes | storage.shapes(channels)


def stored_as(name: str, dtype: torch.dtype, narrow: torch.dtype | None) -> torch.dtype:
    """Return the type that a tensor of that name is kept in: most of the memory is in a few of them."""
    return narrow if narrow is not None and name.endswith(_BULK) else dtype


def _of_local(value: Tensor, seen: Observation) -> Tensor:
    """Return this process's share of a mean."""
    return value if seen.local is None else value * seen.local


def agree(off: Tensor, scale: Tensor, magnitude: Callable[[], Tensor], x: Tensor) -> Flag:
    """Tell whether `off` [M, C] is no more than rounding of `x`, row by row.

    `scale` [M, C] are squares of what counts as much; rounding is relative to `magnitude` [M, C], made if it matters.
    """
    off, allowed = off.square().sum(1), tolerance_of(x.dtype) ** 2 * scale.sum(1)
    if off.is_cpu and bool((off <= allowed).all()):
        return True
    fits = (off <= allowed + (rounding_of(x.dtype) * magnitude()).square().sum(1)).all()
    return bool(fits) if fits.is_cpu else fits


def tolerance_of(dtype: torch.dtype) -> float:
    """Return by how much of a standard deviation outputs of that type may be off."""
    return _TOLERANCE if dtype in (torch.float32, torch.float64) else _TOLERANCE_OF_HALVES


def rounding_of(dtype: torch.dtype) -> float:
    """Return by how much of what they add up products of that type may be off."""
    return 64 * torch.finfo(dtype).eps


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Add tensors up."""
    return functools.reduce(torch.add, tensors)

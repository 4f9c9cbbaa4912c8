"""What is remembered of how a step's moments change with the weights: gradients, or the patches they are made of.

A storage says which tensors it keeps of a step, makes today's (`remember`), and tells of the remembered ones how far
the weights have moved the moments since (`look_back`) and how the pooled statistics follow today's weights
(`jacobians`). It has no state: what is kept comes in as tensors [R, ...] by name, R remembered steps, and goes out as
those of one step.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn.functional.dependence import Jacobian
from crossbn.functional.geometry import Geometry
from crossbn.functional.moments import Flag
from crossbn.functional.plan import choose_plan
from crossbn.functional.pooling import Pooled
from crossbn.functional.sensitivity import Places, mean_grad, outputs_at, patches_at, sample_places, var_grad
from crossbn.functional.settings import Settings
from crossbn.functional.taylor import TaylorTerms, project, project_means, project_steps, project_var, spread

Kept = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
SAMPLES = ("rows", "products", "centred")
"""Ends of names whose tensors have a row for each sampled position: fewer in a batch that has fewer."""
BY_AGE = ("variogram",)
"""Names whose tensors have a row for each age, from 1 on, and not for each step: they are written as a whole."""
_BULK = ("mean_grad", "var_grad", "rows", "centred")


class Operand(NamedTuple):
    """What one operator brings to a step."""

    geometry: Geometry
    weight: Tensor
    """As the operator has it."""
    y: Tensor | None
    """The input, [N, C_in, ...]; None for a branch that this step leaves out, or where it cannot be seen."""
    output_sizes: torch.Size


class Observation(NamedTuple):
    """Today's step, as it is to be remembered."""

    x: Tensor
    """[N, C, ...]."""
    mean: Tensor
    var: Tensor
    bias: Tensor | None
    """[C]: the sum of the operators' biases."""
    operands: Sequence[Operand]
    weights: Sequence[Tensor]
    """Of the operators, [C, I], in the statistics' type, without a graph."""
    phase: int | Tensor
    """Number of the step, which decides on the positions to look at."""
    local: Tensor | None
    """This process's share of the positions; None for one process."""
    is_whole: bool
    """Whether `x` is known to be nothing but what the operators make."""


class LookBack(NamedTuple):
    """What the remembered steps tell at today's weights."""

    terms: TaylorTerms
    rows: list[Tensor]
    """[R, 1 + P, groups, I] for each operator: of each step the mean patch, then the samples'."""
    change: Tensor | None
    """[R, 1 + P, C]: of the mean, and of the output at the samples."""


class Storage(ABC):
    """How the sensitivity of a segment's moments to the weights of its operators is kept.

    Attributes:
        geometries: of the operators.
        positions: how many to look at; None for all.
    """

    def __init__(self, geometries: Sequence[Geometry], positions: int | None, settings: Settings) -> None:
        self.geometries = tuple(geometries)
        self.positions = positions
        self.order = settings.order
        self.narrow = settings.history_dtype
        # The mean patch is taken off for its noise; joined processes have different means, and keep it.
        self.centres = not settings.sync

    @abstractmethod
    def shapes(self, channels: int, batch_positions: int = 0) -> Shapes:
        """Return what is kept of a step, of a batch with so many positions if all are looked at."""

    @abstractmethod
    def look_back(self, kept: Kept, weights: Sequence[Tensor]) -> LookBack:
        """Return what the weights' change since has done to each remembered step."""

    @abstractmethod
    def jacobians(self, kept: Kept, past: LookBack, terms: TaylorTerms, pooled: Pooled) -> tuple[Jacobian, ...]:
        """Return how the pooled statistics follow each operator's weight; `terms` are those of all processes."""

    @abstractmethod
    def remember(self, seen: Observation) -> tuple[dict[str, Tensor], Flag]:
        """Return what to keep of today, and whether the output is what the weights make of the inputs.

        The mean and a position or more are compared, up to rounding, where nothing else is added to the output.
        """

    @staticmethod
    def mean_patch_in(row: Kept, i: int) -> Tensor | None:
        """Return the mean patch of the `i`-th operator in a row, if it is there."""
        rows = row.get(f"{i}.rows")
        return row.get(f"{i}.mean_grad") if rows is None else rows[0]

    def _rounded(self, bulk: Tensor) -> Tensor:
        """Return a value as it will be read again."""
        return bulk if self.narrow is None else bulk.to(self.narrow).to(bulk.dtype)

    def _samples(self, seen: Observation) -> tuple[Places, Tensor]:
        """Choose today's positions; return them and the outputs there, less their mean [P, C]."""
        x = seen.x
        places = sample_places(len(x), x.shape[2:].numel(), self.positions, seen.phase, x.device)
        return places, outputs_at(x, places).sub_(seen.mean)

    def _patches(self, operand: Operand, places: Places, mean_patch: Tensor) -> Tensor:
        assert operand.y is not None
        patches = patches_at(operand.y, operand.geometry, places, operand.output_sizes)
        return patches.sub_(mean_patch) if self.centres else patches


class PatchStorage(Storage):
    """Keeps patches at a few positions, what the weights made of them, and how far the output was from its mean.

    It is for large weights, and for the second order. Today's weights applied to those patches give the change q of the
    output itself, and with it the variance's: 2 E[(x - mean) q], and E[q^2] for order 2. The mean patch is a row like
    the others, the first: one product does all. Rows of 0, where a batch had fewer positions, add nothing.

    | kept | first row | the others |
    |---|---|---|
    | `rows` | mean patch | patch |
    | `products` | <row, W> | <row, W> |
    | `centred` | 0 | 2 (x - mean) / P |

    Order 2 squares changes, so there the factor 1 / P is split: its root goes to the rows, and one remains.
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
        rows = [kept[f"{i}.rows"] for i in range(len(weights))]
        change = total(list(map(project_steps, rows, weights))).sub_(kept["products"])
        shift, curvature = change[:, 0], None
        if self.order == 2:
            curvature = change[:, 1:].square().sum(1)
            if self.centres:
                curvature = torch.addcmul(curvature, shift, shift)
        return LookBack(TaylorTerms(shift, (kept["centred"] * change).sum(1), curvature), rows, change)

    def jacobians(self, kept: Kept, past: LookBack, terms: TaylorTerms, pooled: Pooled) -> tuple[Jacobian, ...]:
        """Return how the pooled statistics follow each operator's weight."""
        own, coefficient, centred = pooled.dvar_dvar, pooled.dvar_dmean, kept["centred"]
        if self.order == 2:
            assert past.change is not None
            centred = torch.add(centred, past.change, alpha=2)
        if self.order == 1 or not self.centres:  # else the square of the mean's shift is in the curvature as well
            coefficient = torch.addcmul(coefficient, own, terms.mean_shift, value=-2)
        var_coefficient = own.unsqueeze(1) * centred
        var_coefficient[:, 0] = coefficient
        return tuple(Jacobian(rows.clone(), pooled.weight, var_coefficient) for rows in past.rows)

    def remember(self, seen: Observation) -> tuple[dict[str, Tensor], Flag]:
        """Return today's rows, what the weights made of them, and whether that is what was normalized."""
        places, centred = self._samples(seen)
        share = (1 if seen.local is None else seen.local) / len(centred)
        scale = share**0.5 if self.order == 2 else 1
        row = {"centred": torch.cat([torch.zeros_like(centred[:1]), centred * (2 * share / scale)])}
        products: list[Tensor] = []
        for i, (operand, weight) in enumerate(zip(seen.operands, seen.weights, strict=True)):
            if operand.y is None:
                continue
            mean_patch = mean_grad(operand.y, operand.geometry, operand.output_sizes)
            patches = self._patches(operand, places, mean_patch)
            patches = self._rounded(patches if scale == 1 else patches * scale)
            mean_patch = self._rounded(mean_patch if seen.local is None else mean_patch * seen.local)
            row[f"{i}.rows"] = torch.cat([mean_patch.unsqueeze(0), patches])
            products.append(project_steps(row[f"{i}.rows"].unsqueeze(0), weight)[0])
        if products:
            row["products"] = total(products)
        return row, not seen.is_whole or self._agrees(seen, row, centred[0], len(centred))

    def _agrees(self, seen: Observation, row: Kept, output: Tensor, positions: int) -> Flag:
        """Compare <mean patch, W> with E[x - b], and the first sample's product with its output."""
        rows = [row[f"{i}.rows"] for i in range(len(seen.operands))]
        of_mean, of_sample = row["products"][0], row["products"][1] * (positions**0.5 if self.order == 2 else 1)
        expected = seen.mean if seen.bias is None else seen.mean - seen.bias
        mean_agrees = agree(
            of_mean, expected, seen.var, lambda: _magnitude([each[0] for each in rows], seen), seen.x.dtype
        )
        sample_agrees = agree(
            of_sample if self.centres else of_sample - of_mean,
            output,
            seen.var + output.square(),
            lambda: _magnitude([each[0].abs() + each[1].abs() for each in rows], seen),
            seen.x.dtype,
        )
        return mean_agrees & sample_agrees


class GradientStorage(Storage):
    """Keeps the gradient of the mean, one patch, and that of the variance, of the weight's size.

    It is for small weights, and for all positions.
    """

    def shapes(self, channels: int, batch_positions: int = 0) -> Shapes:  # noqa: ARG002  # the same for any
        """Return what is kept of a step."""
        shapes: Shapes = {"mean_at": (channels,), "var_at": (channels,)}
        for i, geometry in enumerate(self.geometries):
            size = geometry.patch_size
            shapes |= {f"{i}.mean_grad": (geometry.groups, size), f"{i}.var_grad": (channels, size)}
        return shapes

    def look_back(self, kept: Kept, weights: Sequence[Tensor]) -> LookBack:
        """Return what the weights' change since has done to each remembered step."""
        rows = [kept[f"{i}.mean_grad"] for i in range(len(weights))]
        shift = total(list(map(project_means, rows, weights))).sub_(kept["mean_at"])
        slope = total([project_var(kept[f"{i}.var_grad"], weight) for i, weight in enumerate(weights)])
        return LookBack(TaylorTerms(shift, slope.sub_(kept["var_at"])), [each.unsqueeze(1) for each in rows], None)

    def jacobians(self, kept: Kept, past: LookBack, terms: TaylorTerms, pooled: Pooled) -> tuple[Jacobian, ...]:
        """Return how the pooled statistics follow each operator's weight."""
        own = pooled.dvar_dvar
        coefficient = torch.addcmul(pooled.dvar_dmean, own, terms.mean_shift, value=-2).unsqueeze(1)
        return tuple(
            Jacobian(rows.clone(), pooled.weight, coefficient, _weighted_sum(own, kept[f"{i}.var_grad"]))
            for i, rows in enumerate(past.rows)
        )

    def remember(self, seen: Observation) -> tuple[dict[str, Tensor], Flag]:
        """Return today's gradients, their products with today's weights, and whether those are what was normalized."""
        samples = None if self.positions is None else self._samples(seen)
        row: dict[str, Tensor] = {}
        means, vars_ = [], []
        for i, (operand, weight) in enumerate(zip(seen.operands, seen.weights, strict=True)):
            if operand.y is None:
                continue
            of_mean = mean_grad(operand.y, operand.geometry, operand.output_sizes)
            if samples is None:
                output = seen.x if seen.x.ndim == 2 else seen.x.reshape(*seen.x.shape[:2], *operand.output_sizes)
                mean_patch = of_mean if self.centres else None
                of_var = var_grad(output, seen.mean, operand.y, weight, operand.geometry, mean_patch)
            else:
                places, centred = samples
                of_var = spread(centred * (2 / len(centred)), self._patches(operand, places, of_mean))
            if seen.local is not None:
                of_mean, of_var = of_mean * seen.local, of_var * seen.local
            # As they will be read again, to the order of summation.
            of_mean, of_var = (self._rounded(each).contiguous() for each in (of_mean, of_var))
            row |= {f"{i}.mean_grad": of_mean, f"{i}.var_grad": of_var}
            means.append(project_means(of_mean.unsqueeze(0), weight)[0])
            vars_.append(project_var(of_var.unsqueeze(0), weight)[0])
        if means:
            row |= {"mean_at": total(means), "var_at": total(vars_)}
        sampled_var = seen.var if samples is None else samples[1].square().mean(0)
        return row, not seen.is_whole or self._agrees(seen, row, sampled_var)

    def _agrees(self, seen: Observation, row: Kept, var: Tensor) -> Flag:
        """Compare <mean_grad, W> with E[x - b], and <var_grad, W> with twice the variance of the same positions."""

        def magnitude() -> Tensor:
            return _magnitude([row[f"{i}.mean_grad"] for i in range(len(seen.operands))], seen)

        expected, dtype = seen.mean if seen.bias is None else seen.mean - seen.bias, seen.x.dtype
        mean_agrees = agree(row["mean_at"], expected, seen.var, magnitude, dtype)
        return mean_agrees & agree(row["var_at"] / 2, var, var.square(), lambda: var.sqrt() * magnitude(), dtype)


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
    return shapes if storage is None else shapes | storage.shapes(channels)


def stored_as(name: str, dtype: torch.dtype, narrow: torch.dtype | None) -> torch.dtype:
    """Return the type that a tensor of that name is kept in: most of the memory is in a few of them."""
    return narrow if narrow is not None and name.endswith(_BULK) else dtype


_TOLERANCE = 0.02
_TOLERANCE_OF_HALVES = 0.2  # bfloat16 and float16 round the output


def agree(got: Tensor, expected: Tensor, scale: Tensor, magnitude: Callable[[], Tensor], dtype: torch.dtype) -> Flag:
    """Tell whether two vectors are the same up to rounding.

    Args:
        got: [C].
        expected: [C].
        scale: [C]: squares of what counts as much.
        magnitude: returns what rounding is relative to, [C]; asked only if it matters.
        dtype: of the output that they were computed from.
    """
    tolerance = _TOLERANCE if dtype in (torch.float32, torch.float64) else _TOLERANCE_OF_HALVES
    difference, allowed = (got - expected).square().sum(), tolerance**2 * scale.sum()
    if difference.is_cpu and difference <= allowed:
        return True
    fits = difference <= allowed + (64 * torch.finfo(dtype).eps * magnitude()).square().sum()
    return bool(fits) if fits.is_cpu else fits


def _magnitude(rows: Sequence[Tensor], seen: Observation) -> Tensor:
    """Return the sum of the absolute values that products of a row [groups, I] with the weights add up, [C].

    Rounding is relative to that, not to the result, in which they may cancel.
    """
    parts = [project(row.abs().unsqueeze(0), each.abs())[0] for row, each in zip(rows, seen.weights, strict=True)]
    return total([seen.mean.abs(), *parts])


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Add tensors up."""
    return functools.reduce(torch.add, tensors)


def _weighted_sum(weights: Tensor, tensors: Tensor) -> Tensor:
    """Return the sum over r of weights_rc tensors_rci, in memory for one of them."""
    shares, parts = weights.unsqueeze(2).unbind(), tensors.unbind()
    result = parts[0] * shares[0]
    for part, share in zip(parts[1:], shares[1:], strict=True):
        result.addcmul_(part, share)
    return result

"""Remembering samples: for large weights, and for the second order."""

from __future__ import annotations

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.nn.forms import Form, Influence, Observation, Recollection, Rings, Shapes, add_to, agree, total
from crossbn.nn.history import History, Pieces, Row
from crossbn.nn.statistics import Drift


class Samples(Form):
    """Keeps patches at a few positions, what the weights made of them, and how far the output was from its mean.

    Today's weights applied to those patches give the change q of the output itself, and with it the variance's:
    2 E[(x - mean) q], and E[q^2] for order 2. The mean patch is a row like the others, the first: one product does all.
    Rows of 0, where a batch had fewer positions, add nothing.

    | kept | first row | the others |
    |---|---|---|
    | `rows` | mean patch | patch |
    | `products` | <row, W> | <row, W> |
    | `centred` | 0 | 2 (x - mean) / P |

    Order 2 squares changes, so there the factor 1 / P is split: its root goes to the rows, and one remains.
    """

    def shapes(self, channels: int) -> Shapes:
        """Return what is kept of a step."""
        amount = 1 + (self.positions or 0)
        shapes: Shapes = {"products": (amount, channels), "centred": (amount, channels)}
        for i, term in enumerate(self.terms):
            shapes[f"{i}.rows"] = amount, term.geometry.groups, term.geometry.patch_size
        return shapes

    def recollect(self, rings: Rings, weights: list[Tensor]) -> Recollection:
        """Return what the weights' change since has done to each remembered step."""
        rows, at = [rings[f"{i}.rows"] for i in range(len(weights))], rings["products"]
        change = total(list(map(C.project_steps, rows, weights))).sub_(at)
        shift, curvature = change[:, 0], None
        if self.order == 2:
            curvature = change[:, 1:].square().sum(1)
            if self.centres:
                curvature = torch.addcmul(curvature, shift, shift)
        return Recollection(Drift(shift, (rings["centred"] * change).sum(1), curvature), rows, change)

    def jacobians(self, rings: Rings, recollection: Recollection, influence: Influence) -> tuple[C.Jacobian, ...]:
        """Return how the pooled statistics follow each term's weight."""
        (weight, own, coefficient), centred = influence, rings["centred"]
        if self.order == 2:
            assert recollection.change is not None
            centred = torch.add(centred, recollection.change, alpha=2)
        if self.order == 1 or not self.centres:  # else the square of the mean's shift is in the curvature as well
            coefficient = torch.addcmul(coefficient, own, recollection.drift.mean_shift, value=-2)
        var_coefficient = own.unsqueeze(1) * centred
        var_coefficient[:, 0] = coefficient
        return tuple(C.Jacobian(rows.clone(), weight, var_coefficient, None) for rows in recollection.rows)

    def remember(self, seen: Observation, history: History) -> Row:
        """Return today's rows, and what the weights made of them."""
        places, centred = self._samples(seen, history)
        share = (1 if seen.today.local is None else seen.today.local) / len(centred)
        scale = share**0.5 if self.order == 2 else 1
        row: Row = {"centred": Pieces(None, centred * (2 * share / scale))}
        at: Rings = {}
        for i, (call, weight) in enumerate(zip(seen.calls, seen.weights, strict=True)):
            if call is None or call.y is None:
                continue
            mean_grad = C.mean_grad(call.y, call.geometry, call.output_sizes)
            patches = self._patches(call, places, mean_grad)
            patches = history.rounded(patches if scale == 1 else patches * scale)
            mean_grad = history.rounded(mean_grad if seen.today.local is None else mean_grad * seen.today.local)
            rows = torch.cat([mean_grad.unsqueeze(0), patches])
            row[f"{i}.rows"] = Pieces(rows[0], rows[1:])
            add_to(at, "products", C.project_steps(rows.unsqueeze(0), weight)[0])
        if at:
            row["products"] = Pieces(at["products"][0], at["products"][1:])
        return row

    def is_theirs(self, seen: Observation, row: Row, history: History) -> bool | Tensor:
        """Compare <mean patch, W> with E[x - b], and the first sample's product with its output."""
        mean, var, products = seen.today.mean, seen.today.var, row["products"]
        assert isinstance(products, Pieces)
        assert products.first is not None
        rows = [row.get(f"{i}.rows") for i in range(len(seen.weights))]
        pieces = [each for each in rows if isinstance(each, Pieces)]
        expected = mean if seen.bias is None else mean - seen.bias
        of_mean = agree(
            *(products.first, expected, var),
            lambda: self._magnitude([each.first for each in pieces], seen),
            seen.x.dtype,
        )
        output = self._samples(seen, history)[1]
        got = products.samples[0] * (len(output) ** 0.5 if self.order == 2 else 1)
        if not self.centres:
            got = got - products.first
        of_sample = agree(
            *(got, output[0], var + output[0].square()),
            lambda: self._magnitude([total([each.samples[0].abs(), *_if_any(each.first)]) for each in pieces], seen),
            seen.x.dtype,
        )
        return of_mean & of_sample


def _if_any(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor.abs()]

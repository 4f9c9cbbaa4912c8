"""A run of channels that an operator makes and an activation passes on: `norm(act(conv(y)))`."""

from __future__ import annotations

from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.functional import Activation, Geometry, Settings
from crossbn.nn.producer import Operator
from crossbn.nn.segment import Calls, Segment
from crossbn.pairing.calls import Call


class ActivatedOperator(Operator):
    """An operator before an activation: its bias is one more weight.

    Attributes:
        has_bias: whether there is one.
    """

    def __init__(self, geometry: Geometry, parameter: Tensor | None, has_bias: bool) -> None:
        super().__init__(geometry, parameter)
        self.has_bias = has_bias

    @property
    def rows_geometry(self) -> Geometry:
        """Of the rows that gradients are of."""
        return C.geometry_of_rows(self.geometry, self.has_bias)

    def fits(self, call: Call) -> bool:
        """Tell whether `call` is a later one of this operator."""
        return super().fits(call) and self.has_bias == (call.bias is not None)

    def rows(self, call: Call | None = None) -> Tensor | None:
        """Return today's weight and bias as one row for each channel; None if they are not known."""
        weight = self.weight(call)
        return None if weight is None else C.flatten_weight(weight, self.geometry, self.bias(call))

    def hook(self, call: Call | None) -> None:
        """Return None: gradients are not of the weight alone."""

    def trained(self, call: Call | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the weight that weight and bias are together, if it has a gradient."""
        rows = self.rows(call)
        return rows if rows is not None and rows.requires_grad else None, None


class ActivatedSegment(Segment):
    """Channels that one operator makes and an activation passes on."""

    operators: tuple[ActivatedOperator]
    activation: Activation

    def __init__(
        self,
        geometry: Geometry,
        parameter: Tensor | None,
        has_bias: bool,
        activation: Activation,
        settings: Settings,
        like: Tensor,
    ) -> None:
        self.activation = activation
        super().__init__(geometry.out_channels, [ActivatedOperator(geometry, parameter, has_bias)], settings, like)

    def _make_storage(self) -> C.Storage | None:
        (operator,), settings = self.operators, self.settings
        if settings.order == 0:
            return None
        return C.ActivatedStorage(operator.geometry, operator.has_bias, self.activation, settings)

    def operands(self, x: Tensor, calls: Calls) -> tuple[list[C.Operand], Tensor | None]:
        """Return what the operator brings to a step, its bias included."""
        operands, bias = super().operands(x, calls)
        return [each._replace(bias=bias) for each in operands], None

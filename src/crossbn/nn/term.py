"""A linear operator that is summed into a run of channels, for as long as its steps are remembered."""

from __future__ import annotations

from torch import Tensor, nn

from crossbn.functional import Geometry
from crossbn.nn.call import Call
from crossbn.nn.producer import Producer


class Term:
    """An operator as a source knows it.

    Attributes:
        geometry: of the module, or of the first call that was seen; of later calls only the padding may differ.
        leaf: the Parameter that its weight is; None if the weight is computed.
        producer: the module, if pairing has named it.
        bias_leaf: the Parameter that its bias was at the latest call.
    """

    def __init__(self, geometry: Geometry, leaf: Tensor | None, producer: Producer | None = None) -> None:
        self.geometry = geometry
        self.leaf = leaf
        self.producer = producer
        self.bias_leaf: Tensor | None = None
        self._known: tuple[object, ...] = ()

    @classmethod
    def of_producer(cls, producer: Producer) -> Term:
        """Return the operator of a module."""
        return cls(producer.geometry, producer.parameter, producer)

    def fits(self, call: Call) -> bool:
        """Tell whether `call` is a later one of this operator: its weight is the same, or computed and alike."""
        if call.leaf is not None and self.leaf is not None and call.leaf is not self.leaf:
            # Tensors that are no parameters may be other ones at each step (torch.func.functional_call).
            return not isinstance(call.leaf, nn.Parameter) and self._is_alike(call)
        return self._is_alike(call)

    def _is_alike(self, call: Call) -> bool:
        if not call.is_seen:
            # A computed weight that the graph does not show may be that of a module whose weight is computed.
            return call.leaf is self.leaf and (call.leaf is not None or self.producer is not None)
        return self.is_shaped_like(call.geometry) and self.geometry.stride == call.geometry.stride

    def is_shaped_like(self, other: Geometry) -> bool:
        """Tell whether remembered steps have room for those of `other`."""
        sizes = [(each.out_channels, each.groups, each.patch_size, each.transposed) for each in (self.geometry, other)]
        return sizes[0] == sizes[1]

    def is_known(self, call: Call) -> bool:
        """Tell whether `call` is, to the object, as the latest one that was noted."""
        if not call.is_seen or call.leaf is None or self._known != (id(call.leaf), id(call.geometry), id(call.bias)):
            return False
        return self.leaf is call.leaf and (self.producer is None or self.producer.parameter is call.leaf)

    def note(self, call: Call) -> None:
        """Keep what a call tells of the operator for forwards that have no graph."""
        if call.is_seen and isinstance(call.leaf, nn.Parameter):
            self._known = id(call.leaf), id(call.geometry), id(call.bias)
        if self.producer is None:
            self.leaf = call.leaf if self.leaf is None else self.leaf
            self.bias_leaf = call.bias

    def weight(self) -> Tensor | None:
        """Return today's weight where no call tells it; None if it is not known."""
        return self.leaf if self.producer is None else self.producer.weight

    def bias(self) -> Tensor | None:
        """Return today's bias where no call tells it."""
        return self.bias_leaf if self.producer is None else self.producer.bias

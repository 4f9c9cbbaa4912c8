"""What norms of the running forward have carried to the input of an operator: read from the graph.

A norm leaves what it carries at its node. From the input of an operator the way back goes through activations, sums,
concatenations and whatever leaves a channel a channel, up to norms. Each node that was passed has the answer from then
on: in a residual network the next sum needs it again.
"""

from __future__ import annotations

from typing import Any

from crossbn.functional import Activation, Carried, side_by_side
from crossbn.pairing.calls import Call

_KEY = "crossbn carried"
_SAME = {
    "AdaptiveAvgPool1DBackward0",
    "AdaptiveAvgPool2DBackward0",
    "AdaptiveAvgPool3DBackward0",
    "AliasBackward0",
    "AvgPool2DBackward0",
    "AvgPool3DBackward0",
    "BackwardHookFunctionBackward",
    "CloneBackward0",
    "ConstantPadNdBackward0",
    "MaxPool2DWithIndicesBackward0",
    "MaxPool3DWithIndicesBackward0",
    "NativeDropoutBackward0",
    "ToCopyBackward0",
    "UpsampleNearest2DBackward0",
}
"""Nodes that a map `scale y + offset` of each channel goes through, exactly or nearly."""


def leave(node: Any, carried: Carried | None) -> None:
    """Let `node`, what a norm has made, say what it carries."""
    node.metadata[_KEY] = carried


def carried_to_call(call: Call | None) -> Carried | None:
    """Return what is carried to the input of an operator's call."""
    if call is None or call.node is None:
        return None
    return carried_to(call.node, 1 if type(call.node).__name__ == "AddmmBackward0" else 0)


def carried_to(node: Any, operand: int = 0) -> Carried | None:
    """Return what is carried to an operand of what `node` has made; None where that is not known."""
    before, slot = node.next_functions[operand]
    if before is None or (slot and type(before).__name__ != "BackwardHookFunctionBackward"):
        return None
    if _KEY not in before.metadata:
        before.metadata[_KEY] = _carried_by(before, slot)
    found: Carried | None = before.metadata[_KEY]
    return found


def _carried_by(node: Any, slot: int) -> Carried | None:
    name = type(node).__name__
    if (activation := Activation.of_node(node)) is not None:
        found = carried_to(node)
        return None if found is None else found.activated(activation)
    if name in _SAME:
        return carried_to(node, slot)
    if name == "AddBackward0" and node._saved_alpha == 1 and len(node.next_functions) == 2:
        return _together(node, Carried.plus)
    if name == "CatBackward0" and node._saved_dim in (1,):
        return _together(node, lambda a, b: side_by_side([a, b]))
    return None


def _together(node: Any, join: Any) -> Carried | None:
    """Return what several terms carry together, if all of them do, and of as many steps."""
    found: Carried | None = None
    for operand in range(len(node.next_functions)):
        term = carried_to(node, operand)
        if term is None or (found is not None and len(term.mean) != len(found.mean)):
            return None
        found = term if found is None else join(found, term)
    return found

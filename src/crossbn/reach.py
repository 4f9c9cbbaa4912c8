"""How far back each norm of a model can be compensated, for `layers=2`."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from crossbn.conversion_report import COMPENSATED, LEFT, NormRecord
from crossbn.nn import CrossIterBatchNorm, Settings
from crossbn.nn.deeper import check_reach
from crossbn.pairing import Pairing


class Reach(NamedTuple):
    """The operator before the previous norm, and a phrase for the report that says why it is that, or none."""

    operator: str | None
    reason: str


def find_reach(
    model: nn.Module, pairings: Mapping[str, Pairing], plan: Mapping[str, NormRecord], settings: Settings
) -> dict[str, Reach]:
    """Find, for each norm to be compensated, the operator before the previous norm. Changes nothing.

    The previous norm is the only one whose output reaches the norm's producer, with activations, dropout, pooling and
    the like in between. A producer that reads a residual sum or a concatenation has no such norm; then, and for the
    first norm, there is one layer.

    Raises:
        ValueError: naming a norm that layers=2 cannot be had for: one that is fed by several operators, by one that
            feeds another norm as well, or is synchronized, or where the earlier weight is parametrized.
    """
    reach = {}
    feeding: dict[str, str] = {}
    for name, record in plan.items():
        if record.status != LEFT and _is_synchronized(model.get_submodule(name)):
            raise ValueError(f"{name}: layers=2 does not work with a SyncBatchNorm")
        if record.status != COMPENSATED:
            continue
        _refuse_several(pairings[name])
        (producer,) = pairings[name].producers
        if (other := feeding.setdefault(producer, name)) != name:
            raise ValueError(
                f"{name}: layers=2 is for norms with an operator of their own, {producer} feeds {other} too"
            )
        reach[name] = _reach(pairings[name], pairings)
        if (operator := reach[name].operator) is not None:
            check_reach(name, settings, model.get_submodule(operator), 1)
    return reach


def _is_synchronized(norm: nn.Module) -> bool:
    return (norm.plain_type() if isinstance(norm, CrossIterBatchNorm) else type(norm)) is nn.SyncBatchNorm


def _refuse_several(pairing: Pairing) -> None:
    if len(pairing.segments) > 1:
        raise ValueError(
            f"{pairing.name}: layers=2 is for a norm that reads one operator, this one reads a concatenation"
        )
    segment = pairing.segments[0]
    if not segment.direct and (len(segment.producers) > 1 or segment.reason != "given in pairs"):
        raise ValueError(
            f"{pairing.name}: layers=2 is for a norm that reads one operator, this one reads {segment.reason}"
        )


def _reach(pairing: Pairing, pairings: Mapping[str, Pairing]) -> Reach:
    producer = pairing.producers[0]
    if not pairing.origins:
        return Reach(None, f"one layer: what {producer} reads is not known")
    origins = sorted(pairing.origins)
    if len(origins) > 1:
        more = f" and {len(origins) - 3} more" if len(origins) > 3 else ""
        return Reach(None, f"one layer: {producer} reads a mix of {', '.join(origins[:3])}{more}")
    previous = pairings.get(origins[0])
    if previous is None:
        return Reach(None, f"one layer: {producer} reads {origins[0]}, no norm before it")
    segments = previous.segments
    if len(segments) > 1 or not segments[0].direct:
        return Reach(None, f"one layer: the norm before, {previous.name}, does not read one operator")
    return Reach(segments[0].producers[0], f"two layers: {segments[0].producers[0]} before {previous.name}, too")

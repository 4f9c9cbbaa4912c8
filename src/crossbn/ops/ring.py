"""Writing a step into a ring of remembered ones, in place: tensors [slots, ...] by name and a counter."""

from collections.abc import Mapping

import torch
from torch import Tensor

from crossbn.functional import Flag
from crossbn.torch_internals import copy_each_


def write_(rings: Mapping[str, Tensor], num_steps: Tensor, row: Mapping[str, Tensor], accept: Flag) -> None:
    """Overwrite the oldest step with `row`, if `accept`; what it lacks is 0. A tensor is not looked at."""
    slots = rings["mean"].shape[0]
    if isinstance(accept, Tensor):
        slot = (num_steps % slots).reshape(1)
        for name, ring in rings.items():
            old = ring.index_select(0, slot)
            new = torch.zeros_like(old)
            write_slot_({name: new[0]}, row)
            ring.index_copy_(0, slot, torch.where(accept, new, old))
    elif accept:
        slot_number = int(num_steps) % slots
        write_slot_({name: ring[slot_number] for name, ring in rings.items()}, row)
    num_steps.add_(accept)


def write_slot_(places: Mapping[str, Tensor], row: Mapping[str, Tensor]) -> None:
    """Write a row to its places; what it lacks is 0, as are samples that the batch was too small for."""
    targets, values = [], []
    for name, place in places.items():
        value = row.get(name)
        if value is None:
            place.zero_()
            continue
        if place.ndim and len(value) < len(place):
            place[len(value) :].zero_()
            place = place[: len(value)]  # noqa: PLW2901
        targets.append(place)
        values.append(value)
    copy_each_(targets, values)

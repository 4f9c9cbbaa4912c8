"""Writing a step into a ring of remembered ones, in place: tensors [slots, ...] by name and a counter."""

from collections.abc import Mapping

import torch
from torch import Tensor

from crossbn.functional import BY_AGE, SAMPLES, Flag
from crossbn.ops.types import Past


def write_(past: Past, row: Mapping[str, Tensor], accept: Flag = True) -> None:
    """Overwrite the oldest step with `row`, if `accept`; what it lacks is 0. A tensor is not looked at."""
    with past.lock:
        for name, value in row.items():
            if name.endswith(SAMPLES):
                widen_(past, name, value.shape[0])
        if isinstance(accept, Tensor):
            slot = (past.num_steps % past.slots).reshape(1)
            for name, ring in past.rings.items():
                if name in BY_AGE:
                    whole = torch.zeros_like(ring)
                    _write_slot_(whole, row.get(name))
                    ring.copy_(torch.where(accept, whole, ring))
                    continue
                old = ring.index_select(0, slot)
                new = torch.zeros_like(old)
                _write_slot_(new[0], row.get(name))
                ring.index_copy_(0, slot, torch.where(accept, new, old))
        elif accept:
            slot_number = int(past.num_steps) % past.slots
            for name, ring in past.rings.items():
                _write_slot_(ring if name in BY_AGE else ring[slot_number], row.get(name))
        past.num_steps.add_(accept)


def _write_slot_(place: Tensor, value: Tensor | None) -> None:
    """Write a value to its place; samples that the batch was too small for, or ages not yet reached, are 0."""
    if value is None:
        place.zero_()
    elif value.shape == place.shape:
        place.copy_(value)
    else:
        place[: len(value)].copy_(value)
        place[len(value) :].zero_()


def widen_(past: Past, name: str, size: int) -> None:
    """Let each step of `name` hold at least `size` samples; the new ones are 0."""
    ring = past.rings[name]
    if (missing := size - ring.shape[1]) > 0:
        past.rings[name] = torch.cat([ring, ring.new_zeros(len(ring), missing, *ring.shape[2:])], 1)
        past.scratch.clear()

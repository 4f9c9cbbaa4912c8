"""A ring of remembered steps."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from crossbn.functional import BY_AGE, SAMPLES, accumulation_dtype, stored_as
from crossbn.ops import Past

_MOST_STEPS = 2**53
"""More than any training has, and a number that every type of numbers can count to."""


class History:
    """The last few values of several named quantities, each one tensor [slots, *shape].

    Working state of one process: not parameters, not buffers. One counter, `num_steps`, says how many steps have been
    remembered since the history was last cleared; which slots are filled and which comes next follow from it. With
    weights="auto" there is a tensor by age as well, `variogram`: how much steps have differed so far.
    Everything is a tensor, and values are looked at on the CPU only, where that is free and saves work: a GPU is never
    waited for. Threads that share a model take turns by `lock`.
    """

    def __init__(
        self, slots: int, shapes: Mapping[str, tuple[int, ...]], like: Tensor, narrow: torch.dtype | None = None
    ) -> None:
        self.narrow = narrow  # type of the bulk, where it is not that of the statistics
        dtype, device = accumulation_dtype(like.dtype), like.device
        self.rings = {
            name: torch.zeros(slots, *shape, dtype=stored_as(name, dtype, narrow), device=device)
            for name, shape in shapes.items()
        }
        self.num_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._make_working_state()

    def _make_working_state(self) -> None:
        self.lock = threading.RLock()
        self.scratch: list[Any] = []  # of implementations of the step, which have the rings' addresses

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("lock", "scratch")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_working_state()

    def __getitem__(self, name: str) -> Tensor:
        return self.rings[name]

    @property
    def slots(self) -> int:
        """How many steps fit."""
        return self["mean"].shape[0]

    def past(self) -> Past:
        """Return what is remembered, for a step to read."""
        return Past(self.rings, self.num_steps, self.num_steps.is_cpu, self.lock, self.scratch)

    def clear_(self) -> None:
        """Forget everything."""
        with self.lock:
            for _, tensor in self.state():
                tensor.zero_()

    def resize_(self, slots: int) -> None:
        """Change the number of slots; the latest steps that fit are kept."""
        room, place = min(self.slots, slots), torch.arange(slots, device=self.num_steps.device)[: self.slots]
        kept = self.num_steps.clamp(max=room)
        order = (self.num_steps - kept + place) % max(self.slots, 1)
        for name, ring in self.rings.items():
            latest = ring.index_select(0, place if name in BY_AGE else order)
            is_there = (place < kept).reshape(-1, *[1] * (ring.ndim - 1))
            self.rings[name] = ring.new_zeros(slots, *ring.shape[1:])
            self.rings[name][:room] = torch.where(is_there, latest, 0)
        self.num_steps.copy_(kept)
        self.scratch = []

    def fit_(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Let there be room for as many samples as `shapes` says."""
        for name in shapes:
            if name.endswith(SAMPLES):
                self.past().widen_(name, shapes[name][0])

    def apply_(self, function: Callable[[Tensor], Tensor]) -> None:
        """Go where `nn.Module.to` and its relatives send buffers, short of halving the precision.

        Only device and type of the result count. `to_empty` forgets the values of others, not these.
        """
        like = function(self["mean"].new_empty(1))
        if like.is_floating_point():
            self._to_(like.device, accumulation_dtype(like.dtype))

    def _to_(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move everything to a device, the statistics in that type. What was without values, on meta, is cleared."""

        def moved(tensor: Tensor, kind: torch.dtype) -> Tensor:
            if tensor.is_meta and device.type != "meta":
                return torch.zeros(tensor.shape, dtype=kind, device=device)
            return tensor.to(device, kind)

        self.scratch = []
        for name, ring in self.rings.items():
            self.rings[name] = moved(ring, stored_as(name, dtype, self.narrow))
        self.num_steps = moved(self.num_steps, torch.int64)

    def move_(self, x: Tensor) -> None:
        """Go where `x` is, in the type that its statistics have, if not there."""
        mean, dtype = self.rings["mean"], accumulation_dtype(x.dtype)
        if mean.device != x.device or mean.dtype != dtype:
            self._to_(x.device, dtype)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with the name that it is saved under."""
        yield "pushed", self.num_steps
        yield from self.rings.items()

    def load_(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` yielded."""
        for name, saved in state.items():
            if name.endswith(SAMPLES):
                self.past().widen_(name, saved.shape[1])
                self[name].zero_()[:, : saved.shape[1]].copy_(saved)
        for name, value in self.state():
            if not name.endswith(SAMPLES):
                value.copy_(state[name])

    def misfit(self, state: Mapping[str, Tensor]) -> str | None:
        """Say what keeps `state`, which a file may hold, from being loaded, if anything."""
        own = dict(self.state())
        if (different := own.keys() ^ state.keys()) == set(BY_AGE):
            kinds = ("equal", "auto") if different <= own.keys() else ("auto", "equal")
            said = 'the saved history is of weights="{0}", this one of weights="{1}": convert with weights="{0}"'
            said += ", or the decay that it was trained with" if kinds[0] == "equal" else ""
            return said.format(*kinds)
        if different:
            return f"the saved history and this one do not share {', '.join(sorted(different))}"
        for name, value in own.items():
            saved = state[name].shape
            if name == "mean" and saved[:1] != value.shape[:1]:
                return f"the saved history is of window {saved[0] + 1}, this one of window {self.slots + 1}"
            # Samples are as many as the largest batch so far needed.
            sampled = name.endswith(SAMPLES)
            if saved[:1] + saved[2:] != value.shape[:1] + value.shape[2:] if sampled else saved != value.shape:
                return f"{name} has the shape {tuple(value.shape)} here and {tuple(saved)} in the saved history"
        return wrong_count("pushed", state["pushed"]) or _nonsense_in(state)


def wrong_count(name: str, value: Tensor) -> str | None:
    """Say what is wrong with `value` as a number of steps, if anything."""
    if value.dtype is torch.int64 and not value.ndim and 0 <= int(value) <= _MOST_STEPS:
        return None
    return f"{name} must be an int64 from 0 on, got {value}"


def _nonsense_in(state: Mapping[str, Tensor]) -> str | None:
    """Say what no history can hold, if `state` does."""
    widths = {name: tensor.shape[1] for name, tensor in state.items() if name.endswith(SAMPLES)}
    if len(set(widths.values())) > 1:
        return f"the samples of a step differ in number: {widths}"
    for name, tensor in state.items():
        if name != "pushed" and not tensor.is_floating_point():
            return f"{name} must be of a floating type, got {tensor.dtype}"
        if not tensor.isfinite().all():
            return f"{name} is not finite"
        if name in ("var", "count", *BY_AGE) and (tensor < 0).any():
            return f"{name} is below 0"
    return None

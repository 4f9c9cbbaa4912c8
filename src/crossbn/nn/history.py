"""A ring of remembered steps."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossbn.functional import accumulation_dtype
from crossbn.torch_internals import copy_each_

_SAMPLES = ("rows", "products", "centred")
_BULK = ("mean_grad", "var_grad", "rows", "centred")


class Pieces(NamedTuple):
    """A value in two pieces: what there is one of in a step, and samples, as many as the batch had to give."""

    first: Tensor | None
    """Without the samples' dimension; None if it is 0 at every step."""
    samples: Tensor


Row = dict[str, Tensor | Pieces]
"""What is remembered of a step, by name."""


class History:
    """The last few values of several named quantities, each one tensor [slots, *shape].

    Working state of one process: not parameters, not buffers. One counter, `pushed`, says how many steps have been
    remembered since the history was last cleared; which slots are filled and which comes next follow from it.
    Everything is a tensor, and values are looked at on the CPU only, where that is free and saves work: a compiled step
    needs no guard on them and a GPU is never waited for. Threads that share a model take turns by `lock`.
    """

    def __init__(
        self, slots: int, shapes: Mapping[str, tuple[int, ...]], like: Tensor, narrow: torch.dtype | None = None
    ) -> None:
        self.narrow = narrow  # type of the bulk, where it is not that of the statistics
        dtype, device = accumulation_dtype(like.dtype), like.device
        self.rings = {
            name: torch.zeros(slots, *shape, dtype=self._stored_as(name, dtype), device=device)
            for name, shape in shapes.items()
        }
        self.pushed = torch.zeros((), dtype=torch.int64, device=like.device)
        self._make_working_state()

    def _make_working_state(self) -> None:
        self.lock = threading.RLock()
        self._slots: dict[int, list[Tensor]] = {}  # where to write, slot by slot: made once

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_slots", "lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_working_state()

    def __getitem__(self, name: str) -> Tensor:
        return self.rings[name]

    def _stored_as(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return self.narrow if self.narrow is not None and name.endswith(_BULK) else dtype

    def rounded(self, bulk: Tensor) -> Tensor:
        """Return a value of the bulk as it will be read again."""
        return bulk if self.narrow is None else bulk.to(self.narrow).to(bulk.dtype)

    @property
    def slots(self) -> int:
        """How many steps fit."""
        return self["mean"].shape[0]

    @property
    def is_readable(self) -> bool:
        """Whether Python may look at values: they are on the CPU, and the step is not being compiled."""
        return self.pushed.device.type == "cpu" and not torch.compiler.is_compiling()

    @property
    def step(self) -> int | Tensor:
        """How many steps have been remembered, as a number where it may be looked at."""
        return int(self.pushed) if self.is_readable else self.pushed

    def recall(self) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return what is remembered, [R, ...] by name, and which of the R steps are there; None for all of them."""
        dtype, rings, present = self["mean"].dtype, self.rings, None
        if not self.is_readable:
            present = (torch.arange(self.slots, device=self.pushed.device) < self.pushed).to(dtype)
        elif (filled := int(self.pushed)) < self.slots:
            rings = {name: ring[:filled] for name, ring in rings.items()}
        if self.narrow is not None:
            rings = {name: ring.to(dtype) for name, ring in rings.items()}
        return rings, present

    def aged_votes(self, decay: float, recalled: Tensor, present: Tensor | None) -> Tensor:
        """Return `decay` to the power of each step's age, [R], 0 for those that are not `present`."""
        ages = (self.pushed - 1 - torch.arange(len(recalled), device=self.pushed.device)) % len(recalled) + 1
        each = torch.pow(decay, ages.to(recalled.dtype))
        return each if present is None else each * present

    def completed(self, row: Row) -> Row:
        """Return `row` with 0 for what it lacks."""
        lacking = {name: torch.zeros_like(ring[0]) for name, ring in self.rings.items() if name not in row}
        return row | {n: Pieces(zero[0], zero[1:]) if _is_samples(n) else zero for n, zero in lacking.items()}

    def push(self, row: Mapping[str, Tensor | Pieces], accept: bool | Tensor) -> None:
        """Overwrite the oldest slot with `row`, a value for each name, if `accept`; a tensor is not looked at."""
        for name, value in row.items():
            if isinstance(value, Pieces):
                self.widen_(name, 1 + len(value.samples))
        if isinstance(accept, Tensor):
            self._write_where(row, accept)
        elif accept:
            self._write(row)

    def _write(self, row: Mapping[str, Tensor | Pieces]) -> None:
        slot = int(self.pushed) % self.slots
        known = self._slots.get(slot)
        if known is None or known[0]._base is not self["mean"]:  # a compiled step has other rings
            self._slots[slot] = [part for name, ring in self.rings.items() for part in _parts(name, ring[slot])]
        values = [part for name, ring in self.rings.items() for part in _fill(row[name], ring)]
        copy_each_(self._slots[slot], values)
        self.pushed = self.pushed + 1

    def _write_where(self, row: Mapping[str, Tensor | Pieces], accept: Tensor) -> None:
        slot = (self.pushed % self.slots).reshape(1)
        for name, ring in self.rings.items():
            old, parts = ring.index_select(0, slot), _fill(row[name], ring)
            new = torch.where(accept, (parts[0] if len(parts) == 1 else torch.cat(parts)).to(ring.dtype), old)
            # A compiled step must not write where its backward, which may compute things again, still reads.
            if torch.compiler.is_compiling():
                self.rings[name] = ring.index_copy(0, slot, new)
            else:
                ring.index_copy_(0, slot, new)
        self.pushed = self.pushed + accept

    def clear_(self) -> None:
        """Forget everything."""
        for _, tensor in self.state():
            tensor.zero_()

    def resize_(self, slots: int) -> None:
        """Change the number of slots; the latest steps that fit are kept."""
        filled = min(int(self.pushed), self.slots)
        kept = min(filled, slots)
        order = (int(self.pushed) + torch.arange(-kept, 0, device=self.pushed.device)) % max(self.slots, 1)
        self._slots.clear()
        for name, ring in self.rings.items():
            self.rings[name] = ring.new_zeros(slots, *ring.shape[1:])
            self.rings[name][:kept] = ring[order]
        self.pushed.fill_(kept)

    def widen_(self, name: str, size: int) -> None:
        """Let each step of `name` hold at least `size` samples; the new ones are 0."""
        ring = self[name]
        if (missing := size - ring.shape[1]) > 0:
            self._slots.clear()
            self.rings[name] = torch.cat([ring, ring.new_zeros(len(ring), missing, *ring.shape[2:])], 1)

    def fit_(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Let there be room for as many samples as `shapes` says."""
        for name in filter(_is_samples, shapes):
            self.widen_(name, shapes[name][0])

    def apply_(self, function: Callable[[Tensor], Tensor]) -> None:
        """Go where `nn.Module.to` and its relatives send buffers, short of halving the precision.

        Only device and type of the result count. `to_empty` forgets the values of others, not these.
        """
        like = function(self["mean"].new_empty(1))
        if like.is_floating_point():
            self.to_(like.device, accumulation_dtype(like.dtype))

    def to_(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move everything to a device, the statistics in that type. What was without values, on meta, is cleared."""
        self._slots.clear()
        for name, ring in self.rings.items():
            kind = self._stored_as(name, dtype)
            empty = ring.is_meta and device.type != "meta"
            self.rings[name] = torch.zeros(ring.shape, dtype=kind, device=device) if empty else ring.to(device, kind)
        empty = self.pushed.is_meta and device.type != "meta"
        self.pushed = torch.zeros((), dtype=torch.int64, device=device) if empty else self.pushed.to(device)

    def move_(self, like: Tensor) -> None:
        """Go where `like` is, in its type, if not there."""
        if (self["mean"].device, self["mean"].dtype) != (like.device, like.dtype):
            self.to_(like.device, like.dtype)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name."""
        yield "pushed", self.pushed
        yield from self.rings.items()

    def mismatch(self, state: Mapping[str, Tensor]) -> str | None:
        """Say what keeps `state` from being loaded, if anything."""
        own = dict(self.state())
        if own.keys() != state.keys():
            return f"the saved history and this one do not share {', '.join(sorted(own.keys() ^ state.keys()))}"
        for name, value in own.items():
            saved = state[name].shape
            if name == "mean" and saved[:1] != value.shape[:1]:
                return f"the saved history is of window {saved[0] + 1}, this one of window {self.slots + 1}"
            # Samples are as many as the largest batch so far needed.
            sampled = _is_samples(name)
            if saved[:1] + saved[2:] != value.shape[:1] + value.shape[2:] if sampled else saved != value.shape:
                return f"{name} has the shape {tuple(value.shape)} here and {tuple(saved)} in the saved history"
        return _nonsense_in(state)

    def load_(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` yielded."""
        for name, saved in state.items():
            if _is_samples(name):
                self.widen_(name, saved.shape[1])
                self[name].zero_()[:, : saved.shape[1]].copy_(saved)
        for name, value in self.state():
            if not _is_samples(name):
                value.copy_(state[name])


_MOST_STEPS = 2**53
"""More than any training has, and a number that every type of numbers can count to."""


def _nonsense_in(state: Mapping[str, Tensor]) -> str | None:
    """Say what no history can hold, if `state` does."""
    pushed = state["pushed"]
    if pushed.dtype is not torch.int64 or not 0 <= int(pushed) <= _MOST_STEPS:
        return f"pushed must be an int64 from 0 on, got {pushed}"
    widths = {name: tensor.shape[1] for name, tensor in state.items() if _is_samples(name)}
    if len(set(widths.values())) > 1:
        return f"the samples of a step differ in number: {widths}"
    for name, tensor in state.items():
        if name != "pushed" and not tensor.is_floating_point():
            return f"{name} must be of a floating type, got {tensor.dtype}"
        if not tensor.isfinite().all():
            return f"{name} is not finite"
        if name in ("var", "count") and (tensor < 0).any():
            return f"{name} is below 0"
    return None


def _is_samples(name: str) -> bool:
    return name.endswith(_SAMPLES)


def _parts(name: str, slot: Tensor) -> list[Tensor]:
    """Return where the pieces of a value go."""
    return [slot[:1], slot[1:]] if _is_samples(name) else [slot]


def _fill(value: Tensor | Pieces, ring: Tensor) -> list[Tensor]:
    """Return the pieces of a value, with zeros for samples that are missing."""
    if isinstance(value, Tensor):
        return [value]
    first, samples = value
    if missing := ring.shape[1] - 1 - len(samples):
        samples = torch.cat([samples, samples.new_zeros(missing, *samples.shape[1:])])
    return [ring[0, :1] if first is None else first.unsqueeze(0), samples]  # 0 in every slot

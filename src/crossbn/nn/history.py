"""A ring of remembered steps."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from crossbn.functional import accumulation_dtype


class History:
    """The last few values of several named quantities, each one tensor [slots, *shape].

    Working state of one process: not parameters, not buffers. One counter, `pushed`, says how many steps have been
    remembered since the history was last cleared; which slots are filled and which comes next follow from it.
    Everything is a tensor and no update looks at a value, so that a compiled step needs no guard on it and a GPU
    is never waited for.
    """

    def __init__(self, slots: int, shapes: Mapping[str, tuple[int, ...]], like: Tensor) -> None:
        dtype, device = accumulation_dtype(like.dtype), like.device
        self.rings = {name: torch.zeros(slots, *shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        self.pushed = torch.zeros((), dtype=torch.int64, device=like.device)

    def __getitem__(self, name: str) -> Tensor:
        return self.rings[name]

    @property
    def slots(self) -> int:
        """How many steps fit."""
        return self["mean"].shape[0]

    def present(self) -> Tensor:
        """Return 1 for each filled slot and 0 for the others, [slots]."""
        mean = self["mean"]
        return (torch.arange(self.slots, device=mean.device) < self.pushed).to(mean.dtype)

    def push(self, row: Mapping[str, Tensor], accept: Tensor) -> None:
        """Overwrite the oldest slot with `row`, a value for each name, if the scalar `accept` is true."""
        if accept.device.type == "cpu" and not torch.compiler.is_compiling():
            if accept:  # on the CPU looking at a value costs nothing
                self._write(row)
        else:
            self._write_where(row, accept)

    def _write(self, row: Mapping[str, Tensor]) -> None:
        slot = int(self.pushed) % self.slots
        for name, ring in self.rings.items():
            ring[slot].copy_(row[name])
        self.pushed = self.pushed + 1

    def _write_where(self, row: Mapping[str, Tensor], accept: Tensor) -> None:
        slot = (self.pushed % self.slots).reshape(1)
        for name, ring in self.rings.items():
            new = torch.where(accept, row[name].to(ring.dtype), ring.index_select(0, slot))
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
        for name, ring in self.rings.items():
            self.rings[name] = ring.new_zeros(slots, *ring.shape[1:])
            self.rings[name][:kept] = ring[order]
        self.pushed.fill_(kept)

    def widen_(self, name: str, size: int) -> None:
        """Let the last dimension of `name` hold at least `size` values; the new ones are 0."""
        ring = self[name]
        if ring.shape[-1] < size:
            self.rings[name] = torch.nn.functional.pad(ring, (0, size - ring.shape[-1]))

    def apply_(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply what `nn.Module.to` and its relatives apply to buffers, short of halving the precision."""
        for name, ring in self.rings.items():
            moved = function(ring)
            wide = accumulation_dtype(moved.dtype)
            self.rings[name] = moved if moved.dtype == wide else ring.to(moved.device, wide)
        self.pushed = function(self.pushed)

    def move_(self, like: Tensor) -> None:
        """Go where `like` is, in its type, if not there: for a norm that has no tensor of its own to follow."""
        if (self["mean"].device, self["mean"].dtype) != (like.device, like.dtype):
            self.apply_(
                lambda tensor: tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)
            )

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
            if (saved[:-1] != value.shape[:-1]) if _is_samples(name) else (saved != value.shape):
                return f"{name} has the shape {tuple(value.shape)} here and {tuple(saved)} in the saved history"
        return None

    def load_(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` yielded."""
        for name, saved in state.items():
            if _is_samples(name):
                self.widen_(name, saved.shape[-1])
                self[name].zero_()[..., : saved.shape[-1]].copy_(saved)
        for name, value in self.state():
            if not _is_samples(name):
                value.copy_(state[name])


def _is_samples(name: str) -> bool:
    return name.endswith("samples")

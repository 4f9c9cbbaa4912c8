"""Patch index tables: which inputs the sampled outputs of an operator read, at one size of both, worked out once."""

import math

import torch
from torch import Tensor

from crossbn.functional import Geometry
from crossbn.functional.sensitivity import counts_by_dimension, jump_over, taps_of_all
from crossbn.ops import library

_TABLE_ENTRIES = 2**20


class Tables:
    """Where the outputs `x` of an operator are sampled, and which of its inputs `y` they read.

    The same positions as those of `sample_places`, the same taps as those of `patches_at`.

    Args:
        geometry: the operator.
        y: an input.
        x: the output.
        positions: to look at in a step.
    """

    def __init__(self, geometry: Geometry, y: Tensor, x: Tensor, positions: int) -> None:
        self.key = self.key_of(geometry, y, x)
        images, channels, *output_sizes = x.shape
        padding = [1] * (3 - len(output_sizes))
        self.total = math.prod(output_sizes) * images
        self.amount = min(positions, self.total)
        sizes, kernel = [*padding, *y.shape[2:]], [*padding, *geometry.kernel]
        tables, taps, inside = _tables(geometry, y, x)
        self._holds = tables, taps, inside  # what the addresses are of
        patch = y.shape[1] * geometry.taps
        self._mean_patch, self._mean_patch_a_thread = patch, (kernel[0] * kernel[1] + 2) * sizes[2]
        self._samples, self._compared = self.amount * (2 * channels + patch), 3 * channels
        self.structure = library.structures["tables", None](
            n=images,
            c=channels,
            s=math.prod(output_sizes),
            y_channels=y.shape[1],
            size=(library.NUMBER * 3)(*sizes),
            groups=geometry.groups,
            k=(library.NUMBER * 3)(*kernel),
            often=(library.POINTER * 3)(*(table.data_ptr() for table in tables)),
            amount=self.amount,
            jump=jump_over(self.total),
            tap=taps.data_ptr() or None,
            inside=inside.data_ptr() or None,
        )

    @staticmethod
    def key_of(geometry: Geometry, y: Tensor, x: Tensor) -> tuple[object, ...]:
        """Return what they depend on."""
        return geometry, y.shape, x.shape, x.dtype

    def room(self, of_gradients: bool) -> int:
        """Return how many numbers compiled code needs room for.

        First the mean patch is made, with some more for each thread; then vectors of the channels' size are compared
        and, as gradients, outputs and patches lie before them.
        """
        mean_patch = self._mean_patch + self._mean_patch_a_thread * torch.get_num_threads()
        return max(mean_patch, self._compared + (self._samples if of_gradients else 0))

    @staticmethod
    def has_room(geometry: Geometry, x: Tensor) -> bool:
        """Tell whether the tables for such an output are of a reasonable size."""
        return x.shape[2:].numel() * geometry.taps <= _TABLE_ENTRIES

    def start(self, number: int) -> int:
        """Return which position the `number`-th step to be remembered looks at first."""
        return 0 if self.amount == self.total else number * self.amount % self.total


def _tables(geometry: Geometry, y: Tensor, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return how often each tap reads each index of three dimensions, and which inputs each position reads.

    Tables that say nothing are empty: of a pointwise operator, and of which taps count where all do.
    """
    nothing = x.new_empty(0)
    if geometry.reads_each_input_once:
        if y.shape[2:] != x.shape[2:]:
            raise ValueError(f"outputs {tuple(x.shape)} are not at the places of the inputs {tuple(y.shape)}")
        return [nothing] * 3, nothing, nothing
    sizes, output_sizes = tuple(y.shape[2:]), tuple(x.shape[2:])
    *rest, last = counts_by_dimension(geometry, sizes, output_sizes, x.shape[0], x.device, x.dtype)
    taps, inside = taps_of_all.__wrapped__(geometry, sizes, output_sizes, x.device)  # once here, so not kept there
    tables = [x.new_ones(1, 1)] * (2 - len(rest)) + [*rest, last.mT]
    return [table.contiguous() for table in tables], taps, inside if geometry.may_read_nothing else nothing

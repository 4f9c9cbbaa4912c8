"""A whole step in compiled code: where it finds what it reads, and where its results lie."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.functional import Geometry, Settings, Storage, weighting
from crossbn.functional.sensitivity import counts_by_dimension, jump_over, taps_of_all
from crossbn.ops import library, reference, types
from crossbn.ops.library import Unfit, address, batch_at
from crossbn.ops.types import NotTheOperatorsOutput, Outcome, PackedStatistics, Past, StepInputs

_GIVEN = 2
_CHUNK = 256  # see `csrc/library.c`
_NOT_FINITE, _DONE, _NOT_REMEMBERED, _NOT_THE_OPERATOR = range(4)  # what a step came to, see `csrc/library.c`
_FIELDS = {"0.rows": "rows", "products": "at", "0.mean_grad": "rows", "mean_at": "at", "0.var_grad": "var_grad"}
"""What compiled code calls the rings that have another name there."""


def extent_of(shape: torch.Size) -> tuple[int, int, int]:
    """Return images, channels and positions of an image."""
    return shape[0], shape[1], math.prod(shape[2:])


def new_like(x: Tensor, is_last: bool) -> Tensor:
    """Return a dense tensor for numbers like those of `x`, with the channels last in memory if they are to be."""
    if is_last:  # not a view, which autograd would not let be changed in place
        _, c, *sizes = x.shape
        steps = [c * math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        return x.new_empty_strided(x.shape, (c * math.prod(sizes), 1, *steps))
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def dense(x: Tensor, is_last: bool) -> Tensor:
    """Return `x` so that its numbers are next to each other in that order."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if is_last else x.contiguous()


class Results(types.Layout):
    """Where the results of a step lie that reads so many remembered ones, and what backward is told of them."""

    def __init__(
        self, shape: torch.Size, is_last: bool, storage: Storage, rings: Mapping[str, Tensor], steps: int
    ) -> None:
        super().__init__(types.result_shapes(storage, rings, steps, 1, False))
        geometry = storage.geometries[0]
        channels, size, samples = shape[1], geometry.patch_size, types.samples_in(rings)
        of_kernel = geometry.in_channels // geometry.groups, *geometry.kernel
        self.shape, self.is_last, self.coefficients = shape, is_last, steps * samples * channels
        self.weight = (channels, size) if geometry.transposed else (channels, *of_kernel)
        has_rest = isinstance(storage, C.GradientStorage)
        structure = library.structures["extent", None]
        self._extent = structure(*extent_of(shape), steps, samples, geometry.groups, size, has_rest, is_last)
        self.pointer = ctypes.byref(self._extent)


class Workspace:
    """What a step needs and the next one can use again: structures, tables, room, and a row to be remembered.

    It is for one operator, storage and settings, and inputs of one size, all of which is looked at once. It belongs to
    one step at a time, from its forward until it is remembered.
    """

    def __init__(self, inputs: StepInputs, past: Past, storage: Storage, settings: Settings) -> None:
        (geometry, _, y, _, _), x = inputs.operands[0], inputs.x
        assert y is not None
        assert storage.positions is not None
        self._owners, self._sizes = (storage, settings), (geometry, x.shape, y.shape, x.dtype)
        self._is_lone = x.numel() == x.shape[1]
        self._is_activated = isinstance(storage, C.ActivatedStorage)
        self._threads, self._vector = torch.get_num_threads(), (x.shape[1],)
        self._tables, self._index = _make_tables(geometry, y, x, storage.positions)
        self._batch: Any = library.structures["batch", x.dtype]()
        self._memory: Any = library.structures["memory", x.dtype]()
        self._structures = (*map(ctypes.byref, (self._batch, self._memory, self._tables)),)
        self._functions = library.functions[x.dtype]
        self._results: dict[tuple[int, bool], Results] = {}
        self._today = x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
        self._today_places = self._today[0].data_ptr(), self._today[1].data_ptr()
        self._batch.n, self._batch.c, self._batch.s = extent_of(x.shape)
        self._point_to_rings(past, storage, settings, x)
        self._room = x.new_empty(self._room_needed(isinstance(storage, C.GradientStorage)))
        self._memory.scratch = self._room.data_ptr()

    def _point_to_rings(self, past: Past, storage: Storage, settings: Settings, x: Tensor) -> None:
        """Say where what is remembered is, and where what is to be remembered goes."""
        memory, (channels,), geometry = self._memory, self._vector, storage.geometries[0]
        samples = types.samples_in(past.rings)
        self._rings, self._next = dict(past.rings), {}  # as long as addresses are kept, the tensors are
        if not isinstance(storage, C.GradientStorage) and samples <= self._tables.amount:
            raise Unfit
        for name, shape in C.history_shapes(channels, storage, settings).items():
            shape = (samples, *shape[1:]) if name.endswith(C.SAMPLES) else shape
            field = _FIELDS.get(name, name)
            setattr(memory, field, address(past.rings[name], x.dtype, (past.slots, *shape)))
            if hasattr(memory, f"next_{field}"):
                self._next[name] = x.new_zeros((past.slots,) if name == "variogram" else shape)
                setattr(memory, f"next_{field}", self._next[name].data_ptr())
        self._rings["num_steps"], place = past.num_steps, address(past.num_steps, torch.int64, ())
        assert place is not None
        self._num_steps, self._slots = ctypes.c_int64.from_address(place), past.slots
        memory.num_steps, memory.slots = place, past.slots
        memory.m, memory.groups, memory.i = samples, geometry.groups, geometry.patch_size
        if settings.weights == "auto":
            self._step_weights, self._differences = x.new_zeros(past.slots), x.new_empty(channels, past.slots)
            self._batch.step_weights, memory.differences = self._step_weights.data_ptr(), self._differences.data_ptr()
            memory.price, memory.rate = C.gradient_price(len(x)), weighting.AVERAGING_RATE

    def _room_needed(self, of_gradients: bool) -> int:
        """Return how many numbers compiled code needs room for.

        First the mean patch is made, with some more for each thread; then two vectors of the channels' size are
        compared and, as gradients, outputs and patches lie before them.
        """
        tables = self._tables
        patch = tables.y_channels * math.prod(tables.k)
        samples = tables.amount * (2 * tables.c + patch) if of_gradients else 0
        lines = (tables.k[0] * tables.k[1] + 2) * tables.size[2], (math.prod(tables.k) + tables.k[2] + 1) * _CHUNK
        return max(patch + max(lines) * self._threads, 2 * tables.c + samples)

    def is_for(self, inputs: StepInputs, storage: Storage | None, settings: Settings) -> bool:
        """Tell whether it is for such a step."""
        (geometry, _, y, _, _), x = inputs.operands[0], inputs.x
        return (
            y is not None
            and (storage, settings) == self._owners
            and (geometry, x.shape, y.shape, x.dtype) == self._sizes
            and self._threads == torch.get_num_threads()
            and not (self._is_lone and inputs.moments is None)
        )

    def step(self, inputs: StepInputs, past: Past) -> Outcome | None:
        """Do a step."""
        batch, memory, (geometry, x_shape, y_shape, dtype) = self._batch, self._memory, self._sizes
        x, (_, weight, y, _, bias), vector, (storage, settings) = (
            inputs.x,
            inputs.operands[0],
            self._vector,
            self._owners,
        )
        assert y is not None
        if geometry.transposed or self._is_activated:
            # It lives as long as its address is needed.
            weight = C.flatten_weight(weight.detach(), geometry, bias).contiguous()
        elif not weight.is_contiguous():
            weight = weight.detach().contiguous()
        batch.x, batch.x_stride, batch.x_place = batch_at(x, dtype, x_shape)
        memory.y, memory.y_stride, memory.y_place = batch_at(y, dtype, y_shape)
        is_last = batch.x_place != 0
        memory.weight = address(weight, dtype, weight.shape)
        if weight.numel() != x_shape[1] * memory.i:
            raise Unfit
        today, output, norm = inputs.moments, None, inputs.norm
        if today is None:
            assert norm is not None
            mean, var, tracked, gamma, beta, batch.eps, batch.momentum = norm
            batch.gamma, batch.beta = address(gamma, dtype, vector), address(beta, dtype, vector)
            batch.running_mean, batch.running_var = address(mean, dtype, vector), address(var, dtype, vector)
            batch.num_batches_tracked = address(tracked, torch.int64, ())
            today, output = self._today, new_like(x, is_last)
            batch.output, (batch.today_mean, batch.today_var) = output.data_ptr(), self._today_places
        else:
            batch.output = batch.running_mean = None
            batch.today_mean, batch.today_var = address(today[0], dtype, vector), address(today[1], dtype, vector)
        batch.has_moments = output is None
        num_steps, slots = self._num_steps.value, self._slots
        steps = min(num_steps, slots)
        if settings.rate != 1:
            relative = C.weights_by_age(steps, num_steps % slots, settings.rate, dtype, x.device).relative
            batch.step_weights = None if relative is None else relative.data_ptr()
        if (results := self._results.get((steps, is_last))) is None:
            results = self._results[steps, is_last] = Results(x_shape, is_last, storage, self._rings, steps)
        packed, remember = x.new_empty(results.size), inputs.remember
        latest = None
        if settings.prior is not None and steps:
            latest = x.new_empty(vector), x.new_empty(vector)
            batch.latest_shift, batch.latest_growth = latest[0].data_ptr(), latest[1].data_ptr()
        if remember and self._is_activated:
            remember = self._make_row(inputs, past, weight)
        memory.seen, memory.results = num_steps, packed.data_ptr()
        memory.remember = _GIVEN if remember and self._is_activated else remember
        came_to = self._functions["step"](*self._structures, self._threads)
        if came_to == _NOT_FINITE:
            return None
        if came_to == _NOT_THE_OPERATOR:
            raise NotTheOperatorsOutput
        if output is not None and norm is not None:
            torch.autograd.graph.increment_version(norm[:3])
        found = PackedStatistics(packed, results, batch.bessel, batch.counted, batch.n * batch.s)
        if latest is not None:
            found.latest = C.Latest(*latest, batch.noise)
        commit = partial(self._remember, past, today) if remember and came_to == _DONE else None
        return Outcome(found, commit, output)

    def _make_row(self, inputs: StepInputs, past: Past, weight: Tensor) -> bool:
        """Make what is to be remembered where an activation is between; tell whether it is to be."""
        row, is_theirs, is_sound = reference.make_row(inputs, past, self._owners[0], [weight])
        if not is_theirs:
            raise NotTheOperatorsOutput
        for name, place in self._next.items():
            if name in row:
                place.copy_(row[name])
        return bool(is_sound)

    def _remember(self, past: Past, _: Sequence[Tensor]) -> None:
        """Write what the step has made into the rings. Its moments must live until then."""
        with past.lock:
            self._functions["remember"](*self._structures, self._threads)
        past.scratch.append(self)


def _make_tables(geometry: Geometry, y: Tensor, x: Tensor, positions: int) -> tuple[Any, list[Tensor]]:
    """Say where the outputs `x` of an operator are sampled, and which of its inputs `y` they read.

    The same positions as those of `sample_places`, the same taps as those of `patches_at`. How often each tap reads
    each index is told for three dimensions. Tables that say nothing are empty: of a pointwise operator, and of which
    taps count where all do. They are returned as well: the structure has their addresses.
    """
    (images, channels, space), padding = extent_of(x.shape), [1] * (5 - x.ndim)
    sizes, output_sizes = tuple(y.shape[2:]), tuple(x.shape[2:])
    taps = inside = nothing = x.new_empty(0)
    often = [nothing] * 3
    if not geometry.reads_each_input_once:
        *rest, last = counts_by_dimension(geometry, sizes, output_sizes, images, x.device, x.dtype)
        often = [each.contiguous() for each in (*[x.new_ones(1, 1)] * (2 - len(rest)), *rest, last.mT)]
        taps, inside = taps_of_all.__wrapped__(geometry, sizes, output_sizes, x.device)  # once here, so not kept there
        inside = inside if geometry.may_read_nothing else nothing
    elif sizes != output_sizes:
        raise ValueError(f"outputs {tuple(x.shape)} are not at the places of the inputs {tuple(y.shape)}")
    structure = library.structures["tables", None](
        n=images,
        c=channels,
        s=space,
        y_channels=y.shape[1],
        size=(library.NUMBER * 3)(*padding, *sizes),
        groups=geometry.groups,
        k=(library.NUMBER * 3)(*padding, *geometry.kernel),
        often=(library.POINTER * 3)(*(table.data_ptr() for table in often)),
        amount=min(positions, images * space),
        jump=jump_over(images * space),
        tap=taps.data_ptr() or None,
        inside=inside.data_ptr() or None,
    )
    return structure, [*often, taps, inside]

r"""How the moments of an operator's output change with its weights, in closed form.

With `x = W * y` and `patch` the inputs that one output position reads:

| paper | here | formula | shape | equation |
|---|---|---|---|---|
| d mu / d theta | `mean_grad` | E[patch], the same for every channel of a group | [groups, I] | (12) |
| d nu / d theta | not stored | 2 E[x patch] | [C, I] | (13) |
| | `var_grad` | 2 E[(x - mean) patch] = d nu - 2 mean d mu | [C, I] | |

I is `Geometry.patch_size`, C_in/groups * K. The variance's gradient is kept instead of the second moment's: it
holds the same information, and neither a large mean cancels in it nor has it to be cancelled later.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from crossbn.functional.geometry import Geometry, flatten_weight, pad_input, tap_counts, tap_table, unflatten_weight
from crossbn.functional.moments import accumulation_dtype

# Prime and larger than any map, so that the multiples modulo the number of positions visit every phase.
_PHASE_STRIDE = 2_654_435_761

_CHEAP_PRODUCTS = 2**24  # a tenth of a millisecond on two cores


def mean_grad(y: Tensor, geometry: Geometry, output_sizes: torch.Size) -> Tensor:
    """Return the mean patch over all output positions, [groups, I]: d mean_j / d W_j for each j of a group.

    Each kernel tap reads each input row (and column, ...) a known number of times, so the mean is one small
    matrix product per dimension with those counts instead of an average over unfolded patches.
    """
    dtype = accumulation_dtype(y.dtype)
    if geometry.reads_each_input_once:
        return y.mean([0, *range(2, y.ndim)], dtype=dtype).reshape(geometry.groups, -1)
    total = y.sum(0, dtype=dtype)
    for dim in reversed(range(len(geometry.kernel))):
        counts = tap_counts(geometry, dim, total, output_sizes[dim])
        total = (total.movedim(1 + dim, -1) @ counts).movedim(-1, 1 + dim)
    return total.reshape(geometry.groups, -1) / (y.shape[0] * output_sizes.numel())


def var_grad(x: Tensor, mean: Tensor, y: Tensor, flat_weight: Tensor, geometry: Geometry) -> Tensor:
    """Return 2 E[(x - mean) patch] over all positions, [C, I]: one weight gradient, the paper's exact form.

    Of `flat_weight` only the shape matters.
    """
    dtype = accumulation_dtype(x.dtype)
    channelwise = mean.reshape(-1, *[1] * (x.ndim - 2))
    centred = (x.to(dtype) - channelwise) * (2 * x.shape[1] / x.numel())
    if not geometry.kernel:
        return centred.mT @ y.to(dtype)
    padded, padding = pad_input(y.to(dtype), geometry)
    _, grad, _ = torch.ops.aten.convolution_backward(
        centred,
        padded,
        unflatten_weight(flat_weight.to(dtype), geometry),
        None,
        geometry.stride,
        padding,
        geometry.dilation,
        geometry.transposed,
        geometry.output_padding(y.shape[2:], x.shape[2:]),
        geometry.groups,
        [False, True, False],
    )
    return flatten_weight(grad, geometry)


def choose_amount(positions: int | None, output_sizes: torch.Size, batch: int, weight_numbers: int) -> int | None:
    """Choose how many spatial positions of each image to sample; None for all of them.

    `positions` over the batch, unless that many products with a large weight would cost a good part of the
    convolution itself: then at most an eighth of all positions, but 16 in any case. So wide early maps give
    `positions` samples, deep maps of a few pixels fewer, and maps with no more than that are taken whole.

    Args:
        positions: samples wanted; None for all.
        output_sizes: spatial extent of the operator's output.
        batch: number of images.
        weight_numbers: size of the operator's weight.
    """
    total = batch * output_sizes.numel()
    if positions is None or positions >= total:
        return None
    if positions * weight_numbers > _CHEAP_PRODUCTS:
        positions = min(positions, max(total // 8, 16))
    amount = max(1, positions // batch)
    return amount if amount < output_sizes.numel() else None


def sample_positions(output_sizes: torch.Size, amount: int, step: Tensor) -> Tensor:
    """Choose `amount` spatial positions for this step: a fixed scatter, shifted as a whole by the step's phase.

    The scatter fills space evenly (a low-discrepancy sequence); the shift wraps around. Over
    `output_sizes.numel()` consecutive steps every position comes up equally often, so an average over
    sampled positions is an unbiased estimate. The phase follows from the step, so no random generator is
    touched and a resumed run repeats it.

    Args:
        output_sizes: spatial extent of the operator's output.
        amount: how many.
        step: an integer scalar.

    Returns:
        Indices [len(output_sizes), amount], one row per spatial dimension.
    """
    scatter = _scatter if torch.compiler.is_compiling() else _cached_scatter
    fixed, sizes = scatter(output_sizes, amount, step.device)
    phase = _unravel((step * _PHASE_STRIDE).reshape(1) % output_sizes.numel(), output_sizes)
    return (fixed + phase) % sizes


def _scatter(sizes: Sequence[int], amount: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the scatter [dims, amount] and the sizes [dims, 1] as tensors."""
    # The positive root of g**(dims + 1) = g + 1: its inverse powers are the sequence's irrational strides.
    root = 2.0
    for _ in range(32):
        root = (1 + root) ** (1 / (len(sizes) + 1))
    order = range(1, amount + 1)
    rows = [[int(i / root ** (dim + 1) % 1 * size) for i in order] for dim, size in enumerate(sizes)]
    return torch.tensor(rows, device=device), torch.tensor(sizes, device=device).unsqueeze(1)


_cached_scatter = functools.lru_cache(1024)(_scatter)


def all_positions(output_sizes: torch.Size, device: torch.device) -> Tensor:
    """Return every spatial position, [len(output_sizes), output_sizes.numel()]."""
    return _unravel(torch.arange(output_sizes.numel(), device=device), output_sizes)


def outputs_at(x: Tensor, positions: Tensor) -> Tensor:
    """Gather the outputs `x` [N, C, ...] at spatial positions [dims, S]: [N, C, S]."""
    flat = positions.new_zeros(positions.shape[1])
    for dim, size in enumerate(x.shape[2:]):
        flat = flat * size + positions[dim]
    return _gather(x, flat)


def patches_at(y: Tensor, geometry: Geometry, positions: Tensor, output_sizes: torch.Size) -> Tensor:
    """Gather the patches that positions [dims, S] of an output of `output_sizes` read: [N, groups, I, S]."""
    if geometry.reads_each_input_once:
        return outputs_at(y, positions).unflatten(1, (geometry.groups, -1))
    sizes = y.shape[2:]
    flat = positions.new_zeros(positions.shape[1], 1)
    inside = torch.ones_like(flat, dtype=torch.bool)
    for dim, size in enumerate(sizes):
        index, counts = tap_table(geometry, dim, size, output_sizes[dim], y.device)
        flat = (flat.unsqueeze(2) * size + index[positions[dim]].unsqueeze(1)).flatten(1)
        inside = (inside.unsqueeze(2) & counts[positions[dim]].unsqueeze(1)).flatten(1)
    taken = _gather(y, flat.mT.flatten())
    if geometry.may_read_nothing:
        taken = taken * inside.mT.flatten().to(taken.dtype)
    return taken.reshape(y.shape[0], geometry.groups, geometry.patch_size, -1)


def sampled_var_grad(x_samples: Tensor, mean: Tensor, patches: Tensor) -> Tensor:
    """Estimate `var_grad` [C, I] from outputs [N, C, S] and patches [N, groups, I, S] at the same positions."""
    groups = patches.shape[1]
    samples = x_samples.shape[0] * x_samples.shape[2]
    centred = ((x_samples - mean.unsqueeze(1)) * (2 / samples)).unflatten(1, (groups, -1))
    rows = centred.permute(1, 2, 0, 3).reshape(groups, -1, samples)
    columns = patches.transpose(0, 1).transpose(1, 2).reshape(groups, -1, samples)
    return torch.bmm(rows, columns.mT).flatten(0, 1)


def _unravel(flat: Tensor, sizes: torch.Size) -> Tensor:
    rows = []
    for size in reversed(sizes):
        rows.append(flat % size)
        flat = flat // size
    return torch.stack(rows[::-1]) if rows else flat.new_zeros(0, flat.numel())


def _gather(x: Tensor, flat: Tensor) -> Tensor:
    """Take flattened spatial positions [S] of `x` [N, C, ...] without copying the rest: [N, C, S]."""
    dtype = accumulation_dtype(x.dtype)
    if x.ndim == 2 or x.is_contiguous():
        return x.reshape(*x.shape[:2], -1).index_select(2, flat).to(dtype)
    # Channels-last memory is contiguous the other way round.
    return x.movedim(1, -1).flatten(1, -2).index_select(1, flat).mT.to(dtype)

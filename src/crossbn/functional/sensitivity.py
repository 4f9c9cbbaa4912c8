"""How the moments of an operator's output change with its weights, in closed form.

With `x = W * y` and `patch` the inputs that one output position reads (docs/derivation.md, sections 3 and 5):

| paper | here | formula | shape | equation |
|---|---|---|---|---|
| d mu / d theta | `mean_grad` | E[patch], the same for every channel of a group | [groups, I] | (12) |
| d nu / d theta | not stored | 2 E[x patch] | [C, I] | (13) |
| | `var_grad` | 2 E[(x - mean) patch] = d nu - 2 mean d mu | [C, I] | |

On a sample of positions it is 2 E[(x - mean) (patch - mean_grad)], `spread` of the two, which is less noisy.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from crossbn.functional.geometry import Geometry, flatten_weight, unflatten_weight
from crossbn.functional.moments import accumulation_dtype, channelwise
from crossbn.functional.taylor import spread

Sizes = tuple[int, ...]
Places = tuple[Tensor, Tensor]
"""Output positions, [P] each: which image of the batch, and where in its flattened space."""
_GOLDEN_RATIO = 0.5 + 1.25**0.5
_TABLE_ENTRIES = 2**18


def mean_grad(y: Tensor, geometry: Geometry, output_sizes: torch.Size) -> Tensor:
    """Return the mean patch over all output positions, [groups, I]: d mean_j / d W_j for each j of a group.

    It is a product of the batch's sum with how often each tap reads each input, dimension by dimension.
    """
    dtype = accumulation_dtype(y.dtype)
    if geometry.reads_each_input_once:
        return y.mean([0, *range(2, y.ndim)], dtype=dtype).reshape(geometry.groups, -1)
    total = y.to(dtype).sum(0)
    for counts in counts_by_dimension(geometry, y.shape[2:], output_sizes, len(y), y.device, dtype):
        total = total.movedim(1, -1) @ counts  # what is done goes to the end: the next dimension is always the first
    return total.reshape(geometry.groups, -1)


def var_grad(
    x: Tensor, mean: Tensor, y: Tensor, flat_weight: Tensor, geometry: Geometry, mean_patch: Tensor | None = None
) -> Tensor:
    """Return 2 E[(x - mean) patch] over all positions, [C, I]: one weight gradient, the paper's exact form.

    Of `flat_weight` only the shape matters. `mean_patch` [groups, I] is taken off the patches, if given: that changes
    nothing if E[x - mean] = 0, but beside a large mean its rounding makes it something else, and patches are large.
    """
    dtype = accumulation_dtype(x.dtype)
    centred, y = (x.to(dtype) - channelwise(mean, x)) * (2 * x.shape[1] / x.numel()), y.to(dtype)
    if geometry.kernel:
        padded, padding = _pad_input(y, geometry)
        weight = unflatten_weight(flat_weight.to(dtype), geometry)
        shape = geometry.stride, padding, geometry.dilation, geometry.transposed
        appended = _appended(geometry, y.shape[2:], x.shape[2:])
        _, grad, _ = torch.ops.aten.convolution_backward(
            centred, padded, weight, None, *shape, appended, geometry.groups, [False, True, False]
        )
        grad = flatten_weight(grad, geometry)
    else:
        grad = centred.mT @ y
    if mean_patch is None:
        return grad
    rest = centred.sum([0, *range(2, centred.ndim)])
    return grad - spread(rest.unsqueeze(0), mean_patch.unsqueeze(0))


def _pad_input(y: Tensor, geometry: Geometry) -> tuple[Tensor, list[int]]:
    """Apply the padding that the convolution kernel cannot: return the input and the padding left to it."""
    if geometry.padding_mode == "zeros" and all(before == after for before, after in geometry.padding):
        return y, [before for before, _ in geometry.padding]
    widths = [width for pair in reversed(geometry.padding) for width in pair]
    mode = "constant" if geometry.padding_mode == "zeros" else geometry.padding_mode
    return F.pad(y, widths, mode=mode), [0] * len(geometry.padding)


def _appended(geometry: Geometry, sizes: Sizes, output_sizes: Sizes) -> list[int]:
    """Return how many positions a transposed convolution has appended to its output; a call may choose them."""
    dims = zip(sizes, geometry.stride, geometry.padding, geometry.dilation, geometry.kernel, strict=True)
    least = [(size - 1) * stride - sum(cut) + dilation * (taps - 1) + 1 for size, stride, cut, dilation, taps in dims]
    return [size - own if geometry.transposed else 0 for size, own in zip(output_sizes, least, strict=True)]


def sample_places(batch: int, space: int, amount: int | None, step: int | Tensor, device: torch.device) -> Places:
    """Choose `amount` (None: all) of `batch` * `space` output positions: the next ones of a scattered order.

    It jumps by a golden section, so that any run of it is spread evenly, and over as many steps as there are positions
    each comes up equally often: estimates are unbiased. No random generator is touched; a resumed run repeats it.
    """
    total = batch * space
    if amount is None or amount >= total:
        amount, step = total, 0
    index = (torch.arange(amount, device=device) + step * amount % total) * jump_over(total) % total
    return index // space, index % space


def jump_over(total: int) -> int:
    """Return how far apart neighbours in the scattered order of `total` positions are."""
    jump = int(total / _GOLDEN_RATIO)
    while math.gcd(jump, total) > 1:
        jump += 1
    return jump


def outputs_at(x: Tensor, places: Places) -> Tensor:
    """Gather the outputs `x` [N, C, ...] at P positions, in at least float32: [P, C]."""
    image, place = places
    return (x[image] if x.ndim == 2 else x.flatten(2)[image, :, place]).to(accumulation_dtype(x.dtype))


def patches_at(y: Tensor, geometry: Geometry, places: Places, output_sizes: torch.Size) -> Tensor:
    """Gather the patches that P positions of a batch of outputs of `output_sizes` read: [P, groups, I]."""
    if geometry.reads_each_input_once:
        return outputs_at(y, places).unflatten(1, (geometry.groups, -1))
    sizes, (image, place) = (y.shape[2:], output_sizes), places
    if output_sizes.numel() * geometry.taps > _TABLE_ENTRIES:
        taps, inside = _taps_at(geometry, place, *sizes)
    else:
        taps, inside = (table[place] for table in taps_of_all(geometry, *sizes, y.device))
    taken = y.flatten(2)[image.unsqueeze(1), :, taps].to(accumulation_dtype(y.dtype))
    if geometry.may_read_nothing:
        taken *= inside.unsqueeze(2)
    return taken.transpose(1, 2).reshape(len(taps), geometry.groups, -1)


@functools.lru_cache(128)
def taps_of_all(geometry: Geometry, sizes: Sizes, output_sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which inputs each position of a flattened output reads, and which of them count.

    They are indices into the flattened input [P, K], and 1 or 0 for each, [P, K] (0: see `_input_index`). Like all
    tables they are made on the CPU and moved once.
    """
    taps, inside = _taps_at(geometry, torch.arange(math.prod(output_sizes), device="cpu"), sizes, output_sizes)
    return taps.to(device), inside.to(device)


def _taps_at(geometry: Geometry, place: Tensor, sizes: Sizes, output_sizes: Sizes) -> tuple[Tensor, Tensor]:
    taps, inside, stride = place.new_zeros(len(place), 1), torch.ones_like(place).unsqueeze(1), 1
    for dim in reversed(range(len(sizes))):
        index, counts = _input_index(geometry, dim, place % output_sizes[dim], sizes[dim])
        place = place // output_sizes[dim]
        taps = (stride * index.unsqueeze(2) + taps.unsqueeze(1)).flatten(1)
        inside = (counts.unsqueeze(2) * inside.unsqueeze(1)).flatten(1)
        stride *= sizes[dim]
    return taps, inside.to(torch.uint8)


@functools.lru_cache(256)
def counts_by_dimension(
    geometry: Geometry, sizes: Sizes, output_sizes: Sizes, batch: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Return how often each tap reads each index along each dimension, [size, K], over the positions in it."""
    tables = []
    for dim, (size, output_size) in enumerate(zip(sizes, output_sizes, strict=True)):
        index, inside = _input_index(geometry, dim, torch.arange(output_size, device="cpu"), size)
        counts = torch.zeros(size, geometry.kernel[dim], dtype=dtype, device="cpu")
        tables.append(counts.scatter_add_(0, index, inside.to(dtype)) / output_size)
    return [table.to(device) for table in (*tables[:-1], tables[-1] / batch)]


def _input_index(geometry: Geometry, dim: int, output: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return which input index of `size` each kernel tap reads for each output index [S] along a spatial dimension.

    The input indices [S, K_dim] are all legal; whether they count, [S, K_dim], is False where the tap falls on zero
    padding, or between the inputs of a transposed convolution.
    """
    stride, before = geometry.stride[dim], geometry.padding[dim][0]
    reach = torch.arange(geometry.kernel[dim], device=output.device) * geometry.dilation[dim]
    if geometry.transposed:
        spread = output.unsqueeze(1) + before - reach
        index = spread.div(stride, rounding_mode="floor")
        inside = (spread % stride == 0) & (index >= 0) & (index < size)
        return index.clamp(0, size - 1), inside
    index = output.unsqueeze(1) * stride + reach - before
    if geometry.padding_mode == "zeros":
        return index.clamp(0, size - 1), (index >= 0) & (index < size)
    if geometry.padding_mode == "circular":
        index = index % size
    elif geometry.padding_mode == "reflect":
        index = (size - 1) - ((size - 1) - index.abs()).abs()
    else:
        index = index.clamp(0, size - 1)
    return index, torch.ones_like(index, dtype=torch.bool)

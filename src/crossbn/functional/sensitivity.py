r"""How the moments of an operator's output change with its weights, in closed form.

With `x = W * y` and `patch` the inputs that one output position reads:

| paper | here | formula | shape | equation |
|---|---|---|---|---|
| d mu / d theta | `mean_grad` | E[patch], the same for every channel of a group | [groups, I] | (12) |
| d nu / d theta | not stored | 2 E[x patch] | [C, I] | (13) |
| | `var_grad` | 2 E[(x - mean) patch] = d nu - 2 mean d mu | [C, I] | |

I is `Geometry.patch_size`, C_in/groups * K. The variance's gradient is kept instead of the second moment's: it
holds the same information, and neither a large mean cancels in it nor has it to be cancelled later.

Estimated on a sample of positions it is 2 E[(x - mean) (patch - mean_grad)], `taylor.spread` of the two: taking the
mean patch off changes nothing on average, because E[x - mean] = 0, but a good part of the noise is gone.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn.functional.geometry import Geometry, flatten_weight, pad_input, unflatten_weight
from crossbn.functional.moments import accumulation_dtype, channelwise
from crossbn.functional.taps import average_by_tap, taps_at
from crossbn.functional.taylor import spread

_GOLDEN_RATIO = 0.5 + 1.25**0.5
_ORDER_ENTRIES = 2**17


def mean_grad(y: Tensor, geometry: Geometry, output_sizes: torch.Size) -> Tensor:
    """Return the mean patch over all output positions, [groups, I]: d mean_j / d W_j for each j of a group.

    Each kernel tap reads each input row (and column, ...) a known number of times, so nothing is unfolded.
    """
    dtype = accumulation_dtype(y.dtype)
    if geometry.reads_each_input_once:
        return y.mean([0, *range(2, y.ndim)], dtype=dtype).reshape(geometry.groups, -1)
    return average_by_tap(y.to(dtype), geometry, output_sizes).reshape(geometry.groups, -1)


def var_grad(
    x: Tensor, mean: Tensor, y: Tensor, flat_weight: Tensor, geometry: Geometry, mean_patch: Tensor | None = None
) -> Tensor:
    """Return 2 E[(x - mean) patch] over all positions, [C, I]: one weight gradient, the paper's exact form.

    Args:
        x: output.
        mean: of the output; that of several processes together may differ from that of `x`.
        y: input.
        flat_weight: only its shape matters.
        geometry: the operator.
        mean_patch: [groups, I]: if given, it is taken off the patches. That changes nothing if E[x - mean] = 0; beside
            a large mean the rounding of `mean` makes it something else, and the patches are large as well.
    """
    dtype = accumulation_dtype(x.dtype)
    centred = (x.to(dtype) - channelwise(mean, x)) * (2 * x.shape[1] / x.numel())
    if not geometry.kernel:
        return _taken_off(centred.mT @ y.to(dtype), centred, mean_patch)
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
    return _taken_off(flatten_weight(grad, geometry), centred, mean_patch)


def _taken_off(grad: Tensor, centred: Tensor, mean_patch: Tensor | None) -> Tensor:
    if mean_patch is None:
        return grad
    rest = centred.sum([0, *range(2, centred.ndim)])
    return grad - spread(rest.unsqueeze(0), mean_patch.unsqueeze(0))


class Places(NamedTuple):
    """Output positions: which image of the batch, and where in its flattened space."""

    image: Tensor
    """[P]."""
    space: Tensor
    """[P]."""


def sample_places(batch: int, space: int, amount: int | None, step: int | Tensor, device: torch.device) -> Places:
    """Choose `amount` output positions of a batch for this step: the next ones of a scattered order of all of them.

    The order jumps by a golden section, so that any run of it is spread evenly. Over as many steps as there are
    positions each comes up equally often, so an average over sampled positions is an unbiased estimate. The place in
    the order follows from the step, so no random generator is touched and a resumed run repeats it.

    Args:
        batch: number of images.
        space: positions in each.
        amount: how many; all of them if None or not fewer than there are.
        step: number of the step, a scalar.
        device: where the result is wanted.
    """
    total = batch * space
    if amount is None or amount >= total:
        amount, step = total, 0
    start = step * amount % total
    if isinstance(start, int) and total <= _ORDER_ENTRIES:
        return Places(*(each.narrow(0, start, amount) for each in _order(total, space, amount, device)))
    return _places(start, amount, total, space, device)


def jump_over(total: int) -> int:
    """Return how far apart neighbours in the scattered order of `total` positions are."""
    jump = int(total / _GOLDEN_RATIO)
    while math.gcd(jump, total) > 1:
        jump += 1
    return jump


def _places(start: int | Tensor, amount: int, total: int, space: int, device: torch.device) -> Places:
    index = (torch.arange(amount, device=device) + start) * jump_over(total) % total
    return Places(index // space, index % space)


@functools.lru_cache(128)
def _order(total: int, space: int, amount: int, device: torch.device) -> Places:
    """Return the whole order, and the beginning again for a run that passes the end."""
    return _places(0, total + amount, total, space, device)


def outputs_at(x: Tensor, places: Places) -> Tensor:
    """Gather the outputs `x` [N, C, ...] at P positions, in at least float32: [P, C]."""
    dtype = accumulation_dtype(x.dtype)
    return (x[places.image] if x.ndim == 2 else x.flatten(2)[places.image, :, places.space]).to(dtype)


def patches_at(y: Tensor, geometry: Geometry, places: Places, output_sizes: torch.Size) -> Tensor:
    """Gather the patches that P positions of a batch of outputs of `output_sizes` read: [P, groups, I]."""
    if geometry.reads_each_input_once:
        return outputs_at(y, places).unflatten(1, (geometry.groups, -1))
    taps, inside = taps_at(geometry, places.space, y.shape[2:], output_sizes)
    taken = y.flatten(2)[places.image.unsqueeze(1), :, taps].to(accumulation_dtype(y.dtype))
    if geometry.may_read_nothing:
        taken *= inside.unsqueeze(2)
    return taken.transpose(1, 2).reshape(len(taps), geometry.groups, -1)

"""Gradients: the vectors of a normalization, and the weight's by way of the remembered steps."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["channels", "share_channel"])
def backward_vectors(
    sum_grad, sum_product, gamma, var, share, share_channel,
    invstd, grad_mean, grad_var, grad_gamma, own_grad, own_product,
    channels, positions, eps, HAS_GAMMA: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Make the vectors of `functional/normalize.py` from the sums of g and of g (x - mean)."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    own = channel < channels
    inverse = tl.rsqrt(tl.load(var + channel, mask=own, other=1.0) + eps)
    tl.store(invstd + channel, inverse, mask=own)
    grad, product = (
        tl.load(sum_grad + channel, mask=own, other=0.0),
        tl.load(sum_product + channel, mask=own, other=0.0),
    )
    scale = -inverse
    if HAS_GAMMA:
        scale *= tl.load(gamma + channel, mask=own, other=0.0)
    tl.store(grad_mean + channel, scale * grad, mask=own)
    tl.store(grad_var + channel, scale * inverse * inverse * product * 0.5, mask=own)
    tl.store(grad_gamma + channel, product * inverse, mask=own)
    part = tl.load(share + channel * share_channel, mask=own, other=0.0) / positions
    tl.store(own_grad + channel, grad * part, mask=own)
    tl.store(own_product + channel, product * part, mask=own)


@triton.jit(do_not_specialize=["channels", "samples", "mean_step", "mean_channel"])
def row_coefficients(
    of_mean, mean_step, mean_channel, of_var, grad_mean, grad_var, coefficient, channels, samples,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Make what each row [R, M] of each channel has in the weight's gradient, [R, M, C]."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row, own = tl.program_id(1), channel < channels
    place = row * channels + channel
    found = tl.load(of_var + place, mask=own, other=0.0) * tl.load(grad_var + channel, mask=own, other=0.0)
    if row % samples == 0:
        by_mean = tl.load(of_mean + row // samples * mean_step + channel * mean_channel, mask=own, other=0.0)
        found += by_mean * tl.load(grad_mean + channel, mask=own, other=0.0)
    tl.store(coefficient + place, found, mask=own)


@triton.jit(do_not_specialize=["channels", "of_group", "size", "steps", "mean_step", "mean_channel"])
def weight_gradient(
    rows, of_mean, mean_step, mean_channel, of_var, jacobian, grad_mean, grad_var, weight,
    channels, of_group, size, steps, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Make the weight's gradient [C, I] where gradients are remembered."""
    channel, groups = tl.program_id(0), channels // of_group
    number = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    own, a, v = number < size, tl.load(grad_mean + channel), tl.load(grad_var + channel)
    place = channel.to(tl.int64) * size + number
    found = v * tl.load(jacobian + place, mask=own, other=0.0)
    for step in range(steps):
        by_mean = tl.load(of_mean + step * mean_step + channel * mean_channel)
        by_row = a * by_mean + v * tl.load(of_var + step * channels + channel)
        row = (step * groups + channel // of_group) * size
        found += by_row * tl.load(rows + row + number, mask=own, other=0.0)
    tl.store(weight + place, found, mask=own)

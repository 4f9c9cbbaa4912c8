"""What a step is remembered by: patches of the operator's input, outputs, and gradients made of them."""

import triton
import triton.language as tl

_REFLECT, _REPLICATE, _CIRCULAR, _TRANSPOSED = (tl.constexpr(mode) for mode in (1, 2, 3, 4))

GEOMETRY = tuple(
    f"{name}{dim}" for name in ("output", "size", "kernel", "stride", "dilation", "before") for dim in range(3)
)
"""Arguments that say where an operator of up to three dimensions reads: of each its sizes, stride and so on."""


@triton.jit
def _input_index(output, tap, size, stride, dilation, before, MODE: tl.constexpr):
    """Return which input a tap reads along one dimension, and whether it counts: see `sensitivity._input_index`."""
    if MODE == _TRANSPOSED:
        spread = output + before - tap * dilation
        place = tl.maximum(spread, 0)
        index = place // stride
        inside = (spread >= 0) & (place % stride == 0) & (index < size)
    else:
        index = output * stride + tap * dilation - before
        if MODE == _REFLECT:
            index = (size - 1) - tl.abs((size - 1) - tl.abs(index))
        elif MODE == _CIRCULAR:
            index = (index + size) % size
        inside = (index >= 0) & (index < size)
        if MODE == _REPLICATE:
            inside = index == index
    return tl.minimum(tl.maximum(index, 0), size - 1), inside


@triton.jit
def _read_place(
    place, tap,
    output0, output1, output2, size0, size1, size2, kernel0, kernel1, kernel2,
    stride0, stride1, stride2, dilation0, dilation1, dilation2, before0, before1, before2,
    MODE: tl.constexpr,
):  # fmt: skip
    """Return which place of the flattened input a tap reads for one of the flattened output, and whether it does."""
    i0, in0 = _input_index(
        place // (output1 * output2), tap // (kernel1 * kernel2), size0, stride0, dilation0, before0, MODE
    )
    i1, in1 = _input_index(
        place // output2 % output1, tap // kernel2 % kernel1, size1, stride1, dilation1, before1, MODE
    )
    i2, in2 = _input_index(place % output2, tap % kernel2, size2, stride2, dilation2, before2, MODE)
    return (i0 * size1 + i1) * size2 + i2, in0 & in1 & in2


@triton.jit
def _sampled(number, seen, amount, total, jump):
    """Return the position that is looked at as the `number`-th: see `sensitivity.sample_places`."""
    start = tl.where(amount < total, seen * amount % total, 0)
    return (number + start) * jump % total


@triton.jit(do_not_specialize=["images", "inputs", "outputs", "amount", "samples", "jump", "kept_size", *GEOMETRY])
def gather(
    y, y_image, y_channel, y_place, x, x_image, x_channel, x_place, mean, num_steps, ring, kept, rows, centred,
    images, inputs, outputs, amount, samples, jump, kept_size,
    output0, output1, output2, size0, size1, size2, kernel0, kernel1, kernel2,
    stride0, stride1, stride2, dilation0, dilation1, dilation2, before0, before1, before2,
    MODE: tl.constexpr, CHANNELS: tl.constexpr, PLACES: tl.constexpr, SAMPLES: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Make today's rows [samples, inputs * taps] and `centred` [samples, outputs]; copy what the ring will lose.

    Of the rows the first is the mean patch, then come the patches at `amount` positions less that, then 0. `centred`
    has 2 (x - mean) / amount at the same positions, and 0 first. A program is for one tap of some input channels, for
    some output channels, or for a part of the copy.
    """
    taps, space = kernel0 * kernel1 * kernel2, output0 * output1 * output2
    total, seen, program = images.to(tl.int64) * space, tl.load(num_steps), tl.program_id(0)
    of_inputs, of_outputs = taps * tl.cdiv(inputs, CHANNELS), tl.cdiv(outputs, CHANNELS)
    if program < of_inputs:
        tap = program % taps
        channel = program // taps * CHANNELS + tl.arange(0, CHANNELS)
        own, column = channel < inputs, channel * taps + tap
        y_own = y + channel[:, None].to(tl.int64) * y_channel
        found = tl.zeros([CHANNELS, PLACES], tl.float32)
        for begin in range(0, images * space, PLACES):
            position = begin + tl.arange(0, PLACES)
            place, inside = _read_place(
                position % space, tap, output0, output1, output2, size0, size1, size2, kernel0, kernel1, kernel2,
                stride0, stride1, stride2, dilation0, dilation1, dilation2, before0, before1, before2, MODE,
            )  # fmt: skip
            offset = (position // space).to(tl.int64) * y_image + place.to(tl.int64) * y_place
            mask = own[:, None] & (inside & (position < images * space))[None, :]
            found += tl.load(y_own + offset[None, :], mask=mask, other=0.0).to(tl.float32)
        patch = tl.sum(found, 1) / (images * space)
        tl.store(rows + column, patch, mask=own)
        for begin in range(0, samples - 1, SAMPLES):
            number = begin + tl.arange(0, SAMPLES)
            position = _sampled(number, seen, amount, total, jump)
            place, inside = _read_place(
                (position % space).to(tl.int32), tap,
                output0, output1, output2, size0, size1, size2, kernel0, kernel1, kernel2,
                stride0, stride1, stride2, dilation0, dilation1, dilation2, before0, before1, before2, MODE,
            )  # fmt: skip
            offset = position // space * y_image + place.to(tl.int64) * y_place
            mask = own[:, None] & (inside & (number < amount))[None, :]
            value = tl.load(y_own + offset[None, :], mask=mask, other=0.0).to(tl.float32)
            value = tl.where((number < amount)[None, :], value - patch[:, None], 0.0)
            to = rows + (1 + number[None, :]).to(tl.int64) * inputs * taps + column[:, None]
            tl.store(to, value, mask=own[:, None] & (number < samples - 1)[None, :])
    elif program < of_inputs + of_outputs:
        channel = (program - of_inputs) * CHANNELS + tl.arange(0, CHANNELS)
        own = channel < outputs
        centre = tl.load(mean + channel, mask=own, other=0.0)
        tl.store(centred + channel, tl.zeros([CHANNELS], tl.float32), mask=own)
        for begin in range(0, samples - 1, SAMPLES):
            number = begin + tl.arange(0, SAMPLES)
            position = _sampled(number, seen, amount, total, jump)
            offset = position // space * x_image + position % space * x_place
            mask = own[:, None] & (number < amount)[None, :]
            value = tl.load(x + channel[:, None].to(tl.int64) * x_channel + offset[None, :], mask=mask, other=0.0)
            value = tl.where(mask, (value.to(tl.float32) - centre[:, None]) * (2.0 / amount), 0.0)
            to = centred + (1 + number[None, :]) * outputs + channel[:, None]
            tl.store(to, value, mask=own[:, None] & (number < samples - 1)[None, :])
    else:
        index = (program - of_inputs - of_outputs).to(tl.int64) * COPIED + tl.arange(0, COPIED)
        tl.store(kept + index, tl.load(ring + index, mask=index < kept_size), mask=index < kept_size)


@triton.jit(do_not_specialize=["channels", "of_group", "size", "amount"])
def differentiate(
    rows, centred, weight, mean_grad, var_grad, mean_at, var_at, steps, var_grad_today, at_today, shift, slope,
    channels, of_group, size, amount,
    SAMPLES: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Make of a channel's samples its gradients, and what today's weights make of today's and the remembered ones.

    `var_grad_today` is [C, I]; `at_today` [3, C] are <mean patch, W>, <first sample, W> and <var_grad, W>; `shift` and
    `slope` [R, C] say how the weights' change has moved a remembered mean and variance.
    """
    channel = tl.program_id(0)
    group, groups = channel // of_group, channels // of_group
    row, weight_row = group * size, weight + channel.to(tl.int64) * size
    mean_product = tl.zeros([NUMBERS], tl.float32)
    sample_product, var_product = mean_product, mean_product
    for begin in range(0, size, NUMBERS):
        number = begin + tl.arange(0, NUMBERS)
        own = number < size
        of_weight = tl.load(weight_row + number, mask=own, other=0.0).to(tl.float32)
        mean_product += of_weight * tl.load(rows + row + number, mask=own, other=0.0)
        first = rows + groups * size + row + number
        sample_product += of_weight * tl.load(first, mask=own, other=0.0)
        grad = tl.zeros([NUMBERS], tl.float32)
        for some in range(0, amount, SAMPLES):
            sample = 1 + some + tl.arange(0, SAMPLES)
            there = sample <= amount
            factor = tl.load(centred + sample * channels + channel, mask=there, other=0.0)
            place = rows + sample[:, None].to(tl.int64) * groups * size + (row + number)[None, :]
            patch = tl.load(place, mask=there[:, None] & own[None, :], other=0.0)
            grad += tl.sum(factor[:, None] * patch, 0)
        tl.store(var_grad_today + channel.to(tl.int64) * size + number, grad, mask=own)
        var_product += of_weight * grad
    tl.store(at_today + channel, tl.sum(mean_product, 0))
    tl.store(at_today + channels + channel, tl.sum(sample_product, 0))
    tl.store(at_today + 2 * channels + channel, tl.sum(var_product, 0))
    for step in range(steps):
        of_mean = tl.zeros([NUMBERS], tl.float32)
        of_var = tl.zeros([NUMBERS], tl.float32)
        for begin in range(0, size, NUMBERS):
            number = begin + tl.arange(0, NUMBERS)
            own = number < size
            of_weight = tl.load(weight_row + number, mask=own, other=0.0).to(tl.float32)
            of_mean += of_weight * tl.load(mean_grad + (step * groups + group) * size + number, mask=own, other=0.0)
            place = var_grad + (step * channels + channel).to(tl.int64) * size + number
            of_var += of_weight * tl.load(place, mask=own, other=0.0)
        to = step * channels + channel
        tl.store(shift + to, tl.sum(of_mean, 0) - tl.load(mean_at + to))
        tl.store(slope + to, tl.sum(of_var, 0) - tl.load(var_at + to))

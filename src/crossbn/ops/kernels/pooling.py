"""Statistics of the window, and whether the step is sound: `functional/pooling.py` and `weighting.py`, fused."""

import triton
import triton.language as tl

from crossbn.functional.weighting import LARGEST_DIFFERENCE, SMALLEST_WEIGHT

_LARGEST, _SMALLEST = tl.constexpr(LARGEST_DIFFERENCE), tl.constexpr(SMALLEST_WEIGHT)
_TINY, _EVEN_IF_HUGE = tl.constexpr(1.1754943508222875e-38), tl.constexpr(3.0e38)


@triton.jit
def is_finite(value):
    """Tell whether numbers are finite; a comparison with NaN is false."""
    return tl.abs(value) <= _EVEN_IF_HUGE


@triton.jit
def _weights_by_age(
    variogram, count, seen, positions, decay, price, steps, AUTOMATIC: tl.constexpr, AGES: tl.constexpr
):
    """Return the weights of the steps of age 1 and so on, today's being 1: see `functional/weighting.py`."""
    age = 1 + tl.arange(0, AGES)
    present = (age <= steps) & (age <= seen)
    if AUTOMATIC:
        on, years = present.to(tl.float32), age.to(tl.float32)
        v = tl.load(variogram + age - 1, mask=present, other=0.0)
        counted = tl.load(count + (seen - age + 2 * steps) % steps, mask=present, other=0.0)
        there = tl.maximum(tl.sum(on, 0), 1.0)
        centre, height = tl.sum(on * years, 0) / there, tl.sum(v, 0) / there
        away = on * (years - centre)
        rise = tl.sum(away * v, 0) / tl.maximum(tl.sum(away * away, 0), _TINY)
        through_zero = tl.sum(years * v, 0) / tl.maximum(tl.sum(on * years * years, 0), _TINY)
        drift = tl.minimum(tl.maximum(rise, 0.0), through_zero)
        noise = tl.maximum((height - drift * centre) / 2, _TINY)
        usual = tl.maximum(tl.sum(counted, 0) / there, 1.0)
        worth, factors = noise * 0.0, tl.full([AGES], 1.0, tl.float32)
        for back in range(steps):
            this = steps - back
            worth += tl.sum(tl.where(age == this, counted, 0.0), 0) / usual
            factor = noise / (noise + worth * (drift + tl.where(this == 1, price, 0.0)))
            factors = tl.where(age == this, factor, factors)
            worth *= factor
        since = tl.maximum(tl.cumprod(factors, 0), _SMALLEST)
        weights = tl.where(present, counted / positions * since, 0.0)
    else:
        weights = tl.where(present, tl.exp2(age.to(tl.float32) * decay), 0.0)  # decay is a logarithm
    return weights


@triton.jit
def _sum_of_squares_off(mean, var, of_today, centred, channel, own, channels, amount):
    """Return how far two products are from what they should be, and what counts as much, squared and summed."""
    today, spread = tl.load(mean + channel, mask=own, other=0.0), tl.load(var + channel, mask=own, other=0.0)
    sample = tl.load(centred + channels + channel, mask=own, other=0.0) * (amount / 2.0)
    off_mean = tl.load(of_today + channel, mask=own, other=0.0) - today
    off_sample = tl.load(of_today + channels + channel, mask=own, other=0.0) - sample
    squares = tl.sum(off_mean * off_mean, 0), tl.sum(off_sample * off_sample, 0)
    return squares[0], squares[1], tl.sum(spread, 0), tl.sum(spread + sample * sample, 0)


@triton.jit
def _is_theirs(
    mean, var, of_today, centred, rows, weight, channels, of_group, size, amount, tolerance, rounding,
    MANY: tl.constexpr, SOME: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Tell whether the output is what the weights make of the input: see `storage.agree`."""
    off_mean, off_sample, of_mean, of_sample = 0.0, 0.0, 0.0, 0.0
    for begin in range(0, channels, MANY):
        channel = begin + tl.arange(0, MANY)
        found = _sum_of_squares_off(mean, var, of_today, centred, channel, channel < channels, channels, amount)
        off_mean, off_sample = off_mean + found[0], off_sample + found[1]
        of_mean, of_sample = of_mean + found[2], of_sample + found[3]
    allowed = tolerance * tolerance
    fits = (off_mean <= allowed * of_mean) & (off_sample <= allowed * of_sample)
    if fits == 0:  # rounding is relative to the absolute values that products add up: looked at if it matters
        groups = channels // of_group
        slack_mean, slack_sample = 0.0, 0.0
        for begin in range(0, channels, SOME):
            channel = begin + tl.arange(0, SOME)
            own = channel < channels
            mean_size = tl.abs(tl.load(mean + channel, mask=own, other=0.0))
            sample_size = mean_size
            for start in range(0, size, NUMBERS):
                number = start + tl.arange(0, NUMBERS)
                mask = own[:, None] & (number < size)[None, :]
                place = weight + channel[:, None].to(tl.int64) * size + number[None, :]
                of_weight = tl.abs(tl.load(place, mask=mask, other=0.0).to(tl.float32))
                patch = rows + (channel // of_group)[:, None] * size + number[None, :]
                of_patch = tl.abs(tl.load(patch, mask=mask, other=0.0))
                both = of_patch + tl.abs(tl.load(patch + groups * size, mask=mask, other=0.0))
                mean_size += tl.sum(of_weight * of_patch, 1)
                sample_size += tl.sum(of_weight * both, 1)
            slack_mean += tl.sum(mean_size * mean_size, 0)
            slack_sample += tl.sum(sample_size * sample_size, 0)
        rounded = rounding * rounding
        fits = off_mean <= allowed * of_mean + rounded * slack_mean
        fits = fits & (off_sample <= allowed * of_sample + rounded * slack_sample)
    return fits


@triton.jit
def _all_finite(values, size, MANY: tl.constexpr):
    """Tell whether all of `size` numbers are finite."""
    wrong = 0
    for begin in range(0, size, MANY):
        index = begin + tl.arange(0, MANY)
        wrong += tl.sum((is_finite(tl.load(values + index, mask=index < size, other=0.0)) == 0).to(tl.int32), 0)
    return wrong == 0


@triton.jit
def _shift_of(products, at, step, channel, own, channels, samples, SAMPLED: tl.constexpr):
    """Return by how much a remembered step's mean has moved."""
    if SAMPLED:
        place = step * samples * channels + channel
        return tl.load(products + place, mask=own, other=0.0) - tl.load(at + place, mask=own, other=0.0)
    return tl.load(products + step * channels + channel, mask=own, other=0.0)


@triton.jit
def _slope_of(products, at, slope, step, channel, own, channels, samples, SAMPLED: tl.constexpr):
    """Return by how much its variance has; `slope` are the ring's deviations where there are samples."""
    if SAMPLED:
        found = tl.zeros_like(channel).to(tl.float32)
        for sample in range(1, samples):
            place = (step * samples + sample) * channels + channel
            change = tl.load(products + place, mask=own, other=0.0) - tl.load(at + place, mask=own, other=0.0)
            found += tl.load(slope + place, mask=own, other=0.0) * change
        return found
    return tl.load(slope + step * channels + channel, mask=own, other=0.0)


@triton.jit(do_not_specialize=["channels", "of_others", "of_group", "size", "samples", "amount", "steps"])
def pool(
    today_mean, today_var, past_mean, past_var, count, variogram, num_steps, others,
    products, at, slope, var_grad, of_today, centred, rows, weight,
    mean, var, invstd, share, dvar_dvar, step_weight, coefficient, jacobian, differences, keep, bessel,
    channels, of_others, of_group, size, samples, amount, steps, positions, decay, price, eps, tolerance, rounding,
    AUTOMATIC: tl.constexpr, SAMPLED: tl.constexpr, CHECKED: tl.constexpr, LOOKED: tl.constexpr,
    AGES: tl.constexpr, CHANNELS: tl.constexpr, NUMBERS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Pool today's moments with the remembered ones at today's weights: see `functional/pooling.py`.

    Each program looks itself whether the step is sound, which is cheap. Where it is not it is BatchNorm's, and `keep`
    is 0; `keep` has the number of the step as well. CHECKED: there are today's rows to look at. LOOKED: inputs may be
    infinite without the moments knowing. The variances `others` of other channels of the norm must be finite as well.
    `differences` [programs, R] are sums, by age.
    """
    seen, program = tl.load(num_steps), tl.program_id(0)
    accept = _all_finite(today_var, channels, MANY) & _all_finite(others, of_others, MANY)
    sound = accept
    if CHECKED:
        theirs = _is_theirs(
            today_mean, today_var, of_today, centred, rows, weight, channels, of_group, size, amount, tolerance,
            rounding, MANY, CHANNELS, NUMBERS,
        )  # fmt: skip
        if LOOKED:
            readable = _all_finite(rows, channels // of_group * size, MANY)
            sound = accept & readable
            theirs = theirs | (readable == 0)  # it cannot be told
        accept = accept & theirs
    weights = _weights_by_age(variogram, count, seen, positions, decay, price, steps, AUTOMATIC, AGES)
    weights = tl.where(accept, weights, 0.0)
    own_share = 1.0 / (1.0 + tl.sum(weights, 0))
    ages = tl.arange(0, AGES)
    slots = ((seen - 1 - ages + 2 * steps) % steps).to(tl.int32)
    channel = program * CHANNELS + tl.arange(0, CHANNELS)
    own = channel < channels
    today = tl.load(today_mean + channel, mask=own, other=0.0)
    spread = tl.load(today_var + channel, mask=own, other=0.0)
    centre = tl.zeros([CHANNELS], tl.float32)  # relative to today's mean
    for age in range(steps):
        slot = tl.sum(tl.where(ages == age, slots, 0), 0)
        w = tl.sum(tl.where(ages == age, weights, 0.0), 0) * own_share
        shift = _shift_of(products, at, slot, channel, own, channels, samples, SAMPLED)
        centre += w * (tl.load(past_mean + slot * channels + channel, mask=own, other=0.0) + shift - today)
    total = own_share * (spread + centre * centre)
    for age in range(steps):
        slot = tl.sum(tl.where(ages == age, slots, 0), 0)
        w = tl.sum(tl.where(ages == age, weights, 0.0), 0) * own_share
        place = slot * channels + channel
        shift = _shift_of(products, at, slot, channel, own, channels, samples, SAMPLED)
        moved = tl.load(past_var + place, mask=own, other=0.0) - shift * shift
        moved += _slope_of(products, at, slope, slot, channel, own, channels, samples, SAMPLED)
        deviation = tl.load(past_mean + place, mask=own, other=0.0) + shift - today - centre
        total += w * (tl.maximum(moved, 0.0) + deviation * deviation)
        valid = tl.where(moved >= 0, w, 0.0)
        tl.store(dvar_dvar + place, valid, mask=own)
        first = slot * samples * channels + channel
        if SAMPLED:
            for sample in range(1, samples):
                further = first + sample * channels
                tl.store(coefficient + further, valid * tl.load(slope + further, mask=own, other=0.0), mask=own)
        tl.store(coefficient + first, 2 * w * deviation - 2 * valid * shift, mask=own)
    tl.store(mean + channel, today + centre, mask=own)
    tl.store(var + channel, total, mask=own)
    tl.store(invstd + channel, tl.rsqrt(tl.where(own, total + eps, 1.0)), mask=own)
    counted = tl.load(count + slots, mask=(ages < steps) & (weights > 0), other=0.0)
    whole = tl.sum(counted, 0) + positions
    tl.store(share + channel, tl.zeros([CHANNELS], tl.float32) + own_share, mask=own)
    tl.store(bessel + channel, tl.zeros([CHANNELS], tl.float32) + whole / (whole - 1.0), mask=own)
    if AUTOMATIC:
        unit, deviation_today = tl.maximum(total, _TINY), tl.sqrt(spread)
        for age in range(steps):
            slot = tl.sum(tl.where(ages == age, slots, 0), 0)
            place = slot * channels + channel
            shift = _shift_of(products, at, slot, channel, own, channels, samples, SAMPLED)
            moved = tl.load(past_var + place, mask=own, other=0.0) - shift * shift
            moved += _slope_of(products, at, slope, slot, channel, own, channels, samples, SAMPLED)
            off = tl.load(past_mean + place, mask=own, other=0.0) + shift - today
            off_deviation = tl.sqrt(tl.maximum(moved, 0.0)) - deviation_today
            ratio = (off * off + off_deviation * off_deviation) / unit
            ratio = tl.where(ratio < _LARGEST, ratio, _LARGEST)  # this way round NaN is large
            tl.store(differences + program * steps + age, tl.sum(tl.where(own, ratio, 0.0), 0))
    if not SAMPLED:
        for begin in range(0, size, NUMBERS):
            number = begin + tl.arange(0, NUMBERS)
            mask = own[:, None] & (number < size)[None, :]
            grad = tl.zeros([CHANNELS, NUMBERS], tl.float32)
            for step in range(steps):
                w = tl.sum(tl.where(slots == step, tl.where(ages < steps, weights, 0.0), 0.0), 0) * own_share
                place = step * channels + channel
                shift = tl.load(products + place, mask=own, other=0.0)
                moved = tl.load(past_var + place, mask=own, other=0.0) - shift * shift
                moved += tl.load(slope + place, mask=own, other=0.0)
                valid = tl.where(moved >= 0, w, 0.0)
                of_step = var_grad + place[:, None].to(tl.int64) * size + number[None, :]
                grad += valid[:, None] * tl.load(of_step, mask=mask, other=0.0)
            tl.store(jacobian + channel[:, None].to(tl.int64) * size + number[None, :], grad, mask=mask)
    if program == 0:
        tl.store(step_weight + slots, weights * own_share, mask=ages < steps)
        tl.store(keep, tl.where(accept & sound, 1, 0))
        tl.store(keep + 1, seen)

"""What a step leaves behind: running statistics, and the step itself in the rings."""

import triton
import triton.language as tl

from crossbn.functional.weighting import AVERAGING_RATE
from crossbn.ops.kernels.pooling import is_finite

_RATE = tl.constexpr(AVERAGING_RATE)


@triton.jit
def _moved(running, target, factor, channel, own, momentum):
    before = tl.load(running + channel, mask=own, other=0.0)
    return before + momentum * (tl.load(target + channel, mask=own, other=0.0) * factor - before)


@triton.jit(do_not_specialize=["channels", "momentum"])
def move_running(mean, var, bessel, running_mean, running_var, tracked, channels, momentum, MANY: tl.constexpr):
    """Move the running statistics, if all of them stay finite: one program."""
    wrong = 0
    for begin in range(0, channels, MANY):
        channel = begin + tl.arange(0, MANY)
        own = channel < channels
        unbiased = tl.load(bessel + channel, mask=own, other=0.0)
        ends = _moved(running_mean, mean, 1.0, channel, own, momentum)
        ends += _moved(running_var, var, unbiased, channel, own, momentum)
        wrong += tl.sum((is_finite(ends) == 0).to(tl.int32), 0)
    if wrong == 0:
        for begin in range(0, channels, MANY):
            channel = begin + tl.arange(0, MANY)
            own = channel < channels
            unbiased = tl.load(bessel + channel, mask=own, other=0.0)
            tl.store(running_mean + channel, _moved(running_mean, mean, 1.0, channel, own, momentum), mask=own)
            tl.store(running_var + channel, _moved(running_var, var, unbiased, channel, own, momentum), mask=own)
        tl.store(tracked, tl.load(tracked) + 1)


@triton.jit
def _copy(to, slot, value, size, index):
    place = to + slot * size + index
    tl.store(place, tl.load(value + index, mask=index < size), mask=index < size)


@triton.jit(do_not_specialize=["channels", "row_size", "at_size", "bulk_size", "steps", "programs", "positions"])
def remember(
    num_steps, keep, ring_mean, ring_var, ring_count, ring_rows, ring_at, ring_bulk, ring_var_at, variogram,
    mean, var, rows, at, bulk, var_at, differences,
    channels, row_size, at_size, bulk_size, steps, programs, positions,
    AUTOMATIC: tl.constexpr, SAMPLED: tl.constexpr, AGES: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Write today's step over the oldest one, if it is to be kept.

    `bulk` are deviations where there are samples, else gradients. Which step it is `keep` tells, because one program
    counts it while others may still have to look.
    """
    if tl.load(keep) != 0:
        seen, program = tl.load(keep + 1), tl.program_id(0)
        slot, index = seen % steps, program.to(tl.int64) * COPIED + tl.arange(0, COPIED)
        _copy(ring_mean, slot, mean, channels, index)
        _copy(ring_var, slot, var, channels, index)
        _copy(ring_rows, slot, rows, row_size, index)
        _copy(ring_at, slot, at, at_size, index)
        _copy(ring_bulk, slot, bulk, bulk_size, index)
        if not SAMPLED:
            _copy(ring_var_at, slot, var_at, channels, index)
        if program == 0:
            tl.store(ring_count + slot, positions)
            tl.store(num_steps, seen + 1)
            if AUTOMATIC:
                ages = tl.arange(0, AGES)
                found = tl.zeros([AGES], tl.float32)
                for part in range(programs):
                    found += tl.load(differences + part * steps + ages, mask=ages < steps, other=0.0)
                rate = tl.maximum(1.0 / tl.maximum(seen - ages, 1).to(tl.float32), _RATE)
                there = (ages < steps) & (ages < seen)
                before = tl.load(variogram + ages, mask=there, other=0.0)
                tl.store(variogram + ages, before + rate * (found / channels - before), mask=there)

"""How long a run will take, from its arithmetic and the speed of this machine."""

import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from crossbn.lab.environment import best_device

if TYPE_CHECKING:  # whoever asks for no estimate does not wait for it
    from torch import nn


def count_forward_flops(build: "Callable[[], nn.Module]", input_shape: tuple[int, ...]) -> int:
    """Return the FLOPs of convolutions and matrix products for one example, two for a multiply-add.

    Nothing is computed and no memory taken: the model is built without values.

    Example:
        >>> count_forward_flops(lambda: nn.Linear(3, 5), (3,))
        30
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.random.fork_rng(devices=[]), torch.device("meta"), FlopCounterMode(display=False) as counter:
        build().eval()(torch.empty(1, *input_shape))
    return counter.get_total_flops()


@cache
def measure_flops_per_second(threads: int) -> float:
    """Return what a convolution of usual size reaches on this machine, on its accelerator if it has one."""
    import torch
    import torch.nn.functional as F

    device = best_device()
    images, weight = torch.randn(16, 64, 28, 28, device=device), torch.randn(64, 64, 3, 3, device=device)
    flops = 2 * 16 * 28 * 28 * 64 * 64 * 9
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # One thread's own time, which others on the machine take no part of; several threads have to be waited for.
        clock = time.process_time if threads == 1 and device == "cpu" else time.perf_counter
        return flops / min(_seconds(lambda: F.conv2d(images, weight, padding=1), device, clock) for _ in range(5))
    finally:
        torch.set_num_threads(before)


def _seconds(work: Callable[[], object], device: str, clock: Callable[[], float]) -> float:
    import torch

    started = clock()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def in_words(seconds: float) -> str:
    """Return a time as people say it.

    Example:
        >>> [in_words(each) for each in (0.2, 80, 5400, 1e6, 1e8)]
        ['1 s', '80 s', '90 min', '12 days', '3.2 years']
    """
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    for size, unit, most in ((60, "min", 6000), (3600, "h", 72 * 3600)):
        if seconds <= most:
            return f"{seconds / size:.0f} {unit}"
    days = seconds / 86400
    return f"{days:.0f} days" if days < 730 else f"{days / 365.25:.1f} years"

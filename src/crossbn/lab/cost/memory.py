"""Peak memory of a piece of work.

On the processor, torch's profiler reports every allocation and every release of its allocator; the peak is the largest
running sum. What kernels keep outside of it (oneDNN's scratch space) is not seen. On CUDA the caching allocator keeps
the account itself.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch.autograd.profiler import profile, record_function

_MARK = "crossbn: measured from here"


def peak_above_start(work: Callable[[], object], device: torch.device) -> int:
    """Return how many bytes more are in use at the height of `work` than at its start.

    It is done twice and the second time counts, so that what it leaves behind and replaces, such as gradients, is there
    at the start as it is in the middle of a training.

    Example:
        >>> peak_above_start(lambda: torch.empty(1000).clone(), torch.device("cpu"))
        8000
    """
    return _peak_on_cuda(work, device) if device.type == "cuda" else _peak_on_cpu(work)


def _peak_on_cuda(work: Callable[[], object], device: torch.device) -> int:
    work()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(work: Callable[[], object]) -> int:
    with _library_logs_dropped(), profile(profile_memory=True) as profiler:
        work()
        with record_function(_MARK):
            work()
    assert profiler.kineto_results is not None
    events = profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == _MARK)
    memory = [event for event in events if event.name() == "[memory]" and event.start_ns() >= start]
    memory.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in memory), initial=0))


@contextmanager
def _library_logs_dropped() -> Iterator[None]:
    """The profiler logs its start, its stop and each release of an earlier block, whatever it is told."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)

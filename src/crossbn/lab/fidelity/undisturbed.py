"""Running a model that is in training without its training noticing."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Let forwards inside change nothing: no gradients, buffers are copies, random numbers will be drawn again.

    Histories stay as they are, as in every forward without gradients.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with undisturbed(norm):
        ...     y = norm(torch.ones(4, 2))
        >>> norm.num_batches_tracked, y.requires_grad
        (tensor(0), False)
    """
    own = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    copies = {id(buffer): buffer.clone() for _, _, buffer in own if buffer is not None}
    try:
        for module, name, buffer in own:
            module._buffers[name] = None if buffer is None else copies[id(buffer)]
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device_type, indices in _devices(model).items():
                kind = "cuda" if device_type == "cpu" else device_type  # the CPU's generator is always forked
                stack.enter_context(torch.random.fork_rng(indices, device_type=kind))
                stack.enter_context(_autocast_without_cache(device_type))
            yield
    finally:
        for module, name, buffer in own:
            module._buffers[name] = buffer


def _devices(model: nn.Module) -> dict[str, list[int]]:
    """Return the indices of the model's devices by type; the CPU has none."""
    found: dict[str, set[int]] = {"cpu": set()}
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for device in {tensor.device for tensor in tensors}:
        if device.type != "meta":
            found.setdefault(device.type, set()).update(() if device.index is None else {device.index})
    return {device_type: sorted(indices) for device_type, indices in found.items()}


def _autocast_without_cache(device_type: str) -> torch.autocast:
    # Not every version of torch keeps a weight that was cast and cached without gradients out of the training forward.
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=False)

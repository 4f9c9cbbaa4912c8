"""Population statistics of a trained model."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.convert import check_module
from crossbn.functional import batch_moments, join_moments
from crossbn.torch_internals import BatchNormBase


@torch.no_grad()
def recalibrate_(model: nn.Module, batches: Iterable[Any]) -> None:
    """Replace the running statistics of every batch norm by those of `batches`, all examples counted alike.

    The model runs in evaluation mode, each norm normalizing with the statistics of all batches so far. That
    serves batches of any size: no statistic is taken of a tiny batch alone, dropout is off, histories are left alone.
    A batch that is not finite where a norm sees it does not count there, as in training.

    Args:
        model: any model with batch norms, converted or not.
        batches: inputs; of a tuple or list the first element counts, as from a loader of examples and labels.

    Raises:
        TypeError: if `model` is none, or `batches` is a single tensor.
        ValueError: if there is no batch.
    """
    check_module("recalibrate_", model)
    if isinstance(batches, Tensor):
        raise TypeError(f"recalibrate_ takes an iterable of batches, got one tensor of shape {tuple(batches.shape)}")
    norms = [
        module for module in model.modules() if isinstance(module, BatchNormBase) and module.running_mean is not None
    ]
    joined = {norm: _JoinedMoments() for norm in norms}
    flags = {module: module.training for module in model.modules()}
    handles = [norm.register_forward_pre_hook(moments) for norm, moments in joined.items()]
    seen = 0
    try:
        model.eval()
        for batch in batches:
            model(batch[0] if isinstance(batch, (tuple, list)) else batch)
            seen += 1
    finally:
        for handle in handles:
            handle.remove()
        for module, flag in flags.items():
            module.training = flag
    if not seen:
        raise ValueError("recalibrate_ needs at least one batch, got none")


class _JoinedMoments:
    """Forward pre-hook of a norm: adds the input's moments to those before and hands them to the norm."""

    def __init__(self) -> None:
        self._past: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, norm: BatchNormBase, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        mean, var = batch_moments(x)
        if not torch.isfinite(mean + var).all():
            return
        count = mean.new_tensor(x.numel() // x.shape[1])
        if self._past is not None:
            past_mean, past_var, past_count = self._past
            counts = torch.stack([past_count, count])
            mean, var = join_moments(torch.stack([past_mean, mean]), torch.stack([past_var, var]), counts)
            count = counts.sum()
        self._past = mean, var, count
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var * count / (count - 1).clamp(min=1))

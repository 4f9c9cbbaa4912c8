"""A norm in the place of another: its parameters, statistics and settings go over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from crossbn.nn.norms.frozen import FrozenBatchNorm
from crossbn.nn.norms.registry import make_norm


def make_successor(norm: _NormBase, name: str, dims: int | None, label: str, options: Mapping[str, Any]) -> nn.Module:
    """Return a norm called `name` with the parameters, buffers and settings of `norm`.

    Args:
        norm: any norm with BatchNorm's parameters and buffers; it is left as it is.
        name: a key of `NORMS`.
        dims: spatial dimensions of the input, None for any.
        label: what the new norm calls itself in errors.
        options: of the new norm; they come before what the old one has.

    Raises:
        ValueError: by the new norm's constructor, with the label named before its message.
    """
    settings = {key: getattr(norm, key) for key in ("eps", "momentum", "affine", "track_running_stats")}
    like = next((tensor for tensor in (norm.weight, norm.running_mean) if tensor is not None), None)
    if like is not None:
        settings.update(device=like.device, dtype=like.dtype)
    if name == "sync_bn":
        settings["process_group"] = getattr(norm, "process_group", None)
    try:
        new = make_norm(name, norm.num_features, **{"dims": dims, **settings, **options})
    except ValueError as error:
        raise ValueError(f"the norm {label!r}: {error}") from error
    _hand_over_(norm, new)
    if hasattr(new, "label"):
        new.label = label  # type: ignore[assignment]  # Module attributes are untyped
    return new.train(norm.training)


def _hand_over_(old: _NormBase, new: nn.Module) -> None:
    """Give `new` the parameters and buffers of `old`; a frozen norm gets copies, all of them as buffers."""
    frozen = isinstance(new, FrozenBatchNorm)
    for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        tensor: Any = getattr(old, key)
        state: dict[str, Any] = new._parameters if key in ("weight", "bias") and not frozen else new._buffers
        if tensor is not None and state.get(key) is not None:
            state[key] = tensor.detach().clone() if frozen else tensor

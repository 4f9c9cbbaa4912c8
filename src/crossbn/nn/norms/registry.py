"""Every norm by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from crossbn.messages import no_such
from crossbn.nn.layer import (
    CrossIterBatchNorm,
    CrossIterBatchNorm1d,
    CrossIterBatchNorm2d,
    CrossIterBatchNorm3d,
)
from crossbn.nn.norms.base import check_dims
from crossbn.nn.norms.batch_instance import BatchInstanceNorm
from crossbn.nn.norms.frozen import FrozenBatchNorm
from crossbn.nn.norms.kalman import KalmanNorm
from crossbn.nn.norms.native import InstanceNorm, make_batch_norm, make_group_norm, make_layer_norm
from crossbn.nn.norms.renorm import BatchRenorm
from crossbn.nn.norms.sparse_switch import SparseSwitchNorm
from crossbn.nn.norms.switch import SwitchNorm
from crossbn.nn.norms.sync import SyncBatchNorm

_CROSS_ITERATION: dict[int | None, type[CrossIterBatchNorm]] = {
    None: CrossIterBatchNorm,
    1: CrossIterBatchNorm1d,
    2: CrossIterBatchNorm2d,
    3: CrossIterBatchNorm3d,
}


@dataclass(frozen=True)
class NormEntry:
    """A registered norm; called, it makes one.

    Attributes:
        title: its name in full.
        paper: where it was proposed.
        build: takes the arguments of `nn.BatchNorm2d`, `dims`, and options of its own.
    """

    title: str
    paper: str
    build: Callable[..., nn.Module]

    def __call__(self, num_features: int, *args: Any, dims: int | None = 2, **options: Any) -> nn.Module:
        """Return a norm of that kind."""
        self.check_options(options)
        return self.build(num_features, *args, dims=dims, **options)

    def check_options(self, names: Iterable[str]) -> None:
        """Raise TypeError for an option that norms of that kind do not have; it names those that they have."""
        taken = inspect.signature(self.build).parameters
        if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            return  # a cross-iteration norm's: `Settings` look at them
        own = [name for name in taken if name not in ("num_features", "dims", "device", "dtype")]
        for name in names:
            if name not in taken:
                raise TypeError(f"{self.title}: {no_such('option', name, own)}")


def _cross_iteration(*args: Any, dims: int | None = 2, **options: Any) -> nn.Module:
    check_dims(dims)
    return _CROSS_ITERATION[dims](*args, **options)


def _naive_cross_iteration(*args: Any, dims: int | None = 2, **options: Any) -> nn.Module:
    return _cross_iteration(*args, dims=dims, **options, order=0)


NORMS: Mapping[str, NormEntry] = MappingProxyType(
    {
        "bn": NormEntry("Batch Normalization", "https://arxiv.org/abs/1502.03167", make_batch_norm),
        "sync_bn": NormEntry("Synchronized Batch Normalization", "https://arxiv.org/abs/1711.07240", SyncBatchNorm),
        "frozen_bn": NormEntry("Frozen Batch Normalization", "https://arxiv.org/abs/1512.03385", FrozenBatchNorm),
        "in": NormEntry("Instance Normalization", "https://arxiv.org/abs/1607.08022", InstanceNorm),
        "ln": NormEntry("Layer Normalization", "https://arxiv.org/abs/1607.06450", make_layer_norm),
        "gn": NormEntry("Group Normalization", "https://arxiv.org/abs/1803.08494", make_group_norm),
        "brn": NormEntry("Batch Renormalization", "https://arxiv.org/abs/1702.03275", BatchRenorm),
        "bin": NormEntry("Batch-Instance Normalization", "https://arxiv.org/abs/1805.07925", BatchInstanceNorm),
        "kn": NormEntry("Kalman Normalization", "https://arxiv.org/abs/1802.03133", KalmanNorm),
        "sn": NormEntry("Switchable Normalization", "https://arxiv.org/abs/1806.10779", SwitchNorm),
        "ssn": NormEntry("Sparse Switchable Normalization", "https://arxiv.org/abs/1903.03793", SparseSwitchNorm),
        "naive_cbn": NormEntry(
            "Naive Cross-Iteration Batch Normalization", "https://arxiv.org/abs/2002.05712", _naive_cross_iteration
        ),
        "cbn": NormEntry("Cross-Iteration Batch Normalization", "https://arxiv.org/abs/2002.05712", _cross_iteration),
    }
)
"""The norms of the paper, by the names that `make_norm` and `swap_norm_` take."""


def make_norm(name: str, num_features: int, dims: int | None = 2, **options: Any) -> nn.Module:
    """Return a norm by name.

    Every norm takes `eps`, `momentum`, `affine`, `track_running_stats`, `device` and `dtype`, as BatchNorm does; what
    has no running statistics ignores the second and fourth. Options of one norm only: `groups` ("gn"), `schedule`
    ("brn"), `gain` ("kn"), `steps` ("ssn"), `process_group` ("sync_bn"), `window` and the rest of `Settings` ("cbn",
    "naive_cbn").

    Args:
        name: a key of `NORMS`.
        num_features: C of the input [N, C, ...].
        dims: spatial dimensions of the input, 1 to 3; None for any.
        options: the rest.

    Raises:
        ValueError: for a name that is not registered, or `dims` out of range.
        TypeError: for an option that the norm does not have.

    Example:
        >>> make_norm("gn", 64, groups=16)
        GroupNorm(16, 64, eps=1e-05, affine=True, bias=True)
    """
    return find_norm(name)(num_features, dims=dims, **options)


def find_norm(name: str) -> NormEntry:
    """Return what is registered under a name.

    Raises:
        ValueError: if nothing is.
    """
    if name not in NORMS:
        raise ValueError(no_such("norm", name, NORMS))
    return NORMS[name]

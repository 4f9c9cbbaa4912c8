"""Making norms by name."""

from typing import Any

import pytest
import torch
from torch import nn

from crossbn import nn as cnn
from crossbn.nn import NORMS, make_norm

CONTRACT = ["bn", "sync_bn", "frozen_bn", "in", "ln", "gn", "brn", "bin", "kn", "sn", "ssn", "naive_cbn", "cbn"]


def test_names() -> None:
    assert list(NORMS) == CONTRACT
    assert all(entry.paper.startswith("https://arxiv.org/abs/") for entry in NORMS.values())


RIGHT: list[tuple[str, dict[str, Any], type[nn.Module], dict[str, Any]]] = [
    ("bn", {"dims": 1}, nn.BatchNorm1d, {"eps": 1e-5, "momentum": 0.1}),
    ("bn", {"dims": 2, "eps": 0.5}, nn.BatchNorm2d, {"eps": 0.5}),
    ("bn", {"dims": 3, "momentum": None}, nn.BatchNorm3d, {"momentum": None}),
    ("in", {}, cnn.InstanceNorm, {"affine": True, "track_running_stats": False}),
    ("in", {"track_running_stats": True, "momentum": None}, nn.Module, {"track_running_stats": False}),
    ("ln", {"eps": 0.5}, nn.GroupNorm, {"num_groups": 1, "eps": 0.5}),
    ("gn", {}, nn.GroupNorm, {"num_groups": 16}),
    ("gn", {"groups": 12, "momentum": 0.5}, nn.GroupNorm, {"num_groups": 12}),
    ("kn", {"gain": 0.95}, cnn.KalmanNorm, {"gain": 0.95}),
    ("naive_cbn", {"window": 3}, cnn.CrossIterBatchNorm2d, {}),
    ("cbn", {"dims": None}, cnn.CrossIterBatchNorm, {}),
    ("sync_bn", {"dtype": torch.float64}, cnn.SyncBatchNorm, {"process_group": None}),
]


@pytest.mark.parametrize(("name", "options", "kind", "attributes"), RIGHT)
def test_right(name: str, options: dict[str, Any], kind: type[nn.Module], attributes: dict[str, Any]) -> None:
    norm = make_norm(name, 48, **options)
    assert isinstance(norm, kind)
    assert {key: getattr(norm, key) for key in attributes} == attributes
    assert all(parameter.dtype == options.get("dtype", torch.float32) for parameter in norm.parameters())


def test_order_of_cross_iteration_norms() -> None:
    for name, order in (("naive_cbn", 0), ("cbn", 1)):
        norm = make_norm(name, 8)
        assert isinstance(norm, cnn.CrossIterBatchNorm)
        assert norm.settings.order == order


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("batchnorm", {}, ValueError, "there is no norm 'batchnorm': there are bn, sync_bn, "),
        ("wn", {}, ValueError, "there is no norm 'wn'"),
        ("gn", {"groups": 5}, ValueError, "8 channels cannot be in 5 groups: give one of 1, 2, 4, 8"),
        ("gn", {"group": 4}, TypeError, "Group Normalization: there is no option 'group': did you mean groups"),
        *[(name, {"dims": 4}, ValueError, "dims must be 1, 2, 3 or None for any, got 4") for name in CONTRACT],
        *[(name, {"colour": 1}, TypeError, "colour") for name in CONTRACT],
        ("kn", {"gain": 0.0}, ValueError, "gain must be above 0 and at most 1, got 0.0"),
        ("kn", {"gain": 1.5}, ValueError, "gain must be above 0 and at most 1, got 1.5"),
        ("ssn", {"steps": 0}, ValueError, "0 <= start < stop"),
        ("naive_cbn", {"order": 1}, TypeError, "order"),
        ("ln", {"groups": 2}, TypeError, "Layer Normalization: there is no option 'groups': there are eps, momentum"),
        ("bn", {"foo": 1}, TypeError, "there is no option 'foo': there are eps, momentum, affine, track_running_stats"),
    ],
)
def test_wrong(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_norm(name, 8, **options)


@pytest.mark.parametrize("name", CONTRACT)
def test_entries_take_the_arguments_of_batchnorm_in_its_order(name: str) -> None:
    norm = NORMS[name](8, 0.25, 0.75, False, True, "cpu", torch.float64, dims=1)
    assert norm.eps == 0.25
    assert not norm.affine
    assert getattr(norm, "momentum", 0.75) == 0.75
    assert norm(torch.randn(2, 8, 3, dtype=torch.float64)).dtype == torch.float64

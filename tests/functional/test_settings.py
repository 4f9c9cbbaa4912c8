"""Options of a norm: one object or one by one, checked."""

from typing import Any

import pytest
import torch
from torch import nn

import crossbn
from crossbn.functional import Settings
from crossbn.nn import CrossIterBatchNorm2d

OPTIONS: dict[str, Any] = {"window": 6, "burn_in": 3, "order": 2, "positions": 40, "decay": 0.5}


def converted(**options: Any) -> Settings:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
    crossbn.convert_(model, **options)
    norm = model[1]
    assert isinstance(norm, CrossIterBatchNorm2d)
    return norm.settings


def constructed(**options: Any) -> Settings:
    return CrossIterBatchNorm2d(3, **options).settings


BOTH = pytest.mark.parametrize("settings_of", [converted, constructed])


@BOTH
def test_one_object_is_as_good_as_keywords(settings_of: Any) -> None:
    assert settings_of(config=Settings(**OPTIONS)) == settings_of(**OPTIONS) == Settings(**OPTIONS)


@BOTH
def test_an_unknown_option_is_an_error(settings_of: Any) -> None:
    with pytest.raises(TypeError, match=r"no option is called 'layers'; there are window, burn_in, order"):
        settings_of(window=3, layers=2)


@BOTH
def test_both_at_once_are_an_error(settings_of: Any) -> None:
    with pytest.raises(TypeError, match="give config or options, not both: order"):
        settings_of(config=Settings(), order=2)


WRONG: list[tuple[str, Any, str]] = [
    ("window", 0, "window must be an integer of at least 1, got 0"),
    ("window", True, "window must be an integer of at least 1, got True"),
    ("burn_in", -1, "burn_in must be an integer of at least 0, got -1"),
    ("positions", 0, "positions must be an integer of at least 1, got 0"),
    ("order", 3, "order must be one of 0, 1, 2, got 3"),
    ("backward", "none", "backward must be one of 'through', 'detached', got 'none'"),
    ("invalid", "clip", "invalid must be one of 'max', 'drop', got 'clip'"),
    ("history_dtype", torch.float16, "history_dtype must be one of None, torch.bfloat16, got torch.float16"),
    ("decay", 0.0, "decay must be above 0 and at most 1, got 0.0"),
    ("weights", "kalman", "weights must be one of 'equal', 'auto', got 'kalman'"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_out_of_range(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Settings(**{name: value})

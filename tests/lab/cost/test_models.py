from collections import OrderedDict
from pathlib import Path

import pytest
from torch import nn

from crossbn.lab.cost.models import find_model


def test_torchvision_by_name() -> None:
    model = find_model("mobilenet_v3_small")()
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_542_856


def test_own_by_module_and_function() -> None:
    assert find_model("torch.nn:Sequential") is nn.Sequential
    assert find_model("collections:OrderedDict") is OrderedDict  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("resnet", "torchvision has no classification model 'resnet'; it has alexnet, .*package.module:function"),
        ("fasterrcnn_resnet50_fpn", "no classification model"),
        ("nowhere.models:net", "there is no module 'nowhere' for the model 'nowhere.models:net'"),
        ("torch.nowhere:net", "there is no module 'torch.nowhere'"),
        ("torch.nn:Convolution", "the module 'torch.nn' has no 'Convolution'"),
        ("torch:__version__", "which cannot be called"),
    ],
)
def test_unknown(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        find_model(name)


def test_a_module_that_lacks_another_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacking.py").write_text("import nowhere_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        find_model("lacking:net")

"""Models by name."""

import importlib
from collections.abc import Callable

from torch import nn

from crossbn.compat import ensure_torchvision

Build = Callable[[], nn.Module]


def find_model(name: str) -> Build:
    """Return what builds the model, weights at random.

    Args:
        name: of one of torchvision's classification models, or `package.module:function` for a function without
            arguments that returns a model.

    Raises:
        ValueError: if there is no such model.
        ModuleNotFoundError: if it is one of torchvision's, which is not installed.

    Example:
        >>> find_model("torch.nn:ReLU")()
        ReLU()
    """
    return _given(name) if ":" in name else _torchvision(name)


def _given(name: str) -> Build:
    module_name, _, attribute = name.partition(":")
    try:
        build: Build = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; one that it imports is not
        raise ValueError(f"there is no module {error.name!r} for the model {name!r}") from None
    except AttributeError:
        raise ValueError(f"the module {module_name!r} has no {attribute!r}") from None
    if not callable(build):
        raise ValueError(f"{name!r} is {build!r}, which cannot be called")
    return build


def _torchvision(name: str) -> Build:
    ensure_torchvision()
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise ValueError(
            f"torchvision has no classification model {name!r}; it has {', '.join(known)}; a model of your own is "
            "named package.module:function"
        )
    return lambda: models.get_model(name, weights=None)

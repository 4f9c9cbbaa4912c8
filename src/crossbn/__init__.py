"""Cross-iteration batch normalization: networks with BatchNorm that train well on tiny batches."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossbn import compat, functional, nn
    from crossbn.conversion_report import ConversionReport
    from crossbn.convert import convert_, revert_
    from crossbn.folding import fold
    from crossbn.histories import history_state, load_history_state, reset_history_, set_window_
    from crossbn.messages import ConversionWarning
    from crossbn.nn.scope import stream
    from crossbn.recalibrate import recalibrate_
    from crossbn.schedules import window_for
    from crossbn.swap import SwapReport, swap_norm_

__all__ = [
    "ConversionReport",
    "ConversionWarning",
    "SwapReport",
    "compat",
    "convert_",
    "fold",
    "functional",
    "history_state",
    "load_history_state",
    "nn",
    "recalibrate_",
    "reset_history_",
    "revert_",
    "set_window_",
    "stream",
    "swap_norm_",
    "window_for",
]
__version__ = "0.1.0"

_HOMES = {
    "ConversionReport": "conversion_report",
    "ConversionWarning": "messages",
    "SwapReport": "swap",
    "convert_": "convert",
    "fold": "folding",
    "history_state": "histories",
    "load_history_state": "histories",
    "recalibrate_": "recalibrate",
    "reset_history_": "histories",
    "revert_": "convert",
    "set_window_": "histories",
    "stream": "nn.scope",
    "swap_norm_": "swap",
    "window_for": "schedules",
}
"""The module of each public name. It is imported, and torch with it, when the name is first used, so that the command
can answer `--help` without torch. No module has a public function's name: importing it would hide the function."""

if not TYPE_CHECKING:  # which would take any name for one that there is

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            found = getattr(import_module(f"crossbn.{_HOMES[name]}"), name)
        elif find_spec(f"crossbn.{name}") is not None:
            found = import_module(f"crossbn.{name}")
        else:
            raise AttributeError(f"module 'crossbn' has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

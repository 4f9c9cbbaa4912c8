"""Cross-iteration batch normalization: networks with BatchNorm that train well on tiny batches."""

from crossbn import compat, functional, nn
from crossbn.conversion_report import ConversionReport
from crossbn.convert import convert_, revert_
from crossbn.fold import fold
from crossbn.history_state import history_state, load_history_state, reset_history_, set_window_
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

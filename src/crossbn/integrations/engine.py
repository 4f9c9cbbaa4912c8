"""The training engine's names, from the one place that makes it importable.

Lightning imports torchmetrics, which imports torchvision, which fails beside a torch that its operators were not built
for; see `crossbn.compat`.
"""

from importlib.util import find_spec

from crossbn.compat import ensure_torchvision

if find_spec("torchvision") is not None:
    ensure_torchvision()

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchmetrics.classification import MulticlassAccuracy

__all__ = [
    "Callback",
    "Checkpoint",
    "LearningRateMonitor",
    "LightningDataModule",
    "LightningModule",
    "MisconfigurationException",
    "MulticlassAccuracy",
    "TensorBoardLogger",
    "TorchCheckpointIO",
    "Trainer",
    "rank_zero_only",
]

"""The images of a recipe, batch by batch, in a way that can be taken up again at any batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from crossbn.integrations.engine import LightningDataModule
from crossbn.lab.recipes.classification.loading import SpanLoader, loader_options
from crossbn.lab.recipes.classification.order import Draw, Order, Plan
from crossbn.lab.recipes.detection.sources import Images


class DetectionSupply(LightningDataModule):
    """Training batches of the span that the trainer is in, and test images, one by one, of this process.

    Args:
        images: to train and test on.
        plan: of the run.
        seed: of the run.
        workers: processes that prepare batches; 0 for this one.
    """

    def __init__(self, images: Images, plan: Plan, seed: int, workers: int) -> None:
        super().__init__()
        self.images, self.plan, self.seed, self.workers = images, plan, seed, workers
        self.spans = plan.spans
        self._loaders: list[SpanLoader] = []

    @property
    def waited(self) -> float:
        """Seconds that this process has waited for training batches so far."""
        return sum(loader.waited for loader in self._loaders)

    def train_dataloader(self) -> SpanLoader:
        """Return the batches of the present span; of the last one, if the run is over."""
        span = self.spans[min(self.trainer.current_epoch, len(self.spans) - 1)]
        order = Order(self.plan, span, self.seed, self.trainer.global_rank)
        self._loaders.append(SpanLoader(self.images.train, order, self.workers))
        return self._loaders[-1]

    def val_dataloader(self) -> DataLoader[Any]:
        """Return every so manieth test image, without repeating any."""
        mine = torch.arange(self.trainer.global_rank, len(self.images.test), self.trainer.world_size)
        draws = [Draw(part, 0) for part in mine.split(1)]
        return DataLoader(self.images.test, sampler=draws, **loader_options(self.workers))

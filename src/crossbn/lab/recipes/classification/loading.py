"""The images of a recipe, batch by batch, in a way that can be taken up again at any batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from crossbn.integrations.engine import LightningDataModule
from crossbn.lab.recipes.classification.order import Draw, Order, Plan
from crossbn.lab.recipes.classification.sources import Images

_MOST_PIXELS = 64 * 224 * 224  # of a batch to test on
_MOST_TEST_IMAGES = 500


def loader_options(workers: int) -> dict[str, Any]:
    """Return what all loaders have in common: an item is a whole batch, and the process's random numbers are let be."""
    return {
        "batch_size": None,
        "num_workers": workers,
        "generator": torch.Generator(),
        "pin_memory": torch.cuda.is_available(),
    }


class SpanLoader(DataLoader[Any]):
    """The batches of a span; its state is how many have been handed out, not how many were prepared ahead.

    Attributes:
        waited: seconds that somebody has waited for batches so far.
    """

    def __init__(self, dataset: Dataset[Any], order: Order, workers: int) -> None:
        super().__init__(dataset, sampler=order, **loader_options(workers))
        self.order = order
        self.waited = 0.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator is an iterator
        """Yield the batches that are left. Being a generator, it starts workers when it is first asked for one."""
        started = time.perf_counter()
        for batch in super().__iter__():
            self.order.done += 1
            self.waited += time.perf_counter() - started
            yield batch
            started = time.perf_counter()

    def state_dict(self) -> dict[str, int]:
        """Return what the engine puts into a checkpoint."""
        return {"done": self.order.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that have been handed out."""
        self.order.done = state["done"]


class Supply(LightningDataModule):
    """Training batches of the span that the trainer is in, and test batches, of this process.

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

    def train_dataloader(self) -> SpanLoader:
        """Return the batches of the present span; of the last one, if the run is over."""
        span = self.spans[min(self.trainer.current_epoch, len(self.spans) - 1)]
        order = Order(self.plan, span, self.seed, self.trainer.global_rank)
        return SpanLoader(self.images.train, order, self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return every so manieth test image, without repeating any."""
        mine = torch.arange(self.trainer.global_rank, len(self.images.test), self.trainer.world_size)
        size = max(1, min(_MOST_TEST_IMAGES, _MOST_PIXELS // self.images.size**2))
        draws = [Draw(part, 0) for part in mine.split(size)]
        return DataLoader(self.images.test, sampler=draws, **loader_options(self.workers))

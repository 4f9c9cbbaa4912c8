"""The images of a recipe, batch by batch, in a way that can be taken up again at any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from crossbn.integrations.engine import LightningDataModule
from crossbn.recipes.classification.images import Images
from crossbn.recipes.classification.order import Draw, Order, Plan

_MOST_PIXELS = 64 * 224 * 224  # of a batch to test on
_MOST_TEST_IMAGES = 500


class SpanLoader(DataLoader[Any]):
    """The batches of a span; its state is how many have been handed out, not how many were prepared ahead."""

    def __init__(self, dataset: Dataset[Any], order: Order, workers: int) -> None:
        # An item is a whole batch. With a generator of its own the loader leaves the process's random numbers alone.
        super().__init__(dataset, None, sampler=order, num_workers=workers, generator=torch.Generator())
        self.order = order

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator is an iterator
        """Yield the batches that are left. Being a generator, it starts workers when it is first asked for one."""
        for batch in super().__iter__():
            self.order.done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return what the engine puts into a checkpoint."""
        return {"done": self.order.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batches that have been handed out."""
        self.order.done = state["done"]


class Supply(LightningDataModule):
    """Training batches of the span that the trainer is in, and test batches."""

    def __init__(self, images: Images, plan: Plan, seed: int, workers: int = 0) -> None:
        super().__init__()
        self.images, self.plan, self.seed, self.workers = images, plan, seed, workers
        self.spans = plan.spans

    def train_dataloader(self) -> SpanLoader:
        """Return the batches of the present span."""
        span = self.spans[self.trainer.current_epoch]
        order = Order(self.plan, span, self.seed, self.trainer.global_rank)
        return SpanLoader(self.images.train, order, self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the test images, this process's share of them."""
        mine = torch.arange(self.trainer.global_rank, len(self.images.test), self.trainer.world_size)  # type: ignore[arg-type]
        size = max(1, min(_MOST_TEST_IMAGES, _MOST_PIXELS // self.images.size**2))
        draws = [Draw(part, 0) for part in mine.split(size)]
        return DataLoader(
            self.images.test,
            None,
            sampler=draws,
            num_workers=self.workers,
            generator=torch.Generator(),
        )

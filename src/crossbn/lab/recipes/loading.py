"""The images of a recipe, batch by batch, in a way that can be taken up again at any batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from crossbn.integrations.engine import LightningDataModule
from crossbn.lab import environment
from crossbn.lab.data.drawing import Draw
from crossbn.lab.recipes.order import Order, Plan

_MOST_WORKERS = 8


class Images(NamedTuple):
    """What a run trains and tests on."""

    train: Any
    test: Any
    """Data sets whose items are whole batches, by `Draw`."""
    classes: Any
    """The names of the classes, or how many there are."""
    channels: int = 3
    """That the network sees."""
    test_batch: int = 1
    """Images of a batch to test on."""
    in_memory: bool = False
    """Whether a batch is prepared in no time."""

    @property
    def workers(self) -> int:
        """Processes that prepare batches, unless somebody knows better."""
        return 0 if self.in_memory else min(_MOST_WORKERS, environment.usable_cores())


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


class Batches(LightningDataModule):
    """Training batches of the span that the trainer is in, and test batches, of this process.

    Args:
        images: to train and test on.
        plan: of the run.
        seed: of the run.
        workers: processes that prepare batches; 0 for this one, None for as many as the images need.
    """

    def __init__(self, images: Images, plan: Plan, seed: int, workers: int | None) -> None:
        super().__init__()
        self.images, self.plan, self.seed = images, plan, seed
        self.workers = images.workers if workers is None else workers
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
        draws = [Draw(part, 0) for part in mine.split(self.images.test_batch)]
        return DataLoader(self.images.test, sampler=draws, **loader_options(self.workers))

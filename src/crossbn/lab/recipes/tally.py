"""Sums over the forwards since the last point of the curve."""

from __future__ import annotations

import torch
from torch import Tensor


class Tally:
    """Loss and correct images, in tensors that nobody waits for.

    Attributes:
        loss: sum over forwards.
        correct: images that were classified correctly.
        forwards: how many.
        images: how many.
    """

    def __init__(self) -> None:
        self.loss: Tensor | float = 0.0
        self.correct: Tensor | int = 0
        self.forwards = 0
        self.images = 0

    def add(self, loss: Tensor, scores: Tensor, classes: Tensor) -> None:
        """Count one forward and its images."""
        self.add_loss(loss)
        self.correct = self.correct + (scores.detach().argmax(1) == classes).sum()
        self.images += len(classes)

    def add_loss(self, loss: Tensor) -> None:
        """Count one forward of which only the loss is told."""
        self.loss = self.loss + loss.detach().double()
        self.forwards += 1

    @property
    def mean_loss(self) -> float:
        """Mean loss so far; waits for the device."""
        return float(self.loss) / max(1, self.forwards)

    def sums(self, device: torch.device | str = "cpu") -> Tensor:
        """Return loss, correct images, forwards and images as one tensor."""
        parts = (self.loss, self.correct, self.forwards, self.images)
        return torch.stack([torch.as_tensor(each, dtype=torch.float64, device=device) for each in parts])

    @classmethod
    def of(cls, sums: Tensor, device: torch.device) -> Tally:
        """Return the tally whose `sums` these are; it goes on bit for bit."""
        tally = cls()
        tally.loss = sums[0].to(device)
        tally.correct = sums[1].long().to(device)
        tally.forwards, tally.images = int(sums[2]), int(sums[3])
        return tally

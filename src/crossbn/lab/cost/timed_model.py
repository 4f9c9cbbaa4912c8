"""A model in training and in use, as it is timed."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from crossbn.folding import fold
from crossbn.histories import history_state
from crossbn.lab.cost.memory import peak_above_start

# So small that the weights stay where they are: hundreds of steps on the same batch must not drive gradients into the
# range of subnormal numbers, which are slow.
LEARNING_RATE = 1e-5


class TimedModel:
    """A model, its optimizer and a batch.

    Args:
        model: on the device of the batch.
        batch: its input.
        compiled: whether the model is called through `torch.compile`.
    """

    def __init__(self, model: nn.Module, batch: Tensor, compiled: bool = False) -> None:
        self.model = model
        self.batch = batch
        self.compiled = compiled
        self._call = torch.compile(model) if compiled else model
        self.optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)

    def loss(self) -> Tensor:
        """Run the model; return the mean square of what it puts out."""
        outputs = _tensors(self._call(self.batch))
        return torch.stack([output.float().square().mean() for output in outputs]).sum()

    def train_step(self) -> None:
        """Clear the gradients, run forward and backward, let the optimizer (SGD with momentum) step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimizer.step()

    @torch.no_grad()
    def infer(self) -> None:
        """Run the model without gradients, in the mode that it is in."""
        self._call(self.batch)

    def folded(self) -> "TimedModel | None":
        """Return the model with its norms folded away, or None if none of them can be."""
        model = fold(self.model, (self.batch,))
        if _count_norms(model) == _count_norms(self.model):
            return None
        return TimedModel(model, self.batch, self.compiled)

    def history_bytes(self) -> int:
        """Return the size of what the norms remember of earlier steps."""
        return sum(tensor.nbytes for tensor in history_state(self.model).values())

    def peak_bytes(self) -> int:
        """Return what is in use at the height of a training step."""
        self.optimizer.zero_grad(set_to_none=True)  # the profiler cannot see the end of what it has not seen begin
        above = peak_above_start(self.train_step, self.batch.device)
        return self.persistent_bytes() + above

    def persistent_bytes(self) -> int:
        """Return what is there between two steps: weights, gradients, buffers, optimizer, history and batch."""
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        tensors = [self.batch, *parameters, *gradients, *self.model.buffers(), *_tensors(self.optimizer.state)]
        return sum(tensor.nbytes for tensor in tensors) + self.history_bytes()


def _count_norms(model: nn.Module) -> int:
    return sum(isinstance(module, _BatchNorm) for module in model.modules())


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested mappings and sequences."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]

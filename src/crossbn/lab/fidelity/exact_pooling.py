"""Cross-iteration norms without anything outdated: several steps in one forward, all with today's weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from crossbn import functional as C  # the library's F
from crossbn.lab.fidelity.batches import BatchError
from crossbn.nn import CrossIterBatchNorm
from crossbn.ops.autograd import Context, normalize

Windows = Mapping[CrossIterBatchNorm, Sequence[int]]
"""Steps that each norm pooled at each step, that step included."""


@contextmanager
def exact_pooling(sizes: Sequence[int], windows: Windows) -> Iterator[None]:
    """Let norms take their input for several steps, one after another, of `sizes` examples.

    Each step is normalized with the moments of itself and the steps before it, as many as its window has: what the
    norm would have computed at that step, had the weights been today's all along. Histories and running statistics
    have no part in it.

    Example:
        >>> norm = nn.Sequential(CrossIterBatchNorm(1, window=2))[0]
        >>> with exact_pooling([2, 2], {norm: [1, 2]}), torch.no_grad():
        ...     y = norm(torch.tensor([[-1.0], [1.0], [2.0], [4.0]]))
        >>> [round(float(value), 2) for value in y]  # (2 - 1.5) / sqrt(3.25) is 0.28
        [-1.0, 1.0, 0.28, 1.39]
    """
    try:
        for norm, own in windows.items():
            norm.__dict__["_train_forward"] = partial(normalize_steps, norm, sizes, own)
        yield
    finally:
        for norm in windows:
            norm.__dict__.pop("_train_forward", None)


def normalize_steps(norm: CrossIterBatchNorm, sizes: Sequence[int], windows: Sequence[int], x: Tensor) -> Tensor:
    """Normalize each step with the moments of the last steps.

    Raises:
        BatchError: if the rows of `x` are not the same number for each example.
    """
    parts = split_steps(x, sizes, norm.label)
    moments = [torch.stack(C.batch_moments(part)) for part in parts]
    normalized = []
    for i, (part, window) in enumerate(zip(parts, windows, strict=True)):
        past = moments[max(0, i + 1 - window) : i]
        past_mean, past_var = torch.stack(past, 1) if past else moments[i].unsqueeze(1)[:, :0]
        mean, var = moments[i]
        pooled = C.pool(mean, var, past_mean, past_var)
        normalized.append(
            normalize(part, pooled.mean, pooled.var, norm.weight, norm.bias, Context(pooled.share, norm.eps))
        )
    return torch.cat(normalized)


def split_steps(x: Tensor, sizes: Sequence[int], norm: str) -> tuple[Tensor, ...]:
    """Return the rows of each step.

    Raises:
        BatchError: if they are not the same number for each example.
    """
    rows, rest = divmod(len(x), sum(sizes))
    if rest:
        raise BatchError(f"the input of {norm}, {len(x)} rows, cannot be told apart into {sum(sizes)} examples")
    return x.split([size * rows for size in sizes])

"""True moments of earlier batches at today's weights: through one layer, or through the whole network."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn import functional as C  # the library's F
from crossbn.convert import cross_iteration_norms
from crossbn.lab.fidelity.batches import BatchError, Call, count_examples, join_calls
from crossbn.lab.fidelity.comparison import Moments
from crossbn.lab.fidelity.runs import Run, own_bias
from crossbn.nn import CrossIterBatchNorm
from crossbn.ops.autograd import Context, normalize

SEVERAL = "it runs several times in a forward"
UNUSED = "it does not run"


class Pooling(NamedTuple):
    """What a run of channels is about to pool: so many steps, the next one included, and with which weights."""

    channels: slice
    window: int
    decay: float = 1.0
    noise_and_drift: tuple[Tensor, Tensor] | None = None
    """With automatic weights, what they follow from."""
    remembered: Sequence[tuple[Tensor, Tensor, int]] = ()
    """Moments [C] and positions of earlier steps, the oldest first."""

    def pool(self, first: "Pooling", steps: Sequence[tuple[Tensor, Tensor, int]], images: int) -> C.Pooled:
        """Pool moments [C] of steps, the oldest first, each of so many positions; `images` are the last one's.

        Of steps before the oldest, only what was remembered when `first` was about to pool is known.
        """
        own = [(mean[self.channels], var[self.channels], count) for mean, var, count in steps]
        *past, (mean, var, today) = [*first.remembered, *own][-self.window :]
        past.reverse()
        past_mean = torch.stack([each for each, _, _ in past]) if past else mean.new_empty(0, len(mean))
        past_var = torch.stack([each for _, each, _ in past]) if past else past_mean
        relative = None
        if self.noise_and_drift is not None:
            count = mean.new_tensor([step[2] for step in past])
            relative = C.best_weights(*self.noise_and_drift, count, today, C.gradient_price(images))
        elif self.decay != 1:
            relative = torch.pow(self.decay, torch.arange(1, 1 + len(past), dtype=mean.dtype, device=mean.device))
        return C.pool(mean, var, past_mean, past_var, relative)


Poolings = Mapping[CrossIterBatchNorm, Sequence[Sequence[Pooling]]]
"""What each norm pooled at each step, by run of its channels."""


def next_pooling(norm: CrossIterBatchNorm) -> list[Pooling]:
    """Return what the runs of a norm's channels will pool in the next training forward."""
    found, start = [], 0
    for segment in norm.segments:
        history, channels = segment.history, slice(start, start + segment.channels)
        start, steps, weights = channels.stop, min(int(history.num_steps), history.slots), None
        if norm.settings.weights == "auto" and steps:
            variogram = history["variogram"].clone()
            weights = C.fit_line(
                variogram, (torch.arange(len(variogram), device=variogram.device) < steps).to(variogram)
            )
        past, bias = segment.past(), own_bias(segment)
        counts = history["count"].tolist()
        order = [(int(history.num_steps) - age) % max(steps, 1) for age in range(1, steps + 1)]
        remembered = [
            (past.compensated_mean[i] + bias, past.compensated_var[i].clamp_min(0), int(counts[order[i]]))
            for i in reversed(range(steps))
        ]
        found.append(Pooling(channels, steps + 1, norm.settings.rate, weights, remembered))
    return found


@contextmanager
def exact_pooling(sizes: Sequence[int], poolings: Poolings) -> Iterator[None]:
    """Let norms take their input for several steps, one after another, of `sizes` examples.

    Each step is normalized with the moments of itself and the steps before it, as many as the norm pooled then and with
    the weights of then: what it would have computed at that step, had the network's weights been today's all along.
    Histories and running statistics have no part in it.

    Example:
        >>> norm = nn.Sequential(CrossIterBatchNorm(1, window=2))[0]
        >>> poolings = [[Pooling(slice(None), window)] for window in (1, 2)]
        >>> with exact_pooling([2, 2], {norm: poolings}), torch.no_grad():
        ...     y = norm(torch.tensor([[-1.0], [1.0], [2.0], [4.0]]))
        >>> [round(float(value), 2) for value in y]  # (2 - 1.5) / sqrt(3.25) is 0.28
        [-1.0, 1.0, 0.28, 1.39]
    """
    with _forwards({norm: partial(normalize_steps, norm, sizes, own) for norm, own in poolings.items()}):
        yield


@contextmanager
def _forwards(own: Mapping[CrossIterBatchNorm, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Let norms do something else in a training forward."""
    try:
        for norm, forward in own.items():
            norm.__dict__["_train_forward"] = forward
        yield
    finally:
        for norm in own:
            norm.__dict__.pop("_train_forward", None)


def _normalize_together(norm: CrossIterBatchNorm, x: Tensor) -> Tensor:
    """Do what a batch norm does with whatever it is given, without running statistics."""
    return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)


def normalize_steps(
    norm: CrossIterBatchNorm, sizes: Sequence[int], poolings: Sequence[Sequence[Pooling]], x: Tensor
) -> Tensor:
    """Normalize each step with the moments of the last steps.

    Raises:
        BatchError: if the rows of `x` are not the same number for each example.
    """
    parts = split_steps(x, sizes, norm.label)
    steps = [(*C.batch_moments(part), part.numel() // part.shape[1]) for part in parts]
    normalized = []
    for i, (part, own) in enumerate(zip(parts, poolings, strict=True), start=1):
        pooled = [each.pool(first, steps[:i], len(part)) for each, first in zip(own, poolings[0], strict=True)]
        mean, var = (torch.cat([each[which] for each in pooled]) for which in (0, 1))
        share = torch.cat([each.share.expand_as(each.mean) for each in pooled])
        normalized.append(normalize(part, mean, var, norm.weight, norm.bias, Context(share, norm.eps)))
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


def same_layer_moments(run: Run, operator: nn.Module, inputs: Sequence[Tensor]) -> Moments:
    """Return the moments, without bias, of what the run's operator makes of `inputs` with today's weights.

    To be called inside `undisturbed`.
    """
    found = []
    for y in inputs:
        # Not the module's call, whose hooks would take it for a step; in full precision, as far as the weights have it.
        with torch.autocast(y.device.type, enabled=False):
            x = operator.forward(y.to(run.segment.producers[0].weight.dtype))
        found.append(_moments(x, run))
    return _stack(found)


def network_moments(
    model: nn.Module, runs: Sequence[Run], calls: Sequence[Call], poolings: Poolings | None
) -> dict[str, Moments | str]:
    """Return the moments of each run at each of several steps that are done again with today's weights.

    At each step every norm pools the steps that it pooled then, with the same weights, exactly: no statistics are
    outdated. Norms that are left alone, if they look at the batch, look at all steps together. To be called inside
    `undisturbed`.

    Args:
        model: converted, in training mode.
        runs: what to look at.
        calls: the steps, the oldest first.
        poolings: of every cross-iteration norm at each step; None to run all steps together as one batch.

    Returns:
        By layer, the moments without bias, or a phrase that says why there are none.

    Raises:
        BatchError: if the batches cannot be put together, or told apart again.
    """
    sizes = [count_examples(call) for call in calls]
    joined = join_calls(calls)
    found: dict[str, Moments | str] = {}

    def look_for(run: Run) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(_: nn.Module, args: tuple[Any, ...]) -> None:
            parts = split_steps(args[0][:, run.channels], sizes, run.layer)
            again = run.layer in found
            found[run.layer] = SEVERAL if again else _stack([_moments(part, run) for part in parts])

        return look

    handles = [run.norm.register_forward_pre_hook(look_for(run)) for run in runs]
    try:
        norms = cross_iteration_norms(model).values()
        together = _forwards({norm: partial(_normalize_together, norm) for norm in norms})
        with together if poolings is None else exact_pooling(sizes, poolings):
            model(*joined.args, **joined.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {run.layer: found.get(run.layer, UNUSED) for run in runs}


def _moments(x: Tensor, run: Run) -> tuple[Tensor, Tensor, int]:
    mean, var = C.batch_moments(x)
    return mean - own_bias(run.segment), var, x.numel() // x.shape[1]


def _stack(parts: Sequence[tuple[Tensor, Tensor, int]]) -> Moments:
    means, variances, counts = zip(*parts, strict=True)
    return Moments(torch.stack(means), torch.stack(variances), torch.tensor(counts, device=means[0].device))

"""True moments of earlier batches at today's weights: through one layer, or through the whole network."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.convert import cross_iteration_norms
from crossbn.functional import batch_moments
from crossbn.lab.fidelity.batches import Call, count_examples, join_calls
from crossbn.lab.fidelity.causes import run_together
from crossbn.lab.fidelity.comparison import Moments
from crossbn.lab.fidelity.exact_pooling import Windows, exact_pooling, split_steps
from crossbn.lab.fidelity.runs import Run

SEVERAL = "it runs several times in a forward"
UNUSED = "it does not run"


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
    model: nn.Module, runs: Sequence[Run], calls: Sequence[Call], windows: Windows | None
) -> dict[str, Moments | str]:
    """Return the moments of each run at each of several steps that are done again with today's weights.

    At each step every norm pools as many steps as it did then, exactly: no statistics are outdated. Norms that
    are left alone, if they look at the batch, look at all steps together. To be called inside `undisturbed`.

    Args:
        model: converted, in training mode.
        runs: what to look at.
        calls: the steps, the oldest first.
        windows: of every cross-iteration norm at each step; None to run all steps together as one batch.

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
        with run_together(norms) if windows is None else exact_pooling(sizes, windows):
            model(*joined.args, **joined.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {run.layer: found.get(run.layer, UNUSED) for run in runs}


def _moments(x: Tensor, run: Run) -> tuple[Tensor, Tensor, int]:
    mean, var = batch_moments(x)
    return mean - run.own_bias(), var, x.numel() // x.shape[1]


def _stack(parts: Sequence[tuple[Tensor, Tensor, int]]) -> Moments:
    means, variances, counts = zip(*parts, strict=True)
    return Moments(torch.stack(means), torch.stack(variances), torch.tensor(counts, device=means[0].device))

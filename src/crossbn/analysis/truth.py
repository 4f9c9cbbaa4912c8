"""True moments of earlier batches at today's weights: through one layer, or through the whole network."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.analysis.batches import Call, count_examples, join_calls
from crossbn.analysis.comparison import Moments
from crossbn.analysis.runs import Run
from crossbn.analysis.undisturbed import with_batch_statistics
from crossbn.functional import batch_moments
from crossbn.nn import CrossIterBatchNorm


def same_layer_moments(run: Run, operator: nn.Module, inputs: Sequence[Tensor]) -> Moments:
    """Return the moments, without bias, of what the run's operator makes of `inputs` with today's weights.

    To be called inside `undisturbed`.
    """
    found = []
    for y in inputs:
        # Not the module's call, whose hooks would take it for a step; in full precision, as far as the weights have it.
        with torch.autocast(y.device.type, enabled=False):
            x = operator.forward(y.to(run.source.producers[0].weight_value().dtype))
        found.append(_moments(x, run))
    return _stack(found)


def network_moments(model: nn.Module, runs: Sequence[Run], calls: Sequence[Call]) -> dict[str, Moments | str]:
    """Return the moments of each run for each batch, all of them normalized together with today's weights.

    Every norm takes its statistics of all the batches: what pooling over the window would give if nothing were
    outdated. To be called inside `undisturbed`.

    Args:
        model: converted, in training mode.
        runs: what to look at.
        calls: a batch each.

    Returns:
        By layer, the moments without bias, or a phrase that says why there are none.

    Raises:
        BatchError: if the batches cannot be put together.
    """
    sizes = [count_examples(call) for call in calls]
    joined = join_calls(calls)
    found: dict[str, Moments | str] = {run.layer: "it does not run" for run in runs}
    called: set[str] = set()

    def look_for(run: Run) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0][:, run.channels]
            if run.layer in called:
                found[run.layer] = "it runs several times in a forward"
            elif len(x) % sum(sizes):
                found[run.layer] = f"its input of {len(x)} rows cannot be told apart into {sum(sizes)} examples"
            else:
                parts = x.split([size * (len(x) // sum(sizes)) for size in sizes])
                found[run.layer] = _stack([_moments(part, run) for part in parts])
            called.add(run.layer)

        return look

    norms = [module for module in model.modules() if isinstance(module, CrossIterBatchNorm)]
    handles = [run.norm.register_forward_pre_hook(look_for(run)) for run in runs]
    try:
        with with_batch_statistics(norms):
            model(*joined.args, **joined.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _moments(x: Tensor, run: Run) -> tuple[Tensor, Tensor, int]:
    mean, var = batch_moments(x)
    return mean - run.own_bias(), var, x.numel() // x.shape[1]


def _stack(parts: Sequence[tuple[Tensor, Tensor, int]]) -> Moments:
    means, variances, counts = zip(*parts, strict=True)
    return Moments(torch.stack(means), torch.stack(variances), torch.tensor(counts, device=means[0].device))

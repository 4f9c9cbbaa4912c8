"""Watching a training: how close are the statistics that are remembered to the true ones?"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from crossbn.convert import cross_iteration_norms
from crossbn.lab.fidelity.batches import BatchError, Call
from crossbn.lab.fidelity.comparison import Moments, Pair, compare, tell_causes
from crossbn.lab.fidelity.records import SAME_LAYER, WHOLE_NETWORK, CauseRecord, FidelityRecord
from crossbn.lab.fidelity.runs import Run, find_runs
from crossbn.lab.fidelity.truth import Pooling, Poolings, network_moments, next_pooling, same_layer_moments
from crossbn.lab.fidelity.undisturbed import undisturbed
from crossbn.nn import CrossIterBatchNorm
from crossbn.nn.recompute import Pass, current_pass

Batch = TypeVar("Batch")


@dataclass
class _Kept:
    """A training step that will be looked back on."""

    call: Call
    pushed: dict[str, int]
    poolings: dict[CrossIterBatchNorm, list[Pooling]]
    inputs: dict[nn.Module | None, Tensor] = field(default_factory=dict)


class FidelityProbe:
    """Measures, every `every` training steps, how far remembered statistics are from the true ones, and why.

    It changes nothing: the training is bit for bit the one without it. In the window - 1 steps before a measurement it
    keeps the inputs of the operators that feed the layers (about as much memory as the activations of these steps;
    `layers` limits it), in twice as many the batches. At the measurement it runs those batches once without gradients,
    and otherwise it does nothing. Nothing is copied: batches must not be overwritten in place. For models that run
    eagerly; of a wrapper (DDP) give the module inside.

    Args:
        model: converted.
        every: steps from one measurement to the next.
        layers: names of the norms to look at; None for all.

    Raises:
        ValueError: if the model has no cross-iteration norm, a name is not one's, or `every` is below 1.

    Example:
        >>> import crossbn
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
        >>> report = crossbn.convert_(model, window=2)
        >>> with FidelityProbe(model, every=2) as probe:
        ...     outputs = [model(torch.randn(4, 3)) for _ in range(3)]
        >>> [(record.step, record.layer, record.age, record.truth) for record in probe.records]
        [(2, '1', 1, 'same layer'), (2, '1', 1, 'whole network')]
    """

    def __init__(self, model: nn.Module, *, every: int = 100, layers: Collection[str] | None = None) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.model = model
        self.every = every
        self.records: list[FidelityRecord] = []
        self.causes: list[CauseRecord] = []
        self.left_out: dict[str, str] = {}
        self.steps = 0
        self._runs = find_runs(model, layers)
        self._norms = list(cross_iteration_norms(model).values())
        for run in self._runs:
            if run.operator is None:
                feeder = "a sum, or by an operator without a module" if run.segment.operators else "no operator"
                self.left_out[f"{run.layer}, {SAME_LAYER}"] = f"it is fed by {feeder}"
        self._kept: list[_Kept] = []
        self._entry: Any = None
        self._watches: list[Any] = []
        self._measuring = False

    def __enter__(self) -> FidelityProbe:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> FidelityProbe:
        """Let every training forward of the model be a step, without `step` being called."""
        if self._entry is None:
            self._entry = self.model.register_forward_pre_hook(self._see_forward, with_kwargs=True)
        return self

    def detach(self) -> None:
        """Let go of the model and of what is kept; the records stay."""
        if self._entry is not None:
            self._entry.remove()
        self._entry = None
        self._forget()

    def _see_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.model.training and not self._measuring and current_pass() is Pass.TRAIN:
            self.step(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> list[FidelityRecord]:
        """Measure if it is time; to be called before each training forward, with the same arguments.

        Returns:
            What was found now; `records` has everything found so far.
        """
        call, found = Call(args, kwargs), []
        if self.steps % self.every == 0 and self._kept:
            self._measuring = True
            try:
                with undisturbed(self.model):
                    found = self._measure()
            finally:
                self._measuring = False
            self.records += found
        self._keep(call)
        self.steps += 1
        return found

    def _keep(self, call: Call) -> None:
        """Keep the step if the next measurement looks back on it."""
        memory = max(norm.settings.window for norm in self._norms) - 1
        ahead = self.every - self.steps % self.every
        if ahead > 2 * memory:
            self._forget()
            return
        # The steps before those that are compared are there for what the norms pooled at these.
        with undisturbed(self.model):
            poolings = {norm: next_pooling(norm) for norm in self._norms}
        self._kept = [*self._kept, _Kept(call, self._pushed(), poolings)][-2 * memory :]
        for old in self._kept[:-memory]:
            old.inputs.clear()
        if ahead <= memory and not self._watches:
            operators = dict.fromkeys(run.operator for run in self._runs if run.operator is not None)
            self._watches = [each.register_forward_hook(self._see_operator, with_kwargs=True) for each in operators]

    def _see_operator(self, operator: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Tensor) -> None:
        if self._kept and current_pass() is Pass.TRAIN:
            self._kept[-1].inputs[operator] = (args[0] if args else kwargs["input"]).detach()

    def _forget(self) -> None:
        for handle in self._watches:
            handle.remove()
        self._watches, self._kept = [], []

    def _pushed(self) -> dict[str, int]:
        return {run.layer: int(run.segment.history.num_steps) for run in self._runs}

    def _measure(self) -> list[FidelityRecord]:
        now = self._pushed()
        ages = {run.layer: self._ages(run, now) for run in self._runs}
        # A batch that nobody remembers was not finite, or belongs to burn-in.
        used = [i for i in range(len(self._kept)) if any(i in known for known in ages.values())]
        if not used:
            return []
        poolings = {norm: [self._kept[i].poolings[norm] for i in used] for norm in self._norms}
        recent = [i for i in used if any(ages[run.layer].get(i, math.inf) <= run.memory for run in self._runs)]
        truths, together = self._run_again(used, poolings), self._run_again(recent, None)
        found = []
        for run in self._runs:
            known = {i: age for i, age in ages[run.layer].items() if age <= run.memory}
            if not known:
                continue
            seen = {i: self._kept[i].inputs[run.operator] for i in known if run.operator in self._kept[i].inputs}
            rows = {age: used.index(i) for i, age in known.items()}
            stages = [(truths[run.layer], rows), (together[run.layer], {known[i]: recent.index(i) for i in seen})]
            if run.operator is not None and seen:
                same = same_layer_moments(run, run.operator, list(seen.values()))
                own_rows = {known[i]: row for row, i in enumerate(seen)}
                found += self._compare(run, SAME_LAYER, same, own_rows)
                self._explain(run, [(same, own_rows), *stages])
            found += self._compare(run, WHOLE_NETWORK, truths[run.layer], rows)
        return found

    def _run_again(self, used: Sequence[int], poolings: Poolings | None) -> dict[str, Moments | str]:
        try:
            return network_moments(self.model, self._runs, [self._kept[i].call for i in used], poolings)
        except BatchError as error:
            return {run.layer: str(error) for run in self._runs}

    def _explain(self, run: Run, truths: Sequence[tuple[Moments | str, dict[int, int]]]) -> None:
        """Note why the run's statistics are not those of all batches run together; truths have the row of each age."""
        stages, past = [], run.segment.past()
        for truth, rows in truths:
            if isinstance(truth, str) or not torch.isfinite(truth.mean + truth.var).all():
                return
            stages.append((truth, rows))
        together = stages[-1][0]
        for age in stages[0][1]:
            first = Pair(past.compensated_mean[age - 1], past.compensated_var[age - 1].clamp_min(0))
            others = [Pair(truth.mean[rows[age]], truth.var[rows[age]]) for truth, rows in stages]
            self.causes += tell_causes(self.steps, run.layer, age, [first, *others], together, run.norm.eps)

    def _ages(self, run: Run, now: dict[str, int]) -> dict[int, int]:
        """Return the ages of the kept steps that entered the run's history, each of them once."""
        if run.norm.settings.active_group is not None:
            self.left_out[run.layer] = "its statistics are those of several processes"
            return {}
        pushed = [kept.pushed[run.layer] for kept in self._kept] + [now[run.layer]]
        ages = {i: pushed[-1] - pushed[i] for i in range(len(self._kept)) if pushed[i + 1] - pushed[i] == 1}
        return {i: age for i, age in ages.items() if age > 0}  # unless it has been cleared since

    def _compare(self, run: Run, kind: str, truth: Moments | str, rows: dict[int, int]) -> list[FidelityRecord]:
        """Compare what is remembered of each age with the row of the truth that is of that age."""
        if isinstance(truth, str) or not torch.isfinite(truth.mean + truth.var).all():
            self.left_out[f"{run.layer}, {kind}"] = truth if isinstance(truth, str) else "it is not finite"
            return []
        past, eps = run.segment.past(), run.norm.eps
        return [
            FidelityRecord(self.steps, run.layer, age, kind, compare(past, age, truth, row, eps))
            for age, row in sorted(rows.items())
        ]


def fidelity(
    model: nn.Module,
    batches: Iterable[Batch],
    train_step: Callable[[Batch], object],
    *,
    steps: int | None = None,
    every: int = 20,
    layers: Collection[str] | None = None,
) -> list[FidelityRecord]:
    """Train a converted model and measure on the way how close its remembered statistics are to the true ones.

    Args:
        model: converted; `train_step` calls it.
        batches: a loader, or anything that yields what `train_step` takes.
        train_step: does a training step: forward, backward, optimizer.
        steps: no more than this many; None for all batches.
        every: steps from one measurement to the next.
        layers: names of the norms to look at; None for all.

    Raises:
        ValueError: as `FidelityProbe` does.

    Example:
        >>> import crossbn
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
        >>> report = crossbn.convert_(model, window=3)
        >>> records = fidelity(model, torch.randn(9, 4, 3), lambda batch: model(batch).sum().backward(), every=4)
        >>> sorted({(record.step, record.age) for record in records})
        [(4, 1), (4, 2), (8, 1), (8, 2)]
    """
    with FidelityProbe(model, every=every, layers=layers) as probe:
        for batch in islice(batches, steps):
            train_step(batch)
    return probe.records

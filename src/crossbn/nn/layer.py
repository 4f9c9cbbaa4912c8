"""BatchNorm over the last few training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crossbn import functional as C  # the library's F
from crossbn import ops
from crossbn.functional import Settings
from crossbn.messages import say
from crossbn.nn.batch_norm import Belief, GuardedBatchNorm, has_seen_something
from crossbn.nn.feeds import Feed, Feeds, Plain, SegmentInput
from crossbn.nn.producer import Operator, Producer
from crossbn.nn.recompute import Pass, RecomputeCache, Record, current_pass, may_be_recomputed
from crossbn.nn.scope import at_end_of_forward, forward_number, next_call
from crossbn.nn.segment import Segment, WeightUnknown
from crossbn.ops import compiled
from crossbn.ops.autograd import Context, Run, attach, normalize
from crossbn.ops.compiled import say_while_compiling
from crossbn.pairing.carrying import carried_to_call, leave
from crossbn.torch_internals import BatchNormBase, inside_functorch, is_exporting, is_tracing, saved_tensor_hooks

_Used = tuple[list[ops.Statistics], Feed]
"""The statistics that a step used, and of which segments they are."""
_OWN_STATE = (
    *("settings", "label", "burnt", "feeds", "belief", "plain_reason"),
    *("_recompute_cache", "_said", "_is_replica"),
)


class CrossIterBatchNorm(GuardedBatchNorm):
    """BatchNorm whose training statistics are pooled over the last `window` steps, for input of any rank.

    Statistics of earlier steps are corrected for the weight changes since with a Taylor polynomial in the
    weights of the operator that feeds the norm, which it reads from the graph; where the graph does not tell, `attach_`
    does. Without an operator they are pooled as they are. Evaluation, parameters, buffers and `state_dict` are those of
    `torch.nn.BatchNorm*d`.

    Args:
        num_features: C of the input [N, C, ...].
        eps: added to the variance, inside the root.
        momentum: of the running statistics; None for a cumulative average.
        affine: whether there are gamma and beta.
        track_running_stats: whether there are running statistics.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        config: all options as one object.
        options: or one by one: window, burn_in, order, positions, ..., see `Settings`.

    Example:
        >>> conv, norm = nn.Conv2d(3, 8, 3, bias=False), CrossIterBatchNorm(8, window=4)
        >>> norm(conv(torch.randn(2, 3, 6, 6))).shape
        torch.Size([2, 8, 4, 4])
    """

    settings: Settings
    burnt: Tensor
    """Training forwards of burn-in that are over."""
    feeds: Feeds
    belief: Belief | None
    """With a prior, if the running statistics were of a training when it was given."""
    plain_reason: str | None
    """Why the norm was BatchNorm at its latest plain step."""
    torch_type: type[BatchNormBase] = nn.SyncBatchNorm
    """Of torch's norms only this one takes any rank."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        config: Settings | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self._become_cross_iteration_(Settings.of(config, options), type(self).__name__, unpaired="pool")
        like = torch.empty(0, device=device, dtype=dtype)
        self.feeds.set_main_([Segment(num_features, (), self.settings, like)])

    def _become_cross_iteration_(self, settings: Settings, label: str, unpaired: str = "bn") -> None:
        """Start the life of a cross-iteration norm, unattached, in a module that was a BatchNorm until now."""
        self.settings = settings
        self.label = label or type(self).__name__
        self.burnt = torch.zeros((), dtype=torch.int64, device="cpu")  # read by Python, never by a kernel
        self.feeds = Feeds(self, unpaired)
        self._make_belief()
        self.plain_reason = None
        self._recompute_cache = RecomputeCache()
        self._said: set[str] = set()
        self._is_replica = False

    def _make_belief(self) -> None:
        running = self._running if self.settings.prior is not None else None
        is_trained = running is not None and has_seen_something(*running[:2])
        self.belief = Belief(self.feeds.like()) if is_trained else None

    def set_drift_(self, drift: Tensor | None) -> None:
        """Let the belief be as far from the checkpoint as a saved one; None for a norm that began without."""
        self.belief = None if drift is None else Belief(self.feeds.like())
        if self.belief is not None and drift is not None:
            self.belief.drift.copy_(drift)

    def _become_plain_(self) -> None:
        """Be the norm again that this one stands for."""
        self.feeds.release()
        for name in _OWN_STATE:
            delattr(self, name)
        plain = self.plain_type()
        if issubclass(plain, nn.SyncBatchNorm):
            self.__dict__.setdefault("process_group", None)
        self.__class__ = plain  # type: ignore[assignment]

    @classmethod
    def plain_type(cls) -> type[BatchNormBase]:
        """Return the norm that this one stands for."""
        return cls.torch_type

    def attach_(self, *producers: nn.Module) -> CrossIterBatchNorm:
        """Name the convolution, transposed convolution or linear layer whose output is normalized.

        Eager code reads that from the graph; `torch.compile` and activation checkpointing have to be told. Several
        producers are summed into it (`norm(conv1(a) + conv2(b) + rest)`).

        Raises:
            TypeError: if a producer is something else.
            ValueError: if it has another number of channels than the norm.
        """
        for module in producers:
            if not C.is_linear_operator(module):
                raise TypeError(
                    f"{self.label}: a producer must be a convolution, transposed convolution or linear layer with "
                    f"torch's own forward, got {module}"
                )
            if (channels := C.geometry_of(module).out_channels) != self.num_features:
                raise ValueError(
                    f"{self.label}: normalizes {self.num_features} channels, but its producer {module} has {channels}"
                )
        operators = [Operator.of_producer(Producer(module)) for module in producers]
        self.feeds.set_main_([Segment(self.num_features, operators, self.settings, self.feeds.like())])
        return self

    @property
    def segments(self) -> Feed:
        """What feeds the norm at its usual call, channel run by channel run."""
        return self.feeds.main

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [N, C, ...]."""
        if not self.training or is_exporting():
            return super().forward(x)  # which checks as well
        self._check_input_dim(x)
        self._check_vectors()
        if x.numel() == 0:
            return self._batch_norm(x, update=False)
        try:
            return self._compiled_forward(x) if torch.compiler.is_compiling() else self._train_forward(x)
        finally:
            for segment in self.feeds.main:
                segment.finish_step()

    def _train_forward(self, x: Tensor) -> Tensor:
        if inside_functorch() or is_tracing():
            self._say(Plain("inside a transform of torch.func, or traced", self.settings.window > 1))
            return super().forward(x)
        run, settings = current_pass(), self.settings
        if run is Pass.RECOMPUTE and (record := self._recompute_cache.find(ops.moments(x.detach())[0])) is not None:
            return self._repeat(x, record)
        used: _Used | None = None
        in_burn_in = settings.window == 1 or (settings.burn_in > 0 and int(self.burnt) < settings.burn_in)
        if in_burn_in and settings.active_group is None:
            y = self._batch_norm(x, update=True)
        else:
            y, used = self._step(x, run is Pass.TRAIN, pooling=not in_burn_in)
        if in_burn_in and run is Pass.TRAIN and settings.burn_in:
            at_end_of_forward(self._count_burn_in)
        if run is not Pass.LOOK and may_be_recomputed():
            self._recompute_cache.add(Record(ops.moments(x.detach())[0], used), y)
        return y

    def _compiled_forward(self, x: Tensor) -> Tensor:
        """Do the same in a graph of torch.compile; the operator of a step looks itself whether burn-in is over."""
        if self.settings.window == 1 and self.settings.active_group is None:
            return self._batch_norm(x, update=True)
        inputs = self.feeds.held(self.feeds.main, x)
        if isinstance(inputs, Plain):
            self.plain_reason = inputs.reason
            who = f"{self.label}: " if inputs.surprising else "norms that the report has as pending: "
            say_while_compiling(f"{who}plain BatchNorm in compiled steps: {inputs.reason}")
            return self._batch_norm(x, update=True)
        if self.settings.consistent:
            say_while_compiling("consistent=True: compiled steps do not carry remembered ones through the norms before")
        remember = torch.is_grad_enabled()
        outcomes = self._outcomes(x.detach(), inputs, remember, pooling=True)
        if remember and self.settings.burn_in:
            self._count_burn_in()
        statistics = [outcome.statistics for outcome in outcomes]
        if self._believes(inputs):
            statistics, move = self._join(statistics, inputs)
            if remember:
                move()
        has_moved = len(inputs) == 1 and self.belief is None and self._norm_tensors() is not None
        return self._normalize(x, inputs, statistics, has_moved=has_moved)

    def _believes(self, inputs: list[SegmentInput]) -> bool:
        """Tell whether the norm has a belief, and an operator whose weights move it."""
        return self.belief is not None and any(each.segment.operators for each in inputs)

    def _join(
        self, statistics: list[ops.Statistics], inputs: list[SegmentInput]
    ) -> tuple[list[ops.Statistics], Callable[[], None]]:
        assert self.belief is not None
        segments = [each.segment for each in inputs]
        pairs = zip(statistics, segments, strict=True)
        own = [found if segment.readers < 2 else found.unpacked() for found, segment in pairs]
        main = self.feeds.main
        leads = len(main) == len(segments) and all(a is b for a, b in zip(main, segments, strict=True))
        return own, self.belief.join_(own, self, leads)

    def _repeat(self, x: Tensor, record: Record) -> Tensor:
        """Do again what an earlier forward did."""
        if record.used is None:
            return self._batch_norm(x, update=False)
        statistics, feed = record.used
        return self._normalize(x, self.feeds.inputs_of(x, feed), statistics, again=True)

    def _count_burn_in(self) -> None:
        self.burnt.add_(1).clamp_(max=self.settings.burn_in)

    def _step(self, x: Tensor, training: bool, pooling: bool) -> tuple[Tensor, _Used | None]:
        """Return the output of a step, and what it used; None for its batch alone."""
        site = next_call(self)
        inputs = self.feeds.find(x, site._replace(stream=f"{site.stream}@{x.device}") if self._is_replica else site)
        outcomes: list[ops.Outcome] = []
        if isinstance(inputs, list):
            try:
                outcomes = self._outcomes(x.detach(), inputs, training, pooling)
            except WeightUnknown:
                inputs = Plain("the weight of its operator is computed, and cannot be seen here", surprising=True)
            except ops.NotTheOperatorsOutput:
                reason = "its input is not what the operator's weight makes of the operator's input"
                inputs = Plain(reason, surprising=True)
        if isinstance(inputs, Plain):
            self._say(inputs, training)
            if self.settings.active_group is None:
                return self._batch_norm(x, update=True), None
            alone = Segment(self.num_features, (), self.settings, self.feeds.like(), pooled=False)
            inputs = [SegmentInput(alone, (), False)]
            outcomes = self._outcomes(x.detach(), inputs, False, pooling)
        statistics = [outcome.statistics for outcome in outcomes]
        if self._believes(inputs):
            statistics, move = self._join(statistics, inputs)
            pairs = zip(outcomes, [each.segment for each in inputs], strict=True)
            # What is shared, another norm remembers; some channels remember nothing.
            if training and all(o.commit is not None or s.readers > 1 or s.window == 1 for o, s in pairs):
                at_end_of_forward(move)
        y = self._normalize(x, inputs, statistics, outcomes[0].output)
        if self._carries and y.grad_fn is not None:
            leave(y.grad_fn, self._carried(outcomes, statistics))
        for outcome in outcomes:
            if outcome.commit is not None:
                at_end_of_forward(outcome.commit)
        return y, (statistics, tuple(each.segment for each in inputs))

    @property
    def _carries(self) -> bool:
        return self.settings.consistent and not torch.compiler.is_compiling()

    def _carried(self, outcomes: list[ops.Outcome], statistics: list[ops.Statistics]) -> C.Carried | None:
        """Return what the norm makes of the remembered steps, then and today; None if some channels have none."""
        found, start = [], 0
        for outcome, each in zip(outcomes, statistics, strict=True):
            channels = slice(start, start + len(each.mean))
            start = channels.stop
            if (moved := outcome.moved) is None:
                return None
            gamma, beta = (None if one is None else one.detach()[channels] for one in (self.weight, self.bias))
            then = C.after_norm(moved.old, *moved.pooled, gamma, beta, self.eps)
            now = C.after_norm((moved.mean, moved.var), each.mean, each.var, gamma, beta, self.eps)
            found.append(C.Carried(*then, *now, moved.number))
        return C.side_by_side(found)

    def _say(self, plain: Plain, training: bool = True) -> None:
        if training:
            self.plain_reason = plain.reason
        if plain.surprising and plain.reason not in self._said:
            self._said.add(plain.reason)
            say(f"{self.label}: plain BatchNorm at this step: {plain.reason}")

    def _outcomes(self, x: Tensor, inputs: list[SegmentInput], remember: bool, pooling: bool) -> list[ops.Outcome]:
        """Do the step of each segment, but for those that another norm has done."""
        compiling = torch.compiler.is_compiling()
        if remember and not compiling and not all(segment.can_remember(calls) for segment, calls, _ in inputs):
            remember = False
            self._say(Plain("no step is remembered: the input of its operator cannot be seen", surprising=True))
        known = [_known(each) for each in inputs]
        parts = [x] if len(inputs) == 1 else list(x.split([segment.channels for segment, _, _ in inputs], 1))
        moments: list[tuple[Tensor, Tensor] | None] = [None] * len(inputs)
        finite: ops.Variances | bool = True
        norm = self._norm_tensors() if len(inputs) == 1 and self.belief is None else None
        if len(inputs) > 1 and not compiling:  # whether the moments of one segment are finite is not enough to know
            moments = [ops.moments(part) if other is None else None for part, other in zip(parts, known, strict=True)]
            finite = ops.Variances(*(moment[1] for moment in moments if moment is not None))
        outcomes = []
        for each, part, moment, outcome in zip(inputs, parts, moments, known, strict=True):
            segment, calls, is_complete = each
            outcome = outcome or _known(each)  # it may be twice in a concatenation
            if outcome is None:
                segment.history.move_(part)
                operands, bias = segment.operands(part, calls)
                carried = [carried_to_call(call) for call in calls] if self._carries and operands else []
                rest = pooling, remember, norm, forward_number(), carried
                today = ops.StepInputs(part, moment, finite, operands, bias, is_complete, *rest)
                if compiling:
                    outcome = self._compiled_step(today, segment)
                else:
                    outcome = ops.step(today, segment.history.past(), segment.storage, segment.settings)
                if segment.readers > 1:
                    _shared(each).append((segment, outcome._replace(commit=None, output=None)))
            outcomes.append(outcome)
        return outcomes

    def _compiled_step(self, today: ops.StepInputs, segment: Segment) -> ops.Outcome:
        """Do a step as one operator, which torch.compile does not look into, and remember it."""
        history, storage, settings = segment.history, segment.storage, segment.settings
        if storage is not None:
            history.fit_(storage.shapes(segment.channels, today.x.numel() // segment.channels))
        rest = history.past(), self.burnt, storage, settings, today.is_complete, today.remember, today.norm
        return ops.Outcome(compiled.step(today.x, today.operands, today.bias, *rest), None, None)

    def _normalize(
        self,
        x: Tensor,
        inputs: list[SegmentInput],
        statistics: Sequence[ops.Statistics],
        output: Tensor | None = None,
        again: bool = False,
        has_moved: bool = False,
    ) -> Tensor:
        """Normalize, unless the step has made the output, and let the running statistics move.

        They do not where this is `again`, or where they have: a step that makes the output moves them as well.
        """
        joint = ops.joined(statistics)
        # Where hooks take what is saved, the graph of a repetition is thrown away: weights need not be found for it.
        has_graph = not again or saved_tensor_hooks() is None
        if isinstance(joint, ops.PackedStatistics):  # the usual case: one segment with one operator
            (operator,), calls, weight, hook = inputs[0].segment.operators, inputs[0].calls, None, None
            if joint.has_dependence and x.requires_grad and has_graph:
                weight, _, hook = operator.trained(calls[0] if calls else None)
            run = Run(0, x.shape[1], (operator.rows_geometry,), joint, (hook,))
            y = attach(x, self.weight, self.bias, weight, run, self.eps, self.label, output)
        else:
            # If the input has no gradient, what made it is frozen, weights included.
            runs, operands = _runs(inputs, statistics, has_graph) if x.requires_grad else ([], [])
            group = self.settings.active_group
            count = None if group is None else torch.as_tensor(joint.positions, device=x.device)
            context = Context(joint.share, self.eps, self.label, group, count, tuple(runs))
            y = normalize(x, joint.mean, joint.var, self.weight, self.bias, context, operands)
        if output is None and not again and not has_moved and not self._believes(inputs):
            self._move_running(joint)
        return y

    def train(self, mode: bool = True) -> CrossIterBatchNorm:
        """Set the mode, as for any module. In evaluation nobody watches the operators."""
        super().train(mode)
        for segment in self.feeds.segments():
            for producer in segment.producers:
                producer.watch_(mode or producer.module.training)
        return self

    def reset_history_(self) -> None:
        """Forget the remembered steps and the progress of burn-in."""
        self.burnt.zero_()
        self.feeds.forget()
        if self.belief is not None:
            self._make_belief()

    def reset_running_stats(self) -> None:
        """Reset running statistics, as BatchNorm does, and forget the remembered steps."""
        super().reset_running_stats()
        if hasattr(self, "feeds"):  # called by the constructor as well
            self.feeds.forget()
            self._make_belief()

    def configure_(self, settings: Settings) -> None:
        """Change the settings; remembered steps are kept as far as they fit."""
        self._set(settings)
        for segment in self.feeds.segments():
            segment.configure_(settings)

    def _set(self, settings: Settings) -> None:
        before, self.settings = self.settings, settings
        if before.prior != settings.prior:
            self._make_belief()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CrossIterBatchNorm:
        super()._apply(fn, recurse)
        for segment in self.feeds.segments():
            segment.history.apply_(fn)
        if self.belief is not None and (like := fn(self.belief.drift.new_empty(1))).is_floating_point():
            self.belief.drift = self.belief.drift.to(like.device, C.accumulation_dtype(like.dtype))
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.feeds.forget()
        self._make_belief()

    def _replicate_for_data_parallel(self) -> CrossIterBatchNorm:
        """Return a replica whose history is that of its device, and stays with this norm from step to step."""
        replica = super()._replicate_for_data_parallel()
        replica._is_replica = True
        return replica

    def extra_repr(self) -> str:
        """Return BatchNorm's line and the settings that differ from the default."""
        default = vars(Settings())
        own = {name: value for name, value in vars(self.settings).items() if value != default[name] or name == "window"}
        return f"{super().extra_repr()}, " + ", ".join(f"{name}={value!r}" for name, value in own.items())


def _shared(each: SegmentInput) -> list[tuple[Segment, ops.Outcome]]:
    """Return the steps that norms have done so far which read the same call; none where its calls are several."""
    if len(each.calls) != 1 or (call := each.calls[0]) is None:
        return []
    return call.shared().setdefault("compiled steps" if torch.compiler.is_compiling() else "steps", [])


def _known(each: SegmentInput) -> ops.Outcome | None:
    """Return the step, if another norm has done it."""
    if each.segment.readers < 2:
        return None
    # By identity: not every torch can trace an object as the key of a dict.
    found = [outcome for segment, outcome in _shared(each) if segment is each.segment]
    return found[0] if found else None


def _runs(
    inputs: list[SegmentInput], statistics: Sequence[ops.Statistics], has_graph: bool
) -> tuple[list[Run], list[Tensor | None]]:
    """Return the runs of channels whose statistics follow operators, and weight and bias of each operator in turn."""
    runs, start = [], 0
    operands: list[Tensor | None] = []
    for (segment, calls, _), each in zip(inputs, statistics, strict=True):
        stop = start + segment.channels
        if each.has_dependence:
            pairs = zip(segment.operators, calls or [None] * len(segment.operators), strict=True)
            trained = [one.trained(call) if has_graph else (None, None, None) for one, call in pairs]
            geometries = tuple(one.rows_geometry for one in segment.operators)
            runs.append(Run(start, stop, geometries, each, tuple(hook for _, _, hook in trained)))
            for weight, bias, _ in trained:
                operands += weight, bias
        start = stop
    return runs, operands


class CrossIterBatchNorm1d(CrossIterBatchNorm):
    """`CrossIterBatchNorm` for input [N, C] or [N, C, L]."""

    rank, torch_type = (2, 3), nn.BatchNorm1d


class CrossIterBatchNorm2d(CrossIterBatchNorm):
    """`CrossIterBatchNorm` for input [N, C, H, W]."""

    rank, torch_type = (4,), nn.BatchNorm2d


class CrossIterBatchNorm3d(CrossIterBatchNorm):
    """`CrossIterBatchNorm` for input [N, C, D, H, W]."""

    rank, torch_type = (5,), nn.BatchNorm3d


class CrossIterBatchNormAct2d(CrossIterBatchNorm2d):
    """A cross-iteration norm, then dropout and activation: what timm's `BatchNormAct2d` becomes."""

    drop: Any
    act: Any

    def forward(self, x: Tensor) -> Tensor:
        """Normalize and activate `x` [N, C, H, W]."""
        return self.act(self.drop(super().forward(x)))

    @classmethod
    def plain_type(cls) -> type[BatchNormBase]:
        """Return timm's norm."""
        from timm.layers.norm_act import BatchNormAct2d

        return BatchNormAct2d

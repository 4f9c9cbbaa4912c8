"""BatchNorm over the last few training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossbn import functional as C  # the library's F
from crossbn.nn import quick
from crossbn.nn.deeper import check_reach, refuse_unfit_step
from crossbn.nn.feed import Feed, Feeds, Input, Plain, make_feed
from crossbn.nn.guarded import GuardedBatchNorm
from crossbn.nn.messages import say
from crossbn.nn.producer import Producer
from crossbn.nn.replay import Ledger, Pass, Record, current_pass, may_be_replayed
from crossbn.nn.scope import CallSite, at_end_of_forward, next_call
from crossbn.nn.settings import Settings
from crossbn.nn.source import Moments, NotTheirs, Source
from crossbn.nn.statistics import Statistics
from crossbn.nn.term import Term
from crossbn.torch_internals import inside_functorch, is_exporting, is_tracing


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
        window: steps to pool, today's included. This and what follows: see `Settings`.

    Example:
        >>> conv, norm = nn.Conv2d(3, 8, 3, bias=False), CrossIterBatchNorm(8, window=4)
        >>> norm(conv(torch.randn(2, 3, 6, 6))).shape
        torch.Size([2, 8, 4, 4])
    """

    settings: Settings
    burnt: Tensor
    feeds: Feeds
    plain_reason: str | None
    """Why the norm was BatchNorm at its latest plain step."""

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
        window: int = 4,
        burn_in: int = 0,
        order: int = 1,
        positions: int | None = 128,
        backward: str = "through",
        invalid: str = "max",
        sync: bool = False,
        process_group: dist.ProcessGroup | None = None,
        history_dtype: torch.dtype | None = None,
        layers: int = 1,
        decay: float = 1.0,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        pooling = window, burn_in, order, positions, backward, invalid
        rest = sync, process_group, history_dtype, layers, decay
        self.adopt_(Settings(*pooling, *rest), unpaired="pool")
        like = torch.empty(0, device=device, dtype=dtype)
        self.feeds.set_main_(make_feed([Source(num_features, (), self.settings, like, label=self.label)]))

    def adopt_(self, settings: Settings, label: str = "", unpaired: str = "bn") -> None:
        """Start the life of a cross-iteration norm, unattached, in a module that was a BatchNorm until now."""
        self.settings = settings
        self.label = label or type(self).__name__
        self.burnt = torch.zeros((), dtype=torch.int64, device="cpu")  # read by Python, never by a kernel
        self.feeds = Feeds(settings, unpaired, self.label)
        self.plain_reason = None
        self._ledger = Ledger()
        self._said: set[str] = set()
        self._is_replica = False

    def become_plain_(self) -> None:
        """Be the norm again that this one stands for; the opposite of `adopt_`."""
        self.feeds.release()
        for name in ("settings", "label", "burnt", "feeds", "plain_reason", "_ledger", "_said", "_is_replica"):
            delattr(self, name)
        plain = self.plain_type()
        if issubclass(plain, nn.SyncBatchNorm):
            self.__dict__.setdefault("process_group", None)
        self.__class__ = plain  # type: ignore[assignment]

    @classmethod
    def plain_type(cls) -> type[_BatchNorm]:
        """Return the norm that this one stands for; of torch's, only SyncBatchNorm takes any rank."""
        return nn.SyncBatchNorm

    @property
    def like(self) -> Tensor:
        """A tensor of the device and type that statistics are kept in."""
        known = (self.weight, self.running_mean, *(source.history["mean"] for source in self.sources))
        return next(tensor for tensor in (*known, torch.empty(0)) if tensor is not None)

    def attach_(self, *producers: nn.Module, earlier: nn.Module | None = None) -> CrossIterBatchNorm:
        """Name the convolution, transposed convolution or linear layer whose output is normalized.

        Eager code reads that from the graph; `torch.compile` and activation checkpointing have to be told. Several
        producers are summed into it (`norm(conv1(a) + conv2(b) + rest)`).
        With layers=2, `earlier` is the operator before the previous norm: conv1 in `norm2(conv2(norm1(conv1(a))))`.

        Raises:
            TypeError: if a producer is something else.
            ValueError: if it has another number of channels than the norm.
                With `earlier`, if layers is 1 or there is not one producer.
        """
        if earlier is not None:
            check_reach(self.label, self.settings, earlier, len(producers))
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
        terms = tuple(Term.of_producer(Producer(module)) for module in producers)
        self.feed_([Source(self.num_features, terms, self.settings, self.like, label=self.label)])
        if earlier is not None:
            self.reach_(earlier)
        return self

    def feed_(self, sources: Sequence[Source]) -> None:
        """Take these sources, whose channels add up to the norm's, for the present ones."""
        feed = make_feed(sources)
        self.feeds.set_main_(feed)

    def reach_(self, operator: nn.Module | None) -> None:
        """Compensate for the weight of `operator`, the one before the previous norm, as well; None for no longer."""
        self.sources[0].reach_(operator)

    def is_fed_by(self, sources: list[tuple[int, tuple[nn.Module, ...]]]) -> bool:
        """Tell whether the norm's sources have these channels and operators."""
        found = [(s.channels, tuple(t.producer and t.producer.module for t in s.terms)) for s in self.sources]
        return found == sources

    @property
    def sources(self) -> list[Source]:
        """What feeds the norm at its usual call, channel run by channel run."""
        return [segment.source for segment in self.feeds.main]

    @property
    def all_sources(self) -> list[Source]:
        """The same at all calls."""
        return self.feeds.sources()

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [N, C, ...]."""
        if not self.training or is_exporting():
            return super().forward(x)  # which checks as well
        if not torch.compiler.is_compiling() and (inside_functorch() or is_tracing()):
            self._say("inside a transform of torch.func, or traced", self.settings.window > 1)
            return super().forward(x)
        try:
            return self._train_forward(x)
        finally:
            for segment in self.feeds.main:
                segment.source.finish_step()

    def _train_forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if x.numel() == 0:
            return self._batch_norm(x, update=False)
        run = current_pass()
        if self.settings.layers > 1:
            refuse_unfit_step(self.label, run)
        if run is Pass.REPLAY and (record := self._ledger.find(C.batch_moments(x.detach())[0])) is not None:
            return self._replay(x, record)
        statistics, feed = None, self.feeds.main
        alone = self._in_burn_in()
        if alone and self.settings.active_group is None:
            y = self._batch_norm(x, update=True)
        else:
            site = self._call_site(x)
            y, statistics, feed = self._step(x, site, run is Pass.TRAIN, pooling=not alone)
        if alone and run is Pass.TRAIN:
            at_end_of_forward(self._count_burn_in)
        if run is not Pass.LOOK and may_be_replayed():
            self._ledger.add(Record(C.batch_moments(x.detach())[0], (statistics, feed)), y)
        return y

    def _call_site(self, x: Tensor) -> CallSite:
        if torch.compiler.is_compiling():
            return CallSite()
        site = next_call(self)
        return site._replace(stream=f"{site.stream}@{x.device}") if self._is_replica else site

    def _replay(self, x: Tensor, record: Record) -> Tensor:
        """Do again what an earlier forward did."""
        statistics, feed = record.used
        if statistics is None:
            return self._batch_norm(x, update=False)
        return self._normalize(x, self.feeds.inputs_of(x, feed), statistics)

    def _in_burn_in(self) -> bool:
        if self.settings.window == 1:
            return True
        # A compiled step does the same with tensors (`_statistics`): no branch, so no recompilation.
        burn_in = self.settings.burn_in
        return burn_in > 0 and not torch.compiler.is_compiling() and int(self.burnt) < burn_in

    def _count_burn_in(self) -> None:
        self.burnt.add_(1).clamp_(max=self.settings.burn_in)

    def _step(
        self, x: Tensor, site: CallSite, training: bool, pooling: bool
    ) -> tuple[Tensor, list[Statistics] | None, Feed]:
        """Return the output of a step, the statistics that it used, None for its batch's alone, and whose they are."""
        remember = training
        inputs = self.feeds.find(x, site, lambda: self.like)
        if isinstance(inputs, list):
            for segment, calls, _ in inputs:
                if not segment.source.knows_weights(calls):
                    inputs = Plain("the weight of its operator is computed, and cannot be seen here", surprising=True)
                    break
                if remember and not segment.source.can_remember(calls):
                    remember = False
                    self._say("no step is remembered: the input of its operator cannot be seen", surprising=True)
        if isinstance(inputs, list):
            try:
                statistics, output = self._statistics(x, inputs, remember, pooling)
            except NotTheirs:
                inputs = Plain("its input is not what the operator's weight makes of the operator's input", True)
        if isinstance(inputs, Plain):
            self._say(inputs.reason, inputs.surprising, training)
            if self.settings.active_group is None:
                return self._batch_norm(x, update=True), None, ()
            alone = Source(self.num_features, (), self.settings, self.like, pooled=False, label=self.label)
            inputs = [Input(make_feed([alone])[0], (), False)]
            statistics, output = self._statistics(x, inputs, False, pooling)
        y = self._normalize(x, inputs, statistics, output)
        if output is None:  # else they have moved already
            with torch.no_grad():
                self._update_running(statistics)
        for each in statistics:
            if each.pending is not None:
                at_end_of_forward(each.pending.commit)
        return y, statistics, tuple(each.segment for each in inputs)

    def _say(self, reason: str, surprising: bool, training: bool = True) -> None:
        if torch.compiler.is_compiling():
            return
        if training:
            self.plain_reason = reason
        if surprising and reason not in self._said:
            self._said.add(reason)
            say(f"{self.label}: plain BatchNorm at this step: {reason}")

    def _statistics(
        self, whole: Tensor, inputs: list[Input], remember: bool, pooling: bool
    ) -> tuple[list[Statistics], Tensor | None]:
        """Return what the sources say at this step and, where it came along, the output."""
        x = whole.detach()
        active: bool | Tensor = pooling
        if self.settings.burn_in and torch.compiler.is_compiling():
            active = (self.burnt >= self.settings.burn_in).to(x.device)
            self.burnt.add_(int(remember)).clamp_(max=self.settings.burn_in)
        if len(inputs) == 1 and active is True and (found := self._shared(inputs[0])) is None:
            quickly = quick.observe(inputs[0], x, None, remember, self)
            if quickly is not None:
                self._share(inputs[0], quickly[0])
                return [quickly[0]], quickly[1]
        # Where another norm has asked at this step, the moments are known and the input is not looked at.
        parts = {i: x if len(inputs) == 1 else x[:, s.start : s.stop] for i, (s, _, _) in enumerate(inputs)}
        found_by = {i: self._shared(each) for i, each in enumerate(inputs)}
        moments = {i: C.batch_moments(parts[i]) for i, found in found_by.items() if found is None}
        finite = C.all_finite(*(var for _, var in moments.values())) if moments else True
        statistics = []
        for i, each in enumerate(inputs):
            found = found_by[i]
            if found is None:
                found = self._observe(each, parts[i], whole, Moments(*moments[i], finite), active, remember)
                self._share(each, found)
            statistics.append(found)
        return statistics, None

    def _observe(
        self, each: Input, x: Tensor, whole: Tensor, moments: Moments, active: bool | Tensor, remember: bool
    ) -> Statistics:
        source = each.segment.source
        if moments.finite is True and active is True:
            quickly = quick.observe(each, x, (moments.mean, moments.var), remember, None)
            if quickly is not None:
                return quickly[0]
        seen = x if source.deeper is None else whole  # which it feeds alone
        return source.observe(seen, each.calls, each.complete, moments, active, remember)

    def _shared(self, each: Input) -> Statistics | None:
        """Return what another norm has found of the same call."""
        source, calls = each.segment.source, each.calls
        if source.readers < 2 or len(calls) != 1 or calls[0] is None:
            return None
        found: Statistics | None = calls[0].shared().get(source)
        return found

    def _share(self, each: Input, statistics: Statistics) -> None:
        source, calls = each.segment.source, each.calls
        if source.readers > 1 and len(calls) == 1 and calls[0] is not None:
            calls[0].shared()[source] = statistics._replace(pending=None)

    def _normalize(
        self, x: Tensor, inputs: list[Input], statistics: list[Statistics], output: Tensor | None = None
    ) -> Tensor:
        pairs, links, apart = [(each.mean, each.var) for each in statistics], [], False
        if x.requires_grad:  # else what made it is frozen, today's weights included
            for i, (((source, start, _), calls, _), each) in enumerate(zip(inputs, statistics, strict=True)):
                if not each.jacobians:
                    continue
                link = None if torch.compiler.is_compiling() else source.link(start, calls, each, self.label)
                if link is not None:
                    links.append(link)
                    pairs[i] = source.follow_biases(each, calls)
                    apart = apart or pairs[i][0] is not each.mean
                else:
                    pairs[i] = source.follow(each, calls)
                if each.earlier is not None and source.deeper is not None:
                    pairs[i] = source.deeper.follow(*pairs[i], each.earlier)
        if len(pairs) == 1:
            (mean, var), share = pairs[0], statistics[0].share
        else:
            mean, var = (_joined(column) for column in zip(*pairs, strict=True))
            share = _joined([each.share for each in statistics], statistics)
        group = self.settings.active_group
        count = None if group is None else torch.as_tensor(statistics[0].positions, device=x.device)
        context = C.Context(share, self.eps, group, count, output, tuple(links), self._once(group, apart))
        return C.normalize_step(x, mean, var, self.weight, self.bias, context)

    def _once(self, group: dist.ProcessGroup | None, apart: bool) -> str | None:
        """Say why a backward cannot be differentiated, if it cannot."""
        if apart:
            return f"through {self.label}: the bias of its operator is added apart, as for inputs that are not dense"
        if group is not None:
            return f"through {self.label}: its statistics are joined over processes"
        return f"through {self.label} with layers=2" if self.settings.layers > 1 else None

    def _update_running(self, statistics: list[Statistics]) -> None:
        if len(statistics) == 1 and statistics[0].finite is True and statistics[0].several is True:
            return self._move_running(statistics[0].mean, statistics[0].var, statistics[0].bessel, True, True)
        mean, var = _joined([each.mean for each in statistics]), _joined([each.var for each in statistics])
        bessel = _joined(
            [torch.as_tensor(each.bessel, dtype=mean.dtype, device=mean.device) for each in statistics], statistics
        )
        several = all(each.several is True for each in statistics) or _joined(
            [torch.as_tensor(each.several, device=mean.device) for each in statistics], statistics
        )
        finite = statistics[0].finite
        for each in statistics[1:]:
            finite = finite & each.finite
        return self._move_running(mean, var, bessel, several, finite)

    def reset_history_(self) -> None:
        """Forget the remembered steps and the progress of burn-in."""
        self.burnt.zero_()
        for source in self.all_sources:
            source.forget()

    def reset_running_stats(self) -> None:
        """Reset running statistics, as BatchNorm does, and forget the remembered steps."""
        super().reset_running_stats()
        if hasattr(self, "feeds"):  # called by the constructor as well
            for source in self.all_sources:
                source.forget()

    def configure_(self, settings: Settings) -> None:
        """Change the settings; remembered steps are kept as far as they fit."""
        self.settings = self.feeds.settings = settings
        for source in self.all_sources:
            source.configure_(settings)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CrossIterBatchNorm:
        super()._apply(fn, recurse)
        for source in self.all_sources:
            source.history.apply_(fn)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for source in self.all_sources:
            source.forget()

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


def _joined(parts: Sequence[Tensor], statistics: Sequence[Statistics] = ()) -> Tensor:
    """Put the segments' values side by side; those that are one number per segment are repeated."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(
        [part.expand_as(each.mean) for part, each in zip(parts, statistics, strict=True)] if statistics else list(parts)
    )

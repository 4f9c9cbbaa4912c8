"""BatchNorm over the last few training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossbn.functional import all_finite, batch_moments, geometry_of, is_linear_operator, normalize
from crossbn.nn.deeper import check_reach, refuse_unfit_step
from crossbn.nn.guarded import GuardedBatchNorm
from crossbn.nn.producer import Producer
from crossbn.nn.replay import Ledger, Pass, Record, current_pass, may_be_replayed
from crossbn.nn.settings import Settings
from crossbn.nn.source import Source
from crossbn.nn.statistics import Statistics


class Segment(NamedTuple):
    """A run of channels, `start` to `stop`, and what feeds it."""

    source: Source
    start: int
    stop: int


class CrossIterBatchNorm(GuardedBatchNorm):
    """BatchNorm whose training statistics are pooled over the last `window` steps, for input of any rank.

    Statistics of earlier steps are corrected for the weight changes since with a Taylor polynomial in the
    weights of the operator that feeds the norm (`attach_`); unattached, they are pooled as they are. Evaluation,
    parameters, buffers and `state_dict` are those of `torch.nn.BatchNorm*d`.

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
        >>> conv = nn.Conv2d(3, 8, 3, bias=False)
        >>> norm = CrossIterBatchNorm(8, window=4).attach_(conv)
        >>> norm(conv(torch.randn(2, 3, 6, 6))).shape
        torch.Size([2, 8, 4, 4])
    """

    settings: Settings
    burnt: Tensor
    _segments: list[Segment]

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
        self.adopt_(Settings(*pooling, *rest), like=torch.empty(0, device=device, dtype=dtype))

    def adopt_(self, settings: Settings, label: str = "", like: Tensor | None = None) -> None:
        """Start the life of a cross-iteration norm, unattached, in a module that was a BatchNorm until now."""
        self.settings = settings
        self.label = label or type(self).__name__
        self._ledger = Ledger()
        self.burnt = torch.zeros((), dtype=torch.int64)  # on the CPU: read by Python, never by a kernel
        self._segments = []
        self.feed_([Source(self.num_features, (), settings, self.like if like is None else like)])

    def become_plain_(self) -> None:
        """Be the norm again that this one stands for; the opposite of `adopt_`."""
        self.feed_([])
        for name in ("settings", "label", "_ledger", "burnt", "_segments"):
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

        Several producers are summed into it (`norm(conv1(a) + conv2(b) + rest)`).
        With layers=2, `earlier` is the operator before the previous norm: conv1 in `norm2(conv2(norm1(conv1(a))))`.

        Raises:
            TypeError: if a producer is something else.
            ValueError: if it has another number of channels than the norm.
                With `earlier`, if layers is 1 or there is not one producer.
        """
        if earlier is not None:
            check_reach(self.label, self.settings, earlier, len(producers))
        for module in producers:
            if not is_linear_operator(module):
                raise TypeError(
                    f"{self.label}: a producer must be a convolution, transposed convolution or linear layer with "
                    f"torch's own forward, got {module}"
                )
            if (channels := geometry_of(module).out_channels) != self.num_features:
                raise ValueError(
                    f"{self.label}: normalizes {self.num_features} channels, but its producer {module} has {channels}"
                )
        watched = tuple(Producer(module) for module in producers)
        self.feed_([Source(self.num_features, watched, self.settings, self.like)])
        if earlier is not None:
            self.reach_(earlier)
        return self

    def feed_(self, sources: list[Source]) -> None:
        """Take these sources, whose channels add up to the norm's, for the present ones."""
        for segment in self._segments:
            segment.source.release()
        self._segments = []
        start = 0
        for source in sources:
            source.readers += 1
            self._segments.append(Segment(source, start, start + source.channels))
            start += source.channels

    def reach_(self, operator: nn.Module | None) -> None:
        """Compensate for the weight of `operator`, the one before the previous norm, as well; None for no longer."""
        self.sources[0].reach_(operator, self.settings)

    def is_fed_by(self, feeds: list[tuple[int, tuple[nn.Module, ...]]]) -> bool:
        """Tell whether the norm's sources have these channels and operators."""
        return [(s.channels, tuple(p.module for p in s.producers)) for s in self.sources] == feeds

    @property
    def sources(self) -> list[Source]:
        """What feeds the norm, channel run by channel run."""
        return [segment.source for segment in self._segments]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [N, C, ...]."""
        try:
            return self._train_forward(x) if self.training else super().forward(x)  # which checks as well
        finally:
            for segment in self._segments:
                segment.source.finish_step()

    def _train_forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if x.numel() == 0:
            return self._batch_norm(x, update=False)
        run = current_pass()
        if self.settings.layers > 1:
            refuse_unfit_step(self.label, run)
        record = self._ledger.find(batch_moments(x.detach())[0]) if run is Pass.REPLAY else None
        if record is not None:
            if record.statistics is None:
                return self._batch_norm(x, update=False)
            return self._normalize(x, record.statistics)
        statistics = None
        alone = self._in_burn_in()
        if alone and self.settings.active_group is None:
            y = self._batch_norm(x, update=True)
        else:
            statistics, output = self._statistics(x, remember=run is Pass.TRAIN, pooling=not alone)
            y = self._normalize(x, statistics, output)
            if output is None:  # else that is done as well
                with torch.no_grad():
                    self._update_running(statistics)
        if alone and run is Pass.TRAIN:
            self.burnt.add_(1).clamp_(max=self.settings.burn_in)
        if run is not Pass.LOOK and may_be_replayed():
            self._ledger.add(Record(batch_moments(x.detach())[0], statistics), y)
        return y

    def _in_burn_in(self) -> bool:
        if self.settings.window == 1:
            return True
        # A compiled step does the same with tensors (`_statistics`): no branch, so no recompilation.
        burn_in = self.settings.burn_in
        return burn_in > 0 and not torch.compiler.is_compiling() and int(self.burnt) < burn_in

    def _statistics(self, whole: Tensor, remember: bool, pooling: bool) -> tuple[list[Statistics], Tensor | None]:
        """Return what the sources say at this step and, where it came along, the output."""
        x = whole.detach()
        active: bool | Tensor = pooling
        if self.settings.burn_in and torch.compiler.is_compiling():
            active = (self.burnt >= self.settings.burn_in).to(x.device)
            self.burnt.add_(int(remember)).clamp_(max=self.settings.burn_in)
        alone, first, output = len(self._segments) == 1, self._segments[0].source, None
        if alone and active is True and first.current is None:
            output = first.observe_quickly(x, None, remember, self, self)
            if output is not None and first.current is not None:
                return [first.current], output
        # Where another norm has asked at this step, the moments are known and the input is not looked at.
        fresh = []
        for source, a, b in self._segments:
            if source.current is None:
                part = x if alone else x[:, a:b]
                fresh.append((source, part, batch_moments(part)))
        finite = all_finite(*(var for _, _, (_, var) in fresh))  # it is not if the mean is not
        for source, part, moments in fresh:
            seen = part if source.deeper is None else whole  # which it feeds alone
            source.observe(seen, moments, finite, active, remember, self)
        return [source.current for source in self.sources if source.current is not None], output

    def _normalize(self, x: Tensor, statistics: list[Statistics], output: Tensor | None = None) -> Tensor:
        pairs, followed = [(each.mean, each.var) for each in statistics], None
        if x.requires_grad:  # else what made it is frozen, today's weights included
            followed = self.sources[0].sole_followed(statistics[0]) if len(statistics) == 1 else None
            if followed is None:
                pairs = [source.follow(each) for source, each in zip(self.sources, statistics, strict=True)]
            if statistics[0].earlier is not None and (deeper := self.sources[0].deeper) is not None:
                pairs = [deeper.follow(*pairs[0], statistics[0].earlier)]
        if len(pairs) == 1:
            (mean, var), share = pairs[0], statistics[0].share
        else:
            mean, var = (_joined(column) for column in zip(*pairs, strict=True))
            share = _joined([each.share for each in statistics], statistics)
        group, count = self.settings.active_group, statistics[0].positions
        return normalize(x, mean, var, share, self.weight, self.bias, self.eps, group, count, followed, output)

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
        for source in self.sources:
            source.history.clear_()

    def reset_running_stats(self) -> None:
        """Reset running statistics, as BatchNorm does, and forget the remembered steps."""
        super().reset_running_stats()
        for segment in getattr(self, "_segments", ()):  # called by the constructor as well
            segment.source.history.clear_()

    def configure_(self, settings: Settings) -> None:
        """Change the settings; remembered steps are kept as far as they fit."""
        self.settings = settings
        for source in self.sources:
            source.configure_(settings)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CrossIterBatchNorm:
        super()._apply(fn, recurse)
        for source in self.sources:
            source.history.apply_(fn)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for source in self.sources:
            source.history.clear_()

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

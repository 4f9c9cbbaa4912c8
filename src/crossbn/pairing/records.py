"""The public answer: what one batch norm reads, channel by channel."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Segment:
    """A run of channels of a norm's input.

    Attributes:
        channels: Width of the run.
        producers: Qualified names of the linear operators summed into it; empty if there are none.
        direct: The run is the output of its one producer: no sum, nothing added or applied.
        reason: One phrase for people, such as ``conv1``, ``conv1 + conv2 + rest`` or ``after max_pool2d``.
        final: Nothing more is to be found: there are producers, or a closer look would find none either.
    """

    channels: int
    producers: tuple[str, ...]
    direct: bool
    reason: str
    final: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Pairing:
    """What one norm reads.

    Attributes:
        name: Qualified name of the norm, as in ``model.named_modules()``.
        segments: In channel order; their widths add up to the norm's ``num_features``.
        exclusive: The norm reads exactly its one producer's output, nothing else does, and both are called
            once: folding the norm into the producer is safe.
        origins: What the norm's one producer reads: the norms and operators that its input is computed from, by name,
            and "input of ..." for what comes from outside. Empty if there is not one producer.
    """

    name: str
    segments: tuple[Segment, ...]
    exclusive: bool
    origins: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def producers(self) -> tuple[str, ...]:
        """Every operator of every segment, each once, in channel order."""
        return tuple(dict.fromkeys(name for segment in self.segments for name in segment.producers))

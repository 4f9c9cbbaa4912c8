"""What a cross-iteration norm is told to do."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

CHOICES: dict[str, tuple[Any, ...]] = {
    "order": (0, 1, 2),
    "backward": ("through", "detached"),
    "invalid": ("max", "drop"),
    "sync": (True, False),
    "history_dtype": (None, torch.bfloat16),
    "weights": ("equal", "auto"),
    "compensate_through": (None, "activations"),
    "prior": (None, "running"),
    "consistent": (False, True),
}


MOST_WINDOW = 10_000
"""Steps; the paper pools eight at most, and each takes as much memory as the weights and more."""


@dataclass(frozen=True)
class Settings:
    """Options of a cross-iteration norm, checked.

    Attributes:
        window: steps whose statistics are pooled, today's included; 1 is BatchNorm.
        burn_in: training forwards with window 1 first.
        order: of the Taylor polynomial: 0 (no compensation), 1 or 2.
        positions: output positions that the variance's gradient is estimated on each step; None for all. Large weights
            make do with fewer, see `functional.choose_plan`.
        backward: "through" lets gradients reach today's weights by way of the compensated moments;
            "detached" does not.
        invalid: what becomes of a compensated variance below 0: "max" clips it, "drop" leaves the step out.
        sync: pool over the processes of `process_group` as well.
        process_group: None for all processes.
        history_dtype: torch.bfloat16 halves the memory of what is remembered; None for the statistics' own type.
        weights: of remembered steps: "auto", measured while training, see `functional.weighting`, or "equal", the
            paper's. Empty chooses "auto", but "equal" where `decay` is given and where nothing is compensated.
        decay: instead, a fixed rate: what a remembered step weighs falls by it with each step of its age; None for 1.
        compensate_through: "activations" lets a norm be compensated that reads its operator through an elementwise
            activation (conv, act, norm), see `functional.activations`; of the first order only. None leaves it alone.
        prior: "running" lets the running statistics of a trained network be a belief that moves with the weights and
            fades as these leave the checkpoint, see `functional.pooling`: for fine-tuning. With weights="auto" only.
        consistent: whether remembered steps are moved to today's statistics of the norms before as well, see
            `functional.carrying`: for networks that are deep, with order=2.

    Raises:
        ValueError: naming the option that is out of range.
    """

    window: int = 4
    burn_in: int = 0
    order: int = 1
    positions: int | None = 128
    backward: str = "through"
    invalid: str = "max"
    sync: bool = False
    process_group: dist.ProcessGroup | None = None
    history_dtype: torch.dtype | None = None
    weights: str = ""
    decay: float | None = None
    compensate_through: str | None = None
    prior: str | None = None
    consistent: bool = False

    def __post_init__(self) -> None:
        if not self.weights:
            fixed = self.decay is not None or self.order == 0
            object.__setattr__(self, "weights", "equal" if fixed else "auto")
        for name, least in (("window", 1), ("burn_in", 0), ("positions", 1)):
            value = getattr(self, name)
            is_none = name == "positions" and value is None
            if not is_none and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.window > MOST_WINDOW:
            raise ValueError(
                f"window must be at most {MOST_WINDOW}, got {self.window}: the paper pools 8 steps at most"
            )
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
        if not 0 < self.rate <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, got {self.decay!r}")
        if self.weights == "auto" and self.rate != 1:
            raise ValueError(f'weights="auto" finds its own rate, got decay={self.decay!r} as well: leave one out')
        if self.compensate_through is not None and self.order != 1:
            raise ValueError(f"compensate_through needs order=1, got order={self.order!r}")
        if self.consistent and self.order != 2:
            why = "norms before change too much from step to step for the first"
            raise ValueError(f"consistent needs order=2, got order={self.order!r}: {why}")
        if self.consistent and self.prior is not None:
            raise ValueError('consistent and prior="running" exclude each other: norms that believe hardly change')
        if self.prior is not None:
            if self.weights != "auto" or self.order == 0:
                told = f"weights={self.weights!r} and order={self.order!r}"
                raise ValueError(f'prior="running" needs compensation and weights="auto", got {told}')
            if self.window == 1 or self.burn_in:
                told = f"window={self.window} and burn_in={self.burn_in}"
                raise ValueError(f'prior="running" needs a window above 1, and no burn-in, got {told}')

    @property
    def rate(self) -> float:
        """What the weight of a remembered step falls by with each step of its age, but for `weights`."""
        return 1.0 if self.decay is None else self.decay

    @classmethod
    def of(cls, config: "Settings | None", options: dict[str, Any]) -> "Settings":
        """Return the settings that were given as one object or one by one.

        Raises:
            TypeError: for an option that does not exist, or both an object and options.
        """
        unknown = sorted(options.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise TypeError(f"no option is called {unknown[0]!r}; there are {', '.join(cls.__dataclass_fields__)}")
        if config is not None and options:
            raise TypeError(f"give config or options, not both: {', '.join(options)}")
        return cls(**options) if config is None else config

    @property
    def active_group(self) -> dist.ProcessGroup | None:
        """The processes to pool over now; None if this one is alone."""
        if not (self.sync and dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group or dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

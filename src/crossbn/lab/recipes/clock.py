"""Times of a training."""

import time
from collections import deque
from statistics import median

_LATEST = 1000  # forwards whose times are kept
_SECONDS_BETWEEN_NEWS = 0.5


class Clock:
    """Takes the time from one forward to the next, and tells twice a second that there could be news."""

    def __init__(self) -> None:
        self._started = self._told = time.perf_counter()
        self._before: float | None = None
        self._times: deque[float] = deque(maxlen=_LATEST)
        self._earlier = self._earlier_per_step = 0.0

    @property
    def seconds(self) -> float:
        """Wall-clock time since the beginning of the run, without the gaps that interruptions left."""
        return self._earlier + time.perf_counter() - self._started

    @property
    def seconds_per_step(self) -> float:
        """The median time of a forward and what belongs to it; the few that have a test between them do not matter."""
        return median(self._times) if self._times else self._earlier_per_step

    def go_on(self, seconds: float, seconds_per_step: float) -> None:
        """Add what another process has taken before this one."""
        self._earlier, self._earlier_per_step = seconds, seconds_per_step

    def tick(self) -> bool:
        """Note that a forward begins; return whether it is time for news."""
        now = time.perf_counter()
        if self._before is not None:
            self._times.append(now - self._before)
        self._before = now
        if now - self._told < _SECONDS_BETWEEN_NEWS:
            return False
        self._told = now
        return True

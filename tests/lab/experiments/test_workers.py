import multiprocessing
import os
from collections.abc import Callable
from contextlib import closing

import pytest

from crossbn.lab.experiments.records import Point, Record, Run
from crossbn.lab.experiments.workers import WorkerError, run_all
from tests.lab.experiments.handmade import record, run


def pretend(task: Run, watch: Callable[[Point], None]) -> Record:
    """Report the process instead of a result."""
    watch(Point(1.0, 0.5))
    return record(os.getpid(), seed=task.seed)


def vanish(_: Run, __: Callable[[Point], None]) -> Record:
    os._exit(3)


def test_points_then_records_of_every_run_from_other_processes() -> None:
    runs = [run(seed=seed) for seed in range(5)]
    events = list(run_all(pretend, runs, processes=2))
    for each in runs:
        point, result = [news for task, news in events if task == each]
        assert point == Point(1.0, 0.5)
        assert isinstance(result, Record)
        assert result.run == each
        assert result.accuracy != os.getpid()
    assert multiprocessing.active_children() == []


def test_processes_end_with_the_caller_s_interest() -> None:
    with closing(run_all(pretend, [run(seed=seed) for seed in range(50)], processes=1)) as events:
        next(events)
    assert multiprocessing.active_children() == []


def test_a_lost_process_is_an_error_that_names_its_run() -> None:
    with pytest.raises(WorkerError, match="CBN at batch 2, seed 7, ended before its time"):
        list(run_all(vanish, [run(seed=7)], processes=1))
    assert multiprocessing.active_children() == []


def test_nothing_to_do_starts_nothing() -> None:
    assert list(run_all(vanish, [], processes=2)) == []

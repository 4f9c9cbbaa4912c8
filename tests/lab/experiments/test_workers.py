import multiprocessing
import os
from contextlib import closing

import pytest

from crossbn.lab.experiments.workers import WorkerError, run_all
from crossbn.lab.progress import Progress, Watch
from crossbn.lab.records import Record, Task
from tests.lab.experiments.handmade import finished, run


def pretend(task: Task, watch: Watch) -> Record:
    """Report the process instead of a result, and whether it may have processes of its own."""
    watch(Progress(0.5, "half way"))
    return finished(task, os.getpid(), seconds=float(multiprocessing.current_process().daemon))


def vanish(_: Task, __: Watch) -> Record:
    os._exit(3)


def test_progress_then_records_of_every_run_from_other_processes() -> None:
    runs = [run(seed=seed) for seed in range(5)]
    events = list(run_all(pretend, runs, processes=2))
    for each in runs:
        progress, record = [news for task, news in events if task == each]
        assert progress == Progress(0.5, "half way")
        assert isinstance(record, Record)
        assert record.key == each.key
        assert record.values["accuracy"] != os.getpid()
        assert not record.values["seconds"]
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

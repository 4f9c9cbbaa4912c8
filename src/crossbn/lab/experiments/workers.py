"""Independent runs side by side, one process each.

A network this small keeps one core busy; more threads for it would only wait for each other.
"""

import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol, TypeVar

import torch


class Named(Protocol):
    """What a run has at least."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def seed(self) -> int:
        """Which one of that name."""
        ...


RunT = TypeVar("RunT", bound=Named)
PointT = TypeVar("PointT")
RecordT = TypeVar("RecordT")


class WorkerError(RuntimeError):
    """A process ended without the record it was asked for."""


class _Finished(NamedTuple):
    record: Any


def run_all(
    train: Callable[[RunT, Callable[[PointT], None]], RecordT], runs: Sequence[RunT], processes: int
) -> Generator[tuple[RunT, PointT | RecordT]]:
    """Do the runs, at most `processes` of them at once, and yield what comes in: points, at the end the record.

    A caller that stops listening, by an exception or otherwise, ends the processes.

    Args:
        train: does one run; a function of a module, so that another process can find it.
        runs: started in this order.
        processes: at least 1.

    Raises:
        WorkerError: if a process ends without a record; what happened to it is on the error output.
    """
    context = get_context("spawn")  # a forked torch may hang: its threads do not come along
    todo = deque(runs)
    workers = []
    doing: dict[Connection, RunT] = {}
    try:
        for _ in range(min(processes, len(runs))):
            here, there = context.Pipe()
            worker = context.Process(target=_work, args=(train, there), daemon=True)
            with _interrupts_ignored():
                worker.start()
            there.close()  # so that the end of the process is the end of the pipe
            workers.append(worker)
            _assign(here, todo, doing)
        while doing:
            for connection in wait(list(doing)):
                assert isinstance(connection, Connection)
                run = doing[connection]
                message = _receive(connection, run)
                if isinstance(message, _Finished):
                    yield run, message.record
                    _assign(connection, todo, doing)
                else:
                    yield run, message
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _assign(connection: Connection, todo: deque[RunT], doing: dict[Connection, RunT]) -> None:
    doing.pop(connection, None)
    if todo:
        doing[connection] = todo.popleft()
        connection.send(doing[connection])


def _receive(connection: Connection, run: Named) -> Any:
    try:
        return connection.recv()
    except EOFError:
        raise WorkerError(f"the process of {run.name}, seed {run.seed}, ended before its time") from None


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal; those started here leave it to this one."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(train: Callable[[RunT, Callable[[PointT], None]], RecordT], connection: Connection) -> None:
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError):  # the other end is gone: nobody waits for the rest
        while True:
            connection.send(_Finished(train(connection.recv(), connection.send)))

"""Independent runs side by side, one process each.

A network this small keeps one core busy; more threads for it would only wait for each other.
"""

import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

import torch

from crossbn.experiments.records import Point, Record, Run

Train = Callable[[Run, Callable[[Point], None]], Record]


class WorkerError(RuntimeError):
    """A process ended without the record it was asked for."""


def run_all(train: Train, runs: Sequence[Run], processes: int) -> Generator[tuple[Run, Point | Record]]:
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
    doing: dict[Connection, Run] = {}
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
                yield run, message
                if isinstance(message, Record):
                    _assign(connection, todo, doing)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _assign(connection: Connection, todo: deque[Run], doing: dict[Connection, Run]) -> None:
    doing.pop(connection, None)
    if todo:
        doing[connection] = todo.popleft()
        connection.send(doing[connection])


def _receive(connection: Connection, run: Run) -> Point | Record:
    try:
        message: Point | Record = connection.recv()
    except EOFError:
        raise WorkerError(f"the process of {run.name}, seed {run.seed}, ended before its time") from None
    return message


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal; those started here leave it to this one."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(train: Train, connection: Connection) -> None:
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError):  # the other end is gone: nobody waits for the rest
        while True:
            connection.send(train(connection.recv(), connection.send))

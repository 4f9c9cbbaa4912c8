"""Independent runs side by side, one process each.

A network this small keeps one core busy; more threads for it would only wait for each other.
"""

import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from crossbn.lab.progress import Progress, Watch
from crossbn.lab.records import Record, Task

Train = Callable[[Task, Watch], Record]
"""Does one run; a function of a module, so that another process can find it."""


class WorkerError(RuntimeError):
    """A process ended without the record it was asked for."""


def run_all(train: Train, runs: Sequence[Task], processes: int) -> Generator[tuple[Task, Progress | Record]]:
    """Do the runs, at most `processes` of them at once, and yield what comes in: progress, at the end the record.

    A caller that stops listening, by an exception or otherwise, ends the processes.

    Args:
        train: does one run.
        runs: started in this order.
        processes: at least 1.

    Raises:
        WorkerError: if a process ends without a record; what happened to it is on the error output.
    """
    context = get_context("spawn")  # a forked torch may hang: its threads do not come along
    todo = deque(runs)
    workers: dict[Connection, BaseProcess] = {}
    doing: dict[Connection, Task] = {}
    try:
        for _ in range(min(processes, len(runs))):
            here, there = context.Pipe()
            # No daemons, which may have no processes of their own: those that read images.
            worker = context.Process(target=_work, args=(train, there))
            with _interrupts_ignored():
                worker.start()
            there.close()  # so that the end of the process is the end of the pipe
            workers[here] = worker
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
        for connection, process in workers.items():
            if connection in doing:
                process.terminate()
            connection.close()  # which ends one that has nothing to do
            process.join()


def _assign(connection: Connection, todo: deque[Task], doing: dict[Connection, Task]) -> None:
    doing.pop(connection, None)
    if todo:
        doing[connection] = todo.popleft()
        connection.send(doing[connection])


def _receive(connection: Connection, run: Task) -> Progress | Record:
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


def _work(train: Train, connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError):  # the other end is gone: nobody waits for the rest
        while True:
            connection.send(train(connection.recv(), connection.send))

"""Processes of tests, without waiting for imports: copies of one that has done them, as each test process has one."""

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch

ROOT = Path(__file__).parents[1]
METHOD: Final = "forkserver"
"""How processes are started, as multiprocessing and torch's `start_processes` call it."""
_STREAMS = ("stdout", "stderr")
_CONTEXT = multiprocessing.get_context(METHOD)
_CONTEXT.set_forkserver_preload(
    ["crossbn.lab.recipes.run", "torchvision", "torch.distributed.fsdp", "tests.support", "tests.processes"]
)


def start(function: Callable[..., object], *arguments: Any, variables: dict[str, str] | None = None) -> BaseProcess:
    """Start a process that calls a function, in which warnings are errors, with these variables beside our own."""
    process = _CONTEXT.Process(target=_call, args=(function, arguments, {**os.environ, **(variables or {})}))
    process.start()
    return process


def _call(function: Callable[..., object], arguments: tuple[Any, ...], variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    # Where the tests run in the background, a shell may have had them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    function(*arguments)


def start_command(*words: str | Path, output: Path) -> BaseProcess:
    """Start `crossbn` with these words; what it prints is in "stdout" and "stderr" of a folder that is made."""
    output.mkdir(parents=True)
    for name in _STREAMS:
        (output / name).touch()
    return start(_command, [str(word) for word in words], output)


def _command(words: list[str], output: Path) -> None:
    from crossbn.cli import main

    warnings.resetwarnings()
    for name in _STREAMS:
        with (output / name).open("wb") as file:
            os.dup2(file.fileno(), getattr(sys, name).fileno())
    sys.argv = [str(Path(sys.executable).with_name("crossbn")), *words]  # Lightning starts other processes with it
    main()


def printed(output: Path) -> tuple[str, str]:
    """Return what a command has printed, on "stdout" and on "stderr"."""
    out, errors = ((output / name).read_text() for name in _STREAMS)
    return out, errors


def ended(process: BaseProcess, seconds: float = 120.0) -> int:
    """Wait for a process's end; return its status."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"{process} has not ended after {seconds} s")
    assert process.exitcode is not None
    return process.exitcode


def run_pair(function: Callable[..., object], *arguments: Any) -> list[int]:
    """Call a function in two processes with the variables that torchrun would give them; return their statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pair = [
        start(_of_pair, function, arguments, variables={**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"
    ]
    return [ended(process) for process in pair]


def _of_pair(function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    from lightning_utilities.core.rank_zero import rank_zero_only

    vars(rank_zero_only)["rank"] = int(os.environ["RANK"])  # it was set when Lightning was imported
    status = 1
    try:
        function(*arguments)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)  # taken apart, DDP over gloo may wait for itself


def states(folder: Path) -> list[dict[str, Any]]:
    """Return what the two processes have saved, each in a file of its own."""
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def kill_after_a_checkpoint(function: Callable[[Path], object], folder: Path, patience: float = 0.0) -> None:
    """Call a function that trains in `folder`; kill its process so many seconds after it has written a checkpoint."""
    process = start(function, folder)
    wait_for(folder / "last.ckpt", process)
    time.sleep(patience)
    process.kill()
    assert ended(process) in (0, -signal.SIGKILL)


def interrupt(process: BaseProcess) -> None:
    """Send a process what Ctrl-C does."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)


def wait_for(path: Path, process: BaseProcess) -> None:
    """Wait until a process has written a file, or made a folder."""
    while not path.exists():
        assert process.is_alive()
        time.sleep(0.01)

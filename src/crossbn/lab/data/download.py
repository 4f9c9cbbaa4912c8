"""Getting a data set from one of its sources, with the programs that know the way there."""

import hashlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from crossbn.lab.data.dataset import DataError, DataSet, Source
from crossbn.lab.data.layouts import find_in
from crossbn.lab.data.store import Parts

Watch = Callable[[str, float], None]
"""Told what is being done, and how much of it, 0 to 1."""

STALL_SECONDS = 120.0
"""A command that brings nothing for so long is given up."""
_LOOK_SECONDS = 0.2


def obtain(dataset: DataSet, watch: Watch) -> Parts:
    """Return both parts of a data set from the first source that has it, with nothing left on the disk.

    Raises:
        DataError: if no source has it undamaged; it says of each why.
    """
    reasons = []
    for source in dataset.sources:
        with TemporaryDirectory(prefix="crossbn-", ignore_cleanup_errors=True) as name:
            try:
                return _get(dataset, source, Path(name), watch)
            except DataError as error:
                reasons.append(f"{source.name}: {str(error).replace(f'{name}/', '')}")
    raise DataError(f"it could not be downloaded ({'; '.join(reasons)})")


def _get(dataset: DataSet, source: Source, folder: Path, watch: Watch) -> Parts:
    for command in source.commands:
        _run(command, folder, lambda done: watch(source.name, min(1.0, done / source.size_bytes)))
    _verify(source, folder)
    watch(f"{source.name}: decoding", 1.0)
    found = find_in(folder / source.folder, dataset)
    if found is None:
        raise DataError("it brought something else")
    return found.read_both()


def _run(command: Iterable[str], folder: Path, watch: Callable[[int], None]) -> None:
    """Run a command in the folder; tell now and then how many bytes are there."""
    name, *words = (_match(word, folder) for word in command)
    program = shutil.which(name)
    if program is None:
        raise DataError(f"{name} is not installed")
    log = folder / "errors.txt"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [program, *words], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            _wait(process, folder, watch)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
    if process.returncode:
        raise DataError(_reason(log.read_text(errors="replace")) or f"{name} ended with status {process.returncode}")


def _wait(process: "subprocess.Popen[bytes]", folder: Path, watch: Callable[[int], None]) -> None:
    most, since = -1, time.monotonic()
    while process.poll() is None:
        done = _size(folder)
        watch(done)
        if done > most:
            most, since = done, time.monotonic()
        elif time.monotonic() - since > STALL_SECONDS:
            raise DataError(f"nothing came for {STALL_SECONDS:.0f} s")
        try:
            process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _match(word: str, folder: Path) -> str:
    """Return the name of the file that a word with a star stands for, any other word as it is."""
    if "*" not in word:
        return word
    names = [path.name for path in folder.glob(word)]
    if len(names) != 1:
        raise DataError(f"{len(names)} files are named {word} in place of one")
    return names[0]


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # gone since it was listed: programs rename and remove what they work on
            continue
    return total


def _reason(errors: str) -> str:
    r"""Return the line of a program's errors that says why it failed, "" if there is none.

    Example:
        >>> _reason("npm error code E404\nnpm error 404 Not Found\nnpm error A log is somewhere")
        '404 Not Found'
        >>> _reason("W: Unsandboxed\nE: Unable to locate package")
        'Unable to locate package'
    """
    lines = [line.removeprefix("npm error").removeprefix("npm ERR!").strip() for line in errors.splitlines()]
    told = [line for line in lines if line and not line.startswith(("code ", "syscall ", "errno ", "W: "))]
    return told[0].removeprefix("E: ") if told else ""


def _verify(source: Source, folder: Path) -> None:
    for name, known in source.sha256.items():
        path = folder / source.folder / name
        if not path.is_file():
            raise DataError(f"it did not bring {name}")
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != known:
            raise DataError(f"the checksum of {name} is {found[:12]}... in place of {known[:12]}...")

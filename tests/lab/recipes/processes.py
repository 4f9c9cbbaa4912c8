"""Runs in processes of their own, which a test file starts as a program."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]


def torchrun(module: str, *words: str | Path) -> int:
    """Run a module in two processes that torchrun starts; return its status."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *launcher, "-m", module, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False).returncode


def states(folder: Path) -> list[dict[str, Any]]:
    """Return what the two processes have saved, each in a file of its own."""
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def kill_after_a_checkpoint(module: str, folder: Path, patience: float = 0.0) -> None:
    """Run a module that trains in `folder`, and kill it so many seconds after it has written a checkpoint."""
    process = subprocess.Popen([sys.executable, "-W", "error", "-m", module, str(folder)], cwd=ROOT)
    while not (folder / "last.ckpt").exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(patience)
    process.kill()
    process.wait()

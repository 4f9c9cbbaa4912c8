"""What a number was measured with: software, machine, state of the source."""

import functools
import hashlib
import platform
import subprocess
from pathlib import Path

import torch

import crossbn
from crossbn.ops import library


def versions() -> dict[str, str]:
    """Return the versions of the software, by name."""
    return {"crossbn": crossbn.__version__, "torch": torch.__version__, "python": platform.python_version()}


def machine(device: str) -> dict[str, str]:
    """Return what the machine computes with, by kind."""
    found = {"processor": _processor(), "native code": "in use" if library.is_available() else "not in use"}
    if torch.device(device).type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
    return found


@functools.cache
def commit() -> str:
    """Return the last commit that changed the package, "+" and a digest of what has changed since; "" if unknown."""
    package = Path(crossbn.__file__).parent
    top = _git(package, "rev-parse", "--show-toplevel")
    if not top or Path(top, "src", "crossbn").resolve() != package.resolve():
        return ""  # installed, perhaps inside somebody else's repository
    last = _git(package, "log", "-1", "--format=%h", "--", ".")
    changes = _git(package, "status", "--porcelain", "--", ".") + _git(package, "diff", "HEAD", "--", ".")
    return f"{last}+{hashlib.sha256(changes.encode()).hexdigest()[:7]}" if changes else last


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _processor() -> str:
    """Return the processor's model where the system tells it, else its kind."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()

"""What a number was measured with: software, machine, state of the source.

Nothing here imports torch unless it is there or a GPU is asked for: whether a run has been done is found out without.
"""

import ctypes
import functools
import hashlib
import json
import os
import platform
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import crossbn


def stamp(device: str = "cpu", packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return what every record says of where it comes from.

    Args:
        device: that was computed on.
        packages: whose versions matter beside torch's.
    """
    return {"versions": versions(packages), "machine": machine(device), "commit": commit()}


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions of the software, by name; "" for a package that is not installed in the usual way."""
    own = {"crossbn": crossbn.__version__, "torch": torch_build()["__version__"], "python": platform.python_version()}
    return own | {name: _version(name) for name in packages}


@functools.cache
def torch_build() -> dict[str, Any]:
    """Return what `torch.version` says: `__version__`, which the package's metadata cut short, and `cuda`."""
    return runpy.run_path(str(_torch_folder() / "version.py"))


def _torch_folder() -> Path:
    found = find_spec("torch")
    assert found is not None, "crossbn requires it"
    assert found.origin is not None
    return Path(found.origin).parent


def best_device() -> str:
    """Return where a run computes; torch is imported only where it was built for more than the CPU."""
    if not torch_build().get("cuda") and not torch_build().get("hip"):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def has_compiled_code() -> bool:
    """Tell whether compiled code does a training step on the CPU."""
    if library := sys.modules.get("crossbn.ops.library"):
        return bool(library.is_available())
    folder = Path(crossbn.__file__).parent / "ops"
    files = [folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = os.environ.get("CROSSBN_LIBRARY") or next((str(file) for file in files if file.exists()), None)
    if os.environ.get("CROSSBN_NATIVE") == "0" or path is None:
        return False
    try:
        if (openmp := _torch_folder() / "lib" / "libgomp.so.1").exists():
            ctypes.CDLL(str(openmp))  # torch's own, and no other beside it when torch is imported later
        return hasattr(ctypes.CDLL(path), "result_alignment")
    except OSError:
        return False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def install_command(extra: str) -> str:
    """Return what installs packages that the library itself does not need, by the name of their extra."""
    is_clone = (Path(crossbn.__file__).parents[2] / "pyproject.toml").exists()
    if not is_clone and _version("crossbn"):
        # pip has written down where it found what it installed, unless that was a registry.
        is_clone = "dir_info" in json.loads(distribution("crossbn").read_text("direct_url.json") or "{}")
    return f"pip install '{'.' if is_clone else 'crossbn'}[{extra}]'"


def usable_cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: str) -> dict[str, str]:
    """Return what the machine computes with, by kind."""
    found = {
        "processor": _processor(),
        "cores": str(usable_cores()),
        "native code": "in use" if has_compiled_code() else "not in use",
    }
    if device.startswith("cuda"):
        import torch

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

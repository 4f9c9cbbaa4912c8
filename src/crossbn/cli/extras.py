"""Packages that a command needs and `pip install crossbn` alone does not bring."""

import sys
from importlib.util import find_spec

from crossbn.lab.environment import install_command


def require(*packages: str, extra: str = "demo") -> None:
    """End the command with a sentence on how to install the packages, if one is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        sys.exit(f"crossbn: this command needs {', '.join(missing)}: {install_command(extra)}")

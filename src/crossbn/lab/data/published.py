"""Download a data set as its authors publish it, with torchvision, into the current folder.

Run by a command line, see `catalogue`: in a process of its own a timeout for every connection disturbs nobody.
"""

import io
import socket
import sys
from contextlib import redirect_stderr
from http.client import HTTPException
from pathlib import Path

from crossbn.compat import ensure_torchvision

SECONDS = 15.0
"""How long a server may be silent. Where there is no way to it, the next source should get its turn soon."""


def download(kind: str, folder: Path) -> None:
    """Let torchvision's class named `kind` download into the folder, check and unpack."""
    ensure_torchvision()
    from torchvision import datasets

    with redirect_stderr(io.StringIO()):  # a bar, which would stand before the reason of a failure
        getattr(datasets, kind)(folder, download=True)


def main() -> None:
    """Download; end with a sentence if that is not possible."""
    socket.setdefaulttimeout(SECONDS)
    try:
        download(sys.argv[1], Path())
    except (OSError, RuntimeError, HTTPException, ImportError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()

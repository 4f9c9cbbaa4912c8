"""Where data is looked for."""

import os
from pathlib import Path

FOLDER_VARIABLE = "CROSSBN_DATA"


def data_folder(folder: Path | None = None) -> Path:
    """Return the folder of the data sets: the given one, else the variable CROSSBN_DATA's, else `data`.

    Example:
        >>> data_folder(Path("/mnt/data")).parts
        ('/', 'mnt', 'data')
    """
    return folder if folder is not None else Path(os.environ.get(FOLDER_VARIABLE) or "data").expanduser()


def cache_folder() -> Path:
    """Return where downloads and decoded data sets are kept: in XDG_CACHE_HOME, `~/.cache` if that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "crossbn"

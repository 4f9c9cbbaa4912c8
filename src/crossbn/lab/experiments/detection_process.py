"""One of several processes that train a detector side by side; the first prints its news as lines of JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from crossbn.lab.experiments.detection import do
from crossbn.lab.progress import Progress


def main(told: dict[str, Any]) -> None:
    """Train what was told."""
    torch.set_num_threads(1)

    def tell(news: Progress) -> None:
        print(json.dumps(news._asdict()), flush=True)

    values = do(told["settings"], told["seed"], tell, Path(told["folder"]))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"values": values}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

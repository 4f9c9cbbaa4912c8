"""A callback for ultralytics: its trainer makes the model that is trained, and tells when it is ready.

The moving average of the weights, which is what ultralytics evaluates and saves, is a copy made before and stays
BatchNorm: its files load without this package. A resumed training begins with an empty history.
"""

import logging
from typing import Any

from crossbn.convert import check_options, convert_

LOGGER = logging.getLogger("ultralytics")
"""The one that ultralytics writes its lines with."""


def add_callback(model: Any, **options: Any) -> None:
    """Let a model of ultralytics train with cross-iteration norms: `add_callback(YOLO("yolo11n.yaml"))`.

    Ultralytics trains on several GPUs in processes of its own, which do not know callbacks: this is for one device.

    Args:
        model: a `YOLO`, before its `train` is called.
        options: of `crossbn.convert_`. Without `window` and `batch_size` the batch size is that of the training.

    Raises:
        TypeError: for an option that does not exist.
        ValueError: for one that is out of range.
    """
    told = bool(options.keys() & {"window", "batch_size", "config"})
    check_options(**(options if told else {**options, "batch_size": 1}))

    def convert(trainer: Any) -> None:
        if trainer.world_size > 1:
            raise ValueError(f"crossbn converts models of ultralytics on one device, not on {trainer.world_size}")
        own = {} if told else {"batch_size": trainer.batch_size}
        LOGGER.info("crossbn: %s", convert_(trainer.model, **own, **options).summary())

    model.add_callback("on_pretrain_routine_end", convert)

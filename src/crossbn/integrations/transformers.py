"""A callback for the Trainer of transformers: conversion, and the history in its checkpoints.

The Trainer resumes model, optimizer and schedule; what the norms of each process remember is kept beside them.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from crossbn.conversion_report import ConversionReport
from crossbn.convert import check_options, convert_, cross_iteration_norms
from crossbn.histories import history_state, load_history_state

LOGGER = logging.getLogger("transformers.crossbn")
"""Below that of transformers, so that lines appear where its lines do."""


class CrossIterationNorm(TrainerCallback):
    """Train with cross-iteration norms: `Trainer(..., callbacks=[CrossIterationNorm()])`.

    The model's batch norms are converted when the Trainer is made, unless that has been done before. A checkpoint of
    the Trainer then has a file with the history of each process, and resuming reads it. What `save_model` writes is a
    BatchNorm network that `from_pretrained` loads without this package.

    Args:
        options: of `crossbn.convert_`. Without `window` and `batch_size` the batch size is the Trainer's
            `per_device_train_batch_size`: a window counts forwards.

    Attributes:
        report: what conversion did with each norm; None until then, or if the norms are somebody else's.

    Raises:
        TypeError: for an option that does not exist.
        ValueError: for one that is out of range.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        check_options(**_with_batch_size(options, 1))
        self.report: ConversionReport | None = None

    def on_init_end(self, args: TrainingArguments, *_: Any, model: nn.Module, **__: Any) -> None:
        """Convert, before anything wraps the model."""
        self._convert_(args, model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, _: TrainerControl, *, model: nn.Module, **__: Any
    ) -> None:
        """Convert if that is still to do, and take over the history of the checkpoint that training resumes from."""
        self._convert_(args, model)
        if not state.global_step:
            return
        path = _path(args, state)
        if path.exists():
            load_history_state(model, torch.load(path, weights_only=True))
        else:
            LOGGER.warning("%s does not exist: the norms of process %d remember nothing", path, args.process_index)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, _: TrainerControl, *, model: nn.Module, **__: Any
    ) -> None:
        """Write what the norms of this process remember into the checkpoint's folder."""
        path = _path(args, state)
        path.parent.mkdir(parents=True, exist_ok=True)  # another process may be the one that writes the model
        torch.save(history_state(model), path)

    def _convert_(self, args: TrainingArguments, model: nn.Module) -> None:
        if cross_iteration_norms(model):
            return
        self.report = convert_(model, **_with_batch_size(self.options, args.per_device_train_batch_size))
        LOGGER.info(self.report.summary())


def _with_batch_size(options: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Return options of `convert_`, with a batch size where they do not tell the window."""
    told = options.keys() & {"window", "batch_size", "config"}
    return dict(options) if told else {**options, "batch_size": batch_size}


def _path(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / f"crossbn-{args.process_index}.pt"

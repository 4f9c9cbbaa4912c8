"""The callback for the Trainer of transformers."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from crossbn.compat import ensure_torchvision
from crossbn.convert import convert_, cross_iteration_norms

ensure_torchvision()

from transformers import Trainer, TrainerState, TrainingArguments  # noqa: E402

from crossbn.integrations.transformers import CrossIterationNorm  # noqa: E402


class Model(nn.Module):
    """A convolution, its norm and a mean, in the form that the Trainer takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.norm(self.conv(x)).relu().mean((2, 3))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_trainer(folder: Path, *callbacks: CrossIterationNorm) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{"per_device_train_batch_size": 4, "max_steps": 6, "save_steps": 3, "learning_rate": 0.1, "report_to": []},
        **{"disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False},
    )
    random = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(1, 8, 8, generator=random), "labels": torch.tensor(i % 4)} for i in range(24)]
    return Trainer(Model(), arguments, train_dataset=data, callbacks=list(callbacks))


def window_of(trainer: Trainer) -> int:
    (norm,) = cross_iteration_norms(trainer.model).values()
    return norm.settings.window


def test_window_is_that_of_the_trainers_batches(tmp_path: Path) -> None:
    assert window_of(make_trainer(tmp_path, CrossIterationNorm())) == 4


def test_options_come_first(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, CrossIterationNorm(window=7, order=2))
    (norm,) = cross_iteration_norms(trainer.model).values()
    assert (norm.settings.window, norm.settings.order) == (7, 2)


def test_a_converted_model_is_left_as_it_is(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    convert_(trainer.model, window=3)
    CrossIterationNorm().on_init_end(trainer.args, None, None, model=trainer.model)
    assert window_of(trainer) == 3


def test_added_later_it_converts_when_training_begins(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.add_callback(CrossIterationNorm())
    assert not cross_iteration_norms(trainer.model)
    trainer.train()
    assert window_of(trainer) == 4


def test_resuming_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path, CrossIterationNorm())
    whole.train()
    assert (tmp_path / "checkpoint-3" / "crossbn-0.pt").exists()
    resumed = make_trainer(tmp_path, CrossIterationNorm())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_wrong_options_are_refused_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="no option is called 'foo'"):
        CrossIterationNorm(foo=1)


def test_a_missing_history_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, callback = make_trainer(tmp_path), CrossIterationNorm()
    logger = logging.getLogger("transformers.crossbn")
    logger.addHandler(caplog.handler)  # transformers keeps its lines from the root
    callback.on_train_begin(trainer.args, TrainerState(global_step=5), None, model=trainer.model)
    logger.removeHandler(caplog.handler)
    assert "crossbn-0.pt does not exist" in caplog.text

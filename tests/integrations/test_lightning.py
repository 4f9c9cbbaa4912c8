"""The callback in a Trainer of one's own."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import crossbn
from crossbn.convert import cross_iteration_norms
from crossbn.integrations.engine import LightningModule, Trainer
from crossbn.integrations.lightning import KEY, LOGGER, CrossIterationNorm

# Lightning asks torch in an old way, and advises workers for images in memory.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


class Lines(logging.Handler):
    """Collects what is logged; Lightning's loggers do not always hand on to where pytest listens."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Lines()
    LOGGER.addHandler(handler)
    yield handler.found
    LOGGER.removeHandler(handler)


class Module(LightningModule):
    """What a user has: two convolutions with norms, put together in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.conv = nn.Conv2d(4, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(self.stem(x))).mean((2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Late(Module):
    """Its network is made where Lightning has it made for large models."""

    def __init__(self) -> None:
        LightningModule.__init__(self)

    def configure_model(self) -> None:
        self.build()


def loader(batch_size: int | None = 2, images: int = 16) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(images, 1, 7, 7, generator=generator), torch.arange(images) % 2
    return DataLoader(TensorDataset(x, y), batch_size)


def trainer(*callbacks: CrossIterationNorm, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_model_summary=False,
        **{**quiet, "max_epochs": 1, **options},
    )


def settings(module: nn.Module) -> dict[str, Any]:
    return {name: norm.settings for name, norm in cross_iteration_norms(module).items()}


@pytest.mark.parametrize("kind", [Module, Late])
def test_converts_what_there_is_at_the_start(kind: type[Module]) -> None:
    module = kind()
    trainer(CrossIterationNorm(batch_size=4, order=2, positions=None)).fit(module, loader())
    found = settings(module)
    assert list(found) == ["stem.1", "norm"]
    assert {(each.window, each.order, each.positions, each.burn_in) for each in found.values()} == {(4, 2, None, 0)}
    pushed = {name: int(t) for name, t in crossbn.history_state(module).items() if name.endswith("pushed")}
    assert pushed == {"stem.1/0/pushed": 8, "norm/0/pushed": 8}


def test_equals_a_plain_loop_with_convert() -> None:
    module, plain = Module(), Module()
    trainer(CrossIterationNorm(window=3, burn_in_steps=2), max_epochs=2).fit(module, loader())
    crossbn.convert_(plain, window=3, burn_in=2)
    optimizer = plain.configure_optimizers()
    for batch in [*loader(), *loader()]:
        optimizer.zero_grad()
        plain.training_step(batch).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(("batch_size", "window"), [(2, 8), (4, 4), (8, 2)])
def test_window_comes_from_the_data_loader(batch_size: int, window: int) -> None:
    module = Module()
    trainer(CrossIterationNorm()).fit(module, loader(batch_size))
    assert {each.window for each in settings(module).values()} == {window}


def test_without_a_batch_size_to_be_seen_it_must_be_given() -> None:
    batches = [next(iter(loader()))]
    with pytest.raises(ValueError, match="not to be seen from list: give CrossIterationNorm a window or a batch_size"):
        trainer(CrossIterationNorm()).fit(Module(), batches)


@pytest.mark.parametrize(
    ("options", "accumulate", "burn_in"),
    [
        ({"burn_in_epochs": 1.5}, 1, 12),
        ({"burn_in_steps": 3}, 1, 3),
        ({"burn_in_epochs": 1.5}, 4, 12),
        ({"burn_in_steps": 3}, 4, 12),
    ],
)
def test_burn_in_in_epochs_or_steps(options: dict[str, Any], accumulate: int, burn_in: int, lines: list[str]) -> None:
    module, callback = Module(), CrossIterationNorm(**options)
    trainer(callback, max_epochs=2, accumulate_grad_batches=accumulate).fit(module, loader())
    assert {each.burn_in for each in settings(module).values()} == {burn_in}
    assert int(crossbn.history_state(module)["norm/0/pushed"]) == 16 - burn_in
    assert lines == [
        "2 norms: 2 compensated, 0 pooled, 0 left alone",
        *(["a step accumulates 4 forwards: its last one is normalized with all of them"] if accumulate == 4 else []),
        f"burn-in: BatchNorm for {burn_in} forwards, then a window of 8",
        f"burn-in ended after step {burn_in // accumulate}: from now on a window of 8",
    ]


def test_norms_of_ones_own_conversion_keep_their_settings() -> None:
    module = Module()
    crossbn.convert_(module, window=5, burn_in=2)
    trainer(CrossIterationNorm()).fit(module, loader())
    assert {(each.window, each.burn_in) for each in settings(module).values()} == {(5, 2)}
    trainer(CrossIterationNorm(window=3, burn_in_steps=4)).fit(module, loader())
    assert {(each.window, each.burn_in) for each in settings(module).values()} == {(3, 4)}


@pytest.mark.parametrize("options", [{"window": 3}, {"burn_in_steps": 11}, {"window": 3, "order": 2}], ids=str)
def test_resumes_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    straight, first, second = Module(), Module(), Module()
    trainer(CrossIterationNorm(**options), max_epochs=2).fit(straight, loader())
    begun = trainer(CrossIterationNorm(**options))
    begun.fit(first, loader())
    begun.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)[KEY]
    assert [set(each) for each in saved["histories"]] == [set(crossbn.history_state(first))]
    going_on = trainer(CrossIterationNorm(**options), max_epochs=2)
    going_on.fit(second, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(), strict=True))
    expected, found = crossbn.history_state(straight), crossbn.history_state(second)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_evaluation_of_a_checkpoint_needs_no_conversion(tmp_path: Path) -> None:
    module, plain = Module(), Module()
    begun = trainer(CrossIterationNorm(window=3))
    begun.fit(module, loader())
    begun.save_checkpoint(tmp_path / "end.ckpt")
    plain.test_step = lambda batch: plain(batch[0]).sum()
    trainer(CrossIterationNorm(window=3)).test(plain, loader(), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert type(plain.norm) is nn.BatchNorm2d
    x = next(iter(loader()))[0]
    assert torch.equal(plain.eval()(x), module.eval()(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 2, "batch_size": 4}, "one of window and batch_size"),
        ({"burn_in_epochs": 1, "burn_in_steps": 4}, "one of burn_in_epochs and burn_in_steps"),
        ({"burn_in_steps": -1}, "none below 0"),
        ({"window": 0}, "window must be an integer of at least 1, got 0"),
        ({"batch_size": 4, "order": 3}, "order must be one of 0, 1, 2, got 3"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CrossIterationNorm(**options)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(TypeError, match="burn_in_epochs and burn_in_steps in place of burn_in"):
        CrossIterationNorm(burn_in=3)
    with pytest.raises(TypeError, match="no option is called 'no_such_option'; there are window, burn_in"):
        CrossIterationNorm(window=2, no_such_option=1)


def test_tells_what_conversion_did() -> None:
    callback = CrossIterationNorm(window=2)
    assert callback.report is None
    module = Module()
    trainer(callback).fit(module, loader())
    assert callback.report is not None
    assert [record.name for record in callback.report.compensated] == list(cross_iteration_norms(module))


def test_a_module_without_norms_is_refused() -> None:
    module = Module()
    module.stem, module.norm = nn.Sequential(nn.Conv2d(1, 4, 3)), nn.Identity()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="Module has no batch norm that can be converted"):
        trainer(CrossIterationNorm(window=2)).fit(module, loader())


def test_lightnings_own_synchronization_is_refused() -> None:
    own = trainer(CrossIterationNorm(window=2), devices=2, strategy="ddp", sync_batchnorm=True)
    with pytest.raises(ValueError, match="CrossIterationNorm\\(sync=True\\) pools over processes too"):
        own.callbacks[0].setup(own, Module(), "fit")

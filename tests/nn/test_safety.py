"""What must not do harm: broken batches, lone positions, empty batches, changed weights, bad input."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import crossbn
from crossbn import nn as cnn
from crossbn.functional import weights_by_age
from tests.support import assert_same, compiled_code, history_of, norm_of

INF, NAN = float("inf"), float("nan")


def network(conv: nn.Module | None = None, **norm_options: Any) -> nn.Sequential:
    """Convolution and norm with parameters unlike the initial ones."""
    model = nn.Sequential(conv or nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, **norm_options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    return model


def converted(plain: nn.Sequential, **options: Any) -> nn.Sequential:
    model = copy.deepcopy(plain)
    crossbn.convert_(model, **{"window": 3, **options})
    return model


def batch(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 2, 6, 6)), dtype=torch.float64)


def everything(model: nn.Module) -> dict[str, Tensor]:
    # Burn-in counts training forwards, whatever comes of them.
    history = {key: value for key, value in crossbn.history_state(model).items() if not key.endswith("/burnt")}
    return {**copy.deepcopy(model.state_dict()), **history}


def steps_remembered(model: nn.Module) -> int:
    history = history_of(model)
    return min(int(history.num_steps), history.slots)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "options", [{}, {"burn_in": 9}, {"window": 1}, {"order": 0}, {"order": 2, "positions": None}], ids=str
)
@pytest.mark.parametrize("norm_options", [{}, {"momentum": None}, {"track_running_stats": False}], ids=str)
def test_broken_batch_is_batchnorms_and_leaves_no_trace(
    value: float, options: dict[str, Any], norm_options: dict[str, Any]
) -> None:
    plain = network(nn.Conv2d(2, 3, 3, groups=1), **norm_options)
    model = converted(plain, **options)
    for _ in range(3):
        model(batch())
    undisturbed, before = copy.deepcopy(model), everything(model)
    bad = batch()
    bad[0, 0, 0, 0] = value
    got, expected = model(bad), plain(bad)
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-10, atol=1e-10)
    assert not got.isfinite().all()
    got.sum().backward()
    assert_same(everything(model), before)
    for x in (batch(), batch()):
        assert torch.equal(model(x), undisturbed(x))


def test_broken_channel_leaves_the_others_to_batchnorm() -> None:
    plain = network(nn.Conv2d(2, 3, 1))
    model = converted(plain)
    for _ in range(2):
        model(batch())
    bad = batch()
    with torch.no_grad():
        for each in (model, plain):
            each[0].get_parameter("bias")[1] = INF
    got = model(bad)
    torch.testing.assert_close(got, plain(bad), equal_nan=True, rtol=1e-10, atol=1e-10)
    assert got[:, [0, 2]].isfinite().all()
    assert steps_remembered(model) == 2


@pytest.mark.parametrize("broken", [0, 1])
def test_broken_slice_of_a_concatenation(broken: int) -> None:
    class Concatenation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.norm(torch.cat([self.a(x), self.b(y)], 1))
            return out

    plain = Concatenation().double()
    model = copy.deepcopy(plain)
    crossbn.convert_(model, window=3)
    model(batch(), batch())
    before = everything(model)
    bad = [batch(), batch()]
    bad[broken][1] = NAN
    torch.testing.assert_close(model(*bad), plain(*bad), equal_nan=True, rtol=1e-10, atol=1e-10)
    assert_same(everything(model), before)


@pytest.mark.parametrize("positions", [None, 4])
@pytest.mark.parametrize("order", [1, 2])
def test_broken_value_that_the_convolution_skips(positions: int | None, order: int) -> None:
    """A stride may step over it: then the output is sound, and so must be what follows."""
    plain = network(nn.Conv2d(2, 3, 1, stride=2))
    model = converted(plain, positions=positions, order=order)
    bad = batch()
    bad[0, 0, 1, 1] = INF
    model(bad)
    for _ in range(3):
        out = model(batch())
        assert out.isfinite().all()
        out.sum().backward()
    assert all(tensor.isfinite().all() for tensor in everything(model).values())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("options", [{"window": 1}, {"burn_in": 2}], ids=str)
def test_lone_position_where_the_layer_is_batchnorm(options: dict[str, Any]) -> None:
    model = converted(network(nn.Conv2d(2, 3, 1)), **options)
    before = everything(model)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        model(batch(1, 2, 1, 1))
    assert_same(everything(model), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lone_positions(dtype: torch.dtype) -> None:
    model = converted(network(nn.Conv2d(2, 3, 1), momentum=0.25)).to(dtype)
    running_var = model.get_buffer("1.running_var").fill_(7)
    first = model(10 * batch(1, 2, 1, 1).to(dtype))
    assert torch.equal(first.flatten(), model.get_parameter("1.bias"))
    assert running_var.tolist() == [7, 7, 7]
    assert int(model.get_buffer("1.num_batches_tracked")) == 1
    out = model(batch(1, 2, 1, 1).to(dtype))
    assert 7 not in running_var
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        out = model(batch(1, 2, 1, 1).to(dtype))
        out.square().sum().backward()
        optimizer.step()
    assert all(tensor.isfinite().all() for tensor in (out, *everything(model).values()))


def test_batches_of_one() -> None:
    """Three of them are, with nothing trained in between, a batch of three."""
    plain = network()
    model = converted(plain, weights="equal")
    x = batch(3, 2, 6, 6)
    outputs = [model(example) for example in x.split(1)]
    torch.testing.assert_close(outputs[-1], plain(x)[2:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"window": 1}, {"burn_in": 2}], ids=str)
def test_empty_batch(options: dict[str, Any]) -> None:
    plain = network()
    model = converted(plain, **options)
    model(batch())
    before = everything(model)
    out = model(batch(0, 2, 6, 6))
    assert out.shape == plain(batch(0, 2, 6, 6)).shape == (0, 3, 4, 4)
    out.sum().backward()
    assert_same(everything(model), before)


def reload_all(model: nn.Sequential) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def reload_norm(model: nn.Sequential) -> None:
    model[1].load_state_dict(copy.deepcopy(model[1].state_dict()))


def reload_producer(model: nn.Sequential) -> None:
    model[0].load_state_dict(copy.deepcopy(model[0].state_dict()))


def assign_producer(model: nn.Sequential) -> None:
    model[0].load_state_dict(copy.deepcopy(model[0].state_dict()), assign=True)


def replace_weight(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())  # type: ignore[operator]


def reset_running(model: nn.Sequential) -> None:
    norm_of(model).reset_running_stats()


CLEARING = [reload_all, reload_norm, reload_producer, assign_producer, replace_weight, reset_running]


@pytest.mark.parametrize("clear", CLEARING)
@pytest.mark.parametrize("order", [1, 2])
def test_new_weights_clear_the_history(clear: Callable[[nn.Sequential], None], order: int) -> None:
    plain = network()
    model = converted(plain, order=order)
    for _ in range(3):
        model(batch())
    clear(model)
    x = batch()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
    assert steps_remembered(model) == 1


def test_other_weights_of_the_model_do_not_clear_it() -> None:
    model = nn.Sequential(*network(), nn.Conv2d(3, 2, 1)).double()
    crossbn.convert_(model, window=3)
    model(batch())
    reload = copy.deepcopy(model[2].state_dict())
    model[2].load_state_dict(reload)
    model[2].weight = nn.Parameter(torch.zeros(2, 3, 1, 1, dtype=torch.float64))
    model(batch())
    assert steps_remembered(model) == 2


@pytest.mark.parametrize("window", [1, 3])
def test_tracking_switched_off_at_run_time(window: int) -> None:
    model = converted(network(), window=window)
    norm = norm_of(model)
    norm.track_running_stats = False
    buffers = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    model(batch())
    assert_same(dict(norm.named_buffers()), buffers)


def test_step_after_a_failed_one() -> None:
    """A forward that raises halfway leaves nothing for the next one to mistake for its own."""
    norm = cnn.CrossIterBatchNorm2d(3, window=3).double()
    gamma, norm.weight = norm.weight, nn.Parameter(torch.ones(4, dtype=torch.float64))
    with pytest.raises(RuntimeError):
        norm(100 * batch(2, 3, 4, 4))
    norm.weight = gamma
    norm.reset_history_()
    x = batch(2, 3, 4, 4)
    torch.testing.assert_close(norm(x), nn.BatchNorm2d(3).double()(x), rtol=1e-12, atol=1e-12)


def test_sizes_may_change_from_step_to_step() -> None:
    model = converted(network(), positions=8)
    for shape in [(2, 2, 6, 6), (1, 2, 9, 5), (5, 2, 3, 3), (2, 2, 20, 20), (16, 2, 4, 4)]:
        out = model(batch(*shape))
        out.sum().backward()
        assert out.isfinite().all()
    assert steps_remembered(model) == 2


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        (cnn.CrossIterBatchNorm2d, (2, 4, 5, 5), r"^head: expected 3 channels, got \(2, 4, 5, 5\)"),
        (cnn.CrossIterBatchNorm2d, (3, 5, 5), r"^head: expected an input of 4 dimensions, got \(3, 5, 5\)"),
        (cnn.CrossIterBatchNorm1d, (2, 3, 5, 5), r"^head: expected an input of 2 or 3 dimensions, got \(2, 3, 5, 5\)"),
        (cnn.CrossIterBatchNorm3d, (2, 3, 5, 5), r"^head: expected an input of 5 dimensions, got \(2, 3, 5, 5\)"),
        (cnn.CrossIterBatchNorm, (3,), r"^head: expected an input of at least 2 dimensions, got \(3,\)"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_input_of_another_shape(
    kind: type[cnn.CrossIterBatchNorm], shape: tuple[int, ...], message: str, training: bool
) -> None:
    norm = kind(3)
    norm.label = "head"
    norm.train(training)
    with pytest.raises(ValueError, match=message):
        norm(torch.zeros(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be an integer of at least 1, got 0"),
        ({"window": 2.5}, "window must be an integer of at least 1, got 2.5"),
        ({"burn_in": -1}, "burn_in must be an integer of at least 0, got -1"),
        ({"order": 3}, "order must be one of 0, 1, 2, got 3"),
        ({"positions": 0}, "positions must be an integer of at least 1, got 0"),
        ({"backward": "both"}, "backward must be one of 'through', 'detached', got 'both'"),
        ({"invalid": "clip"}, "invalid must be one of 'max', 'drop', got 'clip'"),
    ],
)
def test_setting_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cnn.CrossIterBatchNorm2d(3, **options)


def test_producer_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"CrossIterBatchNorm2d: .*producer must be a convolution.*got ReLU\(\)"):
        cnn.CrossIterBatchNorm2d(3).attach_(nn.ReLU())


def test_producer_of_another_width() -> None:
    with pytest.raises(ValueError, match=r"CrossIterBatchNorm2d: normalizes 3 channels, .*Conv2d.* has 4"):
        cnn.CrossIterBatchNorm2d(3).attach_(nn.Conv2d(2, 4, 1))


def test_refused_producer_gets_no_hooks() -> None:
    conv = nn.Conv2d(2, 4, 1)
    with pytest.raises(ValueError, match="has 4"):
        cnn.CrossIterBatchNorm2d(3).attach_(conv)
    assert not conv._forward_hooks
    assert not conv._load_state_dict_post_hooks


def assert_plain_and_said_once(
    norm: cnn.CrossIterBatchNorm, x: Tensor, message: str, run: Callable[[], object] = lambda: None
) -> None:
    """The step is BatchNorm's, leaves no trace in the history, and is warned of, but not a second time."""
    plain = nn.SyncBatchNorm(norm.num_features).to(x.dtype)
    plain.load_state_dict(norm.state_dict())
    before = [copy.deepcopy(dict(source.history.state())) for source in norm.feeds.segments()]
    norm._said.clear()
    run()
    with pytest.warns(crossbn.ConversionWarning, match=message):
        out = norm(x)
    expected = nn.functional.batch_norm(
        x, plain.running_mean, plain.running_var, plain.weight, plain.bias, True, 0.1, norm.eps
    )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    torch.testing.assert_close(norm.running_var, plain.running_var)
    run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm(x)
    for source, state in zip(norm.feeds.segments(), before, strict=True):
        assert_same(dict(source.history.state()), state)


def test_producer_that_has_not_run() -> None:
    conv = nn.Conv2d(2, 3, 1).double()
    norm = cnn.CrossIterBatchNorm2d(3).double().attach_(conv)
    norm.label = "head"
    not_run = "^head: plain BatchNorm at this step: its operator has not run before it"
    assert_plain_and_said_once(norm, batch(2, 3, 4, 4), not_run)
    with torch.no_grad():
        out = conv(batch(2, 2, 4, 4))
    norm(out)
    assert int(norm.segments[0].history.num_steps) == 1
    assert_plain_and_said_once(norm, out, not_run)


def test_frozen_producer_without_gradients() -> None:
    """Its input counts all the same; its weights do not change."""
    plain = network()
    model = converted(plain, weights="equal")
    x, y = batch(), batch()
    for each in (x, y):
        with torch.no_grad():
            frozen = model[0](each)
        out = model[1](frozen)
    torch.testing.assert_close(out, plain(torch.cat([x, y]))[2:], rtol=0, atol=1e-12)
    assert steps_remembered(model) == 2
    out.square().sum().backward()
    assert model.get_parameter("1.weight").grad is not None
    assert model.get_parameter("0.weight").grad is None
    assert model.get_parameter("0.bias").grad is None


def test_branch_of_a_sum_that_is_left_out_now_and_then() -> None:
    """Stochastic depth: without weight changes, the mixture of steps is what BatchNorm sees in a mixed batch."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor, skip: bool = False) -> Tensor:
            out: Tensor = self.norm(self.a(x) if skip else self.a(x) + self.b(x))
            return out

    model = Skipping().double()
    crossbn.convert_(model, window=3, pairs={"norm": ("a", "b")}, weights="equal")
    batches = [batch() for _ in range(3)]
    for x, skip in zip(batches, (False, True, False), strict=True):
        out = model(x, skip)
    sums = [model.a(x) if i == 1 else model.a(x) + model.b(x) for i, x in enumerate(batches)]
    expected = nn.functional.batch_norm(torch.cat(sums), None, None, model.norm.weight, model.norm.bias, True)
    torch.testing.assert_close(out, expected[-2:], rtol=0, atol=1e-12)


def test_sum_of_which_nothing_has_run() -> None:
    norm = cnn.CrossIterBatchNorm2d(3).attach_(nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 3)).double()
    assert_plain_and_said_once(norm, batch(2, 3, 4, 4), "its operator has not run before it")


@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 3, 4, 4), (2, 3, 5, 4), (2, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"positions": None}, {"positions": 4}, {"order": 2}], ids=str)
def test_producer_whose_output_cannot_be_the_input(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    conv = nn.Conv2d(2, 3, 1).double()
    norm = cnn.CrossIterBatchNorm(3, **options).double().attach_(conv)
    norm.label = "head"
    norm(conv(batch(2, 2, 4, 4)))

    @torch.no_grad()
    def run() -> None:
        conv(batch(2, 2, 4, 4))

    message = "^head: plain BatchNorm at this step: its operator cannot have made its input"
    assert_plain_and_said_once(norm, batch(*shape), message, run)


def test_input_that_the_producer_has_not_made() -> None:
    """What made it is in the graph: where that is nothing linear, the norm that pairing has promised one says so."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
            self.linear = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            out: Tensor = self.norm(x if self.linear else x.relu())
            return out

    model = Switch().double()
    crossbn.convert_(model, window=3)
    model(batch(2, 3, 4, 4))
    model.linear = False
    norm = norm_of(model, "norm")
    x = batch(2, 3, 4, 4)
    with pytest.warns(
        crossbn.ConversionWarning, match=r"^norm: plain .*made otherwise than pairing has found: after relu"
    ):
        out = model(x)
    expected = nn.functional.batch_norm(model.conv(x).relu(), None, None, norm.weight, norm.bias, True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert int(norm.segments[0].history.num_steps) == 1


@pytest.mark.parametrize("decay", [1.0, 0.3])
@pytest.mark.parametrize("native", [True, False], ids=["in compiled code", "with torch's operators"])
def test_a_look_in_inference_mode_does_not_spoil_training(native: bool, decay: float) -> None:
    """What is worked out once and kept must not be of that mode."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
    crossbn.convert_(network, window=11, decay=decay)  # a window that no other test has
    x = torch.randn(2, 3, 6, 6)
    weights_by_age.cache_clear()
    with compiled_code(native):
        network(x).sum().backward()
        with torch.inference_mode():
            network(x)
        network(x).sum().backward()


def test_pruned_and_parametrized_norms_train() -> None:
    for change in (
        lambda norm: prune.l1_unstructured(norm, "weight", 1),
        lambda norm: parametrize.register_parametrization(norm, "weight", nn.Softplus()),
    ):
        model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
        crossbn.convert_(model, window=3)
        change(model[1])
        first, gamma = model(torch.randn(2, 3, 6, 6)), model[1].weight
        torch.testing.assert_close(first.std((0, 2, 3), correction=0), gamma, atol=1e-4, rtol=1e-4)
        first.square().sum().backward()
        for _ in range(2):
            model(torch.randn(2, 3, 6, 6)).square().sum().backward()
        assert int(model[1].segments[0].history.num_steps) == 3  # type: ignore[union-attr, index]

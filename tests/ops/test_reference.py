"""The reference step against the slow oracle, which remembers inputs and weights and has autograd's Jacobians."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbn import functional as C
from crossbn.functional import Settings
from crossbn.nn.history import History
from crossbn.ops import NotTheOperatorsOutput, StepInputs, reference
from tests.nn.test_oracle import OPERATORS
from tests.reference.cross_iteration import ReferenceNorm
from tests.support import functional_form, move_

WINDOW = 3


class Trained:
    """An operator whose weight moves from step to step, its history, and the oracle."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...], **options: object) -> None:
        told: dict[str, Any] = {"weights": "equal", **options}
        self.settings = Settings(window=WINDOW, positions=None, **told)
        self.module, self.shape, self.geometry = module.double(), shape, C.geometry_of(module)
        self.storage = C.make_storage([self.geometry], self.settings)
        self.channels = channels = self.geometry.out_channels
        shapes = {"mean": (channels,), "var": (channels,), "count": ()}
        shapes |= {} if self.storage is None else self.storage.shapes(channels)
        self.history = History(WINDOW - 1, shapes, torch.empty(0).double())
        self.oracle = ReferenceNorm(functional_form(module), WINDOW, **options)  # type: ignore[arg-type]

    def inputs(self, batch: int) -> StepInputs:
        y = torch.randn(batch, *self.shape).double() + 0.3
        with torch.no_grad():
            x, bias = self.module(y), self.module.bias
        operand = C.Operand(self.geometry, self.module.get_parameter("weight"), y, x.shape[2:])
        own_bias = bias.detach().clone() if isinstance(bias, Tensor) else None
        is_compensated = self.settings.order > 0
        operands = [operand] if is_compensated else []
        moments = C.batch_moments(x)
        return StepInputs(x, moments, True, operands, own_bias if is_compensated else None, True, True, True, None)

    def move(self, size: float = 0.05) -> None:
        move_(self.module.parameters(), size)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("name", OPERATORS)
def test_pooled_statistics_and_how_they_follow_the_weight(name: str, order: int) -> None:
    make, shape = OPERATORS[name]
    trained = Trained(make(), shape, order=order)
    one, zero = torch.ones(trained.channels).double(), torch.zeros(trained.channels).double()
    for batch in (2, 3, 2, 4):
        inputs = trained.inputs(batch)
        weight = trained.module.get_parameter("weight").detach().clone().requires_grad_()
        bias = trained.module.bias
        own_bias = bias.detach().clone() if isinstance(bias, Tensor) else 0.0
        y = inputs.operands[0].y if inputs.operands else None
        outcome = reference.step(inputs, trained.history.past(), trained.storage, trained.settings)
        found = outcome.statistics
        if y is not None:
            _, mean, var, count = trained.oracle(y, weight, own_bias, one, zero)
            torch.testing.assert_close((found.mean, found.var), (mean, var), rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(torch.as_tensor(found.bessel * one).double(), count / (count - 1))
        else:
            past = trained.history["mean"][: min(int(trained.history.num_steps), WINDOW - 1)]
            torch.testing.assert_close(
                found.mean, torch.cat([inputs.x.movedim(1, 0).flatten(1).mean(1)[None], past]).mean(0)
            )
        assert found.finite is True
        assert outcome.commit is not None
        outcome.commit()
        trained.move()


@pytest.mark.parametrize("invalid", ["max", "drop"])
def test_what_has_left_its_range(invalid: str) -> None:
    torch.manual_seed(1)
    trained = Trained(nn.Conv2d(3, 4, 3, bias=False), (3, 6, 5), invalid=invalid)
    one, zero = torch.ones(4).double(), torch.zeros(4).double()
    shares = []
    for batch in (2, 3, 2, 4):
        inputs = trained.inputs(batch)
        outcome = reference.step(inputs, trained.history.past(), trained.storage, trained.settings)
        y, weight = inputs.operands[0].y, inputs.operands[0].weight.detach().clone()
        assert y is not None
        _, mean, var, count = trained.oracle(y, weight, 0.0, one, zero)
        found = outcome.statistics
        torch.testing.assert_close((found.mean, found.var), (mean, var), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(torch.as_tensor(found.bessel * one), count / (count - 1))
        shares.append(found.share)
        assert outcome.commit is not None
        outcome.commit()
        trained.move(1.0)
    assert (torch.cat(shares[1:]) == 1).any() == (invalid == "drop")  # where all others were left out


def test_nothing_happens_to_the_past_before_it_is_told_to() -> None:
    trained = Trained(nn.Conv2d(3, 4, 3), (3, 6, 5))
    outcome = reference.step(trained.inputs(2), trained.history.past(), trained.storage, trained.settings)
    assert int(trained.history.num_steps) == 0
    assert not trained.history["mean"].any()
    assert outcome.commit is not None
    outcome.commit()
    assert int(trained.history.num_steps) == 1
    assert trained.history["mean"][0].all()


def test_the_output_of_another_operator() -> None:
    trained = Trained(nn.Conv2d(3, 4, 3), (3, 6, 5))
    inputs = trained.inputs(2)
    trained.move(1.0)
    moved = [inputs.operands[0]._replace(weight=trained.module.get_parameter("weight"))]
    past = trained.history.past()
    with pytest.raises(NotTheOperatorsOutput):
        reference.step(inputs._replace(operands=moved), past, trained.storage, trained.settings)
    # Something may be added to it, which cannot be told from that.
    reference.step(inputs._replace(operands=moved, is_complete=False), past, trained.storage, trained.settings)


@pytest.mark.parametrize(
    ("steps", "decay", "kept", "weights"),
    [
        (0, 0.5, [], []),
        (1, 0.5, [1], [0.5]),
        (2, 0.5, [1, 2], [0.25, 0.5]),
        (3, 0.5, [3, 2], [0.5, 0.25]),
        (3, 1.0, [3, 2], None),
    ],
)
def test_recall(steps: int, decay: float, kept: list[float], weights: list[float] | None) -> None:
    history = History(2, {"mean": (1,), "var": (1,), "count": ()}, torch.empty(0).double())
    for i in range(1, steps + 1):
        history.past().write_({"mean": torch.tensor([i]), "var": torch.ones(1), "count": torch.tensor(4)})
    found, step_weights = history.past().recall(decay, torch.float64)
    assert found["mean"].flatten().tolist() == kept
    assert (None if step_weights is None else step_weights.tolist()) == weights
    unread, all_weights = history.past()._replace(is_readable=False).recall(decay, torch.float64)
    assert unread["mean"].shape == (2, 1)
    assert all_weights is not None
    assert all_weights[: len(kept)].tolist() == (weights if weights is not None else [1.0] * len(kept))
    assert not all_weights[len(kept) :].any()


@pytest.mark.parametrize("flag", ["theirs", "finite", "pooling"])
def test_flags_that_are_not_looked_at(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a step that is not to be pooled is told by a tensor: it is BatchNorm's, and not remembered."""
    trained = Trained(nn.Conv2d(3, 4, 3, bias=False), (3, 6, 6))
    for _ in range(3):
        outcome = reference.step(trained.inputs(2), trained.history.past(), trained.storage, trained.settings)
        assert outcome.commit is not None
        outcome.commit()
        trained.move()
    no, inputs = torch.tensor(False), trained.inputs(2)
    assert trained.storage is not None
    remember = trained.storage.remember
    if flag == "theirs":
        monkeypatch.setattr(trained.storage, "remember", lambda seen: (remember(seen)[0], no))
    elif flag == "finite":
        inputs = inputs._replace(finite=no)
    else:
        inputs = inputs._replace(pooling=no)
    past = trained.history.past()._replace(is_readable=False)
    before = {name: tensor.clone() for name, tensor in trained.history.state()}
    found = reference.step(inputs, past, trained.storage, trained.settings)
    assert found.commit is not None
    found.commit()
    mean, var = C.batch_moments(inputs.x)
    torch.testing.assert_close(found.statistics.mean, mean)
    torch.testing.assert_close(found.statistics.var, var)
    torch.testing.assert_close(found.statistics.share, torch.ones_like(found.statistics.share))
    for name, tensor in trained.history.state():
        assert torch.equal(tensor, before[name]), name

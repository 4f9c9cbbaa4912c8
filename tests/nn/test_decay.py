"""Step weights by age: a remembered step counts `decay` to the power of its age."""

import pytest
import torch
from torch import Tensor, nn

import crossbn
from crossbn.nn.history import History
from crossbn.ops import Past
from tests.ops.test_cpu import Dense, train, twice
from tests.support import compiled_code, last_pooled


def frozen_statistics(decay: float, compiled: bool, wide: bool, steps: int = 7) -> tuple[Tensor, Tensor]:
    """Running statistics after steps with frozen weights, and what they should be."""
    network = last_pooled(wide, decay=decay)
    batches = [torch.randn(2, 2, 5, 6, dtype=torch.float64) + step for step in range(steps)]
    with compiled_code(compiled):
        for batch in batches:
            network(batch)
    means = [network[0](batch).detach().mean([0, 2, 3]) for batch in batches[-4:]]
    weights = [decay**age for age in reversed(range(len(means)))]
    mean = network.get_buffer("1.running_mean")
    return mean, sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)


@pytest.mark.parametrize("decay", [1.0, 0.7, 0.1])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("steps", [7, 8, 9])
def test_frozen_weights_give_the_weighted_average(decay: float, compiled: bool, wide: bool, steps: int) -> None:
    torch.testing.assert_close(*frozen_statistics(decay, compiled, wide, steps))


@pytest.mark.parametrize("steps", [2, 3, 7, 8])
def test_step_weights_of_a_history_that_is_not_looked_at(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU and in a compiled step: ages are worked out with tensors, places may be empty."""
    past = History.past

    def unread(history: History) -> Past:
        return past(history)._replace(is_readable=False)

    monkeypatch.setattr(History, "past", unread)
    got, want = frozen_statistics(0.7, True, False, steps)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("decay", [0.7, 1.0])
def test_compiled_code_trains_the_same(decay: float) -> None:
    torch.manual_seed(0)
    network = Dense()
    twice(lambda: train(network, decay=decay))


def test_step_weights_change_the_training() -> None:
    torch.manual_seed(0)
    network = Dense()
    plain, aged = train(network), train(network, decay=0.7)
    assert torch.equal(plain[0], aged[0])  # nothing is remembered yet
    assert not torch.allclose(plain[2], aged[2])


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.1])
def test_out_of_range(decay: float) -> None:
    with pytest.raises(ValueError, match=f"decay must be above 0 and at most 1, got {decay}"):
        crossbn.convert_(nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)), window=2, decay=decay)

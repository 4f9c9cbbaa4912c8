import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.lab.fidelity.bound import GRADIENTS, ExactWindow

BATCH, WINDOW = 3, 3
Detach = Callable[[Tensor], Tensor]


def two_layers() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh()),
        *(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh()),
        nn.Linear(6, 2),
    ).double()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(BATCH, 4, dtype=torch.float64), torch.randint(2, (BATCH,))) for _ in range(count)]


def keep(x: Tensor) -> Tensor:
    return x


def normalized(current: Tensor, remembered: Tensor, norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """The textbook's formula, with moments over both parts, term by term."""
    count = len(current) + len(remembered)
    mean = (current.sum(0) + remembered.sum(0)) / count
    var = ((current - mean).square().sum(0) + (remembered - mean).square().sum(0)) / count
    scale = norm.weight / (var + norm.eps).sqrt()
    return (current - mean) * scale + norm.bias, (remembered - mean) * scale + norm.bias


def expected_scores(network: nn.Sequential, current: Tensor, remembered: Tensor, gradient: str) -> Tensor:
    """The network written out; two parts side by side, the remembered one cut where the form says."""
    at_operator: Detach = Tensor.detach if gradient == "own" else keep
    at_norm: Detach = Tensor.detach if gradient == "none" else keep
    for operator, norm in ((network[0], network[1]), (network[3], network[4])):
        assert isinstance(norm, nn.BatchNorm1d)
        current, remembered = operator(current), at_norm(operator(at_operator(remembered)))
        current, remembered = (torch.tanh(part) for part in normalized(current, remembered, norm))
    return network[6](current)


def gradients(scores: Tensor, classes: Tensor, network: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(F.cross_entropy(scores, classes), list(network.parameters())))


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_scores_and_gradients_are_those_of_the_formula(gradient: str) -> None:
    network = two_layers()
    slow = copy.deepcopy(network)
    wrapped = ExactWindow(network, WINDOW, gradient=gradient)
    seen: list[Tensor] = []
    for step, (images, classes) in enumerate(batches(5)):
        scores = wrapped(images)
        remembered = torch.cat([images[:0], *seen[-(WINDOW - 1) :]])
        expected = expected_scores(slow, images, remembered, gradient)
        torch.testing.assert_close(scores, expected)
        for ours, slowly in zip(gradients(scores, classes, network), gradients(expected, classes, slow), strict=True):
            torch.testing.assert_close(ours, slowly)
        seen.append(images)
        with torch.no_grad():  # other weights at each step, the same in both
            for ours, slowly in zip(network.parameters(), slow.parameters(), strict=True):
                change = torch.randn_like(ours) * 0.1
                ours.add_(change)
                slowly.add_(change)
        assert network[1].num_batches_tracked == step + 1


def test_the_forms_differ_in_their_gradients_alone() -> None:
    network = two_layers()
    (first, _), (second, classes) = batches(2)
    scores, weights = {}, {}
    for gradient in GRADIENTS:
        own = copy.deepcopy(network)
        wrapped = ExactWindow(own, 2, gradient=gradient)
        wrapped(first)
        scores[gradient] = wrapped(second)
        weights[gradient] = gradients(scores[gradient], classes, own)
    assert torch.equal(scores["full"], scores["own"])
    assert torch.equal(scores["full"], scores["none"])
    # The last operator has no norm after it: the same in all. The second one is its norm's own layer in two of them.
    torch.testing.assert_close(weights["full"][8], weights["none"][8])
    torch.testing.assert_close(weights["full"][4], weights["own"][4])
    assert not torch.allclose(weights["full"][4], weights["none"][4])
    assert not torch.allclose(weights["full"][0], weights["own"][0])
    assert not torch.allclose(weights["own"][0], weights["none"][0])


def test_running_statistics_are_those_of_all_images_in_the_window() -> None:
    network = two_layers()
    norm = network[1]
    assert isinstance(norm, nn.BatchNorm1d)
    norm.momentum = 1.0
    wrapped = ExactWindow(network, 2)
    (first, _), (second, _) = batches(2)
    wrapped(first)
    wrapped(second)
    x = network[0](torch.cat([second, first]))
    torch.testing.assert_close(norm.running_mean, x.mean(0))
    torch.testing.assert_close(norm.running_var, x.var(0))


def test_remembers_training_steps_only_and_after_burn_in() -> None:
    plain = two_layers()
    wrapped = ExactWindow(copy.deepcopy(plain), 3, burn_in=2)
    steps = batches(4)
    for images, _ in steps[:3]:  # two alone, the third begins the window
        torch.testing.assert_close(wrapped(images), plain(images))
    with torch.no_grad():
        wrapped(steps[0][0])
    wrapped.eval()
    assert wrapped(steps[1][0]).shape == (BATCH, 2)
    wrapped.train()
    expected = plain(torch.cat([steps[3][0], steps[2][0]]))[:BATCH]
    torch.testing.assert_close(wrapped(steps[3][0]), expected)


def test_window_1_is_the_network() -> None:
    plain = two_layers()
    wrapped = ExactWindow(copy.deepcopy(plain), 1, gradient="none")
    for images, _ in batches(3):
        assert torch.equal(wrapped(images), plain(images))


def test_goes_on_from_its_state() -> None:
    wrapped = ExactWindow(two_layers(), 3, gradient="own", burn_in=1)
    steps = batches(4)
    for images, _ in steps[:3]:
        wrapped(images)
    file = io.BytesIO()
    torch.save(wrapped.state_dict(), file)
    file.seek(0)
    again = ExactWindow(two_layers(), 3, gradient="own", burn_in=1)
    again.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(again(steps[3][0]), wrapped(steps[3][0]), rtol=0, atol=0)


def test_a_copy_cuts_its_own_gradients() -> None:
    wrapped = ExactWindow(two_layers(), 2, gradient="none")
    copied = copy.deepcopy(wrapped)
    (first, _), (second, classes) = batches(2)
    for each in (wrapped, copied):
        each(first)
    ours, theirs = (gradients(each(second), classes, each) for each in (wrapped, copied))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x) + x)


def test_own_needs_layers_of_its_own() -> None:
    with pytest.raises(
        ValueError, match=r"norm has no layer of its own to give a gradient to: it reads linear \+ rest"
    ):
        ExactWindow(Sum(), 2, gradient="own")
    ExactWindow(Sum(), 2, gradient="none")


def test_own_makes_a_constant_of_what_no_operator_feeds() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.BatchNorm1d(3)).double()
    (first, _), (second, classes) = batches(2)
    found = []
    for gradient in ("own", "none"):
        wrapped = ExactWindow(copy.deepcopy(network), 2, gradient=gradient)
        wrapped(first)
        found.append(gradients(wrapped(second), classes, wrapped))
    assert all(torch.equal(own, none) for own, none in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"window": 2, "burn_in": -1}, "burn_in at least 0"),
        ({"window": 2, "gradient": "some"}, "gradient must be one of 'full', 'own', 'none', got 'some'"),
    ],
)
def test_settings_out_of_range(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ExactWindow(two_layers(), **options)  # type: ignore[arg-type]  # on purpose

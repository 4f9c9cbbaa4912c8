"""The plain training loop."""

import pytest
import torch
from torch import nn

from crossbn.lab.progress import Progress
from crossbn.lab.training import Training, accuracy, draw


def test_a_step_is_sgd_with_momentum_and_a_rate_that_falls() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    images, classes = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    seen: list[Progress] = []
    training = Training(model, 2, 0.5, momentum=0.8, weight_decay=0.1, watch=seen.append)
    velocity = [torch.zeros_like(each) for each in twin.parameters()]
    for rate in (0.5, 0.25):
        training.step((images, classes))
        loss = nn.functional.cross_entropy(twin(images), classes)
        gradients = torch.autograd.grad(loss, list(twin.parameters()))
        assert training.losses[-1] == pytest.approx(loss.item())
        with torch.no_grad():
            for weight, moved, gradient in zip(twin.parameters(), velocity, gradients, strict=True):
                moved.mul_(0.8).add_(gradient + 0.1 * weight)
                weight.sub_(rate * moved)
    assert torch.allclose(model.weight, twin.weight)
    assert [each.share for each in seen] == [0.5, 1.0]
    assert seen[1].phrase == f"loss {training.losses[1]:.3f}"
    assert training.final_loss == training.losses[1]
    assert training.optimizer.param_groups[0]["lr"] == 0
    assert len(training.seconds) == 2


def test_a_loss_of_one_s_own_takes_what_is_no_tensor() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    training = Training(model, 1, 0.5, loss=lambda net, given, target: net(given["x"]).sum() * target)
    training.step(({"x": torch.full((1, 1), 3.0)}, 2))
    assert training.losses == [6.0]
    assert model.weight.item() == 1 - 0.5 * 6


def test_a_rate_may_stay() -> None:
    training = Training(nn.Linear(1, 2), 3, 0.5, falls=False)
    training.step((torch.ones(1, 1), torch.tensor([1])))
    assert training.optimizer.param_groups[0]["lr"] == 0.5


def test_images_that_do_not_fill_a_batch_wait_for_the_next_pass() -> None:
    torch.manual_seed(0)
    drawn = draw(5, 2)
    first, second, third = (next(drawn) for _ in range(3))
    assert len({*first.tolist(), *second.tolist()}) == 4
    torch.manual_seed(0)
    order = torch.randperm(5)
    assert first.tolist() == order[:2].tolist()
    assert third.tolist() == torch.randperm(5)[:2].tolist()


def test_accuracy_counts_and_leaves_the_model_training() -> None:
    scores = nn.Linear(64, 10).requires_grad_(False)
    scores.weight.zero_()
    scores.bias.zero_()[7] = 1.0  # says 7 to everything
    model = nn.Sequential(nn.Flatten(), scores)
    batches = [(torch.zeros(3, 1, 8, 8), torch.tensor([7, 1, 7])), (torch.zeros(1, 1, 8, 8), torch.tensor([7]))]
    assert accuracy(model, batches) == (0.75, 4)
    assert model.training

"""Where the graph does not tell all that the statistics follow, a norm is BatchNorm, bit for bit, and says so."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import crossbn

Forward = Callable[["Net", Tensor], Tensor]


class Padding(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias)


class Net(nn.Module):
    """One convolution and norm, and what `read` makes of them."""

    def __init__(self, read: Forward) -> None:
        super().__init__()
        self.conv, self.norm = Padding(2, 3, 3), nn.BatchNorm2d(3)
        self.added = nn.Parameter(torch.randn(1, 3, 1, 1))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x)


def computed_bias(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.norm(F.conv2d(x, net.conv.weight, net.conv.bias * 2 if net.conv.bias is not None else None))
    return out


def added_parameter(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.norm(net.conv(x) + net.added)
    return out


def in_a_region(net: Net, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda x: net.norm(net.conv(x)), x, use_reentrant=True)
    return out


def train_both(plain: Net, model: Net) -> None:
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (plain, model)]
    for _ in range(4):
        x = torch.randn(2, 2, 6, 6, requires_grad=True)
        outputs = [each(x) for each in (plain, model)]
        assert torch.equal(*outputs)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.sin().sum().backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("read", "reason"),
    [(computed_bias, "bias"), (added_parameter, "broadcast"), (in_a_region, "without a graph")],
)
def test_is_batchnorm_and_says_so(read: Forward, reason: str) -> None:
    torch.manual_seed(0)
    plain = Net(read)
    model = copy.deepcopy(plain)
    report = crossbn.convert_(model, window=4)
    with pytest.warns(crossbn.ConversionWarning, match="1 of 1 norms stay BatchNorm"):
        train_both(plain, model)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    if read is not in_a_region:  # where torch's norm counts the recomputation as a step of its own
        assert all(map(torch.equal, plain.buffers(), model.buffers()))
    assert [reason in record.reason for record in report.left] == [True]


class AlsoReads(nn.Module):
    """In evaluation something else reads the convolution's output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        out: Tensor = self.norm(y)
        return out if self.training else out + y


def test_fold_looks_at_evaluation() -> None:
    torch.manual_seed(0)
    model = AlsoReads()
    crossbn.convert_(model, window=3)
    for _ in range(3):
        model(torch.randn(2, 2, 4, 4)).sum().backward()
    x = torch.randn(2, 2, 4, 4)
    torch.testing.assert_close(crossbn.fold(model)(x), model.eval()(x))

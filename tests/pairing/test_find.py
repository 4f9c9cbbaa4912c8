"""One trait at a time: what a norm is said to read, by tracing and by watching alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from crossbn.pairing import Pairing, Segment, find_pairs
from tests.pairing.networks import ConvWithNormInside, Net, UserBatchNorm2d, UserConv2d, find_by_watching, structure

Body = Callable[[Any, Tensor], Any]


def direct(name: str, channels: int = 4) -> Segment:
    return Segment(channels, (name,), complete=True, reason=name)


def opaque(reason: str, channels: int = 4) -> Segment:
    return Segment(channels, (), complete=False, reason=reason)


CONV = (direct("conv"),)
BOTH = (Segment(4, ("conv", "other"), complete=True, reason="conv + other"),)
WITH_REST = (Segment(4, ("conv",), complete=False, reason="conv + rest"),)


def add_in_place(net: Any, x: Tensor) -> Any:
    out = alias = net.conv(x)
    alias += net.other(x)
    return net.norm(out)


def multiply_in_place(net: Any, x: Tensor) -> Any:
    out = alias = net.conv(x)
    alias *= 2
    return net.norm(out)


def call_in_place_and_drop_the_result(net: Any, x: Tensor) -> Any:
    out = net.conv(x)
    F.relu(out, inplace=True)
    return net.norm(out)


def write_to_a_slice(net: Any, x: Tensor) -> Any:
    out = net.conv(x)
    out[:, :2] = 0
    return net.norm(out)


def write_to_a_view(net: Any, x: Tensor) -> Any:
    out = net.conv(x)
    out.flatten(1).relu_()
    return net.norm(out)


def write_to_a_clone(net: Any, x: Tensor) -> Any:
    out = net.conv(x)
    copy = out.clone()
    copy.relu_()
    return net.norm(out), copy


def write_through_out(net: Any, x: Tensor) -> Any:
    out = net.conv(x)
    torch.mul(out, 2, out=out)
    return net.norm(out)


LOOKED_THROUGH: dict[str, Body] = {
    "nothing": lambda net, x: net.norm(net.conv(x)),
    "keywords": lambda net, x: net.norm(input=net.conv(input=x)),
    "contiguous and clone": lambda net, x: net.norm(net.conv(x).contiguous().clone()),
    "functional dropout of nothing": lambda net, x: net.norm(F.dropout(net.conv(x), 0.0)),
    "functional dropout switched off": lambda net, x: net.norm(F.dropout(net.conv(x), 0.5, training=False)),
    "a look at the shape": lambda net, x: net.norm(net.conv(x)).reshape(net.conv.out_channels, -1),
    "a module made on the fly": lambda net, x: nn.ReLU()(net.norm(net.conv(x))),
    "checkpointing": lambda net, x: net.norm(checkpoint(net.conv, x, use_reentrant=False)),
}

SUMS: dict[str, tuple[Body, tuple[Segment, ...]]] = {
    "operator": (lambda net, x: net.norm(net.conv(x) + net.other(x)), BOTH),
    "function": (lambda net, x: net.norm(torch.add(net.conv(x), net.other(x), alpha=1)), BOTH),
    "method": (lambda net, x: net.norm(net.conv(x).add(net.other(x))), BOTH),
    "in-place method": (lambda net, x: net.norm(net.conv(x).add_(net.other(x))), BOTH),
    "in-place operator": (add_in_place, BOTH),
    "builtin": (lambda net, x: net.norm(sum([net.conv(x), net.other(x)])), BOTH),
    "with rest": (lambda net, x: net.norm(net.conv(x) + net.other(x).relu()), WITH_REST),
    "with a constant": (lambda net, x: net.norm(net.conv(x) + torch.ones(1)), WITH_REST),
    "weighted": (
        lambda net, x: net.norm(torch.add(net.conv(x), net.other(x), alpha=2)),
        (opaque("after add"),),
    ),
    "of one operator, twice": (lambda net, x: net.norm(net.conv(x) + net.conv(x)), (opaque("after add"),)),
}

CHANGED_IN_PLACE: dict[str, tuple[Body, tuple[Segment, ...]]] = {
    "operator": (multiply_in_place, (opaque("changed in place by mul"),)),
    "function": (call_in_place_and_drop_the_result, (opaque("changed in place by relu"),)),
    "method": (lambda net, x: net.norm(net.conv(x).relu_()), (opaque("changed in place by relu"),)),
    "slice": (write_to_a_slice, (opaque("changed in place by setitem"),)),
    "view": (write_to_a_view, (opaque("changed in place by a write to a view of it"),)),
    "clone": (write_to_a_clone, CONV),
}

OPAQUE: dict[str, tuple[Body, str]] = {
    "activation": (lambda net, x: net.norm(net.conv(x).relu()), "after relu"),
    "pooling": (lambda net, x: net.norm(F.max_pool2d(net.conv(x), 1)), "after max_pool2d"),
    "norm": (lambda net, x: net.norm(net.norm(net.conv(x))), "called 2 times in a forward"),
    "two operators": (
        lambda net, x: net.norm(net.conv(x)) + net.norm(net.other(x)),
        "called 2 times in a forward",
    ),
    "operator twice": (
        lambda net, x: (net.norm(net.conv(x)), net.conv(x)),
        "conv called several times in a forward",
    ),
    "both twice": (lambda net, x: [net.norm(net.conv(x)) for _ in range(2)], "called 2 times in a forward"),
    "past the module": (lambda net, x: net.norm(net.conv.forward(x)), "after conv2d"),
    "batch concatenation": (lambda net, x: net.norm(torch.cat([net.conv(x)] * 2)), "after cat along dimension 0"),
    "active dropout": (lambda net, x: net.norm(F.dropout(net.conv(x), 0.5)), "after dropout"),
}


def find_both_ways(net: nn.Module, x: Tensor) -> Pairing:
    """The pairing of `norm` as traced, after checking that a forward on an example shows the same operators."""
    traced, watched = find_pairs(net)["norm"], find_by_watching(net, x)["norm"]
    assert structure(watched) == structure(traced)
    return traced


@pytest.fixture
def x() -> Tensor:
    return torch.rand(2, 3, 4, 4)


@pytest.mark.parametrize("trait", LOOKED_THROUGH)
def test_looked_through(trait: str, x: Tensor) -> None:
    assert find_both_ways(Net(LOOKED_THROUGH[trait]), x) == Pairing("norm", CONV, exclusive=True)


@pytest.mark.parametrize("trait", SUMS)
def test_sums(trait: str, x: Tensor) -> None:
    body, segments = SUMS[trait]
    assert find_both_ways(Net(body), x) == Pairing("norm", segments, exclusive=False)


def test_a_sum_with_a_number_is_left_to_the_graph(x: Tensor) -> None:
    net = Net(lambda net, x: net.norm(net.conv(x) + 1))
    assert find_pairs(net)["norm"].segments == (opaque("after add"),)
    assert find_by_watching(net, x)["norm"].segments == WITH_REST


@pytest.mark.parametrize("trait", CHANGED_IN_PLACE)
def test_changes_in_place(trait: str, x: Tensor) -> None:
    body, segments = CHANGED_IN_PLACE[trait]
    assert find_both_ways(Net(body), x) == Pairing("norm", segments, exclusive=False)


def test_a_write_through_out_is_traced() -> None:
    """Autograd refuses it, so that no forward can show it."""
    segments = (opaque("changed in place by mul"),)
    assert find_pairs(Net(write_through_out))["norm"] == Pairing("norm", segments, exclusive=False)


@pytest.mark.parametrize("trait", OPAQUE)
def test_opaque_inputs_are_named(trait: str, x: Tensor) -> None:
    body, reason = OPAQUE[trait]
    assert find_both_ways(Net(body), x) == Pairing("norm", (opaque(reason),), exclusive=False)


@pytest.mark.parametrize(
    ("dropout", "segments"),
    [
        (nn.Identity(), CONV),
        (nn.Dropout2d(0.0), CONV),
        (nn.Dropout(0.5).eval(), CONV),
        (nn.Dropout(0.5), (opaque("after dropout"),)),
        (nn.Dropout(0.5, inplace=True), (opaque("changed in place by dropout"),)),
        (nn.ReLU(inplace=True), (opaque("changed in place by relu"),)),
        (nn.ReLU(), (opaque("after relu"),)),
    ],
)
def test_modules_in_between(dropout: nn.Module, segments: tuple[Segment, ...], x: Tensor) -> None:
    net = Net(lambda net, x: net.norm(net.between(net.conv(x))), between=dropout)
    assert find_both_ways(net, x) == Pairing("norm", segments, exclusive=segments == CONV)


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x: (out := net.conv(x), net.norm(out)),
        lambda net, x: {"norm": net.norm(out := net.conv(x)), "mean": out.mean()},
        lambda net, x: (out := net.conv(x), net.norm(out.clone())),
        lambda net, x: net.norm(net.keep(net.conv(x))),
        lambda net, x: (net.norm(net.conv(x)), F.conv2d(x, net.conv.weight)),
    ],
    ids=["returned", "read", "original returned", "kept", "weight read"],
)
def test_direct_but_not_exclusive(body: Body, x: Tensor) -> None:
    class KeepingNet(Net):
        def keep(self, out: Tensor) -> Tensor:
            self.features = {"conv": out}
            return out

    assert find_both_ways(KeepingNet(body), x) == Pairing("norm", CONV, exclusive=False)


def test_what_an_object_of_the_users_own_holds_is_not_folded_into(x: Tensor) -> None:
    """Nobody knows what else it holds, so that the norm's operator may have other readers."""

    class Result:
        def __init__(self, *tensors: Tensor) -> None:
            self.tensors = tensors

    returned = find_by_watching(Net(lambda net, x: Result(out := net.conv(x), net.norm(out))), x)
    assert returned["norm"] == Pairing("norm", CONV, exclusive=False)


def concatenating(dim: int) -> Net:
    return Net(
        lambda net, x: net.norm(
            torch.cat([p := net.conv(x), F.avg_pool2d(x, 1), p + (q := net.other(x)), q.tanh()], dim=dim)
        ),
        norm=nn.BatchNorm2d(15),
    )


CONCATENATED = (CONV[0], opaque("after avg_pool2d", 3), BOTH[0], opaque("after tanh"))


def test_concatenation_by_slice() -> None:
    assert find_pairs(concatenating(1))["norm"] == Pairing("norm", CONCATENATED, exclusive=False)


def test_a_dimension_from_the_end_is_left_to_the_graph(x: Tensor) -> None:
    traced, watched = find_pairs(concatenating(-3))["norm"], find_by_watching(concatenating(-3), x)["norm"]
    assert traced.segments == (opaque("after cat along dimension -3", 15),)
    assert not traced.segments[0].final
    assert [s.producers for s in watched.segments] == [("conv",), (), ("conv", "other"), ()]


def test_two_unknown_widths_are_not_guessed() -> None:
    body: Body = lambda net, x: net.norm(torch.concat((net.conv(x), x, x), 1))  # noqa: E731
    assert find_pairs(Net(body, norm=nn.BatchNorm2d(10)))["norm"].segments == (opaque("channel widths unknown", 10),)


def test_widths_that_do_not_add_up() -> None:
    pairs = find_pairs(Net(lambda net, x: net.norm(net.conv(x)), norm=nn.BatchNorm2d(5)))
    assert pairs["norm"].segments == (opaque("4 channels found where the norm has 5", 5),)


@pytest.mark.parametrize(
    ("operator", "norm", "shape"),
    [
        (nn.Linear(3, 4), nn.BatchNorm1d(4), (2, 3)),
        (nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), (2, 3, 5)),
        (nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4), (2, 3, 5, 5, 5)),
        (nn.ConvTranspose1d(3, 4, 2), nn.BatchNorm1d(4), (2, 3, 5)),
        (nn.ConvTranspose2d(3, 4, 2), nn.SyncBatchNorm(4), (2, 3, 5, 5)),
        (nn.ConvTranspose3d(3, 4, 2), nn.BatchNorm3d(4), (2, 3, 5, 5, 5)),
        (nn.Conv2d(3, 4, 1), UserBatchNorm2d(4), (2, 3, 5, 5)),
        (parametrizations.weight_norm(nn.Conv2d(3, 4, 1)), nn.BatchNorm2d(4), (2, 3, 5, 5)),
        (parametrizations.spectral_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4), (2, 3)),
    ],
)
def test_every_operator(operator: nn.Module, norm: nn.Module, shape: tuple[int, ...]) -> None:
    net = Net(lambda net, x: net.norm(net.conv(x)), conv=operator, norm=norm)
    assert find_both_ways(net, torch.rand(shape)) == Pairing("norm", CONV, exclusive=True)


def test_an_operator_with_its_own_forward_is_not_trusted(x: Tensor) -> None:
    net = Net(lambda net, x: net.norm(net.conv(x)), conv=UserConv2d(3, 4, 1))
    assert find_both_ways(net, x) == Pairing("norm", (opaque("after user_conv2d"),), exclusive=False)


def test_conversion_that_changes_nothing_is_noticed_by_watching(x: Tensor) -> None:
    same = find_by_watching(Net(lambda net, x: net.norm(net.conv(x).float())), x)
    assert same["norm"] == Pairing("norm", CONV, exclusive=True)


def test_write_inside_a_leaf_is_noticed_by_watching(x: Tensor) -> None:
    class GreedyConv2d(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.relu_())

    net = Net(
        lambda net, x: (out := net.conv(x), net.greedy(out), net.norm(out)),
        greedy=GreedyConv2d(4, 4, 1),
    )
    assert find_by_watching(net, x)["norm"].segments == (opaque("after relu"),)


def test_linear_over_more_than_two_dimensions_is_told_by_watching() -> None:
    net = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    (segment,) = find_by_watching(net, torch.rand(2, 5, 5))["1"].segments
    assert (segment.producers, segment.direct) == ((), False)


def test_norm_inside_an_operator_is_not_paired_with_it() -> None:
    net = Net(lambda net, x: net.norm(net.conv(x)), conv=ConvWithNormInside())
    pairs = find_pairs(net)
    assert list(pairs) == ["conv.norm", "norm"]
    assert [pairing.segments for pairing in pairs.values()] == [(opaque("after conv2d"),), (opaque("after relu"),)]


def test_operator_with_two_names_goes_by_the_first(x: Tensor) -> None:
    net = Net(lambda net, x: net.norm(net.conv(x)))
    net.other = net.conv
    net.body = lambda net, x: net.norm(net.other(x))
    assert find_both_ways(net, x) == Pairing("norm", CONV, exclusive=True)


def test_norm_that_is_not_given_a_tensor(x: Tensor) -> None:
    class Box:
        def __init__(self, content: Tensor) -> None:
            self.content = content

    class BoxedNorm(nn.BatchNorm2d):
        def forward(self, box: Any) -> Tensor:
            return super().forward(box.content)

    net = Net(lambda net, x: net.norm(Box(net.conv(x))), norm=BoxedNorm(4))
    assert find_by_watching(net, x)["norm"] == Pairing("norm", (opaque("not reached by tracing"),), exclusive=False)


def test_producers_of_all_segments() -> None:
    pairing = Pairing("norm", (BOTH[0], CONV[0], opaque("after relu"), direct("last")), exclusive=False)
    assert pairing.producers == ("conv", "other", "last")


def test_models_without_norms_and_bare_norms() -> None:
    assert find_pairs(nn.Sequential(nn.ReLU())) == {}
    assert find_pairs(nn.BatchNorm2d(4)) == {"": Pairing("", (opaque("not reached by tracing"),), exclusive=False)}


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="tuple of arguments, got Tensor"):
        find_pairs(nn.BatchNorm2d(4), torch.rand(1, 4, 1, 1))  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet"):
        find_pairs(nn.Sequential(nn.LazyConv2d(4, 1), nn.BatchNorm2d(4)))

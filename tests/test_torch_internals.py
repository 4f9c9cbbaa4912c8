"""The private names of torch say what they are used for, on every version (`make test-torch VERSION=...`)."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from crossbn import torch_internals as internals
from crossbn.torch_internals import backward_id, backward_is_running, saved_tensor_hooks

TELLS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


class Asking(nn.Module):
    """y = 2 x; it writes down what a question is answered where it runs."""

    def __init__(self, question: Callable[[], Any]) -> None:
        super().__init__()
        self.question = question
        self.answers: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.answers.append(self.question())
        return x * 2


class AskingFunction(torch.autograd.Function):
    """y = 2 x; it asks in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ask: Callable[[], None]) -> Tensor:
        ctx.ask = ask
        ask()
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.ask()
        return grads[0] * 2, None


@contextmanager
def deprecations_allowed() -> Iterator[None]:
    """torch's own warnings about its older ways, which differ from version to version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def identity(x: Any) -> Any:
    return x


# Backward


def test_no_backward_runs_in_a_forward() -> None:
    module = Asking(lambda: (backward_is_running(), backward_id()))
    with torch.no_grad():
        module(leaf())
    y = module(leaf())
    y.sum().backward()
    module(leaf())
    assert module.answers == [(False, -1)] * 3


@pytest.mark.parametrize("register", ["tensor", "node", "node before", "accumulated", "module", "end"])
def test_backward_runs_in_its_hooks(register: str) -> None:
    x, answers = leaf(), []

    def ask(*_: Any) -> None:
        answers.append((backward_is_running(), backward_id() >= 0))

    module = nn.Linear(3, 3)
    y = module(x * 2)
    assert y.grad_fn is not None
    if register == "tensor":
        y.register_hook(ask)
    elif register == "node":
        y.grad_fn.register_hook(ask)
    elif register == "node before":
        y.grad_fn.register_prehook(ask)
    elif register == "accumulated":
        x.register_post_accumulate_grad_hook(ask)
    elif register == "module":
        module.register_full_backward_hook(ask)
        y = module(x * 2)
    else:
        y.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(ask))
    y.sum().backward()
    assert answers == [(True, True)]
    assert not backward_is_running()


def test_backward_runs_in_a_function() -> None:
    answers: list[bool] = []
    y = AskingFunction.apply(leaf(), lambda: answers.append(backward_is_running()))
    torch.autograd.grad(y.sum(), y)
    assert answers == [False]
    x = leaf()
    y = AskingFunction.apply(x, lambda: answers.append(backward_is_running()))
    torch.autograd.grad(y.sum(), x)
    assert answers == [False, False, True]


def test_no_backward_runs_after_one_that_failed() -> None:
    x = leaf()
    y = x * 2

    def fail(_: Tensor) -> None:
        raise ValueError("of the hook")

    y.register_hook(fail)
    with pytest.raises(ValueError, match="of the hook"):
        y.sum().backward()
    assert (backward_is_running(), backward_id()) == (False, -1)


def test_each_backward_has_its_id() -> None:
    x, ids = leaf(), []
    y = x * 2
    y.register_hook(lambda _: ids.append(backward_id()))
    z = y * 3
    z.register_hook(lambda _: ids.append(backward_id()))
    z.sum().backward(retain_graph=True)
    z.sum().backward()
    first, first_again, second, second_again = ids
    assert first == first_again
    assert second == second_again
    assert first != second


def test_a_backward_inside_a_backward_has_its_own_id() -> None:
    ids: list[int] = []

    def nested(_: Tensor) -> None:
        ids.append(backward_id())
        with torch.enable_grad():
            y = leaf() * 2
            y.register_hook(lambda _: ids.append(backward_id()))
            y.sum().backward()
        ids.append(backward_id())

    y = leaf() * 2
    y.register_hook(nested)
    y.sum().backward()
    before, inside, after = ids
    assert before == after
    assert inside not in (before, -1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_inside_backward(reentrant: bool) -> None:
    module = Asking(backward_is_running)
    checkpoint(nn.Sequential(module, nn.Tanh()), leaf(), use_reentrant=reentrant).sum().backward()
    assert module.answers == [False, True]


# Saved tensors


def test_no_hooks_are_set() -> None:
    assert saved_tensor_hooks() is None
    with torch.no_grad():
        assert saved_tensor_hooks() is None
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        assert saved_tensor_hooks() is None


def test_innermost_hooks_are_told() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, identity):
        assert saved_tensor_hooks() == (pack, identity)
        with torch.autograd.graph.saved_tensors_hooks(identity, pack):
            assert saved_tensor_hooks() == (identity, pack)
        assert saved_tensor_hooks() == (pack, identity)
    assert saved_tensor_hooks() is None


def test_asking_calls_no_hook() -> None:
    called = []

    def note(x: Any) -> Any:
        called.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, note):
        saved_tensor_hooks()
    assert called == []


def test_save_on_cpu_sets_hooks() -> None:
    with torch.autograd.graph.save_on_cpu():
        assert saved_tensor_hooks() is not None
    assert saved_tensor_hooks() is None


def test_checkpointing_without_reentry_sets_hooks() -> None:
    module = Asking(lambda: saved_tensor_hooks() is not None)
    y = checkpoint(nn.Sequential(module, nn.Tanh()), leaf(), use_reentrant=False)
    assert module.answers == [True]
    assert saved_tensor_hooks() is None
    y.sum().backward()
    assert module.answers == [True, True]  # those that collect what is computed again


def test_checkpointing_with_reentry_sets_none() -> None:
    module = Asking(lambda: (saved_tensor_hooks(), torch.is_grad_enabled()))
    checkpoint(nn.Sequential(module, nn.Tanh()), leaf(), use_reentrant=True).sum().backward()
    assert module.answers == [(None, False), (None, True)]


def raw_input(y: Tensor) -> Any:
    node: Any = y.grad_fn
    return node._raw_saved_input


def test_plain_saved_tensor_has_no_hooks() -> None:
    convolution = nn.Conv2d(3, 2, 1)
    y = convolution(torch.ones(1, 3, 2, 2))
    assert not internals.has_hooks(raw_input(y))
    y.sum().backward()
    assert not internals.has_hooks(raw_input(y))  # freed


def test_saved_tensor_has_hooks_where_they_are_set() -> None:
    with torch.autograd.graph.saved_tensors_hooks(identity, identity):
        y = nn.Conv2d(3, 2, 1)(torch.ones(1, 3, 2, 2))
        assert internals.has_hooks(raw_input(y))


@pytest.mark.xfail(not TELLS, reason="before torch 2.13 a saved tensor does not tell its hooks", strict=True)
@pytest.mark.parametrize("way", ["hooks", "save_on_cpu", "registered", "checkpoint"])
def test_saved_tensor_has_hooks_where_they_were_set(way: str) -> None:
    called: list[Tensor | None] = []
    convolution, x = nn.Conv2d(3, 2, 1), torch.ones(1, 3, 2, 2)

    def unpack(packed: Tensor) -> Tensor:
        called.append(packed)
        return packed

    if way == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(identity, unpack):
            y = convolution(x)
    elif way == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            y = convolution(x)
    elif way == "checkpoint":
        counted = Asking(lambda: called.append(None) if backward_is_running() else None)
        y = checkpoint(nn.Sequential(counted, convolution), x, use_reentrant=False)
    else:
        y = convolution(x)
        raw_input(y).register_hooks(identity, unpack)
    assert internals.has_hooks(raw_input(y))
    assert called == []
    y.sum().backward()
    assert convolution.weight.grad is not None
    assert bool(called) is (way != "save_on_cpu")


# torch.func


def square(x: Tensor) -> Tensor:
    return (x * x).sum()


def ones() -> Tensor:
    return torch.ones(3)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda f: torch.func.grad(f)(ones()),
    "vjp": lambda f: torch.func.vjp(f, ones()),
    "vmap": lambda f: torch.func.vmap(f)(torch.ones(2, 3)),
    "jvp": lambda f: torch.func.jvp(f, (ones(),), (ones(),)),
    "jacrev": lambda f: torch.func.jacrev(f)(ones()),
    "functionalize": lambda f: torch.func.functionalize(f)(ones()),
    "nested": lambda f: torch.func.vmap(torch.func.grad(f))(torch.ones(2, 3)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_seen(transform: str) -> None:
    answers, kept = [], []

    def ask(x: Tensor) -> Tensor:
        answers.append((internals.inside_functorch(), internals.is_wrapped(x), internals.is_wrapped(x * 2)))
        answers.append((internals.inside_functorch(), internals.is_wrapped(CONSTANT), type(x) is Tensor))
        kept.extend([x, x * 2])
        return square(x)

    with deprecations_allowed():
        TRANSFORMS[transform](ask)
    assert answers == [(True, True, True), (True, False, True)]
    # Kept beyond its transform, a tensor still is a wrapper.
    assert [internals.is_wrapped(tensor) for tensor in kept] == [True, True]
    assert not internals.inside_functorch()


CONSTANT = torch.ones(3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch 2.15 warns of itself
def test_no_transform_is_seen() -> None:
    assert not internals.inside_functorch()
    assert not internals.is_wrapped(leaf())
    assert not internals.is_wrapped(nn.Parameter(ones()))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(ones(), ones())
        assert not internals.inside_functorch()
        assert not internals.is_wrapped(dual)
    result = torch.func.grad(square)(ones())
    assert not internals.is_wrapped(result)
    with pytest.raises(ValueError, match="inside"):
        torch.func.grad(raise_inside)(ones())
    assert not internals.inside_functorch()


def raise_inside(_: Tensor) -> Tensor:
    raise ValueError("inside")


# Tracing, exporting, compiling


def test_jit_trace_is_seen() -> None:
    module = Asking(internals.is_tracing)
    with deprecations_allowed():
        torch.jit.trace(module, ones(), check_trace=False)
    module(ones())
    assert True in module.answers
    assert module.answers[-1] is False
    assert not internals.is_tracing()


class WhileExporting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if internals.is_exporting() else x + 2


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_seen(strict: bool) -> None:
    module = WhileExporting()
    with deprecations_allowed():
        exported = torch.export.export(module, (ones(),), strict=strict).module()
    assert exported(ones()).tolist() == [2.0] * 3
    assert module(ones()).tolist() == [3.0] * 3
    assert not internals.is_exporting()


def test_compilation_is_no_export() -> None:
    compiled = torch.compile(WhileExporting(), backend="eager", fullgraph=True)
    assert compiled(ones()).tolist() == [3.0] * 3


def test_rest_after_a_graph_break_is_seen() -> None:
    answers = []

    def ask() -> None:
        answers.append(internals.graph_break_rest())

    def broken(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        ask()
        return y + 1

    with deprecations_allowed(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dynamo says that it cannot trace the question
        assert torch.compile(broken, backend="eager")(ones()).tolist() == [3.0] * 3
    broken(ones())
    assert answers == [True, False]


def test_what_is_taken_from_the_compiler_is_no_rest() -> None:
    answers = []

    def ask() -> None:
        answers.append(internals.graph_break_rest())

    disabled = torch.compiler.disable(ask)

    def broken(x: Tensor) -> Tensor:
        y = x * 2
        disabled()
        return y + 1

    with deprecations_allowed():
        torch.compile(broken, backend="eager")(ones())
    assert answers == [False]


# Fake tensors


def test_fake_tensors_are_seen() -> None:
    with FakeTensorMode() as mode:
        fake = torch.ones(3)
        assert internals.is_fake(fake)
        assert internals.is_fake(fake * 2)
        assert internals.is_fake(nn.Parameter(fake))
        assert internals.is_fake(nn.BatchNorm1d(3)(torch.ones(2, 3)))
    assert internals.is_fake(mode.from_tensor(ones()))
    assert not internals.is_fake(ones())
    assert not internals.is_fake(nn.Parameter(ones()))
    assert not internals.is_fake(torch.ones(3, device="meta"))


def test_export_without_dynamo_uses_fake_tensors() -> None:
    answers = []

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            answers.append(internals.is_fake(x))
            return x * 2

    with deprecations_allowed():
        torch.export.export(Module(), (ones(),), strict=False)
    assert set(answers) == {True}


# Others


def test_each_is_copied() -> None:
    targets, values = [torch.zeros(2), torch.zeros(2, 3)[:, 1]], [torch.ones(2, dtype=torch.float64), torch.ones(2) * 2]
    versions = [target._version for target in targets]
    internals.copy_each_(targets, values)
    assert [target.tolist() for target in targets] == [[1.0, 1.0], [2.0, 2.0]]
    assert all(target._version > version for target, version in zip(targets, versions, strict=True))


def test_norms_have_the_bases() -> None:
    norms = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d
    assert all(issubclass(norm, internals.BatchNormBase) for norm in norms)
    assert issubclass(nn.InstanceNorm2d, internals.NormBase)
    assert not issubclass(nn.InstanceNorm2d, internals.BatchNormBase)
    assert not issubclass(nn.GroupNorm, internals.NormBase)


def test_a_convolution_tells_what_it_saved() -> None:
    """`has_hooks` is asked about it: what is read of a node has the same name on every version."""
    x = torch.ones(1, 3, 2, 2)
    node: Any = F.conv2d(x, torch.ones(2, 3, 1, 1, requires_grad=True)).grad_fn
    assert torch.equal(node._saved_input, x)
    assert node._saved_input.data_ptr() == x.data_ptr()
    node.metadata["key"] = "value"
    assert node.metadata == {"key": "value"}

"""Twenty architectures of timm and torchvision: the conversion report against what autograd says feeds each norm.

The truth is found without the package. An unconverted copy of the model runs one training forward; hooks on its norms
follow `grad_fn` back through views, sums and concatenations to the calls of linear operators that made the norm's
input. `tools/survey.py` holds whole libraries against the same truth.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

import crossbn
from crossbn.compat import ensure_torchvision

OPERATORS = {f"conv{way}{d}d" for way in ("", "_transpose") for d in (1, 2, 3)} | {"linear"}
OPERATOR_NODES = ("Convolution", "Addmm", "Mm")
PARTS = ("Slice", "Split", "SplitWithSizes", "UnsafeSplit", "Unbind", "Select")
VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "T", "Squeeze", "Unsqueeze", "Clone", "ToCopy")
Call = Callable[[nn.Module], Any]


class Made(NamedTuple):
    """The output of one call of a linear operator: the operator's weight, and the mean of each output channel."""

    weight: Tensor
    means: Tensor | None


class Operators(TorchFunctionMode):
    """Remembers which autograd node each call of a linear operator leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, Made] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name in OPERATORS and out.grad_fn is not None:
            channel = out.dim() - (1 if name == "linear" else int(name[-2]) + 1)
            self.made[out.grad_fn] = Made(args[1] if len(args) > 1 else kwargs["weight"], _means(out, channel))
        return out


def _means(x: Tensor, channel: int) -> Tensor:
    """Return the mean of each channel, which tells whether views have left the channels what they were."""
    return x.detach().double().transpose(0, channel).flatten(1).mean(1)


def _origins(node: Any, made: Mapping[Any, Made]) -> tuple[str, list[Any]]:
    """Return "one", "slice", "sum" or "concatenation", and for each term its `Made`, or the name of its node."""
    if node is None or node in made:
        return "one", [made.get(node, "input")]
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    parents = [parent for parent, _ in node.next_functions]
    if name == "Add":  # Of a sum's terms, a parameter of one dimension is the operator's bias.
        parents = [p for p in parents if not (hasattr(p, "variable") and p.variable.squeeze().dim() < 2)]
    if name in (*VIEWS, "Add") and len(parents) == 1:
        return _origins(parents[0], made)
    if name in PARTS:
        return "slice", _origins(parents[0], made)[1]
    if name in ("Add", "Cat"):
        terms = [term for parent in parents for term in _origins(parent, made)[1]]
        return ("sum" if name == "Add" else "concatenation"), terms
    if name in OPERATOR_NODES:  # This call was out of the mode's sight, in a script or a compiled function.
        parents = [
            p.next_functions[0][0] if p and p.name() in ("TBackward0", "TransposeBackward0") else p for p in parents
        ]
        weights = [p.variable for p in parents if hasattr(p, "variable") and p.variable.dim() > 1]
        return "one", [Made(weights[0], None) if weights else name]
    return "one", [name]


def _truth_of(x: Tensor, made: Mapping[Any, Made]) -> tuple[str, int | None]:
    """Return in words what made a norm's input, and the weight's identity if it is one operator's output as it is."""
    kind, terms = _origins(x.grad_fn, made)
    operators = [term for term in terms if isinstance(term, Made)]
    if not operators:
        return f"none: after {', '.join(sorted(set(terms)))}", None
    if kind != "one":
        return f"{kind}: {'all' if len(operators) == len(terms) else 'partly'} from operators", None
    (weight, means), own = operators[0], _means(x, 1)
    if means is not None and not (own.shape == means.shape and torch.allclose(own, means, 1e-3, 1e-5, equal_nan=True)):
        return "none: an operator's channels, rearranged", None
    return ("direct", id(weight)) if weight.is_leaf else ("computed weight", None)


def norms_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the batch norms of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def find_truth(model: nn.Module, call: Call) -> dict[str, str]:
    """Run one training forward and return for each norm what feeds it: "direct", "sum: ...", "none: ..." and so on."""
    norms, operators = norms_of(model), Operators()
    seen: dict[str, set[tuple[str, int | None]]] = {name: set() for name in norms}
    for name, norm in norms.items():
        note = functools.partial(lambda name, _, args: seen[name].add(_truth_of(args[0], operators.made)), name)
        norm.register_forward_pre_hook(note)
    torch.manual_seed(1)
    with operators:
        call(model.train())
    words = {name: sorted(word for word, _ in found) or ["not run"] for name, found in seen.items()}
    return {name: w[0] if len(w) == 1 else f"mixed: {'; '.join(w)}" for name, w in words.items()}


def _outputs(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.requires_grad:
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _outputs(item)


def train_step(model: nn.Module, call: Call) -> None:
    """Take one small step down the sum of all outputs."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    torch.stack([output.float().mean() for output in _outputs(call(model.train()))]).sum().backward()
    optimizer.step()


def is_plain(norm: nn.Module, twin: nn.Module, x: Tensor) -> bool:
    """Whether a norm's output and running statistics are bit for bit those of its unconverted twin."""
    twin.load_state_dict(norm.state_dict())
    pairs = [(norm(x.clone()), twin.train(norm.training)(x.clone()))]
    pairs += zip(norm.state_dict().values(), twin.state_dict().values(), strict=True)
    return all(torch.equal(ours.nan_to_num(), theirs.nan_to_num()) for ours, theirs in pairs)


def _problem(status: str, truth: str) -> str | None:
    if truth == "direct" and status != "compensated":
        return "behind an operator and not compensated"
    return f"{status}, behind no operator" if truth.startswith("none") and status != "left alone" else None


def examine(model: nn.Module, call: Call, truth: Mapping[str, str]) -> dict[str, Any]:
    """Convert and train a model; return how many norms fared how, and whatever contradicts `truth`."""
    twins = {name: copy.deepcopy(norm) for name, norm in norms_of(model).items()}
    report = crossbn.convert_(model, batch_size=2)
    train_step(model, call)
    inputs: dict[str, Tensor] = {}
    for record in report.left:
        note = functools.partial(lambda name, _, args: inputs.update({name: args[0].detach().clone()}), record.name)
        model.get_submodule(record.name).register_forward_pre_hook(note)
    train_step(model, call)
    plain = {name: is_plain(model.get_submodule(name), twins[name], x) for name, x in list(inputs.items())}
    wrong = [(name, "is not BatchNorm bit for bit") for name, same in plain.items() if not same]
    wrong += [(name, "is not in the report") for name in truth.keys() - {r.name for r in report.records}]
    wrong += [(r.name, p) for r in report.records if (p := _problem(r.status, truth[r.name]))]
    wrong += [(r.name, "no reason given") for r in report.records if not r.reason]
    groups = Counter((truth[r.name], r.status, r.reason) for r in report.records)
    mismatches = [f"{name}: {problem} ({truth.get(name)})" for name, problem in wrong]
    return {"norms": len(truth), "groups": [[*key, n] for key, n in groups.items()], "mismatches": mismatches}


class Case(NamedTuple):
    """An architecture: the shape of an example, how many norms it has, and how many of them one operator feeds."""

    shape: tuple[int, ...]
    norms: int
    direct: int
    settings: dict[str, Any] = {}  # noqa: RUF012  # nobody changes it


TIMM = {
    "levit_128s": Case((3, 224, 224), 52, 50),  # linear operators on tokens; their norms see them flattened
    "convmixer_768_32": Case((3, 28, 28), 65, 0),  # every norm is behind an activation
    "fastvit_t8": Case((3, 64, 64), 70, 46),
    "maxvit_rmlp_pico_rw_256": Case((3, 64, 64), 34, 24, {"img_size": 64}),  # also norms of residual sums
    "xcit_nano_12_p16_224": Case((3, 64, 64), 7, 4, {"depth": 3}),
    "tf_efficientnet_b0": Case((3, 64, 64), 49, 49),  # convolutions that pad by themselves
    "tf_mobilenetv3_small_075": Case((3, 64, 64), 34, 34),
    "repvgg_a0": Case((3, 64, 64), 61, 44),
    "regnety_002": Case((3, 64, 64), 44, 44),
    "densenet121": Case((3, 64, 64), 121, 59),  # also norms of concatenations
    "res2net50_26w_4s": Case((3, 64, 64), 85, 85),
    "dla34": Case((3, 64, 64), 37, 37),
    "ghostnet_050": Case((3, 64, 64), 80, 80),
    "mixnet_s": Case((3, 64, 64), 49, 15),
    "skresnet18": Case((3, 64, 64), 36, 36),
    "resnetv2_18": Case((3, 64, 64), 17, 8),
}
TORCHVISION = {
    "googlenet": Case((3, 64, 64), 59, 59, {"init_weights": False}),
    "shufflenet_v2_x0_5": Case((3, 64, 64), 56, 56),
    "lraspp_mobilenet_v3_large": Case((3, 64, 64), 47, 47, {"weights_backbone": None}),
    "r3d_18": Case((3, 4, 32, 32), 20, 20),
}
DETECTOR = {"weights_backbone": None, "num_classes": 3, "min_size": 96, "max_size": 96, "rpn_post_nms_top_n_train": 50}


def check(model: nn.Module, call: Call, norms: int, direct: int) -> None:
    """Assert that the report agrees with the truth, and that the truth is what it is known to be."""
    truth = find_truth(copy.deepcopy(model), call)
    assert (len(truth), list(truth.values()).count("direct")) == (norms, direct)
    assert examine(model, call, truth)["mismatches"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    ensure_torchvision()  # which timm imports
    import timm

    case = TIMM[name]
    model = timm.create_model(name, **case.settings)
    check(model, lambda model: model(torch.randn(2, *case.shape)), case.norms, case.direct)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name: str) -> None:
    ensure_torchvision()
    from torchvision.models import get_model

    case = TORCHVISION[name]
    model = get_model(name, **case.settings)
    check(model, lambda model: model(torch.randn(2, *case.shape)), case.norms, case.direct)


@pytest.mark.slow
def test_detector() -> None:
    ensure_torchvision()
    from torchvision.models import get_model

    target = {"boxes": torch.tensor([[10.0, 12.0, 60.0, 70.0]]), "labels": torch.tensor([1])}
    model = get_model("fasterrcnn_resnet50_fpn_v2", box_batch_size_per_image=16, **DETECTOR)
    check(model, lambda model: model([torch.rand(3, 96, 96)] * 2, [target] * 2), 65, 65)


class Net(nn.Module):
    """A norm of what `way` makes of the outputs of a convolution, [2, 4, 6], and a linear operator, [2, 6, 4]."""

    def __init__(self, way: Callable[[Tensor, Tensor], Tensor], channels: int) -> None:
        super().__init__()
        self.way, self.convolution, self.linear = way, nn.Conv1d(4, 4, 1), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.way(self.convolution(x), self.linear(x.transpose(1, 2))))
        return out


WAYS: list[tuple[str, int, Callable[[Tensor, Tensor], Tensor]]] = [
    ("direct", 4, lambda conv, _: conv),
    ("direct", 4, lambda _, linear: linear.transpose(1, 2)),
    ("direct", 4, lambda _, linear: linear.flatten(0, 1).contiguous()),
    ("none: an operator's channels, rearranged", 4, lambda conv, _: conv.unflatten(1, (2, 2)).mT.reshape(2, 4, 6)),
    ("none: an operator's channels, rearranged", 6, lambda _, linear: linear),
    ("none: after Relu", 4, lambda conv, _: conv.relu()),
    ("none: after Mul", 4, lambda conv, _: 2 * conv),
    ("slice: all from operators", 2, lambda conv, _: conv.chunk(2, 1)[0]),
    ("sum: all from operators", 4, lambda conv, linear: conv + linear.transpose(1, 2)),
    ("sum: partly from operators", 4, lambda conv, linear: conv + linear.transpose(1, 2).relu()),
    ("sum: partly from operators", 4, lambda conv, _: conv + torch.ones_like(conv)),
    ("concatenation: all from operators", 8, lambda conv, linear: torch.cat([conv, linear.transpose(1, 2)], 1)),
    ("concatenation: partly from operators", 8, lambda conv, _: torch.cat([conv, conv.detach()], 1)),
    ("none: after input", 4, lambda conv, _: conv.detach()),
]


@pytest.mark.parametrize(("expected", "channels", "way"), WAYS)
def test_truth(expected: str, channels: int, way: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert find_truth(Net(way, channels), lambda model: model(torch.randn(2, 4, 6))) == {"norm": expected}


def test_difference_of_a_bit_is_seen() -> None:
    norm = nn.BatchNorm1d(3)
    assert is_plain(norm, nn.BatchNorm1d(3), torch.randn(8, 3))
    assert not is_plain(norm, nn.BatchNorm1d(3, eps=1.1e-5), torch.randn(8, 3))

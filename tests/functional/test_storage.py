"""What is remembered of a step, and what it tells at other weights: both storages against autograd."""

import pytest
import torch
from torch import Tensor, nn

from crossbn import functional as C
from crossbn.functional import Settings
from tests.nn.test_oracle import OPERATORS
from tests.support import functional_form

STORAGES = {"gradient": C.GradientStorage, "patches": C.PatchStorage}
STORAGE = pytest.mark.parametrize("kind", STORAGES)
KIND_AND_ORDER = pytest.mark.parametrize(("kind", "order"), [("gradient", 1), ("patches", 1), ("patches", 2)])


class Remembered:
    """A step of an operator, remembered at all its positions, and its moments as a function of the weight."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...], kind: str, order: int = 1) -> None:
        self.geometry, self._operator = C.geometry_of(module), functional_form(module)
        self.y = torch.randn(3, *shape, dtype=torch.float64) + 0.5
        self.weight = module.get_parameter("weight").detach().double()
        x = self._operator(self.y, self.weight)
        self.mean, self.var = C.batch_moments(x)
        self.storage = STORAGES[kind]([self.geometry], x.numel(), Settings(order=order))
        operand = C.Operand(self.geometry, self.weight, self.y, x.shape[2:])
        flat = C.flatten_weight(self.weight, self.geometry)
        seen = C.Observation(x, self.mean, self.var, None, [operand], [flat], 0, None, True)
        row, self.is_theirs = self.storage.remember(seen)
        self.kept = {name: value.unsqueeze(0) for name, value in row.items()}
        wrong = seen._replace(x=1.5 * x, mean=1.5 * self.mean, var=2.25 * self.var)
        self.other_is_theirs = self.storage.remember(wrong)[1]

    def moments(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return C.batch_moments(self._operator(self.y, weight))

    def look_back(self, weight: Tensor) -> C.LookBack:
        return self.storage.look_back(self.kept, [C.flatten_weight(weight, self.geometry)])


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", OPERATORS)
@STORAGE
def test_change_of_the_moments(name: str, kind: str) -> None:
    make, shape = OPERATORS[name]
    step = Remembered(make(), shape, kind)
    assert step.is_theirs is True
    assert step.other_is_theirs is False
    change = 0.3 * torch.randn_like(step.weight)
    of_mean, of_var = torch.func.jacrev(step.moments)(step.weight)
    dims = list(range(1, of_mean.ndim))
    terms = step.look_back(step.weight + change).terms
    torch.testing.assert_close(terms.mean_shift[0], (of_mean * change).sum(dims), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(terms.var_slope[0], (of_var * change).sum(dims), rtol=1e-9, atol=1e-11)
    assert terms.curvature is None


@pytest.mark.parametrize("name", ["linear", "conv2d", "depthwise", "transposed 2d"])
def test_second_order_is_exact(name: str) -> None:
    make, shape = OPERATORS[name]
    step = Remembered(make(), shape, "patches", order=2)
    weight = step.weight + torch.randn_like(step.weight)
    got = C.compensate(step.mean.unsqueeze(0), step.var.unsqueeze(0), step.look_back(weight).terms)
    torch.testing.assert_close((got[0][0], got[1][0]), step.moments(weight), rtol=1e-9, atol=1e-11)


@STORAGE
def test_unchanged_weights_change_nothing(kind: str) -> None:
    step = Remembered(nn.Conv2d(3, 4, 3), (3, 6, 5), kind)
    terms = step.look_back(step.weight).terms
    assert not terms.mean_shift.any()
    torch.testing.assert_close(terms.var_slope, torch.zeros_like(terms.var_slope), rtol=0, atol=1e-14)


@KIND_AND_ORDER
def test_shapes_are_those_of_what_is_kept(kind: str, order: int) -> None:
    step = Remembered(nn.Conv2d(4, 6, 3, groups=2), (4, 6, 5), kind, order)
    step.storage.positions = None
    positions = 3 * 4 * 3
    assert {name: tuple(value.shape[1:]) for name, value in step.kept.items()} == step.storage.shapes(6, positions)


@KIND_AND_ORDER
def test_jacobian_is_that_of_the_pooled_moments(kind: str, order: int) -> None:
    step = Remembered(nn.Conv2d(4, 6, 3, groups=2), (4, 6, 5), kind, order)
    mean, var = torch.randn(6).double(), torch.rand(6).double()
    weight = (step.weight + 0.1 * torch.randn_like(step.weight)).requires_grad_()

    def pooled(weight: Tensor) -> C.Pooled:
        past = C.compensate(step.mean.unsqueeze(0), step.var.unsqueeze(0), step.look_back(weight).terms)
        return C.pool(mean, var, *past)

    a, v = torch.randn(2, 6).double()
    found = pooled(weight)
    (expected,) = torch.autograd.grad((a * found.mean + v * found.var).sum(), weight)
    with torch.no_grad():
        back = step.look_back(weight)
        (jacobian,) = step.storage.jacobians(back, back.terms, pooled(weight))
    got = C.unflatten_weight(jacobian.weight_gradient(a, v), step.geometry)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "narrow", "dtype"),
    [
        ("mean", None, torch.float64),
        ("mean", torch.bfloat16, torch.float64),
        ("0.rows", torch.bfloat16, torch.bfloat16),
        ("1.var_grad", torch.bfloat16, torch.bfloat16),
        ("0.mean_grad", None, torch.float64),
        ("products", torch.bfloat16, torch.float64),
        ("centred", torch.bfloat16, torch.bfloat16),
    ],
)
def test_types(name: str, narrow: torch.dtype | None, dtype: torch.dtype) -> None:
    assert C.stored_as(name, torch.float64, narrow) == dtype


@pytest.mark.parametrize(
    ("geometries", "options", "kind", "positions"),
    [
        ([C.Geometry(32, 3, kernel=(3, 3))], {}, "GradientStorage", 128),
        ([C.Geometry(32, 3, kernel=(3, 3))], {"positions": None}, "GradientStorage", None),
        ([C.Geometry(32, 3, kernel=(3, 3))], {"order": 2}, "PatchStorage", 128),
        ([C.Geometry(512, 512, kernel=(3, 3))], {}, "PatchStorage", 10),
        ([C.Geometry(512, 3, kernel=(3, 3)), C.Geometry(512, 512, kernel=(3, 3))], {}, "PatchStorage", 10),
        ([C.Geometry(32, 3, kernel=(3, 3))], {"order": 0}, "NoneType", None),
        ([], {}, "NoneType", None),
    ],
)
def test_choice(geometries: list[C.Geometry], options: dict[str, int], kind: str, positions: int | None) -> None:
    storage = C.make_storage(geometries, Settings(**options))  # type: ignore[arg-type]  # a table of several types
    assert type(storage).__name__ == kind
    assert getattr(storage, "positions", None) == positions


DEPTHWISE = C.Geometry(96, 96, 96, kernel=(3, 3))
EARLY, DEEP = C.Geometry(32, 3, kernel=(3, 3)), C.Geometry(512, 512, kernel=(3, 3))


@pytest.mark.parametrize(
    ("geometry", "positions", "slots", "order", "plan"),
    [
        (EARLY, 128, 3, 1, C.Plan("gradient", 128)),
        (EARLY, 16, 3, 1, C.Plan("gradient", 16)),
        (EARLY, None, 3, 1, C.Plan("gradient", None)),
        (EARLY, None, 3, 2, C.Plan("patches", None)),
        (EARLY, 128, 3, 2, C.Plan("patches", 128)),
        (DEPTHWISE, 128, 3, 1, C.Plan("gradient", 37)),
        (C.Geometry(960, 960, 960, kernel=(3, 3)), 128, 3, 1, C.Plan("gradient", 16)),
        (DEEP, None, 3, 1, C.Plan("gradient", None)),
        (DEEP, 128, 3, 1, C.Plan("patches", 10)),
        (DEEP, 128, 7, 1, C.Plan("patches", 6)),
        (DEEP, 128, 15, 1, C.Plan("patches", 6)),
        (DEEP, 128, 1, 1, C.Plan("patches", 32)),
        (DEEP, 128, 0, 1, C.Plan("patches", 32)),
        (DEEP, 2, 3, 1, C.Plan("patches", 2)),
        (DEEP, 128, 3, 2, C.Plan("patches", 10)),
    ],
)
def test_plans(geometry: C.Geometry, positions: int | None, slots: int, order: int, plan: C.Plan) -> None:
    assert C.choose_plan(geometry, positions, slots, order) == plan

"""Saved histories: a good one goes on bit for bit, a bad one is refused whole and leaves no trace."""

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossbn
from tests.support import assert_same, converted, train

State = dict[str, Tensor]
Change = Callable[[State], State]
INF, NAN = float("inf"), float("nan")

# What files had from the beginning: burn-in of each norm, and what each of its sources remembers.
OLD_KEY = re.compile(
    r"[^/]+/burnt|[^/]+/\d+/(pushed|mean|var|count|mean_at|var_at|\d+\.(mean_grad|var_grad)|products|centred|\d+\.rows)"
)
# Order 1 remembers gradients of small weights; order 2, samples.
FORMS: dict[str, dict[str, Any]] = {"gradients": {"order": 1}, "samples": {"order": 2}}
FORM = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize("state", [{}, {"1/burnt": torch.tensor(0)}])
def test_a_model_that_is_not_converted_takes_no_history(state: State) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    with pytest.raises(ValueError, match="the model has no cross-iteration norm: convert it before"):
        crossbn.load_history_state(plain, state)


def test_an_empty_state_is_none() -> None:
    with pytest.raises(ValueError, match="this is no history state"):
        crossbn.load_history_state(converted(), {})


def trained(form: str, steps: int = 5, **options: Any) -> nn.Sequential:
    model = converted(**FORMS[form], **options)
    train(model, range(steps))
    return model


def saved_and_loaded(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=True)
    return loaded


def keys_of(state: State, name: str) -> list[str]:
    found = [key for key in state if key.rpartition("/")[2].rpartition(".")[2] == name]
    assert found, f"no {name} among {sorted(state)}"
    return found


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """A file in which the first value of that name is another."""
    return lambda state: {**state, (key := keys_of(state, name)[0]): change(state[key].clone())}


def filled(name: str, value: float) -> Change:
    """A file in which one number of a remembered step is another; every slot of the ring is in use by then."""

    def fill(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return changed(name, fill)


def number(name: str, value: int) -> Change:
    return changed(name, lambda tensor: torch.full_like(tensor, value))


def cast(name: str, dtype: torch.dtype) -> Change:
    return changed(name, lambda tensor: tensor.to(dtype))


def widened(name: str) -> Change:
    return changed(name, lambda ring: torch.cat([ring, ring[:, :1]], 1))


def narrowed(name: str) -> Change:
    return changed(name, lambda ring: ring[:, :-1].clone())


def without(name: str) -> Change:
    return lambda state: {key: tensor for key, tensor in state.items() if key != keys_of(state, name)[0]}


def with_extra(key: str) -> Change:
    return lambda state: {**state, key: torch.zeros(3, 8)}


ANY_FORM: dict[str, Change] = {
    "mean nan": filled("mean", NAN),
    "mean infinite": filled("mean", INF),
    "var nan": filled("var", NAN),
    "var infinite": filled("var", INF),
    "var negative": filled("var", -1.0),
    "count nan": filled("count", NAN),
    "count negative": filled("count", -3.0),
    "burnt negative": number("burnt", -1),
    "burnt huge": number("burnt", 2**62),
    "burnt a float": cast("burnt", torch.float32),
    "pushed negative": number("pushed", -1),
    "pushed at the end of its range": number("pushed", 2**63 - 1),
    "pushed a float": cast("pushed", torch.float32),
    "mean complex": cast("mean", torch.complex64),
    "no pushed": without("pushed"),
    "no var": without("var"),
    "no burnt": without("burnt"),
    "extra value": with_extra("norm/0/skew"),
    "extra layer": with_extra("norm.9/0/mean"),
    "mean of other channels": changed("mean", lambda ring: ring[:, :7].clone()),
}
GRADIENTS: dict[str, Change] = {
    f"{name} {how}": change(name)
    for name in ("mean_at", "var_at", "mean_grad", "var_grad")
    for how, change in {
        "nan": lambda name: filled(name, NAN),
        "infinite": lambda name: filled(name, -INF),
        "complex": lambda name: cast(name, torch.complex64),
        "missing": without,
        "narrowed": narrowed,
    }.items()
}
SAMPLES: dict[str, Change] = {
    f"{name} {how}": change(name)
    for name in ("rows", "products", "centred")
    for how, change in {
        "nan": lambda name: filled(name, NAN),
        "infinite": lambda name: filled(name, INF),
        "complex": lambda name: cast(name, torch.complex64),
        "missing": without,
        "widened": widened,
        "narrowed": narrowed,
    }.items()
}
BAD: dict[str, tuple[str, Change]] = {
    **{f"{form}: {what}": (form, change) for form in FORMS for what, change in ANY_FORM.items()},
    **{f"gradients: {what}": ("gradients", change) for what, change in GRADIENTS.items()},
    **{f"samples: {what}": ("samples", change) for what, change in SAMPLES.items()},
}


@pytest.mark.parametrize("what", BAD)
def test_bad_file_is_refused_whole(what: str) -> None:
    form, change = BAD[what]
    state = change(crossbn.history_state(trained(form)))
    model = trained(form, 7)
    twin = trained(form, 7)
    before = crossbn.history_state(model)
    with pytest.raises(ValueError, match=r"\bnorm\b"):
        crossbn.load_history_state(model, state)
    assert_same(crossbn.history_state(model), before)
    assert all(map(torch.equal, train(model, range(7, 10)), train(twin, range(7, 10))))


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.Conv2d(3, 8, 3, bias=False, stride=2),
        lambda: nn.Conv2d(3, 8, 3, bias=False, padding=1),
        lambda: nn.Conv2d(3, 8, 3, bias=False, dilation=2),
        lambda: nn.Conv2d(3, 8, (1, 9), bias=False, padding=(0, 4)),
        lambda: nn.Conv2d(3, 8, 5, bias=False),
    ],
    ids=["stride", "padding", "dilation", "kernel of equal size", "kernel"],
)
@FORM
def test_file_of_another_operator_is_refused(other: Callable[[], nn.Module], form: str) -> None:
    elsewhere = converted(conv=other(), **FORMS[form])
    train(elsewhere, range(5))
    model = trained(form)
    before = crossbn.history_state(model)
    with pytest.raises(ValueError, match=r"\bnorm\b"):
        crossbn.load_history_state(model, crossbn.history_state(elsewhere))
    assert_same(crossbn.history_state(model), before)


@pytest.mark.parametrize("options", [{"order": 2}, {"order": 0}, {"window": 3}, {"window": 5}], ids=str)
def test_file_of_other_settings_is_refused(options: dict[str, Any]) -> None:
    elsewhere = converted(**options)
    train(elsewhere, range(5))
    model = trained("gradients")
    before = crossbn.history_state(model)
    with pytest.raises(ValueError, match=r"\bnorm\b"):
        crossbn.load_history_state(model, crossbn.history_state(elsewhere))
    assert_same(crossbn.history_state(model), before)


def test_order_2_does_not_take_a_file_of_order_1_with_samples() -> None:
    """Both remember samples where the weight is as large as this: the shapes alone do not tell."""
    large = [converted(conv=nn.Conv2d(3, 8, 41, bias=False, padding=20), order=order) for order in (1, 2)]
    for model in large:
        train(model, range(3))
    before = crossbn.history_state(large[1])
    with pytest.raises(ValueError, match=r"\bnorm\b"):
        crossbn.load_history_state(large[1], crossbn.history_state(large[0]))
    assert_same(crossbn.history_state(large[1]), before)


def test_one_bad_layer_keeps_the_others_from_being_loaded() -> None:
    def chain() -> nn.Sequential:
        torch.manual_seed(0)
        norms = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), norms[0], nn.ReLU(), nn.Conv2d(8, 8, 3), norms[1])
        crossbn.convert_(model, window=3)
        return model

    model, other = chain(), chain()
    train(model, range(3))
    train(other, range(5))
    before, state = crossbn.history_state(model), crossbn.history_state(other)
    bad = next(key for key in state if key.startswith("4/") and key.endswith("/mean"))
    with pytest.raises(ValueError, match=r"\b4\b"):
        crossbn.load_history_state(model, {**state, bad: state[bad] * NAN})
    assert_same(crossbn.history_state(model), before)


@FORM
@pytest.mark.parametrize("burn_in", [0, 2, 9])
@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_good_file_goes_on_bit_for_bit(form: str, burn_in: int, steps: int) -> None:
    straight = trained(form, steps, burn_in=burn_in)
    state = saved_and_loaded(crossbn.history_state(straight))
    assert all(type(key) is str and type(value) is Tensor for key, value in state.items())
    resumed = trained(form, 2, burn_in=burn_in)
    resumed.load_state_dict(straight.state_dict())
    crossbn.load_history_state(resumed, state)
    assert_same(crossbn.history_state(resumed), crossbn.history_state(straight))
    assert all(map(torch.equal, train(resumed, range(10, 15)), train(straight, range(10, 15))))


@FORM
@pytest.mark.parametrize("burn_in", [0, 2])
def test_file_of_before_loads(form: str, burn_in: int) -> None:
    straight = trained(form, 6, burn_in=burn_in, weights="equal")
    state = {key: value for key, value in crossbn.history_state(straight).items() if OLD_KEY.fullmatch(key)}
    assert int(state["norm/0/pushed"]) == 6 - burn_in
    resumed = converted(**FORMS[form], burn_in=burn_in, weights="equal")
    resumed.load_state_dict(straight.state_dict())
    crossbn.load_history_state(resumed, saved_and_loaded(state))
    assert all(map(torch.equal, train(resumed, range(10, 15)), train(straight, range(10, 15))))

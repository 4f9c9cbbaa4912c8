"""Saving, restoring and forgetting what the cross-iteration norms of a model remember."""

from collections.abc import Mapping

from torch import Tensor, nn

from crossbn.convert import cross_iteration_norms
from crossbn.nn.history import History


def history_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what the norms of `model` remember, for a checkpoint beside `state_dict`: names to copied tensors.

    Example:
        >>> from crossbn import convert_
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        >>> report = convert_(model, window=3)
        >>> sorted(history_state(model))[:3]
        ['1/0/0.mean_grad', '1/0/0.var_grad', '1/0/count']
    """
    state = {f"{name}/burnt": norm.burnt.clone() for name, norm in cross_iteration_norms(model).items()}
    for owner, history in _histories(model).items():
        state |= {f"{owner}/{name}": tensor.clone() for name, tensor in history.state()}
    return state


def load_history_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take over what `history_state` returned for a model converted the same way.

    Load the model's `state_dict` first: loading weights forgets the history.

    Raises:
        ValueError: naming the layer whose history does not fit; then nothing is changed.
    """
    histories, norms = _histories(model), cross_iteration_norms(model)
    parts: dict[str, dict[str, Tensor]] = {owner: {} for owner in (*histories, *norms)}
    for key, tensor in state.items():
        owner, _, name = key.rpartition("/")
        if owner not in parts:
            raise ValueError(f"the history state has {key!r}, for which the model has no layer")
        parts[owner][name] = tensor
    for name in norms:
        if parts[name].keys() != {"burnt"}:
            raise ValueError(f"{name}: the history state should have its burn-in, has {sorted(parts[name])}")
    for owner, history in histories.items():
        if problem := history.mismatch(parts[owner]):
            raise ValueError(f"{owner}: {problem}")
    for owner, history in histories.items():
        history.load_(parts[owner])
    for norm in norms.values():
        for source in norm.sources:
            for term in source.terms:
                if term.producer is not None:
                    term.leaf = None  # FSDP makes another Parameter at the first forward
    for name, norm in norms.items():
        norm.burnt.copy_(parts[name]["burnt"])


def reset_history_(model: nn.Module) -> None:
    """Forget the remembered steps and the progress of burn-in of every cross-iteration norm of `model`."""
    for norm in cross_iteration_norms(model).values():
        norm.reset_history_()


def _histories(model: nn.Module) -> dict[str, History]:
    """Return every history once, by the first norm that it belongs to and its place there."""
    found: dict[int, tuple[str, History]] = {}
    for name, norm in cross_iteration_norms(model).items():
        for i, source in enumerate(norm.sources):
            found.setdefault(id(source), (f"{name}/{i}", source.history))
    return dict(found.values())

"""The operator that feeds a norm, watched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from crossbn.functional import flatten_weight, geometry_of
from crossbn.nn.graft import Graft
from crossbn.nn.replay import is_repetition, may_be_replayed

if TYPE_CHECKING:
    from crossbn.nn.source import Source


class Producer:
    """A linear operator whose latest input is held, by a forward hook, until the norms it feeds have seen it.

    The input is part of the graph anyway, so holding it costs no memory. A plain object, not a module: the
    norm's `state_dict` must not contain the operator.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.geometry = geometry_of(module)
        self.sources: list[Source] = []
        self._input: Tensor | None = None
        self._weight: Tensor | None = None
        self._unread = 0
        self._node: Any = None  # the operator's latest one in the graph
        self._parameter = module._parameters.get("weight")
        self._handles = [
            module.register_forward_hook(self._see_forward, with_kwargs=True),
            module.register_load_state_dict_post_hook(self._see_load),
        ]
        if parametrize.is_parametrized(module, "weight"):
            parametrization: nn.Module = module.parametrizations["weight"]  # type: ignore[index, assignment]
            self._handles.append(parametrization.register_forward_hook(self._see_weight))

    def _see_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        for source in self.sources:
            source.start_step()
        self._unread = len(self.sources)
        # A repetition has its statistics already. Norms in evaluation mode let go of the input as well.
        repeated = is_repetition()
        self._input = None if repeated else (args[0] if args else kwargs["input"]).detach()
        if repeated or not torch.is_grad_enabled():
            self._weight = None
        known = not (repeated or may_be_replayed() or torch.compiler.is_compiling())
        self._node = output.grad_fn if known else None
        # Another Parameter in its place is weight surgery: what was remembered is of other weights.
        if not torch.compiler.is_compiling() and module._parameters.get("weight") is not self._parameter:
            self._parameter = module._parameters.get("weight")
            self._forget()

    def _see_weight(self, *call: Any) -> None:
        # The weight that this forward used: computing it again would be slower and, for spectral
        # normalization, which iterates on each access, another one.
        self._weight = call[-1] if torch.is_grad_enabled() else None

    def _see_load(self, *_: Any) -> None:
        self._forget()

    def _forget(self) -> None:
        for source in self.sources:
            source.history.clear_()

    @property
    def has_run(self) -> bool:
        """Whether the producer has run at this step."""
        return self._input is not None

    def input_for(self, x: Tensor, norm: str) -> Tensor:
        """Return the latest input, from which `x`, the input of the norm called `norm`, was made.

        Raises:
            RuntimeError: if the producer has not run.
            ValueError: if its output cannot have been `x`.
        """
        if self._input is None:
            raise RuntimeError(f"{norm}: its producer {self.module} has not run before it")
        if not self._input.ndim == x.ndim == len(self.geometry.kernel) + 2 or self._input.shape[0] != x.shape[0]:
            raise ValueError(
                f"{norm}: normalizes {tuple(x.shape)}, which is not what its producer {self.module} makes of "
                f"{tuple(self._input.shape)}"
            )
        return self._input

    def finish_step(self) -> None:
        """A source is done; the last one lets go of the step."""
        self._unread = max(self._unread - 1, 0)  # the same number at the end of every step, for compiled ones
        if self._unread == 0:
            self._input = self._weight = self._node = None

    def weight_value(self, dtype: torch.dtype) -> Tensor:
        """Return today's weight as `dtype`, one row per output channel; to be called without gradients."""
        weight = self.module.weight if self._weight is None else self._weight
        assert isinstance(weight, Tensor)
        flat = flatten_weight(weight, self.geometry)
        return flat if flat.dtype == dtype else flat.to(dtype)

    def dense_weight(self) -> Tensor:
        """Return today's weight with the numbers of an output channel next to each other, in whatever shape."""
        weight = self.module.weight if self._weight is None else self._weight
        assert isinstance(weight, Tensor)
        if not self.geometry.transposed:
            return weight
        with torch.no_grad():
            return flatten_weight(weight, self.geometry)

    def weight(self) -> Tensor:
        """Return today's weight with its graph, as the operator has it."""
        # A region that is computed again must make the same graph then, when the operator, outside of it, has not run.
        seen = None if may_be_replayed() else self._weight
        weight = self.module.weight if seen is None else seen
        assert isinstance(weight, Tensor)
        return weight

    def graft(self) -> Graft | None:
        """Return where to add to the weight's gradient in the present graph, if that is possible."""
        if self._node is None or is_repetition() or may_be_replayed():
            return None
        return Graft.onto(self._node, self.module._parameters.get("weight"), self.geometry)

    @property
    def bias(self) -> Tensor | None:
        """Today's bias."""
        return self.module.bias  # type: ignore[return-value]  # Module attributes are untyped

    def release(self, source: Source) -> None:
        """Stop feeding `source`; the last one takes the hooks away."""
        self.sources.remove(source)
        if not self.sources:
            for handle in self._handles:
                handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_input": None, "_weight": None, "_unread": 0, "_node": None}

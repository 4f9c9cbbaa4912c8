"""Linear operators that feed norms, and their modules, watched where the graph does not tell."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from crossbn.functional import Activation, Geometry, flatten_weight, geometry_of, geometry_of_rows
from crossbn.ops.autograd import WeightGradientHook
from crossbn.pairing.calls import Call
from crossbn.torch_internals import backward_is_running, saved_tensor_hooks

if TYPE_CHECKING:
    from crossbn.nn.segment import Segment


class _Latest(threading.local):
    """The latest call of a thread, the weight that it read, and how many norms have not seen it yet."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.glimpse: tuple[weakref.ref[Tensor], tuple[int, ...]] | None = None
        """Input and output sizes of a call that the graph shows, and keeps alive, as well."""
        self.weight: Tensor | None = None
        self.unread = 0


class Producer:
    """A module that is a linear operator, and its latest call.

    In eager code norms read their operator's calls from the graph. A forward hook holds the call, until the norms that
    it feeds have seen it, where they cannot: in a compiled step, in a region of activation checkpointing, and where
    the weight is frozen. A plain object, not a module: the norm's `state_dict` must not contain the operator.

    Attributes:
        copies: whether weights are copied in the hook, because they are gone when the norm runs (FSDP).
        fed: the segments that it feeds.
        always: whether every call is to be held, because the graph is not to be believed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.geometry: Geometry = geometry_of(module)
        self.fed: list[Segment] = []
        self.copies = self.always = False
        self._known = module._parameters.get("weight")
        self._latest = _Latest()
        self._handles = [
            module.register_forward_hook(self._see_forward, with_kwargs=True, prepend=True),
            module.register_load_state_dict_post_hook(self._see_load),
        ]
        if parametrize.is_parametrized(module, "weight"):
            parametrization: nn.Module = module.parametrizations["weight"]  # type: ignore[index, assignment]
            self._handles.append(parametrization.register_forward_hook(self._see_weight))

    @property
    def parameter(self) -> Tensor | None:
        """The weight, if it is a Parameter."""
        return self._known if self.copies else self.module._parameters.get("weight")

    def _see_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        latest, compiling = self._latest, torch.compiler.is_compiling()
        latest.call = latest.glimpse = None
        if not compiling:
            used = module._parameters.get("weight")
            if used is not self._known:  # another object: by surgery, or by FSDP, and then perhaps for a moment only
                self._known, self.copies = used, True
            if not module.training or backward_is_running():
                return
        y: Tensor = args[0] if args else kwargs["input"]
        latest.unread = sum([fed.readers for fed in self.fed])
        if not compiling:
            if self._graph_shows(output):
                latest.glimpse = weakref.ref(y), output.shape[2:]
                return
            self.geometry = geometry_of(module)  # which may have been changed
        latest.call = call = self._call(y, output.shape[2:])
        latest.weight = None
        if self.copies and not compiling and call.parameter is not None:
            call.trained = call.weight, call.bias
            call.weight, call.bias = (None if each is None else each.detach().clone() for each in call.trained)

    def _call(self, y: Tensor, output_sizes: tuple[int, ...]) -> Call:
        weight = self.weight if self._latest.weight is None else self._latest.weight
        parameter = weight if isinstance(weight, nn.Parameter) else None
        return Call(output_sizes, parameter).see(self.geometry, y.detach(), weight, self.bias)

    def _graph_shows(self, output: Tensor) -> bool:
        if self.always or self.copies or not output.requires_grad or saved_tensor_hooks() is not None:
            return False
        parameter = self.parameter
        return parameter is None or parameter.requires_grad

    def _see_weight(self, *call: Any) -> None:
        # The weight that this forward used: computing it again would be slower and, for spectral
        # normalization, which iterates on each access, another one.
        self._latest.weight = call[-1] if torch.is_grad_enabled() else None

    def _see_load(self, *_: Any) -> None:
        for fed in self.fed:
            fed.forget()

    def latest_call(self, shown: bool = True) -> Call | None:
        """Return the latest call, if a hook has held it, and, with `shown`, also if the graph shows it."""
        latest = self._latest
        if shown and latest.call is None and latest.glimpse is not None and (y := latest.glimpse[0]()) is not None:
            latest.call = self._call(y, latest.glimpse[1])
        return latest.call

    def finish_step(self) -> None:
        """A norm has seen the call; the last one lets go of it."""
        latest = self._latest
        latest.unread = max(latest.unread - 1, 0)  # the same number at the end of every step, for compiled ones
        if latest.unread == 0:
            latest.call = latest.weight = latest.glimpse = None

    @property
    def weight(self) -> Tensor:
        """Today's weight with its graph, as the operator has it."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Today's bias."""
        return self.module.bias  # type: ignore[return-value]  # Module attributes are untyped

    def watch_(self, wanted: bool) -> None:
        """Take the forward hook off, or put it on again, under the same number: compiled code would miss it else."""
        module, key = self.module, self._handles[0].id
        if wanted and key not in module._forward_hooks:
            module._forward_hooks[key], module._forward_hooks_with_kwargs[key] = self._see_forward, True
            module._forward_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]  # it is an OrderedDict
        elif not wanted and key in module._forward_hooks:
            del module._forward_hooks[key], module._forward_hooks_with_kwargs[key]

    def release(self, fed: Segment) -> None:
        """Stop feeding a segment; the last one takes the hooks away."""
        self.fed.remove(fed)
        if not self.fed:
            for handle in self._handles:
                handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_latest"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _latest=_Latest())


class Operator:
    """A linear operator as a segment knows it, for as long as its steps are remembered.

    Attributes:
        geometry: of the module, or of the first call that was seen; of later calls only the padding may differ.
        parameter: the Parameter that its weight is; None if the weight is computed.
        producer: the module, if pairing has named it.
        activation: what is applied to its output before the norm reads it, see `ActivatedOperator`.
    """

    activation: Activation | None = None

    def __init__(self, geometry: Geometry, parameter: Tensor | None, producer: Producer | None = None) -> None:
        self.geometry = geometry
        self.parameter = parameter
        self.producer = producer
        self._bias: Tensor | None = None
        self._known: tuple[object, ...] = ()

    @classmethod
    def of_producer(cls, producer: Producer) -> Operator:
        """Return the operator of a module."""
        return cls(producer.geometry, producer.parameter, producer)

    def is_known(self, call: Call) -> bool:
        """Tell whether `call` is, to the object, as the latest one that was accepted."""
        leaf = call.parameter
        if leaf is None or not call.is_seen or self._known != (id(leaf), id(call.geometry), id(call.bias)):
            return False
        return self.parameter is leaf and (self.producer is None or self.producer.parameter is leaf)

    def fits(self, call: Call) -> bool:
        """Tell whether `call` is a later one of this operator: its weight is the same, or computed and alike."""
        leaf, own = call.parameter, self.parameter
        # Tensors that are no parameters may be other ones at each step (torch.func.functional_call).
        if isinstance(leaf, nn.Parameter) and own is not None and leaf is not own:
            return False
        if not call.is_seen:
            # A computed weight that the graph does not show may be that of a module whose weight is computed.
            return leaf is own and (leaf is not None or self.producer is not None)
        return self._is_shaped_like(call.geometry) and self.geometry.stride == call.geometry.stride

    def _is_shaped_like(self, other: Geometry) -> bool:
        """Tell whether remembered steps have room for those of `other`."""
        sizes = [(each.out_channels, each.groups, each.patch_size, each.transposed) for each in (self.geometry, other)]
        return sizes[0] == sizes[1]

    def accept(self, call: Call) -> bool:
        """Tell whether `call` fits, and keep what it tells of the operator for forwards that have no graph.

        What the graph does not show of it the module's hook may tell.
        """
        producer = self.producer
        if producer is not None and call.node is not None:
            producer.copies = call.is_freed
            # Before torch 2.13 hooks that are set now hide calls that were made outside of them as well.
            held = None if call.is_seen else producer.latest_call()
            if held is not None and held.output_sizes == call.output_sizes:
                call.take_from(held)
        if not self.fits(call):
            return False
        if call.is_seen and isinstance(call.parameter, nn.Parameter):
            self._known = id(call.parameter), id(call.geometry), id(call.bias)
        if producer is None:
            self.parameter = call.parameter if self.parameter is None else self.parameter
            self._bias = call.bias
        return True

    def notice_surgery(self) -> bool:
        """Look for another Parameter in the weight's place, or another stride; tell if steps of before mean nothing."""
        if (producer := self.producer) is None:
            return False
        parameter, known, surgery = producer.parameter, self.parameter, False
        # A tensor that is none is there for a call only (torch.func.functional_call).
        if parameter is not known and isinstance(parameter, nn.Parameter | None):
            self.parameter, surgery = parameter, known is not None
        geometry = producer.geometry
        if geometry is not self.geometry and geometry != self.geometry and self._is_shaped_like(geometry):
            self.geometry, surgery = geometry, True
        return surgery

    def weight(self, call: Call | None = None) -> Tensor | None:
        """Return today's weight, where no call tells it that of the module; None if it is not known."""
        if call is not None and call.weight is not None:
            return call.weight
        return self.parameter if self.producer is None else self.producer.weight

    def bias(self, call: Call | None = None) -> Tensor | None:
        """Return today's bias, the same way."""
        if call is not None and (call.is_seen or call.bias is not None):
            return call.bias
        return self._bias if self.producer is None else self.producer.bias

    @property
    def rows_geometry(self) -> Geometry:
        """Of the rows that gradients are of."""
        return self.geometry

    def rows(self, call: Call | None = None) -> Tensor | None:
        """Return today's weight as one row for each channel, with a bias that is a weight; None if it is not known."""
        weight, bias = self.weight(call), None if self.activation is None else self.bias(call)
        return None if weight is None else flatten_weight(weight, self.geometry, bias)

    def trained(self, call: Call | None) -> tuple[Tensor | None, Tensor | None, WeightGradientHook | None]:
        """Return weight and bias as gradients find them, None for what has none, and where the weight's is added to."""
        tensors = self.weight(call), self.bias(call)
        if call is not None and call.trained is not None:
            tensors = call.trained
        elif call is not None and self.producer is not None:
            # Of torch.func.functional_call, say, the graph shows the leaf, and not the tensor that was given.
            bias = tensors[1] if call.bias is None else self.producer.bias
            tensors = self.producer.weight if call.is_guessed else tensors[0], bias
        weight, bias = (each if each is not None and each.requires_grad else None for each in tensors)
        return weight, bias, None if call is None else call.hook()


class ActivatedOperator(Operator):
    """An operator that an activation follows, `norm(act(conv(y)))`: its bias is one more weight.

    Attributes:
        has_bias: whether there is one.
    """

    activation: Activation

    def __init__(self, geometry: Geometry, parameter: Tensor | None, activation: Activation, has_bias: bool) -> None:
        super().__init__(geometry, parameter)
        self.activation, self.has_bias = activation, has_bias

    def fits(self, call: Call) -> bool:
        """Tell whether `call` is a later one of this operator."""
        return super().fits(call) and self.has_bias == (call.bias is not None)

    @property
    def rows_geometry(self) -> Geometry:
        """Of the rows that gradients are of."""
        return geometry_of_rows(self.geometry, self.has_bias)

    def trained(self, call: Call | None) -> tuple[Tensor | None, None, None]:
        """Return the weight that weight and bias are together, if it has a gradient."""
        rows = self.rows(call)
        return rows if rows is not None and rows.requires_grad else None, None, None

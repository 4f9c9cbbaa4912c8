"""The book both front ends write in: every call of a run, in order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeGuard

from torch import nn

from crossbn.pairing import modules
from crossbn.pairing.calls import Call, changed_in_place, describe_result
from crossbn.pairing.description import Description, Opaque, Operator, width
from crossbn.pairing.value import Value, joint_origins, values_in


@dataclass(frozen=True)
class Sighting:
    """One call of a norm: what its input was made of at that moment, and the input itself."""

    description: Description
    value: Value


class Ledger:
    """Follows values through the calls of a model.

    A front end reports each call with a `Value` in the place of every tensor and gets the result's value back.

    Attributes:
        operator_calls: How often each linear operator was called.
        operator_origins: What each linear operator read; see `Value`.
        parameter_reads: How often its parameters were read past it.
        sightings: The calls of each norm.
    """

    def __init__(self, model: nn.Module, operators: Collection[nn.Module] = ()) -> None:
        self._operators = operators
        # A module with two names goes by the first.
        self._names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
        self._parameter_owners = {
            id(parameter): self._names[id(module)]
            for module in model.modules()
            if self._is_operator(module)
            for parameter in module.parameters()
        }
        self.operator_calls: Counter[str] = Counter()
        self.operator_origins: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
        self.parameter_reads: Counter[str] = Counter()
        self.sightings: defaultdict[str, list[Sighting]] = defaultdict(list)

    def _is_operator(self, module: nn.Module) -> TypeGuard[modules.LinearOperator]:
        return modules.is_operator(module) or any(module is operator for operator in self._operators)

    def name_of(self, module: nn.Module) -> str:
        """The qualified name of a module of the model."""
        return self._names[id(module)]

    def module_called(self, module: nn.Module, arguments: object) -> Value:
        """Book the call of a leaf module."""
        operands = list(values_in(arguments))
        if modules.passes_through(module) and operands:
            return operands[0]
        for operand in operands:
            operand.readers += 1
        if modules.is_norm(module):
            value = operands[0] if operands else Value(Opaque("not given as a tensor"))
            name = self.name_of(module)
            self.sightings[name].append(Sighting(value.description, value))
            after = Opaque(f"after {modules.step_name(module)}", module.num_features, final=True)
            return Value(after, origins=frozenset({name}))
        origins = joint_origins(operands)
        if self._is_operator(module):
            return self._operator_called(module, origins)
        if getattr(module, "inplace", False) and operands:
            by, final = modules.step_name(module), modules.keeps_channels(module)
            description = changed_in_place(operands[0].description, by, final)
            return _overwrite(operands[0], description, origins)
        final = modules.keeps_channels(module)
        channels = width(operands[0].description) if operands and final else None
        base = operands[0] if operands and modules.views(module) else None
        return Value(Opaque(f"after {modules.step_name(module)}", channels, final), view_of=base, origins=origins)

    def function_called(self, call: Call) -> Value:
        """Book the call of a function or tensor method."""
        operands = call.operands
        if not operands or call.reads_no_element:
            return Value(Opaque(f"after {call.name}"))
        if call.aliases:
            return operands[0]
        for operand in operands:
            operand.readers += 1
        origins = joint_origins(operands)
        if call.copies:
            return Value(operands[0].description, copied_from=operands[0], origins=origins)
        description = describe_result(call)
        if call.overwritten is not None:
            return _overwrite(call.overwritten, description, origins)
        return Value(description, view_of=operands[0] if call.views else None, origins=origins)

    def parameter_read(self, parameter: nn.Parameter) -> None:
        """Book that the model uses a parameter itself, which ties down the operator that owns it."""
        if id(parameter) in self._parameter_owners:
            self.parameter_reads[self._parameter_owners[id(parameter)]] += 1

    def _operator_called(self, operator: modules.LinearOperator, origins: frozenset[str]) -> Value:
        name = self.name_of(operator)
        self.operator_calls[name] += 1
        self.operator_origins[name] |= origins
        description = Operator(name, modules.output_channels(operator), modules.output_dimensions(operator))
        return Value(description, origins=frozenset({name}))


def _overwrite(value: Value, description: Description, origins: frozenset[str]) -> Value:
    value.description, value.origins = description, origins
    base = value.view_of
    while base is not None:
        base.description = changed_in_place(base.description, "a write to a view of it")
        base.origins |= origins
        base = base.view_of
    return value

"""Finds the steps after an operator that can become part of its kernel, in a Relax function."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrlflow.backends.tvm.fusion.attention import parts_of
from xrlflow.backends.tvm.kernels.building import FLOAT
from xrlflow.backends.tvm.kernels.steps import CASTS, STEPS, Earlier, Extra, Operand, Step
from xrlflow.backends.tvm.toolchain.reading import operator, sizes
from xrlflow.backends.tvm.toolchain.weights import array_of, moved


@dataclass(frozen=True, slots=True)
class Followed:
    """Steps after an operator. `extras`: the expressions of their extra operands. `inside`: the variables of the
    operator and of the steps. Operators outside read only the variable `last`."""

    steps: tuple[Step, ...]
    extras: tuple[Any, ...]
    inside: frozenset[Any]
    last: Any


class Function:
    """The bindings of a Relax function: the `values` of its variables, and how often each variable is used."""

    def __init__(self, function: Any) -> None:
        from tvm import relax

        self.values: dict[Any, Any] = {}
        self.uses: Counter[Any] = Counter()
        self._readers: dict[Any, list[Any]] = defaultdict(list)

        def count(expression: Any) -> set[Any]:
            variables = [part for part in parts_of(expression) if isinstance(part, relax.Var)]
            self.uses.update(variables)
            return set(variables)

        for block in function.body.blocks:
            for binding in block.bindings:
                self.values[binding.var] = binding.value
                for part in count(binding.value):
                    self._readers[part].append(binding.var)
        count(function.body.body)
        self._order = {v: i for i, v in enumerate(self.values)}

    def reader(self, variable: Any) -> Any | None:
        """The only variable that is computed from `variable`; None if several variables are, or if it uses `variable`
        more than once."""
        readers = self._readers[variable]
        return readers[0] if self.uses[variable] == len(readers) == 1 else None

    def followed(
        self,
        variable: Any,
        excluded: Collection[Any] = (),
        by_channel: bool = False,
        to_bytes: bool = False,
    ) -> Followed:
        """The longest sequence of steps after a variable whose intermediate results no other operator reads. Variables
        in `excluded` are not used as steps.

        `by_channel`: only steps whose further operands are constants: numbers, or one number for each channel.
        `to_bytes`: the last step may convert results to bytes.
        """
        out = sizes(self.values[variable])
        numbered = {variable: 0}
        steps: list[Step] = []
        extras: list[Any] = []
        best = Followed((), (), frozenset(numbered), variable)
        for each in self._after(variable):
            step = self._step(each, numbered, out) if each not in excluded else None
            if step is None:
                break
            if by_channel and (Extra(False) in step[0].operands or not all(map(_is_constant, step[1]))):
                break
            if step[0].operator in CASTS and not to_bytes:
                break
            steps.append(step[0])
            extras += step[1]
            numbered[each] = len(steps)
            inside = Counter(part for v in numbered for part in parts_of(self.values[v]) if part in numbered)
            if all(inside[v] == self.uses[v] for v in numbered if v is not each):
                best = Followed(tuple(steps), tuple(extras), frozenset(numbered), each)
            if step[0].operator in CASTS:
                break
        return best

    def _after(self, variable: Any) -> Iterator[Any]:
        """The variables that are computed from `variable`, directly or indirectly, in the function's order."""
        pending = {*self._readers[variable]}
        visited: set[Any] = set()
        while pending:
            first = min(pending, key=lambda v: self._order[v])
            pending.remove(first)
            if first not in visited:
                visited.add(first)
                yield first
                pending.update(self._readers[first])

    def _step(self, variable: Any, numbered: Mapping[Any, int], out: Any) -> tuple[Step, list[Any]] | None:
        """The step that computes a variable, and the expressions of its extra operands; None if no kernel supports it
        as a step. `numbered`: the number of each earlier result that it may read. `out`: the shape of the results."""
        call = self.values[variable]
        if operator(call) == "relax.astype" and call.args[0] in numbered:
            name = f"relax.astype.{call.ty.dtype}"
            return (Step(name, (Earlier(numbered[call.args[0]]),)), []) if name in CASTS else None
        if operator(call) not in STEPS or sizes(call, FLOAT) != out:
            return None
        operands: list[Operand] = []
        extras: list[Any] = []
        for operand in call.args:
            if operand in numbered:
                operands.append(Earlier(numbered[operand]))
                continue
            result = _operand(operand, out)
            if result is None:
                return None
            operands.append(result[0])
            extras += result[1]
        return Step(operator(call), tuple(operands)), extras


def _is_constant(expression: Any) -> bool:
    from tvm.ir import GenericConst

    return isinstance(expression, GenericConst)


def _operand(expression: Any, out: tuple[int, ...]) -> tuple[float | Extra, list[Any]] | None:
    """An operand of a step: a number, one number for each channel, or a tensor of the result's shape; None for any
    other."""
    from tvm.ir import GenericConst

    shape = sizes(expression, FLOAT)
    if shape is None:
        return None
    if shape == out:
        return Extra(False), [expression]
    if shape == out[-1:] and not isinstance(expression, GenericConst):
        return Extra(True), [expression]
    if isinstance(expression, GenericConst):
        if math.prod(shape) == 1:
            return float(array_of(expression).reshape(-1)[0]), []
        if math.prod(shape) == out[-1] and shape[-1] == out[-1]:
            return Extra(True), [moved(expression, np.reshape, -1)]
    return None

"""Finds 3x3 convolutions in a Relax function, and replaces them and what follows them by one kernel each."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from xrlflow.backends.tvm.algorithms import Algorithm, Algorithms, Choice, Chosen, shared_out
from xrlflow.backends.tvm.attention_fusion import parts_of
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.reading import constant, numbers, operator, sizes, with_main
from xrlflow.backends.tvm.target import Machine
from xrlflow.backends.tvm.winograd import (
    STEPS,
    Earlier,
    Extra,
    Form,
    Operand,
    Step,
    cost,
    direct_cost,
    kernel,
    packed,
    plan,
)
from xrlflow.backends.tvm.winograd_errors import relative_errors

_FLOAT = "float32"
# Fewer channels, on either side, leave little to multiply.
_CHANNELS = 16
_WEIGHTED = frozenset({"relax.nn.conv2d", "relax.nn.conv1d", "relax.nn.conv2d_transpose", "relax.matmul"})
CHOSEN = "xrlflow.algorithms"
"""The attribute of a module that says what was chosen, in JSON."""


def use_winograd(module: Any, machine: Machine, algorithms: Algorithms) -> Any:
    """The module with a kernel for each 3x3 convolution in "main" that fewer multiplications make faster."""
    tvm()
    from tvm import relax

    main = module["main"]
    matches = _Reader(main).matches()
    if not matches:
        return module
    others = _layers(main) - len(matches)
    options = [_choices(match, machine) for match in matches]
    chosen = algorithms.choose(options, others)
    report = shared_out([_title(match.form) for match in matches], chosen, others)
    found = {
        match.last: replace(match, form=replace(match.form, m=choice.algorithm.m))
        for match, choice in zip(matches, chosen)
        if choice.algorithm.m is not None
    }
    functions: dict[Form, Any] = {}

    @relax.expr_functor.mutator
    class Fuser(relax.PyExprMutator):  # type: ignore[misc]
        def visit_var_binding_(self, binding: Any) -> None:
            if binding.var not in found:
                super().visit_var_binding_(binding)
                return
            match = found[binding.var]
            form, how = match.form, plan(match.form, machine)
            if form not in functions:
                functions[form] = self.builder_.add_func(kernel(form, how), "winograd")
            wide = constant(packed(match.weights.value.numpy(), form, how))
            read = [self.visit_expr(match.image), wide, *map(self.visit_expr, match.extras)]
            call = relax.call_tir(functions[form], read, relax.TensorType(form.out, _FLOAT))
            self.builder_.emit_normalized(relax.VarBinding(binding.var, self.builder_.normalize(call)))

    done = relax.transform.DeadCodeElimination()(with_main(module, Fuser(module)))
    return done.with_attr(CHOSEN, json.dumps([each.stored() for each in report]))


def chosen_in(module: Any) -> tuple[Chosen, ...]:
    """What `use_winograd` chose for a module."""
    stored = (module.attrs or {}).get(CHOSEN)
    return () if stored is None else tuple(Chosen(**each) for each in json.loads(str(stored)))


def _layers(function: Any) -> int:
    """How many operators of a function have constant weights."""
    from tvm.ir import GenericConst

    values = [binding.value for block in function.body.blocks for binding in block.bindings]
    return sum(operator(v) in _WEIGHTED and isinstance(v.args[1], GenericConst) for v in values)


def _choices(match: Match, machine: Machine) -> list[Choice]:
    """The algorithms for a convolution."""
    found = [Choice(Algorithm.DIRECT, direct_cost(match.form, machine))]
    weights = match.weights.value.numpy()
    for algorithm in (Algorithm.F23, Algorithm.F43):
        m = algorithm.m
        assert m is not None
        form = replace(match.form, m=m)
        error = max(relative_errors(weights, m, form.groups).values())
        found.append(Choice(algorithm, cost(form, plan(form, machine), machine), error))
    return found


def _title(form: Form) -> str:
    groups = f" in {form.groups} groups" if form.groups > 1 else ""
    return (
        f"3x3 convolution of {form.image[3]} to {form.out[3]} channels{groups} at {form.out[1]}x{form.out[2]}"
    )


@dataclass(frozen=True, slots=True)
class Match:
    """A convolution and the steps after it, up to the variable `last`. `extras`: the expressions of its `Extra`s."""

    form: Form
    image: Any
    weights: Any
    extras: tuple[Any, ...]
    last: Any


class _Reader:
    """Looks for 3x3 convolutions in a Relax function."""

    def __init__(self, function: Any) -> None:
        from tvm import relax

        self._values: dict[Any, Any] = {}
        self._uses: Counter[Any] = Counter()
        self._readers: dict[Any, list[Any]] = defaultdict(list)

        def count(expression: Any) -> set[Any]:
            found = [part for part in parts_of(expression) if isinstance(part, relax.Var)]
            self._uses.update(found)
            return set(found)

        for block in function.body.blocks:
            for binding in block.bindings:
                self._values[binding.var] = binding.value
                for part in count(binding.value):
                    self._readers[part].append(binding.var)
        count(function.body.body)

    def matches(self) -> list[Match]:
        """A convolution with as many steps as are read by nothing else. No two matches share a step."""
        found = []
        taken: set[Any] = set()
        for variable, value in self._values.items():
            if operator(value) != "relax.nn.conv2d" or (match := self._convolution(variable, value)) is None:
                continue
            inside, match = self._with_steps(match, taken)
            taken |= inside
            found.append(match)
        return found

    def _convolution(self, variable: Any, call: Any) -> Match | None:
        from tvm.ir import GenericConst

        attrs = call.attrs
        image, weights, out = (sizes(x, _FLOAT) for x in (*call.args, call))
        layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or "NHWC")
        if layouts != ("NHWC", "HWIO", "NHWC") or not isinstance(call.args[1], GenericConst):
            return None
        if image is None or out is None or weights is None or 0 in (*image, *out):
            return None
        groups, (top, left, _, _) = int(attrs.groups), numbers(attrs.padding)
        plain = numbers(attrs.strides) == numbers(attrs.dilation) == [1, 1] and weights[:2] == (3, 3)
        if not plain or min(weights[2], weights[3] // groups) < _CHANNELS:
            return None
        form = Form(image, out, top, left, 2, groups=groups)
        return Match(form, call.args[0], call.args[1], (), variable)

    def _with_steps(self, match: Match, taken: set[Any]) -> tuple[set[Any], Match]:
        """The match with its steps, and the variables of these."""
        numbered = {match.last: 0}
        steps: list[Step] = []
        extras: list[Any] = []
        best: tuple[set[Any], Match] = ({match.last}, match)
        for variable in self._after(match.last):
            step = self._step(variable, numbered, match.form.out) if variable not in taken else None
            if step is None:
                break
            steps.append(step[0])
            extras += step[1]
            numbered[variable] = len(steps)
            inside = Counter(part for v in numbered for part in parts_of(self._values[v]) if part in numbered)
            if all(inside[v] == self._uses[v] for v in numbered if v is not variable):
                form = replace(match.form, steps=tuple(steps))
                best = set(numbered), replace(match, form=form, extras=tuple(extras), last=variable)
        return best

    def _after(self, variable: Any) -> Iterator[Any]:
        """The variables that are computed from one, in the function's order, as far as there are steps."""
        order = {v: i for i, v in enumerate(self._values)}
        waiting = {*self._readers[variable]}
        seen: set[Any] = set()
        while waiting:
            first = min(waiting, key=lambda v: order[v])
            waiting.remove(first)
            if first not in seen:
                seen.add(first)
                yield first
                waiting.update(self._readers[first])

    def _step(self, variable: Any, numbered: Mapping[Any, int], out: Any) -> tuple[Step, list[Any]] | None:
        """A step, and the expressions of its extras."""
        call = self._values[variable]
        if operator(call) not in STEPS or sizes(call, _FLOAT) != out:
            return None
        operands: list[Operand] = []
        extras: list[Any] = []
        for operand in call.args:
            if operand in numbered:
                operands.append(Earlier(numbered[operand]))
                continue
            found = _other(operand, out)
            if found is None:
                return None
            operands.append(found[0])
            extras += found[1]
        return Step(operator(call), tuple(operands)), extras


def _other(expression: Any, out: tuple[int, ...]) -> tuple[float | Extra, list[Any]] | None:
    """An operand of a step: a number, numbers by channel, or a tensor like the result; None for any other."""
    from tvm.ir import GenericConst

    shape = sizes(expression, _FLOAT)
    if shape is None:
        return None
    if shape == out:
        return Extra(False), [expression]
    if isinstance(expression, GenericConst):
        array = expression.value.numpy()
        if array.size == 1:
            return float(array.reshape(-1)[0]), []
        if array.size == out[3] and shape[-1] == out[3]:
            return Extra(True), [constant(array.reshape(-1))]
    return None

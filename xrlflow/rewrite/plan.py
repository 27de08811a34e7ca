"""Plans: Python functions that find the matches of a pattern. Each node of a pattern is compiled to a plan.

A plan starts at that node and walks along inputs to producers and along uses to consumers. Its code has one loop for
each branching point (order of commutative inputs, readers of a value). Plans run for every changed node of every step
of every search; generated code is about ten times faster than an interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xrlflow.ir import ABSENT, Attr, Dim, DType, Graph, Node, TensorType, Value
from xrlflow.ops.schema import COMMUTATIVE, schema
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.rewrite.pattern import Capture, Number, Out, Pattern, PInput, PNode, Var, default_of
from xrlflow.rewrite.rule import DTYPE_FLAGS, VarSpec

# A plan is run(start, producers, uses, outputs, graph, report). It calls report(nodes, values, attributes) for each
# match.
PlanFunction = Callable[[Node, Any, Any, frozenset[Value], Graph, Callable[..., None]], None]


def may_start(
    pattern: Pattern, start: int, node: Node, types: Sequence[TensorType | None], above: Sequence[str | None]
) -> bool:
    """Whether the plan from pattern node `start` may find a match from `node`.

    `types` are the types of the node's inputs, `above` the operators that compute them (None: no operator does). The
    caller has checked that the node's operator fits. The result depends only on `types`, `above`, the node's operator
    and attributes, and on which inputs are absent or equal. `MatchSignature.key` holds all of these.
    """
    pattern_node = pattern.nodes[start]
    if not _attributes_fit(pattern_node, node):
        return False
    inputs = pattern_node.inputs
    if len(node.inputs) > len(inputs):
        return False
    missing = len(inputs) - len(node.inputs)
    got = [*zip(node.inputs, types, above), *[(ABSENT, None, None)] * missing]
    orders = [got, got[::-1]] if pattern_node.op in COMMUTATIVE and len(inputs) == 2 else [got]
    return any(_inputs_fit(pattern, inputs, order) for order in orders)


def _attributes_fit(pattern_node: PNode, node: Node) -> bool:
    if pattern_node.rest is None and not pattern_node.attrs.keys() >= node.attrs.keys():
        return False
    for name, value in pattern_node.attrs.items():
        if not isinstance(value, Capture):
            default = default_of(pattern_node.op, name)
            if node.attrs.get(name, default) != _comparable(value, default):
                return False
    return True


def _inputs_fit(
    pattern: Pattern,
    inputs: Sequence[PInput],
    got: Sequence[tuple[Value, TensorType | None, str | None]],
) -> bool:
    bound: dict[str, tuple[Value, TensorType | None]] = {}
    for expected, (value, type, op) in zip(inputs, got):
        if isinstance(expected, Var):
            if bound.setdefault(expected.name, (value, type))[0] != value:
                return False
            if value == ABSENT and expected.name not in pattern.optional:
                return False
        elif isinstance(expected, Out):
            if op not in expected.node.ops:
                return False
        elif isinstance(expected, Number):
            if type is None or not type.const:
                return False
        elif value != ABSENT:
            return False
    variables = {name: type for name, (_, type) in bound.items()}
    return any(not mismatch(alternative, variables) for alternative in pattern.shapes)


def mismatch(declared: Mapping[str, VarSpec], types: Mapping[str, TensorType | None]) -> str:
    """The reason why a declaration does not admit these types; empty if it admits them.

    A rule is proven only for the types that it declares.
    """
    sizes: dict[str, Dim] = {}
    for name, type in types.items():
        spec = declared.get(name)
        if spec is None or type is None:
            continue
        if spec.const and not type.const:
            return f"{name} is not constant"
        if spec.dtype is not None and type.dtype not in DTYPE_FLAGS[spec.dtype]:
            return f"{name} is not of type {spec.dtype}"
        if spec.dims is None or (spec.open and not spec.dims):
            continue
        shape = type.shape
        if shape is None:
            return f"the rank of {name} is not known"
        if len(shape) < len(spec.dims) if spec.open else len(shape) != len(spec.dims):
            return f"{name} has {len(shape)} dimensions"
        for expected, got in zip(spec.dims, shape[len(shape) - len(spec.dims) :]):
            if isinstance(expected, int):
                if expected != got:
                    return f"a dimension of {name} is {got}, not {expected}"
            elif expected in sizes:
                if got is None or sizes[expected] != got:
                    return f"dimension {expected} of {name} differs, or is not known"
            else:
                sizes[expected] = got
    return ""


# The greatest relative difference between a float32 constant and a rule's number: exporters round numbers to float32.
_ROUNDING = 1e-6


def _is(constant: float, number: float, dtype: DType) -> bool:
    """Whether `constant` is `number` rounded to `dtype`."""
    if constant == number:
        return True
    if dtype == DType.FLOAT:
        return abs(constant - number) <= _ROUNDING * abs(number) < math.inf
    return dtype in (DType.FLOAT16, DType.BFLOAT16) and constant == float(numpy_dtype(dtype).type(number))


def is_number(graph: Graph, value: Value, number: float, partner: Value) -> bool:
    """Whether a value is a small constant whose elements all equal `number`, rounded to its type.

    The constant may have dimensions, as long as broadcasting with it does not change the shape of the value `partner`.
    """
    const = graph.leaves.consts.get(value)
    if const is None or const.type.dtype == DType.BOOL:
        return False
    constant = graph.leaves.uniform(value)
    if constant is None or not _is(constant, number, const.type.dtype):
        return False
    own = const.type.shape or ()
    if not own:
        return True
    shape = graph.type(partner).shape or ()
    tail = shape[len(shape) - len(own) :]
    return len(own) <= len(shape) and all(n == 1 or n == d for n, d in zip(own, tail))


def is_const(graph: Graph, value: Value) -> bool:
    node = graph.producers.get(value)
    return value in graph.leaves.consts if node is None else node.types[0].const


def compile_plan(pattern: Pattern, start: int) -> PlanFunction:
    """Compile the plan that starts at pattern node `start`."""
    source, constants = plan_source(pattern, start)
    namespace: dict[str, Any] = {"is_number": is_number, "is_const": is_const, **constants}
    exec(compile(source, f"<plan {pattern.name} from {start}>", "exec"), namespace)
    function: PlanFunction = namespace["plan"]
    return function


def plan_source(pattern: Pattern, start: int) -> tuple[str, Mapping[str, object]]:
    """The Python code of a plan, and the constants to which the code refers by name."""
    writer = _Writer(pattern)
    writer.bind(pattern.nodes[start])
    writer.finish()
    return "\n".join(writer.lines), writer.constants


class _Writer:
    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.lines = [
            "def plan(START, producers, uses, outputs, graph, report):",
            "  for _ in (0,):",
        ]
        self.depth = 2
        self.constants: dict[str, object] = {}
        self.bound: list[PNode] = []
        self.vars: set[str] = set()
        self.captured: set[str] = set()

    def emit(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    def loop(self, head: str) -> None:
        self.emit(f"for {head}:")
        self.depth += 1

    def unless(self, condition: str) -> None:
        self.emit(f"if {condition}: continue")

    def constant(self, value: object) -> str:
        name = f"K{len(self.constants)}"
        self.constants[name] = value
        return name

    def bind(self, start: PNode) -> None:
        """Write the checks of all nodes of the pattern, beginning at node `start`."""
        self.emit(f"n{start.index} = START")
        self.node(start)
        while unbound := [n for n in self.pattern.nodes if n not in self.bound]:
            node, value = next(anchor for n in unbound if (anchor := self.anchor(n)) is not None)
            self.loop(f"u{node.index} in uses.get({value}, ())")
            self.in_order(node, f"u{node.index}")
            self.emit(f"n{node.index} = producers[u{node.index}]")
            self.unless(self.another(f"n{node.index}", node))
            self.node(node, ordered=True)

    def another(self, n: str, p: PNode) -> str:
        """Code of the condition that node `n` has none of the operators of pattern node `p`."""
        return (
            f"{n}.op != {p.op!r}" if len(p.ops) == 1 else f"{n}.op not in {self.constant(frozenset(p.ops))}"
        )

    def in_order(self, p: PNode, id: str) -> None:
        """If the rule is symmetric, write a check that admits only one permutation of its results: the one with
        ascending ids.
        """
        results = [out.node for out in self.pattern.outputs] if self.pattern.rule.symmetric else []
        if p not in results:
            return
        for result in results:
            if result in self.bound:
                sign = ">=" if results.index(p) < results.index(result) else "<="
                self.unless(f"{id} {sign} n{result.index}.outputs[0]")

    def anchor(self, node: PNode) -> tuple[PNode, str] | None:
        """The pair of `node` and the code of a bound value that it reads; None if it reads no bound value."""
        shared: str | None = None
        for i in node.inputs:
            if isinstance(i, Out) and i.node in self.bound:
                return node, f"n{i.node.index}.outputs[{i.index}]"
            if isinstance(i, Var) and i.name in self.vars:
                shared = f"v_{i.name}"
        return None if shared is None else (node, shared)

    def node(self, p: PNode, ordered: bool = False) -> None:
        """Write the checks of a node whose operator fits, then those of its inputs, then those of their producers.

        `ordered`: `in_order` was already called for the node.
        """
        n = f"n{p.index}"
        for bound in self.bound:
            if not set(bound.ops).isdisjoint(p.ops):
                self.unless(f"{n} is n{bound.index}")
        if not ordered:
            self.in_order(p, f"{n}.outputs[0]")
        self.bound.append(p)
        self.unless(f"{n}.types[0].const")
        definition = schema(p.op)
        if p.outputs > 1:
            self.unless(f"len({n}.outputs) != {p.outputs}")
        elif definition is None or definition.max_output > 1:
            self.unless(f"len({n}.outputs) > 1 and any(o in uses or o in outputs for o in {n}.outputs[1:])")
        self.attributes(p, n)
        self.inputs(p, n)

    def attributes(self, p: PNode, n: str) -> None:
        if p.op_name is not None and p.op_name in self.captured:
            self.unless(f"{n}.op != a_{p.op_name}")
        elif p.op_name is not None:
            self.captured.add(p.op_name)
            self.emit(f"a_{p.op_name} = {n}.op")
        if not p.attrs and p.rest is None:
            self.unless(f"{n}.attrs.digest")
            return
        if p.rest is None:
            names = self.constant(frozenset(p.attrs))
            self.unless(f"{n}.attrs.digest and not {names}.issuperset({n}.attrs)")
        for name, expected in p.attrs.items():
            default = default_of(p.op, name)
            got = f"{n}.attrs.get({name!r}, {self.constant(default)})"
            if isinstance(expected, Capture):
                if expected.name in self.captured:
                    self.unless(f"{got} != a_{expected.name}")
                else:
                    self.captured.add(expected.name)
                    self.emit(f"a_{expected.name} = {got}")
            else:
                self.unless(f"{got} != {self.constant(_comparable(expected, default))}")
        if p.rest is not None:
            self.captured.add(p.rest)
            self.emit(f"a_{p.rest} = {n}.attrs")

    def inputs(self, p: PNode, n: str) -> None:
        i = f"i{p.index}"
        minimum = len(p.inputs)
        while minimum and self.may_be_absent(p.inputs[minimum - 1]):
            minimum -= 1
        self.emit(f"{i} = {n}.inputs")
        if minimum == len(p.inputs):
            self.unless(f"len({i}) != {minimum}")
        else:
            self.unless(f"not {minimum} <= len({i}) <= {len(p.inputs)}")
            self.emit(f"if len({i}) < {len(p.inputs)}: {i} += ({ABSENT},) * ({len(p.inputs)} - len({i}))")
        if p.op in COMMUTATIVE and len(p.inputs) == 2:
            self.loop(f"{i} in ({i}, {i}[::-1])")
        later: list[PNode] = []
        for k, expected in enumerate(p.inputs):
            got = f"{i}[{k}]"
            if expected is None:
                self.unless(f"{got} != {ABSENT}")
            elif isinstance(expected, Number):
                partner = f"{i}[{0 if k else len(p.inputs) - 1}]"
                self.unless(f"not is_number(graph, {got}, {self.constant(expected.value)}, {partner})")
            elif isinstance(expected, Var):
                if expected.name in self.vars:
                    self.unless(f"{got} != v_{expected.name}")
                    continue
                self.vars.add(expected.name)
                self.emit(f"v_{expected.name} = {got}")
                if not self.may_be_absent(expected):
                    self.unless(f"not v_{expected.name}")
                if all(expected.name in a and a[expected.name].const for a in self.pattern.shapes):
                    self.unless(f"v_{expected.name} and not is_const(graph, v_{expected.name})")
            elif expected.node in self.bound:
                self.unless(f"{got} != n{expected.node.index}.outputs[{expected.index}]")
            else:
                child = f"n{expected.node.index}"
                self.emit(f"{child} = producers.get({got})")
                self.unless(f"{child} is None or {self.another(child, expected.node)}")
                self.unless(
                    f"len({child}.outputs) <= {expected.index} or {child}.outputs[{expected.index}] != {got}"
                )
                later.append(expected.node)
        for child_node in later:
            if child_node not in self.bound:
                self.node(child_node)

    def may_be_absent(self, i: PInput) -> bool:
        return isinstance(i, Var) and i.name in self.pattern.optional

    def finish(self) -> None:
        pattern = self.pattern
        replaced = {(o.node.index, o.index) for o in pattern.outputs}
        if not pattern.rule.allow_multi_use:
            for node in pattern.nodes:
                for index in range(node.outputs):
                    readers = sum(
                        any(isinstance(i, Out) and i.node is node and i.index == index for i in reader.inputs)
                        for reader in pattern.nodes
                    )
                    if (node.index, index) in replaced or not readers:
                        continue
                    value = f"n{node.index}.outputs[{index}]"
                    self.unless(f"len(uses[{value}]) != {readers} or {value} in outputs")
        nodes = "".join(f"n{n.index}, " for n in pattern.nodes)
        values = "".join(f"v_{v.name}, " for v in pattern.variables)
        attrs = "".join(f"a_{c}, " for c in pattern.captures)
        self.emit(f"report(({nodes}), ({values}), ({attrs}))")


def _comparable(expected: Attr, default: Attr | None) -> Attr:
    """The expected value of an attribute as ONNX stores it: floats are rounded to float32."""
    if isinstance(expected, (int, float)) and isinstance(default if default is not None else expected, float):
        return float(np.float32(expected))
    return expected

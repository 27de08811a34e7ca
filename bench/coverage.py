"""How many substitutions of other optimizers the library covers: `python bench/coverage.py --rules FILE [--json OUT]`.

FILE holds TASO's generated substitutions, decoded to JSON: a list of rules with `source` and `target` operators
(ewadd, ewmul, matmul, conv2d, relu, concat, split) and the pairs of `outputs` that must be equal. The substitutions
that TASO has written by hand, and TENSAT's of several patterns, stand below.

Both sides are built as ONNX graphs of concrete shapes (several sets of sizes; the right factors of products as
inputs and as constants), and the left one is searched, breadth first, with the whole library. A substitution is

- identical: both sides are one graph in ONNX, where an activation is an operator of its own;
- reached: the right side comes up after so many of our substitutions, up to the order of commutative operands;
- cheaper: a graph that costs less than the right side by the roofline comes up (after 0 steps: the left side does);
- missed: neither, within four steps.

The outcome is the worst one over the sets of sizes, and for each of them the best over what is constant and over
the names of the tensors (parts are put together in an order that depends on names). Both sides are also evaluated on
random numbers: a substitution that is wrong says so.

The free tensors are inputs or constants. Sums and products of operands that the graph itself computes are reordered
only where it leads somewhere (see `AssociateAdds`): there TASO's pure reorderings are not offered.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout

from rewrite_rules import LIBRARY
from xrlflow.cost import Roofline
from xrlflow.ir import ABSENT, Graph, Node, Value
from xrlflow.ir.graph import FINGERPRINT_MASK
from xrlflow.onnxio import load
from xrlflow.ops.evaluate import evaluate_graph, evaluate_node
from xrlflow.ops.schema import COMMUTATIVE, IR_VERSION, OPSET
from xrlflow.rewrite import Library, RewriteState

STEPS = 4
# The most graphs that one search may visit.
STATES = 4000
# Prefixes of the names of tensors, one after the other.
PREFIXES = "axknsv"

# Substitutions, as TASO writes them


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator; inputs are "in7" (a free tensor) or "#1.0" (output 0 of operator 1 of the same side)."""

    op: str
    inputs: tuple[str, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Substitution:
    """A left and a right side; `outputs` are the pairs of tensors that are equal."""

    name: str
    left: tuple[Operation, ...]
    right: tuple[Operation, ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def sides(self) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
        return self.left, self.right

    @property
    def inputs(self) -> list[str]:
        names = {i for side in self.sides for o in side for i in o.inputs if not i.startswith("#")}
        return sorted(names, key=lambda n: int(n[2:]))


def substitutions(path: Path) -> list[Substitution]:
    """The substitutions of a file."""

    def operations(listed: Sequence[Mapping[str, Any]]) -> tuple[Operation, ...]:
        return tuple(Operation(o["op"], tuple(o["inputs"]), o.get("attrs") or {}) for o in listed)

    return [
        Substitution(
            str(rule["id"]),
            operations(rule["source"]),
            operations(rule["target"]),
            tuple((a, b) for a, b in rule["outputs"]),
        )
        for rule in json.loads(path.read_text())["rules"]
    ]


def readable(side: Sequence[Operation], outputs: Sequence[str]) -> str:
    """A side as a formula: @ is the matrix product, [x|y] puts together columns, [x;y] rows or the batch."""

    def show(name: str, inside: bool = False) -> str:
        if not name.startswith("#"):
            return "x" + name[2:]
        at, _, output = name[1:].partition(".")
        o = side[int(at)]
        infix = {"ewadd": " + ", "ewmul": " * ", "matmul": " @ "}.get(o.op)
        if infix:
            text = infix.join(show(i, True) for i in o.inputs)
            relu = o.attrs.get("activation") == "relu"
            return f"relu({text})" if relu else f"({text})" if inside else text
        if o.op == "concat":
            return "[" + ("|" if o.attrs["axis"] == 1 else "; ").join(map(show, o.inputs)) + "]"
        if o.op == "split":
            return f"split({show(o.inputs[0])})[{output}]"
        text = f"{'conv' if o.op == 'conv2d' else o.op}({', '.join(map(show, o.inputs))})"
        return f"relu({text})" if o.attrs.get("activation") == "relu" else text

    return ", ".join(show(o) for o in outputs)


# Shapes

# A dimension: the sum of some unknowns ("in4.1") and numbers ("3").
Form = tuple[str, ...]


class Unsolvable(Exception):
    """A substitution's operators do not fit together."""


@dataclass(slots=True)
class Dimensions:
    """Sizes that are not numbers yet. Operators make some of them equal."""

    known: dict[str, Form] = field(default_factory=dict)

    def resolve(self, form: Form) -> Form:
        out: Form = ()
        for part in form:
            out += self.resolve(self.known[part]) if part in self.known else (part,)
        return out

    def equate(self, a: Form, b: Form) -> None:
        """Make two dimensions equal. Raises Unsolvable if they cannot be."""
        one, other = self._without(a, b), self._without(b, a)
        if not one and not other:
            return
        if len(one) != 1 or one[0].isdigit():
            one, other = other, one
        if len(one) == 1 and not one[0].isdigit() and other and one[0] not in other:
            self.known[one[0]] = other
        elif len(one) == len(other) and len(one) > 1:
            for p, q in zip(one, other):
                self.equate((p,), (q,))
        else:
            raise Unsolvable(f"{'+'.join(one) or 0} is not {'+'.join(other) or 0}")

    def _without(self, a: Form, b: Form) -> Form:
        """The part of `a` that is not in `b`, in order."""
        counted = Counter(self.resolve(b))
        out = []
        for part in self.resolve(a):
            if counted[part]:
                counted[part] -= 1
            else:
                out.append(part)
        return tuple(out)


def ranks(sub: Substitution) -> dict[str, int]:
    """The number of dimensions of each input; two if nothing determines it."""
    found: dict[tuple[int, str], int] = {}

    def key(side: int, name: str) -> tuple[int, str]:
        return (side, name) if name.startswith("#") else (-1, name)

    for _ in range(8):  # until nothing changes
        for s, side in enumerate(sub.sides):
            for at, o in enumerate(side):
                names = [key(s, n) for n in o.inputs]
                results = [key(s, f"#{at}.{k}") for k in range(o.attrs.get("num_outputs", 1))]
                rank = {"matmul": 2, "conv2d": 4}.get(o.op) or o.attrs.get("num_dim")
                rank = rank or next((found[n] for n in [*names, *results] if n in found), None)
                if rank is not None:
                    found.update(dict.fromkeys([*names, *results], rank))
    return {n: found.get((-1, n), 2) for n in sub.inputs}


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of the tensors of both sides, as sums of unknowns. `groups`: a convolution is grouped."""

    tensors: tuple[dict[str, tuple[Form, ...]], dict[str, tuple[Form, ...]]]
    unknowns: tuple[str, ...]
    groups: bool

    def numbers(self, side: int, name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """A tensor's shape, with these sizes for the unknowns."""
        form = self.tensors[side][name]
        return tuple(sum(int(p) if p.isdigit() else sizes[p] for p in dim) for dim in form)


def solve(sub: Substitution) -> Shapes:
    """The most general shapes for which a substitution is well-formed. Raises Unsolvable."""
    dims = Dimensions()
    inputs = {n: tuple((f"{n}.{i}",) for i in range(rank)) for n, rank in ranks(sub).items()}
    tensors: tuple[dict[str, tuple[Form, ...]], ...] = (dict(inputs), dict(inputs))
    grouped = False
    for s, side in enumerate(sub.sides):
        known = tensors[s]
        for at, o in enumerate(side):
            given = [known[i] for i in o.inputs]
            if o.op == "split":
                axis = o.attrs["axis"]
                for k in range(o.attrs["num_outputs"]):
                    result = f"#{at}.{k}"
                    twin = next(
                        a for a, b in sub.outputs if b == result
                    )  # as large as the tensor it replaces
                    part = tensors[0][twin][axis]
                    known[result] = (*given[0][:axis], part, *given[0][axis + 1 :])
                whole = tuple(p for k in range(o.attrs["num_outputs"]) for p in known[f"#{at}.{k}"][axis])
                dims.equate(given[0][axis], whole)
                continue
            if o.op == "conv2d":
                grouped |= _convolve(dims, *given)
            elif o.op == "matmul":
                dims.equate(given[0][1], given[1][0])
            elif o.op == "concat":
                for other in given[1:]:
                    for axis, (p, q) in enumerate(zip(given[0], other, strict=True)):
                        if axis != o.attrs["axis"]:
                            dims.equate(p, q)
            else:
                for other in given[1:]:
                    for p, q in zip(given[0], other, strict=True):
                        dims.equate(p, q)
            known[f"#{at}.0"] = _result(o, given)
    for a, b in sub.outputs:
        for p, q in zip(tensors[0][a], tensors[1][b], strict=True):
            dims.equate(p, q)
    final = tuple({n: tuple(dims.resolve(d) for d in shape) for n, shape in t.items()} for t in tensors)
    unknowns = dict.fromkeys(
        p for t in final for shape in t.values() for d in shape for p in d if not p.isdigit()
    )
    return Shapes((final[0], final[1]), tuple(unknowns), grouped)


def _convolve(dims: Dimensions, data: tuple[Form, ...], kernel: tuple[Form, ...]) -> bool:
    """Make the kernel fit the data. True if it has fewer channels, so that the convolution is grouped."""
    for side in kernel[2:]:
        dims.equate(side, ("3",))
    channels, own, outputs = (dims.resolve(f) for f in (data[1], kernel[1], kernel[0]))
    groups = len(channels) // len(own)
    if groups > 1 and Counter(channels) == Counter(own * groups):
        # Each group makes as many channels.
        if len(outputs) != groups:
            raise Unsolvable("the output channels are not those of the groups")
        for p, q in pairwise(outputs):
            dims.equate((p,), (q,))
        return True
    dims.equate(channels, own)
    return False


def _result(o: Operation, given: Sequence[tuple[Form, ...]]) -> tuple[Form, ...]:
    if o.op == "matmul":
        return (given[0][0], given[1][1])
    if o.op == "conv2d":
        return (given[0][0], given[1][0], *given[0][2:])
    if o.op == "concat":
        axis = o.attrs["axis"]
        whole = tuple(p for g in given for p in g[axis])
        return (*given[0][:axis], whole, *given[0][axis + 1 :])
    return given[0]


def size_sets(unknowns: Sequence[str], dimensions: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Sizes of the unknowns: all equal, then ascending, then descending."""
    steps = (64, 128, 192, 256) if dimensions == 2 else (8, 16, 24)
    yield "alike", dict.fromkeys(unknowns, steps[1])
    growing = [steps[i * len(steps) // len(unknowns)] for i in range(len(unknowns))]
    yield "growing", dict(zip(unknowns, growing))
    yield "falling", dict(zip(unknowns, growing[::-1]))


# Graphs

_NAMES = {"ewadd": "Add", "ewmul": "Mul", "matmul": "MatMul", "relu": "Relu", "concat": "Concat"}


def build(
    sub: Substitution, shapes: Shapes, s: int, sizes: Mapping[str, int], constants: Sequence[str], prefix: str
) -> onnx.ModelProto:
    """One side as a model. Tensors are named by `prefix` and their number."""
    side = sub.sides[s]
    nodes, initializers = [], []

    def shape(name: str) -> tuple[int, ...]:
        return shapes.numbers(s, name, sizes)

    def called(name: str) -> str:
        return f"{prefix}{name[2:]}" if name.startswith("in") else f"t{name[1:].replace('.', '_')}"

    for at, o in enumerate(side):
        inputs, result = [called(i) for i in o.inputs], called(f"#{at}.0")
        fused = o.attrs.get("activation") == "relu"
        made = result + "_linear" if fused else result
        if o.op == "conv2d":
            groups = shape(o.inputs[0])[1] // shape(o.inputs[1])[1]
            strides = [o.attrs["stride_h"], o.attrs["stride_w"]]
            if strides != [1, 1] or o.attrs["pad"] != "same":
                raise ValueError(
                    f"substitution {sub.name}: only convolutions of stride 1, padded to the same size"
                )
            attrs = {"pads": [1, 1, 1, 1], **({"group": groups} if groups > 1 else {})}
            nodes.append(helper.make_node("Conv", inputs, [made], **attrs))
        elif o.op == "split":
            results = [f"#{at}.{k}" for k in range(o.attrs["num_outputs"])]
            parts = np.array([shape(r)[o.attrs["axis"]] for r in results], np.int64)
            initializers.append(numpy_helper.from_array(parts, f"sizes{at}"))
            nodes.append(
                helper.make_node(
                    "Split", [*inputs, f"sizes{at}"], [called(r) for r in results], axis=o.attrs["axis"]
                )
            )
        else:
            attrs = {"axis": o.attrs["axis"]} if o.op == "concat" else {}
            nodes.append(helper.make_node(_NAMES[o.op], inputs, [made], **attrs))
        if fused:
            nodes.append(helper.make_node("Relu", [made], [result]))
    variables = []
    for name in sub.inputs:
        if name in constants:
            # Constants are named by their data, so other names need other data.
            data = np.random.default_rng([int(name[2:]), *prefix.encode()]).standard_normal(shape(name))
            initializers.append(numpy_helper.from_array(data.astype(np.float32), called(name)))
        else:
            variables.append(helper.make_tensor_value_info(called(name), TensorProto.FLOAT, shape(name)))
    results = [pair[s] for pair in sub.outputs]
    outputs = [helper.make_tensor_value_info(called(r), TensorProto.FLOAT, shape(r)) for r in results]
    graph = helper.make_graph(nodes, "side", variables, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def weights_of(sub: Substitution) -> list[str]:
    """Inputs that are only used as right factors of products, or as kernels."""
    right: set[str] = set()
    left: set[str] = set()

    def mark(name: str, into: set[str]) -> None:
        if name.startswith("#"):
            o = sub.left[int(name[1:].partition(".")[0])]
            if o.op not in ("matmul", "conv2d"):
                for i in o.inputs:
                    mark(i, into)
        else:
            into.add(name)

    for o in sub.left:
        if o.op in ("matmul", "conv2d"):
            mark(o.inputs[0], left)
            mark(o.inputs[1], right)
    return sorted(right - left)


# Are two graphs the same?


class Comparison:
    """Compares graphs with one right side, operand by operand. Commutative operands may be in either order.

    Constants are compared by their elements, so it does not matter which expression makes them.
    """

    def __init__(self, right: Graph) -> None:
        self.right = right
        self.count = _running(right)
        self.operators = _operators(right)
        self._numbers: dict[tuple[int, Value], np.ndarray] = {}

    def holds(self, graph: Graph) -> bool:
        """Whether a graph equals the right side."""
        if _running(graph) != self.count or _operators(graph) != self.operators:
            return False
        memo: dict[tuple[Value, Value], bool] = {}
        pairs = zip(graph.outputs, self.right.outputs, strict=True)
        return all(self._same(graph, a, b, memo) for a, b in pairs)

    def _same(self, graph: Graph, a: Value, b: Value, memo: dict[tuple[Value, Value], bool]) -> bool:
        found = memo.get((a, b))
        if found is None:
            found = memo[a, b] = self._compare(graph, a, b, memo)
        return found

    def _compare(self, graph: Graph, a: Value, b: Value, memo: dict[tuple[Value, Value], bool]) -> bool:
        if a == ABSENT or b == ABSENT:
            return a == b
        if graph.type(a).const or self.right.type(b).const:
            if not (graph.type(a).const and self.right.type(b).const):
                return False
            one, other = self._number(graph, a), self._number(self.right, b)
            return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-4, atol=1e-4))
        x, y = graph.producers.get(a), self.right.producers.get(b)
        if x is None or y is None:
            return a == b
        if x.op != y.op or _attributes(x) != _attributes(y) or x.outputs.index(a) != y.outputs.index(b):
            return False
        if x.op == "Split":
            sizes = [[t.shape for t in n.types] for n in (x, y)]
            return sizes[0] == sizes[1] and self._same(graph, x.inputs[0], y.inputs[0], memo)
        if len(x.inputs) != len(y.inputs):
            return False
        if x.op in COMMUTATIVE and len(x.inputs) == 2:
            orders = [x.inputs, x.inputs[::-1]]
        else:
            orders = [x.inputs]
        return any(all(self._same(graph, p, q, memo) for p, q in zip(o, y.inputs)) for o in orders)

    def _number(self, graph: Graph, value: Value) -> np.ndarray:
        """The elements of a constant, or of an expression of constants."""
        key = (
            0 if graph is self.right else 1,
            value,
        )  # within a search, a value's name determines its content
        found = self._numbers.get(key)
        if found is None:
            node = graph.producers.get(value)
            if node is None:
                found = graph.leaves.consts[value].numpy()
                found = found.astype(np.float64) if found.dtype.kind == "f" else found
            else:
                inputs = [None if v == ABSENT else self._number(graph, v) for v in node.inputs]
                outputs = evaluate_node(node.op, node.attrs, inputs, len(node.outputs))
                found = outputs[node.outputs.index(value)]
            self._numbers[key] = found
        return found


def _running(graph: Graph) -> int:
    return sum(not n.const for n in graph.nodes())


def _operators(graph: Graph) -> Counter[str]:
    return Counter(n.op for n in graph.nodes() if not n.const)


def _attributes(node: Node) -> dict[str, Any]:
    """A node's attributes, with axes counted from the front. For a Split only the axis: its types have the sizes."""
    attrs = dict(node.attrs)
    rank = node.types[0].rank
    if node.op in ("Concat", "Split") and rank is not None:
        axis = attrs.get("axis", 0)
        assert isinstance(axis, int)
        attrs = {"axis": axis % rank}
    return attrs


# The search


@dataclass(frozen=True, slots=True)
class Reach:
    """The result for a substitution: the kind, the number of steps, the rules, and the number of graphs."""

    kind: str
    steps: int = 0
    rules: tuple[str, ...] = ()
    states: int = 0
    exhausted: bool = True

    @property
    def order(self) -> tuple[int, int]:
        return ("identical", "reached", "cheaper", "missed").index(self.kind), self.steps

    @property
    def covered(self) -> bool:
        return self.kind != "missed"


def search(
    left: Graph, right: Graph, library: Library, steps: int = STEPS, most_states: int = STATES
) -> Reach:
    """Rewrite the left side, breadth first, until it equals the right side or costs less."""
    roofline = Roofline()
    limit = roofline.cost(right) * (1 - 1e-9)
    comparison = Comparison(right)
    if comparison.holds(left):
        return Reach("identical")
    start = RewriteState.start(left, library, roofline.delta)
    level: list[tuple[RewriteState, float, tuple[str, ...]]] = [(start, roofline.cost(left), ())]
    seen = {start.fingerprint}
    cheaper: Reach | None = None
    for depth in range(steps + 1):
        for _, cost, rules in level:
            if cost < limit and cheaper is None:
                cheaper = Reach("cheaper", depth, rules, len(seen))
        if depth == steps:
            break
        following = []
        for state, cost, rules in level:
            for match in state.candidates:
                expected = (state.fingerprint + match.shift) & FINGERPRINT_MASK
                if expected in seen:
                    continue
                if len(seen) >= most_states:
                    return cheaper or Reach("missed", steps, states=len(seen), exhausted=False)
                seen.add(expected)
                successor = state.apply(match)
                path = (*rules, match.rule.name)
                if comparison.holds(successor.graph):
                    return Reach("reached", depth + 1, path, len(seen))
                following.append((successor, cost + match.delta, path))
        level = following
    return cheaper or Reach("missed", steps, states=len(seen))


def differs(left: Graph, right: Graph) -> bool:
    """Whether two graphs give different outputs for random numbers."""
    rng = np.random.default_rng(0)
    feeds = {}
    for value in left.inputs:
        dims = [d for d in left.type(value).shape or () if isinstance(d, int)]
        feeds[value] = rng.standard_normal(dims)
    for a, b in zip(evaluate_graph(left, feeds), evaluate_graph(right, feeds), strict=True):
        # The constants of both sides are rounded to float32.
        if a.shape != b.shape or np.abs(a - b).max(initial=0) > 1e-5 * np.abs(a).max(initial=0):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: the outcome for each set of sizes, and a remark."""

    name: str
    left: str
    right: str
    outcomes: Mapping[str, Reach]
    note: str
    wrong: bool = False

    @property
    def worst(self) -> Reach:
        return max(self.outcomes.values(), key=lambda o: o.order)

    @property
    def covered(self) -> bool:
        return not self.wrong and self.worst.covered

    def to_json(self) -> dict[str, Any]:
        worst = self.worst
        return {
            "name": self.name,
            "left": self.left,
            "right": self.right,
            "outcome": "wrong" if self.wrong else worst.kind,
            "steps": worst.steps,
            "rules": list(worst.rules),
            "sizes": {k: f"{o.kind} {o.steps}" for k, o in self.outcomes.items()},
            "states": sum(o.states for o in self.outcomes.values()),
            "note": self.note,
        }


def measure(sub: Substitution, library: Library, steps: int = STEPS, most_states: int = STATES) -> Row:
    """Measure a generated substitution."""
    left = readable(sub.left, [a for a, _ in sub.outputs])
    right = readable(sub.right, [b for _, b in sub.outputs])
    try:
        shapes = solve(sub)
    except Unsolvable as error:
        return Row(sub.name, left, right, {"": Reach("missed")}, f"no shapes fit: {error}", wrong=True)
    small = {u: 2 + i for i, u in enumerate(shapes.unknowns)}
    models = [load(build(sub, shapes, s, small, (), "a")).graph for s in (0, 1)]
    if differs(*models):
        return Row(sub.name, left, right, {"": Reach("missed")}, "the sides differ", wrong=True)
    modes: list[list[str]] = [[], weights] if (weights := weights_of(sub)) else [[]]
    dimensions = max(len(s) for s in shapes.tensors[0].values())
    outcomes: dict[str, Reach] = {}
    constant = False
    for label, sizes in size_sets(shapes.unknowns, dimensions):
        best: Reach | None = None
        for constants, prefix in product(modes, PREFIXES):
            graphs = [load(build(sub, shapes, s, sizes, constants, prefix)).graph for s in (0, 1)]
            found = search(*graphs, library, steps, most_states)
            if best is None or found.order < best.order:
                best = found
                constant = bool(constants) and found.kind != "identical"
            if best.kind in ("identical", "reached"):
                break
        assert best is not None
        outcomes[label] = best
    notes = _notes(sub, shapes)
    worst = max(outcomes.values(), key=lambda o: o.order)
    if worst.kind == "identical":
        notes.append("one graph in ONNX: the activation is an operator of its own")
    if worst.kind == "cheaper" and worst.steps == 0:
        notes.append("the left side costs less already")
    if worst.kind == "missed":
        notes.append(
            f"not among the {worst.states} graphs within {steps} steps"
            if worst.exhausted
            else f"given up after {worst.states} graphs"
        )
    if constant:
        notes.append("with constant weights")
    return Row(sub.name, left, right, outcomes, "; ".join(notes))


def _notes(sub: Substitution, shapes: Shapes) -> list[str]:
    notes = []
    if any(o.op == "conv2d" and o.inputs[0] == o.inputs[1] for o in sub.left):
        notes.append("meaningless: a tensor is convolved with itself")
    if shapes.groups:
        notes.append("only as a grouped convolution, with as many output channels in each group")
    return notes


# Substitutions written by hand


@dataclass(frozen=True, slots=True)
class Written:
    """A substitution in ONNX's text form. There may be several right sides, which differ in the order of parts.

    Sizes are filled into the texts; `data` gives the constants of both sides for them.
    """

    name: str
    left: str
    rights: tuple[str, ...]
    data: Callable[[Mapping[str, int], np.random.Generator], dict[str, np.ndarray]]


_SIZES = {
    "alike": {"n": 1, "c": 32, "m": 32, "p": 32, "h": 28, "w": 28, "a": 128, "k": 128, "q": 128},
    "different": {"n": 2, "c": 16, "m": 48, "p": 32, "h": 14, "w": 17, "a": 64, "k": 256, "q": 192},
}


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _out(size: int, stride: int, same: bool) -> int:
    return -(-size // stride) if same else (size - 3) // stride + 1


def _conv(stride: int, same: bool) -> str:
    """A 3x3 convolution's attributes. TASO pads by one on each side if it says "same"."""
    return f"<pads=[{'1,1,1,1' if same else '0,0,0,0'}], strides=[{stride},{stride}]>"


_IMAGE = "float[{n},{c},{h},{w}] x"
_IMAGES = f"{_IMAGE}, float[{{n}},{{c}},{{h}},{{w}}] z"
_MATRIX, _MATRICES = "float[{a},{k}] x", "float[{a},{k}] x, float[{p},{k}] z"


def written() -> Iterator[tuple[str, Written]]:
    """TASO's handwritten substitutions, then TENSAT's of several patterns, each with the name of its group."""
    for stride in (1, 2):
        for same in (True, False):
            yield from (("taso", one) for one in _followed_convs(stride, same))
    for relu in (False, True):
        yield from (("taso", one) for one in _merged_convs(relu))
    for relu in (False, True):
        yield from (("tensat", one) for one in _shared_operands(relu))
    yield from (("tensat", one) for one in _pairs())


def _followed_convs(stride: int, same: bool) -> list[Written]:
    """Convolutions followed by other operators."""
    conv, label = _conv(stride, same), f"stride {stride}, {'same' if same else 'valid'}"
    head = f"agraph ({_IMAGE}) => (float[] y)"
    return [
        Written(
            f"conv+relu, {label}",
            f"{head} {{{{ t = Conv{conv}(x, v) y = Relu(t) }}}}",
            (f"{head} {{{{ t = Conv{conv}(x, v) y = Relu(t) }}}}",),
            lambda s, rng: {"v": _normal(rng, s["m"], s["c"], 3, 3)},
        ),
        Written(
            f"conv+batch norm, {label}",
            f"{head} {{{{ t = Conv{conv}(x, v) y = BatchNormalization(t, scale, shift, mean, var) }}}}",
            (f"{head} {{{{ y = Conv{conv}(x, folded, bias) }}}}",),
            _batch_norm,
        ),
        Written(
            f"conv+mul, {label}",
            f"{head} {{{{ t = Conv{conv}(x, v) y = Mul(t, scale) }}}}",
            (f"{head} {{{{ y = Conv{conv}(x, folded) }}}}",),
            _scaled,
        ),
    ]


def _merged_convs(relu: bool) -> list[Written]:
    """Two convolutions merged into one, and convolutions with fewer groups."""
    label = ", relu" if relu else ""
    head = f"agraph ({_IMAGE}) => (float[] y)"
    out, end = ("t", "y = Relu(t)") if relu else ("y", "")
    found = [
        _two_outputs(
            f"enlarge and merge convs{label}",
            _IMAGE,
            "Conv(x, v)",
            "Conv<pads=[1,1,1,1]>(x, w)",
            "Conv<pads=[1,1,1,1]>(x, {0})",
            1,
            _enlarged,
            relu,
        )
    ]
    for stride in (1, 2):
        attrs = f"pads=[1,1,1,1], strides=[{stride},{stride}]"
        found.append(
            Written(
                f"merge groups of a conv, stride {stride}{label}",
                f"{head} {{{{ {out} = Conv<{attrs}, group=4>(x, v) {end} }}}}",
                (f"{head} {{{{ {out} = Conv<{attrs}, group=2>(x, merged) {end} }}}}",),
                _groups,
            )
        )
    return found


def _shared_operands(relu: bool) -> list[Written]:
    """Two products or convolutions that share an operand."""
    label = ", relu" if relu else ""
    return [
        _two_outputs(
            f"products of one input{label}",
            _MATRIX,
            "MatMul(x, v)",
            "MatMul(x, w)",
            "MatMul(x, {0})",
            1,
            _columns,
            relu,
        ),
        _two_outputs(
            f"products with one weight{label}",
            _MATRICES,
            "MatMul(x, v)",
            "MatMul(z, v)",
            "Concat<axis=0>({1}) r = MatMul(o, v)",
            0,
            _rows,
            relu,
        ),
        _two_outputs(
            f"convs of one input{label}",
            _IMAGE,
            "Conv<pads=[1,1,1,1]>(x, v)",
            "Conv<pads=[1,1,1,1]>(x, w)",
            "Conv<pads=[1,1,1,1]>(x, {0})",
            1,
            _kernels,
            relu,
        ),
        _two_outputs(
            f"convs with one weight{label}",
            _IMAGES,
            "Conv<pads=[1,1,1,1]>(x, v)",
            "Conv<pads=[1,1,1,1]>(z, v)",
            "Concat<axis=0>({1}) r = Conv<pads=[1,1,1,1]>(o, v)",
            0,
            _batch,
            relu,
        ),
    ]


def _pairs() -> list[Written]:
    """Two elementwise operators of one kind."""
    found = []
    for name, function in (("relus", "Relu"), ("sigmoids", "Sigmoid")):
        one, other = f"{function}(x)", f"{function}(z)"
        merged = f"Concat<axis=0>({{1}}) r = {function}(o)"
        found.append(_two_outputs(f"two {name}", _MATRICES, one, other, merged, 0, _rows, False))
    inputs = f"{_MATRICES}, float[{{a}},{{k}}] u, float[{{p}},{{k}}] s"
    for name, function in (("sums", "Add"), ("products", "Mul")):
        one, other = f"{function}(x, u)", f"{function}(z, s)"
        merged = f"Concat<axis=0>({{1}}) i = Concat<axis=0>({{2}}) r = {function}(o, i)"
        found.append(_two_outputs(f"two element-wise {name}", inputs, one, other, merged, 0, _rows, False))
    return found


def _two_outputs(
    name: str,
    inputs: str,
    one: str,
    other: str,
    merged: str,
    axis: int,
    data: Callable[[Mapping[str, int], np.random.Generator], dict[str, np.ndarray]],
    relu: bool,
) -> Written:
    """Two results that come from splitting one.

    `merged` computes the value r from the constant {0} ("vw" or "wv"), or from the parts {1} and {2}.
    """
    head = f"agraph ({inputs}) => (float[] y, float[] z1)"
    if relu:
        left = f"{head} {{{{ a = {one} b = {other} y = Relu(a) z1 = Relu(b) }}}}"
    else:
        left = f"{head} {{{{ y = {one} z1 = {other} }}}}"
    rights = []
    for whole, parts, more, sizes, outputs in (
        ("vw", "x, z", "u, s", "ab", "y, z1"),
        ("wv", "z, x", "s, u", "ba", "z1, y"),
    ):
        text = merged.replace("{0}", whole).replace("{1}", parts).replace("{2}", more)
        text = f"o = {text}" if " r = " in text else f"r = {text}"
        act = "f = Relu(r)" if relu else ""
        split = f"{outputs} = Split<axis={axis}>({'f' if relu else 'r'}, sizes_{sizes})"
        rights.append(f"{head} {{{{ {text} {act} {split} }}}}")
    return Written(name, left, tuple(rights), data)


def _cuts(first: int, second: int) -> dict[str, np.ndarray]:
    return {"sizes_ab": np.array([first, second]), "sizes_ba": np.array([second, first])}


def _batch_norm(s: Mapping[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    v, scale, shift, mean = (_normal(rng, *d) for d in ((s["m"], s["c"], 3, 3), *((s["m"],),) * 3))
    var = np.abs(_normal(rng, s["m"])) + 0.5
    factor = scale / np.sqrt(var + 1e-5)
    given = {"v": v, "scale": scale, "shift": shift, "mean": mean, "var": var}
    return {**given, "folded": v * factor.reshape(-1, 1, 1, 1), "bias": shift - mean * factor}


def _scaled(s: Mapping[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    v, scale = _normal(rng, s["m"], s["c"], 3, 3), _normal(rng, 1, s["m"], 1, 1)
    return {"v": v, "scale": scale, "folded": v * scale.reshape(-1, 1, 1, 1)}


def _enlarged(s: Mapping[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    v, w = _normal(rng, s["m"], s["c"], 1, 1), _normal(rng, s["p"], s["c"], 3, 3)
    rim = np.pad(v, [(0, 0), (0, 0), (1, 1), (1, 1)])
    both = {"vw": np.concatenate([rim, w]), "wv": np.concatenate([w, rim])}
    return {"v": v, "w": w, **both, **_cuts(s["m"], s["p"])}


def _groups(s: Mapping[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    outputs, inputs = s["m"], s["c"] // 4
    v = _normal(rng, outputs, inputs, 3, 3)
    merged = np.zeros((outputs, 2 * inputs, 3, 3), np.float32)
    for i, rows in enumerate(np.split(np.arange(outputs), 4)):
        merged[rows, (i % 2) * inputs : (i % 2 + 1) * inputs] = v[rows]
    return {"v": v, "merged": merged}


def _columns(s: Mapping[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    v, w = _normal(rng, s["k"], s["p"]), _normal(rng, s["k"], s["q"])
    both = {"vw": np.concatenate([v, w], 1), "wv": np.concatenate([w, v], 1)}
    return {"v": v, "w": w, **both, **_cuts(s["p"], s["q"])}


def _kernels(s: Mapping[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    v, w = _normal(rng, s["m"], s["c"], 3, 3), _normal(rng, s["p"], s["c"], 3, 3)
    both = {"vw": np.concatenate([v, w]), "wv": np.concatenate([w, v])}
    return {"v": v, "w": w, **both, **_cuts(s["m"], s["p"])}


def _rows(s: Mapping[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"v": _normal(rng, s["k"], s["q"]), **_cuts(s["a"], s["p"])}


def _batch(s: Mapping[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"v": _normal(rng, s["m"], s["c"], 3, 3), **_cuts(s["n"], s["n"])}


def from_text(text: str, sizes: Mapping[str, int], data: Mapping[str, np.ndarray]) -> Graph:
    """A graph from ONNX's text form, with the constants that it uses."""
    proto = onnx.parser.parse_model(
        f'<ir_version: {IR_VERSION}, opset_import: ["" : {OPSET}]>\n{text.format(**sizes)}'
    )
    read = {i for n in proto.graph.node for i in n.input}
    for name, array in data.items():
        if name in read:
            proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return load(proto).graph


def measure_written(entry: Written, library: Library, steps: int = STEPS, most_states: int = STATES) -> Row:
    """Measure a handwritten substitution."""
    outcomes = {}
    wrong = False
    for label, sizes in _SIZES.items():
        data = entry.data(sizes, np.random.default_rng(0))
        left = from_text(entry.left, sizes, data)
        rights = [from_text(r, sizes, data) for r in entry.rights]
        wrong |= any(differs(left, r) for r in rights)
        found = [search(left, r, library, steps, most_states) for r in rights]
        outcomes[label] = min(found, key=lambda o: o.order)
    row = Row(entry.name, entry.left, entry.rights[0], outcomes, "the sides differ" if wrong else "", wrong)
    if row.worst.kind == "identical":
        return Row(entry.name, entry.left, entry.rights[0], outcomes, "one graph in ONNX")
    return row


# The table


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts by outcome, and the share that is covered."""
    kinds = Counter("wrong" if r.wrong else r.worst.kind for r in rows)
    at_start = sum(r.covered and r.worst.kind == "cheaper" and r.worst.steps == 0 for r in rows)
    return {
        "substitutions": len(rows),
        "covered": sum(r.covered for r in rows),
        "share": sum(r.covered for r in rows) / max(1, len(rows)),
        **{k: kinds[k] for k in ("identical", "reached", "cheaper", "missed", "wrong")},
        "cheaper_at_start": at_start,
        "missed_names": [r.name for r in rows if not r.covered],
    }


def show(title: str, rows: Sequence[Row]) -> None:
    print(f"\n{title}")
    for row in rows:
        worst = row.worst
        kind = "wrong" if row.wrong else worst.kind
        steps = f"{worst.steps}" if kind in ("reached", "cheaper") else ""
        formula = f"{row.left}  =>  {row.right}" if "agraph" not in row.left else ""
        print(f"{row.name:>4}  {kind:9} {steps:1}  {formula}", end="")
        print(f"  ({row.note})" if row.note else "")
    found = summary(rows)
    print(
        f"{title}: {found['covered']} of {found['substitutions']} covered ({found['share']:.1%}): "
        f"{found['reached']} reached, {found['identical']} identical in ONNX, {found['cheaper']} cheaper "
        f"({found['cheaper_at_start']} of them at the start), {found['missed']} missed, {found['wrong']} wrong"
    )


TITLES = {"taso": "TASO, by hand", "tensat": "TENSAT, several patterns"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", type=Path, help="TASO's generated substitutions, decoded to JSON")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--only", nargs="*", help="the numbers or names of some of them")
    parser.add_argument("--steps", type=int, default=STEPS, help="substitutions in a row")
    parser.add_argument("--states", type=int, default=STATES, help="graphs that one search may look at")
    arguments = parser.parse_args()
    library = Library(LIBRARY)
    begin = time.perf_counter()
    groups: dict[str, list[Row]] = {}
    if arguments.rules is not None:
        groups["TASO, generated"] = [
            measure(sub, library, arguments.steps, arguments.states)
            for sub in substitutions(arguments.rules)
            if not arguments.only or sub.name in arguments.only
        ]
    for group, entry in written():
        if not arguments.only or any(o in entry.name for o in arguments.only if not o.isdigit()):
            row = measure_written(entry, library, arguments.steps, arguments.states)
            groups.setdefault(TITLES[group], []).append(row)
    for title, rows in groups.items():
        show(title, rows)
    print(f"{time.perf_counter() - begin:.0f} s, {len(library.rules)} rules in the library")
    if arguments.json is not None:
        result = {
            "rules": len(library.rules),
            "steps": arguments.steps,
            "groups": {t: {**summary(r), "rows": [row.to_json() for row in r]} for t, r in groups.items()},
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

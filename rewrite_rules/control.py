"""Rules for control flow: they move work out of loops, unroll loops, and replace an If by a branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import axis_of, front
from rewrite_rules.bodies import (
    Loop,
    Outside,
    Scanned,
    around,
    bodies,
    known_condition,
    made_outside,
    outside_name,
    put_in_place,
    put_together,
    repeats,
    take_apart,
    taken_apart,
    through_identity,
    without_nodes,
)
from rewrite_rules.elementwise import BROADCAST, UNARY
from rewrite_rules.identity import RANDOM
from xrlflow.ir import ABSENT, FLOATS, Body, DType, Graph, Node, Value, apply_edit
from xrlflow.ops.infer import InferenceError, infer
from xrlflow.ops.schema import is_deterministic, is_opaque, schema
from xrlflow.rewrite import (
    GraphBuilder,
    Op,
    Reader,
    Refused,
    Region,
    RegionRule,
    RuleError,
    Val,
    profitable,
    require,
)

# Branches


class InlineConstantIf(RegionRule, family="control"):
    """if true then f(x) else g(x) -> f(x), and g(x) for false.

    Exporters write such an If for a condition on a shape, which turns out to be constant.
    """

    canonicalises = True
    anchors = ("If",)
    examples = tuple(
        f"agraph ({kind} x, {kind} z) => ({kind} y) <bool{shape} c = {{{value}}}, {kind} w = {{{data}}}> {{"
        f" y = If (c) <then_branch = a () => ({kind} p) {{ {then.replace('KIND', kind)} }},"
        f" else_branch = b () => ({kind} q) {{ {other} }}> }}"
        for kind, data in (("float[3]", "1, 2, 3"), ("float[1,2]", "3, -1"))
        for shape, value, then, other in (
            ("", 1, "s = Mul(x, w) p = Add(s, z)", "q = Sub(x, z)"),
            ("", 0, "s = Mul(x, w) p = Add(s, z)", "q = Sub(x, z)"),
            ("[1]", 1, "p = Sqrt(z)", "q = Mul(x, x)"),
            ("[1]", 0, "p = Mul(x, z)", "s = Relu(z) t = Sub(w, s) q = Mul(t, x)"),
            ("", 1, "p = If(c) <then_branch = t1 () => (KIND u) { u = Sub(x, z) },"
             " else_branch = t2 () => (KIND v) { v = Neg(z) }>", "q = Neg(x)"),
        )
    )  # fmt: skip
    survivors: ClassVar[Mapping[str, str]] = {"drop: the branch is random": RANDOM}
    near_misses = (
        "agraph (float[3] x) => (float[3] y) <bool c = {1}> { y = If (c) <then_branch = a () => (float[3] p)"
        " { p = RandomNormalLike(x) }, else_branch = b () => (float[3] q) { q = Neg(x) }> }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        condition = known_condition(reader.graph, node.inputs[0])
        if condition is None:
            return None
        body, captured = _branches(node)[condition]
        require(repeats(body.graph), "the branch is random")
        return Region(node.outputs, (node.inputs[0], *captured), (node,), body)

    def target(self, op: Op, region: Region, condition: Val, *captured: Val) -> Any:
        return _inlined(op, region.data, condition.graph, captured)


def _inlined(op: Op, body: Body, graph: Graph, captured: Sequence[Val]) -> list[Val]:
    """Build the nodes of a branch in the graph that contains the If. Returns the branch's outputs."""
    outside = Outside(op, body.graph, graph, dict(zip(body.captured, captured)))
    for node in body.graph.topological():
        outside.copy(node)
    return [outside(v) for v in body.graph.outputs]


def _branches(node: Node) -> dict[bool, tuple[Body, tuple[Value, ...]]]:
    """The branches of an If by its condition, each with the values that it captures."""
    branches: dict[bool, tuple[Body, tuple[Value, ...]]] = {}
    at = len(node.explicit_inputs)
    for name, body in bodies(node):
        branches[name == "then_branch"] = body, node.inputs[at : at + len(body.captured)]
        at += len(body.captured)
    return branches


class DropFailingBranch(RegionRule, family="control"):
    """if c then f(x) else g(x) -> g(x)  when f(x) always leads to an error, and f(x) when g(x) does.

    Exporters write a branch for every case that a function of the framework handles: a rank without the dimension to
    squeeze, a sequence without a batch. If the nodes after the If admit only one of the cases, its condition is
    superfluous.
    """

    may_lose_errors = ("sizes", "indices")
    canonicalises = True
    anchors = ("If",)
    examples = tuple(
        f"agraph (bool c, float[N,1,3] x, float[3,N] z, float[N,2] u) => ({kind} y)"
        f" <int64[1] one = {{1}}, int64[1] all = {{-1}}, float[2,1,2] w = {{1, 2, 3, -1}}> {{"
        f" s = If (c) <then_branch = a () => ({first[0]} p) {{ {first[1]} }},"
        f" else_branch = b () => ({second[0]} q) {{ {second[1]} }}> {after} }}"
        for kind, after in (
            ("float[N,5]", "t = Relu(s) y = Concat<axis = 1>(t, u)"),
            ("float[6,M]", "t = Transpose<perm = [1, 0]>(s) y = Concat<axis = 0>(t, z)"),
            ("float[N,2,2]", "e = Exp(s) t = Unsqueeze(e, one) y = Conv(t, w)"),
        )
        for good, bad in (
            (("float[N,3]", "{} = Squeeze(x, one)"), ("float[N,1,3]", "{} = Neg(x)")),
            (
                ("float[N,3]", "r = Sqrt(x) {} = ReduceSum<keepdims = 0>(r, one)"),
                ("float[M]", "{} = Reshape(x, all)"),
            ),
        )
        for first, second in (
            ((good[0], good[1].format("p")), (bad[0], bad[1].format("q"))),
            ((bad[0], bad[1].format("p")), (good[0], good[1].format("q"))),
        )
    )
    examples += (
        "agraph (bool c, float[N,1,3] x) => (float[N,3] y) <int64[1] one = {1}> { s = If (c)"
        " <then_branch = a () => (float[N,3] p) { p = Squeeze(x, one) },"
        " else_branch = b () => (float[N,1,3] q) { q = Neg(x) }> y = Squeeze(s, one) }",
    )
    survivors: ClassVar[Mapping[str, str]] = {"drop: the branch is random": RANDOM}
    near_misses = (examples[0].replace("p = Squeeze(x, one)", "r = RandomNormalLike(x) p = Squeeze(r, one)"),)

    def find(self, reader: Reader, node: Node) -> Region | None:
        branches = _branches(node)
        if known_condition(reader.graph, node.inputs[0]) is not None:
            return None
        ranks = [[body.graph.type(v).rank for v in body.graph.outputs] for body, _ in branches.values()]
        if ranks[0] == ranks[1]:
            return None
        below = _below(reader, node)
        for choice in (True, False):
            body, captured = branches[not choice]
            if _leads_to_an_error(reader.graph, node, choice, below):
                require(repeats(body.graph), "the branch is random")
                return Region(node.outputs, (node.inputs[0], *captured), (node,), body)
        return None

    def target(self, op: Op, region: Region, condition: Val, *captured: Val) -> Any:
        return _inlined(op, region.data, condition.graph, captured)


# Limits of the check for failing branches: how many nodes after an If are examined, and how many other Ifs are decided.
_MOST_BELOW, _MOST_SEEN, _MOST_DECIDED = 256, 512, 16


def _below(reader: Reader, node: Node) -> list[Value]:
    """The ids of the nodes that depend on a node, nearest first."""
    ids: dict[Value, None] = {}
    work = [node]
    for at in work:
        for value in at.outputs:
            for user in reader.users(value):
                if user.id not in ids and len(ids) < _MOST_BELOW:
                    ids[user.id] = None
                    work.append(user)
    return list(ids)


def _leads_to_an_error(graph: Graph, node: Node, branch: bool, below: Sequence[Value]) -> bool:
    """Whether, if this branch runs, a node that always runs refuses its inputs."""
    after = _taking(graph, node, branch)
    if after is None:
        return False
    work = [v for v in below if v in after.producers]
    visited = set(work)
    decided = 0
    for value in work:
        inner = after.producers.get(value)
        if inner is None:
            continue
        choice = known_condition(after, inner.inputs[0]) if inner.op == "If" else None
        decided_graph = (
            _taking(after, inner, choice) if choice is not None and decided < _MOST_DECIDED else None
        )
        if decided_graph is not None:
            before, after = after, decided_graph
            decided += 1
            new = [v for v, n in after.producers.items() if before.producers.get(v) is not n]
            work += new
            visited.update(new)
            continue
        if _is_refused(after, inner):
            return True
        more = [u.id for v in inner.outputs for u in after.users(v) if u.id not in visited]
        if len(visited) < _MOST_SEEN:
            work += more
            visited.update(more)
    return False


def _taking(graph: Graph, node: Node, branch: bool) -> Graph | None:
    """The graph in which this branch always runs, with types inferred again; None if these contradict the types that
    the file declares for the results.
    """
    body, captured = _branches(node)[branch]
    op = GraphBuilder(graph)
    try:
        results = _inlined(op, body, graph, [Val(graph, v, graph.type(v)) for v in captured])
        return apply_edit(graph, op.edit("assume", node.outputs, results))[0]
    except (Refused, RuleError):
        return None


def _is_refused(graph: Graph, node: Node) -> bool:
    """Whether shape inference refuses an operator's inputs."""
    if is_opaque(node.op):  # the propagation of types has found that the node fails
        return True
    if any(True for _ in bodies(node)) or schema(node.op) is None:
        return False
    types = [None if v == ABSENT else graph.type(v) for v in node.inputs]
    data = [None if v == ABSENT else graph.const(v) for v in node.inputs]
    try:
        infer(node.op, node.attrs, types, data, len(node.outputs))
    except InferenceError:
        return True
    return False


# Loops


def _loop_example(
    before: str,
    after: str,
    *,
    kind: str = "float[2,3]",
    count: str = "some",
    condition: str = "",
    consts: str = "",
) -> str:
    """The text of a Loop that carries v to w and collects s. Its body sees i, x of `kind`, m[3,3], and the results of
    `before`.
    """
    return (
        f"agraph (int64 n, {kind} x, {kind} z, float[3,3] m) => ({kind} last, float[T,2,3] all)"
        f" <int64 one = {{1}}, int64 three = {{3}}, bool yes = {{1}}, float[3] c = {{1, -2, 3}}{consts}> {{"
        f" some = Add(n, one) {before}"
        f" last, all = Loop ({count}, {condition}, z) <body = b (int64 i, bool going, {kind} v)"
        f" => (bool on, {kind} w, {kind} s) {{ {after} }}> }}"
    )


def _scan_example(
    body: str,
    *,
    kind: str = "float[2,3]",
    sequence: str = "float[T,2,3]",
    attributes: str = "",
    out: str = "float[T,2,3]",
    step: str = "float[2,3]",
    consts: str = "",
) -> str:
    """The text of a Scan over x that carries h to k and collects s. Its body sees e, the step's part of x, and
    m[3,3].
    """
    return (
        f"agraph ({sequence} x, {kind} z, float[3,3] m) => ({kind} last, {out} all)"
        f" <float[3] c = {{1, -2, 3}}, float[2,1] d = {{2, -1}}{consts}> {{"
        f" last, all = Scan (z, x) <num_scan_inputs = 1{attributes}, body = b ({kind} h, {kind} e)"
        f" => ({kind} k, {step} s) {{ {body} }}> }}"
    )


# Operators that fail for no input, so that they may be computed even if the loop has no steps.
_TOTAL = frozenset(
    (
        *UNARY,
        *BROADCAST,
        "MatMul",
        "Gemm",
        "Transpose",
        "Softmax",
        "LogSoftmax",
        "Concat",
        "Identity",
        "Shape",
    )
    + (
        "Size",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "LayerNormalization",
        "RMSNormalization",
        "Conv",
        "Attention",
    )
    + tuple(f"Reduce{name}" for name in ("L1", "L2", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"))
)
_QUANTISING = frozenset(("QuantizeLinear", "DequantizeLinear"))  # they stay next to what they quantise


def _may_divide_by_zero(node: Node) -> bool:
    return node.op in ("Div", "Mod") and node.types[0].dtype not in FLOATS


class MoveInvariantsOutOfLoop(RegionRule, family="control"):
    """loop(f(c), x_t) -> y = f(c), loop(y, x_t)  when c is the same in every step.

    Nodes of the body that depend only on captured values and constants are computed once, outside. Nodes that may fail
    are moved only if the loop has at least one step.
    """

    anchors = ("Loop", "Scan")
    examples = (
        _loop_example("", "on = Identity(going) a = MatMul(x, m) w = Add(v, a) s = Mul(w, w)"),
        _loop_example("", "on = Identity(going) a = MatMul(x, m) b = Relu(a) w = Add(v, b) s = Neg(a)"),
        _loop_example("r = Neg(x)", "on = Identity(going) a = Exp(r) w = Mul(v, a) s = Add(w, a)", count="three"),
        _loop_example("", "on = Identity(going) t = Transpose(m) w = MatMul(v, t) s = Mul(w, c)", condition="yes"),
        _loop_example("", "on = Not(going) p, q = Split<axis = 0, num_outputs = 2>(x) t = Concat<axis = 0>(q, p)"
                      " w = Sub(v, t) s = Relu(w)", count="three"),
        _scan_example("a = MatMul(z, m) k = Add(h, a) s = Mul(e, a)"),
        _scan_example("a = MatMul(c, m) k = Add(h, e) s = Mul(k, a)"),
        _scan_example("t = Transpose(m) a = Add(t, c) b = MatMul(h, a) k = Add(b, e) s = Relu(k)",
                      sequence="float[2,4,3]", attributes=", scan_input_axes = [1]", out="float[4,2,3]"),
        # With a node that may fail, and one step.
        _loop_example("", "on = Not(going) p, q = Split<axis = 0, num_outputs = 2>(x) t = Concat<axis = 0>(q, p)"
                      " w = Sub(v, t) s = Relu(w)", count="one"),
        *(_scan_example("p, q, r = Split<axis = 1, num_outputs = 3>(z) t = Concat<axis = 1>(r, p, q) k = Add(h, t)"
                        " s = Mul(e, t)", kind="float[N,3]", sequence=f"float[N,{length},3]",
                        attributes=f", scan_input_axes = [{axis}]", out=f"float[{length},N,3]", step="float[N,3]",
                        consts="")
          for length, axis in ((4, 1), (1, -2))),
        # With a constant, which the body contains and does not capture.
        _loop_example("q = Neg(c) r = Mul(q, c)", "on = Identity(going) a = MatMul(x, m) t = Add(v, r) w = Add(t, a)"
                      " s = Neg(w)"),
        _loop_example("", "on = Identity(going) a = Div(x, c) w = Mul(v, a) s = Neg(w)"),
        "agraph (int64 n, float[2,3] x, float[3,3] m) => (float[T,2,3] all) <bool yes = {1}> {"
        " all = Loop (n, yes) <body = b (int64 i, bool going) => (bool on, float[2,3] s) {"
        " on = Identity(going) a = MatMul(x, m) f = Cast<to = 1>(i) s = Mul(a, f) }> }",
        "agraph (int64 n, float[3] x, float[2] z) => (float[2] last) <int64[1] to = {2}, int64[1] from = {0}> "
        "{ two = Constant<value_int = 2>() last = Loop (two, , z) <body = b (int64 i, bool going, float[2] v) "
        "=> (bool on, float[2] w) { on = Identity(going) k = Sub(two, n) g = Gather(x, k) w = Mul(v, g) }> }",
        "agraph (int64 n, float[3] x, float[2] z) => (float[2] last) <int64[1] to = {2}, int64[1] from = {0}> {"
        " one = Constant<value_int = 1>() some = Add(n, one)"
        " last = Loop (some, , z) <body = b (int64 i, bool going, float[2] v) => (bool on, float[2] w) {"
        " on = Identity(going) y = Softmax(x) g = Slice(y, from, to) w = Mul(v, g) }> }",
    )  # fmt: skip
    near_misses = (
        _loop_example("", "on = Identity(going) r = RandomNormalLike(x) w = Add(v, r) s = Neg(w)", count="three"),
        *(_loop_example("", "on = Not(going) p, q = Split<axis = 0, num_outputs = 2>(x) w = Sub(v, p) s = Relu(w)",
                        count=count, condition=condition, consts=", int64 zero = {0}, bool no = {0}")
          for count, condition in (("zero", ""), ("three", "no"))),
        *(_scan_example("p, q = Split<axis = 0, num_outputs = 2>(z) k = Add(h, p) s = Mul(e, q)",
                        sequence=f"float[{length},2,3]", out=f"float[{length},2,3]") for length in ("0", "T")),
    )  # fmt: skip

    def find(self, reader: Reader, node: Node) -> Region | None:
        loop = take_apart(node)
        if loop is None:
            return None
        starts = loop.has_a_step(reader)
        fixed = set(loop.body.captured)
        invariants: list[Node] = []
        for inner in loop.graph.topological():
            if inner.const or not is_deterministic(inner.op) or inner.op in _QUANTISING:
                continue
            if not all(v == ABSENT or v in fixed or loop.is_constant(v) for v in inner.inputs):
                continue
            if inner.types[0].dtype == DType.UNDEFINED:  # the other outputs of the node are undefined as well
                continue
            if starts or (inner.op in _TOTAL and not _may_divide_by_zero(inner)):
                invariants.append(inner)
                fixed.update(inner.outputs)
        return loop.region(tuple(invariants)) if invariants else None

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        loop = taken_apart(region)
        parts = loop.parts(inputs)
        outside = Outside(op, loop.graph, around(inputs), {inside: v for v, inside in parts.captured})
        invariants: tuple[Node, ...] = region.data
        for node in invariants:
            outside.copy(node)
        parts.graph = without_nodes(loop.graph, invariants)
        parts.captured += [(outside.values[v], v) for node in invariants for v in node.outputs]
        return put_together(op, loop, parts, inputs)


class UnrollLoop(RegionRule, family="control"):
    """loop(n, s -> f(s)) -> f(f(... f(s)))  for a small number n and a small body."""

    most_steps: ClassVar[int] = 16
    most_nodes: ClassVar[int] = 128
    anchors = ("Loop",)
    examples = (
        *(
            _loop_example("", f"{going} w = Add(v, x) s = Mul(w, c)", count=count, condition=condition)
            for count, condition in (("three", ""), ("three", "yes"))
            for going in ("on = Identity(going)", "on = Identity(yes)")
        ),
        _loop_example("", "on = Identity(going) t = Equal(i, one) u = Where(t, x, v) w = Sin(u) s = Neg(w)",
                      count="three"),
        _loop_example("", "on = Identity(going) w = Relu(v) s = Sub(w, v)", count="one"),
        _loop_example("two = Constant<value_int = 2>()", "on = Identity(going) w = MatMul(v, m) s = Neg(v)",
                      count="two"),
        _loop_example("", "on = Identity(going) g = Gather(m, i) w = Add(v, g)"
                      " s = Sub(x, w)", count="three"),
        "agraph (float[2] z, float[3] x) => (float[K] last) <int64 three = {3}> {"
        " last = Loop (three, , z) <body = b (int64 i, bool going, float[L] v) => (bool on, float[P] w) {"
        " on = Identity(going) w = Concat<axis = 0>(v, x) }> }",
        "agraph (float[2] z, float[2] x) => (float[2] last, float[2] other) <int64 three = {3}> {"
        " last, other = Loop (three, , z, x) <body = b (int64 i, bool going, float[2] v, float[2] u)"
        " => (bool on, float[2] w, float[2] t) { on = Identity(going) w = Mul(u, x) t = Sub(v, u) }> }",
    )  # fmt: skip
    survivors: ClassVar[Mapping[str, str]] = {"drop: the body is random": RANDOM}
    near_misses = (
        _loop_example("", "on = Identity(going) w = Add(v, x) s = Neg(w)"),
        _loop_example("", "on = Identity(going) w = Add(v, x) s = Neg(w)", count="three", condition="no",
                      consts=", bool no = {0}"),
        _loop_example("", "on = Not(going) w = Add(v, x) s = Neg(w)", count="three"),
        _loop_example("", "on = Identity(going) w = RandomNormalLike(v) s = Neg(w)", count="three"),
        _loop_example("", "on = Identity(going) w = Add(v, x) s = Neg(w)", count="zero", consts=", int64 zero = {0}"),
    )  # fmt: skip

    def find(self, reader: Reader, node: Node) -> Region | None:
        loop = take_apart(node)
        if loop is None:
            return None
        steps = loop.steps(reader)
        require(steps is not None, "the number of steps is not known")
        assert steps is not None
        on = through_identity(loop.graph, loop.condition[0])
        always = known_condition(loop.graph, on) is True
        require(loop.starts_true(reader), "it may not start")
        require(always or on == loop.graph.inputs[1], "it may stop early")
        require(repeats(loop.graph), "the body is random")
        require(steps > 0 or not loop.collected, "it collects nothing")
        running = sum(not n.const for n in loop.graph.nodes())
        small = steps <= self.most_steps and steps * running <= self.most_nodes
        profitable(small, "it is too large to unroll")
        return loop.region(max(steps, 0))

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        loop = taken_apart(region)
        graph, parts = loop.graph, loop.parts(inputs)
        states = [s.initial for s in parts.states]
        collected: list[list[Any]] = [[] for _ in parts.collected]
        for step in range(region.data):
            values = {inside: v for v, inside in parts.captured} | dict(zip(loop.before, states))
            values[graph.inputs[0]] = op.Identity(np.array(step, np.int64))
            values[graph.inputs[1]] = op.Identity(np.array(True))
            outside = Outside(op, graph, around(inputs), values, sizes_only=True)
            states = [outside(s.after) for s in parts.states]
            for column, c in zip(collected, parts.collected):
                column.append(op.Unsqueeze(outside(c.value), [0]))
        return [*states, *(op.Concat(*c, axis=0) if len(c) > 1 else c[0] for c in collected)]


# Computation for all steps at once


@dataclass(frozen=True, slots=True)
class _Lane:
    """Describes a value inside a loop that is one step's part of a larger tensor: the tensor's axis of steps, and its
    rank.

    Two values belong to one lane only if their tensors have the same positions along that axis.
    """

    axis: int
    rank: int
    backwards: int = 0
    positions: Any = None


@dataclass(frozen=True, slots=True)
class _Cut:
    """A product of a Concat some of whose parts are in a lane. Each part has (start, stop) of the weight's rows."""

    node: Node
    lane: _Lane
    parts: tuple[tuple[Value, int, int], ...]
    inside: tuple[tuple[Value, int, int], ...]


@dataclass(slots=True)
class _Lanes:
    """The values of a body that depend on no earlier step, with the description of how each is computed."""

    loop: Loop
    of: dict[Value, _Lane]
    fixed: set[Value]
    nodes: list[Node] = field(default_factory=list)
    cuts: list[_Cut] = field(default_factory=list)

    def collect(self) -> None:
        graph = self.loop.graph
        for node in graph.topological():
            lane = self._lane(node)
            if lane is not None:
                self.of[node.outputs[0]] = lane
                self.nodes.append(node)
            elif node.op in ("MatMul", "Gemm"):
                cut = self._cut(node)
                if cut is not None:
                    self.cuts.append(cut)

    def _is_fixed(self, value: Value) -> bool:
        return value == ABSENT or value in self.fixed or self.loop.is_constant(value)

    def _lane(self, node: Node) -> _Lane | None:
        """The lane of a node's result, if it can be computed for all steps at once; else None."""
        lanes = {self.of[v] for v in node.inputs if v in self.of}
        if len(lanes) != 1 or not all(v in self.of or self._is_fixed(v) for v in node.inputs):
            return None
        lane = lanes.pop()
        graph = self.loop.graph
        other_ranks = [graph.type(v).rank for v in node.inputs if v != ABSENT and v not in self.of]
        if node.op in UNARY:
            return lane if node.inputs[0] in self.of else None
        if node.op in BROADCAST:
            low = all(r is not None and r <= lane.rank for r in other_ranks)
            return lane if low and not _may_divide_by_zero(node) else None
        if node.op == "Concat":
            return lane if not other_ranks else None
        return lane if self._is_product(node, lane) and node.inputs[0] in self.of else None

    def _is_product(self, node: Node, lane: _Lane) -> bool:
        """Whether the node multiplies rows that lie in the lane with a matrix."""
        if node.op not in ("MatMul", "Gemm") or not self._is_fixed(node.inputs[1]):
            return False
        if node.op == "Gemm" and (node.attrs.keys() - {"transB"} or lane.rank != 2):
            return False
        return self.loop.graph.type(node.inputs[1]).rank == 2 and lane.rank != lane.axis

    def _cut(self, node: Node) -> _Cut | None:
        """A product of a Concat that joins parts in a lane with other values (for instance a state); None if the node
        is none.
        """
        graph = self.loop.graph
        concat = graph.producers.get(node.inputs[0])
        if concat is None or concat.op != "Concat" or not self.loop.is_constant(node.inputs[1]):
            return None
        rank = graph.type(concat.outputs[0]).rank
        if rank is None or axis_of(concat, rank) != rank - 1:
            return None
        lanes = {self.of[v] for v in concat.inputs if v in self.of}
        lane = lanes.pop() if len(lanes) == 1 else None
        if lane is None or lane.rank != rank or not self._is_product(node, lane):
            return None
        parts: list[tuple[Value, int, int]] = []
        for value in concat.inputs:
            dim = (graph.type(value).shape or (None,))[-1]
            if not isinstance(dim, int):
                return None
            start = parts[-1][2] if parts else 0
            parts.append((value, start, start + dim))
        return _Cut(
            node,
            lane,
            tuple(p for p in parts if p[0] in self.of),
            tuple(p for p in parts if p[0] not in self.of),
        )

    def read_by_the_rest(self, graph: Graph, outputs: Sequence[Value]) -> list[Value]:
        """Of the values computed for all steps at once, those that the other nodes of the body read, or that it
        returns.
        """
        computed = {n.outputs[0] for n in self.nodes}
        values: dict[Value, None] = {}
        visited: set[Value] = set()
        work = list(outputs)
        while work:
            value = work.pop()
            if value in computed:
                values[value] = None
                continue
            node = graph.producers.get(value)
            if node is not None and node.id not in visited:
                visited.add(node.id)
                work.extend(node.inputs)
        return list(values)


class _Stacked:
    """Builds the values of the lanes for all steps at once, outside the loop."""

    def __init__(self, op: Op, lanes: _Lanes, outside: Outside) -> None:
        self.op = op
        self.lanes = lanes
        self.outside = outside

    def run(self) -> None:
        for node in self.lanes.nodes:
            self.outside.values[node.outputs[0]] = self._batched(node, self.lanes.of[node.outputs[0]])

    def _batched(self, node: Node, lane: _Lane) -> Val:
        op = self.op
        if node.op in UNARY or node.op in BROADCAST:
            inputs = [self._operand(v, lane) for v in node.inputs]
            return op[node.op](*inputs, attrs=node.attrs)  # type: ignore[no-any-return]
        if node.op == "Concat":
            axis = axis_of(node, lane.rank)
            parts = [self.outside(v) for v in node.inputs]
            return op.Concat(*parts, axis=axis if axis < lane.axis else axis + 1)  # type: ignore[no-any-return]
        data, weight = self.outside(node.inputs[0]), self.outside(node.inputs[1])
        if node.attrs.get("transB"):
            weight = op.Transpose(weight, perm=[1, 0])
        product = op.MatMul(data, weight)
        bias = self._operand(node.inputs[2], lane) if len(node.inputs) > 2 else None
        return product if bias is None else op.Add(product, bias)  # type: ignore[no-any-return]

    def _operand(self, value: Value, lane: _Lane) -> Val | None:
        """An operand outside the loop. It gets a dimension of 1 for the steps if broadcasting would otherwise misalign
        it.
        """
        if value == ABSENT:
            return None
        val = self.outside(value)
        if value in self.lanes.of:
            return val
        behind = lane.rank - lane.axis
        if val.rank <= behind:
            return val
        return self.op.Unsqueeze(val, [val.rank - behind])  # type: ignore[no-any-return]

    def of_cut(self, cut: _Cut) -> Val:
        """The summand of a product that comes from the parts in the lane."""
        op = self.op
        weight = self.outside(cut.node.inputs[1])
        axis = 1 if cut.node.attrs.get("transB") else 0
        rows = [op.Slice(weight, [start], [stop], [axis]) for _, start, stop in cut.parts]
        data = [self.outside(v) for v, _, _ in cut.parts]
        if len(rows) > 1:
            rows, data = [op.Concat(*rows, axis=axis)], [op.Concat(*data, axis=cut.lane.rank)]
        matrix = op.Transpose(rows[0], perm=[1, 0]) if axis else rows[0]
        return op.MatMul(data[0], matrix)  # type: ignore[no-any-return]


def _rest_of(cut: _Cut, op: GraphBuilder) -> Any:
    """The summand of a product that comes from the other parts, inside the loop."""
    graph = op.graph

    def val(value: Value) -> Val:
        return Val(graph, value, graph.type(value))

    weight = val(cut.node.inputs[1])
    axis = 1 if cut.node.attrs.get("transB") else 0
    rows = [op.Slice(weight, [start], [stop], [axis]) for _, start, stop in cut.inside]
    data = [val(v) for v, _, _ in cut.inside]
    if len(rows) > 1:
        rows, data = [op.Concat(*rows, axis=axis)], [op.Concat(*data, axis=cut.lane.rank - 1)]
    more = [val(v) for v in cut.node.inputs[2:]]
    return op[cut.node.op](data[0], rows[0], *more, attrs=cut.node.attrs)


class HoistOutOfScan(RegionRule, family="control"):
    """scan(x_t @ w, ...) -> y = x @ w, scan(y_t, ...)  and alike for every function of only one step's input.

    Products with a matrix and element-wise operators are computed for all steps at once. A product of [x_t, h] is split
    in two. If an output of the loop can be computed for all steps at once, the loop no longer returns it.
    """

    anchors = ("Scan",)
    examples = (
        _scan_example("a = MatMul(e, m) k = Add(h, a) s = Identity(k)"),
        _scan_example("a = MatMul(e, m) b = Add(a, c) d1 = Tanh(b) k = Mul(h, d1) s = Relu(k)"),
        _scan_example("a = Gemm<transB = 1>(e, m, c) k = Add(h, a) s = Identity(a)"),
        _scan_example("a = Mul(e, d) k = Add(h, a) s = Relu(a)", sequence="float[2,T,3]",
                      attributes=", scan_input_axes = [1], scan_output_axes = [1]", out="float[2,T,3]"),
        _scan_example("a = Gemm(e, m, d) k = Sub(h, a) s = Neg(a)", sequence="float[2,T,3]",
                      attributes=", scan_input_axes = [1], scan_input_directions = [1]"),
        _scan_example("a = Add(z, e) b = MatMul(a, m) k = Sub(h, b) s = Neg(e)", sequence="float[2,3,T]",
                      attributes=", scan_input_axes = [2], scan_output_directions = [1]"),
        _scan_example("a = MatMul(e, m) k = Sub(a, h) s = Exp(a)",
                      attributes=", scan_input_directions = [1], scan_output_directions = [1]"),
        _scan_example("a = Concat<axis = 1>(e, h) b = MatMul(a, v) k = Tanh(b) s = Identity(k)",
                      consts=", float[6,3] v = {" + ", ".join(str(i % 5 - 2) for i in range(18)) + "}"),
        _scan_example("r = Neg(e) a = Concat<axis = 1>(h, e, r) b = Gemm<transB = 1>(a, v, c)"
                      " k = Sigmoid(b) s = Relu(b)",
                      consts=", float[3,9] v = {" + ", ".join(str(i % 7 - 3) for i in range(27)) + "}"),
        "agraph (float[T,3] x, float[T,3] y, float[3] z, float[3,2] m) => (float[3] last, float[T,2] all) {"
        " last, all = Scan (z, x, y) <num_scan_inputs = 2, body = b (float[3] h, float[3] e, float[3] f)"
        " => (float[3] k, float[2] s) { a = Mul(e, f) k = Sub(h, a) s = MatMul(a, m) }> }",
        # A Concat of one step's parts, once along an axis before the dimension of the steps and once along one after
        # it.
        _scan_example("r = Neg(e) a = Concat<axis = 1>(e, r) b = MatMul(a, v) k = Add(h, b) s = Identity(b)",
                      consts=", float[6,3] v = {" + ", ".join(str(i % 5 - 2) for i in range(18)) + "}"),
        *(_scan_example(f"r = Exp(e) a = Concat<axis = {axis}>(e, r) p, q = Split<axis = {axis}, num_outputs = 2>(a)"
                        " b = Mul(p, q) k = Add(h, b) s = Neg(b)", sequence="float[2,T,3]",
                        attributes=", scan_input_axes = [-2]") for axis in (0, 1)),
        # A Concat with two parts that depend on an earlier step.
        _scan_example("a = Concat<axis = -1>(h, e, z) b = Gemm(a, v, h) k = Tanh(b) s = Identity(k)",
                      consts=", float[9,3] v = {" + ", ".join(str(i % 7 - 3) for i in range(27)) + "}"),
        _scan_example("a = Clip(e, , one) b = Div(a, c) k = Add(h, b) s = Neg(b)", consts=", float one = {1}"),
        _scan_example("a = Exp(e) k = Add(h, a) s = Neg(a)", sequence="float[2,3,T]", out="float[2,3,T]",
                      attributes=", scan_input_axes = [2], scan_output_axes = [-1]"),
        "agraph (float[T,3] x, float[T,3] y, float[3] z) => (float[3] last, float[T,3] all) {"
        " last, all = Scan (z, x, y) <num_scan_inputs = 2, body = b (float[3] h, float[3] e, float[3] f)"
        " => (float[3] k, float[3] s) { k = Neg(h) s = Mul(e, f) }> }",
        "agraph (float[T,3] x, float[3,2] m) => (float[T,2] all) {"
        " all = Scan (x) <num_scan_inputs = 1, body = b (float[3] e) => (float[2] s) { s = MatMul(e, m) }> }",
    )  # fmt: skip
    near_misses = (
        _scan_example("b = MatMul(h, m) k = Tanh(b) s = Add(k, e)"),
        _scan_example("b = Gemm<alpha = 2.0>(e, m, c) k = Tanh(h) s = Add(k, b)"),
        _scan_example("a = Concat<axis = 0>(e, h) b = MatMul(a, u) p, q = Split<axis = 0, num_outputs = 2>(b)"
                      " k = Add(p, q) s = Relu(k)", consts=", float[3,3] u = {1, 2, 3, 4, 5, 6, 7, 8, 9}"),
        _scan_example("a = Concat<axis = 1>(h, h) b = MatMul(a, v) k = Tanh(b) s = Add(k, e)",
                      consts=", float[6,3] v = {" + ", ".join(str(i % 5 - 2) for i in range(18)) + "}"),
        _scan_example("a = Add(e, g) b = Squeeze(a, low) k = Add(h, b) s = Relu(k)",
                      consts=", float[1,2,3] g = {1, 2, 3, 4, 5, 6}, int64[1] low = {0}"),
        "agraph (int64[T,3] x, int64[3] z, int64[3] w) => (int64[3] last) { last = Scan (z, x) "
        "<num_scan_inputs = 1, body = b (int64[3] h, int64[3] e) => (int64[3] k) { a = Div(e, w) k = Add(h, a) }> }",
        "agraph (float[T,2,3] x, float[T,3,3] y, float[2,3] z) => (float[2,3] last) {"
        " last = Scan (z, x, y) <num_scan_inputs = 2, body = b (float[2,3] h, float[2,3] e, float[3,3] f)"
        " => (float[2,3] k) { a = MatMul(e, f) k = Add(h, a) }> }",
    )  # fmt: skip

    def find(self, reader: Reader, node: Node) -> Region | None:
        loop = take_apart(node)
        if loop is None:
            return None
        lanes = _scan_lanes(reader, loop)
        lanes.collect()
        return loop.region() if lanes.nodes or lanes.cuts else None

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        loop = taken_apart(region)
        parts, reader = loop.parts(inputs), Reader(around(inputs))
        lanes = _scan_lanes(reader, loop)
        lanes.collect()
        values = {inside: v for v, inside in parts.captured} | {s.element: s.sequence for s in parts.scans}
        outside = Outside(op, loop.graph, around(inputs), values)
        stacked = _Stacked(op, lanes, outside)
        stacked.run()
        direct: dict[int, Val] = {}
        for i, c in enumerate(parts.collected):
            lane = lanes.of.get(c.value)
            if lane is not None and (c.axis % (lane.rank + 1), c.backwards) == (lane.axis, lane.backwards):
                direct[i] = outside.values[c.value]
        everything = parts.collected
        parts.collected = [c for i, c in enumerate(everything) if i not in direct]
        graph = loop.graph
        for cut in lanes.cuts:
            inner, out = GraphBuilder(graph), cut.node.outputs[0]
            element = made_outside(graph, out, cut.node.types[0])
            graph = put_in_place(inner, out, inner.Add(_rest_of(cut, inner), element))
            parts.scans.append(Scanned(stacked.of_cut(cut), element.value, cut.lane.axis, cut.lane.backwards))
        parts.graph = graph
        read_values = lanes.read_by_the_rest(graph, parts.outputs(loop))
        parts.graph = without_nodes(graph, [n for n in lanes.nodes if n.id in graph.producers])
        for value in read_values:
            lane = lanes.of[value]
            parts.scans.append(Scanned(outside.values[value], value, lane.axis, lane.backwards))
        results = put_together(op, loop, parts, inputs)
        remaining = iter(results[len(parts.states) :])
        collected = [direct[i] if i in direct else next(remaining) for i in range(len(everything))]
        return [*results[: len(parts.states)], *collected]


def _scan_lanes(reader: Reader, loop: Loop) -> _Lanes:
    """The lanes of a Scan: they begin with its sequences."""
    of: dict[Value, _Lane] = {}
    for value, element, (axis, backwards) in zip(loop.explicit[loop.states :], loop.elements, loop.scan_axes):
        rank = reader.type(value).rank
        if rank is not None:
            of[element] = _Lane(front(axis, rank), rank - 1, backwards)
    return _Lanes(loop, of, set(loop.body.captured))


class HoistOutOfLoop(RegionRule, family="control"):
    """loop(x[i] @ w, ...) -> y = x @ w, loop(y[i], ...)  when i is the number of the step.

    Every function that depends only on x[i] is computed for all of x at once, as in HoistOutOfScan.
    """

    anchors = ("Loop",)
    examples = (
        *(
            f"agraph (int64 n, {kind} x, float[2,3] z, float[3,3] m) => (float[2,3] last, float[T,2,3] all)"
            " <int64 one = {1}, int64 two = {2}, float[3] c = {1, -2, 3}, float[2,1] d = {2, -1}> {"
            " k1 = Add(n, one) t = Min(k1, two)"
            " last, all = Loop (t, , z) <body = b (int64 i, bool going, float[2,3] h)"
            " => (bool on, float[2,3] k, float[2,3] s) {"
            f" on = Identity(going) e = Gather<axis = {axis}>(x, i) {body} }}> }}"
            for kind, axis in (("float[4,2,3]", 0), ("float[2,4,3]", 1))
            for body in (
                "a = MatMul(e, m) k = Add(h, a) s = Identity(k)",
                "a = Gemm<transB = 1>(e, m, c) b = Tanh(a) k = Mul(h, b) s = Relu(k)",
                "a = Mul(e, d) b = MatMul(a, m) k = Add(h, b) s = Relu(a)",
                "a = Sub(c, e) k = Add(h, a) s = MatMul(a, m)",
            )
        ),
        "agraph (int64 n, float[3,3] x, float[3,3] y, float[3] z) => (float[3] last) <int64 one = {1}, "
        "int64 two = {2}> { k1 = Add(n, one) t = Min(k1, two) last = Loop (t, , z) <body = b "
        "(int64 i, bool going, float[3] h) => (bool on, float[3] k) { on = Identity(going) e = Gather(x, i) "
        "f = Gather(y, i) a = Mul(e, f) k = Sub(h, a) }> }",
        # With a result computed from a constant, which is then a constant of the body.
        "agraph (int64 n, float[2] z) => (float[2] last) <int64 one = {1}, int64 two = {2}, "
        "float[3,2] x = {1, 2, 3, -1, -2, -3}> { k1 = Add(n, one) t = Min(k1, two) last = Loop (t, , z) <body = b "
        "(int64 i, bool going, float[2] h) => (bool on, float[2] k) { on = Identity(going) e = Gather(x, i) "
        "a = Exp(e) b = Neg(a) k = Add(h, b) }> }",
        "agraph (int64 n, float[3,2] x, float[1,2] z) => (float[1,2] last) <int64 one = {1}, int64 two = {2},"
        " float[4,2] v = {1, 2, 3, 4, -1, -2, -3, -4}, int64[1] first = {1}> {"
        " k1 = Add(n, one) t = Min(k1, two) y = Unsqueeze(x, first)"
        " last = Loop (t, , z) <body = b (int64 i, bool going, float[1,2] h) => (bool on, float[1,2] k) {"
        " on = Identity(going) e = Gather(y, i) a = Concat<axis = 1>(e, h) k = MatMul(a, v) }> }",
    )  # fmt: skip
    near_misses = tuple(
        "agraph (int64 n, int64[3] x, float[3,3] z) => (float[3,3] last) <int64 one = {1}, int64 two = {2}> {"
        " k1 = Add(n, one) t = Min(k1, two)"
        " last = Loop (t, , z) <body = b (int64 i, bool going, float[3,3] h) => (bool on, float[3,3] k) {"
        f" on = Identity(going) {body} k = Add(h, f) }}> }}"
        for body in ("e = Gather(h, i) f = Neg(e)", "e = Add(x, i) f = Cast<to = 1>(e)")
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        loop = take_apart(node)
        if loop is None:
            return None
        lanes = _loop_lanes(loop)
        if not lanes.of:
            return None
        lanes.collect()
        return loop.region() if lanes.nodes or lanes.cuts else None

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        loop = taken_apart(region)
        parts, lanes = loop.parts(inputs), _loop_lanes(loop)
        outside = Outside(op, loop.graph, around(inputs), {inside: v for v, inside in parts.captured})
        for value in lanes.of:
            outside.values[value] = outside(loop.graph.producers[value].inputs[0])
        lanes.collect()
        stacked = _Stacked(op, lanes, outside)
        stacked.run()
        graph = loop.graph
        products = [(c.node.outputs[0], stacked.of_cut(c), c.lane.axis, c) for c in lanes.cuts]
        for value, stack, axis, cut in products:
            inner = GraphBuilder(graph)
            own = _gathered(inner, value, stack, axis)
            graph = put_in_place(inner, value, inner.Add(_rest_of(cut, inner), own))
        parts.graph = graph
        for value in lanes.read_by_the_rest(graph, parts.outputs(loop)):
            stack, axis = outside.values[value], lanes.of[value].axis
            inner = GraphBuilder(graph)
            graph = put_in_place(inner, value, _gathered(inner, value, stack, axis))
            parts.captured.append((stack, outside_name(value)))
        parts.captured += [(stack, outside_name(value)) for value, stack, _, _ in products]
        parts.graph = graph
        return put_together(op, loop, parts, inputs)


def _loop_lanes(loop: Loop) -> _Lanes:
    """The lanes of a Loop: they begin with the parts that it gathers from tensors by the number of the step."""
    graph = loop.graph
    of: dict[Value, _Lane] = {}
    for value in graph.uses.get(graph.inputs[0], ()):
        node = graph.producers[value]
        if node.op != "Gather" or node.inputs[1] != graph.inputs[0] or node.const:
            continue
        source = node.inputs[0]
        shape = graph.type(source).shape
        if not shape or not (source in loop.body.captured or loop.is_constant(source)):
            continue
        axis = axis_of(node, len(shape))
        of[node.outputs[0]] = _Lane(axis, len(shape) - 1, positions=shape[axis] or ("of", source))
    return _Lanes(loop, of, set(loop.body.captured))


def _gathered(inner: GraphBuilder, value: Value, stack: Val, axis: int) -> Any:
    """A step's part of the tensor that is computed outside instead of a value of the body."""
    graph = inner.graph
    index = Val(graph, graph.inputs[0], graph.type(graph.inputs[0]))
    return inner.Gather(made_outside(graph, value, stack.type), index, axis=axis)

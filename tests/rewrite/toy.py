"""A few rules that exercise every part of the engine."""

from __future__ import annotations

from typing import Any

from xrlflow.ir import Node
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, require


class MergeMatMuls(Rule):
    """x@w0, x@w1, ... -> split(x @ [w0|w1|...])."""

    arity, shapes, symmetric = (2, 3), "x[b,s,k] w*[k,n*]:const", True

    def source(self, op: Op, x: Val, *w: Val) -> Any:
        return [op.MatMul(x, wi) for wi in w]

    def target(self, op: Op, x: Val, *w: Val) -> Any:
        y = op.MatMul(x, op.Concat(*w, axis=-1))
        return op.Split(y, axis=-1, sizes=[wi.size(-1) for wi in w])


class CancelTransposes(Rule):
    """transpose_q(transpose_p(x)) -> x when p after q is the identity."""

    shapes = "x[a,b,c]"
    allow_multi_use = True

    def source(self, op: Op, x: Val) -> Any:
        return op.Transpose(op.Transpose(x, perm="p"), perm="q")

    def where(self, m: Captures, x: Val) -> None:
        p, q = m.p or (2, 1, 0), m.q or (2, 1, 0)
        require(tuple(p[i] for i in q) == (0, 1, 2), "the permutations do not cancel")

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return x


class PushTransposeThroughRelu(Rule):
    """relu(transpose(x)) -> transpose(relu(x))."""

    def source(self, op: Op, x: Val) -> Any:
        return op.Relu(op.Transpose(x, perm="p"))

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return op.Transpose(op.Relu(x), perm=m.p)


class Distribute(Rule):
    """(x + y) * z -> x*z + y*z."""

    def source(self, op: Op, x: Val, y: Val, z: Val) -> Any:
        return op.Mul(op.Add(x, y), z)

    def target(self, op: Op, x: Val, y: Val, z: Val) -> Any:
        return op.Add(op.Mul(x, z), op.Mul(y, z))


class Collect(Rule):
    """x*z + y*z -> (x + y) * z."""

    def source(self, op: Op, x: Val, y: Val, z: Val) -> Any:
        return op.Add(op.Mul(x, z), op.Mul(y, z))

    def target(self, op: Op, x: Val, y: Val, z: Val) -> Any:
        return op.Mul(op.Add(x, y), z)


class MergeReluChain(RegionRule):
    """relu(relu(...relu(x))) -> relu(x), any length of at least two."""

    anchors = ("Relu",)

    def find(self, reader: Reader, node: Node) -> Region | None:
        if any(u.op == "Relu" for u in reader.users(node.outputs[0])):
            return None  # only the last of a chain is the anchor
        chain = [node]
        while (above := reader.producer(chain[-1].inputs[0])) is not None and above.op == "Relu":
            chain.append(above)
        if len(chain) < 2:
            return None
        return Region(node.outputs, chain[-1].inputs, tuple(chain))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Relu(x)


class SplitFirst(Rule):
    """The first half of split(x) -> slice(x): replaces one output of a node and leaves the other."""

    shapes = "x[a,b,c]"
    allow_multi_use = True

    def source(self, op: Op, x: Val, sizes: Val) -> Any:
        first, _ = op.Split(x, sizes, axis="axis", outputs=2)
        return first

    def where(self, m: Captures, x: Val, sizes: Val) -> None:
        require(sizes.known, "the sizes are not known")

    def target(self, op: Op, m: Captures, x: Val, sizes: Val) -> Any:
        return op.Slice(x, [0], [sizes.ints[0]], [m.axis])


TOY = (
    MergeMatMuls(),
    CancelTransposes(),
    PushTransposeThroughRelu(),
    Distribute(),
    Collect(),
    MergeReluChain(),
    SplitFirst(),
)

"""Random graphs that consist of the sources of rules, so that training also covers rules that match in no network.

    from models.rule_graphs import rule_graph
    graph = rule_graph(LIBRARY, seed=7)        # an xrlflow Graph, in which some of the rules apply

A piece is a small graph to which one rule applies. For a pattern rule it is drawn as for the rule's proof, from the
rule's `shapes` and from the types that its operators accept, but with larger dimensions, so that costs are realistic.
For a region rule, and in one of four attempts for a pattern rule, it is one of the rule's `examples` with other
dimensions. Several pieces become one graph: outputs of earlier pieces feed inputs of later ones, through a Reshape if
only the number of elements fits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx.parser

from xrlflow.ir import FLOATS, DType, Graph, TensorType
from xrlflow.onnxio import ModelError, load
from xrlflow.prover.cases import usable
from xrlflow.prover.draw import Draw
from xrlflow.prover.patterns import DegenerateSample, draw_pattern
from xrlflow.prover.sketch import Sketch, SketchConst, SketchNode, Unbuildable, ValueRef, build, sketch_of
from xrlflow.rewrite import AnyRule, Library, Rule
from xrlflow.rewrite.pattern import Pattern, trace_patterns
from xrlflow.rewrite.state import match_all

# The greatest product of the dimensions that are drawn for a piece.
_ELEMENTS = 1 << 18
_SIZES = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# The most attempts to draw a piece of one rule, and the most rules that are tried for a piece.
_DRAWS, _RULES = 60, 40
# The share of an example's numbers that change, as if they were dimensions. It falls from draw to draw, because a
# number may have another meaning.
_SIZED = (0.8, 0.5, 0.2, 0.0)


class RuleGraphError(ValueError):
    """No graph can be drawn from these rules."""


class Sizes(Draw):
    """Draws typical dimensions of tensors, and repeats dimensions of earlier pieces, so that pieces fit together."""

    def __init__(self, seed: int, earlier_sizes: Sequence[int] = ()) -> None:
        super().__init__(seed)
        self.earlier_sizes = tuple(earlier_sizes)
        self.room = _ELEMENTS

    def dim(self) -> int:
        options = self.earlier_sizes if self.earlier_sizes and self.chance(0.5) else _SIZES
        size = self.choice([s for s in options if s <= self.room] or [1])
        self.room //= max(size, 1)
        return size


@dataclass(frozen=True, slots=True)
class Piece:
    """A drawn source of a rule, to which the rule applies. `types`: the types of its outputs."""

    rule: str
    sketch: Sketch
    types: tuple[TensorType, ...]


@functools.cache
def _compiled(rule: AnyRule) -> tuple[Library, tuple[Pattern, ...]]:
    patterns = tuple(trace_patterns(rule)) if isinstance(rule, Rule) else ()
    assuming = (rule.assumes,) if rule.assumes else ()
    return Library([rule], backend=rule.backend, contrib=True, assuming=assuming), patterns


def draw_piece(rule: AnyRule, seed: int, earlier_sizes: Sequence[int] = ()) -> Piece | None:
    """A piece to which the rule applies; None if `_DRAWS` attempts gave none."""
    library, patterns = _compiled(rule)
    draw = Sizes(seed, earlier_sizes)
    for attempt in range(_DRAWS):
        draw.room = _ELEMENTS
        try:
            if patterns and not (rule.examples and attempt % 4 == 3):
                sketch = draw_pattern(rule, list(patterns), draw)  # type: ignore[arg-type]
            elif rule.examples:
                sketch = sketch_of(load(_parsed(draw.choice(rule.examples))).graph)
                if not sketch.varied:  # a control-flow body
                    return None
                sketch = resized(sketch, draw, _SIZED[attempt % len(_SIZED)])
            else:
                return None
            problem = build(sketch)
        except (DegenerateSample, Unbuildable, ModelError):
            continue
        graph = problem.graph
        if _fit(graph) and match_all(graph, library) and usable(problem, draw.rng):
            return Piece(rule.name, sketch, tuple(graph.type(v) for v in graph.outputs))
    return None


def resized(sketch: Sketch, draw: Sizes, part: float) -> Sketch:
    """The sketch with other dimensions: a number for each symbol, and other numbers for the share `part` of its
    numbers.

    A number is replaced wherever it occurs, in constant shapes too.
    """
    dims = {d for t in sketch.inputs for d in t.shape or () if isinstance(d, str)}
    numbers = {d for t in sketch.inputs for d in t.shape or () if isinstance(d, int) and d > 1}
    numbers |= {d for c in sketch.consts if c.dtype in FLOATS for d in c.array.shape if d > 1}
    new: dict[int | str | None, int] = {d: draw.dim() for d in sorted(dims)}
    new |= {d: draw.dim() for d in sorted(numbers) if draw.chance(part)}

    def shape(dims: Sequence[int | str | None]) -> tuple[int | str | None, ...]:
        return tuple(new.get(d, d) for d in dims)

    def const(const: SketchConst) -> SketchConst:
        array = const.array
        if const.dtype in FLOATS:
            return replace(const, array=np.resize(array, tuple(new.get(d, d) for d in array.shape)))
        if const.dtype == DType.INT64 and array.size:
            return replace(const, array=np.vectorize(lambda n: new.get(int(n), n), otypes=[np.int64])(array))
        return const

    inputs = tuple(
        t if t.shape is None else TensorType(t.dtype, shape(t.shape), t.const) for t in sketch.inputs
    )
    return replace(sketch, inputs=inputs, consts=tuple(map(const, sketch.consts)))


def _parsed(text: str) -> onnx.ModelProto:
    """Parse an example, which is only a graph, to a model."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]> {text}')


def _fit(graph: Graph) -> bool:
    """Whether all dimensions are numbers and no tensor is empty or too large."""
    types = [t for n in graph.nodes() for t in n.types]
    return all(t.is_static and 0 < math.prod(map(int, t.shape or ())) <= 4 * _ELEMENTS for t in types)


def glue(pieces: Sequence[Piece], draw: Draw) -> Sketch:
    """One sketch of several pieces. In three of four cases, an input is connected to an output of an earlier piece that
    fits."""
    inputs: list[TensorType] = []
    consts: list[SketchConst] = []
    nodes: list[SketchNode] = []
    loose: list[tuple[ValueRef, TensorType]] = []  # outputs that no node reads yet
    for piece in pieces:
        sketch = piece.sketch
        fed: list[ValueRef] = []
        for type in sketch.inputs:
            fitting = [i for i, (_, have) in enumerate(loose) if _same_data(have, type)]
            if fitting and draw.chance(0.75):
                ref, have = loose.pop(draw.choice(fitting))
                if have.shape != type.shape:
                    ref = _reshaped(ref, type, consts, nodes)
                fed.append(ref)
            else:
                inputs.append(type)
                fed.append(ValueRef("input", len(inputs) - 1))
        first_const, first_node = len(consts), len(nodes)
        consts += sketch.consts

        def shifted(
            ref: ValueRef | None,
            fed: list[ValueRef] = fed,
            first_const: int = first_const,
            first_node: int = first_node,
        ) -> ValueRef | None:
            if ref is None:
                return None
            if ref.kind == "input":
                return fed[ref.index]
            return replace(ref, index=ref.index + (first_const if ref.kind == "const" else first_node))

        nodes += [replace(n, inputs=tuple(map(shifted, n.inputs))) for n in sketch.nodes]
        outputs = [(shifted(p), t) for p, t in zip(sketch.outputs, piece.types)]
        loose += [(p, t) for p, t in outputs if p is not None and p.kind == "node"]
    return Sketch(tuple(inputs), tuple(consts), tuple(nodes), tuple(dict.fromkeys(p for p, _ in loose)))


def _same_data(have: TensorType, want: TensorType) -> bool:
    """Whether a value of type `have` can feed an input of type `want`, if necessary through a Reshape."""
    if have.dtype != want.dtype or not (have.is_static and want.is_static):
        return False
    return have.shape == want.shape or _elements(have) == _elements(want) > 1


def _elements(type: TensorType) -> int:
    return math.prod(map(int, type.shape or ()))


def _reshaped(
    ref: ValueRef, type: TensorType, consts: list[SketchConst], nodes: list[SketchNode]
) -> ValueRef:
    consts.append(SketchConst(np.asarray(type.shape, np.int64), DType.INT64))
    nodes.append(SketchNode("Reshape", (ref, ValueRef("const", len(consts) - 1))))
    return ValueRef("node", len(nodes) - 1)


def rule_graph(rules: Sequence[AnyRule], seed: int, pieces: int = 3) -> Graph:
    """A graph of `pieces` pieces, each the source of one rule. Rules for other backends than ONNX Runtime are skipped,
    because no search uses them by default.

    Raises RuleGraphError if none of the rules can be drawn.
    """
    draw = Draw(seed)
    rules = [r for r in rules if r.backend in (None, "onnxruntime")]
    selected: list[Piece] = []
    for _ in range(_RULES * pieces):
        if len(selected) == pieces or not rules:
            break
        earlier_sizes = {
            int(d) for p in selected for t in p.types for d in t.shape or () if isinstance(d, int) and d > 1
        }
        piece = draw_piece(draw.choice(rules), draw.integer(0, 1 << 30), sorted(earlier_sizes))
        if piece is None:
            continue
        try:
            build(glue([*selected, piece], Draw(seed)))
        except Unbuildable:
            continue
        selected.append(piece)
    if not selected:
        raise RuleGraphError("none of the rules could be drawn")
    return build(glue(selected, Draw(seed))).graph

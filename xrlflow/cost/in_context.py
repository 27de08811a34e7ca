"""The gain of a substitution in context: the changed nodes and their neighbours, before and after, as two small models.

A runtime fuses an operator with its neighbours, so measuring the operator alone is misleading. In a large model the
effect of one substitution is smaller than the noise. A model of a few nodes around the substitution avoids both
problems.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy.typing as npt

from xrlflow.backends.onnxruntime import measure
from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError
from xrlflow.cost.microbench import is_bound, sample_inputs
from xrlflow.ir import ABSENT, DType, Edit, Graph, Node, TensorType, Value, apply_edit
from xrlflow.onnxio.versions import at_least
from xrlflow.ops.schema import OPSET
from xrlflow.ops.subgraph import NotStandalone, input_name, model_of
from xrlflow.ops.tensors import dtype_of
from xrlflow.ops.work import OpKind, dimensions, work
from xrlflow.rewrite import Match, RewriteState
from xrlflow.rewrite.state import build_edit

# How many edges the context reaches from the changed nodes, towards producers and towards readers. ONNX Runtime fuses
# chains of about that length: a product, its bias and an activation; a sum and a normalisation.
_HOPS = 2
# The runtime fuses nothing across these, so the context ends with them.
_HEAVY = frozenset({OpKind.GEMM, OpKind.CONV, OpKind.GROUPED_CONV, OpKind.DEPTHWISE_CONV, OpKind.RECURRENT})
_MOST_NODES = 64
# The elements of a value that can be a shape, or a part of one.
_MOST_SIZES = 8
_MOST_BYTES = 64 << 20
_MOST_MATCHES = 64
_MOST_KINDS = 8
# Seconds to load both models, besides measuring them; and the factor by which a second measurement takes longer.
_LOADING = 0.2
_LONGER = 3

_Kind: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """What a substitution saves in context."""

    seconds: float  # negative: it costs time
    sure: bool  # the confidence interval does not contain 0


@dataclass(frozen=True, slots=True)
class _EqualEdits:
    """Substitutions of one rule that change the same operators on the same types."""

    kind: _Kind
    graph: Graph  # the graph to which the first of them applies
    edit: Edit  # the first of them
    count: int

    def total(self, gains: Mapping[_Kind, Gain | None]) -> float:
        gain = gains[self.kind]
        return self.count * gain.seconds if gain is not None else 0.0


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Some nodes of a graph."""

    graph: Graph
    nodes: tuple[Node, ...]  # producers first
    outputs: tuple[Value, ...]  # values that other nodes read


class InContextBenchmark:
    """Measures substitutions in context. Those that change the same operators on the same types are measured once."""

    def __init__(
        self,
        threads: int,
        bindings: Mapping[str, int] | None = None,
        *,
        seconds: float = 0.3,
        session_options: Options | None = None,
        opset: int = OPSET,
    ) -> None:
        """`bindings`: a number for each symbolic dimension. `seconds`: time to measure each pair of models. `opset`:
        the opset of these models, unless they need a newer one."""
        self._threads, self._bindings = threads, dict(bindings or {})
        self._seconds, self._options = seconds, session_options
        self._opset = opset
        self._gains: dict[_Kind, Gain | None] = {}
        self.refused: list[str] = []

    def survey(
        self, state: RewriteState, rules: Sequence[str], at_most: float, until: float
    ) -> dict[str, float]:
        """Seconds saved if each of these rules is applied wherever its modelled delta is at most `at_most` seconds.

        Equal substitutions are measured once, and count once for each match. A rule whose effect is within the noise
        saves 0. Rules that were not measured before `until` (time.monotonic), or cannot be measured in context, are
        left out; `refused` says which models the runtime could not run.
        """
        matches: dict[str, list[Match]] = {rule: [] for rule in rules}
        for match in sorted(state.candidates, key=lambda m: m.key):
            if match.rule.name in matches and match.delta <= at_most:
                matches[match.rule.name].append(match)
        groups: list[_EqualEdits] = []
        for candidates in matches.values():
            edits: dict[frozenset[Value], Edit] = {}
            for match in candidates[:_MOST_MATCHES]:
                edit = build_edit(state.graph, match)
                # A commutative operator matches with its operands in both orders.
                edits.setdefault(frozenset(n.id for n in edit.removed), edit)
            groups += _grouped([(state.graph, edit) for edit in edits.values()])
        return self._weigh(groups, until)

    def retrace(self, steps: Iterable[tuple[RewriteState, Match]], until: float) -> dict[str, float]:
        """As `survey`, for substitutions that were applied one after the other; `steps` has each with the state before
        it."""
        by_rule: dict[str, list[tuple[Graph, Edit]]] = {}
        for state, match in steps:
            by_rule.setdefault(match.rule.name, []).append((state.graph, build_edit(state.graph, match)))
            if time.monotonic() >= until:
                break
        return self._weigh([each for edits in by_rule.values() for each in _grouped(edits)], until)

    def _weigh(self, groups: Sequence[_EqualEdits], until: float) -> dict[str, float]:
        reached: list[_EqualEdits] = []
        for each in groups:
            if time.monotonic() >= until:
                break
            self.gain(each.graph, each.edit)
            reached.append(each)
        # In the remaining time unsure gains are measured again, those with the largest effect first.
        for each in sorted(reached, key=lambda each: -abs(each.total(self._gains))):
            gain = self._gains[each.kind]
            if gain is None or gain.sure:
                continue
            if time.monotonic() + _LONGER * self._seconds >= until:
                break
            self._gains[each.kind] = self._try(each.graph, each.edit, _LONGER * self._seconds)
        savings: dict[str, float] = {}
        for each in reached:
            gain = self._gains[each.kind]
            if gain is not None:
                rule = each.edit.rule
                savings[rule] = savings.get(rule, 0.0) + (each.count * gain.seconds if gain.sure else 0.0)
        return savings

    def gain(self, graph: Graph, edit: Edit) -> Gain | None:
        """The gain of an edit. None if the nodes around it cannot be a model of their own, or if the runtime refuses
        this model."""
        kind = _kind(edit)
        if kind not in self._gains:
            self._gains[kind] = self._try(graph, edit, self._seconds)
        return self._gains[kind]

    def _try(self, graph: Graph, edit: Edit, seconds: float) -> Gain | None:
        try:
            return self._measured(graph, edit, seconds)
        except NotStandalone:
            return None
        except BackendError as error:
            self.refused.append(f"{edit.rule}: {error}")
            return None

    def _measured(self, graph: Graph, edit: Edit, limit: float) -> Gain:
        before, after = excerpts(graph, edit, self._bindings)
        feeds: dict[Value, npt.NDArray[Any]] = {}
        consts: dict[Value, npt.NDArray[Any]] = {}
        for excerpt in (before, after):
            self._draw(excerpt, feeds, consts)
        # Both models have the inputs of either, since both get the same feeds.
        models = [self._model(excerpt, feeds, consts) for excerpt in (before, after)]
        comparison = measure(
            models, {input_name(v): a for v, a in feeds.items()}, threads=self._threads,
            time_limit=limit + _LOADING, target_width=0.02, control=False, session_options=self._options,
        )  # fmt: skip
        ratio = comparison.speedup
        seconds = comparison.latencies[0].seconds * (1.0 - 1.0 / ratio.median)
        return Gain(seconds, ratio.low > 1.0 or ratio.high < 1.0)

    def _draw(
        self, excerpt: Excerpt, feeds: dict[Value, npt.NDArray[Any]], consts: dict[Value, npt.NDArray[Any]]
    ) -> None:
        """Add what an excerpt reads to `feeds` (inputs) and `consts` (constants)."""
        graph = excerpt.graph
        computed = {v for node in excerpt.nodes for v in node.outputs}
        for node in excerpt.nodes:
            in_types = tuple(graph.type(v) if v != ABSENT else None for v in node.inputs)
            if not is_bound((*in_types, *node.types), self._bindings):
                raise NotStandalone(f"{node.op} has a dimension that has no number")
            needed = [v for v in node.inputs if v != ABSENT and v not in computed]
            new = {v for v in needed if v not in feeds and v not in consts}
            if not new:
                continue
            size = sum(8 * math.prod(dimensions(graph.type(v), self._bindings)) for v in new)
            if size > _MOST_BYTES:
                raise NotStandalone(f"{node.op} reads {size >> 20} MB")
            constants = {v: c.array for v in new if (c := graph.const(v)) is not None and c.array is not None}
            inputs, weights = sample_inputs(node, in_types, constants, self._bindings)
            feeds.update((v, a) for v, a in inputs.items() if v in new)
            consts.update((v, a) for v, a in weights.items() if v in new)

    def _model(
        self,
        excerpt: Excerpt,
        feeds: Mapping[Value, npt.NDArray[Any]],
        consts: Mapping[Value, npt.NDArray[Any]],
    ) -> bytes:
        graph = excerpt.graph
        inside = {v for node in excerpt.nodes for v in (*node.inputs, *node.outputs) if v != ABSENT}
        types = {v: TensorType(dtype_of(array.dtype), array.shape) for v, array in feeds.items()}
        model = model_of(
            excerpt.nodes, types, {v: a for v, a in consts.items() if v in inside}, excerpt.outputs
        )
        types_by_name = {input_name(v): graph.type(v) for v in inside}
        return at_least(model, types_by_name, self._opset)


def _grouped(edits: Sequence[tuple[Graph, Edit]]) -> list[_EqualEdits]:
    """Edits of one rule, grouped and counted, the most frequent group first."""
    first: dict[_Kind, tuple[Graph, Edit]] = {}
    times: Counter[_Kind] = Counter()
    for graph, edit in edits:
        kind = _kind(edit)
        first.setdefault(kind, (graph, edit))
        times[kind] += 1
    return [_EqualEdits(kind, *first[kind], count) for kind, count in times.most_common(_MOST_KINDS)]


def _kind(edit: Edit) -> _Kind:
    """A key that equal edits share: the rule, and the operators that it removes, adds and rewires."""

    def signatures(nodes: Iterable[Node]) -> tuple[str, ...]:
        return tuple(sorted(repr((n.op, n.attrs.digest, n.types)) for n in nodes))

    return (
        edit.rule,
        signatures(edit.removed),
        signatures(edit.added),
        signatures(new for _, new in edit.rewired),
    )


def excerpts(graph: Graph, edit: Edit, bindings: Mapping[str, int]) -> tuple[Excerpt, Excerpt]:
    """The nodes that the edit changes and their neighbours, before and after.

    Raises NotStandalone if they are too many.
    """
    successor, _ = apply_edit(graph, edit)
    old = {n.id for n in (*edit.removed, *(was for was, _ in edit.rewired)) if not n.types[0].const}
    new = {n.id for n in (*edit.added, *(now for _, now in edit.rewired)) if not n.types[0].const}
    context = _around(graph, old, bindings) | _around(successor, new, bindings)
    shared = {i for i in context if i in graph.producers and graph.producers[i] is successor.producers.get(i)}
    return _excerpt(graph, old | shared), _excerpt(successor, new | shared)


def _around(graph: Graph, start: set[Value], bindings: Mapping[str, int]) -> set[Value]:
    """Ids of the neighbours within `_HOPS` steps of these nodes, towards the inputs and towards the outputs."""
    ids: set[Value] = set()
    for upwards in (True, False):
        front = set(start)
        for _ in range(_HOPS):
            step: set[Value] = set()
            for node in (graph.producers[i] for i in front):
                in_types = [graph.type(v) if v != ABSENT else None for v in node.inputs]
                if node.id not in start and work(node, in_types, bindings).kind in _HEAVY:
                    continue
                if upwards:
                    step.update(graph.producers[v].id for v in node.inputs if v in graph.producers)
                else:
                    step.update(user.id for v in node.outputs for user in graph.users(v))
            front = {i for i in step if not graph.producers[i].types[0].const} - ids
            ids |= front
    return ids


def _sizes_read(graph: Graph, ids: set[Value]) -> set[Value]:
    """Ids of the nodes that compute the sizes which these nodes read: random numbers in their place would not fit."""
    found: set[Value] = set()
    work = [graph.producers[i] for i in ids]
    while work:
        for value in work.pop().inputs:
            producer = graph.producers.get(value)
            if producer is None or producer.id in ids or producer.id in found or producer.types[0].const:
                continue
            type = graph.type(value)
            if (
                type.dtype == DType.INT64
                and type.rank in (0, 1)
                and (type.size or _MOST_SIZES + 1) <= _MOST_SIZES
            ):
                found.add(producer.id)
                work.append(producer)
    return found


def _excerpt(graph: Graph, ids: set[Value]) -> Excerpt:
    inside = ids | _sizes_read(graph, ids)
    if len(inside) > _MOST_NODES:
        raise NotStandalone(f"{len(inside)} nodes are too many")
    order: list[Node] = []
    visited: set[Value] = set()

    def visit(node: Node) -> None:
        visited.add(node.id)
        for value in node.inputs:
            producer = graph.producers.get(value)
            if producer is not None and producer.id in inside and producer.id not in visited:
                visit(producer)
        order.append(node)

    for i in sorted(ids):
        if i not in visited:
            visit(graph.producers[i])
    outputs = tuple(
        v
        for node in order
        if node.id in ids
        for v in node.outputs
        if v in graph.outputs or any(user.id not in inside for user in graph.users(v))
    )
    if not outputs:
        raise NotStandalone("nobody reads its results")
    return Excerpt(graph, tuple(order), outputs)

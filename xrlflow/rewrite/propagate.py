"""Propagates an edit. If an input of a node became constant, so may its outputs; if its type became more precise, so
may theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.ir import (
    ABSENT,
    FLOATS,
    SMALL,
    Attrs,
    Body,
    Const,
    DType,
    Edit,
    Graph,
    Leaves,
    Node,
    TensorType,
    TypeConflict,
    Value,
    apply_edit,
    merge_types,
    plan_edit,
)
from xrlflow.ops.bounds import effort
from xrlflow.ops.evaluate import MISFIT, NotEvaluable, evaluate_node
from xrlflow.ops.infer import InferenceError, infer
from xrlflow.ops.schema import opaque, schema
from xrlflow.ops.tensors import numpy_dtype

Array = npt.NDArray[Any]

# Limits for the evaluation of one small constant: seconds, and bytes in addition to its inputs.
_SECONDS, _ROOM = 0.1, 1 << 24

# How many nodes propagation changes at most for one edit. Further nodes keep their types, which is never wrong.
_MOST = 256


def evaluate_small(
    op: str, attrs: Attrs, data: Sequence[Const | None], types: Sequence[TensorType]
) -> list[Array] | None:
    """The outputs of a node whose inputs are constants; None if one is not small or the node cannot be evaluated.

    Floats are computed in float64 and rounded once.
    """
    for t in types:
        if t.size is None or t.size > SMALL or t.dtype == DType.UNDEFINED:
            return None
    inputs: list[Array | None] = []
    for const in data:
        if const is None:
            inputs.append(None)
        elif const.array is None:
            return None
        else:
            array = const.array
            inputs.append(array.astype(np.float64) if const.type.dtype in FLOATS else array)
    needed = effort(op, attrs, [None if const is None else const.type for const in data], types)
    if needed.seconds > _SECONDS or needed.bytes > _ROOM:
        return None
    try:
        outputs = evaluate_node(op, attrs, inputs, len(types))
    except (NotEvaluable, *MISFIT):  # MISFIT: the node fails when it runs, if it does
        return None
    with np.errstate(over="ignore"):  # a number too large for the type becomes infinite, as in the runtime
        return [np.asarray(o).astype(numpy_dtype(t.dtype)) for o, t in zip(outputs, types)]


def fold_small(
    leaves: Leaves, op: str, attrs: Attrs, inputs: tuple[Value, ...], types: tuple[TensorType, ...]
) -> tuple[Value, ...] | None:
    """The outputs of an operator on constants, as small constants. The result is remembered in `leaves.folded`.

    None if an input is not constant, if an input or output is not small, or if the operator cannot be evaluated.
    """
    key = (op, attrs.digest, inputs, types)
    if key in leaves.folded:
        return leaves.folded[key]
    consts = leaves.consts
    data = [None if v == ABSENT else consts.get(v) for v in inputs]
    for value, const in zip(inputs, data):
        if const is None and value != ABSENT:
            return None
    arrays = evaluate_small(op, attrs, data, types)
    constants = None if arrays is None else tuple([leaves.intern(a, t.dtype) for a, t in zip(arrays, types)])
    leaves.folded[key] = constants
    return constants


def propagated(graph: Graph, edit: Edit) -> Edit:
    """The edit, extended by the constants and types that follow from it.

    If a value became constant or its type more precise, the types of its readers are inferred again. A reader whose
    outputs are small constants is evaluated. If its output types become more precise, its readers follow in turn.
    """
    looked = _readers_of_news(graph, edit)
    if not looked:
        return edit
    after = graph
    applied = False
    changes = 0
    while looked and changes < _MOST:
        if not applied:
            after, applied = apply_edit(graph, edit)[0], True
        folded: dict[Value, Value] = {}
        refined: list[Node] = []
        for value in sorted(looked):
            node = after.producers.get(value)
            if node is None or node.outputs[0] != value or node.const:
                continue
            try:
                types = _inferred(after, node)
            except InferenceError:  # the node fails if it runs (it may be in a branch): no rule may see this
                if (op := opaque(node.op)) != node.op:
                    refined.append(replace(node, op=op))
                continue
            constants = None if types is None else _evaluated(after, node, types)
            if constants is not None:
                folded.update(zip(node.outputs, constants))
            elif types is not None and types != node.types:
                refined.append(
                    Node(
                        node.op, node.inputs, node.outputs, types, node.attrs, node.captured, node.on_runtime
                    )
                )
        if folded:  # before types, because a node with new types may read a folded value
            more = plan_edit(after, edit.rule, (), folded)
            looked = {v for v in looked if v not in folded} | {n.outputs[0] for _, n in more.rewired}
        elif refined:
            more = plan_edit(after, edit.rule, refined, {})
            changed = [
                v
                for n in refined
                for v, new, old in zip(n.outputs, n.types, after.producers[n.outputs[0]].types)
                if new is not old
            ]
            looked = {user for v in changed for user in after.uses.get(v, ())}
        else:
            break
        changes += len(folded) + len(refined)
        after = apply_edit(after, more)[0]
        edit = _both(edit, more)
    return edit


def _readers_of_news(graph: Graph, edit: Edit) -> set[Value]:
    """The first outputs of nodes that read a value whose type the edit changes."""
    types = {v: t for n in edit.added for v, t in zip(n.outputs, n.types)}
    looked: set[Value] = set()
    for value, type in types.items():
        if value in graph.producers and graph.type(value) is not type:
            looked.update(graph.uses.get(value, ()))
    for old, new in edit.rewired:
        for before, after in zip(old.inputs, new.inputs):
            if before != after and (types.get(after) or graph.type(after)) is not graph.type(before):
                looked.add(new.outputs[0])
    return looked


def _inferred(graph: Graph, node: Node) -> tuple[TensorType, ...] | None:
    """The types of a node's outputs, inferred from its present inputs; None if they cannot be inferred.

    Raises InferenceError if the node does not fit its inputs.
    """
    if schema(node.op) is None or any(isinstance(a, Body) for a in node.attrs.values()):
        return None
    types = [None if v == ABSENT else graph.type(v) for v in node.inputs]
    data = [None if v == ABSENT else graph.const(v) for v in node.inputs]
    inferred = infer(node.op, node.attrs, types, data, len(node.outputs))
    return tuple(more_precise(old, new) for old, new in zip(node.types, inferred))


def more_precise(declared: TensorType, inferred: TensorType) -> TensorType:
    """The merged type of two types of one value; the inferred type if the two contradict each other."""
    try:
        return merge_types(declared, inferred)
    except TypeConflict:
        return inferred


def _evaluated(graph: Graph, node: Node, types: tuple[TensorType, ...]) -> tuple[Value, ...] | None:
    """The outputs of a node as small constants; None if they are not."""
    if node.op == "Shape":
        dims = graph.type(node.inputs[0]).shape
        if dims is None:
            return None
        start, end = node.attrs.get("start", 0), node.attrs.get("end")
        selected = dims[start if isinstance(start, int) else 0 : end if isinstance(end, int) else None]
        numbers = tuple(d for d in selected if isinstance(d, int))
        return (graph.leaves.numbers(numbers),) if len(numbers) == len(selected) else None
    if node.op == "Size" and (size := graph.type(node.inputs[0]).size) is not None:
        return (graph.leaves.intern(np.array(size, np.int64), DType.INT64),)
    if not types[0].const:
        return None
    if any(v in graph.producers for v in node.inputs):
        return None
    return fold_small(graph.leaves, node.op, node.attrs, node.inputs, types)


def _both(first: Edit, second: Edit) -> Edit:
    """One edit with the effect of `first` followed by `second`. `second` applies to the graph that `first` gives."""
    removed = {id(n): n for n in _leaving(first)}
    come = {id(n): n for n in _coming(first)}
    for node in _leaving(second):
        if come.pop(id(node), None) is None:
            removed[id(node)] = node
    come.update((id(n), n) for n in _coming(second))
    return Edit(first.rule, tuple(removed.values()), tuple(come.values()), (), second.outputs)


def _leaving(edit: Edit) -> Iterable[Node]:
    return (*edit.removed, *(old for old, _ in edit.rewired))


def _coming(edit: Edit) -> Iterable[Node]:
    return (*edit.added, *(new for _, new in edit.rewired))

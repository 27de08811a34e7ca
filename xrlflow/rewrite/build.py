"""Builds the target of a match: infers types, evaluates small constants, and makes an edit of the new nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from xrlflow.ir import (
    ABSENT,
    SMALL,
    Attr,
    Attrs,
    Body,
    Const,
    DType,
    Edit,
    Graph,
    Node,
    TensorType,
    TypeConflict,
    Value,
    merge_types,
    node_key,
    output_key,
    plan_edit,
)
from xrlflow.ops.infer import InferenceError, TooLarge, infer
from xrlflow.ops.schema import canonical_attrs, schema
from xrlflow.ops.tensors import dtype_of, numpy_dtype
from xrlflow.rewrite.propagate import fold_small, more_precise, propagated
from xrlflow.rewrite.rule import Contradiction, Lit, Op, Refused, RuleError, Val

_attrs_memo: dict[tuple[Any, ...], Attrs] = {}


class Draft:
    """A node whose outputs do not have their final names yet."""

    __slots__ = ("attrs", "captured", "inputs", "names", "on_runtime", "op", "temporary", "types")

    def __init__(
        self,
        op: str,
        inputs: tuple[Value, ...],
        attrs: Attrs,
        types: tuple[TensorType, ...],
        temporary: tuple[Value, ...],
        captured: int = 0,
        on_runtime: bool | None = None,
    ) -> None:
        """`on_runtime` is as in `Node`; None: as in the nodes that the edit replaces."""
        self.op = op
        self.inputs = inputs
        self.attrs = attrs
        self.types = types
        self.temporary = temporary
        self.captured = captured
        self.on_runtime = on_runtime
        self.names: tuple[Value, ...] = ()


class GraphBuilder(Op):
    """The object `op` that a rule's `target` gets. Its new values have negative ids until `edit` names them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.drafts: list[Draft] = []
        self.next = -1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.node, name)

    def val(self, value: Value) -> Val | None:
        return None if value == ABSENT else Val(self.graph, value, self.graph.type(value))

    def constant(self, data: Any, dtype: DType | None = None) -> Val:
        """Make a constant from Python numbers or an array.

        Without `dtype` Python integers become int64 and Python floats float32; an array keeps its type. Raises
        RuleError for more than `SMALL` elements, and Refused if `dtype` is not known.
        """
        if dtype == DType.UNDEFINED:
            raise Refused("an element type is not known")
        array = np.asarray(data)
        if dtype is None:
            if array.dtype == np.float64 and not isinstance(data, np.ndarray):
                dtype = DType.FLOAT
            else:
                dtype = dtype_of(array.dtype)
        array = array.astype(numpy_dtype(dtype))
        if array.size > SMALL:
            raise RuleError(f"a rule made a constant of {array.size} elements: build an expression instead")
        value = self.graph.leaves.intern(array, dtype)
        return Val(self.graph, value, self.graph.leaves.types[value])

    def node(
        self,
        name: str,
        *inputs: Any,
        attrs: Attrs | None = None,
        outputs: int = 1,
        sizes: Sequence[int] | None = None,
        type: TensorType | None = None,
        declared: Sequence[TensorType] | None = None,
        **named: Any,
    ) -> Any:
        """Add a node of operator `name` and return its output, or a tuple of its outputs.

        `inputs` are Vals, None, numbers (of the first Val's element type) or lists. `type`: the output's type if ONNX
        does not define the operator. `declared`: the types of all outputs; inferred types refine them unless the node
        has bodies. With bodies, the last inputs are the values that they capture. Raises RuleError if the inputs do not
        fit.
        """
        if sizes is not None:
            inputs = (*inputs, list(sizes))
            outputs = len(sizes)
        vals: list[Val | None] = []
        for i in inputs:
            if i is None or i.__class__ is Val:
                vals.append(i)
            elif isinstance(i, (int, float)) and not isinstance(i, bool):
                like = next((v.type.dtype for v in vals if v is not None), None)
                if like is None:
                    like = next(j.type.dtype for j in inputs if isinstance(j, Val))
                vals.append(self.constant(i, like))
            elif isinstance(i, (list, tuple)):
                value = self.graph.leaves.numbers(tuple(map(int, i)))
                vals.append(Val(self.graph, value, self.graph.leaves.types[value]))
            else:
                vals.append(self.constant(i))
        while vals and vals[-1] is None:
            vals.pop()
        types = [None if v is None else v.type for v in vals]
        full_attrs = self._attrs(name, attrs, named, types)
        data = [None if v is None else self.graph.leaves.consts.get(v.value) for v in vals]
        if type is not None:
            out_types: tuple[TensorType, ...] = (type,)
        elif declared is not None:
            outputs = len(declared)
            out_types = _with_declared(name, full_attrs, types, data, declared)
        else:
            out_types = _inferred(name, full_attrs, types, data, outputs)
        values = tuple([ABSENT if v is None else v.value for v in vals])
        constants = self._fold(name, full_attrs, values, out_types) if out_types[0].const else None
        if constants is not None:
            folded = tuple([Val(self.graph, c, self.graph.leaves.types[c]) for c in constants])
            return folded[0] if outputs == 1 else folded
        temporary = tuple([Value(self.next - k) for k in range(outputs)])
        self.next -= outputs
        captured = sum([len(a.captured) for a in full_attrs.values() if a.__class__ is Body])
        self.drafts.append(Draft(name, values, full_attrs, out_types, temporary, captured))
        returned = tuple([Val(self.graph, v, t) for v, t in zip(temporary, out_types)])
        return returned[0] if outputs == 1 else returned

    def again(self, node: Node, on_runtime: bool, changed: Mapping[Value, Val]) -> tuple[Val, ...]:
        """A copy of a node of the graph, with another `on_runtime`, that reads `changed` values. Returns its
        outputs.
        """
        inputs = tuple([changed[v].value if v in changed else v for v in node.inputs])
        temporary = tuple([Value(self.next - k) for k in range(len(node.outputs))])
        self.next -= len(node.outputs)
        self.drafts.append(
            Draft(node.op, inputs, node.attrs, node.types, temporary, node.captured, on_runtime)
        )
        return tuple([Val(self.graph, v, t) for v, t in zip(temporary, node.types)])

    @staticmethod
    def _attrs(
        name: str, attrs: Attrs | None, named: dict[str, Any], types: list[TensorType | None]
    ) -> Attrs:
        if not named:
            return attrs if attrs is not None else canonical_attrs(name, {}, types)
        key = (
            name,
            attrs,
            tuple(types),
            *((k, tuple(v) if isinstance(v, list) else v) for k, v in named.items()),
        )
        cached = _attrs_memo.get(key)
        if cached is None:
            merged: dict[str, Attr] = dict(attrs or {})
            for k, v in named.items():
                if v is None:
                    merged.pop(k, None)
                elif isinstance(v, Lit):
                    merged[k] = v.text
                else:
                    merged[k] = tuple(v) if isinstance(v, list) else v
            cached = _attrs_memo[key] = canonical_attrs(name, merged, types)
        return cached

    def _fold(
        self, op: str, attrs: Attrs, inputs: tuple[Value, ...], types: tuple[TensorType, ...]
    ) -> tuple[Value, ...] | None:
        """The outputs as small constants; None unless all inputs and outputs are small constants."""
        return fold_small(self.graph.leaves, op, attrs, inputs, types)

    def edit(self, rule: str, replaced: Sequence[Value], results: Sequence[Val]) -> Edit:
        """The edit that replaces the values `replaced` by `results`.

        Raises RuleError if the type of a result contradicts the type of the value it replaces.
        """
        graph = self.graph
        adopted: dict[Value, Value] = {}  # temporary value -> the value whose name it gets
        for old, new in zip(replaced, results):
            if new.value < 0 and new.value not in adopted:
                adopted[new.value] = old
        adopted_values = set(adopted.values())
        named: dict[Value, Value] = {}
        nodes: list[Node] = []
        fresh: dict[Value, Node] = {}
        # If ONNX Runtime runs all replaced nodes, it also runs the new ones.
        all_on_runtime = all(v in graph.producers and graph.producers[v].on_runtime for v in replaced)
        for draft in self._live(results):
            inputs = tuple([named[i] if i < 0 else i for i in draft.inputs])
            key = node_key(draft.op, draft.attrs, inputs)
            reuse: Node | None = None
            if adopted.keys().isdisjoint(draft.temporary):
                salt = 0
                while True:
                    outs = tuple([output_key(key, k, salt) for k in range(len(draft.temporary))])
                    existing = fresh.get(outs[0]) or graph.producers.get(outs[0])
                    if existing is None and all(o not in graph.producers for o in outs):
                        break
                    same = existing is not None and existing.key == key and existing.outputs == outs
                    if same and adopted_values.isdisjoint(outs):
                        reuse = (
                            existing  # the same node exists: share it, unless this edit replaces its outputs
                        )
                        break
                    salt += 1
            else:
                outs = tuple([adopted.get(t) or self._unused(key, k) for k, t in enumerate(draft.temporary)])
            named.update(zip(draft.temporary, outs))
            if reuse is not None:
                continue
            types = tuple(
                [
                    _adopt(rule, graph, o, t) if temp in adopted else t
                    for o, t, temp in zip(outs, draft.types, draft.temporary)
                ]
            )
            on_runtime = all_on_runtime if draft.on_runtime is None else draft.on_runtime
            node = Node(draft.op, inputs, outs, types, draft.attrs, draft.captured, on_runtime)
            nodes.append(node)
            for o in outs:
                fresh[o] = node
        targets = [named[new.value] if new.value < 0 else new.value for new in results]
        for old, new, target in zip(replaced, results, targets):
            if target != old:
                _adopt(rule, graph, old, new.type)
        return self._propagate(plan_edit(graph, rule, nodes, _aliases(rule, replaced, targets)))

    def _propagate(self, edit: Edit) -> Edit:
        """The edit, extended by constants and types that follow from it (`propagate.propagated`)."""
        return propagated(self.graph, edit)

    def _unused(self, key: int, index: int) -> Value:
        salt = 0
        while (value := output_key(key, index, salt)) in self.graph.producers:
            salt += 1
        return value

    def _live(self, results: Sequence[Val]) -> list[Draft]:
        """The drafts that the results need, in the order in which they were added."""
        required = {r.value for r in results}
        live: list[Draft] = []
        for draft in reversed(self.drafts):
            if not required.isdisjoint(draft.temporary):
                required.update(draft.inputs)
                live.append(draft)
        return live[::-1]


def _aliases(rule: str, replaced: Sequence[Value], targets: Sequence[Value]) -> dict[Value, Value]:
    """For each replaced value, the value that its readers read instead. Raises RuleError if values replace each other
    in a circle.
    """
    aliases = {old: target for old, target in zip(replaced, targets) if target != old}
    for old in aliases:  # the value that replaces `old` may be replaced itself
        visited = {old}
        while aliases[old] in aliases:
            aliases[old] = aliases[aliases[old]]
            if aliases[old] in visited:
                raise RuleError(f"{rule}: its results stand for each other in a circle")
            visited.add(aliases[old])
    return aliases


def _adopt(rule: str, graph: Graph, old: Value, new: TensorType) -> TensorType:
    """The merged type of a replaced value and of the value that replaces it.

    Raises Contradiction if the types contradict each other. If a node with bodies computed the replaced value, its type
    is only what the file declares; then it raises Refused.
    """
    try:
        return merge_types(graph.type(old), new)
    except TypeConflict as error:
        maker = graph.producers.get(old)
        if maker is not None and any(isinstance(a, Body) for a in maker.attrs.values()):
            raise Refused("the file declares another type of what a body computes") from error
        raise Contradiction(f"{rule}: the target's type does not fit what it replaces: {error}") from error


def _inferred(
    name: str,
    attrs: Attrs,
    types: Sequence[TensorType | None],
    data: Sequence[Any],
    outputs: int,
) -> tuple[TensorType, ...]:
    try:
        return infer(name, attrs, types, data, outputs)
    except TooLarge as error:
        raise Refused(str(error)) from error
    except InferenceError as error:
        raise RuleError(f"a target's node does not fit its inputs: {error}") from error


def _with_declared(
    op: str,
    attrs: Attrs,
    types: Sequence[TensorType | None],
    data: Sequence[Const | None],
    declared: Sequence[TensorType],
) -> tuple[TensorType, ...]:
    """The types of a node's outputs: declared and inferred types merged. If they conflict, the inferred type counts."""
    if schema(op) is None or any(isinstance(a, Body) for a in attrs.values()):
        return tuple(declared)
    try:
        inferred = infer(op, attrs, types, data, len(declared))
    except InferenceError:  # the file that declares the types may know more than inference
        return tuple(t.as_const(False) for t in declared)
    return tuple(more_precise(old, new) for old, new in zip(declared, inferred))

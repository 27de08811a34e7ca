"""Reads ONNX files as graphs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx.inliner
import onnx.numpy_helper
import onnx.shape_inference
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from xrlflow.common.sizes import Range, Shapes
from xrlflow.ir import (
    ABSENT,
    SMALL,
    Attr,
    Attrs,
    Body,
    Const,
    DType,
    Graph,
    Leaves,
    Node,
    RawAttr,
    TensorType,
    TypeConflict,
    Value,
    digest,
    dims,
    merge_types,
    mix,
    output_key,
)
from xrlflow.onnxio import declared, protos, versions
from xrlflow.onnxio import shapes as dimensions
from xrlflow.onnxio.backwards import write_ends
from xrlflow.onnxio.declared import Contradiction
from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.inference import infer_shapes
from xrlflow.onnxio.malformed import check_functions, check_inputs, check_structure, reading
from xrlflow.onnxio.model import ON_RUNTIME, ImportedModel, NodeLabel, Recipe
from xrlflow.onnxio.nodes import check_nodes, check_types
from xrlflow.onnxio.tensors import ConstPool, TensorStore, array_const
from xrlflow.onnxio.wire import NestedError, WireError, strip_model
from xrlflow.ops import symbolic_values, weights
from xrlflow.ops.contrib import CONTRIB, OPERATORS
from xrlflow.ops.infer import UNKNOWN, InferenceError, has_types, infer, type_of_proto
from xrlflow.ops.schema import LATER, OPSET, canonical_attrs, is_foldable
from xrlflow.ops.symbolic_shapes import refine
from xrlflow.ops.symbolic_values import Known
from xrlflow.storage.files import StandardInput

# A small constant with more bytes than this is written as the node that computes it, if the node needs at most a
# quarter.
_COMPACT = 256

# The bytes that mark a flatbuffer of ONNX Runtime. They follow the four bytes of its root.
_ORT_FORMAT = b"ORTM"

Source = str | os.PathLike[str] | bytes | onnx.ModelProto


def load(source: Source, *, shapes: Shapes | None = None, fix_shapes: bool = False) -> ImportedModel:
    """Read a model: a path, the bytes of a file, or a ModelProto.

    `shapes` gives whole shapes of some inputs. They bind the symbols of their dimensions (`ImportedModel.bindings`), or
    limit them (`ImportedModel.ranges`); with `fix_shapes` the numbers also replace these symbols in the model. Weights
    stay in the memory-mapped file. If this file is written to, the model cannot be exported any more
    (`TensorStore.check_unchanged`). Replacing the file by another one is harmless. Raises ModelError.
    """
    store = _open(source)
    with reading(store.name, "the model"):
        return _loaded(store, shapes, fix_shapes)


def _loaded(store: TensorStore, shapes: Shapes | None, fix_shapes: bool) -> ImportedModel:
    stripped, proto = _parse(store)
    versions.merge_imports(proto)
    check_structure(store.name, proto.graph)
    check_inputs(store.name, proto.graph)
    external_bytes = 0
    for tensor in protos.tensors(proto.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            external_bytes += store.check(tensor)  # raises at once if data is missing

    proto, functions = _inlined(store, proto)
    check_nodes(store.name, proto)
    nodes_before = protos.count_nodes(proto.graph)
    _drop_weights_from_inputs(proto)
    try:
        notes = check_types(store.name, proto)
    except ModelError:
        for tensor in protos.tensors(proto.graph):
            store.const(tensor)  # if a tensor is damaged, its error explains more
        raise
    frame = _frame(proto)
    dimensions.name_dimensions(proto)
    dims.start_deciding()
    bindings: dict[str, int] = {}
    ranges: dict[str, Range] = {}
    if shapes:
        bindings, ranges = dimensions.bind(store.name, proto, shapes)
        if fix_shapes:
            dimensions.fix(frame, dimensions.as_declared(frame, proto, bindings), outputs=True)
            dimensions.fix(proto, bindings)
    opset = versions.to_canonical(store.name, proto)
    write_ends(proto.graph)
    names = {v.name for v in proto.graph.input}
    overridable = {t.name: store.const(t) for t in proto.graph.initializer if t.name in names}
    importer, graph = _imported(store, proto, overridable)
    if bindings and not fix_shapes:
        bindings = dimensions.solve(graph, bindings)
    versions.set_opset(frame, opset)
    return ImportedModel(
        name=store.name,
        graph=graph,
        opset=opset,
        frame=frame,
        bindings=bindings,
        ranges=ranges,
        fixed=fix_shapes,
        nodes_before=nodes_before,
        overridable=overridable,
        labels=importer.labels,
        recipes=importer.recipes,
        store=store,
        stripped=stripped,
        size=store.data.nbytes + external_bytes,
        external=bool(store.files),
        declared=importer.declared,
        functions=functions,
        notes=(*notes, *importer.notes),
    )


def _imported(
    store: TensorStore, proto: onnx.ModelProto, overridable: Mapping[str, Const]
) -> tuple[_Importer, Graph]:
    """The graph of a model at the canonical opset. Raises ModelError if a declared element type is wrong."""
    importer = _Importer(store, declared.claims(proto), declared.in_loops(proto))
    try:
        return importer, importer.main(*_typed(declared.forget(proto)), overridable)
    except Contradiction as error:
        importer = _Importer(store, {}, set())
        importer.note(error)
    try:
        return importer, importer.main(*_typed(declared.forget(proto, loops=True)), overridable)
    except Contradiction as error:  # no runtime accepts a wrong element type
        raise ModelError(f"{store.name}: {error}: the file is damaged, export it again") from error


def name_of(source: Source) -> str:
    """The name of a model in messages."""
    if isinstance(source, StandardInput):
        return source.name
    if isinstance(source, bytes):
        return "<bytes>"
    return "<ModelProto>" if isinstance(source, onnx.ModelProto) else os.fspath(source)


def _open(source: Source) -> TensorStore:
    if isinstance(source, bytes):
        return TensorStore(name_of(source), memoryview(source), None)
    if isinstance(source, onnx.ModelProto):
        try:
            return TensorStore("<ModelProto>", memoryview(source.SerializeToString()), None)
        except (EncodeError, ValueError) as error:
            raise ModelError(
                "<ModelProto>: it is over 2 GB: save it with external data and pass the path"
            ) from error
    path = os.fspath(source)
    try:
        return TensorStore.of_file(path)
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file: check the path") from error
    except IsADirectoryError as error:
        raise ModelError(f"{path}: is a folder: pass the .onnx file in it") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}): check its permissions") from error


def _parse(store: TensorStore) -> tuple[bytes, onnx.ModelProto]:
    """The model without its large tensors: serialised, and as a proto."""
    if store.data.nbytes == 0:
        raise ModelError(f"{store.name}: the file is empty: export or download it again")
    wrong = f"{store.name}: not an ONNX model, or cut off: export or download it again"
    if bytes(store.data[4:8]) == _ORT_FORMAT:
        raise ModelError(
            f"{store.name}: is in ONNX Runtime's own format (.ort), which cannot be optimised: "
            "pass the ONNX file that it was made from"
        )
    try:
        stripped = strip_model(store.data)
        proto = onnx.ModelProto.FromString(stripped)
    except (WireError, DecodeError) as error:
        if isinstance(error, NestedError) or "MaxDepth" in str(error):
            raise ModelError(
                f"{store.name}: bodies are nested too deeply (in more than 30 others): unroll or split the model"
            ) from error
        raise ModelError(wrong) from error
    if not proto.HasField("graph") or not (proto.ir_version or proto.opset_import):
        raise ModelError(wrong)
    if not proto.opset_import:
        raise ModelError(f"{store.name}: names no opset: the file is cut off, export or download it again")
    if not proto.graph.output:
        raise ModelError(f"{store.name}: the graph has no outputs, so there is nothing to compute")
    return stripped, proto


def _inlined(
    store: TensorStore, proto: onnx.ModelProto
) -> tuple[onnx.ModelProto, tuple[onnx.FunctionProto, ...]]:
    """The model with its functions inlined, if their opsets allow that, and the functions that are not inlined.

    A function with the name of an operator that ONNX Runtime has is not: ONNX Runtime runs its own operator, whatever
    the function says (findings/a_function_never_replaces_an_operator.sh). The function is for other runtimes.
    """
    if not proto.functions:
        return proto, ()
    check_functions(store.name, proto)
    opset = versions.opset_of(proto)
    kept = [f for f in proto.functions if _is_operator(f, opset)]
    inlined = [f for f in proto.functions if not _is_operator(f, opset)]
    reached = _reached(kept, inlined)
    if kept:
        del proto.functions[:]
        proto.functions.extend(inlined)
    if not inlined:
        return proto, reached
    _write_defaults(proto)
    try:
        return onnx.inliner.inline_local_functions(proto, convert_version=True), reached
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{store.name}: its functions cannot be inlined: {error}") from error


# Operators of ONNX Runtime's own in ONNX's domain, at every opset and at old ones, beside those of ONNX. It takes no
# notice of a function's overload. Of the internal domains it has all operators.
_OWN = frozenset({"SimplifiedLayerNormalization", "LayerNormalization", "MeanVarianceNormalization"})
_OWN_BEFORE_10 = frozenset(
    {"Affine", "Crop", "DynamicSlice", "GRUUnit", "GivenTensorFill", "ImageScaler"}
    | {"ParametricSoftplus", "Scale", "ScaledTanh", "ThresholdedRelu"}
)
_INTERNAL = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})


def _is_operator(function: onnx.FunctionProto, opset: int | None) -> bool:
    """Whether ONNX Runtime has an operator with the name of a function, in a model of this opset."""
    name, domain = function.name, function.domain
    if domain in ("", "ai.onnx"):
        own = name in _OWN or (name in _OWN_BEFORE_10 and opset is not None and opset < 10)
        return own or (opset is not None and onnx.defs.has(name, opset, ""))
    if domain == "ai.onnx.ml":
        return onnx.defs.has(name, domain)
    return domain in _INTERNAL or (f"{domain}::" == CONTRIB and name in OPERATORS)


def _reached(
    kept: Sequence[onnx.FunctionProto], others: Sequence[onnx.FunctionProto]
) -> tuple[onnx.FunctionProto, ...]:
    """The functions `kept`, and those of `others` that they call."""
    bodies = {(f.domain, f.name, f.overload): f for f in others}
    found, work = list(kept), list(kept)
    while work:
        for node in protos.all_nodes(work.pop()):
            called = bodies.pop((node.domain, node.op_type, node.overload), None)
            if called is not None:
                found.append(called)
                work.append(called)
    return tuple(
        onnx.FunctionProto.FromString(f.SerializeToString()) for f in found
    )  # the model itself is freed


def _write_defaults(proto: onnx.ModelProto) -> None:
    """Write the functions' default attributes into calls that lack them, in place.

    ONNX's inliner ignores these defaults: nodes inside would get the defaults of their own operators instead.
    """
    defaults = {(f.domain, f.name, f.overload): f.attribute_proto for f in proto.functions}
    for owner in (proto.graph, *proto.functions):
        for node in protos.all_nodes(owner):
            present = {a.name for a in node.attribute}
            attributes = defaults.get((node.domain, node.op_type, node.overload), ())
            node.attribute.extend(a for a in attributes if a.name not in present)


def _drop_weights_from_inputs(proto: onnx.ModelProto) -> None:
    """Remove initialisers from the inputs. Before IR version 4 all had to be listed there, and none could be
    overridden.
    """
    if proto.ir_version >= 4:
        return
    weights_ = {t.name for t in proto.graph.initializer}
    remaining = [v for v in proto.graph.input if v.name not in weights_]
    del proto.graph.input[:]
    proto.graph.input.extend(remaining)


def _frame(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model without nodes, initialisers and value infos."""
    frame = onnx.ModelProto()
    frame.CopyFrom(proto)
    for field in ("node", "initializer", "sparse_initializer", "value_info"):
        frame.graph.ClearField(field)
    return frame


def _typed(proto: onnx.ModelProto) -> tuple[onnx.GraphProto, dict[str, TensorType]]:
    """The model's graph with inferred types, and the types that the file declares.

    For operators that ONNX does not define, declared types are believed. Raises Contradiction if a declared element
    type is not the inferred one.
    """
    infos = {v.name: v.type for v in proto.graph.value_info}
    unknown = {name for node in proto.graph.node if not declared.is_defined(node) for name in node.output}
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.graph.value_info[:]
    bare.graph.value_info.extend(v for v in proto.graph.value_info if v.name in unknown)
    dimensions.without_claims(bare.graph)
    inputs = {v.name for v in proto.graph.input}  # inference would use these inputs' defaults
    remaining = [t for t in proto.graph.initializer if t.name not in inputs]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(remaining)
    try:
        typed = infer_shapes(bare)
    except (onnx.shape_inference.InferenceError, RuntimeError):
        # ONNX's inference fails for the whole model. Node by node it may still find most types.
        return bare.graph, {name: dimensions.without_symbols(type_of_proto(t)) for name, t in infos.items()}
    dimensions.without_names_of_elements(typed.graph)
    believed: dict[str, TensorType] = {}
    inferred = {v.name: v.type for v in typed.graph.value_info}
    for name, type in infos.items():
        claim = dimensions.without_symbols(type_of_proto(type))
        if name in inferred:
            declared.check(name, claim, type_of_proto(inferred[name]))
        believed[name] = claim
    return typed.graph, believed


class _Scope:
    """A graph under construction: its names, and the values that it captures from the graph around it."""

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.leaves = Leaves()
        self.values: dict[str, Value] = {}
        self.types: dict[str, TensorType] = {}
        self.nodes: list[Node] = []
        self.of_node: dict[Value, TensorType] = {}
        self.captured: dict[Value, Value] = {}  # enclosing value -> input of this graph
        self.elements: dict[Value, Known] = {}  # of values computed from dimensions

    def type(self, value: Value) -> TensorType:
        computed = self.of_node.get(value)
        return computed if computed is not None else self.leaves.types[value]

    def const(self, value: Value) -> Const | None:
        return self.leaves.consts.get(value)

    def find(self, name: str) -> Value | None:
        """The value with a name. If necessary it is captured from the graphs around this one. Constants are shared."""
        value = self.values.get(name)
        if value is not None or self.parent is None:
            return value
        outer = self.parent.find(name)
        if outer is None:
            return None
        const = self.parent.const(outer)
        if const is not None:
            self.leaves.add_const(outer, const)
            self.leaves.names.setdefault(outer, name)
            self.values[name] = outer
            return outer
        if outer not in self.captured:
            inner = mix(digest("captured"), len(self.captured))
            self.captured[outer] = inner
            self.leaves.types[inner] = self.parent.type(outer).as_const(False)
            self.leaves.names[inner] = name
            if outer in self.parent.elements:
                self.elements[inner] = self.parent.elements[outer]
        self.values[name] = self.captured[outer]
        return self.values[name]


@dataclass(frozen=True, slots=True, eq=False)
class _NodeSpec:
    """A node of the file in canonical form."""

    op: str
    attrs: Attrs
    inputs: Sequence[Value]
    captured: Sequence[Value]  # values of this graph that the node's bodies read
    types: Sequence[TensorType | None]  # of the inputs; None: the input is absent
    elements: Sequence[Known | None]  # of inputs that are computed from dimensions, as far as known
    outputs: Sequence[str]  # names; empty if nobody reads the output

    @property
    def of_dimensions(self) -> bool:
        """Whether an input is computed from dimensions."""
        return any(e is not None for e in self.elements)


class _Importer:
    """Imports one model.

    `claims`: types that the file declares and that are not believed. `doubtful`: values whose declarations are believed
    until a contradiction is found. `notes`: messages about wrong declarations.
    """

    def __init__(
        self, store: TensorStore, claims: Mapping[str, TensorType], doubtful: AbstractSet[str]
    ) -> None:
        self.store = store
        self.claims = claims
        self.doubtful = doubtful
        self.notes: tuple[str, ...] = ()
        self.declared: dict[Value, tuple[int, ...]] = {}
        self.pool = ConstPool()
        self.labels: dict[Value, NodeLabel] = {}
        self.recipes: dict[Value, Recipe] = {}
        self.dimensions = dimensions.DimensionNames()

    def main(
        self, proto: onnx.GraphProto, believed: Mapping[str, TensorType], overridable: Mapping[str, Const]
    ) -> Graph:
        scope = _Scope(None)
        inputs = []
        for info in proto.input:
            value = mix(digest("input"), digest(info.name))
            inputs.append(value)
            scope.values[info.name] = value
            scope.leaves.types[value] = type_of_proto(info.type)
            self.dimensions.add(scope.leaves.types[value])
            scope.leaves.names[value] = info.name
        scope.types.update(believed)
        return self._graph(proto, scope, inputs, overridable)

    def _body(self, proto: onnx.GraphProto, parent: _Scope) -> tuple[Body, tuple[Value, ...]]:
        """A body, and the values of the enclosing graph that it captures."""
        scope = _Scope(parent)
        inputs = []
        for at, info in enumerate(proto.input):
            value = mix(digest("formal"), at)
            inputs.append(value)
            scope.values[info.name] = value
            scope.leaves.types[value] = type_of_proto(info.type)
            scope.leaves.names[value] = info.name
        graph = self._graph(proto, scope, inputs, {})
        return Body(graph, tuple(scope.captured.values()), _text(proto.name)), tuple(scope.captured)

    def _graph(
        self, proto: onnx.GraphProto, scope: _Scope, inputs: list[Value], overridable: Mapping[str, Const]
    ) -> Graph:
        for info in (*proto.value_info, *proto.output):
            if info.type.WhichOneof("value"):
                scope.types[info.name] = _merged(type_of_proto(info.type), scope.types.get(info.name))
        for tensor in proto.initializer:
            if tensor.name not in overridable:
                self._name_const(scope, tensor.name, self.store.const(tensor))
        for sparse in proto.sparse_initializer:
            name = sparse.values.name
            node = onnx.helper.make_node("Constant", [], [name], sparse_value=sparse)
            scope.types[name] = TensorType(DType(sparse.values.data_type), tuple(sparse.dims))
            self._node(node, scope)
        try:
            order = protos.live_nodes(proto)
        except ValueError as error:
            raise ModelError(f"{self.store.name}: {error}: the file is damaged, export it again") from error
        for node in order:
            with reading(self.store.name, f"node {node.name!r} ({node.op_type})"):
                self._node(node, scope)
        outputs = []
        for info in proto.output:
            outputs.append(self._find(scope, info.name, f"output {info.name!r}"))
        nodes, used = _needed(scope.nodes, outputs)  # after folding, some nodes have no reader
        scope.captured = {outer: inner for outer, inner in scope.captured.items() if inner in used}
        return Graph.make(nodes, (*inputs, *scope.captured.values()), tuple(outputs), scope.leaves)

    def _find(self, scope: _Scope, name: str, reader: str) -> Value:
        value = scope.find(name)
        if value is None:
            raise ModelError(
                f"{self.store.name}: {reader} reads {name!r}, which nothing makes: the file is damaged, export it again"
            )
        return value

    def _name_const(self, scope: _Scope, name: str, const: Const) -> None:
        value = self.pool.add(const, scope.leaves)
        scope.leaves.names.setdefault(value, name)
        scope.values[name] = value

    def _node(self, proto: onnx.NodeProto, scope: _Scope) -> None:
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        op = f"{domain}::{proto.op_type}" if domain else proto.op_type
        if op == "Constant" and (const := self._constant(proto)) is not None:
            self._name_const(scope, proto.output[0], const)
            return
        spec = self._spec(op, proto, scope)
        try:
            types = self._output_types(spec, scope)
        except InferenceError:  # the node fails if it runs (perhaps in a branch): no rule may match it
            op = op if domain else f"{LATER}{OPSET}::{op}"  # rules do not name other domains
            spec = replace(spec, op=op)
            types = [scope.types.get(name, UNKNOWN) for name in spec.outputs]
        for name, type in zip(spec.outputs, types):
            if name in self.claims:
                self._compare(name, type.as_const(False))
        is_const = (
            bool(spec.inputs)
            and is_foldable(op)
            and not spec.captured
            and all(t is None or (t.const and t.dtype != DType.UNDEFINED) for t in spec.types)
            and all(t.dtype != DType.UNDEFINED for t in types)
        )
        if self._folded(spec, types, is_const, scope):
            return
        node = self._add(spec, [t.as_const(is_const) for t in types], scope)
        if not is_const:
            self._compute_elements(spec, node, types[0], scope)
        if any(p.key == ON_RUNTIME for p in proto.metadata_props):
            scope.nodes[-1] = node.with_runtime(True)
        if proto.name or proto.doc_string or proto.metadata_props:
            metadata = tuple(
                (_text(p.key), _text(p.value)) for p in proto.metadata_props if p.key != ON_RUNTIME
            )
            self.labels[node.id] = NodeLabel(op, proto.name, _text(proto.doc_string), metadata)

    def _spec(self, op: str, proto: onnx.NodeProto, scope: _Scope) -> _NodeSpec:
        """A node in canonical form. Raises ModelError if the node reads a value that nothing computes."""
        reader = f"node {proto.name!r} ({op})" if proto.name else f"the {op} that makes {proto.output[0]!r}"
        inputs = [self._find(scope, name, reader) if name else ABSENT for name in proto.input]
        minimum = 2 if op == "Loop" else 0  # the trip count and the condition are always listed
        while len(inputs) > minimum and inputs[-1] == ABSENT:
            inputs.pop()
        if op == "Range":
            inputs = [_scalar(scope, v) for v in inputs]
        if op == "Squeeze" and len(inputs) == 2 and scope.type(inputs[1]).shape == (0,):
            inputs.pop()  # for ONNX Runtime no axes are all axes of size 1
        raw, captured = self._attributes(proto, inputs, scope)
        types = [None if v == ABSENT else scope.type(v) for v in inputs]
        if op == "Reshape" and raw.get("allowzero") and len(inputs) == 2:
            shape = scope.const(inputs[1])
            if shape is not None and shape.array is not None and shape.array.all():
                del raw["allowzero"]  # it only matters if the shape has a 0
        outputs = list(proto.output)
        while len(outputs) > 1 and not outputs[-1]:
            outputs.pop()
        elements = [scope.elements.get(v) for v in inputs]
        return _NodeSpec(op, canonical_attrs(op, raw, types), inputs, captured, types, elements, outputs)

    def _attributes(
        self, proto: onnx.NodeProto, inputs: Sequence[Value], scope: _Scope
    ) -> tuple[dict[str, Attr], list[Value]]:
        """The attributes of a node, and the values of this graph that its bodies capture."""
        raw: dict[str, Attr] = {}
        captured: list[Value] = []
        for attribute in sorted(proto.attribute, key=lambda a: a.name):
            if attribute.type == onnx.AttributeProto.GRAPH:
                bodies = [(attribute.name, attribute.g)]
            elif attribute.type == onnx.AttributeProto.GRAPHS:
                bodies = [(f"{attribute.name}[{i:03}]", g) for i, g in enumerate(attribute.graphs)]
            else:
                raw[attribute.name] = self._attribute(attribute)
                continue
            for name, graph in bodies:
                self._type_formals(proto, graph, inputs, scope)
                body, outer = self._body(graph, scope)
                raw[name] = body
                captured.extend(outer)
        return raw, captured

    def _folded(self, spec: _NodeSpec, types: Sequence[TensorType], is_const: bool, scope: _Scope) -> bool:
        """If possible, make the outputs of a node constants. Returns whether that was done."""
        arrays = self._fold(spec, types, scope) if is_const else None
        if arrays is None and spec.op in ("Shape", "Size"):
            arrays = _fold_shape(spec.op, spec.attrs, spec.types[0])
        if arrays is None:
            return False
        for name, array, type in zip(spec.outputs, arrays, types):
            if name:
                self._name_const(scope, name, array_const(array, type.dtype))
        if is_const and len(spec.outputs) == 1:
            consts = tuple(None if v == ABSENT else scope.const(v) for v in spec.inputs)
            recipe = Recipe(spec.op, spec.attrs, consts)
            if arrays[0].nbytes > max(_COMPACT, 4 * recipe.nbytes):
                self.recipes.setdefault(scope.values[spec.outputs[0]], recipe)
        return True

    def _add(self, spec: _NodeSpec, types: Sequence[TensorType], scope: _Scope) -> Node:
        """Add a node to the graph, and name its outputs."""
        inputs = (*spec.inputs, *spec.captured)
        key, salt = mix(digest(spec.op), spec.attrs.digest, *inputs), 0
        while output_key(key, 0, salt) in scope.of_node:
            salt += 1
        values = tuple(output_key(key, i, salt) for i in range(len(spec.outputs)))
        node = Node(spec.op, inputs, values, tuple(types), spec.attrs, len(spec.captured))
        scope.nodes.append(node)
        scope.of_node.update(zip(values, node.types))
        for name, value in zip(spec.outputs, values):
            if name:
                scope.values[name] = value
                scope.leaves.names[value] = name
                claim = self.claims.get(name)
                numbers = () if claim is None else tuple(d for d in claim.shape or () if isinstance(d, int))
                if numbers and claim is not None and len(numbers) == claim.rank:
                    self.declared[value] = numbers
        return node

    def _compute_elements(self, spec: _NodeSpec, node: Node, type: TensorType, scope: _Scope) -> None:
        """Store the elements of a node's first output, if the node computes them from dimensions. `type` is the
        output's type.
        """
        if spec.op in ("Shape", "Size") or spec.of_dimensions:
            elements = self._with_consts(spec, scope)
            computed = symbolic_values.values(spec.op, spec.attrs, spec.types, elements, type)
            if computed is not None:
                scope.elements[node.outputs[0]] = computed

    def _type_formals(
        self, node: onnx.NodeProto, body: onnx.GraphProto, inputs: Sequence[Value], scope: _Scope
    ) -> None:
        """For inputs of a loop's body whose type the file leaves out, set the element type, in place.

        Raises Contradiction if an initial state has another type than the body declares.
        """
        actual: list[TensorType] = []
        states = 0
        if node.op_type == "Loop":
            scalars = (TensorType(DType.INT64, None), TensorType(DType.BOOL, None))
            actual = [*scalars, *(scope.type(v) if v != ABSENT else UNKNOWN for v in inputs[2:])]
            states = len(actual)
        elif node.op_type == "Scan":
            actual = [scope.type(v) if v != ABSENT else UNKNOWN for v in inputs]
            states = len(actual) - sum(a.i for a in node.attribute if a.name == "num_scan_inputs")
        for at, (info, type) in enumerate(zip(body.input, actual)):
            if not info.type.WhichOneof("value") and type.dtype != DType.UNDEFINED:
                info.type.tensor_type.elem_type = int(type.dtype)
            elif at < states:
                declared.check(
                    info.name, dimensions.without_symbols(type_of_proto(info.type)), type.as_const(False)
                )

    def _attribute(self, proto: onnx.AttributeProto) -> Attr:
        kind, kinds = proto.type, onnx.AttributeProto
        if kind == kinds.INT:
            return proto.i
        if kind == kinds.FLOAT:
            return proto.f
        if kind == kinds.INTS and proto.ints:
            return tuple(proto.ints)
        if kind == kinds.FLOATS and proto.floats:
            return tuple(proto.floats)
        try:
            if kind == kinds.STRING:
                return proto.s.decode()
            if kind == kinds.STRINGS and proto.strings:
                return tuple(s.decode() for s in proto.strings)
        except UnicodeDecodeError:  # not text: becomes a RawAttr with the bytes, below
            pass
        copy = onnx.AttributeProto()
        copy.CopyFrom(proto)
        self.store.fill(protos.tensors_of_attribute(copy))
        if kind == kinds.TENSOR:
            copy.t.ClearField("name")
        copy.ClearField("doc_string")
        return RawAttr(copy.SerializeToString(deterministic=True))

    def _constant(self, node: onnx.NodeProto) -> Const | None:
        """The tensor of a Constant node; None if it is sparse."""
        attribute = node.attribute[0]
        if attribute.name == "value":
            return self.store.const(attribute.t)
        if attribute.name in ("value_int", "value_ints"):
            value = onnx.helper.get_attribute_value(attribute)
            return array_const(np.array(value, np.int64), DType.INT64)
        if attribute.name in ("value_float", "value_floats"):
            value = onnx.helper.get_attribute_value(attribute)
            return array_const(np.array(value, np.float32), DType.FLOAT)
        if attribute.name in ("value_string", "value_strings"):
            value = onnx.helper.get_attribute_value(attribute)
            strings = value.decode() if isinstance(value, bytes) else [s.decode() for s in value]
            return array_const(np.array(strings, object), DType.STRING)
        return None

    def _output_types(self, spec: _NodeSpec, scope: _Scope) -> list[TensorType]:
        """The types of a node's outputs. Raises InferenceError if the types or values of its inputs do not fit it."""
        op, attrs, types, outputs = spec.op, spec.attrs, spec.types, spec.outputs
        believed = [scope.types.get(name, UNKNOWN) for name in outputs]
        doubtful = not self.doubtful.isdisjoint(outputs)
        if any(isinstance(a, Body) for a in attrs.values()):
            if self.doubtful:
                declared.check_bodies(op, attrs, outputs, believed)
            return believed
        sure = not doubtful and all(t.other is not None for t in believed)
        if sure or not has_types(op):
            return believed
        data = [None if v == ABSENT else scope.const(v) for v in spec.inputs]
        own = infer(op, attrs, types, data, len(outputs))
        if spec.of_dimensions:
            own = refine(op, attrs, types, self._with_consts(spec, scope), own)
        both = [
            declared.check(name, b, a, proven=True) if name in self.doubtful else _merged(a, b)
            for name, a, b in zip(outputs, own, believed)
        ]
        return [self.dimensions(t) for t in both]

    def _compare(self, name: str, inferred: TensorType) -> None:
        """Add a note if the type that the file declares for a value is wrong."""
        try:
            declared.check(name, self.claims[name], inferred)
        except Contradiction as error:
            self.note(error)

    def note(self, error: Contradiction) -> None:
        """Add a note about a wrong declaration, unless one was added before: one error often causes others."""
        self.notes = self.notes or (f"what the model declares of its values is not believed: {error}",)

    def _with_consts(self, spec: _NodeSpec, scope: _Scope) -> list[Known | None]:
        """The elements of a node's inputs, as far as known; they include those of small constants."""
        consts = [
            None if v == ABSENT or e is not None else scope.const(v)
            for v, e in zip(spec.inputs, spec.elements)
        ]
        return [
            e if c is None or c.array is None else symbolic_values.of_array(c.array)
            for e, c in zip(spec.elements, consts)
        ]

    def _fold(
        self, spec: _NodeSpec, types: Sequence[TensorType], scope: _Scope
    ) -> tuple[np.ndarray, ...] | None:
        """The outputs of a node with small inputs and outputs, which have these types; None if it cannot be folded."""
        if any(t.size is None or t.size > SMALL for t in types):
            return None
        consts = [None if v == ABSENT else scope.const(v) for v in spec.inputs]
        arrays = [None if c is None else c.array for c in consts]
        if any(v != ABSENT and a is None for v, a in zip(spec.inputs, arrays)):
            return None
        try:
            return weights.evaluate(spec.op, spec.attrs, arrays, types)
        except weights.NotEvaluable:
            return None


def _text(field: str | bytes) -> str:
    """A text that only people read. Bytes that are not UTF-8 are replaced (protobuf returns such texts as bytes)."""
    return field if isinstance(field, str) else field.decode(errors="replace")


def _scalar(scope: _Scope, value: Value) -> Value:
    """A value, as a scalar if it is a vector of one element.

    The limits of a Range are scalars in ONNX. ONNX Runtime also accepts vectors, as long as it does not know their
    shape.
    """
    type = scope.type(value)
    if type.shape != (1,):
        return value
    const = scope.const(value)
    if const is not None:
        return scope.leaves.intern(const.numpy().reshape(()), type.dtype)
    shape = scope.leaves.numbers(())
    key = mix(digest("Reshape"), Attrs().digest, value, shape)
    out = output_key(key, 0)
    if out not in scope.of_node:
        scalar_type = TensorType(type.dtype, (), type.const)
        scope.nodes.append(Node("Reshape", (value, shape), (out,), (scalar_type,)))
        scope.of_node[out] = scalar_type
    return out


def _merged(first: TensorType, second: TensorType | None) -> TensorType:
    """The type that fits both types. If they contradict each other, the first one."""
    if second is None:
        return first
    try:
        return merge_types(first, second)
    except TypeConflict:
        return first


def _needed(nodes: Sequence[Node], outputs: Sequence[Value]) -> tuple[list[Node], set[Value]]:
    """The nodes on which the outputs depend, and all values that are read. `nodes` must have producers first."""
    used = set(outputs)
    needed = []
    for node in reversed(nodes):
        if not used.isdisjoint(node.outputs):
            used.update(node.inputs)
            needed.append(node)
    return needed[::-1], used


def _fold_shape(op: str, attrs: Attrs, type: TensorType | None) -> tuple[np.ndarray, ...] | None:
    if type is None or type.shape is None:
        return None
    if op == "Size":
        return None if type.size is None else (np.array(type.size, np.int64),)
    start, end = attrs.get("start", 0), attrs.get("end", len(type.shape))
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    dims = type.shape[start:end]
    return (np.array(dims, np.int64),) if all(isinstance(d, int) for d in dims) else None

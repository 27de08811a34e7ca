"""Writes graphs as ONNX files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import BinaryIO

import onnx
import onnx.checker
import onnx.helper

from xrlflow.ir import (
    ABSENT,
    SMALL,
    Body,
    Const,
    DType,
    Graph,
    Node,
    RawAttr,
    TensorHandle,
    TensorType,
    Value,
    dims,
)
from xrlflow.onnxio import declared, protos, versions
from xrlflow.onnxio.branches import Branches, Own
from xrlflow.onnxio.errors import GrowthError, ModelError
from xrlflow.onnxio.external_data import replacing_model
from xrlflow.onnxio.inference import REFUSED, infer_shapes
from xrlflow.onnxio.model import ON_RUNTIME, ImportedModel, Recipe
from xrlflow.onnxio.shapes import without_computed
from xrlflow.onnxio.tensors import raw_data, tensor_proto
from xrlflow.onnxio.wire import StreamedTensor, write_model
from xrlflow.ops import weights
from xrlflow.ops.infer import (
    InferenceError,
    attr_proto,
    infer_as_onnx,
    sizes_from_data,
    type_of_proto,
    type_proto,
)
from xrlflow.ops.schema import LATER, OPSET, output_is_optional, split_op
from xrlflow.storage.files import cannot_write

# Models with more bytes of weights get a separate file for them: a protocol buffer cannot exceed 2 GB.
EXTERNAL_ABOVE = 3 << 29
# The approximate bytes of a node or a constant in a file, in addition to its names and data.
_BYTES_PER_NODE = 50
# The first IR version in which initialisers need not be inputs, too.
_SEPARATE_WEIGHTS = 4
# The newest IR version that ONNX Runtime reads.
_MAX_IR_VERSION = 13
# In a data file, tensors of at least this many bytes begin at a page, smaller ones at a cache line.
_PAGED = 1 << 20


@dataclass(frozen=True, slots=True)
class _ModelParts:
    """A model without its large weights, these weights by the names of their initialisers, and the types of values."""

    proto: onnx.ModelProto
    large: dict[str, Const]
    types: dict[str, TensorType]


def to_proto(model: ImportedModel, graph: Graph, *, opset: int | None = None) -> onnx.ModelProto:
    """The model with `graph` as its computation.

    Raises ModelError if it exceeds 2 GB or cannot be written for `opset`, or if the model's file was written to.
    """
    return typed_proto(model, graph, opset=opset)[0]


def typed_proto(
    model: ImportedModel, graph: Graph, *, opset: int | None = None
) -> tuple[onnx.ModelProto, Mapping[str, TensorType]]:
    """The model as `to_proto` returns it, and the types of its values by their names, with formulas for open
    dimensions. Values that a conversion to another opset adds have no types."""
    parts = _write(model, graph, opset)
    if sum(c.type.nbytes or 0 for c in parts.large.values()) > EXTERNAL_ABOVE:
        raise ModelError(f"{model.name}: over 2 GB, which one ModelProto cannot hold: save it to a file")
    for name, const in parts.large.items():
        parts.proto.graph.initializer.append(tensor_proto(name, const))
    model.store.check_unchanged()
    return parts.proto, parts.types


def preferring(model: ImportedModel, opset: int) -> ImportedModel:
    """The model with the opset at which it will be written: this one or, if it lacks an operator, the lowest later one
    that has all operators.

    Raises ModelError for an opset that cannot be written.
    """
    versions.check_writable(model.name, opset)
    return replace(model, opset=opset)


def written_opset(model: ImportedModel, graph: Graph) -> int:
    """The opset at which the graph's file is written."""
    return versions.opset_of(_write(model, graph).proto) or OPSET


def size_of(model: ImportedModel, graph: Graph) -> int:
    """The approximate size of the graph's file in bytes. Constants are not evaluated."""
    frame: int = model.frame.ByteSize()
    return frame + _size(model, graph, set())


def _size(model: ImportedModel, graph: Graph, counted: set[Value]) -> int:
    """As `size_of`. `counted`: the large constants that were already counted. Bodies share these."""
    plan = weights.plan(graph)
    names = graph.leaves.names
    total = 0
    for value in plan.constants:
        recipe = model.recipes.get(value) if value not in graph.producers else None
        type = graph.type(value)
        if recipe is not None:
            total += recipe.nbytes + _BYTES_PER_NODE
        elif value not in counted:
            total += (type.nbytes or 0) + _BYTES_PER_NODE
        if (type.size or 0) > SMALL:
            counted.add(value)
    for node in plan.nodes:
        total += _BYTES_PER_NODE + sum(len(names.get(v, "")) for v in (*node.inputs, *node.outputs))
        for attr in node.attrs.values():
            if isinstance(attr, Body):
                total += _size(model, attr.graph, counted)
            elif isinstance(attr, RawAttr):
                total += len(attr.proto)
    return total


def save(
    model: ImportedModel,
    graph: Graph,
    path: str | os.PathLike[str],
    *,
    opset: int | None = None,
    max_growth: float = 1.2,
    durable: bool = True,
) -> None:
    """Write the model with `graph` as its computation to a file, completely or not at all.

    The file gets the opset `opset`; by default the model's (`ImportedModel.opset`), or the lowest later one that has
    all operators. Models that had external data, or exceed 1.5 GB, get a data file in the same folder
    (`NAME.DIGEST.data`, see `external_data`). With `durable`, the files are on the disk when the function returns.
    Raises GrowthError if the result exceeds `max_growth` times the bytes of the input, and ModelError if it cannot be
    written, or if the model's file was written to since it was read.
    """
    parts = _write(model, graph, opset)
    target = os.fspath(path)
    total = parts.proto.ByteSize() + sum(c.type.nbytes or 0 for c in parts.large.values())
    # Small models may grow by the bytes of names and attributes.
    if total > max(max_growth * model.size, model.size + (1 << 16)):
        raise GrowthError(
            f"{target}: the result would have {total:,} bytes, over {max_growth:g} times the "
            f"{model.size:,} of {model.name}: allow more with --max-growth"
        )
    external = bool(parts.large) and (model.external or total > EXTERNAL_ABOVE)
    offsets = _offsets(parts)

    def write_data(file: BinaryIO) -> None:
        at = 0
        for offset, const in zip(offsets, parts.large.values()):
            file.write(bytes(offset - at))
            data = raw_data(const)
            file.write(data)
            at = offset + data.nbytes

    try:
        check_not_data_of(model, target)
        with replacing_model(target, [write_data] if external else [], durable=durable) as (file, names):
            if external:
                _refer(parts, names[0], offsets)
            _write_file(file, parts, external)
            model.store.check_unchanged()
    except OSError as error:
        raise ModelError(cannot_write(target, error)) from error


def check_not_data_of(model: ImportedModel, target: str) -> None:
    """Raise ModelError if the file to be written holds weights of the model that was read."""
    if model.store.path is not None:
        folder = os.path.dirname(os.path.abspath(model.store.path))
        for location in model.store.files:
            if os.path.realpath(target) == os.path.realpath(os.path.join(folder, location)):
                raise ModelError(f"{target}: holds the weights of {model.name}: choose another output")


def _offsets(parts: _ModelParts) -> list[int]:
    """The offset of each large weight in the data file, in bytes."""
    offsets, at = [], 0
    for const in parts.large.values():
        size = const.type.nbytes or 0
        at += -at % (4096 if size >= _PAGED else 64)
        offsets.append(at)
        at += size
    return offsets


def _refer(parts: _ModelParts, location: str, offsets: list[int]) -> None:
    """Write the location of the large weights into the proto."""
    for (name, const), at in zip(parts.large.items(), offsets):
        proto = parts.proto.graph.initializer.add(
            name=name, data_type=int(const.type.dtype), dims=_dims(const)
        )
        proto.data_location = onnx.TensorProto.EXTERNAL
        length = str(const.type.nbytes or 0)
        for key, text in (("location", location), ("offset", str(at)), ("length", length)):
            proto.external_data.add(key=key, value=text)


def _write_file(file: BinaryIO, parts: _ModelParts, external: bool) -> None:
    graph = parts.proto.graph.SerializeToString()
    frame = onnx.ModelProto()
    frame.CopyFrom(parts.proto)
    frame.ClearField("graph")
    streamed = [
        StreamedTensor(tensor_proto(name, const, data=False).SerializeToString(), raw_data(const))
        for name, const in ({} if external else parts.large).items()
    ]
    write_model(file, frame.SerializeToString(), graph, streamed)


def check(proto: onnx.ModelProto) -> str | None:
    """The error that ONNX's full checker reports for a model without external data; None if it reports none."""
    try:
        onnx.checker.check_model(proto)
        infer_shapes(proto, check_type=True, strict_mode=True)
    except (onnx.checker.ValidationError, *REFUSED) as error:
        return str(error)
    return None


def check_result(model: ImportedModel, graph: Graph) -> tuple[str, ...]:
    """Raise ModelError if ONNX's checker refuses the result, unless the input is at fault. Returns notes.

    The input is at fault if the checker refuses it, too, or refuses its unchanged graph when that is exported, or only
    complains about shapes that the input declares. For the check large weights become inputs, since the checker does
    not look at their data.
    """
    result = _typed_copy(_write(model, graph))
    problem = check(result)
    if problem is None or check_input(model) is not None:
        return ()
    if _computes(declared.forget(result)):
        return (f"the model declares shapes that contradict what it computes: {_one_line(problem)}",)
    if check(_typed_copy(_write(model, model.graph))) is not None:
        return (f"ONNX's checker has something against the model, as it is: {_one_line(problem)}",)
    raise ModelError(f"{model.name}: the result is not a valid model (a bug of xrlflow): {problem}")


def _computes(proto: onnx.ModelProto) -> bool:
    """Whether ONNX's inference accepts the types of a model's nodes. (Its checker also requires shapes of outputs.)"""
    try:
        infer_shapes(proto, check_type=True, strict_mode=True)
    except REFUSED:
        return False
    return True


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _typed_copy(parts: _ModelParts) -> onnx.ModelProto:
    """The model with its large weights as inputs: it has all types, but not the data."""
    copy = onnx.ModelProto()
    copy.CopyFrom(parts.proto)
    for name, const in parts.large.items():
        copy.graph.input.append(onnx.ValueInfoProto(name=name, type=type_proto(const.type)))
    return copy


def check_input(model: ImportedModel) -> str | None:
    """The error that ONNX's checker reports for the model as it was read, or None."""
    proto = onnx.ModelProto.FromString(model.stripped)
    remaining = []
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            if tensor.name not in {v.name for v in proto.graph.input}:
                kind = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
                proto.graph.input.append(onnx.ValueInfoProto(name=tensor.name, type=kind))
        else:
            remaining.append(tensor)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(remaining)
    model.store.fill(protos.all_tensors(proto))
    return check(proto)


def _dims(const: Const) -> list[int]:
    return [d for d in const.type.shape or () if isinstance(d, int)]


def _write(model: ImportedModel, graph: Graph, opset: int | None = None) -> _ModelParts:
    model.store.check_unchanged()
    proto = onnx.ModelProto()
    proto.CopyFrom(model.frame)
    writer = _Writer(model, proto)
    writer.main(graph)
    versions.set_opset(proto, max(writer.later.values(), default=OPSET))
    if opset is not None:
        versions.convert(model.name, proto, writer.types, opset, writer.later.keys())
    elif not writer.later:
        versions.convert_at_least(proto, writer.types, versions.runnable(proto, model.opset))
    del proto.graph.quantization_annotation[:]
    proto.graph.quantization_annotation.extend(
        a for a in model.frame.graph.quantization_annotation if a.tensor_name in writer.used_names
    )
    imported = {o.domain for o in proto.opset_import}
    for domain in sorted(writer.domains - imported - {""}):
        proto.opset_import.add(domain=domain, version=1)
    proto.ir_version = min(max(proto.ir_version, _least_ir_version(proto)), _MAX_IR_VERSION)
    if all(versions.means_the_same(function, versions.opset_of(proto)) for function in model.functions):
        proto.functions.extend(model.functions)
        for function in proto.functions:
            model.store.fill(protos.tensors_of_nodes(function.node))
    return _ModelParts(proto, writer.large, writer.types)


def _least_ir_version(proto: onnx.ModelProto) -> int:
    """The IR version with which a model's opset was introduced."""
    version = versions.opset_of(proto)
    opset = onnx.helper.make_opsetid("", OPSET if version is None else version)
    return max(_SEPARATE_WEIGHTS, onnx.helper.find_min_ir_version_for([opset]))


class _Writer:
    """Writes one model. Names are unique across all its graphs, because bodies can read the names around them."""

    def __init__(self, model: ImportedModel, proto: onnx.ModelProto) -> None:
        self.model = model
        self.proto = proto
        self.used_names: set[str] = set()
        self.domains: set[str] = set()
        self.large: dict[str, Const] = {}
        self.symbols: dict[str, str] = {}  # symbols of the inputs -> their names in the file
        # Names of large constants by the id of their data. The data must stay alive, because Python reuses ids.
        self.handles: dict[int, tuple[TensorHandle, str]] = {}
        self.contents: dict[tuple[TensorType, bytes], str] = {}  # names of computed constants
        self.types: dict[str, TensorType] = {}  # of all values
        self.own = None if model.nonempty else Own.of(model.graph)
        self.later: dict[
            str, int
        ] = {}  # title of each node that the canonical opset lacks -> the opset that has it

    def main(self, graph: Graph) -> None:
        out = self.proto.graph
        declared = [v.name for v in out.output]
        self.used_names.update(v.name for v in out.input)
        self.used_names.update(declared)
        names = {value: info.name for value, info in zip(graph.inputs, out.input)}
        for value, info in zip(graph.inputs, out.input):
            for dim, dim_proto in zip(graph.type(value).shape or (), info.type.tensor_type.shape.dim):
                if isinstance(dim, str) and not dims.is_computed(dim):
                    self.symbols.setdefault(dim, dim_proto.dim_param or dim)
        for name, const in self.model.overridable.items():
            out.initializer.append(tensor_proto(name, const))
        self._graph(graph, out, names, declared, self._claims(graph))

    def _claims(self, graph: Graph) -> set[str]:
        """Names of outputs whose declared sizes cannot be inferred, and that have more readers than in the original.

        A runtime believes the declared type of a value that a node reads.
        """
        names = set()
        for info, value, old in zip(self.proto.graph.output, graph.outputs, self.model.graph.outputs):
            sizes = type_of_proto(info.type).shape or ()
            inferred = graph.type(value).shape or (None,) * len(sizes)
            claimed = any(isinstance(a, int) and a != b for a, b in zip(sizes, inferred))
            if claimed and len(graph.users(value)) > len(self.model.graph.users(old)):
                names.add(info.name)
        return names

    def _graph(
        self,
        graph: Graph,
        out: onnx.GraphProto,
        names: dict[Value, str],
        declared: list[str],
        claims: AbstractSet[str] = frozenset(),
    ) -> None:
        """Write nodes and initialisers of a graph. `names` has the names of its inputs, `declared` those of its
        outputs.

        Nodes read outputs in `claims` under another name, which has no declared type.
        """
        plan, computed = weights.materialise(graph)
        produced = {v for node in plan.nodes for v in node.outputs}
        consumed = {v for node in plan.nodes for v in node.inputs} | set(graph.outputs)
        live = produced | consumed
        # ONNX Runtime returns a sparse constant as a sparse tensor, or fails, unless a node makes a dense tensor of it.
        sparse = {v for node in plan.nodes if node.op == "Constant" for v in node.outputs}
        dense = produced - (sparse - set(self.model.graph.outputs))
        aliases: list[tuple[str, Value]] = []
        for name, value in zip(declared, graph.outputs):
            if value in dense and value not in names and name not in claims:
                names[value] = name
            elif names.get(value) != name:  # an input that is also an output
                aliases.append((name, value))
        # Names of this graph are assigned before those of its bodies. So if two clash, the name in the body changes.
        for node in plan.nodes:
            for index, value in enumerate(node.outputs):
                if value in names:
                    continue
                if value not in consumed and output_is_optional(node.op, index):
                    names[value] = ""
                else:
                    stem = split_op(node.op)[1].lower()
                    names[value] = self._fresh(graph.leaves.names.get(value) or f"{stem}_{len(names)}")
        for value in plan.constants:
            const = computed.get(value) or graph.leaves.consts[value]
            wish = graph.leaves.names.get(value) or f"const_{len(names)}"
            recipe = self.model.recipes.get(value) if value not in computed else None
            if recipe is not None:
                names[value] = self._fresh(wish)
                out.node.append(self._recipe_node(recipe, names[value], out))
            elif const.type.dtype == DType.STRING or (const.type.size or 0) <= SMALL:
                names[value] = self._fresh(wish)
                out.initializer.append(tensor_proto(names[value], const))
            else:
                names[value] = self._large(const, wish, value in computed)
        self.types.update(
            (name, graph.type(value)) for value, name in names.items() if value in live and name
        )
        branches = Branches(self.own, self._fresh)
        for node in plan.nodes:
            out.node.extend(branches.around(self._node(node, names), node, graph))
            if sizes_from_data(node.op):
                out.value_info.extend(v for v in self._sizes(graph, node, names) if v.name not in declared)
        for name, value in aliases:
            out.node.append(onnx.helper.make_node("Identity", [names[value]], [name]))
            self.types[name] = graph.type(value)

    def _sizes(self, graph: Graph, node: Node, names: Mapping[Value, str]) -> Iterator[onnx.ValueInfoProto]:
        """The types to declare for a node's outputs: those with sizes of inputs that ONNX's inference does not find.

        A runtime can fuse operators whose sizes are known to be equal. If ONNX Runtime does not know that the results
        of two convolutions have equal sizes, it adds Reshapes, which fail for an empty batch.
        """
        shapes = [
            tuple(self.symbols.get(d) if isinstance(d, str) else d for d in t.shape or ()) for t in node.types
        ]
        if not any(isinstance(d, str) for shape in shapes for d in shape):
            return
        types = [None if v == ABSENT else graph.type(v) for v in node.inputs]
        data = [graph.const(v) for v in node.inputs]
        try:
            inferred = infer_as_onnx(node.op, node.attrs, types, data, len(node.outputs))
        except InferenceError:  # the node fails in every run
            return
        for value, type, shape, own in zip(node.outputs, node.types, shapes, inferred):
            incomplete = own.shape is None or any(
                isinstance(s, str) and d != o for d, s, o in zip(type.shape or (), shape, own.shape)
            )
            if incomplete and any(isinstance(d, str) for d in shape) and names[value]:
                yield onnx.helper.make_tensor_value_info(names[value], int(type.dtype), shape)

    def _recipe_node(self, recipe: Recipe, name: str, out: onnx.GraphProto) -> onnx.NodeProto:
        inputs = []
        for const in recipe.inputs:
            inputs.append("" if const is None else self._fresh(f"{name}_of"))
            if const is not None:
                out.initializer.append(tensor_proto(inputs[-1], const))
        node = onnx.helper.make_node(split_op(recipe.op)[1], inputs, [name])
        node.attribute.extend(attr_proto(k, v) for k, v in recipe.attrs.items())
        return node

    def _large(self, const: Const, wish: str, computed: bool) -> str:
        """The name of a large constant: an initialiser of the outermost graph. Constants with equal contents
        share one.
        """
        if id(const.handle) in self.handles:
            return self.handles[id(const.handle)][1]
        key = (const.type, blake2b(raw_data(const), digest_size=16).digest()) if computed else None
        name = self.contents.get(key) if key is not None else None
        if name is None:
            name = self._fresh(wish)
            self.large[name] = const
        if key is not None:
            self.contents[key] = name
        self.handles[id(const.handle)] = (const.handle, name)
        return name

    def _fresh(self, wish: str) -> str:
        name, number = wish, 1
        while name in self.used_names:
            name, number = f"{wish}_{number}", number + 1
        self.used_names.add(name)
        return name

    def _node(self, node: Node, names: Mapping[Value, str]) -> onnx.NodeProto:
        domain, op = split_op(node.op)
        later = 0
        if domain.startswith(LATER):
            domain, later = "", int(domain.removeprefix(LATER))
        self.domains.add(domain)
        outputs = [names[v] for v in node.outputs]
        while len(outputs) > 1 and not outputs[-1]:
            outputs.pop()
        inputs = ["" if v == ABSENT else names[v] for v in node.explicit_inputs]
        proto = onnx.NodeProto(op_type=op, domain=domain or None, input=inputs, output=outputs)
        captured = iter(node.inputs[len(node.explicit_inputs) :])
        for name, attr in node.attrs.items():
            if not isinstance(attr, Body):
                proto.attribute.append(attr_proto(name, attr))
                continue
            body = self._body(attr, [names[next(captured)] for _ in attr.captured])
            if not name.endswith("]"):
                proto.attribute.append(onnx.helper.make_attribute(name, body))
                continue
            name = name[: name.index("[")]  # a body of an attribute that is a list of bodies
            if not proto.attribute or proto.attribute[-1].name != name:
                proto.attribute.add(name=name, type=onnx.AttributeProto.GRAPHS)
            proto.attribute[-1].graphs.append(body)
        label = self.model.labels.get(node.id)
        if label is not None and label.op == node.op:
            if label.name:
                proto.name = label.name
            if label.doc_string:
                proto.doc_string = label.doc_string
            for key, value in label.metadata:
                proto.metadata_props.add(key=key, value=value)
        if node.on_runtime:
            proto.metadata_props.add(key=ON_RUNTIME, value="1")
        if later:
            self.later[versions.title(proto)] = later
        return proto

    def _body(self, body: Body, outer: list[str]) -> onnx.GraphProto:
        graph = body.graph
        out = onnx.GraphProto(name=body.name or "body")
        formals = graph.inputs[: len(graph.inputs) - len(body.captured)]
        names = dict(zip(body.captured, outer))
        for at, value in enumerate(formals):
            names[value] = self._fresh(graph.leaves.names.get(value) or f"in_{at}")
            out.input.append(_info(names[value], graph.type(value)))
        declared = []
        for at, value in enumerate(graph.outputs):
            declared.append(self._fresh(graph.leaves.names.get(value) or f"out_{at}"))
            out.output.append(_info(declared[-1], graph.type(value)))
        self._graph(graph, out, names, declared)
        return out


def _info(name: str, type: TensorType) -> onnx.ValueInfoProto:
    if type.dtype == DType.UNDEFINED and type.other is None:
        return onnx.ValueInfoProto(name=name)
    return onnx.ValueInfoProto(name=name, type=type_proto(without_computed(type)))

"""Turns parts of a model into one operator each, whose ONNX function is the part itself.

If a library implements the operator, the library's kernel runs. Otherwise ONNX Runtime replaces the operator by the
body of its function, and optimises it like the rest of the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import BinaryIO

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    helper,
)

from xrlflow.onnxio import protos
from xrlflow.onnxio.exporter import EXTERNAL_ABOVE
from xrlflow.onnxio.external_data import replacing_model
from xrlflow.onnxio.wire import LARGE

_IR_VERSION = 8
"""The first with functions in a model."""
_BODY = "{}_body"
_ROWS = "blocks of rows: "
_PAGE = 4096
_OVERRIDABLE = 4
"""The first in which a caller may replace initializers that are inputs too. Before, all had to be listed."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a graph."""

    nodes: tuple[int, ...]  # indices of nodes in the graph, ascending
    inputs: tuple[str, ...]  # values computed outside that the nodes read
    outputs: tuple[str, ...]  # values that nodes outside, or the graph's outputs, read
    weights: tuple[str, ...]  # initializers that the nodes read


def region_of(graph: GraphProto, nodes: Iterable[int]) -> Region:
    """The region that consists of these nodes. They must be convex: no path between two of them may contain another
    node.

    An initializer that is also an input of the graph is an input of the region, because a caller may give another
    value.
    """
    positions = sorted(nodes)
    inside = {name for i in positions for name in graph.node[i].output if name}
    weights = {tensor.name for tensor in graph.initializer} - {value.name for value in graph.input}
    reads = [name for name in dict.fromkeys(_reads(graph.node[i] for i in positions)) if name not in inside]
    used = {value.name for value in graph.output}
    members = set(positions)
    for i, node in enumerate(graph.node):
        if i not in members:
            used.update(names_read(node))
    outputs = [name for i in positions for name in graph.node[i].output if name in used]
    return Region(
        tuple(positions),
        tuple(name for name in reads if name not in weights),
        tuple(outputs),
        tuple(name for name in reads if name in weights),
    )


def whole_region(graph: GraphProto, outputs: Sequence[str] | None = None) -> Region:
    """The region of all nodes. It has all inputs of the graph, in the graph's order, whether they are read or not.

    `outputs`: by default those outputs of the graph that a node computes, in the graph's order. A graph, and the same
    graph with folded constants, compute the same outputs, so their regions have the same inputs and outputs.
    """
    computed = {name for node in graph.node for name in node.output}
    weights = [tensor.name for tensor in graph.initializer]
    if outputs is None:
        outputs = [value.name for value in graph.output if value.name in computed]
    inputs = [value.name for value in graph.input if value.name not in set(weights)]
    return Region(tuple(range(len(graph.node))), tuple(inputs), tuple(outputs), tuple(weights))


def names_read(node: NodeProto) -> set[str]:
    """The values that a node reads, also from inside its bodies. Values that a body computes itself are not
    included.
    """
    return set(_reads([node]))


def _reads(nodes: Iterable[NodeProto]) -> Iterator[str]:
    """The values that nodes read, in the order of reading; values may be repeated."""
    for node in nodes:
        yield from (name for name in node.input if name)
        for attribute in node.attribute:
            body = [attribute.g] if attribute.type == AttributeProto.GRAPH else []
            for graph in (*attribute.graphs, *body):
                own = {value.name for value in graph.input}
                own.update(tensor.name for tensor in graph.initializer)
                own.update(tensor.values.name for tensor in graph.sparse_initializer)
                own.update(name for inner in graph.node for name in inner.output)
                yield from (name for name in _reads(graph.node) if name not in own)
                yield from (value.name for value in graph.output if value.name not in own)


def cut(
    graph: GraphProto,
    fits: Callable[[NodeProto], bool],
    ends: Callable[[NodeProto], bool] = lambda _: False,
    *,
    minimum: int = 2,
) -> list[Region]:
    """The nodes for which `fits` holds, divided into convex regions of at least `minimum` nodes, as large as possible.
    No region has a reader of a node for which `ends` holds, unless the node makes a weight.

    A node that does not fit is a border, and so is the output of a node that `ends`. A node's level is the largest
    number of borders on a path to it. The regions are the connected parts of each level. They are convex, because a
    path that leaves a level only reaches higher levels. Nodes that make weights of constants are no borders, and belong
    to the only region that reads the weights.
    """
    making = made_of_weights(graph)
    level: dict[str, int] = {}
    levels: dict[int, list[int]] = {}
    for i, node in enumerate(graph.node):
        if i in making:
            continue
        deepest = max((level.get(name, 0) for name in names_read(node)), default=0)
        inside = fits(node)
        if inside:
            levels.setdefault(deepest, []).append(i)
        for name in node.output:
            level[name] = deepest + (not inside or ends(node))
    parts = [part for nodes in levels.values() for part in _connected(graph, nodes)]
    _take_weights(graph, parts, [i for i in making if fits(graph.node[i])])
    regions = [region_of(graph, part) for part in parts]
    return sorted(
        (r for r in regions if len(r.nodes) >= minimum and r.outputs), key=lambda region: region.nodes
    )


def _take_weights(graph: GraphProto, parts: Sequence[list[int]], making: Sequence[int]) -> None:
    """Add nodes that make weights to the part that alone reads what they make."""
    home = {i: part for part in parts for i in part}
    readers: dict[str, list[int]] = {value.name: [-1] for value in graph.output}  # -1: outside of all parts
    for i, node in enumerate(graph.node):
        for name in names_read(node):
            readers.setdefault(name, []).append(i)
    for i in reversed(making):
        first, *others = [
            home.get(reader) for name in graph.node[i].output for reader in readers.get(name, [-1])
        ]
        if first is not None and all(other is first for other in others):
            first.append(i)
            home[i] = first


def made_of_weights(graph: GraphProto) -> list[int]:
    """The positions of nodes that read weights alone, or what is made of weights alone."""
    made = {tensor.name for tensor in graph.initializer} - {value.name for value in graph.input}
    making = []
    for i, node in enumerate(graph.node):
        read = names_read(node)
        if read and read <= made:
            making.append(i)
            made.update(node.output)
    return making


def _connected(graph: GraphProto, nodes: Sequence[int]) -> list[list[int]]:
    """The nodes divided into groups. No value that a node computes connects two of the groups."""
    parent = {i: i for i in nodes}

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    computed = {name for node in graph.node for name in node.output if name}
    reader: dict[str, int] = {}
    for i in nodes:
        for name in (*graph.node[i].input, *graph.node[i].output):
            if name in computed:
                parent[root(i)] = root(reader.setdefault(name, i))
    groups: dict[int, list[int]] = {}
    for i in nodes:
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())


def extracted(
    model: ModelProto, region: Region, types: Mapping[str, TypeProto], without: Container[str] = ()
) -> ModelProto:
    """The region as a model, with inputs and outputs in the region's order. `types`: of the values that enter or leave
    the region. `without`: names of weights whose elements are left out.
    """
    graph = model.graph
    result = ModelProto(ir_version=model.ir_version)
    result.opset_import.extend(model.opset_import)
    result.functions.extend(model.functions)
    result.graph.name = graph.name or "region"
    result.graph.node.extend(graph.node[i] for i in region.nodes)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for name in region.weights:
        tensor = tensors[name]
        if name in without:
            result.graph.initializer.add(name=name, data_type=tensor.data_type, dims=tensor.dims)
        else:
            result.graph.initializer.append(tensor)
    for names, values in ((region.inputs, result.graph.input), (region.outputs, result.graph.output)):
        values.extend(ValueInfoProto(name=name, type=types[name]) for name in names)
    return result


def with_types(part: ModelProto, types: Mapping[str, TypeProto]) -> None:
    """Give the inputs and outputs of an extracted region other types, in place."""
    for value in (*part.graph.input, *part.graph.output):
        value.type.CopyFrom(types[value.name])


def with_functions(
    model: ModelProto, regions: Mapping[str, Region], domain: str, *, weights_as_inputs: bool = False
) -> ModelProto:
    """The model with each region as one node of `domain`, and as a function of that name.

    Weights that only one region reads become constants of its function or, with `weights_as_inputs`, further inputs of
    its node, after the region's inputs.
    """
    graph = model.graph
    result = ModelProto()
    result.CopyFrom(_without_graph(model))
    result.ir_version = max(model.ir_version, _IR_VERSION)
    result.opset_import.add(domain=domain, version=1)
    for field in ("name", "doc_string"):
        setattr(result.graph, field, getattr(graph, field))
    for repeated in ("output", "sparse_initializer", "metadata_props", "quantization_annotation"):
        getattr(result.graph, repeated).extend(getattr(graph, repeated))
    fixed = {tensor.name for tensor in graph.initializer} if model.ir_version < _OVERRIDABLE else set()
    result.graph.input.extend(value for value in graph.input if value.name not in fixed)
    ends = {max(region.nodes): (name, region) for name, region in regions.items()}
    inside = {i for region in regions.values() for i in region.nodes}
    for i, node in enumerate(graph.node):
        if i not in inside:
            result.graph.node.append(node)
        elif i in ends:
            name, region = ends[i]
            inputs = [*region.inputs, *(region.weights if weights_as_inputs else ())]
            result.graph.node.append(
                helper.make_node(name, inputs, list(region.outputs), name=name, domain=domain)
            )
    for name, region in regions.items():
        _write_function(result.functions.add(name=name, domain=domain), model, region, weights_as_inputs)
    used = {value.name for value in graph.output} | {value.name for value in graph.input}
    for node in result.graph.node:
        used |= names_read(node)
    result.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in used)
    hidden = {name for i in inside for name in graph.node[i].output} - used
    result.graph.value_info.extend(value for value in graph.value_info if value.name not in hidden)
    _sort(result.graph)
    return result


def _without_graph(model: ModelProto) -> ModelProto:
    frame = ModelProto()
    for field, value in model.ListFields():
        if field.name in ("graph", "functions"):
            continue
        if field.is_repeated:
            getattr(frame, field.name).extend(value)
        else:
            setattr(frame, field.name, value)
    frame.functions.extend(model.functions)
    return frame


def _write_function(
    function: FunctionProto, model: ModelProto, region: Region, weights_as_inputs: bool
) -> None:
    """Fill a function that computes a region. (A function that is added when it is full is a further copy.)"""
    function.input.extend(region.inputs)
    function.output.extend(region.outputs)
    function.opset_import.extend(model.opset_import)
    weights = set(region.weights)
    if weights_as_inputs:
        function.input.extend(region.weights)
    else:
        for tensor in model.graph.initializer:
            if tensor.name in weights:
                node = function.node.add(op_type="Constant", output=[tensor.name])
                value = node.attribute.add(name="value", type=AttributeProto.TENSOR)
                value.t.CopyFrom(tensor)
                value.t.ClearField("name")
    function.node.extend(model.graph.node[i] for i in region.nodes)


def _sort(graph: GraphProto) -> None:
    """Sort nodes so that each follows the nodes that it reads. A region's node stands where the region's last node was,
    which may be after its readers.
    """
    computed = {name for node in graph.node for name in node.output if name}
    pending, available = list(graph.node), set[str]()
    ordered: list[NodeProto] = []
    while pending:
        postponed = []
        for node in pending:
            if (names_read(node) & computed) - available:
                postponed.append(node)
                continue
            ordered.append(node)
            available.update(node.output)
        assert len(postponed) < len(pending), "a region is not convex"
        pending = postponed
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
    del graph.node[:]
    graph.node.extend(copies)


def with_guard(
    model: ModelProto,
    name: str,
    sizes: Mapping[str, Sequence[int]],
    domain: str,
    inner: ModelProto | None = None,
) -> ModelProto:
    """A model with symbolic dimensions that runs its whole graph as the region `name` if its inputs have these `sizes`.

    An If compares the inputs' shapes with `sizes`. For other shapes it calls a second function with the same nodes,
    which no library implements. Weights are constants of that function, because ONNX Runtime does not optimise nodes
    inside an If that read outer initializers. A model with a guard can get further guards, for other sizes. `inner`: a
    model for these sizes with regions in `domain`; its graph then runs instead of the single region.
    """
    graph = model.graph
    prefix = f"{domain}.{name}"  # begins the names that the model does not have yet
    region = whole_region(graph)
    guarded = with_functions(model, {name: region}, domain)
    (call,) = guarded.graph.node
    types = {value.name: value for value in graph.output}
    computed = [types[name] for name in region.outputs]
    body = guarded.functions[-1]
    body.name = _BODY.format(name)
    if inner is None:
        outer = guarded.functions.add(name=name, domain=domain, input=body.input, output=body.output)
        outer.node.append(helper.make_node(body.name, list(body.input), list(body.output), domain=domain))
        outer.opset_import.extend(guarded.opset_import)
        then = _call(computed, call, f"{prefix}.then", name)
    else:
        guarded.functions.extend(function for function in inner.functions if function.domain == domain)
        then = _branch(computed, inner.graph, f"{prefix}.then")
    del guarded.graph.node[:]
    del guarded.graph.value_info[:]
    guarded.graph.initializer.append(
        onnx.numpy_helper.from_array(
            np.array([n for shape in sizes.values() for n in shape], np.int64), f"{prefix}.sizes"
        )
    )
    node = helper.make_node
    shapes = [f"{prefix}.shape_{i}" for i in range(len(sizes))]
    guarded.graph.node.extend(node("Shape", [x], [shape]) for x, shape in zip(sizes, shapes))
    branches = {"then_branch": then, "else_branch": _call(computed, call, f"{prefix}.else", body.name)}
    guarded.graph.node.extend(
        [
            node("Concat", shapes, [f"{prefix}.shape"], axis=0),
            node("Equal", [f"{prefix}.shape", f"{prefix}.sizes"], [f"{prefix}.same"]),
            node("Cast", [f"{prefix}.same"], [f"{prefix}.ones"], to=onnx.TensorProto.INT32),
            node("ReduceMin", [f"{prefix}.ones"], [f"{prefix}.one"], keepdims=0),
            node("Cast", [f"{prefix}.one"], [f"{prefix}.fits"], to=onnx.TensorProto.BOOL),
            node(
                "If",
                [f"{prefix}.fits"],
                [value.name for value in computed],
                name=f"{prefix}.guard",
                **branches,
            ),
        ]
    )
    return guarded


def _call(outputs: Sequence[ValueInfoProto], call: NodeProto, prefix: str, function: str) -> GraphProto:
    """A branch that calls a function with values of the graph around it."""
    graph = GraphProto()
    inner = graph.node.add()
    inner.CopyFrom(call)
    inner.op_type, inner.name = function, prefix
    return _branch(outputs, graph, prefix)


def _branch(outputs: Sequence[ValueInfoProto], inner: GraphProto, prefix: str) -> GraphProto:
    """A branch that computes `outputs` by the nodes and weights of `inner`, which get unique names."""
    graph = GraphProto(name=prefix)
    graph.node.extend(inner.node)
    graph.initializer.extend(inner.initializer)
    own = [name for node in inner.node for name in node.output if name]
    own += [tensor.name for tensor in inner.initializer]
    names = {name: f"{prefix}.{name}" for name in own}
    for node in graph.node:
        _rename(node, names)
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]
    for output in outputs:
        if output.name not in names:  # the output is an input, returned as it is
            names[output.name] = f"{prefix}.{output.name}"
            graph.node.append(helper.make_node("Identity", [output.name], [names[output.name]]))
        value = graph.output.add(name=names[output.name], type=output.type)
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    return graph


def _rename(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename the values that a node reads and computes, and the values that its bodies read from outside."""
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            field[index] = names.get(name, name)
    for attribute in node.attribute:
        for graph in (*attribute.graphs, *([attribute.g] if attribute.type == AttributeProto.GRAPH else [])):
            inside = {name for inner in graph.node for name in inner.output}
            inside |= {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
            outer = {name: new for name, new in names.items() if name not in inside}
            for inner in graph.node:
                _rename(inner, outer)
            for value in graph.output:
                value.name = outer.get(value.name, value.name)


def unused_domain(model: ModelProto) -> str:
    """A domain for regions that no name in a model contains (see `rename_domain`)."""
    names: set[str] = set()

    def add_nodes(nodes: Iterable[NodeProto]) -> None:
        for node in nodes:
            names.update((node.domain, node.name, *node.input, *node.output))
            for body in protos.subgraphs(node):
                add_graph(body)

    def add_graph(graph: GraphProto) -> None:
        named = (*graph.initializer, *graph.input, *graph.output, *graph.value_info)
        names.update((graph.name, *(each.name for each in named)))
        add_nodes(graph.node)

    add_graph(model.graph)
    for function in model.functions:
        names.add(function.domain)
        add_nodes(function.node)
    domain = "xrlflow.unnamed"
    while any(domain in name for name in names):
        domain += "_"
    return domain


def rename_domain(model: ModelProto, domain: str, new: str) -> None:
    """Give the domain of regions another name, in place: a copy would have all weights. Names of values that begin with
    the domain (see `with_guard`) get the new one, too: `unused_domain` is no part of a name of the model's own."""

    def renamed(name: str) -> str:
        return new + name.removeprefix(domain) if name.startswith(domain) else name

    def in_graph(graph: GraphProto) -> None:
        graph.name = renamed(graph.name)
        for each in (*graph.initializer, *graph.input, *graph.output, *graph.value_info):
            if each.name.startswith(domain):
                each.name = renamed(each.name)
        in_nodes(graph.node)

    def in_nodes(nodes: Iterable[NodeProto]) -> None:
        for node in nodes:
            node.domain = renamed(node.domain)
            if node.name.startswith(domain):
                node.name = renamed(node.name)
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name.startswith(domain):
                        names[index] = renamed(name)
            for body in protos.subgraphs(node):
                in_graph(body)

    for entry in (model, *model.functions):
        for imported in entry.opset_import:
            imported.domain = renamed(imported.domain)
    for function in model.functions:
        function.domain = renamed(function.domain)
        in_nodes(function.node)
    in_graph(model.graph)


def note_rows(model: ModelProto, domain: str, blocks: Mapping[str, Sequence[int]]) -> None:
    """Note in the functions of regions for any number of rows, by name, of how many rows their blocks are."""
    for function in model.functions:
        if function.domain == domain:
            function.doc_string = f"{_ROWS}{', '.join(map(str, blocks[function.name]))}"


def noted_rows(model: ModelProto) -> set[int]:
    """The numbers of rows of all blocks that `note_rows` noted in a model."""
    texts = [f.doc_string.removeprefix(_ROWS) for f in model.functions if f.doc_string.startswith(_ROWS)]
    return {int(number) for text in texts for number in text.split(", ") if number.isdecimal()}


def weight_bytes(graph: GraphProto) -> int:
    """The bytes of a graph's initializers."""
    return sum(len(tensor.raw_data) or tensor.ByteSize() for tensor in graph.initializer)


def save_regions(model: ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model, completely or not at all. Weights of more than 1.5 GB go to a data file (see `external_data`).

    Raises OSError.
    """
    large = [t for t in model.graph.initializer if len(t.raw_data) >= LARGE]
    if weight_bytes(model.graph) <= EXTERNAL_ABOVE:
        large = []
    offsets = list(accumulate((-(-len(t.raw_data) // _PAGE) * _PAGE for t in large), initial=0))

    def write_data(file: BinaryIO) -> None:
        for tensor in large:
            file.write(tensor.raw_data)
            file.write(bytes(-len(tensor.raw_data) % _PAGE))

    with replacing_model(os.fspath(path), [write_data] if large else []) as (file, names):
        file.write((_referring(model, large, offsets, names[0]) if large else model).SerializeToString())


def _referring(
    model: ModelProto, large: Sequence[TensorProto], offsets: Sequence[int], location: str
) -> ModelProto:
    """The model, in which the data of large initializers is a reference to another file."""
    result = _without_graph(model)
    names = {tensor.name for tensor in large}
    for field, value in model.graph.ListFields():
        if field.name == "initializer":
            result.graph.initializer.extend(tensor for tensor in value if tensor.name not in names)
        elif field.is_repeated:
            getattr(result.graph, field.name).extend(value)
        else:
            setattr(result.graph, field.name, value)
    for tensor, offset in zip(large, offsets):
        reference = result.graph.initializer.add(
            name=tensor.name, data_type=tensor.data_type, dims=tensor.dims
        )
        reference.data_location = TensorProto.EXTERNAL
        entries = {"location": location, "offset": str(offset), "length": str(len(tensor.raw_data))}
        for key, text in entries.items():
            reference.external_data.add(key=key, value=text)
    return result

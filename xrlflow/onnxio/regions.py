"""Parts of a model that become one operator each, whose function is the part itself.

Where a library implements the operator, its kernel runs. Elsewhere ONNX Runtime puts the body of the function in its
place and optimises it like the rest of the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from xrlflow.onnxio.beside import replacing_model
from xrlflow.onnxio.exporter import EXTERNAL_ABOVE
from xrlflow.onnxio.wire import LARGE

_IR_VERSION = 8
"""The first with functions in a model."""
_BODY = "{}_body"
_PAGE = 4096
_OVERRIDABLE = 4
"""The first in which a caller may replace initializers that are inputs too. Before, all had to be listed."""


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes of a graph, by position, in order. `inputs` and `outputs`: the values that cross its border. `weights`: the
    initializers that it reads.
    """

    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]


def region_of(graph: GraphProto, nodes: Iterable[int]) -> Region:
    """The region of these nodes. They must be convex: no path may leave them and come back.

    An initializer that is also an input of the graph is an input of the region: a caller may give another value.
    """
    chosen = sorted(nodes)
    inside = {name for i in chosen for name in graph.node[i].output if name}
    weights = {tensor.name for tensor in graph.initializer} - {value.name for value in graph.input}
    read = [name for name in dict.fromkeys(_reads(graph.node[i] for i in chosen)) if name not in inside]
    wanted = {value.name for value in graph.output}
    picked = set(chosen)
    for i, node in enumerate(graph.node):
        if i not in picked:
            wanted.update(names_read(node))
    outputs = [name for i in chosen for name in graph.node[i].output if name in wanted]
    return Region(
        tuple(chosen),
        tuple(name for name in read if name not in weights),
        tuple(outputs),
        tuple(name for name in read if name in weights),
    )


def whole_region(graph: GraphProto, outputs: Sequence[str] | None = None) -> Region:
    """The region of all nodes: with all inputs of the graph, in its order, whether they are read or not.

    `outputs`: by default those outputs of the graph that a node computes, in the graph's order. What is computed is the
    same for a graph and for the same graph with its constants folded, so their regions have the same ports.
    """
    computed = {name for node in graph.node for name in node.output}
    weights = [tensor.name for tensor in graph.initializer]
    if outputs is None:
        outputs = [value.name for value in graph.output if value.name in computed]
    inputs = [value.name for value in graph.input if value.name not in set(weights)]
    return Region(tuple(range(len(graph.node))), tuple(inputs), tuple(outputs), tuple(weights))


def names_read(node: NodeProto) -> set[str]:
    """The values that a node reads, also from inside its bodies. What a body computes itself is not among them."""
    return set(_reads([node]))


def _reads(nodes: Iterable[NodeProto]) -> Iterator[str]:
    """The values that nodes read, in their order, some several times."""
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


def cut(graph: GraphProto, fits: Callable[[NodeProto], bool], *, least: int = 2) -> list[Region]:
    """The nodes that fit, in convex regions of at least `least` nodes, as large as possible.

    A node that does not fit is a border. The regions are levels: a node's level is the largest number of borders on a
    path to it, and a path that leaves a level comes to a higher one. Parts of a level that are not connected are
    regions of their own.
    """
    level: dict[str, int] = {}
    levels: dict[int, list[int]] = {}
    for i, node in enumerate(graph.node):
        deepest = max((level.get(name, 0) for name in names_read(node)), default=0)
        inside = fits(node)
        if inside:
            levels.setdefault(deepest, []).append(i)
        for name in node.output:
            level[name] = deepest + (not inside)
    found = [region_of(graph, part) for nodes in levels.values() for part in _connected(graph, nodes)]
    return sorted((r for r in found if len(r.nodes) >= least and r.outputs), key=lambda region: region.nodes)


def _connected(graph: GraphProto, nodes: Sequence[int]) -> list[list[int]]:
    """These nodes in groups that share no value that a node computes."""
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


def extracted(model: ModelProto, region: Region, types: Mapping[str, TypeProto]) -> ModelProto:
    """The region as a model, with inputs and outputs in the region's order. `types`: of the values that cross its
    border."""
    graph = model.graph
    made = ModelProto(ir_version=model.ir_version)
    made.opset_import.extend(model.opset_import)
    made.functions.extend(model.functions)
    made.graph.name = graph.name or "region"
    made.graph.node.extend(graph.node[i] for i in region.nodes)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    made.graph.initializer.extend(tensors[name] for name in region.weights)
    for names, values in ((region.inputs, made.graph.input), (region.outputs, made.graph.output)):
        values.extend(ValueInfoProto(name=name, type=types[name]) for name in names)
    return made


def with_functions(
    model: ModelProto, regions: Mapping[str, Region], domain: str, *, weights_as_inputs: bool = False
) -> ModelProto:
    """The model with each region as one node of `domain`, and as a function of that name.

    Weights that are read in one region only are constants of its function or, with `weights_as_inputs`, inputs of the
    node after the region's own.
    """
    graph = model.graph
    made = ModelProto()
    made.CopyFrom(_without_graph(model))
    made.ir_version = max(model.ir_version, _IR_VERSION)
    made.opset_import.add(domain=domain, version=1)
    for field in ("name", "doc_string"):
        setattr(made.graph, field, getattr(graph, field))
    for repeated in ("output", "sparse_initializer", "metadata_props", "quantization_annotation"):
        getattr(made.graph, repeated).extend(getattr(graph, repeated))
    fixed = {tensor.name for tensor in graph.initializer} if model.ir_version < _OVERRIDABLE else set()
    made.graph.input.extend(value for value in graph.input if value.name not in fixed)
    ends = {max(region.nodes): (name, region) for name, region in regions.items()}
    inside = {i for region in regions.values() for i in region.nodes}
    for i, node in enumerate(graph.node):
        if i not in inside:
            made.graph.node.append(node)
        elif i in ends:
            name, region = ends[i]
            inputs = [*region.inputs, *(region.weights if weights_as_inputs else ())]
            made.graph.node.append(
                helper.make_node(name, inputs, list(region.outputs), name=name, domain=domain)
            )
    made.functions.extend(
        _function(model, region, name, domain, weights_as_inputs) for name, region in regions.items()
    )
    used = {value.name for value in graph.output} | {value.name for value in graph.input}
    for node in made.graph.node:
        used |= names_read(node)
    made.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in used)
    hidden = {name for i in inside for name in graph.node[i].output} - used
    made.graph.value_info.extend(value for value in graph.value_info if value.name not in hidden)
    _sort(made.graph)
    return made


def _without_graph(model: ModelProto) -> ModelProto:
    kept = ModelProto()
    for field, value in model.ListFields():
        if field.name in ("graph", "functions"):
            continue
        if field.is_repeated:
            getattr(kept, field.name).extend(value)
        else:
            setattr(kept, field.name, value)
    kept.functions.extend(model.functions)
    return kept


def _function(
    model: ModelProto, region: Region, name: str, domain: str, weights_as_inputs: bool
) -> FunctionProto:
    made = FunctionProto(name=name, domain=domain)
    made.input.extend(region.inputs)
    made.output.extend(region.outputs)
    made.opset_import.extend(model.opset_import)
    weights = set(region.weights)
    if weights_as_inputs:
        made.input.extend(region.weights)
    else:
        for tensor in model.graph.initializer:
            if tensor.name in weights:
                node = made.node.add(op_type="Constant", output=[tensor.name])
                value = node.attribute.add(name="value", type=AttributeProto.TENSOR)
                value.t.CopyFrom(tensor)
                value.t.ClearField("name")
    made.node.extend(model.graph.node[i] for i in region.nodes)
    return made


def _sort(graph: GraphProto) -> None:
    """Put nodes after what they read: a region stands where its last node stood, which may be too late."""
    computed = {name for node in graph.node for name in node.output if name}
    waiting, done = list(graph.node), set[str]()
    ordered: list[NodeProto] = []
    while waiting:
        left = []
        for node in waiting:
            if (names_read(node) & computed) - done:
                left.append(node)
                continue
            ordered.append(node)
            done.update(node.output)
        assert len(left) < len(waiting), "a region is not convex"
        waiting = left
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
    """A model of open dimensions whose whole graph is the region `name`, for inputs of these `sizes` only.

    An If compares the inputs' shapes with them. For others it takes a second function, which no library implements and
    which the region's own body calls. A guarded model can be guarded again, for further sizes. Weights are constants of
    that function: of outer initializers, ONNX Runtime would not optimise what reads them inside an If. With `inner`, a
    model for these sizes that has regions in the domain, its graph takes the place of the one region.
    """
    graph = model.graph
    prefix = f"{domain}.{name}"  # of names that the model does not have
    region = whole_region(graph)
    whole = with_functions(model, {name: region}, domain)
    (call,) = whole.graph.node
    types = {value.name: value for value in graph.output}
    computed = [types[name] for name in region.outputs]
    body = whole.functions[-1]
    body.name = _BODY.format(name)
    if inner is None:
        outer = whole.functions.add(name=name, domain=domain, input=body.input, output=body.output)
        outer.node.append(helper.make_node(body.name, list(body.input), list(body.output), domain=domain))
        outer.opset_import.extend(whole.opset_import)
        then = _call(computed, call, f"{prefix}.then", name)
    else:
        whole.functions.extend(function for function in inner.functions if function.domain == domain)
        then = _branch(computed, inner.graph, f"{prefix}.then")
    del whole.graph.node[:]
    del whole.graph.value_info[:]
    whole.graph.initializer.append(
        onnx.numpy_helper.from_array(
            np.array([n for shape in sizes.values() for n in shape], np.int64), f"{prefix}.sizes"
        )
    )
    node = helper.make_node
    shapes = [f"{prefix}.shape_{i}" for i in range(len(sizes))]
    whole.graph.node.extend(node("Shape", [x], [shape]) for x, shape in zip(sizes, shapes))
    branches = {"then_branch": then, "else_branch": _call(computed, call, f"{prefix}.else", body.name)}
    whole.graph.node.extend(
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
    return whole


def _call(outputs: Sequence[ValueInfoProto], call: NodeProto, prefix: str, function: str) -> GraphProto:
    """A branch that calls a function with what the surrounding graph has."""
    made = GraphProto()
    inner = made.node.add()
    inner.CopyFrom(call)
    inner.op_type, inner.name = function, prefix
    return _branch(outputs, made, prefix)


def _branch(outputs: Sequence[ValueInfoProto], inner: GraphProto, prefix: str) -> GraphProto:
    """A branch that computes `outputs` by the nodes and weights of `inner`, under names of its own."""
    made = GraphProto(name=prefix)
    made.node.extend(inner.node)
    made.initializer.extend(inner.initializer)
    own = [name for node in inner.node for name in node.output if name]
    own += [tensor.name for tensor in inner.initializer]
    names = {name: f"{prefix}.{name}" for name in own}
    for node in made.node:
        _rename(node, names)
    for tensor in made.initializer:
        tensor.name = names[tensor.name]
    for output in outputs:
        if output.name not in names:  # an input, as it is
            names[output.name] = f"{prefix}.{output.name}"
            made.node.append(helper.make_node("Identity", [output.name], [names[output.name]]))
        value = made.output.add(name=names[output.name], type=output.type)
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    return made


def _rename(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename the values that a node reads and computes, and what its bodies read from outside."""
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


def weight_bytes(graph: GraphProto) -> int:
    """The bytes of a graph's initializers."""
    return sum(len(tensor.raw_data) or tensor.ByteSize() for tensor in graph.initializer)


def save_regions(model: ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model, completely or not at all. Weights of more than 1.5 GB go to a data file (see `beside`).

    Raises OSError.
    """
    large = [t for t in model.graph.initializer if len(t.raw_data) >= LARGE]
    if weight_bytes(model.graph) <= EXTERNAL_ABOVE:
        large = []
    places = list(accumulate((-(-len(t.raw_data) // _PAGE) * _PAGE for t in large), initial=0))

    def write_data(file: BinaryIO) -> None:
        for tensor in large:
            file.write(tensor.raw_data)
            file.write(bytes(-len(tensor.raw_data) % _PAGE))

    with replacing_model(os.fspath(path), [write_data] if large else []) as (file, names):
        file.write((_referring(model, large, places, names[0]) if large else model).SerializeToString())


def _referring(
    model: ModelProto, large: Sequence[TensorProto], places: Sequence[int], location: str
) -> ModelProto:
    """The model with the data of large initializers in another file."""
    made = _without_graph(model)
    names = {tensor.name for tensor in large}
    for field, value in model.graph.ListFields():
        if field.name == "initializer":
            made.graph.initializer.extend(tensor for tensor in value if tensor.name not in names)
        elif field.is_repeated:
            getattr(made.graph, field.name).extend(value)
        else:
            setattr(made.graph, field.name, value)
    for tensor, place in zip(large, places):
        added = made.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        added.data_location = TensorProto.EXTERNAL
        entries = {"location": location, "offset": str(place), "length": str(len(tensor.raw_data))}
        for key, text in entries.items():
            added.external_data.add(key=key, value=text)
    return made

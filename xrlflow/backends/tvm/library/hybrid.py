"""An ONNX model that carries its own kernels: a file that any ONNX Runtime runs, and a library for it.

The whole graph becomes one region, or as much of it as can be lowered becomes several (see `onnxio.regions`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TypeProto

from xrlflow.backends.library_files import check_library_path, library_path
from xrlflow.backends.protocol import BackendError, one_line
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT, AlgorithmChoice, Algorithms
from xrlflow.backends.tvm.library.kernel_library import (
    BuiltLibrary,
    CompiledRegion,
    KernelLibrary,
    compile_region,
    kernel_library,
)
from xrlflow.backends.tvm.lowering.importer import NodeRefused, unsupported
from xrlflow.backends.tvm.lowering.value_types import types_of
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.onnxio import ModelError, load, to_proto
from xrlflow.onnxio.exporter import EXTERNAL_ABOVE
from xrlflow.onnxio.model import ON_RUNTIME
from xrlflow.onnxio.region_digest import region_digest
from xrlflow.onnxio.regions import (
    Region,
    cut,
    names_read,
    region_of,
    save_regions,
    weight_bytes,
    whole_region,
    with_functions,
    with_guard,
)
from xrlflow.onnxio.versions import opset_of

# Kernels of these call functions of TVM's runtime, or compute in integers more slowly than ONNX Runtime does, or find
# another index where numbers are infinite.
_LEFT = frozenset(
    {"ArgMax", "ArgMin", "Compress", "NonMaxSuppression", "NonZero", "Unique"}
    | {"DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
    | {"ConvInteger", "QuantizeLinear"}
)
# What may give whole numbers: it moves them, or makes them of others. Arithmetic of them wraps around in ONNX Runtime,
# and a compiler takes it that it does not.
_MOVES = frozenset(
    {
        "Cast",
        "CastLike",
        "Concat",
        "Constant",
        "ConstantOfShape",
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
    }
    | {"GatherElements", "GatherND", "Identity", "Pad", "Reshape", "Shape", "Size", "Slice", "SpaceToDepth"}
    | {"Split", "Squeeze", "Tile", "TopK", "Transpose", "Unsqueeze", "Where"}
)
_FLOAT, _BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL
_WHOLE = frozenset(
    {onnx.TensorProto.INT8, onnx.TensorProto.INT16, onnx.TensorProto.INT32, onnx.TensorProto.INT64}
    | {onnx.TensorProto.UINT8, onnx.TensorProto.UINT16, onnx.TensorProto.UINT32, onnx.TensorProto.UINT64}
)
# What there are kernels of TopK for (`scanning.greatest`).
_ORDERED = frozenset({_FLOAT, onnx.TensorProto.INT32})


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A model with regions, and the library of their kernels.

    `total`: the nodes of the model. `remarks`: which parts were left to ONNX Runtime, and why. `chosen`: the algorithms
    of convolutions.
    """

    model: ModelProto
    library: KernelLibrary | BuiltLibrary
    regions: tuple[Region, ...]
    total: int
    remarks: tuple[str, ...]
    chosen: tuple[AlgorithmChoice, ...] = ()

    @property
    def nodes(self) -> int:
        """The nodes that became kernels."""
        return sum(len(region.nodes) for region in self.regions)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model, and in its folder the library under its name.

        Each is written completely or not at all, the library first: a model without its own library runs its bodies.
        Raises BackendError if a file cannot be written, or if the library would replace a file that is not one.
        """
        check_library_path(path)
        try:
            self.library.save(library_path(path))
            save_regions(self.model, path)
        except OSError as error:
            raise BackendError(f"{path}: cannot be written: {error.strerror or one_line(error)}") from error


@dataclass(frozen=True, slots=True)
class Told:
    """What one process tells another of a `Hybrid` besides its files."""

    regions: tuple[Region, ...]
    total: int
    remarks: tuple[str, ...]
    chosen: tuple[AlgorithmChoice, ...]

    @staticmethod
    def of(made: Hybrid) -> Told:
        return Told(made.regions, made.total, made.remarks, made.chosen)

    def loaded(self, path: str) -> Hybrid:
        """The hybrid that was saved at `path`."""
        library = BuiltLibrary(library_path(path).read_bytes())
        return Hybrid(onnx.load(path), library, self.regions, self.total, self.remarks, self.chosen)


def hybrid(
    model: ModelProto,
    sizes: Mapping[str, Sequence[int]] | Sequence[Mapping[str, Sequence[int]]],
    machine: Machine,
    algorithms: Algorithms = DEFAULT,
) -> Hybrid:
    """Compile a model, as a whole or in regions. Inputs with open dimensions get kernels for these `sizes` (several:
    for each of them); for inputs of other sizes the graph itself runs (see `regions.with_guard`). `algorithms`: those
    that convolutions may use.

    Raises BackendError if no part can be lowered, and for what cannot be lowered at all (see `kernel_library`).
    """
    _check_defaults(model)
    wanted = [sizes] if isinstance(sizes, Mapping) else list(sizes)
    opened = open_inputs(model, wanted)
    if not opened:
        large = weight_bytes(model.graph) > EXTERNAL_ABOVE
        whole = region_of(model.graph, range(len(model.graph.node)))
        done = _compiled(model, whole, machine, algorithms, weights_as_inputs=large)

        def carrying(domain: str) -> ModelProto:
            return with_functions(model, done.regions, domain, weights_as_inputs=large)

        library = kernel_library(done.compiled, machine, _computed(carrying))
        made = carrying(library.domain)
        return Hybrid(made, library, tuple(done.regions.values()), done.total, done.remarks, done.chosen)
    if weight_bytes(model.graph) > EXTERNAL_ABOVE:
        raise BackendError(
            f"input {opened[0]} has open dimensions, and a model of this size gets kernels for fixed ones only: "
            "--fix-shapes"
        )
    different = {tuple(tuple(each[name]) for name in opened): each for each in wanted}
    sizes = [{name: each[name] for name in opened} for each in different.values()]
    return _guarded(model, sizes, machine, algorithms)


def _guarded(
    model: ModelProto,
    wanted: Sequence[Mapping[str, Sequence[int]]],
    machine: Machine,
    algorithms: Algorithms,
) -> Hybrid:
    """Kernels for each of these sizes of the open inputs."""
    parts = []
    outputs = whole_region(model.graph).outputs
    for number, sizes in enumerate(wanted):
        fixed = _with_sizes(model, sizes)
        prefix = f"Size{number}_" if len(wanted) > 1 else ""
        whole = whole_region(fixed.graph, outputs)
        parts.append((fixed, _compiled(fixed, whole, machine, algorithms, prefix)))
    compiled = {name: region for _, done in parts for name, region in done.compiled.items()}

    def carrying(domain: str) -> ModelProto:
        made = model
        for (fixed, done), sizes in zip(parts, wanted):
            name = next(iter(done.regions))
            inner = None if done.whole else with_functions(fixed, done.regions, domain)
            made = with_guard(made, name, sizes, domain, inner)
        return made

    library = kernel_library(compiled, machine, _computed(carrying))
    made, first = carrying(library.domain), parts[0][1]
    return Hybrid(made, library, tuple(first.regions.values()), first.total, first.remarks, first.chosen)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """The regions of a model of fixed sizes, by name, their kernels, and remarks on what was left."""

    regions: Mapping[str, Region]
    compiled: Mapping[str, CompiledRegion]
    total: int
    remarks: tuple[str, ...]

    @property
    def chosen(self) -> tuple[AlgorithmChoice, ...]:
        return tuple(each for region in self.compiled.values() for each in region.chosen)

    @property
    def whole(self) -> bool:
        """Whether one region is the whole graph."""
        return len(self.regions) == 1 and sum(len(r.nodes) for r in self.regions.values()) == self.total


def _check_defaults(model: ModelProto) -> None:
    """Raise BackendError for an input with a default, which a caller may replace."""
    constants = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name in constants:
            raise BackendError(f"input {value.name} has a default, which kernels take for a constant")


def _compiled(
    model: ModelProto,
    whole: Region,
    machine: Machine,
    algorithms: Algorithms,
    prefix: str = "",
    *,
    weights_as_inputs: bool = False,
) -> _Compiled:
    """The regions of a model of fixed sizes, compiled: `whole`, if each node can be lowered, or parts of it.

    Raises BackendError if none can be.
    """
    types = types_of(model, {})
    fits = _fitting(types)
    found = [whole] if all(map(fits, model.graph.node)) and whole.nodes else cut(model.graph, fits)
    regions: dict[str, Region] = {}
    done: dict[str, CompiledRegion] = {}
    remarks: list[str] = []
    waiting = [*reversed(found)]
    while waiting:
        region = waiting.pop()
        try:
            compiled = compile_region(
                model,
                region,
                types,
                machine,
                weights_as_inputs=weights_as_inputs,
                algorithms=algorithms,
            )
        except NodeRefused as error:
            remarks.append(f"{error.title} is left to ONNX Runtime: {error.reason}")
            waiting += reversed(_around(model.graph, region, error.results))
            continue
        except BackendError as error:
            remarks.append(f"{len(region.nodes)} nodes are left to ONNX Runtime: {error.reason}")
            continue
        name = f"{prefix}Region_{len(regions)}"
        regions[name], done[name] = region, compiled
    if not regions:
        raise BackendError(remarks[0] if remarks else _nothing_fits(types))
    return _Compiled(regions, done, len(model.graph.node), tuple(remarks))


def _nothing_fits(types: Mapping[str, TypeProto]) -> str:
    """Why no node can be in a region."""
    if any(each.tensor_type.elem_type == _FLOAT for each in types.values()):
        return "no part of the model can be lowered"
    return "no part of the model can be lowered: kernels compute in single precision, and it has no float32 tensors"


def _around(graph: GraphProto, region: Region, results: Sequence[str]) -> list[Region]:
    """The parts of a region around the node that has these results."""
    inside = {name for i in region.nodes for name in graph.node[i].output} - set(results)
    return cut(graph, lambda node: bool(inside.intersection(node.output)))


def _computed(carrying: Callable[[str], ModelProto]) -> str:
    """The digest of what regions compute. `carrying`: the model with regions in a domain of this name."""
    domain = "xrlflow.unnamed"
    return region_digest(carrying(domain), domain)


def _with_sizes(model: ModelProto, sizes: Mapping[str, Sequence[int]]) -> ModelProto:
    """The model for inputs of these sizes, with what it computes of them folded."""
    fixed = load(model, shapes=sizes, fix_shapes=True)
    try:
        return to_proto(fixed, fixed.graph, opset=opset_of(model))
    except ModelError as error:
        raise BackendError(f"no graph for fixed sizes: {error}") from error


def open_inputs(model: ModelProto, wanted: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
    """The inputs with open dimensions.

    Raises BackendError if their sizes were not given, or are not those of the dimensions that are fixed.
    """
    found = []
    for value in model.graph.input:
        name, tensor = value.name, value.type.tensor_type
        if not value.type.HasField("tensor_type"):
            raise BackendError(f"input {name} is no tensor")
        if not tensor.HasField("shape"):  # a guard compares as many sizes as there are
            raise BackendError(f"input {name} may have any number of dimensions: kernels are for one")
        declared = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
        for shape in (sizes[name] for sizes in wanted if name in sizes):
            fits = len(shape) == len(declared) and all(d in (None, n) for d, n in zip(declared, shape))
            if not fits:
                text = "x".join(str(d or "?") for d in declared)
                raise BackendError(
                    f"input {name} is {text}: it cannot have the shape {'x'.join(map(str, shape))}"
                )
        if None in declared:
            found.append(name)
            if not wanted or any(name not in sizes for sizes in wanted):
                sizes = ",".join(str(d or "?") for d in declared)
                raise BackendError(
                    f"input {name} has open dimensions: kernels are for fixed sizes, give them with "
                    f"--shape {name}={sizes}"
                )
    return found


def _fitting(types: Mapping[str, TypeProto]) -> Callable[[NodeProto], bool]:
    """Whether a node can be in a region: a known operator on tensors of fixed sizes, floats of single precision, that
    is not marked to be left.

    Whole numbers and truth values may be moved, compared and converted.
    """

    def fits(node: NodeProto) -> bool:
        if any(entry.key == ON_RUNTIME for entry in node.metadata_props):
            return False
        if node.op_type in _LEFT or unsupported([(node.domain, node.op_type)]):
            return False
        if node.op_type == "Dropout" and len(node.input) > 2:  # it may be random
            return False
        results = [name for name in node.output if name]
        if not all(name in types and _is_fixed(types[name]) for name in (*names_read(node), *results)):
            return False
        if node.op_type == "TopK" and types[node.input[0]].tensor_type.elem_type not in _ORDERED:
            return False
        whole = any(types[name].tensor_type.elem_type in _WHOLE for name in results)
        return not whole or node.op_type in _MOVES

    return fits


def takes(model: ModelProto, types: Mapping[str, TypeProto]) -> bool:
    """Whether all nodes of a model of fixed sizes can be in a region. `types`: of its values (`types_of`)."""
    return all(map(_fitting(types), model.graph.node))


def _is_fixed(kind: TypeProto) -> bool:
    """Whether a type is that of tensors in a region."""
    tensor = kind.tensor_type
    if not kind.HasField("tensor_type") or not tensor.HasField("shape"):
        return False
    if tensor.elem_type not in {_FLOAT, _BOOL, *_WHOLE}:
        return False
    return all(dim.HasField("dim_value") for dim in tensor.shape.dim)

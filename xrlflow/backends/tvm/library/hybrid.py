"""An ONNX model with its own kernels: a file that any ONNX Runtime runs, and a library for it.

If the entire graph can be lowered, it becomes one region. Otherwise each part that can be lowered becomes a region (see
`onnxio.regions`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TypeProto

from xrlflow.backends.library_files import check_library_path, library_path
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT, AlgorithmChoice, Algorithms
from xrlflow.backends.tvm.library.code_generation import CodeGenerator, CompiledRegion
from xrlflow.backends.tvm.library.forms import Forms
from xrlflow.backends.tvm.library.kernel_library import BuiltLibrary, KernelLibrary, kernel_library
from xrlflow.backends.tvm.library.rows import RowStructure
from xrlflow.backends.tvm.lowering.importer import NodeRefused, unsupported
from xrlflow.backends.tvm.lowering.value_types import types_of
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.onnxio import ImportedModel, ModelError, load, to_proto
from xrlflow.onnxio.exporter import EXTERNAL_ABOVE, typed_proto
from xrlflow.onnxio.model import ON_RUNTIME
from xrlflow.onnxio.region_digest import region_digest
from xrlflow.onnxio.regions import (
    Region,
    cut,
    names_read,
    note_rows,
    region_of,
    rename_domain,
    save_regions,
    unused_domain,
    weight_bytes,
    whole_region,
    with_functions,
    with_guard,
)
from xrlflow.onnxio.versions import opset_of
from xrlflow.storage import files

_DYNAMIC = "DynamicQuantizeLinear"
# Operators that are left to ONNX Runtime. Their kernels call functions of TVM's runtime, or compute in integers more
# slowly than ONNX Runtime does, or return another index if numbers are infinite.
_ON_RUNTIME = frozenset(
    {"ArgMax", "ArgMin", "Compress", "NonMaxSuppression", "NonZero", "Unique"}
    | {"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
)
# How often blocks use a weight: with 16 uses, reading it takes hardly any time (1.06 of the time for each of 128 uses,
# with T5's layers of 512 features), and with up to 8 uses as long as computing with it 11 times.
_USES, _ENOUGH = (128, 16, 8, 1), 32
# Operators whose results may be integers: they move integers, or convert other types to integers. Integer arithmetic
# wraps around in ONNX Runtime, while a C compiler assumes that it does not.
_MOVES = frozenset(
    {
        "Cast",
        "CastLike",
        "Concat",
        "Constant",
        "ConstantOfShape",
        "DepthToSpace",
        _DYNAMIC,
        "Expand",
        "Flatten",
        "Gather",
    }
    | {"GatherElements", "GatherND", "Identity", "Pad", "Reshape", "Shape", "Size", "Slice", "SpaceToDepth"}
    | {"QuantizeLinear", "Split", "Squeeze", "Tile", "TopK", "Transpose", "Unsqueeze", "Where"}
)
_FLOAT, _BOOL, _HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL, onnx.TensorProto.FLOAT16
_WHOLE = frozenset(
    {onnx.TensorProto.INT8, onnx.TensorProto.INT16, onnx.TensorProto.INT32, onnx.TensorProto.INT64}
    | {onnx.TensorProto.UINT8, onnx.TensorProto.UINT16, onnx.TensorProto.UINT32, onnx.TensorProto.UINT64}
)
# The types for which there are kernels of TopK (`scanning.greatest`).
_ORDERED = frozenset({_FLOAT, onnx.TensorProto.INT32})


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A model with regions, and the library of their kernels.

    `total`: the number of nodes of the model. `remarks`: which parts were left to ONNX Runtime, and why. `chosen`: the
    algorithms that were chosen for layers. `rows`: the greatest number of rows of a block, if the regions are for any
    number of rows; 0: they are for fixed sizes.
    """

    model: ModelProto
    library: KernelLibrary | BuiltLibrary
    regions: tuple[Region, ...]
    total: int
    remarks: tuple[str, ...]
    chosen: tuple[AlgorithmChoice, ...] = ()
    rows: int = 0

    @property
    def nodes(self) -> int:
        """The number of nodes that became kernels."""
        return sum(len(region.nodes) for region in self.regions)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model, and next to it the library.

        Each is written completely or not at all, the library first: without its own library, ONNX Runtime computes the
        regions of a model with ONNX operators. Raises BackendError if a file cannot be written, or if the library would
        replace a file that is no library of xrlflow.
        """
        check_library_path(path)
        try:
            self.library.save(library_path(path))
            save_regions(self.model, path)
        except OSError as error:
            raise BackendError(files.cannot_write(path, error)) from error


@dataclass(frozen=True, slots=True)
class SavedHybrid:
    """A `Hybrid` in the files that it was saved to, which have all its weights twice. See there for the fields."""

    path: str
    regions: tuple[Region, ...]
    total: int
    remarks: tuple[str, ...]
    chosen: tuple[AlgorithmChoice, ...]
    rows: int

    @staticmethod
    def at(path: str, hybrid: Hybrid) -> SavedHybrid:
        """Save a hybrid at `path`. Raises BackendError."""
        hybrid.save(path)
        return SavedHybrid(path, hybrid.regions, hybrid.total, hybrid.remarks, hybrid.chosen, hybrid.rows)

    @property
    def nodes(self) -> int:
        """The number of nodes that became kernels."""
        return sum(len(region.nodes) for region in self.regions)

    def loaded(self) -> Hybrid:
        """The hybrid, which no longer needs the files."""
        library = BuiltLibrary(library_path(self.path).read_bytes())
        return Hybrid(
            onnx.load(self.path), library, self.regions, self.total, self.remarks, self.chosen, self.rows
        )


def hybrid(
    source: ModelProto | str,
    sizes: Mapping[str, Sequence[int]] | Sequence[Mapping[str, Sequence[int]]],
    machine: Machine,
    algorithms: Algorithms = DEFAULT,
) -> Hybrid:
    """Compile a model (or the model in a file), entirely or in regions. `algorithms`: those that layers may use.

    If inputs have open dimensions, there are kernels for these `sizes` only (if `sizes` is a sequence: for each of its
    items); for inputs of other sizes the graph itself runs (see `regions.with_guard`). If not all sizes are given, the
    parts of the model that compute each row alone have kernels for any sizes (see `rows`).

    Raises BackendError if no part can be lowered, or if the library cannot be built (see `kernel_library`).
    """
    requested = [sizes] if isinstance(sizes, Mapping) else list(sizes)
    # A file is not read as a whole here: its weights stay mapped.
    opened = open_inputs(source if isinstance(source, ModelProto) else load(source).frame, requested)
    if opened:
        unsaid = any(name not in each for name in opened for each in requested or [{}])
        by_rows = _by_rows(load(source), machine, algorithms, whole=not unsaid)
        if by_rows is not None:
            return by_rows
    model = onnx.load(source) if isinstance(source, str) else source
    _check_defaults(model)
    if not opened:
        large = weight_bytes(model.graph) > EXTERNAL_ABOVE
        whole = region_of(model.graph, range(len(model.graph.node)))
        with CodeGenerator(machine) as generator:
            compiled = _compiled(model, whole, machine, algorithms, generator, weights_as_inputs=large)

            domain = unused_domain(model)
            carrier = with_functions(model, compiled.regions, domain, weights_as_inputs=large)
            library = _library_for(carrier, domain, compiled.compiled, machine, generator)
        return Hybrid(
            carrier,
            library,
            tuple(compiled.regions.values()),
            compiled.total,
            compiled.remarks,
            compiled.chosen,
        )
    if weight_bytes(model.graph) > EXTERNAL_ABOVE:
        raise BackendError(
            f"input {opened[0]} has open dimensions, and a model of this size gets kernels for fixed ones only: "
            "--fix-shapes"
        )
    different = {tuple(tuple(each[name]) for name in opened): each for each in requested}
    sizes = [{name: each[name] for name in opened} for each in different.values()]
    return _guarded(model, sizes, machine, algorithms)


def _guarded(
    model: ModelProto,
    requested: Sequence[Mapping[str, Sequence[int]]],
    machine: Machine,
    algorithms: Algorithms,
) -> Hybrid:
    """Compile kernels for each of the requested sets of sizes of the open inputs (inputs with open dimensions)."""
    parts = []
    outputs = whole_region(model.graph).outputs
    with CodeGenerator(machine) as generator:
        for number, sizes in enumerate(requested):
            fixed = _with_sizes(model, sizes)
            prefix = f"Size{number}_" if len(requested) > 1 else ""
            whole = whole_region(fixed.graph, outputs)
            parts.append((fixed, _compiled(fixed, whole, machine, algorithms, generator, prefix)))
        compiled = {name: region for _, part in parts for name, region in part.compiled.items()}
        carrier, domain = model, unused_domain(model)
        for (fixed, compiled_part), sizes in zip(parts, requested):
            name = next(iter(compiled_part.regions))
            inner = None if compiled_part.whole else with_functions(fixed, compiled_part.regions, domain)
            carrier = with_guard(carrier, name, sizes, domain, inner)
        library = _library_for(carrier, domain, compiled, machine, generator)
    first = parts[0][1]
    return Hybrid(carrier, library, tuple(first.regions.values()), first.total, first.remarks, first.chosen)


def _by_rows(imported: ImportedModel, machine: Machine, algorithms: Algorithms, whole: bool) -> Hybrid | None:
    """Compile the parts of a model that treat each row alone, for any number of rows. `whole`: None unless each row of
    the outputs depends on one row of the inputs alone, and if nothing can be compiled."""
    _check_overridable(imported.overridable)
    try:
        named, kinds = typed_proto(imported, imported.graph, opset=imported.opset)
    except ModelError as error:
        if whole:
            return None
        raise BackendError(f"no graph with names: {error}") from error
    large = weight_bytes(named.graph) > EXTERNAL_ABOVE
    if large and not whole:
        raise BackendError("a model of this size gets kernels for fixed sizes only: --fix-shapes")
    structure = RowStructure(named, kinds)
    weights = {tensor.name for tensor in named.graph.initializer}
    fits = _fitting(structure.types(1), weights, _integer_products(named.graph, weights))
    parts = [
        part
        for part in cut(named.graph, lambda node: fits(node) and structure.fits(node), _ends)
        if structure.ports(part) is not None and structure.reuse(named.graph, part) is not None
    ]
    if whole and (large or [len(part.nodes) for part in parts] != [len(named.graph.node)]):
        return None

    forms = Forms(named, machine)

    def compiled_for_rows(region: Region) -> CompiledRegion:
        ports = structure.ports(region)
        if ports is None:
            raise BackendError("an output has other rows than the inputs")
        blocks = []
        counts = _blocks_of_rows(structure.reuse(named.graph, region) or 1.0)
        for count in counts:
            types = structure.types(count, (*region.inputs, *region.outputs))
            sharing = replace(algorithms, packed_for=counts[0] if len(counts) > 1 else 0)
            block = forms.compile(region, types, algorithms=sharing)
            _check_shapes(region, block, types)
            blocks.append(replace(block, rows=count))
        return replace(blocks[0], ports=ports, smaller=tuple(blocks[1:]))

    with CodeGenerator(machine) as generator:
        compiled = _compiled_parts(named.graph, parts, compiled_for_rows, generator)
        if not compiled.regions:
            if whole:
                return None
            raise BackendError(
                compiled.remarks[0]
                if compiled.remarks
                else "no part of the model has products with weights and computes each row alone"
            )
        domain = unused_domain(named)
        carrier = with_functions(named, compiled.regions, domain)
        note_rows(carrier, domain, {n: [b.rows for b in c.blocks] for n, c in compiled.compiled.items()})
        library = _library_for(carrier, domain, compiled.compiled, machine, generator)
    return Hybrid(
        carrier, library, tuple(compiled.regions.values()), compiled.total, compiled.remarks,
        compiled.chosen, max(each.rows for each in compiled.compiled.values()),
    )  # fmt: skip


def _blocks_of_rows(reuse: float) -> list[int]:
    """The numbers of rows of the blocks of a region whose rows use each weight so often on average (see `_USES`). A row
    that uses it `_ENOUGH` times itself is a block."""
    if reuse >= _ENOUGH:
        return [1]
    return sorted({max(1, round(uses / reuse)) for uses in _USES}, reverse=True)


def _check_shapes(region: Region, block: CompiledRegion, types: Mapping[str, TypeProto]) -> None:
    """Raise BackendError if outputs have other shapes than their number of rows says."""
    for name, number in zip(region.outputs, block.plan.outputs, strict=True):
        shape = tuple(dim.dim_value for dim in types[name].tensor_type.shape.dim)
        if block.plan.tensors[number].shape != shape:
            raise BackendError(f"{name} has the shape {block.plan.tensors[number].shape}, not {shape}")


@dataclass(frozen=True, slots=True)
class _Compiled:
    """The regions of a model of fixed sizes, by name, their kernels, and remarks on the nodes that ONNX Runtime
    computes."""

    regions: Mapping[str, Region]
    compiled: Mapping[str, CompiledRegion]
    total: int
    remarks: tuple[str, ...]

    @property
    def chosen(self) -> tuple[AlgorithmChoice, ...]:
        return tuple(each for region in self.compiled.values() for each in region.chosen)

    @property
    def whole(self) -> bool:
        """Whether one region has all nodes of the graph."""
        return len(self.regions) == 1 and sum(len(r.nodes) for r in self.regions.values()) == self.total


def _check_defaults(model: ModelProto) -> None:
    """Raise BackendError for an input with a default value, since a caller may pass another value."""
    constants = {tensor.name for tensor in model.graph.initializer}
    _check_overridable(value.name for value in model.graph.input if value.name in constants)


def _check_overridable(names: Iterable[str]) -> None:
    for name in names:
        raise BackendError(f"input {name} has a default, which kernels take for a constant")


def _compiled(
    model: ModelProto,
    whole: Region,
    machine: Machine,
    algorithms: Algorithms,
    generator: CodeGenerator,
    prefix: str = "",
    *,
    weights_as_inputs: bool = False,
) -> _Compiled:
    """Compile the regions of a model of fixed sizes: `whole` if each node can be lowered, otherwise parts of it. Each
    is added to the generator as soon as it is lowered.

    Raises BackendError if no part can be lowered.
    """
    types = types_of(model, {})
    weights = {tensor.name for tensor in model.graph.initializer}
    fits = _fitting(types, weights, _integer_products(model.graph, weights))
    undivided = all(fits(node) and not _ends(node) for node in model.graph.node) and whole.nodes
    parts = [whole] if undivided else cut(model.graph, fits, _ends)
    if len(parts) == 1 and len(parts[0].nodes) == len(model.graph.node):
        parts = [whole]  # whose inputs and outputs have the order of the graph's, as a guard needs them

    forms = Forms(model, machine)

    def compiled_region(region: Region) -> CompiledRegion:
        return forms.compile(region, types, weights_as_inputs=weights_as_inputs, algorithms=algorithms)

    compiled = _compiled_parts(model.graph, parts, compiled_region, generator, prefix)
    if not compiled.regions:
        raise BackendError(compiled.remarks[0] if compiled.remarks else _nothing_fits(types))
    return compiled


def _compiled_parts(
    graph: GraphProto,
    parts: Sequence[Region],
    compile_part: Callable[[Region], CompiledRegion],
    generator: CodeGenerator,
    prefix: str = "",
) -> _Compiled:
    """Compile parts of a graph. A part with a node that TVM refuses is cut at that node."""
    regions: dict[str, Region] = {}
    kernels: dict[str, CompiledRegion] = {}
    remarks: list[str] = []
    pending = [*reversed(parts)]
    while pending:
        region = pending.pop()
        try:
            compiled = compile_part(region)
        except NodeRefused as error:
            remarks.append(f"{error.title} is left to ONNX Runtime: {error.reason}")
            pending += reversed(_without_node(graph, region, error.results))
            continue
        except BackendError as error:
            remarks.append(f"{len(region.nodes)} nodes are left to ONNX Runtime: {error.reason}")
            continue
        name = f"{prefix}Region_{len(regions)}"
        regions[name], kernels[name] = region, compiled
        generator.add(compiled)
    return _Compiled(regions, kernels, len(graph.node), tuple(remarks))


def _ends(node: NodeProto) -> bool:
    """Whether a region ends with a node. Bytes leave the region, so that verification can compare them with those of
    the original: a tie that a kernel rounds the other way changes everything after it.
    """
    return node.op_type in (_DYNAMIC, "QuantizeLinear")


def _nothing_fits(types: Mapping[str, TypeProto]) -> str:
    """The reason why no node can be in a region, as a message."""
    if any(each.tensor_type.elem_type == _FLOAT for each in types.values()):
        return "no part of the model can be lowered"
    return "no part of the model can be lowered: kernels compute in single precision, and it has no float32 tensors"


def _without_node(graph: GraphProto, region: Region, results: Sequence[str]) -> list[Region]:
    """The parts of a region without the node that has these results."""
    inside = {name for i in region.nodes for name in graph.node[i].output} - set(results)
    return cut(graph, lambda node: bool(inside.intersection(node.output)), _ends)


def _library_for(
    carrier: ModelProto, domain: str, compiled: Mapping[str, CompiledRegion], machine: Machine,
    generator: CodeGenerator,
) -> KernelLibrary:  # fmt: skip
    """The library of a model with regions in `domain`, which are then in the library's domain."""
    library = kernel_library(compiled, machine, region_digest(carrier, domain), generator)
    rename_domain(carrier, domain, library.domain)
    return library


def _with_sizes(model: ModelProto, sizes: Mapping[str, Sequence[int]]) -> ModelProto:
    """The model for inputs of these sizes. All values that depend on sizes alone are folded to constants."""
    fixed = load(model, shapes=sizes, fix_shapes=True)
    try:
        return to_proto(fixed, fixed.graph, opset=opset_of(model))
    except ModelError as error:
        raise BackendError(f"no graph for fixed sizes: {error}") from error


def open_inputs(model: ModelProto, requested: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
    """The names of inputs with open dimensions. Raises BackendError if requested sizes contradict fixed dimensions."""
    opened = []
    for value in model.graph.input:
        name, tensor = value.name, value.type.tensor_type
        if not value.type.HasField("tensor_type"):
            raise BackendError(f"input {name} is no tensor")
        if not tensor.HasField("shape"):  # the guard of kernels compares a fixed number of sizes
            raise BackendError(f"input {name} may have any number of dimensions: kernels are for one")
        declared = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
        for shape in (sizes[name] for sizes in requested if name in sizes):
            fits = len(shape) == len(declared) and all(d in (None, n) for d, n in zip(declared, shape))
            if not fits:
                text = "x".join(str(d or "?") for d in declared)
                raise BackendError(
                    f"input {name} is {text}: it cannot have the shape {'x'.join(map(str, shape))}"
                )
        if None in declared:
            opened.append(name)
    return opened


def _fitting(
    types: Mapping[str, TypeProto],
    weights: AbstractSet[str] = frozenset(),
    left: AbstractSet[str] = frozenset(),
) -> Callable[[NodeProto], bool]:
    """A function that says whether a node can be in a region. The node must be a supported operator on tensors of fixed
    sizes and of floats in single precision, and must not be marked for ONNX Runtime.

    Integers and booleans may be moved, compared and converted. `weights` of float16 are converted when the region is
    compiled. Nodes that compute values in `left` do not fit.
    """

    def fits(node: NodeProto) -> bool:
        if not left.isdisjoint(node.output):
            return False
        if any(entry.key == ON_RUNTIME for entry in node.metadata_props):
            return False
        if node.op_type in _ON_RUNTIME or unsupported([(node.domain, node.op_type)]):
            return False
        if node.op_type == "Dropout" and len(node.input) > 2:  # its third input may make it random
            return False
        results = [name for name in node.output if name]
        read = names_read(node)
        if node.op_type == "Cast" and read <= weights and types[node.input[0]].tensor_type.elem_type == _HALF:
            read = set()
        if not all(name in types and _is_fixed(types[name]) for name in (*read, *results)):
            return False
        if node.op_type == "TopK" and types[node.input[0]].tensor_type.elem_type not in _ORDERED:
            return False
        whole = any(types[name].tensor_type.elem_type in _WHOLE for name in results)
        return not whole or node.op_type in _MOVES

    return fits


def _integer_products(graph: GraphProto, weights: AbstractSet[str]) -> set[str]:
    """The values around integer products that ONNX Runtime computes in one operator: DynamicQuantizeLinear,
    MatMulInteger, Cast, Mul by the scales, and Add of a bias."""
    readers: dict[str, list[NodeProto]] = {}
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        for name in names_read(node):
            readers.setdefault(name, []).append(node)

    def reader(node: NodeProto, op: str) -> NodeProto | None:
        """The only reader of a node's result, if it is this operator."""
        found = readers.get(node.output[0], [])
        return found[0] if len(found) == 1 and found[0].op_type == op else None

    values: set[str] = set()
    for product in graph.node:
        cast = reader(product, "Cast") if product.op_type == "MatMulInteger" else None
        scaled = None if cast is None else reader(cast, "Mul")
        quantised = makers.get(product.input[0])
        if cast is None or scaled is None or quantised is None or quantised.op_type != _DYNAMIC:
            continue
        biased = reader(scaled, "Add")
        if biased is not None and not weights.isdisjoint(biased.input):
            values.update(biased.output)
        scale = quantised.output[1]
        scales = [makers[name] for name in scaled.input if name in makers and scale in makers[name].input]
        for node in (quantised, cast, scaled, *scales):
            values.update(node.output)
    return values


def takes(model: ModelProto, types: Mapping[str, TypeProto]) -> bool:
    """Whether all nodes of a model of fixed sizes can be in a region. `types`: the types of its values (`types_of`)."""
    return all(map(_fitting(types), model.graph.node))


def _is_fixed(kind: TypeProto) -> bool:
    """Whether tensors of a type can be in a region."""
    tensor = kind.tensor_type
    if not kind.HasField("tensor_type") or not tensor.HasField("shape"):
        return False
    if tensor.elem_type not in {_FLOAT, _BOOL, *_WHOLE}:
        return False
    return all(dim.HasField("dim_value") for dim in tensor.shape.dim)

"""Reads HLO modules, as serialized protocol buffers, without jaxlib: digests, counts, and graphs of the instructions.

Only the protobuf fields that this package uses are declared (their numbers come from openxla/xla,
`xla/service/hlo.proto` and `xla/xla_data.proto`); all other fields are preserved unread, so that the digest covers
them.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from xrlflow.passes.compiler import CompilerError, ModuleGraph

# Bytes of an element by the number of its type (`PrimitiveType`). Types of less than a byte count as one.
_WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 15: 8, 16: 2, 18: 16}
_TUPLE = 13
# Instructions that hold or pass on values, and compute nothing.
BOOKKEEPING = frozenset({"parameter", "constant", "tuple", "get-tuple-element"})
_EFFECTS = frozenset(
    {"send", "send-done", "recv", "recv-done", "infeed", "outfeed", "rng-get-and-update-state", "domain"}
)
# Fields of an instruction that the digest leaves out: they hold names or origins, or the digest covers them otherwise.
_UNNAMED = (
    *("name", "id", "operand_ids", "called_computation_ids", "control_predecessor_ids", "metadata"),
    *("original_value", "statistics_viz"),
)

# The names of HLO's opcodes (openxla/xla, `xla/hlo/ir/hlo_opcode.h`).
# fmt: off
OPCODES = (
    "abs", "acos", "acosh", "add", "add-dependency", "after-all", "all-gather", "all-gather-done",
    "all-gather-start", "all-reduce", "all-reduce-done", "all-reduce-start", "all-to-all", "and", "asin",
    "asinh", "async-done", "async-start", "async-update", "atan2", "atanh", "batch-norm-grad",
    "batch-norm-inference", "batch-norm-training", "bitcast", "bitcast-convert", "broadcast", "call",
    "cbrt", "ceil", "cholesky", "clamp", "collective-broadcast", "collective-permute",
    "collective-permute-done", "collective-permute-start", "compare", "complex", "concatenate",
    "conditional", "constant", "convert", "convolution", "copy", "copy-done", "copy-start", "cosine",
    "cosh", "count-leading-zeros", "custom-call", "divide", "domain", "dot", "dynamic-reshape",
    "dynamic-slice", "dynamic-update-slice", "erf", "exponential", "exponential-minus-one", "fft", "floor",
    "fusion", "gather", "get-dimension-size", "get-tuple-element", "imag", "infeed", "iota", "is-finite",
    "log", "log-plus-one", "logistic", "map", "maximum", "minimum", "multiply", "negate", "not",
    "opt-barrier", "or", "outfeed", "pad", "parameter", "partition-id", "popcnt", "power",
    "ragged-all-to-all", "ragged-dot", "real", "recv", "recv-done", "reduce", "reduce-precision",
    "reduce-scatter", "reduce-window", "remainder", "replica-id", "reshape", "reverse", "rng",
    "rng-bit-generator", "rng-get-and-update-state", "round-nearest-afz", "round-nearest-even", "rsqrt",
    "scan", "scatter", "select", "select-and-scatter", "send", "send-done", "set-dimension-size",
    "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sinh", "slice", "sort",
    "sqrt", "stochastic-convert", "subtract", "tan", "tanh", "topk", "transpose", "triangular-solve",
    "tuple", "while", "xor",
)
# fmt: on
_NUMBERS = {name: number for number, name in enumerate(OPCODES)}

_DOUBLE, _FLOAT, _INT, _TEXT, _MESSAGE, _BYTES = 1, 2, 3, 9, 11, 12
_MESSAGES: dict[str, tuple[tuple[str, int, int, bool, str], ...]] = {
    "Shape": (
        ("element_type", 2, _INT, False, ""),
        ("dimensions", 3, _INT, True, ""),
        ("tuple_shapes", 4, _MESSAGE, True, "Shape"),
        ("is_dynamic_dimension", 6, _INT, True, ""),
    ),
    "Indexing": (("batching_dims", 5, _INT, True, ""),),
    "Instruction": (
        ("name", 1, _TEXT, False, ""),
        ("opcode", 2, _TEXT, False, ""),
        ("shape", 3, _MESSAGE, False, "Shape"),
        ("metadata", 7, _BYTES, False, ""),
        ("parameter_number", 9, _INT, False, ""),
        ("gather", 33, _MESSAGE, False, "Indexing"),
        ("id", 35, _INT, False, ""),
        ("operand_ids", 36, _INT, True, ""),
        ("control_predecessor_ids", 37, _INT, True, ""),
        ("called_computation_ids", 38, _INT, True, ""),
        ("scatter", 48, _MESSAGE, False, "Indexing"),
        ("custom_call_has_side_effect", 65, _INT, False, ""),
        ("statistics_viz", 82, _BYTES, False, ""),
        ("original_value", 87, _BYTES, False, ""),
    ),
    "Computation": (
        ("name", 1, _TEXT, False, ""),
        ("instructions", 2, _MESSAGE, True, "Instruction"),
        ("id", 5, _INT, False, ""),
        ("root_id", 6, _INT, False, ""),
    ),
    "Module": (
        ("name", 1, _TEXT, False, ""),
        ("entry_computation_name", 2, _TEXT, False, ""),
        ("computations", 3, _MESSAGE, True, "Computation"),
        ("host_program_shape", 4, _MESSAGE, False, "Program"),
        ("id", 5, _INT, False, ""),
        ("entry_computation_id", 6, _INT, False, ""),
        ("schedule", 7, _BYTES, False, ""),
        ("profile_info", 13, _BYTES, True, ""),
        ("stack_frame_index", 17, _BYTES, False, ""),
    ),
    "Program": (
        ("parameters", 1, _MESSAGE, True, "Shape"),
        ("result", 2, _MESSAGE, False, "Shape"),
    ),
}
# Fields of a module that the digest does not cover directly: its computations, names, and fields that XLA changes in
# each compilation. The digest covers all other fields: which inputs give their memory to outputs, shardings, and the
# like.
_APART = (
    *("name", "entry_computation_name", "computations", "host_program_shape", "id", "entry_computation_id"),
    *("schedule", "profile_info", "stack_frame_index"),
)
# Further fields, which are read and changed but not declared in the message class for digests (a digest depends on
# which fields are declared).
_FURTHER: dict[str, tuple[tuple[str, int, int, bool, str], ...]] = {
    "Indexing": (("start_index_map", 3, _INT, True, ""), ("index_vector_dim", 4, _INT, False, "")),
    "Literal": (
        ("shape", 1, _MESSAGE, False, "Shape"),
        ("f32s", 8, _FLOAT, True, ""),
        ("f64s", 9, _DOUBLE, True, ""),
        ("tuple_literals", 10, _MESSAGE, True, "Literal"),
        ("f16s", 11, _BYTES, False, ""),
        ("c64s", 12, _FLOAT, True, ""),
        ("bf16s", 13, _BYTES, False, ""),
        ("c128s", 18, _DOUBLE, True, ""),
    ),
    "Precision": (("algorithm", 2, _INT, False, ""),),
    "Instruction": (
        ("literal", 8, _MESSAGE, False, "Literal"),
        ("tuple_index", 13, _INT, False, ""),
        ("dimensions", 14, _INT, True, ""),
        ("gather_slice_sizes", 34, _INT, True, ""),
        ("precision_config", 51, _MESSAGE, False, "Precision"),
    ),
    "Computation": (("program_shape", 4, _MESSAGE, False, "Program"),),
}


@cache
def _module_class(full: bool) -> Any:
    """The protobuf message class of modules, built from the first table of fields above, or (`full`) from both
    tables."""
    from google.protobuf import (  # type: ignore[import-untyped]
        descriptor_pb2,
        descriptor_pool,
        message_factory,
    )

    file = descriptor_pb2.FileDescriptorProto(
        name="xrlflow/hlo.proto", package="xrlflow.hlo", syntax="proto3"
    )
    for message in dict.fromkeys((*_MESSAGES, *(_FURTHER if full else ()))):
        declared = file.message_type.add(name=message)
        fields = (*_MESSAGES.get(message, ()), *(_FURTHER.get(message, ()) if full else ()))
        for name, number, kind, repeated, of in fields:
            declared.field.add(
                name=name,
                number=number,
                type=kind,
                label=3 if repeated else 1,
                **({"type_name": f".xrlflow.hlo.{of}"} if of else {}),
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("xrlflow.hlo.Module"))


def parse(proto: bytes, full: bool = False) -> Any:
    """The message of a serialized HloModuleProto. Raises CompilerError if the bytes are not valid.

    `full`: with constants, dimensions of indices and the like; such a message has no digest.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    module = _module_class(full)()
    try:
        module.ParseFromString(proto)
    except DecodeError as error:
        raise CompilerError(f"the bytes are no HLO module: {error}") from error
    if not module.computations:
        raise CompilerError("the HLO module has no computation")
    return module


def without_number(proto: bytes) -> bytes:
    """A serialized module without its id number, which XLA chooses anew in every compilation."""
    module = parse(proto)
    module.ClearField("id")
    plain: bytes = module.SerializeToString(deterministic=True)
    return plain


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts over the live instructions of a module."""

    operations: int  # live instructions that compute something
    instructions: int
    opcodes: tuple[tuple[str, int], ...]  # live instructions of each kind
    computations: tuple[int, ...]  # operations of each computation that is used, the entry first


def counts(module: Any) -> Counts:
    """Count the instructions on which the module's result depends.

    An instruction is live if the root of its computation depends on it, or if it has an effect. A computation is used
    if a live instruction calls it. `operations` excludes parameters, constants, tuples and their elements: they
    compute nothing, and XLA's own importer creates and merges them freely.
    """
    opcodes: Counter[str] = Counter()
    sizes = []
    for _, instructions in live(module):
        names = [i.opcode for i in instructions]
        opcodes.update(names)
        sizes.append(sum(name not in BOOKKEEPING for name in names))
    entry, others = sizes[0], sorted(sizes[1:], reverse=True)
    return Counts(sum(sizes), opcodes.total(), tuple(sorted(opcodes.items())), (entry, *others))


def sizes(module: Any) -> list[int]:
    """The number of instructions of each computation, in ascending order. Modules with equal digests have equal
    lists."""
    return sorted(len(c.instructions) for c in module.computations)


def live(module: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The computations that are used, the entry first, each with its live instructions (producers first)."""
    by_id = {c.id: c for c in module.computations}
    pending, visited = [module.entry_computation_id or module.computations[-1].id], set()
    while pending:
        number = pending.pop()
        if number in visited:
            continue
        visited.add(number)
        computation = by_id[number]
        roots = [computation.root_id, *(i.id for i in computation.instructions if _has_effect(i))]
        instructions = list(_ordered(computation, roots))
        pending += [called for i in instructions for called in i.called_computation_ids]
        yield computation, instructions


def bytes_of_calls(module: Any) -> int:
    """The bytes that calls to other libraries read and write, multiplied by how often their functions are called. The
    body of a loop counts once, as in XLA's cost analysis.
    """
    own: dict[int, int] = {}
    calls: dict[int, Counter[int]] = {}
    for computation, instructions in live(module):
        by_id = {i.id: i for i in instructions}
        own[computation.id] = sum(
            extent(i.shape)[1] + sum(extent(by_id[o].shape)[1] for o in i.operand_ids)
            for i in instructions
            if i.opcode == "custom-call"
        )
        calls[computation.id] = Counter(c for i in instructions for c in i.called_computation_ids)
    entry = next(iter(own))

    @cache
    def of(number: int) -> int:
        return own[number] + sum(of(called) * count for called, count in calls[number].items())

    return of(entry)


def _has_effect(instruction: Any) -> bool:
    return instruction.opcode in _EFFECTS or bool(instruction.custom_call_has_side_effect)


def _ordered(computation: Any, roots: Iterable[int]) -> Iterator[Any]:
    """The instructions on which the roots depend, operands first, in an order that does not depend on names.

    Raises CompilerError for an instruction that depends on itself.
    """
    by_id = {i.id: i for i in computation.instructions}
    begun: set[int] = set()
    done: set[int] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            number, ready = stack.pop()
            if number in done:
                continue
            instruction = by_id[number]
            if ready:
                done.add(number)
                yield instruction
                continue
            if number in begun:  # the instruction is an operand of its own operands
                raise CompilerError(
                    f"the HLO module is damaged: the instruction {instruction.name} depends on itself"
                )
            begun.add(number)
            stack.append((number, True))
            before = (*instruction.operand_ids, *instruction.control_predecessor_ids)
            stack.extend((b, False) for b in reversed(before) if b not in done)


def digest(module: Any) -> str:
    """A digest (32 hex digits) of the entry and the computations that it calls, without names, ids and metadata, and
    of the module's other fields, declared or not.

    It covers instructions without readers, too, since passes see them. The message is changed: names are cleared.
    """
    by_id = {c.id: c for c in module.computations}
    numbered: dict[int, int] = {}

    def of(number: int) -> bytes:
        if number in numbered:  # a second call of this computation, which must differ from a call of a copy
            return b"again %d" % numbered[number]
        numbered[number] = len(numbered)
        computation = by_id[number]
        state = hashlib.blake2b(digest_size=16)
        numbers: dict[int, int] = {}
        root = computation.root_id
        for instruction in list(_ordered(computation, (root, *(i.id for i in computation.instructions)))):
            numbers[instruction.id] = len(numbers)
            before = [numbers[o] for o in instruction.operand_ids]
            before += [-1, *(numbers[o] for o in instruction.control_predecessor_ids)]
            state.update(repr(before).encode())
            for called in instruction.called_computation_ids:
                state.update(of(called))
            for field in _UNNAMED:
                instruction.ClearField(field)
            state.update(instruction.SerializeToString(deterministic=True))
        state.update(b"root %d" % numbers[root])
        return state.digest()

    state = hashlib.blake2b(of(module.entry_computation_id or module.computations[-1].id), digest_size=16)
    for field in _APART:
        module.ClearField(field)
    state.update(module.SerializeToString(deterministic=True))
    return state.hexdigest()


def graph(module: Any) -> ModuleGraph:
    """The live instructions of all computations (see `ModuleGraph`)."""
    parts = list(live(module))
    numbers: dict[int, int] = {}
    roots: dict[int, int] = {}
    for computation, instructions in parts:
        for instruction in instructions:
            numbers[instruction.id] = len(numbers)
        roots[computation.id] = numbers[computation.root_id]
    opcode = np.full(len(numbers), len(OPCODES), np.int64)
    x = np.zeros((len(numbers), 6), np.float32)
    edges: list[tuple[int, int, int]] = []
    for position, (computation, instructions) in enumerate(parts):
        for instruction in instructions:
            at = numbers[instruction.id]
            opcode[at] = _NUMBERS.get(instruction.opcode, len(OPCODES))
            elements, size = extent(instruction.shape)
            is_root = at == roots[computation.id]
            x[at, :5] = (
                elements,
                size,
                len(instruction.shape.dimensions),
                is_root,
                is_root and position == 0,
            )
            edges += [(numbers[o], at, min(i, 6)) for i, o in enumerate(instruction.operand_ids)]
            edges += [(roots[c], at, 7) for c in instruction.called_computation_ids]
    table = np.array(edges, np.int64).reshape(-1, 3)
    x[:, 5] = np.bincount(table[:, 0], minlength=len(numbers))
    x[:, (0, 1, 5)] = np.log2(1.0 + x[:, (0, 1, 5)])
    return ModuleGraph(opcode, x, np.ascontiguousarray(table[:, :2].T), table[:, 2].copy())


def extent(shape: Any) -> tuple[int, int]:
    """The number of elements and of bytes of a shape; for a tuple, the sums over its parts."""
    if shape.element_type == _TUPLE:
        parts = [extent(part) for part in shape.tuple_shapes]
        return sum(e for e, _ in parts), sum(b for _, b in parts)
    elements = math.prod(shape.dimensions)
    return elements, elements * _WIDTHS.get(shape.element_type, 1)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the entry: its element type (a number of `PrimitiveType`) and dimensions."""

    element_type: int
    dimensions: tuple[int, ...]


def check_interface(module: Any) -> None:
    """Raise CompilerError for parameters that are tuples, for a result with tuples inside a tuple (XLA's importer
    flattens these tuples, so callers would have to change), and for a damaged module.
    """
    try:
        entry, _ = next(live(module))
        root = {i.id: i for i in entry.instructions}[entry.root_id]
    except KeyError as error:
        raise CompilerError(
            f"the HLO module is damaged: it has no instruction or computation {error}"
        ) from error
    parameters(module)
    if any(part.element_type == _TUPLE for part in root.shape.tuple_shapes):
        raise CompilerError(f"the result {root.name} has tuples in a tuple: give their parts side by side")


def parameters(module: Any) -> list[Parameter]:
    """The parameters of the entry in order. Raises CompilerError if one is a tuple."""
    entry, _ = next(live(module))
    by_number = {}
    for instruction in entry.instructions:
        if instruction.opcode == "parameter":
            if instruction.shape.element_type == _TUPLE:
                raise CompilerError(f"parameter {instruction.name} is a tuple: give its parts as parameters")
            by_number[instruction.parameter_number] = Parameter(
                instruction.shape.element_type, tuple(instruction.shape.dimensions)
            )
    return [by_number[number] for number in sorted(by_number)]


def interface_bytes(module: Any) -> int:
    """The bytes of all parameters and results."""
    entry, _ = next(live(module))
    shapes = [i.shape for i in entry.instructions if i.opcode == "parameter" or i.id == entry.root_id]
    return sum(extent(shape)[1] for shape in shapes)


def has_batched_indices(module: Any) -> bool:
    """Whether a gather or scatter has batch dimensions."""
    return any(
        i.gather.batching_dims or i.scatter.batching_dims for c in module.computations for i in c.instructions
    )


# The numbers of these types: bool, the integers of 32 and 64 bits, float32, float64, tuples, tokens and the complex
# types.
_ORDINARY = frozenset({1, 4, 5, 8, 9, 11, 12, _TUPLE, 15, 17, 18})


def is_ordinary(module: Any) -> bool:
    """Whether all types have at least 32 bits, no dimension is dynamic or queried, and dots and convolutions have the
    type of their operands."""

    def ordinary(shape: Any) -> bool:
        if shape.element_type not in _ORDINARY or any(shape.is_dynamic_dimension):
            return False
        return all(ordinary(part) for part in shape.tuple_shapes)

    for computation in module.computations:
        types = {i.id: i.shape.element_type for i in computation.instructions}
        for instruction in computation.instructions:
            if instruction.opcode == "get-dimension-size" or not ordinary(instruction.shape):
                return False
            if instruction.opcode in ("dot", "convolution") and any(
                types[o] != instruction.shape.element_type for o in instruction.operand_ids
            ):
                return False
    return True

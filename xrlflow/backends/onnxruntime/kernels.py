"""Which operators ONNX Runtime's CPU provider can run, according to its registry of kernels."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable

OPSET = 23
"""The canonical opset: kernels are looked up for this version of the default domain."""
# Types whose names differ between NumPy and ONNX.
ALIASES = {"float32": "float", "float64": "double", "str": "string"}
# If ONNX Runtime expands an operator into others, the latter may have no kernels for these types.
RARE_FLOATS = frozenset({"tensor(double)", "tensor(float16)", "tensor(bfloat16)"})

Key = tuple[str, str]
Types = frozenset[str]


def supports(op: str, domain: str = "", dtypes: Iterable[str] = ()) -> bool:
    """Whether ONNX Runtime's CPU provider runs `op` on these element types (names of ONNX or NumPy).

    True if a single kernel accepts all of these types: in its type constraints, in a constraint that it leaves to the
    schema, or as an input or output of fixed type (the condition of Where). `dtypes` are the types of all inputs and
    outputs together. An operator without a kernel that ONNX defines as a function is expanded into others. It counts as
    supported if its schema allows the types and none is a float other than float32.
    """
    wanted = frozenset(f"tensor({ALIASES.get(dtype.lower(), dtype.lower())})" for dtype in dtypes)
    domain = "" if domain == "ai.onnx" else domain
    if (domain, op) == ("", "Constant"):  # it becomes an initialiser before kernels are chosen
        return True
    if any(wanted <= types for types in _kernels().get((domain, op), ())):
        return True
    return domain == "" and _expands(op, wanted)


@functools.cache
def _kernels() -> dict[Key, list[Types]]:
    """For each operator, the types that each of its kernels accepts."""
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    schemas = _schemas()
    table: dict[Key, list[Types]] = defaultdict(list)
    for kernel in native.get_all_opkernel_def():
        key = (kernel.domain, kernel.op_name)
        first, last = kernel.version_range
        if kernel.provider != "CPUExecutionProvider" or (kernel.domain == "" and not first <= OPSET <= last):
            continue
        accepted = {name for names in kernel.type_constraints.values() for name in names}
        for constraint, types in schemas.get(key, {}).items():
            if constraint not in kernel.type_constraints:
                accepted |= types
        table[key].append(frozenset(accepted))
    return dict(table)


@functools.cache
def _schemas() -> dict[Key, dict[str, Types]]:
    """For each operator, its type constraints at the canonical opset. A fixed type counts as a constraint under its own
    name."""
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    newest: dict[Key, int] = {}
    table: dict[Key, dict[str, Types]] = {}
    for schema in native.get_all_operator_schema():
        key = (schema.domain, schema.name)
        if schema.since_version < newest.get(key, 0) or (key[0] == "" and schema.since_version > OPSET):
            continue
        newest[key] = schema.since_version
        table[key] = {value.typeStr: frozenset(value.types) for value in (*schema.inputs, *schema.outputs)}
    return table


@functools.cache
def _expands(op: str, wanted: Types) -> bool:
    import onnx.defs

    if not onnx.defs.has(op, ""):
        return False
    try:
        schema = onnx.defs.get_schema(op, OPSET)
    except onnx.defs.SchemaError:  # newer than the canonical opset
        return False
    # ONNX's stubs lack these two.
    if not (schema.has_function or schema.has_context_dependent_function):  # type: ignore[attr-defined]
        return False
    return wanted <= frozenset().union(*_schemas().get(("", op), {}).values()) - RARE_FLOATS

"""From an ONNX model to a Relax module: TVM's importer, with operators that it lacks or misinterprets."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from xrlflow.backends.interrupts import heeding_interrupts
from xrlflow.backends.protocol import USE_ONNXRUNTIME, BackendError
from xrlflow.backends.tvm.fusion.checks import with_checks
from xrlflow.backends.tvm.fusion.layouts import border
from xrlflow.backends.tvm.fusion.open_sizes import answering
from xrlflow.backends.tvm.kernels.pooling import disputed, with_pads
from xrlflow.backends.tvm.lowering.bounds import (
    Bounds,
    Node,
    cast,
    nodes_of,
)
from xrlflow.backends.tvm.lowering.operators import ADDED, lowered
from xrlflow.backends.tvm.lowering.value_types import check_types, disagreement, types_of
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.imported import Imported
from xrlflow.backends.tvm.toolchain.reading import constant, known_value, sizes
from xrlflow.backends.tvm.toolchain.weights import imported, moved, weight
from xrlflow.onnxio import ModelError
from xrlflow.onnxio.versions import raised

# TVM's importer confuses these com.microsoft operators with ONNX operators of the same names, which have other inputs
# and attributes.
_MISREAD = frozenset({"Attention"})
_ENDS = object()
"""The importer's name of the additional output (see `bounds`)."""


class NodeRefused(BackendError):
    """TVM's importer, or our extension of it, refuses a node. `title`: the node's name in messages."""

    def __init__(self, error: BackendError, title: str, results: Sequence[str]) -> None:
        super().__init__(str(error))
        self.reason = error.reason
        self.title, self.results = title, tuple(results)


def unsupported(operators: Sequence[tuple[str, str]]) -> list[str]:
    """The operators among these pairs (domain, operator) that cannot be lowered, sorted."""
    return sorted(
        {op for domain, op in operators if domain not in ("", "ai.onnx") or op not in _converters()}
    )


@functools.cache
def _converters() -> Mapping[str, Any]:
    tvm()
    from tvm.relax.frontend.onnx import onnx_frontend

    # The importer also has an If, but it runs both branches, even where their indices or divisors are wrong, and it
    # prevents fusion in the entire model. So If counts as missing, like Loop and Scan.
    table: Mapping[str, Any] = onnx_frontend._get_convert_map()
    converters = {**table, "Constant": None, **dict.fromkeys(ADDED)}
    return {name: converter for name, converter in converters.items() if name not in _MISREAD}


@heeding_interrupts()
def import_model(
    model: Any,
    shapes: Mapping[str, Sequence[int]] | None = None,
    weights: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """A Relax module for an ONNX ModelProto, with weights as constants. `checks.checks_of` returns the module's checks
    of indices. `weights`: tensors by name whose elements the model lacks.

    Raises BackendError, before any work, for operators that cannot be lowered, for inputs whose dimensions are not
    numbers (bind them with `shapes`), and for constant indices outside their tables. NodeRefused is raised for a node
    that TVM's importer refuses.
    """
    try:
        model = raised(model)  # TVM's importer supports older opsets less well
    except ModelError as error:
        raise BackendError(f"TVM cannot lower the model: {error}") from error
    missing = unsupported([(node.domain, node.op_type) for node in model.graph.node])
    if missing:
        raise BackendError(f"TVM cannot lower {', '.join(missing)}", USE_ONNXRUNTIME)
    bound = dict(shapes or {})
    constants = {tensor.name for tensor in model.graph.initializer}
    unbound = [
        value for value in model.graph.input if value.name not in constants and value.name not in bound
    ]
    check_sizes(unbound)
    # TVM takes a size of 0 for an unknown one, unless the shape is given.
    fixed = {v.name: [dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in unbound} | bound
    types = types_of(model, fixed)
    check_types(types)
    package = tvm()
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)
    # TVM prints the operands of operators that it refuses, and warns of each name with a dot.
    with answering("import"), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importer = _importer(fixed, types, weights)
        module = importer.from_onnx(model.graph, opset)
        module = with_checks(module, importer.bounds.checks)
    assert isinstance(module, package.IRModule)
    return module


def check_sizes(inputs: Iterable[Any]) -> None:
    """Raise BackendError for an input (an ONNX ValueInfoProto) without a shape, or with an open dimension."""
    for value in inputs:
        if not value.type.tensor_type.HasField("shape"):
            raise BackendError(
                f"TVM compiles for fixed sizes, but input {value.name} has no shape: give it with "
                f"--shape {value.name}=..."
            )
        open_dims = [
            dim.dim_param or "?" for dim in value.type.tensor_type.shape.dim if not dim.HasField("dim_value")
        ]
        if open_dims:
            raise BackendError(
                f"TVM compiles for fixed sizes, but input {value.name} has the dimensions {', '.join(open_dims)}: "
                f"give them with --shape {value.name}=..."
            )


_FOLDED = {"Max": "maximum", "Min": "minimum", "Sum": "add", "Mean": "add"}
"""ONNX's operators with many operands, and Relax's operators with two."""


def _fold(builder: Any, op: str, inputs: Sequence[Any]) -> Any:
    """An operator of `_FOLDED`, applied to two operands at a time."""
    from tvm import relax
    from tvm.ir import GenericConst

    two = getattr(relax.op, _FOLDED[op])
    # Maximum and minimum return NaN only if it is in the second operand. So constants become the first operands.
    inputs = sorted(inputs, key=lambda x: not isinstance(x, GenericConst))
    folded = functools.reduce(lambda a, b: builder.normalize(two(a, b)), inputs)
    if op != "Mean":
        return folded
    return builder.normalize(relax.op.divide(folded, relax.const(len(inputs), folded.ty.dtype)))


def _of_two(builder: Any, op: str, inputs: Sequence[Any], opset: int) -> Any | None:
    """Clip, or an operator of `_FOLDED`, as operators with two operands. None if all operands are constant, and for a
    Clip whose bounds are computed."""
    from tvm.ir import GenericConst

    if op in _FOLDED and not all(isinstance(x, GenericConst) for x in inputs):
        return _fold(builder, op, list(inputs))
    if op == "Clip" and opset >= 11:
        result, *bounds = inputs
        if all(b is None or isinstance(b, GenericConst) for b in bounds):
            return _clip(builder, result, bounds)
    return None


def _otherwise(builder: Any, op: str, inputs: Any, attrs: Any, opset: int) -> Any | None:
    """What a node computes that TVM's importer would compute otherwise, or only more slowly; None for other nodes."""
    from tvm.ir import GenericConst
    from tvm.relax.frontend.onnx.onnx_frontend import get_type

    if (result := _of_two(builder, op, inputs, opset)) is not None:
        return result
    if op == "Pad" and opset >= 11 and attrs.get("mode", b"constant") == b"constant":
        padded_inputs = [*inputs, None, None][:4]
        if padded_inputs[3] is None and (padded := border(*padded_inputs[:3])) is not None:
            return builder.normalize(padded)
    if op == "Transpose" and isinstance(inputs[0], GenericConst):
        rank = len(inputs[0].ty.shape)
        return moved(inputs[0], np.transpose, tuple(attrs.get("perm", range(rank)[::-1])))
    if op in ("Cast", "CastLike"):
        kind = get_type(attrs["to"]) if op == "Cast" else inputs[1].ty.dtype
        return cast(builder, inputs[0], str(kind))
    return None


def _clip(builder: Any, result: Any, bounds: Sequence[Any]) -> Any:
    """A tensor clipped to its lower and its upper bound (None: no bound)."""
    from tvm import relax

    for bound, nearest in zip(bounds, (relax.op.maximum, relax.op.minimum)):
        if bound is not None:
            result = builder.normalize(nearest(bound, result))  # returns NaN only if it is second
    return result


def _as_tensor(name: str, value: Any) -> Any:
    """An output of the model as a tensor. The importer represents sizes as shapes and numbers, which are tensors in
    ONNX.

    Raises BackendError for a size that depends on values.
    """
    from tvm import relax

    if isinstance(value.ty, relax.TensorType | relax.TupleType):
        return value
    constant_value = known_value(value)
    if constant_value is None:
        raise BackendError(
            f"TVM cannot compile output {name}, a size that depends on values", USE_ONNXRUNTIME
        )
    return constant(constant_value)


def _checked(results: Sequence[str], value: Any, types: Mapping[str, Any]) -> Any:
    """The value that TVM's importer computes for a node. Raises BackendError if a result does not have the type and
    size that ONNX infers."""
    from tvm import relax

    kinds = list(value.ty.fields) if isinstance(value.ty, relax.TupleType) else [value.ty]
    for name, kind in zip(results, kinds):
        if name in types and isinstance(kind, relax.TensorType):
            extents = (
                list(kind.shape.values) if isinstance(kind.shape, relax.ShapeExpr) else None
            )  # all other results are computed
            fixed = extents is not None and all(hasattr(n, "value") for n in extents)
            shape = [int(n) for n in extents or ()] if fixed else None
            if difference := disagreement(types[name], str(kind.dtype), shape):
                raise BackendError(f"TVM cannot import {name}: it gives {difference}", USE_ONNXRUNTIME)
    return value


def _importer(
    shapes: Mapping[str, Sequence[int]], types: Mapping[str, Any], weights: Mapping[str, Any]
) -> Any:
    from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, get_numpy

    class Importer(ONNXGraphImporter):  # type: ignore[misc]
        """TVM's importer with changes. Clip, Max, Min, Sum and Mean get two operands, so that layouts pass through them
        (TVM would stack copies of operands). Indices are moved inside their tables, and an output for checks is
        added."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.bounds = Bounds(self.bb)

        def from_onnx(self, graph: Any, opset: int) -> Any:
            self._next_nodes = iter(nodes_of(graph))
            self._outputs: list[Any] = [*graph.output]
            fields = {name: getattr(graph, name) for name in ("node", "initializer", "input")}
            return super().from_onnx(SimpleNamespace(**fields, output=self._outputs), opset)

        def _parse_graph_initializers(self, graph: Any) -> None:
            for name, tensor in ((t.name, weights.get(t.name, t)) for t in graph.initializer):
                self._nodes[name] = weight(name, functools.partial(get_numpy, tensor))

        def _check_for_unsupported_ops(self, graph: Any) -> None:
            """Do nothing: `import_model` has checked operators, and accepts operators that this module adds."""

        def _construct_nodes(self, graph: Any) -> None:
            super()._construct_nodes(graph)
            for value in graph.output:
                self._nodes[value.name] = _as_tensor(value.name, self._nodes[value.name])
            if (ends := self.bounds.output()) is not None:
                self._nodes[_ENDS] = ends
                self._outputs.append(_ENDS)

        def _convert_operator(self, op_name: str, inputs: Any, attrs: Any, opset: int) -> Any:
            node = next(self._next_nodes)
            try:
                with answering("import"):
                    value = _checked(
                        node.results, self._converted(node, op_name, inputs, attrs, opset), types
                    )
                    imported(inputs, list(getattr(value, "fields", (value,)))[: len(node.results)])
                    return value
            except BackendError as error:
                raise NodeRefused(error, node.title, node.results) from error

        def _converted(self, node: Node, op_name: str, inputs: Any, attrs: Any, opset: int) -> Any:
            inputs = type(inputs)(self.bounds.operands(node, op_name, inputs, attrs))
            result = lowered(op_name, Imported(self.bb, node.title, inputs, attrs))
            result = _otherwise(self.bb, op_name, inputs, attrs, opset) if result is None else result
            if result is not None:
                return result
            if op_name in ("AveragePool", "LpPool", "MaxPool"):
                attrs = _pool(op_name, Imported(self.bb, node.title, inputs, attrs), attrs)
            return super()._convert_operator(op_name, inputs, attrs, opset)

    return Importer({name: list(shape) for name, shape in shapes.items()}, None, keep_params_in_input=False)


def _pool(op: str, node: Imported, attrs: Any) -> Any:
    """The attributes of a pool with its padding in numbers. Raises BackendError if ONNX Runtime's windows differ from
    ONNX's (TVM scales the windows of LpPool by the number of elements within the image)."""
    if op == "LpPool" and attrs.get("ceil_mode", 0):
        raise node.refused("with ceil_mode")
    shape = sizes(node.inputs[0])
    image = None if shape is None else shape[2:]
    if (reason := disputed(attrs, image)) is not None:
        raise node.refused(reason)
    return with_pads(attrs, image)

"""Finds sizes in a Relax module that are not known when it is compiled. With such sizes, kernels would read beyond
their inputs, and TVM raises errors that do not name the cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xrlflow.backends.protocol import USE_ONNXRUNTIME, BackendError
from xrlflow.backends.tvm.toolchain.import_tvm import last_line
from xrlflow.backends.tvm.toolchain.reading import operator


def sized(module: Any) -> Any:
    """The module of kernels, unchanged. Raises BackendError if the size of a kernel's result depends on values: its
    loops could read beyond its input."""
    from tvm import relax

    # Errors are raised below, not in the visitor: exceptions that pass through TVM lose their class.
    open_sizes: list[Any] = []

    def look(expression: Any) -> None:
        if operator(expression) == "relax.call_tir" and not _has_size(expression.ty):
            open_sizes.append(expression)

    relax.analysis.post_order_visit(module["main"], look)
    if open_sizes:
        raise open_size(str(without_size(module)))
    return module


def open_size(name: str) -> BackendError:
    return BackendError(
        f"TVM cannot compile a model in which the size of what {name} computes depends on values",
        USE_ONNXRUNTIME,
    )


def _has_size(kind: Any) -> bool:
    """Whether all sizes of a tensor, or of the tensors of a tuple, are numbers."""
    from tvm import relax

    if isinstance(kind, relax.TupleType):
        return all(_has_size(part) for part in kind.fields)
    if not isinstance(kind, relax.TensorType):
        return True
    return isinstance(kind.shape, relax.ShapeExpr) and all(hasattr(n, "value") for n in kind.shape.values)


def without_size(module: Any) -> str | None:
    """The first operator or function that a Relax module calls whose result has a size that is not a number."""
    from tvm import relax

    calls: list[Any] = []

    def look(expression: Any) -> None:
        if isinstance(expression, relax.Call) and not _has_size(expression.ty):
            calls.append(expression)

    relax.analysis.post_order_visit(module["main"], look)
    if not calls:
        return None
    call = calls[0]
    callee = call.args[0] if str(getattr(call.op, "name", "")).startswith("relax.call_") else call.op
    names = (getattr(callee, attribute, None) for attribute in ("name_hint", "global_symbol", "name"))
    return next((str(name).rpartition(".")[2] for name in names if name), str(callee))


@contextmanager
def answering(doing: str, module: Any = None) -> Iterator[None]:
    """Turn every error of TVM inside the block into BackendError. `doing`: the verb of the message. If `module` has a
    size that is not a number, the message names that as the reason."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        if module is not None and (name := without_size(module)):
            raise open_size(name) from error
        raise BackendError(f"TVM cannot {doing} the model: {last_line(error)}") from error

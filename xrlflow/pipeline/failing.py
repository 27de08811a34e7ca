"""Explains why an original does not run, if ONNX Runtime's own message does not say so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import Optimization, open_model
from xrlflow.ir import ABSENT, Graph
from xrlflow.pipeline.context import Context
from xrlflow.verify import InputsNeeded, OriginalFails, feeds_for_measurement

_NO_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\)")


@contextmanager
def explained(context: Context) -> Iterator[None]:
    """Add explanations to the errors of the original that the block raises: the element types for which there is no
    kernel, and whether ONNX Runtime runs the model with its optimiser off. If it does, OriginalFails is raised,
    otherwise the same error.
    """
    try:
        yield
    except InputsNeeded as error:
        if not error.failure or not _runs_unoptimised(context):
            raise
        raise OriginalFails(
            "ONNX Runtime's own optimiser breaks the original, which runs with optimisations off: "
            f"{error.failure}: change what it fails on in the model, or take another ONNX Runtime"
        ) from error
    except BackendError as error:
        match = _NO_KERNEL.search(str(error))
        types = "" if match is None else _operands(context.imported.graph, match[1])
        raise type(error)(f"{error}{types}") from error


def _operands(graph: Graph, op: str) -> str:
    """The operand types of the first node whose operator is `op`, for a message: " (it reads bfloat16[3])"."""
    for node in graph.topological():
        if node.op == op:
            return f" (it reads {', '.join(str(graph.type(v)) for v in node.explicit_inputs if v != ABSENT)})"
    return ""


def _runs_unoptimised(context: Context) -> bool:
    try:
        with open_model(
            context.original.runnable, threads=context.threads, optimization=Optimization.NONE,
            session_options=context.options.session_options,
        ) as model:  # fmt: skip
            feeds_for_measurement(context.imported, context.options.seed, model.run)
    except (BackendError, InputsNeeded):
        return False
    return True

"""A node of an ONNX model while it becomes Relax expressions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xrlflow.backends.protocol import USE_ONNXRUNTIME, BackendError


@dataclass(frozen=True, slots=True)
class Imported:
    """A node while it is imported with TVM's builder. `title`: the node's name in messages. `results`: the number of
    its results."""

    builder: Any
    title: str
    inputs: Any
    attributes: dict[str, Any]

    @property
    def results(self) -> int:
        return int(self.attributes["tvm_custom"]["num_outputs"])

    def given(self, index: int) -> Any | None:
        """An operand; None if the node omits it."""
        return self.inputs[index] if index < len(self.inputs) else None

    def emit(self, expression: Any) -> Any:
        """The expression with its type inferred."""
        return self.builder.normalize(expression)

    def refused(self, reason: str) -> BackendError:
        return BackendError(f"TVM cannot lower {self.title} ({reason})", USE_ONNXRUNTIME)

"""The interface of all backends, in types that belong to no particular backend."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from xrlflow.common.text import printable, shortened

Array: TypeAlias = npt.NDArray[Any]
Feeds: TypeAlias = Mapping[str, Array]
"""Inputs of one run, by name."""

ModelSource: TypeAlias = str | os.PathLike[str] | bytes
"""A model: the path of an ONNX file (external data is in its folder), or a serialised ModelProto."""


class BackendError(RuntimeError):
    """A backend cannot do what it was asked to do. The message is one line, written for users.

    `reason`: the message without `instead`, which is a text about what the user could do instead if this error ends the
    command.
    """

    def __init__(self, reason: str, instead: str = "") -> None:
        super().__init__(f"{reason}: {instead}" if instead else reason)
        self.reason = reason


USE_ONNXRUNTIME = "use optimize --backend onnxruntime for this model"


class OutOfTime(BackendError):
    """A task was ended because its time was over."""


class NotFromPython(BackendError):
    """A model has an input or output of a type that NumPy lacks."""


@runtime_checkable
class CompiledModel(Protocol):
    """A model that is ready to run on a backend. Close it, or use it in a `with` statement."""

    @property
    def output_names(self) -> tuple[str, ...]: ...

    def run(self, feeds: Feeds) -> Sequence[Any]:
        """The outputs, in the order of `output_names`. Raises BackendError if the run fails."""
        ...

    def close(self) -> None:
        """Release the memory. A later `run` raises BackendError; a second `close` does nothing."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A runtime on hardware."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def supports(self, op: str, domain: str = "", dtypes: Iterable[str] = ()) -> bool:
        """Whether `op` runs on values of all these element types (ONNX names: float, int64, ...)."""
        ...

    def compile(self, model: ModelSource, *, threads: int | None = None) -> CompiledModel:
        """Load `model` for `threads` threads (default: the number of physical cores). Raises BackendError."""
        ...


def one_line(text: object, limit: int = 400) -> str:
    """`text` on one line of at most `limit` characters."""
    return shortened(printable(text), limit)


def same_feeds(feeds: Feeds) -> dict[str, Array]:
    """`feeds` with contiguous arrays, so that no run copies them."""
    return {name: np.ascontiguousarray(array) if array.ndim else array for name, array in feeds.items()}

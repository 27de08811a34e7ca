"""TVM as a backend. Graphs are lowered through Relax, and their kernels are generated. The blocking of a kernel comes
from estimated times or from tuning.

Importing this module does not import TVM.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xrlflow.backends.protocol import BackendError, ModelSource
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT, Algorithms
from xrlflow.backends.tvm.lowering.compiled import SUFFIX, TvmModel, compiled, is_compiled, load_compiled
from xrlflow.backends.tvm.toolchain.target import Machine, detect

__all__ = [
    "SUFFIX",
    "Machine",
    "Tvm",
    "TvmModel",
    "detect",
    "is_compiled",
    "load_compiled",
]


@dataclass(frozen=True, slots=True)
class Tvm:
    """The `Backend` of TVM. `machine`: the target (default: this one). `shapes`: the shapes of inputs with dynamic
    dimensions. `algorithms`: the algorithms that layers may use."""

    machine: Machine = field(default_factory=detect)
    shapes: Mapping[str, Sequence[int]] | None = None
    algorithms: Algorithms = DEFAULT

    @property
    def name(self) -> str:
        return "tvm"

    @property
    def version(self) -> str:
        from xrlflow.backends.tvm.toolchain.import_tvm import tvm

        return str(tvm().__version__)

    def supports(self, op: str, domain: str = "", dtypes: Iterable[str] = ()) -> bool:
        """Whether `op` can be lowered. Operators on complex numbers, strings and sequences cannot."""
        from xrlflow.backends.tvm.lowering.importer import unsupported

        foreign = any(dtype.startswith(("complex", "string", "seq", "optional")) for dtype in dtypes)
        return not foreign and not unsupported([(domain, op)])

    def compile(self, model: ModelSource, *, threads: int | None = None) -> TvmModel:
        """Lower, schedule and compile a model. Raises BackendError (see `importer.import_model`)."""
        import onnx

        if isinstance(model, bytes):
            proto = onnx.load_from_string(model)
        else:
            if not os.path.isfile(model):
                raise BackendError(f"{os.fspath(model)}: there is no such file")
            proto = onnx.load(os.fspath(model))
        return compiled(
            proto,
            self.machine,
            threads=threads,
            shapes=self.shapes,
            algorithms=self.algorithms,
        )

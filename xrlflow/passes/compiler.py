"""The compiler protocol: all that an environment, an agent or a benchmark of pass orders needs of a compiler.

A compiler has numbered passes. `apply` runs one of them on a module and returns the result; if a pass fails or crashes
its process, the module stays as it was. A `Module` is a frozen value with the program in the compiler's own format and
the figures that agents and tables use, so it can be pickled, cached and compared by its digest. There are two
compilers: `xla.XlaCompiler` (HLO passes of jaxlib) and `rules.RuleCompiler` (ONNX graphs; a pass applies the rules of
a family).

    with XlaCompiler() as compiler:
        module = compiler.load(text)
        for name in ("algsimp", "cse", "dce"):
            module = compiler.apply(module, name).module
        assert compiler.compare(first, module).equal

Every compiler guarantees:

- `load` returns a module in normal form: a pass without effect leaves it exactly as it is.
- A pass is deterministic: the same module and pass give a module with the same digest. Hence results may be cached.
- `Applied.changed` is False if and only if the digest is the same. A failed pass changes nothing.
- Modules with one digest compute the same. Modules with different digests may compute the same, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Arrays: TypeAlias = Sequence[npt.NDArray[Any]]


class CompilerError(ValueError):
    """A module cannot be read or run, a pass does not exist, or a compiler is not installed. Messages are one line."""


class Metric(Enum):
    """The figure of a module that orders of passes reduce."""

    OPERATIONS = "operations"
    BYTES = "bytes"  # read and written
    FLOPS = "flops"
    SECONDS = "seconds"  # measured, while the other metrics are counted


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a module."""

    operations: int
    bytes_accessed: float
    flops: float
    opcodes: tuple[tuple[str, int], ...]  # live instructions by kind
    computations: tuple[
        int, ...
    ]  # operations of each function that is used: the entry first, then the functions from the largest to the smallest

    def of(self, metric: Metric) -> float:
        """The value of a counted metric. Raises ValueError for SECONDS, which `Compiler.seconds` measures."""
        match metric:
            case Metric.OPERATIONS:
                return float(self.operations)
            case Metric.BYTES:
                return self.bytes_accessed
            case Metric.FLOPS:
                return self.flops
        raise ValueError("seconds are measured: see Compiler.seconds")


@dataclass(frozen=True, slots=True)
class Module:
    """A program between two passes. `data`: in the compiler's own format. Modules are equal if their digests are."""

    digest: str
    data: bytes
    summary: Summary

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Module) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Module({self.digest[:8]}, {self.summary.operations} operations)"


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of a pass on a module. `error`: why the pass failed, in one line; after a failure, `module` is the
    module before the pass.
    """

    module: Module
    changed: bool
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of the outputs of two modules on the same inputs."""

    equal: bool
    worst: float  # the largest error as a multiple of the tolerance
    compared: float  # the fraction of all numbers in the outputs that were compared
    difference: str | None = None  # what differs, in one line
    note: str | None = None  # a remark: the original differs from itself in this output, too
    blind: tuple[
        str, ...
    ] = ()  # outputs of which no number was compared, as the original has only NaN or infinities in them


@dataclass(frozen=True, slots=True, eq=False)
class ModuleGraph:
    """The live instructions of a module as a graph, in the format of `torch_geometric.data.Data`.

    `opcode` int64 [N]: indices in `Compiler.opcodes`; an unknown opcode has the last index + 1. `x` float32 [N, 6]:
    log2 of (1 + elements), log2 of (1 + bytes), rank, 1 if it is the root of its function, 1 if it is in the entry,
    log2 of (1 + readers). `edge_index` int64 [2, E]: from operands to readers, then from the roots of called functions
    to their callers. `edge_kind` int64 [E]: the position of the operand, at most 6; 7 for a call.
    """

    opcode: npt.NDArray[np.int64]
    x: npt.NDArray[np.float32]
    edge_index: npt.NDArray[np.int64]
    edge_kind: npt.NDArray[np.int64]


class Compiler(Protocol):
    """A compiler whose passes can be run one by one. The module's docstring lists what it guarantees."""

    @property
    def name(self) -> str:
        """The name and version of the compiler, for tables and caches."""
        ...

    @property
    def passes(self) -> tuple[str, ...]:
        """The names of the passes."""
        ...

    @property
    def opcodes(self) -> tuple[str, ...]:
        """The kinds of instructions that programs may have."""
        ...

    def load(self, source: str | bytes) -> Module:
        """Read a program. Raises CompilerError, with the position of the error, if it is not valid."""
        ...

    def write(self, module: Module) -> str | bytes:
        """A module as the contents of a file that `load` reads: HLO text, the bytes of an ONNX file."""
        ...

    def apply(self, module: Module, name: str) -> Applied:
        """Run one pass. Raises CompilerError if there is no pass of this name."""
        ...

    def apply_each(self, module: Module, names: Sequence[str]) -> list[Applied]:
        """Run each of several passes on the same module (not one after the other), in parallel where possible."""
        ...

    def default(self, module: Module, names: Sequence[str] | None = None) -> Module:
        """The module after all passes (or only those in `names`) in the compiler's own order, repeated until the
        number of operations stays the same.
        """
        ...

    def graph(self, module: Module) -> ModuleGraph:
        """The instructions as a graph."""
        ...

    def compare(
        self, reference: Module, module: Module, seed: int = 0, inputs: Sequence[Arrays] = ()
    ) -> Comparison:
        """Run both modules on the same inputs: on random ones, and on `inputs` (each a list with an array for each
        parameter).

        Raises CompilerError if a module does not run, or inputs do not fit.
        """
        ...

    def seconds(
        self, modules: Sequence[Module], repetitions: int = 20, seed: int = 0
    ) -> list[tuple[float, ...]]:
        """The measured seconds of `repetitions` runs of each module, compiled in full. The runs of the modules
        alternate, so that times at the same position form a pair.
        """
        ...


def run(compiler: Compiler, module: Module, names: Sequence[str]) -> Module:
    """The module after a sequence of passes. Passes that fail are skipped."""
    for name in names:
        module = compiler.apply(module, name).module
    return module

"""The compiler protocol: what an environment, an agent or a benchmark of pass orders knows about a compiler.

A compiler has numbered passes. `apply` runs one of them on a module and says what came of it; a pass may fail, or end
the process that it runs in, and the module is then as it was. A `Module` is a frozen value that holds the program in
the compiler's own format together with what agents and tables need to know of it, so it can be pickled, kept in a cache
and compared by its digest. Two compilers are here: `xla.XlaCompiler` (HLO passes of jaxlib) and `rules.RuleCompiler`
(ONNX graphs; a pass applies the rules of a family).

    with XlaCompiler() as compiler:
        module = compiler.load(text)
        for name in ("algsimp", "cse", "dce"):
            module = compiler.apply(module, name).module
        assert compiler.compare(first, module).equal

What is promised of every compiler:

- `load` is idempotent: the module that it returns is one that a pass may leave exactly as it is.
- A pass is deterministic: the same module and pass give a module with the same digest. So results may be cached.
- `Applied.changed` is false if and only if the digest is the same. A failed pass changes nothing.
- Modules with one digest do the same. Different digests may do the same, too.
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
    """What is to become less. OPERATIONS, BYTES (read and written) and FLOPS are counted; SECONDS are measured."""

    OPERATIONS = "operations"
    BYTES = "bytes"
    FLOPS = "flops"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a module. `opcodes`: live instructions by kind. `computations`: operations of each function that is
    used, the entry first and then the largest."""

    operations: int
    bytes_accessed: float
    flops: float
    opcodes: tuple[tuple[str, int], ...]
    computations: tuple[int, ...]

    def of(self, metric: Metric) -> float:
        """The value of a counted metric. Raises ValueError for SECONDS, which a compiler measures."""
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
    """What a pass made of a module. `error`: why it failed, in one line; the module is then the one given."""

    module: Module
    changed: bool
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outputs of two modules on the same inputs. `worst`: the largest error as a multiple of what is allowed.

    `compared`: the share of numbers that were compared. `difference`: what differs, in one line. `note`: a difference
    that is no other than the original has to itself. `blind`: outputs of which no number was compared, because the
    original has none there.
    """

    equal: bool
    worst: float
    compared: float
    difference: str | None = None
    note: str | None = None
    blind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ModuleGraph:
    """The live instructions of a module as a graph, ready for `torch_geometric.data.Data`.

    `opcode` int64 [N]: numbers in `Compiler.opcodes`; the last number + 1 is an unknown one. `x` float32 [N, 6]: log2
    of (1 + elements), log2 of (1 + bytes), rank, whether it is the root of its function, of the entry, and the number
    of readers (log2 of 1 + it). `edge_index` int64 [2, E]: from operands to readers, then from the roots of called
    functions to their callers. `edge_kind` int64 [E]: the position of the operand, at most 6; 7 for a call.
    """

    opcode: npt.NDArray[np.int64]
    x: npt.NDArray[np.float32]
    edge_index: npt.NDArray[np.int64]
    edge_kind: npt.NDArray[np.int64]


class Compiler(Protocol):
    """A compiler whose passes can be run one by one. The module's docstring says what is promised."""

    @property
    def name(self) -> str:
        """The compiler and its version, for tables and caches."""
        ...

    @property
    def passes(self) -> tuple[str, ...]:
        """The names of the passes."""
        ...

    @property
    def opcodes(self) -> tuple[str, ...]:
        """The kinds of instructions that the compiler knows."""
        ...

    def load(self, source: str | bytes) -> Module:
        """Read a program. Raises CompilerError if it is none, and says where."""
        ...

    def write(self, module: Module) -> str | bytes:
        """A module as the contents of a file that `load` reads: HLO text, the bytes of an ONNX file."""
        ...

    def apply(self, module: Module, name: str) -> Applied:
        """Run one pass. Raises CompilerError if there is no pass of this name."""
        ...

    def apply_each(self, module: Module, names: Sequence[str]) -> list[Applied]:
        """Run each of several passes on the same module (not one after the other), at once where possible."""
        ...

    def default(self, module: Module, names: Sequence[str] | None = None) -> Module:
        """The compiler's own order of the same passes, or of `names` among them, repeated until the number of
        operations stays the same."""
        ...

    def graph(self, module: Module) -> ModuleGraph:
        """The instructions as a graph."""
        ...

    def compare(
        self, reference: Module, module: Module, seed: int = 0, inputs: Sequence[Arrays] = ()
    ) -> Comparison:
        """Run both on the same inputs: random ones, and those that are given (each an array for each parameter).

        Raises CompilerError if one does not run, or inputs do not fit.
        """
        ...

    def seconds(
        self, modules: Sequence[Module], repetitions: int = 20, seed: int = 0
    ) -> list[tuple[float, ...]]:
        """Measured seconds of each module, compiled in full. The modules take turns, so times at one position are a
        pair."""
        ...


def run(compiler: Compiler, module: Module, names: Sequence[str]) -> Module:
    """A sequence of passes. One that fails is passed over."""
    for name in names:
        module = compiler.apply(module, name).module
    return module

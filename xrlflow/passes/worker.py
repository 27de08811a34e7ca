"""The process that runs XLA for `XlaCompiler`. If a pass crashes this process, the pool starts another one.

It loads jaxlib alone, not jax. Its handler replies to one request at a time.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np

from xrlflow.passes import hlo, inputs
from xrlflow.passes.compiler import CompilerError, Summary
from xrlflow.passes.inputs import Array, Inputs
from xrlflow.passes.wide import widened

Options: TypeAlias = tuple[tuple[str, str | int | bool], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Read HLO text, StableHLO text or bytecode, or a serialized HloModuleProto. Reply: Loaded."""

    source: str | bytes


@dataclass(frozen=True, slots=True)
class Transform:
    """Run the passes that the compile options enable on the module with this digest.

    `unbatched`: refuse a module in which a gather or scatter has batch dimensions. Reply: Loaded, or None if nothing
    changed.
    """

    data: bytes
    digest: str
    options: Options
    unbatched: bool = False


@dataclass(frozen=True, slots=True)
class Print:
    """Convert a module to HLO text. Reply: str."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Whole:
    """Run all of XLA's HLO passes, with layouts and fusion, as a compilation does. Reply: Summary."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Wide:
    """Run modules in float64. `nudge`: the seed by which constants are changed; 0: no change."""

    nudge: int = 0


@dataclass(frozen=True, slots=True)
class Execute:
    """Run modules with equal interfaces: once on each of `inputs`, for their outputs, and `repetitions` more times on
    the first of `inputs`, in alternation, for their seconds. Inputs are drawn to suit the module `like`. `quick`:
    compile with little effort. `wide`: run in float64 (see `wide`). Reply: Executed.
    """

    like: bytes
    modules: tuple[bytes, ...]
    inputs: tuple[Inputs, ...]
    repetitions: int = 0
    quick: bool = False
    wide: Wide | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    data: bytes
    digest: str
    summary: Summary


@dataclass(frozen=True, slots=True)
class Executed:
    """The outputs of each module on each of the inputs, and the seconds of each run of each module."""

    outputs: tuple[tuple[tuple[Array, ...], ...], ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """XLA, or this package, refuses a request. `error`: one line. `lasting`: whether a repetition of the request would
    be refused, too.
    """

    error: str
    lasting: bool = True


_RECENT = 64  # the number of modules of which a worker remembers two representations
_PROGRAMS = 8  # the number of compiled programs that stay in memory for comparisons
# Options of a quick compilation. Compiling a training step of a small GPT-2 takes 0.5 s of CPU time with them, and 2.6
# s without.
_QUICK: Options = (
    ("xla_backend_optimization_level", 0),
    ("xla_llvm_disable_expensive_passes", True),
    ("xla_cpu_use_fusion_emitters", False),
)

Request: TypeAlias = Load | Transform | Print | Whole | Execute


# HLO text begins with the word HloModule, after comments.
_HLO_TEXT = re.compile(r"(?:\s|//[^\n]*\n|/\*.*?\*/)*HloModule\b", re.DOTALL)
_HLO_DEVICES = re.compile(r"\b(replica_count|num_partitions)=(\d+)")
_STABLEHLO_DEVICES = re.compile(r"\bmhlo\.(num_replicas|num_partitions) = (\d+)")


def _for_one_device(settings: Sequence[tuple[str, str]]) -> None:
    """Raise CompilerError for a module of several devices: XLA would ignore the devices, and compute something else."""
    for name, count in settings:
        if int(count) > 1:
            raise CompilerError(f"the module is for several devices ({name} {count}); only one is supported")


class Xla:
    """The handler of a worker: a CPU client of XLA, and the hook that receives modules."""

    def __init__(self) -> None:
        from jaxlib import _hlo, _jax, _xla, xla_client

        self.hlo, self.jax, self.client_module = _hlo, _jax, xla_client
        self.client = xla_client.make_cpu_client()
        self.devices = _jax.DeviceList(tuple(self.client.devices()[:1]))
        self._taken: list[bytes] = []
        self._taking = False
        _xla.register_xla_transform("xrlflow", 0, self._take)
        # Two caches by the digest of a module, because searches return to modules: its StableHLO, and the module after
        # a pass without effect (which saves most computations of digests).
        self._converted = _Recent()
        self._idle = _Recent()
        # The programs compiled last for comparisons, by module: results are compared more than once.
        self._programs: OrderedDict[tuple[bytes, Wide | None], Any] = OrderedDict()

    def _take(self, module: bytes) -> None:
        """The hook that XLA calls after the HLO passes. It raises an error to end the compilation."""
        if self._taking:
            self._taken.append(module)
            raise _PassesFinished

    def options(self, enabled: Options) -> Any:
        options = self.client_module.CompileOptions()
        options.env_option_overrides = list(enabled)
        return options

    def passes(self, stablehlo: bytes, enabled: Options) -> bytes:
        """The HLO module after these passes. Raises CompilerError if XLA fails before the passes have ended."""
        self._taken.clear()
        self._taking = True
        try:
            self.client.compile_and_load(stablehlo, self.devices, self.options(enabled))
        except Exception as error:  # jaxlib's own error type: the hook's error, or the error of a pass
            if not self._taken:
                raise CompilerError(_first_line(error)) from error
        finally:
            self._taking = False
        if not self._taken:
            raise CompilerError("this jaxlib does not call the hook after the HLO passes")
        return self._taken.pop()

    def stablehlo(self, data: bytes, digest: str = "") -> bytes:
        """A serialized HLO module as StableHLO bytecode, the input of XLA's compiler."""
        if (cached := self._converted.get(digest)) is not None:
            return cached
        try:
            converted: bytes = self.jax.mlir.hlo_to_stablehlo(data)
        except Exception as error:
            raise CompilerError(_first_line(error)) from error
        if digest:
            self._converted.put(digest, converted)
        return converted

    def imported(self, stablehlo: str | bytes) -> bytes:
        """The HLO module to which XLA converts StableHLO before its first pass."""
        try:
            computation = self.jax.mlir.mlir_module_to_xla_computation(stablehlo)
        except Exception as error:
            raise CompilerError(_first_line(error)) from error
        proto: bytes = computation.as_serialized_hlo_module_proto()
        return proto

    def landed(self, data: bytes) -> Loaded:
        """A module after XLA's importer, as the next pass will see it.

        The importer folds reshapes of reshapes and the like. If it ran only at the start of the next pass, passes
        without effect would seem to have one.
        """
        imported = self.imported(self.stablehlo(data))
        message = hlo.parse(imported)
        counts = hlo.counts(message)
        costs = self.costs(imported)
        summary = Summary(counts.operations, *costs, counts.opcodes, counts.computations)
        return Loaded(imported, hlo.digest(message), summary)

    def costs(self, data: bytes) -> tuple[float, float]:
        """Bytes accessed and flops by XLA's cost analysis, which ignores calls to other libraries: for these, the bytes
        of operands and results are added, and no flops."""
        module = self.hlo.HloModule.from_serialized_hlo_module_proto(data)
        analysis = self.jax.hlo_module_cost_analysis(self.client, module)
        # The cost analysis returns -1 for unknown figures.
        unknown = max(0.0, -analysis.get("optimal_seconds", 0.0))
        extra_bytes = hlo.bytes_of_calls(hlo.parse(data)) if unknown else 0
        return float(analysis.get("bytes accessed", 0.0) + unknown + extra_bytes), float(
            analysis.get("flops", 0.0) + unknown
        )

    def load(self, source: str | bytes) -> Loaded:
        if isinstance(source, str):
            source = source.removeprefix("\ufeff")
        if isinstance(source, str) and _HLO_TEXT.match(source):
            try:
                module = self.hlo.hlo_module_from_text(source)
            except Exception as error:
                raise CompilerError(_first_line(error)) from error
            _for_one_device(_HLO_DEVICES.findall(module.to_string().partition("\n")[0]))
            data = module.as_serialized_hlo_module_proto()
            hlo.check_interface(hlo.parse(data))
        elif isinstance(source, str) or source[:4] == b"ML\xefR":
            data = self.imported(source)
            _for_one_device(_STABLEHLO_DEVICES.findall(self.attributes(source)))
        else:
            hlo.check_interface(hlo.parse(source))
            data = source
        # The importer runs twice: some calls and tuples of modules that jax writes disappear only in the second
        # import.
        return self.landed(self.landed(data).data)

    def attributes(self, source: str | bytes) -> str:
        """The text of a StableHLO module with its attributes only: its functions are left out."""
        if isinstance(source, str):
            return source.partition("func.func")[0]
        from jaxlib.mlir import ir
        from jaxlib.mlir._mlir_libs import _jax_mlir_ext
        from jaxlib.mlir.dialects import chlo, sdy, stablehlo

        dialects = ir.DialectRegistry()
        _jax_mlir_ext.register_dialects(dialects)
        with ir.Context() as context:
            context.append_dialect_registry(dialects)
            context.load_all_available_dialects()
            for dialect in (chlo, sdy, stablehlo):
                dialect.register_dialect(context)
            try:
                module = self.jax.mlir.deserialize_portable_artifact(source)
            except Exception:  # bytecode of MLIR itself instead of StableHLO's versioned format
                module = ir.Module.parse(source)
            attributes = module.operation.attributes
            return ", ".join(f"{name} = {attributes[name]}" for name in attributes)

    def transform(self, request: Transform) -> Loaded | None:
        if request.unbatched and hlo.has_batched_indices(hlo.parse(request.data)):
            raise CompilerError(
                "a gather or scatter has batch dimensions: batched_gather_scatter_normalizer first"
            )
        after = self.passes(self.stablehlo(request.data, request.digest), request.options)
        idle = self._idle.get(request.digest)
        plain = hlo.without_number(after)
        if plain == idle:
            return None
        if idle is None:
            module = hlo.parse(after)
            # Comparing the numbers of instructions is quicker than computing a digest.
            if (
                hlo.sizes(module) == hlo.sizes(hlo.parse(request.data))
                and hlo.digest(module) == request.digest
            ):
                self._idle.put(request.digest, plain)
                return None
        landed = self.landed(after)
        return None if landed.digest == request.digest else landed

    def text(self, data: bytes) -> str:
        options = self.hlo.HloPrintOptions.short_parsable()
        options.print_metadata = False
        options.print_large_constants = True
        module = self.hlo.HloModule.from_serialized_hlo_module_proto(data)
        text: str = module.to_string(options)
        return text

    def whole(self, data: bytes) -> Summary:
        """Counts after all HLO passes. A fused instruction counts in each computation that computes it."""
        after = self.passes(self.stablehlo(data), ())
        counts = hlo.counts(hlo.parse(after))
        return Summary(counts.operations, *self.costs(after), counts.opcodes, counts.computations)

    def execute(self, request: Execute) -> Executed:
        import jax

        device = jax.devices("cpu")[0]
        draws = [inputs.arrays(request.like, one) for one in request.inputs]
        if request.wide is not None:
            draws = [[inputs.wide(a) for a in arrays] for arrays in draws]

        def placed(arrays: Sequence[Array]) -> list[Any]:
            return [jax.device_put(a, device) for a in arrays]

        try:
            programs = [self._program(m, request) for m in request.modules]
            outputs = tuple(
                tuple(tuple(np.asarray(o) for o in p.execute(placed(arrays))) for arrays in draws)
                for p in programs
            )
            seconds: list[list[float]] = [[] for _ in programs]
            taking = placed(draws[0])
            for _ in range(request.repetitions):
                for program, times in zip(programs, seconds):
                    if any(i.is_deleted() for i in taking):  # a module may reuse the memory of its inputs
                        taking = placed(draws[0])
                    jax.block_until_ready(taking)
                    begin = time.perf_counter()
                    jax.block_until_ready(program.execute(taking))
                    times.append(time.perf_counter() - begin)
        except Exception as error:
            raise CompilerError(_first_line(error)) from error
        return Executed(outputs, tuple(tuple(s) for s in seconds))

    def _program(self, data: bytes, request: Execute) -> Any:
        """A module compiled for a request."""
        import jax

        key = blake2b(data).digest(), request.wide
        if request.quick and key in self._programs:
            self._programs.move_to_end(key)
            return self._programs[key]
        module = data if request.wide is None else widened(data, request.wide.nudge)
        device = jax.devices("cpu")[0]
        program = device.client.compile_and_load(
            self.stablehlo(module),
            self.jax.DeviceList((device,)),
            self.options(_QUICK if request.quick else ()),
        )
        if request.quick:
            self._programs[key] = program
            if len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)
        return program

    def do(self, request: Request) -> Any:
        """The reply to a request."""
        try:
            return self._answer(request)
        except CompilerError as error:
            return Refusal(str(error))
        except MemoryError as error:
            return Refusal(f"it needs more memory than there is: {_first_line(error)}", lasting=False)
        except Exception as error:  # an error in one module must not end the worker
            return Refusal(f"{type(error).__name__}: {_first_line(error)}", lasting=False)

    def _answer(self, request: Request) -> Any:
        match request:
            case Load(source):
                return self.load(source)
            case Transform():
                return self.transform(request)
            case Print(data):
                return self.text(data)
            case Whole(data):
                return self.whole(data)
            case Execute():
                return self.execute(request)


class _Recent:
    """A cache of bytes by key. It keeps the entries that were used last."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, bytes] = OrderedDict()

    def get(self, key: str) -> bytes | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if len(self._values) > _RECENT:
            self._values.popitem(last=False)


class _PassesFinished(Exception):
    """Raised by the hook to end a compilation after the HLO passes."""


def _first_line(error: BaseException) -> str:
    """The first line of a message, without its stack trace. Messages of parsers are joined to one line."""
    lines = [line for line in str(error).partition("*** Begin stack trace")[0].splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    several = lines[0].rstrip().endswith(":")
    return " ".join(" ".join(lines[:4] if several else lines[:1]).split())[:400]

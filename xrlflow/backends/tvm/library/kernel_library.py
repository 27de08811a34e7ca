"""Kernels as a library of custom operators: a shared library that ONNX Runtime loads and that needs no part of TVM.

It consists of TVM's object code, the constants of the kernels, tables (`tables.c`, which is generated here) that say
which kernel is called with which tensors, and a small runtime (`native/`).
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import onnx

from xrlflow.backends.protocol import Array, BackendError, one_line
from xrlflow.backends.tvm.fusion.checks import Check
from xrlflow.backends.tvm.library.code_generation import CodeGenerator, CompiledRegion, RowPort
from xrlflow.backends.tvm.lowering.plan import (
    ALIGNMENT,
    COPY,
    ExecutionPlan,
    Location,
    Tensor,
    memory_of,
    np_dtype,
)
from xrlflow.backends.tvm.toolchain.target import Machine, compiler, instructions, linker
from xrlflow.onnxio.region_digest import DIGITS
from xrlflow.storage import files

NATIVE = Path(__file__).parent / "native"
_SOURCES = ("runtime.c", "processor.c")
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
_LINKING = ("-Wl,-z,noexecstack", "-lm", "-lpthread")
# The library must stay loaded: session options unload it when they are deleted, and a session may live longer than its
# options.
_STAYS = "-Wl,-z,nodelete"
# A kernel that calls this function needs TVM's runtime.
_RUNTIME = b"TVMFFIEnvModLookupFromImports"
# DLPack's codes of kinds of elements.
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
# A parallel loop has this many parts for each core, so that a core that other programs disturb can run fewer of them.
_TASKS_PER_CORE = 4
_LONGEST_NAME = 100
"""The greatest length of a name in an error message, so that the other words of the message fit (TEXT of
`native/runtime.c`)."""


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """Regions, by name, as object code and tables. `domain`: the domain of their operators. The name has a digest of
    code and tables, and a digest of what the model file computes without them (see `onnxio.region_digest`)."""

    machine: Machine
    code: tuple[bytes, ...]
    tables: str
    constants: tuple[Array, ...]
    domain: str

    def save(self, path: Path, options: Sequence[str] = (), profiled: int = 0) -> None:
        """Compile and link the library, with further options of the C compiler. The file is written completely or not
        at all.

        `profiled`: the number of steps in all plans, for a library that measures each of them (see `operator_times`).
        Raises BackendError if there is no C compiler, if it fails, or if the file cannot be written.
        """
        triple = self.machine.triple
        command = linker(triple)
        if command is None:
            raise BackendError(f"{path}: a library of kernels is built with {compiler(triple)}: install that")
        _put(path, lambda folder: self._build(command, folder, options, profiled))

    @property
    def _section(self) -> str:
        """The name of the section for constants. On x86-64, code cannot reach beyond 2 GB, and linkers put .lrodata
        behind everything else."""
        return ".lrodata" if self.machine.triple.startswith("x86_64") else ".rodata"

    def _build(self, command: str, folder: Path, options: Sequence[str], profiled: int) -> Path:
        objects = [f"kernels{number}.o" for number in range(len(self.code))]
        for name, part in zip(objects, self.code):
            (folder / name).write_bytes(part)
        (folder / "tables.c").write_text(_domain(self.domain) + self.tables)
        (folder / "constants.s").write_text(_ASSEMBLY.format(alignment=ALIGNMENT, section=self._section))
        _called([command, "-c", "constants.s", "-o", "constants.o"], folder)
        with (folder / "constants.o").open("r+b") as file:
            _fill(file, self._section, self.constants)
        names = "RegisterCustomOps; xrlflow_spent;" if profiled else "RegisterCustomOps;"
        (folder / "exports").write_text(f"{{ global: {names} local: *; }};\n")
        options = (*options, f"-DXRLFLOW_PROFILE={profiled}" if profiled else _STAYS)
        sources = [str(NATIVE / name) for name in _SOURCES]
        _called(
            [
                command, *_FLAGS, f"-I{NATIVE}", *sources, "tables.c", "constants.o", *objects,
                "-Wl,--version-script=exports", *_LINKING, *options, "-o", "built.so",
            ],
            folder,
        )  # fmt: skip
        return folder / "built.so"


def _called(command: Sequence[str], folder: Path) -> None:
    """Run the C compiler. Raises BackendError if it fails."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        message = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
        raise BackendError(
            f"the C compiler ({command[0]}) cannot build a library of kernels: {one_line(message)}"
        )


# The file header of ELF, 64 bits, least byte first: where the section headers are, the size of one, their number, and
# which of them has the names. A section header: its name, its offset in the file and its size.
_SECTIONS, _SECTION, _PLACE = struct.Struct("<40xQ10xHHH"), struct.Struct("<I20xQQ"), struct.Struct("<QQ")
_PLACE_IN_SECTION = 24


def _fill(file: BinaryIO, section: str, arrays: Iterable[Array]) -> None:
    """Append arrays to an object file as the content of one of its sections, and a byte, so that there is content.

    An assembler that reads them from another file would write them once more.
    """
    content = file.read()
    first, size, count, with_names = _SECTIONS.unpack_from(content)
    headers = [_SECTION.unpack_from(content, first + size * n) for n in range(count)]
    _, names, length = headers[with_names]
    texts = content[names : names + length]
    number = next(n for n, (at, *_) in enumerate(headers) if texts[at:].startswith(section.encode() + b"\0"))
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
    begin = file.tell()
    for array in arrays:
        file.write(b"\0" * (-file.tell() % ALIGNMENT))
        file.write(memory_of(array))
    file.write(b"\0")
    end = file.tell()
    file.seek(first + size * number + _PLACE_IN_SECTION)
    file.write(_PLACE.pack(begin, end - begin))


@dataclass(frozen=True, slots=True)
class BuiltLibrary:
    """A library of kernels that another process built, as the content of its file."""

    content: bytes

    def save(self, path: Path) -> None:
        """Write the library, completely or not at all. Raises BackendError if it cannot be written."""

        def copied(folder: Path) -> Path:
            copy = folder / "built.so"
            copy.write_bytes(self.content)
            copy.chmod(0o755)
            return copy

        _put(path, copied)


def _put(path: Path, build: Callable[[Path], Path]) -> None:
    """Let `build` create a file in a folder next to `path`, and move this file to `path`. Raises BackendError if it
    cannot be written."""
    try:
        target = Path(files.destination(path))
        with tempfile.TemporaryDirectory(prefix=files.UNFINISHED, dir=target.parent) as folder:
            files.put(build(Path(folder)), target)
    except OSError as error:
        raise BackendError(files.cannot_write(path, error)) from error


def kernel_library(
    regions: Mapping[str, CompiledRegion],
    machine: Machine,
    computed: str = DIGITS * "0",
    generator: CodeGenerator | None = None,
) -> KernelLibrary:
    """Generate code for regions. `computed`: the digest of what they compute (`region_digest`). `generator`: one to
    which the regions were added already.

    Raises BackendError if TVM refuses a kernel, or if a kernel needs TVM's runtime.
    """
    if generator is None:
        with CodeGenerator(machine) as own:
            for region in regions.values():
                own.add(region)
            return kernel_library(regions, machine, computed, own)
    code = generator.objects()
    if any(_RUNTIME in part for part in code):
        raise BackendError("a kernel calls a function of TVM's runtime")
    constants, offsets = _shared_constants(
        block.plan for region in regions.values() for block in region.blocks
    )
    tables = "".join(_tables(regions, generator.symbols, offsets, machine))
    digest = hashlib.blake2b(digest_size=DIGITS // 2)
    for part in (*code, tables.encode(), *constants):
        digest.update(part)
    return KernelLibrary(
        machine, code, tables, tuple(constants.values()), f"xrlflow.{digest.hexdigest()}{computed}"
    )


def _shared_constants(plans: Iterable[ExecutionPlan]) -> tuple[dict[bytes, Array], list[list[int]]]:
    """The constants of all plans by their digests, each once, and for each plan the offsets of its constants in
    bytes."""
    constants: dict[bytes, Array] = {}
    positions: dict[bytes, int] = {}
    known: dict[tuple[int, int], bytes] = {}  # plans of one region have the same arrays
    end, offsets = 0, list[list[int]]()
    for plan in plans:
        offsets.append([])
        for array in plan.constants:
            at = (array.ctypes.data, array.nbytes)
            key = known.get(at)
            if key is None:
                key = known[at] = hashlib.blake2b(memory_of(array), digest_size=32).digest()
            if key not in positions:
                positions[key] = end = -(-end // ALIGNMENT) * ALIGNMENT
                constants[key] = array
                end += array.nbytes
            offsets[-1].append(positions[key])
    return constants, offsets


# --- Tables in C

_ASSEMBLY = """\
  .section {section}, "a", %progbits
  .balign {alignment}
  .globl xrlflow_constants_begin
  .hidden xrlflow_constants_begin
xrlflow_constants_begin:
  .section .note.GNU-stack, "", %progbits
"""


def _function(symbols: Mapping[str, str], kernel: str) -> str:
    return COPY if kernel == COPY else f"__tvm_ffi_{symbols[kernel]}"


def _text(text: str | None) -> str:
    """A string literal of C."""
    return "NULL" if text is None else "".join(_literal(text))


def _literal(text: str) -> Iterator[str]:
    yield '"'
    for byte in text.encode():
        plain = 32 <= byte < 127 and byte not in b'"\\?'
        yield chr(byte) if plain else f"\\{byte:03o}"
    yield '"'


def _list(values: Iterable[object]) -> str:
    """The values between the braces of a C array, which must not be empty."""
    return ", ".join(map(str, values)) or "0"


def _domain(domain: str) -> str:
    constants = (
        "extern const unsigned char xrlflow_constants_begin[];\n"
        "const unsigned char* const xrlflow_constants = xrlflow_constants_begin;\n"
    )
    return f'#include "runtime.h"\n{constants}const char xrlflow_domain[] = {_text(domain)};\n'


def _tables(
    regions: Mapping[str, CompiledRegion],
    symbols: Sequence[Mapping[str, str]],
    offsets: Sequence[Sequence[int]],
    machine: Machine,
) -> Iterator[str]:
    features = [*map(_text, instructions(machine.triple, machine.cpu)), "NULL"]
    yield f"const char* const xrlflow_features[] = {{{_list(features)}}};\n"
    yield f"const int32_t xrlflow_tasks = {machine.cores * _TASKS_PER_CORE};\n"
    rows = []
    remaining = zip(symbols, offsets)
    for index, (name, region) in enumerate(regions.items()):
        plans = []
        for number, (block, own_symbols, own_offsets) in enumerate(
            (block, *next(remaining)) for block in region.blocks
        ):
            p = f"r{index}_p{number}"
            yield from _arrays(p, block.plan, own_symbols, own_offsets)
            plans.append(_plan(p, block))
        yield f"static const struct plan r{index}_plans[] = {{\n{''.join(plans)}}};\n"
        yield from _ports(f"r{index}", region)
        rows.append(
            f"  {{{_text(name)}, {len(region.inputs)}, {len(region.weights)}, {len(region.outputs)}, {len(plans)}, "
            f"r{index}_inputs, r{index}_outputs, r{index}_plans}},\n"
        )
    yield f"const int32_t xrlflow_regions = {len(rows)};\n"
    yield f"const struct region xrlflow_region[] = {{\n{''.join(rows)}}};\n"


def _plan(p: str, block: CompiledRegion) -> str:
    plan = block.plan
    checked = -1 if plan.checked is None else plan.checked
    return (
        f"  {{{block.rows}, {len(plan.tensors)}, {len(plan.calls)}, {len(plan.checks)}, {checked}, {p}_inputs, "
        f"{p}_outputs, {p}_tensors, {p}_steps, {p}_checks, {p}_integers, {plan.arena}u}},\n"
    )


def _ports(r: str, region: CompiledRegion) -> Iterator[str]:
    plan = region.plan
    ports = iter(region.ports or [RowPort(0, 0)] * (len(plan.inputs) + len(plan.outputs)))
    for what, names, numbers in (
        ("inputs", region.inputs, plan.inputs),
        ("outputs", region.outputs, plan.outputs),
    ):
        rows: list[str] = []
        for name, n in zip(names, numbers, strict=True):
            tensor, port = plan.tensors[n], next(ports)
            shape = f"{r}_{what}_shape{len(rows)}"
            yield f"static const int64_t {shape}[] = {{{_list(tensor.shape)}}};\n"
            each = tensor.bytes // max(1, region.rows)
            rows.append(
                f"  {{{_port_name(name)}, {_onnx_type(tensor.dtype)}, {port.dimensions}, {port.like}, "
                f"{len(tensor.shape)}, {shape}, {each}u}},\n"
            )
        if what == "inputs":
            rows += [
                f"  {{{_text(one_line(name, _LONGEST_NAME))}, {kind}, 0, 0, 0, NULL, 0}},\n"
                for name, kind in region.weights
            ]
        yield f"static const struct port {r}_{what}[] = {{\n{''.join(rows) or '  {0}'}}};\n"


def _arrays(r: str, plan: ExecutionPlan, symbols: Mapping[str, str], offsets: Sequence[int]) -> Iterator[str]:
    shapes = {shape: n for n, shape in enumerate(dict.fromkeys(tensor.shape for tensor in plan.tensors))}
    for shape, number in shapes.items():
        yield f"static const int64_t {r}_shape{number}[] = {{{_list(shape)}}};\n"
    rows = "".join(f"  {_tensor(t, offsets, f'{r}_shape{shapes[t.shape]}')},\n" for t in plan.tensors)
    yield f"static const struct tensor {r}_tensors[] = {{\n{rows}}};\n"
    for name in sorted({_function(symbols, call.kernel) for call in plan.calls} - {COPY}):
        yield f"int {name}(void*, const Any*, int32_t, Any*);\n"
    for number, call in enumerate(plan.calls):
        yield f"static const int32_t {r}_call{number}[] = {{{_list(call.arguments)}}};\n"
    rows = "".join(
        f"  {{{_function(symbols, call.kernel)}, {len(call.arguments)}, {r}_call{number}}},\n"
        for number, call in enumerate(plan.calls)
    )
    yield f"static const struct step {r}_steps[] = {{\n{rows or '  {0}'}}};\n"
    rows = "".join(f"  {_check(check)},\n" for check in plan.checks)
    yield f"static const struct check {r}_checks[] = {{\n{rows or '  {0}'}}};\n"
    yield f"static const int64_t {r}_integers[] = {{{_list(f'INT64_C({n})' for n in plan.integers)}}};\n"
    yield f"static const int32_t {r}_inputs[] = {{{_list(plan.inputs)}}};\n"
    yield f"static const int32_t {r}_outputs[] = {{{_list(plan.outputs)}}};\n"


def _port_name(name: str) -> str:
    return _text(one_line(name, _LONGEST_NAME))


def _check(check: Check) -> str:
    before, after = check.text[0], check.text[1] if len(check.text) > 1 else None
    return f"{{INT64_C({check.low}), INT64_C({check.high}), {_text(before)}, {_text(after)}}}"


def _tensor(tensor: Tensor, offsets: Sequence[int], shape: str) -> str:
    kind = np_dtype(tensor.dtype)
    offset = offsets[tensor.offset] if tensor.location is Location.CONSTANT else tensor.offset
    return (
        f"{{{tensor.location.value}, {offset}u, {_CODES[kind.kind]}, {kind.itemsize * 8}, "
        f"{len(tensor.shape)}, {shape}}}"
    )


def _onnx_type(dtype: str) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(np_dtype(dtype)))

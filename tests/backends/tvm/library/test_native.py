"""Libraries of kernels in a host program of these tests: with sanitizers, under valgrind, and for another processor."""

from __future__ import annotations

import dataclasses
import io
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TypeProto

from tests.backends.tvm.library.carried import Carried, all_built, feeds_of, numbers, parsed, save_all
from xrlflow.backends.protocol import Array, BackendError
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.library.code_generation import RowPort, compile_region
from xrlflow.backends.tvm.library.kernel_library import NATIVE, KernelLibrary, kernel_library
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine, instructions, lacking
from xrlflow.onnxio.regions import region_of

pytestmark = pytest.mark.measures

HOST = Path(__file__).with_name("host.c")
ARM = "aarch64-linux-gnu"
X86 = platform.machine() == "x86_64"
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
cross = pytest.mark.skipif(
    shutil.which(f"{ARM}-gcc") is None or shutil.which("qemu-aarch64") is None,
    reason=f"needs {ARM}-gcc and qemu-aarch64: `make cross`",
)


@pytest.fixture(scope="module")
def kernels() -> tuple[KernelLibrary, dict[str, Carried]]:
    """The library and its models, compiled for a processor that valgrind supports."""
    return all_built("haswell" if X86 and not lacking("x86_64-linux-gnu", "haswell") else None)


def compiled(folder: Path, *flags: str, compiler: str = "cc") -> Path:
    command = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", str(HOST), *flags, "-o", str(folder / "host")]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return folder / "host"


# --- The host's files


def _number(file: io.BytesIO, *values: int) -> None:
    file.write(struct.pack(f"<{len(values)}q", *values))


def calls(models: Mapping[str, Carried], feeds: Mapping[str, Mapping[str, Array]]) -> bytes:
    """The host's file with one call of each model. The number of an operator is the position of its model."""
    file = io.BytesIO()
    _number(file, len(models))
    for position, (name, model) in enumerate(models.items()):
        _number(file, position, len(model.compiled.inputs))
        for port in model.compiled.inputs:
            array = feeds[name][port]
            _number(file, TYPES[array.dtype.name], array.ndim, *array.shape, array.nbytes)
            file.write(array.tobytes() + b"\0" * (-array.nbytes % 8))
    return file.getvalue()


TYPES = {"float32": 1, "uint8": 2, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "float64": 11}


def results(content: bytes, models: Mapping[str, Carried]) -> dict[str, str | list[bytes]]:
    """The outputs of each model, or the text of its error. Empty if no operator was registered."""
    file = io.BytesIO(content)

    def number() -> int:
        (value,) = struct.unpack("<q", file.read(8))
        return int(value)

    def elements() -> bytes:
        size = number()
        result = file.read(size)
        file.read(-size % 8)
        return result

    if number() == 0:
        return {}
    result: dict[str, str | list[bytes]] = {}
    for name in models:
        error = elements().decode()
        result[name] = error or [elements() for _ in range(number())]
    assert not file.read()
    return result


def run(
    command: Sequence[str], folder: Path, models: Mapping[str, Carried], *, threads: int = 3, **changed: Array
) -> Any:
    """Call each model in a host. Returns the results, or the process if it failed.

    `changed`: other inputs for the models "symbolic" and "gather".
    """
    feeds = {name: feeds_of(model.plain) for name, model in models.items()}
    for name, value in changed.items():
        feeds["gather" if name == "index" else "symbolic"][name] = value
    return run_with(command, folder, models, feeds, threads)


def run_with(
    command: Sequence[str],
    folder: Path,
    models: Mapping[str, Carried],
    feeds: Mapping[str, Mapping[str, Array]],
    threads: int,
) -> Any:
    """As `run`, with these inputs for each model."""
    (folder / "calls").write_bytes(calls(models, feeds))
    done = subprocess.run(
        [*command, str(folder / "kernels.so"), str(folder / "calls"), str(folder / "results"), str(threads)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if done.returncode != 0 or done.stderr:
        return done
    return results((folder / "results").read_bytes(), models)


def compare(result: Any, models: Mapping[str, Carried]) -> None:
    assert isinstance(result, dict), result
    assert result.keys() == models.keys()
    for name, model in models.items():
        session = ort.InferenceSession(model.plain.SerializeToString())
        expected = session.run(None, feeds_of(model.plain))
        assert isinstance(result[name], list), result[name]
        for ours, right in zip(result[name], expected, strict=True):
            array = np.frombuffer(ours, right.dtype).reshape(right.shape)
            bound = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}.get(str(right.dtype), 0.0)
            np.testing.assert_allclose(
                np.asarray(array, float), np.asarray(right, float), rtol=bound, atol=bound
            )


def with_row(library: KernelLibrary, region: int, column: int, value: str) -> KernelLibrary:
    """The library with another number in the table of a region's plan."""

    def changed(match: re.Match[str]) -> str:
        cells = match.group(0).split(", ")
        cells[column] = cells[column].replace(re.findall(r"\d+", cells[column])[0], value)
        return ", ".join(cells)

    tables, count = re.subn(rf"  \{{0, .*, r{region}_p0_inputs, .*\}},\n", changed, library.tables)
    assert count == 1
    assert tables != library.tables
    return dataclasses.replace(library, tables=tables)


# --- Tests

ROWS = (0, 1, 5, 16, 21, 128, 130, 291)


def for_rows(machine: Machine) -> tuple[KernelLibrary, dict[str, Carried], dict[str, dict[str, Array]]]:
    """A library with regions for any number of rows, the models of the regions, and inputs of several sizes."""
    text = (
        "(float[N,48] x, float[N,5] z, int64[N] i) => (float[N,40] y, float[N,5] v)"
        f" <float[48,40] w = {{{numbers(48, 40)}}}, float[7,40] t = {{{numbers(7, 40)}}}>"
        " { a = MatMul(x, w) e = Gather(t, i) y = Add(a, e) v = Tanh(z) }"
    )
    plain = parsed(text)
    region = region_of(plain.graph, range(len(plain.graph.node)))
    blocks = []
    for count in (128, 16, 1):
        types = {}
        for value in (*plain.graph.input, *plain.graph.output):
            types[value.name] = TypeProto.FromString(value.type.SerializeToString())
            types[value.name].tensor_type.shape.dim[0].dim_value = count
        blocks.append(dataclasses.replace(compile_region(plain, region, types, machine), rows=count))
    ports = (RowPort(1, 0),) * 5
    compiled = dataclasses.replace(blocks[0], ports=ports, smaller=tuple(blocks[1:]))
    models = {str(rows): Carried(plain, region, compiled, f"Rows_{rows}") for rows in ROWS}
    rng = np.random.default_rng(0)
    feeds: dict[str, dict[str, Array]] = {
        str(rows): {
            "x": rng.random((rows, 48), np.float32),
            "z": rng.random((rows, 5), np.float32),
            "i": rng.integers(0, 7, rows),
        }
        for rows in ROWS
    }
    return kernel_library({m.name: m.compiled for m in models.values()}, machine), models, feeds


def compare_rows(
    result: Any, models: Mapping[str, Carried], feeds: Mapping[str, Mapping[str, Array]]
) -> None:
    assert isinstance(result, dict), result
    for name, model in models.items():
        expected = ort.InferenceSession(model.plain.SerializeToString()).run(None, dict(feeds[name]))
        assert isinstance(result[name], list), result[name]
        for ours, right in zip(result[name], expected, strict=True):
            array = np.frombuffer(ours, right.dtype).reshape(right.shape)
            np.testing.assert_allclose(array, right, rtol=1e-5, atol=1e-5)


def test_rows_with_sanitizers(tmp_path: Path) -> None:
    """Whole blocks, blocks that overlap, and blocks with fewer rows read and write nothing else."""
    library, models, feeds = for_rows(detect(None, 2))
    library.save(tmp_path / "kernels.so", options=SANITIZED)
    command = [str(compiled(tmp_path, *SANITIZED))]
    compare_rows(run_with(command, tmp_path, models, feeds, 3), models, feeds)
    feeds["130"]["i"][-1] = 7
    feeds["16"]["z"] = feeds["16"]["z"][:15]
    result = run_with(command, tmp_path, models, feeds, 3)
    assert "index 7 (input i) is outside of its table" in result["130"]
    assert "input z is not of the type and the sizes [?, 5]" in result["16"]


@pytest.mark.skipif(not X86 or shutil.which("valgrind") is None, reason="needs valgrind")
def test_rows_under_valgrind(tmp_path: Path) -> None:
    library, models, feeds = for_rows(
        detect("haswell" if not lacking("x86_64-linux-gnu", "haswell") else None, 2)
    )
    library.save(tmp_path / "kernels.so")
    command = ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", str(compiled(tmp_path))]
    compare_rows(run_with(command, tmp_path, models, feeds, 1), models, feeds)


def test_with_sanitizers(kernels: tuple[KernelLibrary, dict[str, Carried]], tmp_path: Path) -> None:
    """With errors and several threads, the sanitizers find no wrong address, no leak and no undefined behaviour."""
    library, models = kernels
    library.save(tmp_path / "kernels.so", options=SANITIZED)
    host = compiled(tmp_path, *SANITIZED)
    compare(run([str(host)], tmp_path, models), models)
    result = run(
        [str(host)],
        tmp_path,
        models,
        x=np.ones((5, 8), np.float32),
        other=np.ones((3, 8), np.float32),
        index=np.array([0, 9, 0, 0], np.int64),
    )
    assert "input x is not of the type and the sizes [3, 8]" in result["symbolic"]
    assert "index 9 (input index) is outside of its table" in result["gather"]


def test_sanitizers_see_a_wrong_table(
    kernels: tuple[KernelLibrary, dict[str, Carried]], tmp_path: Path
) -> None:
    library, models = kernels
    steps = len(models["sum"].compiled.plan.calls)
    number = list(models).index("sum")
    with_row(library, number, 2, str(steps + 1)).save(tmp_path / "kernels.so", options=SANITIZED)
    done = run([str(compiled(tmp_path, *SANITIZED))], tmp_path, models)
    assert "AddressSanitizer: global-buffer-overflow" in done.stderr


@pytest.fixture(scope="module")
def plain(
    kernels: tuple[KernelLibrary, dict[str, Carried]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the library and the host, without sanitizers."""
    folder = tmp_path_factory.mktemp("plain")
    kernels[0].save(folder / "kernels.so")
    compiled(folder)
    return folder


@pytest.mark.parametrize("version", ["1.16.3", "1.9.0", "1.17.0", "1.100.2", "2.0.0", "unknown"])
def test_an_old_runtime_is_not_asked_for_a_new_api(
    kernels: tuple[KernelLibrary, dict[str, Carried]],
    plain: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
) -> None:
    monkeypatch.setenv("HOST_VERSION", version)
    result = run([str(plain / "host")], plain, kernels[1], threads=1)
    assert bool(result) == (version in ("1.17.0", "1.100.2", "2.0.0"))


_IN_A_SESSION = """
import sys
import numpy as np, onnxruntime as ort
folder = sys.argv[1]
for name in sys.argv[2:]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.register_custom_ops_library(f"{folder}/kernels.so")
    feeds = dict(np.load(f"{folder}/{name}.npz"))
    with_kernels = ort.InferenceSession(f"{folder}/{name}.onnx", options)
    plain = ort.InferenceSession(f"{folder}/{name}.plain.onnx")
    for _ in range(3):
        for a, b in zip(plain.run(None, feeds), with_kernels.run(None, feeds)):
            assert np.allclose(np.asarray(a, float), np.asarray(b, float), atol=2e-3), name
    print(name)
"""


def test_with_sanitizers_in_a_session(
    kernels: tuple[KernelLibrary, dict[str, Carried]], tmp_path: Path
) -> None:
    library, models = kernels
    save_all(tmp_path, library, models)
    library.save(tmp_path / "kernels.so", options=SANITIZED)
    result = [
        subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_SESSION, str(tmp_path), *models],
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(path.strip() for path in result),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own are many; the host looks for ours
        },
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(models)


@pytest.mark.skipif(
    shutil.which("valgrind") is None or not X86, reason="needs valgrind: `apt-get install valgrind`"
)
def test_under_valgrind(kernels: tuple[KernelLibrary, dict[str, Carried]], tmp_path: Path) -> None:
    """Valgrind also checks the kernels, which are not compiled with sanitizers."""
    library, models = kernels
    host = compiled(tmp_path)
    command = ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", "--redzone-size=256", str(host)]
    library.save(tmp_path / "kernels.so")
    compare(run(command, tmp_path, models, threads=1), models)

    arena = models["matmul"].compiled.plan.arena
    number = list(models).index("matmul")
    with_row(library, number, -1, str(arena - 64)).save(tmp_path / "kernels.so")
    done = run(command, tmp_path, models, threads=1)
    assert done.returncode == 9
    assert "Invalid write" in done.stderr


_NESTED = """
#include <runtime.c>
const char xrlflow_domain[] = "";
const int32_t xrlflow_tasks = 8, xrlflow_regions = 0;
const struct region xrlflow_region[1];
const unsigned char* const xrlflow_constants = NULL;
int xrlflow_runs_here(void) { return 1; }

static int loops, inner, outer;
static void* parallel_for(void* context, void (*run)(void*, size_t), size_t total, size_t batch, void* data) {
  (void)context, (void)batch;
  loops++;
  for (size_t i = 0; i < total; i++) run(data, i);
  return NULL;
}
static int inner_task(int task, Group* group, void* data) {
  (void)data;
  inner += task == 0 && group->num_task == 1;
  return 0;
}
static int outer_task(int task, Group* group, void* data) {
  (void)task, (void)data;
  outer += group->num_task == 8;
  return launch(inner_task, NULL, 5);
}
static int failing_task(int task, Group* group, void* data) {
  static const char* const text[] = {"task ", "three"};
  (void)group, (void)data;
  if (task == 3) set_error("", text, 2);
  return task == 3 ? -1 : 0;
}
int main(void) {
  static Api api;
  api.function[PARALLEL_FOR] = parallel_for;
  struct running here = {&api, NULL};
  running = &here;
  int done = launch(outer_task, NULL, 0);
  int failed = launch(failing_task, NULL, 4);
  printf("%d %d %d %d %d %s", done, loops, outer, inner, failed, said);
  return running != &here;
}
"""


def test_a_loop_inside_a_loop_stays_on_its_thread(tmp_path: Path) -> None:
    """ONNX Runtime does not run a parallel loop inside another one. If one iteration fails, the loop fails."""
    (tmp_path / "nested.c").write_text(_NESTED)
    command = ["cc", *SANITIZED, f"-I{NATIVE}", "-D_GNU_SOURCE", str(tmp_path / "nested.c")]
    subprocess.run([*command, "-o", str(tmp_path / "nested"), "-lpthread"], check=True)
    done = subprocess.run([str(tmp_path / "nested")], capture_output=True, text=True, check=True)
    assert done.stdout == "0 2 8 8 -1 task three"


@cross
def test_for_another_processor(tmp_path: Path) -> None:
    library, models = all_built("neoverse-n1", ARM)
    library.save(tmp_path / "kernels.so")
    host = compiled(tmp_path, compiler=f"{ARM}-gcc")
    emulator = ["qemu-aarch64", "-L", f"/usr/{ARM}"]
    compare(run([*emulator, "-cpu", "neoverse-n1", str(host)], tmp_path, models), models)
    # This processor has neither products of bytes (dotprod) nor floats of 16 bits.
    assert run([*emulator, "-cpu", "cortex-a53", str(host)], tmp_path, models) == {}


HARDWARE = {
    "fp-armv8": "FP", "neon": "ASIMD", "crc": "CRC32", "lse": "ATOMICS", "fullfp16": "ASIMDHP", "rdm": "ASIMDRDM",
    "jsconv": "JSCVT", "complxnum": "FCMA", "rcpc": "LRCPC", "sha3": "SHA3", "dotprod": "ASIMDDP", "sve": "SVE",
    "fp16fml": "ASIMDFHM", "lse2": "USCAT", "rcpc-immo": "ILRCPC", "flagm": "FLAGM", "sve2p2": "SVE2P2",
}  # fmt: skip
"""The instructions with a bit in the system's first word: LLVM's names, and the system's (HWCAP_*). Those of the second
word (HWCAP2_*) follow."""
HARDWARE2 = {
    "sve2": "SVE2", "sve-aes": "SVEAES", "sve-bitperm": "SVEBITPERM", "sve-sha3": "SVESHA3", "sve-sm4": "SVESM4",
    "altnzcv": "FLAGM2", "fptoint": "FRINT", "i8mm": "I8MM", "bf16": "BF16", "cssc": "CSSC", "sve2p1": "SVE2P1",
    "mops": "MOPS", "hbc": "HBC", "sve-b16b16": "SVE_B16B16", "rcpc3": "LRCPC3", "lse128": "LSE128",
    "faminmax": "FAMINMAX",
}  # fmt: skip


@cross
def test_bits_are_those_of_the_system(tmp_path: Path) -> None:
    """Only instructions that the installed headers know are checked."""
    assert HARDWARE.keys() | HARDWARE2.keys() == _table("aarch64")
    checks = [
        f'#ifdef HWCAP{word}_{bit}\n  check("{name}", {vector}, HWCAP{word}_{bit});\n#endif\n'
        for word, vector, names in (("", 16, HARDWARE), ("2", 26, HARDWARE2))
        for name, bit in names.items()
    ]
    (tmp_path / "bits.c").write_text(
        f'#include "{NATIVE / "processor.c"}"\n'
        "#include <asm/hwcap.h>\n#include <stdio.h>\n"
        "const char* const xrlflow_features[] = {NULL};\n"
        "static void check(const char* name, unsigned long vector, unsigned long bits) {\n"
        "  for (size_t i = 0; i < sizeof features / sizeof *features; i++)\n"
        "    if (!strcmp(features[i].name, name))\n"
        '      printf("%s %d\\n", name, features[i].vector == vector && 1UL << features[i].bit == bits);\n'
        "}\n"
        f"int main(void) {{\n{''.join(checks)}  return 0;\n}}\n"
    )
    program = str(tmp_path / "bits")
    subprocess.run([f"{ARM}-gcc", str(tmp_path / "bits.c"), "-o", program], check=True)
    command = ["qemu-aarch64", "-L", f"/usr/{ARM}", program]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) >= 20
    assert [line for line in lines if not line.endswith(" 1")] == []


def test_without_a_cross_compiler(
    kernels: tuple[KernelLibrary, dict[str, Carried]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = dataclasses.replace(kernels[0].machine, triple=ARM)
    with pytest.raises(BackendError, match=f"built with {ARM}-gcc: install that"):
        dataclasses.replace(kernels[0], machine=machine).save(tmp_path / "kernels.so")


# --- The table of instructions


def _table(architecture: str) -> set[str]:
    """The names of instructions in the table of `processor.c` for an architecture."""
    parts = re.split(r"^#(?:if|elif|else).*$", (NATIVE / "processor.c").read_text(), flags=re.MULTILINE)
    part = next(p for p in parts if ("cpuid.h" if architecture == "x86_64" else "auxv.h") in p)
    return set(re.findall(r'\{"([^"]+)", ', part))


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_the_table_has_each_instruction_that_llvm_may_generate(architecture: str) -> None:
    triple = f"{architecture}-linux-gnu"
    kind = tvm().target.Target({"kind": "llvm", "mtriple": triple})
    names = [str(name) for name in tvm().get_global_func("target.llvm_get_cpu_archlist")(kind)]
    assert len(names) > 50
    wanted = {name: set(instructions(triple, name)) - _table(architecture) for name in names}
    assert {name: missing for name, missing in wanted.items() if missing} == {}


@pytest.mark.skipif(not X86, reason="reads what an x86-64 processor says of itself")
def test_the_table_agrees_with_llvm_on_this_machine(tmp_path: Path) -> None:
    source = tmp_path / "names.c"
    source.write_text(
        f'#include "{NATIVE / "processor.c"}"\n'
        "#include <stdio.h>\n"
        "const char* const xrlflow_features[] = {NULL};\n"
        "int main(void) {\n"
        "  for (size_t i = 0; i < sizeof features / sizeof *features; i++)\n"
        '    printf("%s %d\\n", features[i].name, has(features[i].name));\n'
        "  return xrlflow_runs_here() - 1;\n"
        "}\n"
    )
    subprocess.run(["cc", str(source), "-o", str(tmp_path / "names")], check=True)
    lines = subprocess.run([str(tmp_path / "names")], capture_output=True, text=True, check=True).stdout
    ours = {name: value == "1" for name, value in (line.split() for line in lines.splitlines())}
    result = tvm().get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    theirs = {str(name): bool(value) for name, value in result.items()}
    assert ours["sse2"]
    both = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}
    assert {name for name in ours if name not in theirs} <= {"sse4a", "xop"}

"""Libraries of kernels in sessions of ONNX Runtime."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest
from onnx import ModelProto, TensorProto, helper

from tests.backends.tvm.library.carried import (
    TEXTS,
    Carried,
    all_built,
    built,
    carried,
    feeds_of,
    for_another_processor,
    numbers,
    parsed,
    with_another_body,
)
from xrlflow.backends.protocol import Array, BackendError
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.library.hybrid import hybrid
from xrlflow.backends.tvm.library.kernel_library import KernelLibrary, kernel_library
from xrlflow.onnxio.regions import region_of, with_functions

pytestmark = pytest.mark.measures

NAME = "it's \"quoted\" \\back\\ %s %n ??/ ??' é 漢字 \x07\x1b"
"""A name with characters that C, `printf` or a terminal would interpret."""


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """A saved library and its models."""

    library: KernelLibrary
    path: Path
    models: Mapping[str, Carried]

    def function(self, name: str, **options: bool) -> ModelProto:
        return self.models[name].function(self.library.domain, **options)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Built:
    library, models = all_built()
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    library.save(path)
    return Built(library, path, models)


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A library with one model whose names contain special characters."""
    text = "(float[N,8] x, int64[4] index) => (float[4,8] y) { a = Relu(x) y = Gather<axis = 0>(a, index) }"
    model = parsed(text)
    model.graph.input[0].name = model.graph.node[0].input[0] = NAME
    model.graph.input[1].name = model.graph.node[1].input[1] = "漢" * 400
    model.graph.node[1].name = NAME
    library, models = built({"names": model}, detect(None, 2, None))
    path = tmp_path_factory.mktemp("kernels") / "another.so"
    library.save(path)
    return Built(library, path, models)


def options(*libraries: Path, threads: int = 2) -> Any:
    session_options = ort.SessionOptions()
    session_options.intra_op_num_threads = threads
    session_options.log_severity_level = 4  # errors are raised as well
    for library in libraries:
        session_options.register_custom_ops_library(str(library))
    return session_options


def session(model: ModelProto, *libraries: Path, threads: int = 2) -> Any:
    return ort.InferenceSession(
        model.SerializeToString(), options(*libraries, threads=threads), providers=["CPUExecutionProvider"]
    )


def close(a: list[Array], b: list[Array]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        bound = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}.get(str(x.dtype), 0.0)
        np.testing.assert_allclose(np.asarray(y, float), np.asarray(x, float), rtol=bound, atol=bound)


def identical(a: list[Array], b: list[Array]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


# --- Results


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_computes_the_same_with_and_without_its_library(kernels: Built, name: str) -> None:
    plain, compiled = kernels.models[name].plain, kernels.function(name)
    onnx.checker.check_model(compiled, full_check=True)
    feeds = feeds_of(plain)
    expected = session(plain).run(None, feeds)
    identical(expected, session(compiled).run(None, feeds))
    with_kernels = session(compiled, kernels.path)
    close(expected, with_kernels.run(None, feeds))
    close(expected, with_kernels.run(None, feeds))  # in memory that has been used


def test_kernels_run_where_the_library_is_registered(kernels: Built) -> None:
    """Otherwise the other tests would compare the functions' nodes with themselves."""
    compiled = with_another_body(kernels.models["symbolic"], kernels.library.domain)
    plain, feeds = kernels.models["symbolic"].plain, feeds_of(kernels.models["symbolic"].plain)
    expected = session(plain).run(None, feeds)
    assert np.abs(session(compiled).run(None, feeds)[0] - expected[0]).max() > 0.1
    close(expected, session(compiled, kernels.path).run(None, feeds))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("mode", [ort.ExecutionMode.ORT_SEQUENTIAL, ort.ExecutionMode.ORT_PARALLEL])
def test_threads_and_execution_modes(kernels: Built, threads: int, mode: Any) -> None:
    plain, feeds = kernels.models["matmul"].plain, feeds_of(kernels.models["matmul"].plain)
    expected = session(plain).run(None, feeds)
    chosen = options(kernels.path, threads=threads)
    chosen.execution_mode = mode
    chosen.inter_op_num_threads = 2
    running = ort.InferenceSession(kernels.function("matmul").SerializeToString(), chosen)
    for _ in range(3):
        close(expected, running.run(None, feeds))


def test_regions_that_run_at_the_same_time(kernels: Built) -> None:
    """The graph has two regions that do not depend on each other."""
    text = (
        "(float[64,96] x) => (float[64,64] y)"
        f" <float[96,64] w = {{{numbers(96, 64)}}}>"
        " { a = MatMul(x, w) b = Softmax(a) c = Relu(b)"
        " d = MatMul(x, w) e = Softmax(d) f = Relu(e) y = Sub(c, f) }"
    )
    model = parsed(text)
    regions = {kernels.models["matmul"].name: region_of(model.graph, range(3))}
    with_regions = with_functions(model, regions, kernels.library.domain)
    node = with_regions.graph.node.add()
    node.CopyFrom(next(n for n in with_regions.graph.node if n.domain))
    node.output[0], node.name = "f", "second"
    kept = [n for n in with_regions.graph.node if n.domain or n.op_type == "Sub"]
    kept.sort(key=lambda n: n.op_type == "Sub")
    del with_regions.graph.node[:]
    with_regions.graph.node.extend(kept)
    chosen = options(kernels.path)
    chosen.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    chosen.inter_op_num_threads = 2
    running = ort.InferenceSession(with_regions.SerializeToString(), chosen)
    feeds = feeds_of(model)
    for _ in range(10):
        assert not running.run(None, feeds)[0].any()


def test_weights_as_inputs(tmp_path: Path) -> None:
    """The function's nodes read the weights of the model. Kernels have copies of their own."""
    machine = detect(None, 2, None)
    names = ("conv", "matmul", "reshape")
    regions = {n: carried(f"Region_{n}", parsed(TEXTS[n]), machine, weights_as_inputs=True) for n in names}
    library = kernel_library({each.name: each.compiled for each in regions.values()}, machine)
    library.save(path := tmp_path / "kernels.so")
    for each in regions.values():
        plain, model = each.plain, each.function(library.domain, weights_as_inputs=True)
        onnx.checker.check_model(model, full_check=True)
        assert [t.name for t in model.graph.initializer] == [t.name for t in plain.graph.initializer]
        feeds = feeds_of(plain)
        expected = session(plain).run(None, feeds)
        identical(expected, session(model).run(None, feeds))
        model.functions[0].node[-1].op_type = "Cos"  # not what the kernels compute
        del model.functions[0].node[-1].attribute[:]
        del model.functions[0].node[-1].input[1:]
        close(expected, session(model, path).run(None, feeds))


# --- Memory of the caller


def at(offset: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """An array whose elements begin `offset` bytes after a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    block = np.zeros(size + 128, np.uint8)
    start = -block.ctypes.data % 64 + offset
    return block[start : start + size].view(dtype).reshape(shape)


@pytest.mark.parametrize("offset", [1, 4, 24])
@pytest.mark.parametrize(
    "name", ["sum", "matmul", "conv", "gather", "float16", "float64", "reshape", "input"]
)
def test_memory_of_the_caller_begins_anywhere(kernels: Built, name: str, offset: int) -> None:
    plain, feeds = kernels.models[name].plain, feeds_of(kernels.models[name].plain)
    expected = session(plain).run(None, feeds)
    running = session(kernels.function(name), kernels.path)
    binding = running.io_binding()
    inputs = {key: at(offset, value.shape, value.dtype) for key, value in feeds.items()}
    for key, value in inputs.items():
        value[...] = feeds[key]
        binding.bind_input(key, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
    outputs = [at(offset, value.shape, value.dtype) for value in expected]
    for about, value in zip(running.get_outputs(), outputs, strict=True):
        binding.bind_output(about.name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
    running.run_with_iobinding(binding)
    close(expected, outputs)
    close(expected, running.run(None, inputs))


# --- Errors


def test_other_sizes_are_an_error(kernels: Built) -> None:
    running = session(kernels.function("symbolic"), kernels.path)
    right = feeds_of(kernels.models["symbolic"].plain)
    wrong = {key: np.ones((5, 8), np.float32) for key in right}
    said = r"Region_\d+: input x is not of the type and the sizes \[3, 8\] that its kernels were compiled for"
    for _ in range(2):
        with pytest.raises(Exception, match=said):
            running.run(None, wrong)
        with pytest.raises(Exception, match="sizes"):
            running.run(None, {key: np.ones((0, 8), np.float32) for key in right})
        close(session(kernels.models["symbolic"].plain).run(None, right), running.run(None, right))


def test_another_number_of_dimensions_is_an_error(kernels: Built) -> None:
    compiled = kernels.function("symbolic")
    for value in (*compiled.graph.input, *compiled.graph.output):
        value.type.tensor_type.ClearField("shape")
    running = session(compiled, kernels.path)
    for shape in ((), (3,), (3, 8, 1), (1,) * 40, (3, 8) + (1,) * 62):
        with pytest.raises(Exception, match=r"sizes \[3, 8\]"):
            running.run(None, {key: np.ones(shape, np.float32) for key in ("x", "other")})
    running.run(None, feeds_of(kernels.models["symbolic"].plain))


@pytest.mark.parametrize("wrong", [6, -7, 2**62, -(2**62)])
def test_an_index_outside_its_table_is_an_error(kernels: Built, wrong: int) -> None:
    plan = kernels.models["gather"].compiled.plan
    running = session(kernels.function("gather"), kernels.path)
    feeds = feeds_of(kernels.models["gather"].plain)
    text = plan.checks[0].trouble(min(wrong, 0), max(wrong, 0))
    assert text is not None
    with pytest.raises(Exception) as raised:
        running.run(None, {**feeds, "index": np.array([0, 1, wrong, 2], np.int64)})
    assert str(raised.value).endswith(text)
    close(session(kernels.models["gather"].plain).run(None, feeds), running.run(None, feeds))


def test_names_in_errors(another: Built) -> None:
    (model,) = another.models.values()
    feeds = feeds_of(model.plain)
    running = session(another.function("names"), another.path)
    close(session(model.plain).run(None, feeds), running.run(None, feeds))
    with pytest.raises(Exception, match="its kernels were compiled for") as raised:
        running.run(None, {**feeds, NAME: np.ones((4, 8), np.float32)})
    assert "it's \"quoted\" \\back\\ %s %n ??/ ??' é 漢字 " in str(raised.value)
    assert "\x1b" not in str(raised.value)
    with pytest.raises(Exception, match='Gather it\'s "quoted"') as raised:
        running.run(None, {**feeds, "漢" * 400: np.array([0, 1, 9, 2], np.int64)})
    assert "漢漢漢" in str(raised.value)  # the text has been cut, but not inside a character


def test_an_error_of_a_kernel_is_the_error_of_the_run(kernels: Built, tmp_path: Path) -> None:
    """Kernels compare the sizes of their tensors with those that they were compiled for."""
    number = list(kernels.models).index("sum")
    before = f"r{number}_p0_tensors[] = {{\n  {{INPUT, 0u, 2, 32,"
    assert before in kernels.library.tables
    tables = kernels.library.tables.replace(before, before.replace("32,", "64,"))
    dataclasses.replace(kernels.library, tables=tables).save(path := tmp_path / "wrong.so")
    running = session(kernels.function("sum"), path)
    for _ in range(2):
        with pytest.raises(Exception, match=rf"Region_{number}: Mismatched x.dtype"):
            running.run(None, feeds_of(kernels.models["sum"].plain))


# --- Registering


def test_registering_again_changes_nothing(kernels: Built, another: Built) -> None:
    chosen = options(kernels.path, kernels.path, another.path, kernels.path, another.path)
    for each, name in ((kernels, "sum"), (another, "names"), (kernels, "conv")):
        feeds = feeds_of(each.models[name].plain)
        expected = session(each.models[name].plain).run(None, feeds)
        running = ort.InferenceSession(each.function(name).SerializeToString(), chosen)
        close(expected, running.run(None, feeds))


def test_a_library_has_a_domain_of_its_own(kernels: Built, another: Built) -> None:
    """With the library of another model, ONNX Runtime runs the function's nodes."""
    assert kernels.library.domain != another.library.domain
    feeds = feeds_of(kernels.models["conv"].plain)
    expected = session(kernels.models["conv"].plain).run(None, feeds)
    identical(expected, session(kernels.function("conv"), another.path).run(None, feeds))


def test_sessions_outlive_their_options_and_each_other(kernels: Built) -> None:
    feeds = feeds_of(kernels.models["matmul"].plain)
    expected = session(kernels.models["matmul"].plain).run(None, feeds)
    running = [session(kernels.function("matmul"), kernels.path) for _ in range(3)]
    while running:
        gc.collect()
        for each in running:
            close(expected, each.run(None, feeds))
        running.pop(0)


def test_runs_at_the_same_time(kernels: Built) -> None:
    plain = session(kernels.models["matmul"].plain)
    given = [feeds_of(kernels.models["matmul"].plain, seed) for seed in range(6)]
    expected = [plain.run(None, feeds) for feeds in given]
    running = session(kernels.function("matmul"), kernels.path)

    def run(i: int) -> None:
        for _ in range(50):
            close(expected[i], running.run(None, given[i]))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(6)))


def test_memory_is_given_back(tmp_path: Path) -> None:
    """A session has 4 MB for values between kernels. They are released together with the session."""
    text = (
        "(float[1024,1024] x) => (float[1024,1024] y)"
        " { a = Softmax(x) b = Transpose(a) c = Softmax(b) y = Transpose(c) }"
    )
    library, models = built({"large": parsed(text)}, detect(None, 2, None))
    library.save(path := tmp_path / "large.so")
    assert models["large"].compiled.plan.arena >= 4 << 20
    compiled, feeds = models["large"].function(library.domain), feeds_of(models["large"].plain)

    def reloaded(times: int) -> int:
        for _ in range(times):
            session(compiled, path).run(None, feeds)
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    before = reloaded(5)
    assert reloaded(20) - before < 40 << 20  # it would be 80


class OtherRuntime:
    """The library of ONNX Runtime's package, not that of its Python module. Its functions are called by their
    numbers."""

    def __init__(self, file: Path) -> None:
        self.loaded = ctypes.CDLL(str(file))
        self.loaded.OrtGetApiBase.restype = ctypes.POINTER(ctypes.c_void_p)
        get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(self.loaded.OrtGetApiBase()[0])
        self.table = ctypes.cast(get_api(17), ctypes.POINTER(ctypes.c_void_p))

    def call(self, number: int, *given: Any) -> None:
        status = ctypes.CFUNCTYPE(ctypes.c_void_p, *map(type, given))(self.table[number])(*given)
        if status:
            text = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(self.table[2])(status)
            raise AssertionError(text.decode())

    def created(self, number: int, *given: Any) -> ctypes.c_void_p:
        """Call a function that creates an object and stores it in its last argument. Returns the object."""
        result = ctypes.c_void_p()
        self.call(number, *given, ctypes.c_void_p(ctypes.addressof(result)))
        return result

    def release(self, number: int, given: ctypes.c_void_p) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.table[number])(given)


def test_cloned_options_and_a_second_runtime_in_the_process(kernels: Built, tmp_path: Path) -> None:
    files = (Path(ort.__file__).parent / "capi").glob("libonnxruntime.so*")
    file = next(iter(files), None)
    if file is None:
        pytest.skip("this package of ONNX Runtime has no libonnxruntime.so")
    onnx.save(
        with_another_body(kernels.models["symbolic"], kernels.library.domain), path := tmp_path / "model.onnx"
    )
    library, text = ctypes.c_char_p(str(kernels.path).encode()), ctypes.c_char_p(b"test")
    feeds = feeds_of(kernels.models["symbolic"].plain)
    here = session(kernels.function("symbolic"), kernels.path)
    expected = here.run(None, feeds)

    other = OtherRuntime(file)
    env = other.created(3, ctypes.c_int(4), text)
    first = other.created(10)
    other.created(29, first, library)
    clone = other.created(12, first)
    other.created(29, clone, library)
    sessions = [other.created(7, env, ctypes.c_char_p(str(path).encode()), each) for each in (first, clone)]
    other.release(100, first)
    other.release(100, clone)
    for each in sessions:
        close(expected, [run_in(other, each, feeds)])
        other.release(95, each)
    other.release(92, env)
    close(expected, here.run(None, feeds))


def run_in(other: OtherRuntime, opened: ctypes.c_void_p, feeds: Mapping[str, Array]) -> Array:
    """The output y of a model whose inputs are floats and have the shape of y."""
    memory = other.created(69, ctypes.c_int(0), ctypes.c_int(0))
    values = []
    for array in feeds.values():
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        data, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        at_shape = ctypes.c_void_p(ctypes.addressof(shape))
        values.append(
            other.created(49, memory, data, size, at_shape, ctypes.c_size_t(array.ndim), ctypes.c_int(1))
        )
    names = (ctypes.c_char_p * len(feeds))(*[name.encode() for name in feeds])
    given = (ctypes.c_void_p * len(feeds))(*[value.value for value in values])
    wanted = (ctypes.c_char_p * 1)(b"y")
    inputs = [ctypes.c_void_p(ctypes.addressof(each)) for each in (names, given, wanted)]
    result = other.created(
        9,
        opened,
        ctypes.c_void_p(),
        inputs[0],
        inputs[1],
        ctypes.c_size_t(len(feeds)),
        inputs[2],
        ctypes.c_size_t(1),
    )
    first = next(iter(feeds.values()))
    data = other.created(51, result)
    actual = np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_float)), first.shape).copy()
    for value in (*values, result):
        other.release(96, value)
    other.release(94, memory)
    return actual


# --- Processors


def test_a_library_for_another_processor_registers_nothing(
    kernels: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for_another_processor(kernels.library).save(path := tmp_path / "foreign.so")
    feeds = feeds_of(kernels.models["conv"].plain)
    expected = session(kernels.models["conv"].plain).run(None, feeds)
    identical(expected, session(kernels.function("conv"), path).run(None, feeds))
    assert capfd.readouterr().err == ""

    shutil.copy(path, copied := tmp_path / "copied.so")
    monkeypatch.setenv("XRLFLOW_VERBOSE", "1")
    for _ in range(2):
        identical(expected, session(kernels.function("conv"), copied).run(None, feeds))
    assert capfd.readouterr().err.splitlines() == [
        f"{kernels.library.domain}: the kernels are for another processor: the model runs without its kernels"
    ]


# --- Writing


def test_a_library_is_written_completely_or_not_at_all(kernels: Built, tmp_path: Path) -> None:
    target = tmp_path / "kernels.so"
    target.write_text("before")
    with pytest.raises(
        BackendError, match=r"C compiler .* cannot build a library of kernels: .*no-such-option"
    ):
        kernels.library.save(target, options=["--no-such-option"])
    assert target.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["kernels.so"]
    with pytest.raises(BackendError, match=r"missing/kernels\.so: cannot be written \(No such file"):
        kernels.library.save(tmp_path / "missing" / "kernels.so")


def test_without_a_compiler(kernels: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        BackendError, match=r"kernels\.so: a library of kernels is built with cc: install that"
    ):
        kernels.library.save(tmp_path / "kernels.so")
    other = dataclasses.replace(kernels.library.machine, triple="riscv64-linux-gnu")
    with pytest.raises(BackendError, match="built with riscv64-linux-gnu-gcc"):
        dataclasses.replace(kernels.library, machine=other).save(tmp_path / "kernels.so")
    assert not list(tmp_path.iterdir())


def test_a_library_needs_nothing_but_the_c_library(kernels: Built) -> None:
    """It uses neither TVM nor ONNX Runtime, and it exports only one name."""
    with kernels.path.open("rb") as file:
        content = file.read()
    assert b"libtvm" not in content
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(kernels.path)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert listed[2::3] == ["RegisterCustomOps"]


def test_the_domain_depends_on_code_constants_and_what_is_computed() -> None:
    machine = detect(None, 2, None)

    def domain(text: str, computed: str = "0" * 16) -> str:
        region = carried("Region_0", parsed(text), machine)
        return kernel_library({"Region_0": region.compiled}, machine, computed).domain

    text = "(float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}> { y = Add(x, w) }"
    other = [text, text.replace("4}", "5}"), text.replace("Add", "Mul"), text.replace("[4]", "[2,2]")]
    domains = [domain(each) for each in other] + [domain(text, "1" * 16)]
    assert len(set(domains)) == 5
    assert domain(text) == domains[0]


def test_what_needs_the_runtime_of_tvm_is_refused() -> None:
    machine = detect(None, 2, None)
    places = parsed("(float[4] x) => (int64[1,N] y) { y = NonZero(x) }")
    with pytest.raises(BackendError, match="TVM's runtime"):
        carried("Region_0", places, machine)


def test_a_kernel_that_needs_the_runtime_of_tvm_is_refused() -> None:
    """The kernel calls a function by its name, which only its code shows."""
    from tvm import te, tirx

    x = te.placeholder((4,), "float32", "x")
    y = te.extern(
        (4,),
        [x],
        lambda inputs, outputs: tirx.call_packed("some.function", inputs[0], outputs[0]),
        dtype="float32",
    )
    machine = detect(None, 2, None)
    region = carried("Region_0", parsed("(float[4] x) => (float[4] y) { y = Relu(x) }"), machine).compiled
    (kernel,) = region.plan.kernels()
    region.module[kernel] = te.create_prim_func([x, y])
    with pytest.raises(BackendError, match="a kernel calls a function of TVM's runtime"):
        kernel_library({"Region_0": region}, machine)


def test_weights_of_float16_are_cast_when_kernels_are_compiled(tmp_path: Path) -> None:
    """The Casts are in the region, and the file keeps float16."""
    model = parsed(
        "(float16[4,64] x) => (float16[4,32] y) "
        "{ a = Cast<to=1>(x) v = Cast<to=1>(w) p = MatMul(a, v) r = Relu(p) y = Cast<to=10>(r) }"
    )
    weights = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    found = hybrid(model, {}, detect(None, 2, None))
    assert found.nodes == 3
    assert found.regions[0].inputs == ("a",)
    found.save(tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").stat().st_size < 3 * weights.size
    x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float16)
    wanted = np.maximum(x.astype(np.float64) @ weights.astype(np.float64), 0.0)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(tmp_path / "m.so"))
    for chosen in (options, ort.SessionOptions()):
        (got,) = ort.InferenceSession(tmp_path / "m.onnx", chosen).run(None, {"x": x})
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=2**-10, atol=2**-10)


def test_an_input_of_any_number_of_dimensions_is_refused() -> None:
    """Like the model, the compiled file would have to run for any number of dimensions."""
    model = parsed(TEXTS["symbolic"])
    sizes = {"x": (3, 8), "other": (3, 8)}
    assert hybrid(model, sizes, detect(None, 2, None)).regions
    model.graph.input[1].type.tensor_type.ClearField("shape")
    with pytest.raises(BackendError, match="input other may have any number of dimensions"):
        hybrid(model, sizes, detect(None, 2, None))


@pytest.mark.parametrize("opset", [11, 13, 17, 20])
def test_kernels_of_a_model_of_an_older_opset(opset: int, tmp_path: Path) -> None:
    """In an older opset, axes and sizes are attributes. The file with kernels keeps the model's opset."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    axes = {"axes": [1]} if opset < 18 else {}
    make_node = helper.make_node
    nodes = [
        make_node("ReduceMax", ["x", "one"] if opset >= 18 else ["x"], ["top"], **axes),
        make_node("Sub", ["x", "top"], ["d"]),
        make_node("Exp", ["d"], ["e"]),
        make_node(
            "ReduceSum", ["e", "one"] if opset >= 13 else ["e"], ["s"], **({} if opset >= 13 else axes)
        ),
        make_node("Div", ["e", "s"], ["p"]),
        make_node(
            "Unsqueeze", ["p", "one"] if opset >= 13 else ["p"], ["u"], **({} if opset >= 13 else axes)
        ),
        make_node("Relu", ["u"], ["y"]),
    ]
    one = onnx.numpy_helper.from_array(np.array([1]), "one")
    graph = helper.make_graph(nodes, "g", [x], [y], [one] if opset >= 13 else [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    result = hybrid(model, {"x": (3, 8)}, detect(None, 2, None))
    assert result.nodes == len(nodes)
    result.save(tmp_path / "m.onnx")
    assert [o.version for o in onnx.load(tmp_path / "m.onnx").opset_import if not o.domain] == [opset]
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(tmp_path / "m.so"))
    for n in (3, 5):
        value = np.random.default_rng(n).standard_normal((n, 8)).astype(np.float32)
        (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": value})
        for chosen in (options, ort.SessionOptions()):
            (got,) = ort.InferenceSession(tmp_path / "m.onnx", chosen).run(None, {"x": value})
            np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_types_that_kernels_do_not_take_are_refused() -> None:
    value = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [4])
    out = helper.make_tensor_value_info("y", TensorProto.BFLOAT16, [4])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [value], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(BackendError, match="bfloat16"):
        carried("Region_0", model, detect(None, 2, None))

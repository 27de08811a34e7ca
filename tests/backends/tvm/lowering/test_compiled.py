"""The TVM backend: the models that it refuses, the files that it writes, and that these run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from typer.testing import CliRunner

import xrlflow
from tests.levels import whole
from xrlflow.api import OptionError, VerificationFailed
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure, open_model
from xrlflow.backends.protocol import Feeds
from xrlflow.backends.results import SpeedUp
from xrlflow.backends.tvm import Tvm, TvmModel, detect, load_compiled
from xrlflow.backends.tvm.toolchain import import_tvm
from xrlflow.backends.tvm.toolchain.target import lacking
from xrlflow.cli import app
from xrlflow.pipeline import compiled as finishing
from xrlflow.prover.code import forget
from xrlflow.verify import Status, Verification

pytestmark = pytest.mark.measures

WEIGHTS = ", ".join(str(round(math.sin(i), 3)) for i in range(128))
TEXT = (
    '<ir_version: 9, opset_import: ["": 20]>'
    " agraph (float[4,8] x, float[4,8] other) => (float[4,16] y, float[4,8] z)"
    f" <float[8,16] w = {{{WEIGHTS}}}> {{ a = MatMul(x, w)\n y = Relu(a)\n b = Relu(other)\n z = Relu(b) }}"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tvm") / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return path


@pytest.fixture(scope="module")
def library(file: Path) -> Path:
    path = file.with_suffix(".so")
    Tvm().compile(str(file)).save(path)
    return path


@pytest.fixture
def feeds() -> Feeds:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((4, 8)).astype(np.float32) for name in ("x", "other")}


def test_a_saved_library_runs_by_name(file: Path, library: Path, feeds: Feeds) -> None:
    with load_compiled(library, threads=2) as loaded, open_model(str(file)) as runtime:
        assert loaded.input_names == ("x", "other")
        assert loaded.output_names == ("y", "z")
        assert loaded.sizes == {"x": (4, 8), "other": (4, 8)}
        for a, b in zip(runtime.run(feeds), loaded.run(dict(reversed(feeds.items()))), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    with pytest.raises(BackendError, match="closed"):
        loaded.run(feeds)


def test_one_model_runs_in_several_threads() -> None:
    """TVM's virtual machine confuses the registers of simultaneous calls."""
    rng = np.random.default_rng(0)
    given = [{"x": rng.standard_normal((192, 256)).astype(np.float32)} for _ in range(4)]
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> agraph (float[192,256] x) => (float[192,256] y)'
        " { a = MatMul(x, w) b = Softmax(a) c = MatMul(b, w) d = Softmax(c) y = MatMul(d, w) }"
    )
    weights = rng.standard_normal((256, 256)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    with Tvm().compile(proto.SerializeToString(), threads=1) as model, ThreadPoolExecutor(4) as pool:
        expected = [np.array(model.run(each)[0]) for each in given]
        for turn, (result,) in enumerate(pool.map(model.run, given * 30)):
            np.testing.assert_array_equal(result, expected[turn % 4])


def test_compiled_models_are_measured_beside_others(file: Path, library: Path, feeds: Feeds) -> None:
    comparison = measure([str(file), str(library)], feeds, threads=1, time_limit=0.3)
    assert comparison.samples >= 1
    assert comparison.speedup.median > 0.0


def test_other_sizes_are_refused(library: Path, feeds: Feeds) -> None:
    with load_compiled(library) as loaded:
        with pytest.raises(
            BackendError, match=r"input x was compiled as float32\[4, 8\], not float32\[1, 8\]"
        ):
            loaded.run({**feeds, "x": np.zeros((1, 8), np.float32)})
        with pytest.raises(BackendError, match="input other is missing"):
            loaded.run({"x": feeds["x"]})


def test_what_cannot_be_loaded(library: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="there is no such file"):
        load_compiled(tmp_path / "nothing.so")
    copy = tmp_path / "copy.so"
    copy.write_bytes(library.read_bytes()[:1000])
    description = copy.with_name("copy.so.json")
    with pytest.raises(BackendError, match=r"copy\.so\.json: there is no such file"):
        load_compiled(copy)
    stored = json.loads(library.with_name(library.name + ".json").read_text())
    description.write_text(json.dumps(stored))
    with pytest.raises(BackendError, match=r"copy\.so: damaged"):
        load_compiled(copy)
    description.write_text(json.dumps({**stored, "version": "0.1"}))
    with pytest.raises(BackendError, match=r"compiled with TVM 0\.1"):
        load_compiled(copy)
    description.write_text("{")
    with pytest.raises(BackendError, match="damaged"):
        load_compiled(copy)


def test_a_library_that_was_not_replaced_in_the_end_is_still_described(
    library: Path, file: Path, feeds: Feeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that replaces a library may be killed between its two files."""

    def killed(source: Any, target: Any) -> None:
        if Path(target).suffix == ".so":
            raise KeyboardInterrupt
        replace(source, target)

    copy, replace = tmp_path / "model.so", os.replace
    shutil.copy(library, copy)
    shutil.copy(f"{library}.json", f"{copy}.json")
    other = onnx.load(file)
    other.graph.node[-1].op_type = "Neg"
    compiled = Tvm().compile(other.SerializeToString())
    for _ in range(2):
        monkeypatch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            compiled.save(copy)
        monkeypatch.undo()
        with load_compiled(copy) as loaded:
            np.testing.assert_array_equal(loaded.run(feeds)[1], np.maximum(feeds["other"], 0))
    compiled.save(copy)
    with load_compiled(copy) as loaded:
        np.testing.assert_array_equal(loaded.run(feeds)[1], -np.maximum(feeds["other"], 0))


def test_what_is_beside_a_library_and_not_its_own_stays(file: Path, tmp_path: Path, feeds: Feeds) -> None:
    compiled = Tvm().compile(str(file))
    foreign = tmp_path / "model.so.json"
    foreign.write_text('{"of": "another program"}')
    with pytest.raises(BackendError, match=r"model\.so\.json: xrlflow did not write this"):
        compiled.save(tmp_path / "model.so")
    assert [p.name for p in tmp_path.iterdir()] == ["model.so.json"]
    (tmp_path / "store").mkdir()
    (tmp_path / "link.so").symlink_to("store/real.so")
    compiled.save(tmp_path / "link.so")
    assert (tmp_path / "link.so").is_symlink()
    assert sorted(os.listdir(tmp_path / "store")) == ["real.so", "real.so.json"]
    with load_compiled(tmp_path / "store" / "real.so") as loaded:
        loaded.run(feeds)


def test_a_linker_that_fails_is_an_answer(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "c++"
    failing.write_text("#!/bin/sh\necho 'ld: final link failed: No space left on device'\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(BackendError, match=r"fast\.so: cannot be built: .* final link failed: No space left"):
        Tvm().compile(str(file)).save(tmp_path / "fast.so")
    assert list(tmp_path.iterdir()) == [failing]


def test_names_of_libraries(file: Path, tmp_path: Path) -> None:
    compiled = Tvm().compile(str(file))
    with pytest.raises(BackendError, match=r"ends in \.so"):
        compiled.save(tmp_path / "model.onnx")
    with pytest.raises(BackendError, match="cannot be written"):
        compiled.save(tmp_path / "missing" / "model.so")
    assert not list(tmp_path.iterdir())


def test_operators_that_cannot_be_lowered() -> None:
    backend = Tvm()
    assert backend.supports("Conv", dtypes=["float"])
    assert not any(backend.supports(op) for op in ("LSTM", "GRU", "If", "Loop", "Scan"))
    assert not backend.supports("Attention")  # TVM knows com.microsoft's
    assert not backend.supports("Gelu", "com.microsoft")
    assert not backend.supports("Add", dtypes=["string"])
    with pytest.raises(BackendError, match="TVM cannot lower GRU: use optimize --backend onnxruntime"):
        backend.compile(recurrent("GRU").SerializeToString())  # as it is in the file


def branching(condition: str) -> onnx.ModelProto:
    """A model that returns Relu(x) or -x. `condition`, in the text format, is the input c or an expression of x."""
    return onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> agraph (float[4,8] x, bool c) => (float[4,8] y)'
        f" {{ {condition} y = If (t) <then_branch = g () => (float[4,8] a) {{ a = Relu(x) }},"
        " else_branch = h () => (float[4,8] b) { b = Neg(x) }> }"
    )


@pytest.mark.parametrize("function", [xrlflow.optimize, xrlflow.tune])
def test_a_branch_is_for_what_runs_to_take(function: Callable[..., object]) -> None:
    model = branching("t = Identity(c)")
    options = {"backend": "tvm"} if function is xrlflow.optimize else {}
    with pytest.raises(BackendError, match="TVM cannot lower If: use optimize --backend onnxruntime"):
        function(model, measure=False, **options)
    with pytest.raises(BackendError, match="TVM cannot lower If: use optimize --backend onnxruntime"):
        Tvm().compile(model.SerializeToString())


@pytest.mark.parametrize("negated", [False, True])
def test_a_branch_that_sizes_decide_is_taken(negated: bool, tmp_path: Path) -> None:
    known = "four = Constant<value_int=4>() rank = Size(x) eight = Constant<value_int=8>() each = Div(rank, eight)"
    decided = f"{known} u = Equal(each, four) t = {'Not' if negated else 'Identity'}(u)"
    result = xrlflow.optimize(
        branching(decided), backend="tvm", search="greedy", cost="roofline", measure=False
    )
    assert result.report.verified
    result.save(tmp_path / "fast.so")
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    with load_compiled(tmp_path / "fast.so") as loaded:
        (y,) = loaded.run({"x": x, "c": np.array(True)})
    np.testing.assert_array_equal(y, -x if negated else np.maximum(x, 0))


def recurrent(op: str, *, lengths: bool = False, steps: int | str = 3) -> onnx.ModelProto:
    """A bidirectional LSTM or GRU, with input size 4 and hidden size 3."""
    gates = {"GRU": 3, "LSTM": 4}[op]
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 20]> agraph (float[{steps},2,4] x{", int32[2] n" if lengths else ""})'
        f" => (float[{steps},2,2,3] y, float[2,2,3] h)"
        f' {{ y, h = {op}<hidden_size=3, direction="bidirectional">(x, w, r, b{", n" if lengths else ""}) }}'
    )
    for name, shape in (("w", (2, 3 * gates, 4)), ("r", (2, 3 * gates, 3)), ("b", (2, 6 * gates))):
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
@pytest.mark.parametrize("search", whole(["greedy", "random"], ("greedy",)))
def test_operators_that_are_spelt_out(op: str, search: str, tmp_path: Path) -> None:
    model = recurrent(op)
    options = {"backend": "tvm", "cost": "roofline", "measure": False, "budget": 3}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a kernel was left unscheduled")
        result = xrlflow.optimize(model, search=search, **options)
    assert result.report.verified
    assert result.report.substitutions[f"Expand{op}"] == 1
    result.save(tmp_path / "fast.so")
    feeds = {"x": np.random.default_rng(1).standard_normal((3, 2, 4)).astype(np.float32)}
    with (
        load_compiled(tmp_path / "fast.so") as loaded,
        open_model(model.SerializeToString()) as runtime,
    ):
        for a, b in zip(runtime.run(feeds), loaded.run(feeds), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
    result.save_trace(tmp_path / "trace.json")
    again = xrlflow.optimize(model, search=search, replay=tmp_path / "trace.json", **options)
    assert again.graph.fingerprint == result.graph.fingerprint


def test_tuning_spells_out_too(tmp_path: Path) -> None:
    result = xrlflow.tune(recurrent("GRU"), trials=0, measure=False, store=tmp_path / "store.sqlite")
    assert result.verification is not None
    assert result.verification.verified


def test_named_dimensions_are_numbers_to_what_is_spelt_out() -> None:
    model = recurrent("GRU", steps="steps")
    options = {"backend": "tvm", "search": "greedy", "cost": "roofline", "measure": False}
    with pytest.raises(BackendError, match="input x has the dimensions steps: give them with --shape x="):
        xrlflow.optimize(model, **options)
    result = xrlflow.optimize(model, shapes={"x": (6, 2, 4)}, **options)
    assert result.report.verified
    assert result.compiled is not None
    assert result.compiled.sizes == {"x": (6, 2, 4)}


@pytest.mark.parametrize("function", [xrlflow.optimize, xrlflow.tune])
def test_why_an_operator_is_not_spelt_out(function: Callable[..., object]) -> None:
    model = recurrent("LSTM", lengths=True)
    options = {"backend": "tvm"} if function is xrlflow.optimize else {}
    with pytest.raises(BackendError) as caught:
        function(model, measure=False, **options)
    assert str(caught.value) == (
        "TVM cannot lower LSTM (sequence_lens is given): use optimize --backend onnxruntime for this model"
    )


@pytest.mark.parametrize(
    ("operators", "output", "named"),
    [
        ("a = NonZero(x) y = Transpose(a)", "int64[n,2]", "nonzero"),
        (
            "f = Cast<to=7>(x) s = ReduceMax<keepdims=0>(f) e = Unsqueeze(s, z) y = ConstantOfShape(e)",
            "float[n]",
            "",
        ),
    ],
)
def test_sizes_that_depend_on_values_are_an_answer(operators: str, output: str, named: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> agraph (float[4,8] x)'
        f" => ({output} y) <int64[1] z = {{0}}> {{ {operators} }}"
    )
    says = f"TVM cannot compile a model in which the size of what {named}.* computes depends on values: use optimize"
    with pytest.raises(BackendError, match=says):
        Tvm().compile(model.SerializeToString())
    with pytest.raises(BackendError, match=says):
        xrlflow.tune(model, measure=False)
    with pytest.raises(BackendError, match=says):
        xrlflow.optimize(model, backend="tvm", search="greedy", cost="roofline", measure=False)


def gelu() -> onnx.ModelProto:
    """A Gelu as single operators, which a search replaces."""
    return onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> agraph (float[64,128] x) => (float[64,128] y)'
        " <float r = {1.4142135}, float one = {1.0}, float h = {0.5}>"
        " { a = Div(x, r) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, h) }"
    )


def test_rules_do_not_write_what_tvm_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"backend": "tvm", "search": "greedy", "cost": "roofline", "measure": False}

    def operators() -> list[str]:
        return [node.op for node in xrlflow.optimize(gelu(), **options).graph.nodes()]

    assert operators() == ["Gelu"]
    monkeypatch.setattr("xrlflow.pipeline.library.runs", lambda op: op != "Gelu")
    assert "Erf" in operators()


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize(
    "step",
    [
        "xrlflow.backends.tvm.lowering.executable.schedule",
        "xrlflow.backends.tvm.fusion.fuse.fuse_attention",
        "tvm.compile",
    ],
)
def test_what_tvm_raises_at_a_proposal_leaves_the_original_graph(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any error of TVM. If there is no other graph, it becomes an error message of one line."""
    original, compile_model, compiled, broken = pkgutil.resolve_name(step), Tvm.compile, 0, {1}

    def counting(*given: Any, **named: Any) -> TvmModel:
        nonlocal compiled
        compiled += 1
        return compile_model(*given, **named)

    def failing(*given: Any, **named: Any) -> Any:
        if compiled in broken:
            raise TypeError("int() argument must be a number\nof TVM's")
        return original(*given, **named)

    monkeypatch.setattr(Tvm, "compile", counting)
    monkeypatch.setattr(step, failing)
    options = {"backend": "tvm", "search": "greedy", "cost": "roofline", "measure": False}
    result = xrlflow.optimize(gelu(), **options)  # not measured: the proposal first
    assert "a proposal was dropped: TVM cannot compile the model: of TVM's" in result.report.notes
    assert not result.report.substitutions
    assert result.report.verified
    compiled, broken = 0, {1, 2}
    with pytest.raises(BackendError, match=r"^TVM cannot compile the model: of TVM's$"):
        xrlflow.optimize(gelu(), **options)
    assert compiled == 2


@pytest.mark.usefixtures("brief_comparisons")
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_the_report_says_if_onnx_runtime_is_faster(
    factor: float, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, speedup = finishing.final, SpeedUp(factor, 0.9 * factor, 1.1 * factor)
    monkeypatch.setattr(
        finishing, "final", lambda *given: dataclasses.replace(final(*given), speedup=speedup)
    )
    result = xrlflow.optimize(file, backend="tvm", search="greedy", cost="roofline", time_limit=8.0)
    assert result.report.reason.startswith("measured ")
    assert result.report.reason.endswith("against ONNX Runtime, which is faster") == (factor < 1)


@pytest.mark.parametrize("backend", ["tvm", "hybrid"])
def test_what_cannot_be_measured_is_delivered(
    backend: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was compiled and verified: a measuring process that dies costs only the times."""

    def broken(*_: object, **__: object) -> NoReturn:
        raise BackendError("a measuring process was ended by SIGKILL")

    for name in ("compiled.measure", "kernels.measure", "confirm.measure_in_fresh_processes"):
        monkeypatch.setattr(f"xrlflow.pipeline.{name}", broken)
    options = {"backend": backend, "search": "greedy", "cost": "roofline", "time_limit": 20.0}
    report = (result := xrlflow.optimize(file, **options)).report
    assert report.verified
    assert not report.returned_original
    assert report.speedup is None
    assert report.reason == "the result could not be measured"
    assert "the result could not be measured: a measuring process was ended by SIGKILL" in report.notes
    result.save(tmp_path / ("fast.so" if backend == "tvm" else "fast.onnx"))
    with pytest.raises(BackendError, match="SIGKILL"):  # nobody knows whether it runs
        xrlflow.optimize(file, **options, verify=False)


def test_open_dimensions_are_asked_for() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> agraph (float[n,8] x) => (float[n,8] y) { y = Relu(x) }'
    )
    with pytest.raises(BackendError, match=r"input x has the dimensions n: give them with --shape x="):
        Tvm().compile(model.SerializeToString())
    with Tvm(shapes={"x": (3, 8)}).compile(model.SerializeToString()) as compiled:
        assert compiled.run({"x": np.full((3, 8), -1, np.float32)})[0].max() == 0.0


@pytest.mark.parametrize("function", [xrlflow.optimize, xrlflow.tune])
def test_open_dimensions_are_asked_for_before_any_work(
    function: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> NoReturn:
        raise AssertionError("it began")

    for module in ("attempts", "tuning"):
        monkeypatch.setattr(f"xrlflow.pipeline.{module}.start", never)
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> agraph (float[n,8] x) => (float[n,8] y) { y = Relu(x) }'
    )
    options = {"backend": "tvm"} if function is xrlflow.optimize else {}
    with pytest.raises(BackendError, match=r"input x has the dimensions n: give them with --shape x="):
        function(model, **options)


def test_options_of_the_other_backend_are_refused(file: Path) -> None:
    for options in ({"opset": 21}, {"backend_ops": True}):
        with pytest.raises(OptionError, match=f"{next(iter(options))} has no meaning with backend 'tvm'"):
            xrlflow.optimize(file, backend="tvm", **options)
    with pytest.raises(
        OptionError, match="store has no meaning with backend 'auto': choose 'tvm' or 'hybrid'"
    ):
        xrlflow.optimize(file, store="tuning.sqlite")
    with pytest.raises(
        OptionError, match=r"store nowhere\.sqlite is neither a file that `xrlflow tune --store` wrote nor"
    ):
        xrlflow.optimize(file, backend="tvm", store="nowhere.sqlite")


def test_weights_that_a_caller_may_replace_have_their_own_sizes() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> agraph (float[4] x, float[n] w) => (float[4] y) { y = Add(x, w) }'
    )
    weights = np.arange(4, dtype=np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    result = xrlflow.optimize(model, backend="tvm", search="greedy", cost="roofline", measure=False)
    assert result.report.verified
    assert result.compiled is not None
    assert result.compiled.sizes == {"x": (4,)}


RUNNING = """
import sys
import numpy as np
from xrlflow.backends.tvm import load_compiled
with load_compiled(sys.argv[1]) as loaded:
    loaded.run({name: np.zeros((4, 8), np.float32) for name in loaded.input_names})
ours = ("xrlflow.tuning", "xrlflow.search", "xrlflow.rewrite", "rewrite_rules", "xgboost", "onnxruntime")
print([name for name in sys.modules if name.startswith(ours)])
"""
PLAIN = """
import sys
import numpy as np
import tvm
from tvm.runtime.vm import VirtualMachine
machine = VirtualMachine(tvm.runtime.load_module(sys.argv[1]), tvm.cpu())
y, z = machine["main"](*[tvm.runtime.tensor(np.zeros((4, 8), np.float32))] * 2)
print([*y.shape, *z.shape])
"""


@pytest.mark.parametrize(("code", "printed"), [(RUNNING, "[]"), (PLAIN, "[4, 16, 4, 8]")])
def test_a_saved_library_needs_nothing_that_searches_or_tunes(code: str, printed: str, library: Path) -> None:
    """Our modules load a library without the search and the tuning. TVM's runtime runs it, too, without the
    compiler."""
    alone = {**os.environ, "TVM_USE_RUNTIME_LIB": "1"} if code == PLAIN else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", code, str(library)], env=alone, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == printed


def test_processors() -> None:
    assert detect(cpu="skylake-avx512").lanes == 16
    with pytest.raises(BackendError, match="no-such-processor"):
        detect(cpu="no-such-processor")


def caches(monkeypatch: pytest.MonkeyPatch, levels: dict[int, int]) -> None:
    monkeypatch.setattr("xrlflow.backends.tvm.toolchain.target.cache_levels", lambda: levels)
    detect.cache_clear()


def test_sizes_of_caches_are_this_machines_for_its_processor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    own = detect().cpu
    other = "haswell" if own != "haswell" else "skylake"
    try:
        caches(monkeypatch, {1: 48 << 10, 2: 2 << 20, 3: 1 << 25})
        for machine in (detect(), detect(cpu=own)):
            assert machine.second_level == 2 << 20
        assert detect(cpu=other).second_level == 512 << 10
        caches(monkeypatch, {})
        assert detect().second_level == 512 << 10
    finally:
        detect.cache_clear()


X86 = "x86_64-linux-gnu"
AVX512 = ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")


def test_what_another_processor_lacks() -> None:
    assert lacking(X86, "skylake-avx512", (X86, "haswell")) == AVX512
    assert lacking(X86, "haswell", (X86, "skylake-avx512")) == ()  # it is tuned otherwise, and runs
    assert lacking("x86_64-unknown-linux-gnu", "haswell", (X86, "haswell")) == ()
    assert lacking("aarch64-linux-gnu", "cortex-a76", (X86, "haswell")) == ("aarch64-linux-gnu",)
    assert "dotprod" in lacking("aarch64-linux-gnu", "cortex-a76", ("aarch64-linux-gnu", "cortex-a53"))


FOREIGN = "sapphirerapids"
"""A processor with instructions (AMX) that hardly any other has."""


def test_what_this_machine_cannot_run_is_written_and_not_loaded(
    file: Path, tmp_path: Path, feeds: Feeds
) -> None:
    if not lacking(detect().triple, FOREIGN):
        pytest.skip("this machine has AMX")
    compiled = Tvm(detect(cpu=FOREIGN)).compile(str(file))
    with pytest.raises(BackendError, match=f"compiled for {FOREIGN}, and this machine has no .*amx-tile"):
        compiled.run(feeds)
    command = ["optimize", str(file), "-o", str(tmp_path / "fast.so"), "--backend", "tvm", "--cpu", FOREIGN]
    command += ["--search", "greedy", "--cost", "roofline"]
    for option in ("--no-measure", "--no-verify"):
        result = CliRunner().invoke(app, [*command, option])
        assert result.exit_code == 2
        assert f"code for {FOREIGN} cannot run here" in result.stderr
    assert not (tmp_path / "fast.so").exists()
    result = CliRunner().invoke(app, [*command, "--no-measure", "--no-verify"])
    assert result.exit_code == 0, result.output
    with pytest.raises(
        BackendError, match=rf"fast\.so: compiled for {FOREIGN}, and this machine has no .*amx-tile"
    ):
        load_compiled(tmp_path / "fast.so")
    with pytest.raises(BackendError, match=f"code for {FOREIGN} cannot run here"):
        xrlflow.api.tune(file, cpu=FOREIGN, measure=False, verify=False)


def test_a_system_without_its_compiler(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.backends.tvm.toolchain.target.shutil.which", lambda _: None)
    with pytest.raises(BackendError, match="linked with riscv64-linux-gnu-gcc: install that"):
        xrlflow.optimize(
            file, backend="tvm", cpu="sifive-u74", triple="riscv64-linux-gnu", measure=False, verify=False
        )


def test_optimize_compiles_and_verifies(file: Path, tmp_path: Path, feeds: Feeds) -> None:
    result = xrlflow.optimize(file, backend="tvm", search="greedy", cost="roofline", measure=False)
    assert result.report.backend == "tvm"
    assert result.report.verified
    assert result.report.nodes_after < result.report.nodes_before  # relu(relu(x)) = relu(x)
    result.save(tmp_path / "fast.so")
    with load_compiled(tmp_path / "fast.so") as loaded, open_model(str(file)) as runtime:
        for a, b in zip(runtime.run(feeds), loaded.run(feeds), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    with pytest.raises(OptionError, match="choose of auto, onnxruntime, hybrid, tvm"):
        xrlflow.optimize(file, backend="cuda")


@pytest.mark.usefixtures("python_handles_interrupts")
@pytest.mark.parametrize("where", ["importing", "fusing", "scheduling", "compiling"])
def test_an_interrupt_that_tvm_swallows_still_interrupts(
    where: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvm import relax

    from xrlflow.backends.tvm.toolchain.import_tvm import tvm

    def swallowing(*arguments: Any, **options: Any) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return arguments[0]

    owner, name, replacement = {
        "importing": ("xrlflow.backends.tvm.lowering.importer", "_importer", swallowing),
        "fusing": (relax.transform, "FuseOps", lambda: swallowing),
        "scheduling": ("xrlflow.backends.tvm.lowering.executable", "schedule", swallowing),
        "compiling": (tvm(), "compile", swallowing),
    }[where]
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", replacement)
    else:
        monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(KeyboardInterrupt):
        Tvm().compile(str(file))


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.usefixtures("brief_comparisons")
@pytest.mark.parametrize("when", ["first", "second", "measuring"])
def test_an_interrupt_keeps_what_is_compiled(when: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, last = Tvm.compile, {"first": 0, "second": 1, "measuring": 9}[when]
    models: list[object] = []

    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    def compile_some(*args: Any, **options: Any) -> TvmModel:
        if len(models) == last:
            raise KeyboardInterrupt
        models.append(compiled(*args, **options))
        return cast(TvmModel, models[-1])

    monkeypatch.setattr(Tvm, "compile", compile_some)
    monkeypatch.setattr("xrlflow.pipeline.compiled.measure", interrupted)
    run = partial(xrlflow.optimize, file, backend="tvm", search="greedy", cost="roofline", time_limit=20.0)
    if when == "first":
        with pytest.raises(KeyboardInterrupt):
            run()
        return
    result = run()
    assert len(models) == {"second": 1, "measuring": 2}[when]
    assert result.compiled is models[0]
    assert result.report.verified
    # It was measured, unless the machine was too busy for three processes.
    assert result.speedup is not None or result.report.reason.startswith("too few measurements")
    assert result.trace == ()
    assert "interrupted before the compiled graphs were compared: the first of them is kept" in (
        result.report.notes
    )


@pytest.mark.usefixtures("compiled_here")
def test_interrupted_once_more_it_ends(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    def interrupt(phase: str, done: int, total: int, note: str) -> None:
        if phase == "search":
            raise KeyboardInterrupt

    monkeypatch.setattr("xrlflow.pipeline.compiled.measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        xrlflow.optimize(file, backend="tvm", search="greedy", cost="roofline", listener=interrupt)


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.usefixtures("brief_comparisons")
def test_after_an_interrupted_search_its_best_is_compiled(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Tvm.compile
    models: list[object] = []

    def counted(*args: Any, **options: Any) -> TvmModel:
        models.append(compiled(*args, **options))
        return cast(TvmModel, models[-1])

    def interrupt(phase: str, done: int, total: int, note: str) -> None:
        if phase == "search" and done == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Tvm, "compile", counted)
    result = xrlflow.optimize(
        file, backend="tvm", search="greedy", cost="roofline", time_limit=20.0, listener=interrupt
    )
    assert len(models) == 2  # the original, and the best alone: uninterrupted it is three
    assert "interrupted: the best so far is kept" in result.report.notes
    # It was measured, unless the machine was too busy for three processes.
    assert result.speedup is not None or result.report.reason.startswith("too few measurements")


def test_what_cannot_be_compared_is_not_said_to_differ(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = Verification(Status.NOT_COMPARABLE, reason="it has random operators")
    monkeypatch.setattr("xrlflow.verify.Reference.check_compiled", lambda *_: verdict)
    with pytest.raises(
        VerificationFailed, match=r"cannot be verified: it has random operators \(--no-verify\)"
    ):
        xrlflow.optimize(file, backend="tvm", search="greedy", cost="roofline", measure=False)


def test_tvm_is_set_up_once_though_caches_are_cleared() -> None:
    """TVM refuses a second registration. The tests of mutated rules clear all caches of the package."""
    forget("xrlflow")
    assert import_tvm.tvm() is import_tvm.tvm()


FORKED = """
import os, signal, sys
import numpy as np
from xrlflow.backends import BackendError
from xrlflow.backends.tvm import load_compiled

with load_compiled(sys.argv[1], threads=2) as loaded:
    feeds = {name: np.zeros((4, 8), np.float32) for name in loaded.input_names}
    loaded.run(feeds)
    if os.fork() == 0:
        signal.alarm(30)
        try:
            loaded.run(feeds)
        except BackendError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_forked_process_does_not_wait_for_threads_that_it_has_not(library: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(library)], capture_output=True, text=True, check=True
    )
    assert "which was forked from one where it ran: start a new one instead" in done.stdout


def test_a_saved_model_may_have_results_of_no_elements(tmp_path: Path) -> None:
    """TVM can write constants without elements, but not read them."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2,3] x) => (float[2,0] v, int64[2,0] i, float[2,3] y)'
        " <int64[1] k = {0}> { v, i = TopK(x, k)\n y = Relu(x) }"
    )
    library = tmp_path / "model.so"
    x = np.float32([[1, -2, 3], [-4, 5, -6]])
    with Tvm().compile(model.SerializeToString()) as compiled:
        compiled.save(library)
    with load_compiled(library) as loaded:
        for _ in range(2):
            values, places, y = loaded.run({"x": x})
            assert (values.shape, values.dtype, places.shape, places.dtype) == (
                (2, 0),
                "float32",
                (2, 0),
                "int64",
            )
            np.testing.assert_array_equal(y, np.maximum(x, 0))

"""Results with generated kernels: which are made and kept, what is written, and what is said of them."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import xrlflow
from tests.levels import whole
from tests.rules.harness import model
from xrlflow import api
from xrlflow.backends import BackendError
from xrlflow.backends.library_files import library_of
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.results import SpeedUp
from xrlflow.backends.tvm.fusion import layers as layers_fusion
from xrlflow.backends.tvm.kernels import winograd
from xrlflow.backends.tvm.kernels.winograd_errors import Errors
from xrlflow.backends.tvm.library.operator_times import Times
from xrlflow.cost import Database
from xrlflow.onnxio.model import ON_RUNTIME
from xrlflow.options import Common, OptionError, Options, TuneOptions
from xrlflow.pipeline import kernels, placement, tuning
from xrlflow.pipeline.use import options_with_kernels
from xrlflow.rewrite import Op, Rule, Val
from xrlflow.search import Ratio, Selection
from xrlflow.search.select import ORIGINAL, Trial
from xrlflow.verify import Status, not_exercised

pytest.importorskip("tvm")
pytestmark = [pytest.mark.measures, pytest.mark.usefixtures("brief_comparisons")]

RNG = np.random.default_rng(0)
W = RNG.standard_normal((48, 48)).astype(np.float32)


def network(rows: str = "64", more: str = "") -> onnx.ModelProto:
    """Products with elementwise operators between them."""
    return model(
        f"agraph (float[{rows},48] x) => (float[{rows},48] y) "
        f"{{ a = MatMul(x, w) b = Sigmoid(a) c = MatMul(b, w) d = Tanh(c) {more or 'y = Add(d, x)'} }}",
        w=W,
    )


MIXED = "m = Softmax<axis=0>(d) y = Add(m, x)"
"""The end of a network in which results depend on all rows."""


def asked(proto: onnx.ModelProto, **options: Any) -> xrlflow.Result:
    given = {
        "backend": "hybrid",
        "search": "greedy",
        "cost": "roofline",
        "measure": False,
        "time_limit": 60.0,
    }
    return xrlflow.optimize(proto, **{**given, **options})


def feeds(*rows: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(1).standard_normal((*rows, 48)).astype(np.float32)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verified result with kernels, as a file."""
    result = asked(network())
    assert result.verification is not None
    assert result.verification.status is Status.VERIFIED
    path = tmp_path_factory.mktemp("kernels") / "fast.onnx"
    result.save(path)
    return path


@pytest.mark.quick
def test_the_file_and_its_library_are_written(written: Path) -> None:
    proto = onnx.load(written)
    onnx.checker.check_model(proto, full_check=True)
    assert [node.op_type for node in proto.graph.node] == ["Region_0"]
    assert library_of(written) == str(written.with_suffix(".so"))
    expected = ort.InferenceSession(network().SerializeToString()).run(None, feeds(64))
    alone = ort.InferenceSession(str(written)).run(None, feeds(64))
    np.testing.assert_array_equal(alone[0], expected[0])
    np.testing.assert_allclose(
        xrlflow.session(written).run(None, feeds(64))[0], expected[0], rtol=1e-4, atol=1e-5
    )


def test_the_kernels_run_where_the_library_is_in_the_folder(written: Path) -> None:
    """An index outside its table tells: kernels name the node, ONNX Runtime words it otherwise."""
    proto = model("agraph (int64[2] i) => (float[2,48] y) { g = Gather(w, i) y = Relu(g) }", w=W)
    path = written.with_name("gather.onnx")
    asked(proto).save(path)
    with (
        open_model(path, session_options=options_with_kernels(path)) as opened,
        pytest.raises(BackendError, match=r"index 48 \(input i\) is outside of its table"),
    ):
        opened.run({"i": np.int64([0, 48])})


FORKED = """
import os, signal, sys
import numpy as np
import xrlflow

def run():
    (y,) = xrlflow.session(sys.argv[1]).run(None, {"x": np.ones((64, 48), np.float32)})
    return y.tobytes()

expected = run()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if run() == expected else 1)
assert os.waitpid(child, 0)[1] == 0
print([name for name in sys.modules if name.split(".")[0] in ("tvm", "tvm_ffi")])
"""


def test_a_session_runs_in_a_forked_process(written: Path) -> None:
    """It has nothing of TVM, whose threads do not survive a fork."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(written)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_operators_that_cannot_be_lowered_stay(tmp_path: Path) -> None:
    """Two regions, with what TVM's runtime would do between them."""
    proto = network(
        more="g = Add(d, apart) k = ArgMax<axis=1>(g) h = Cast<to=1>(k) e = MatMul(d, w) f = Relu(h) y = Add(e, f)"
    )
    apart = 10 * np.arange(48, dtype=np.float32)  # rounding changes no index
    proto.graph.initializer.append(onnx.numpy_helper.from_array(apart, "apart"))
    result = asked(proto)
    result.save(tmp_path / "fast.onnx")
    written = onnx.load(tmp_path / "fast.onnx")
    assert sorted(node.op_type for node in written.graph.node) == ["ArgMax", "Region_0", "Region_1"]
    inside = [node for function in written.functions for node in function.node if node.op_type != "Constant"]
    assert result.report.kernel_nodes == len(inside) == result.report.nodes_after - 1
    assert any("in 2 regions" in note for note in result.report.notes)
    expected = ort.InferenceSession(proto.SerializeToString()).run(None, feeds(64))
    np.testing.assert_allclose(
        xrlflow.session(tmp_path / "fast.onnx").run(None, feeds(64))[0], expected[0], rtol=1e-4, atol=1e-4
    )


def test_open_dimensions_have_kernels_for_the_sizes_given(tmp_path: Path) -> None:
    result = asked(network("N", MIXED), shapes={"x": (32, 48)})
    assert result.verification is not None
    assert {"N": 32} in [dict(b) for b in result.verification.bindings]
    path = tmp_path / "fast.onnx"
    result.save(path)
    onnx.checker.check_model(str(path), full_check=True)
    plain = ort.InferenceSession(network("N", MIXED).SerializeToString())
    session = xrlflow.session(path)
    for rows in (1, 32, 33):
        np.testing.assert_allclose(
            session.run(None, feeds(rows))[0], plain.run(None, feeds(rows))[0], rtol=1e-4, atol=1e-5
        )


def test_an_input_may_have_kernels_for_several_sizes(tmp_path: Path) -> None:
    result = asked(
        network("N", MIXED), shapes={"x": (32, 48)}, further_shapes=[{"x": (8, 48)}, {"x": (100, 48)}]
    )
    path = tmp_path / "fast.onnx"
    result.save(path)
    onnx.checker.check_model(str(path), full_check=True)
    names = {function.name for function in onnx.load(path).functions}
    assert {f"Size{number}_Region_0" for number in range(3)} <= names
    plain = ort.InferenceSession(network("N", MIXED).SerializeToString())
    alone, session = ort.InferenceSession(str(path)), xrlflow.session(path)
    for rows in (1, 8, 32, 100):
        expected = plain.run(None, feeds(rows))[0]
        np.testing.assert_array_equal(alone.run(None, feeds(rows))[0], expected)
        outcome = session.run(None, feeds(rows))[0]
        np.testing.assert_allclose(outcome, expected, rtol=1e-4, atol=1e-5)
        assert (outcome.tobytes() != expected.tobytes()) == (rows != 1)  # other code rounds otherwise


def test_further_sizes_need_kernels() -> None:
    with pytest.raises(OptionError, match="further shapes have no meaning"):
        Options(backend="onnxruntime", further_shapes=[{"x": (8, 48)}])


def test_open_dimensions_have_kernels_for_all_sizes(tmp_path: Path) -> None:
    result = asked(network("N"))
    assert result.report.verified
    assert result.hybrid is not None
    assert result.hybrid.nodes == result.hybrid.total
    assert result.hybrid.rows == 128
    result.save(path := tmp_path / "fast.onnx")
    with open_model(path, session_options=options_with_kernels(str(path))) as fast:
        for rows in (0, 1, 7, 200):
            with open_model(network("N").SerializeToString()) as plain:
                expected = plain.run(feeds(rows))[0]
            np.testing.assert_allclose(fast.run(feeds(rows))[0], expected, rtol=1e-4, atol=1e-5)


def test_sizes_need_no_guard_where_rows_are_alone() -> None:
    result = asked(network("N"), shapes={"x": (32, 48)})
    assert result.hybrid is not None
    assert result.hybrid.rows == 128
    assert [node.op_type for node in result.model.graph.node] == ["Region_0"]


def test_verification_runs_blocks_of_all_sizes() -> None:
    """A kernel that is wrong only in the largest blocks is found."""
    checked = asked(network("N")).verification
    assert checked is not None
    assert max(sizes["N"] for sizes in checked.bindings) > 128


def test_a_size_with_too_few_runs_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(paths: Any, given: Any, **options: Any) -> Any:
        unknown = given["x"].shape == (1, 256, 48)
        return Mock(speedup=SpeedUp(*([1.0, 0.0, math.inf] if unknown else [1.2, 1.1, 1.3])))

    monkeypatch.setattr(kernels, "measure", measured)
    notes = asked(network("1,T"), backend="auto", measure=True, time_limit=20.0, threads=1).report.notes
    assert "generated kernels run 5 of 5 nodes, as one region" in notes


def test_what_few_rows_gain_counts_for_all_sizes() -> None:
    usual, few = SpeedUp(1.0, 0.98, 1.02), SpeedUp(1.4, 1.3, 1.5)
    assert kernels._mean([usual]).low == pytest.approx(0.98)
    assert kernels.MARGIN < kernels._mean([usual, few]).low < math.sqrt(1.4)
    assert kernels._mean([usual, SpeedUp(1.4, 0.0, math.inf)]).low == 0.0
    four = [SpeedUp(1.1, 1.0, 1.21)] * 4  # four intervals are half as wide together
    assert math.log(kernels._mean(four).low) == pytest.approx(math.log(1.1) / 2)


def test_a_file_says_which_sizes_test_its_kernels(tmp_path: Path) -> None:
    proto = network("N")
    onnx.save(proto, tmp_path / "plain.onnx")
    asked(proto).save(tmp_path / "fast.onnx")
    checked = api.verify_files(tmp_path / "plain.onnx", tmp_path / "fast.onnx", kernels=True)
    assert checked.verified
    assert {128, 129} <= {sizes["N"] for sizes in checked.bindings}


def test_kernels_that_are_slower_with_some_sizes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def measured(paths: Any, given: Any, **options: Any) -> Any:
        shapes.append(given["x"].shape)
        slower = given["x"].shape == (1, 256, 48)
        return Mock(speedup=SpeedUp(*([0.9, 0.85, 0.95] if slower else [1.2, 1.1, 1.3])))

    monkeypatch.setattr(kernels, "measure", measured)
    result = asked(network("1,T"), backend="auto", measure=True, time_limit=20.0, threads=1)
    assert shapes[:3] == [(1, 64, 48), (1, 8, 48), (1, 256, 48)], result.report.notes
    assert "generated kernels were dropped: they are slower with some sizes" in result.report.notes
    assert result.hybrid is None


def test_a_model_without_rows_learns_why_it_has_no_kernels() -> None:
    with pytest.raises(
        BackendError, match="no part of the model has products with weights and computes each row alone"
    ):
        asked(model("agraph (float[N,T] x) => (float[N,T] y) { y = Softmax<axis=1>(x) }"))


def test_what_cannot_be_lowered_at_all_is_one_line() -> None:
    proto = model("agraph (int64[4] x) => (int64[?] y) { y = Unique(x) }")
    with pytest.raises(BackendError, match=r"^no generated kernels: .*lowered"):
        asked(proto)


def test_a_model_of_half_precision_learns_why_it_has_no_kernels() -> None:
    proto = model("agraph (float16[64,48] x) => (float16[64,48] y) { a = Floor(x) y = Round(a) }")
    with pytest.raises(
        BackendError, match="kernels compute in single precision, and it has no float32 tensors"
    ):
        asked(proto)


def test_a_default_of_an_input_is_no_constant() -> None:
    proto = network()
    proto.ir_version = 8
    proto.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [48, 48]))
    with pytest.raises(BackendError, match="input w has a default"):
        asked(proto)


@pytest.mark.usefixtures("compiled_here")
def test_auto_keeps_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the comparison with the plain file; the last comparison, with the original, decides like any other."""
    monkeypatch.setattr(kernels, "MARGIN", 0.0)
    result = xrlflow.optimize(network(), search="greedy", cost="roofline", time_limit=20.0, threads=1)
    output = " ".join(result.report.notes)
    assert "with generated kernels, measured against the plain file" in output
    assert (result.hybrid is not None) == (result.report.kernel_nodes > 0)
    assert result.hybrid is not None or "not kept with kernels" in output or "too few measurements" in output


@pytest.mark.parametrize(
    ("plain", "seconds", "backend", "left_out"),
    [
        (2.0, 5.0, "auto", True),
        (1.2, 5.0, "auto", False),
        (2.0, 50.0, "auto", False),
        (2.0, 5.0, "hybrid", False),
    ],
)
def test_where_one_decision_fits_it_is_on_the_file_with_most_of_the_gain(
    plain: float, seconds: float, backend: str, left_out: bool
) -> None:
    """If a decision on kernels failed then, what the plain file gains would be lost, too."""
    budget = Mock(decision=20.0, until=time.monotonic() + seconds)
    context = Mock(options=Mock(backend=backend, measure=True), clock=Mock(budget=budget, hurried=False))
    ratio = Ratio(1.1 * plain, plain, 1.2 * plain)
    trials = (Trial("a", ORIGINAL, ratio, True), Trial("b", "a", Ratio(9.0, 9.0, 9.0), True))
    proposal = kernels.Proposal(Mock(), Selection(Mock(), trials))
    assert kernels._gains_little(context, Mock(gain=1.5), proposal) == left_out
    assert not kernels._gains_little(context, Mock(gain=1.5), kernels.Proposal(None, None))


def test_auto_prefers_the_plain_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MARGIN", 1e9)
    result = xrlflow.optimize(network(), search="greedy", cost="roofline", time_limit=20.0, threads=1)
    assert result.hybrid is None
    assert "the plain file" in " ".join(result.report.notes)


@pytest.mark.parametrize("option", [{"portable": True}, {"backend": "onnxruntime"}, {"measure": False}])
def test_no_kernels_where_none_may_be(option: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_lowering", lambda context: pytest.fail("kernels were made"))
    result = xrlflow.optimize(
        network(), search="greedy", cost="roofline", time_limit=10.0, threads=1, **option
    )
    assert result.hybrid is None


def test_kernels_that_could_not_be_compared_in_time_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took longer than a limit of four seconds, and the time of what was found without them."""
    made: list[str] = []
    true = kernels.Lowering.hybrid
    monkeypatch.setattr(kernels.Lowering, "hybrid", lambda how, *given: made.append("") or true(how, *given))
    late = "no generated kernels: there was no time (--time-limit); with them a model is 1.26 times as fast on average"
    for seconds, compiled in ((4.0, False), (30.0, True)):
        result = xrlflow.optimize(network(), search="greedy", cost="roofline", time_limit=seconds, threads=1)
        assert (late in result.report.notes) != compiled
        assert bool(made) == compiled


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_while_kernels_compile_keeps_the_plain_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposal that was chosen before is judged, in the time that Ctrl-C leaves."""

    def offered(context: Any, start: Any, explored: Any, proposal: Any) -> Any:
        judging.append((proposal, context.clock.hurried))
        return offer(context, start, explored, proposal)

    judging: list[tuple[Any, bool]] = []
    offer, propose, proposals = kernels.offer, kernels.propose, list[Any]()
    monkeypatch.setattr(kernels, "propose", lambda *given: proposals.append(propose(*given)) or proposals[0])
    monkeypatch.setattr(kernels, "offer", offered)
    monkeypatch.setattr(kernels.Lowering, "hybrid", interrupt)
    result = xrlflow.optimize(network(), search="greedy", cost="roofline", time_limit=30.0, threads=1)
    assert result.hybrid is None
    assert judging == [(proposals[0], True)]
    assert "interrupted while kernels were compiled: the plain file is kept" in result.report.notes


def test_ctrl_c_before_there_are_the_kernels_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.Lowering, "hybrid", interrupt)
    with pytest.raises(KeyboardInterrupt):
        asked(network())


@pytest.mark.usefixtures("compiled_here")
def test_ctrl_c_while_kernels_asked_for_are_measured_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measure", interrupt)
    result = asked(network(), measure=True, time_limit=10.0, threads=1)
    assert result.hybrid is not None
    assert "interrupted while kernels were compiled: the best so far is kept" in result.report.notes


@pytest.mark.usefixtures("compiled_here")
def test_the_second_ctrl_c_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one that came during the search."""

    def second(*_: Any, **__: Any) -> Any:
        assert clocks[0].hurried
        raise KeyboardInterrupt

    def first(context: Any, *given: Any) -> Any:
        clocks.append(context.clock)
        context.clock.hurry()
        return made(context, *given)

    clocks: list[Any] = []
    made = kernels.propose
    monkeypatch.setattr(kernels, "propose", first)
    monkeypatch.setattr(kernels, "measure", second)
    with pytest.raises(KeyboardInterrupt):
        asked(network(), measure=True, time_limit=10.0, threads=1)


def test_without_tvm_there_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "missing_for_kernels", lambda: "they need TVM (pip install 'xrlflow[tvm]')")
    result = xrlflow.optimize(network(), search="greedy", cost="roofline", time_limit=10.0, threads=1)
    assert "no generated kernels: they need TVM" in " ".join(result.report.notes)
    with pytest.raises(BackendError, match="they need TVM"):
        asked(network())


def test_wrong_kernels_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that computes something else fails the verification of the whole model."""
    true = kernels.Lowering.hybrid

    def wrong(how: Any, path: str, sizes: Any, to: str) -> Any:
        proto = onnx.load(path)
        for tensor in proto.graph.initializer:
            if len(tensor.dims) == 2:
                tensor.CopyFrom(onnx.numpy_helper.from_array(W * 1.01, tensor.name))
        onnx.save(proto, path)
        return true(how, path, sizes, to)

    monkeypatch.setattr(kernels.Lowering, "hybrid", wrong)
    result = asked(network())
    assert result.hybrid is None
    assert any("not kept with kernels: the result cannot be verified" in note for note in result.report.notes)


def test_portable_contradicts_a_library() -> None:
    with pytest.raises(OptionError, match="portable has no meaning with backend 'hybrid'"):
        Options(backend="hybrid", portable=True)


def test_a_file_that_is_no_library_is_not_replaced(written: Path, tmp_path: Path) -> None:
    (tmp_path / "fast.so").write_text("mine")
    with pytest.raises(BackendError, match=r"fast\.so: xrlflow did not write this"):
        asked(network()).save(tmp_path / "fast.onnx")
    assert (tmp_path / "fast.so").read_text() == "mine"
    assert not (tmp_path / "fast.onnx").exists()


def test_a_library_of_another_model_is_left_alone(written: Path, tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "other.onnx")
    shutil.copy(written.with_suffix(".so"), tmp_path / "other.so")
    assert library_of(tmp_path / "other.onnx") is None
    (tmp_path / "none.onnx").write_bytes(b"")
    (tmp_path / "none.so").write_bytes(b"")
    assert library_of(tmp_path / "none.onnx") is None


def test_a_library_that_cannot_be_loaded_is_a_warning(written: Path, tmp_path: Path) -> None:
    shutil.copy(written, tmp_path / "fast.onnx")
    content = written.with_suffix(".so").read_bytes()
    (tmp_path / "fast.so").write_bytes(b"\x7fBAD" + content[4:])
    with pytest.warns(UserWarning, match=r"fast\.so: not used"):
        session = xrlflow.session(tmp_path / "fast.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = ort.InferenceSession(str(written)).run(None, feeds(64))
    np.testing.assert_array_equal(session.run(None, feeds(64))[0], expected[0])
    with pytest.raises(BackendError, match=r"cannot load .*fast\.onnx"):
        api.run_once(tmp_path / "fast.onnx")


def edited(source: Path, folder: Path) -> Path:
    """A copy of a model and its library, whose first weights were doubled afterwards."""
    proto = onnx.load(source)
    (weights, *_) = (n.attribute[0].t for n in proto.functions[0].node if n.op_type == "Constant")
    weights.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(weights)))
    onnx.save(proto, folder / source.name)
    shutil.copy(source.with_suffix(".so"), folder / source.with_suffix(".so").name)
    return folder / source.name


def test_kernels_of_an_edited_file_are_not_run(written: Path, tmp_path: Path) -> None:
    path = edited(written, tmp_path)
    expected = ort.InferenceSession(str(path)).run(None, feeds(64))[0]
    before = ort.InferenceSession(str(written)).run(None, feeds(64))[0]
    assert np.abs(expected - before).max() > 0.1
    message = r"fast\.onnx: was edited after the kernels in fast\.so were compiled"
    with pytest.warns(UserWarning, match=message):
        session = xrlflow.session(path)
    np.testing.assert_array_equal(session.run(None, feeds(64))[0], expected)
    with pytest.warns(UserWarning, match=message):
        np.testing.assert_array_equal(api.run_once(path, feeds(64))["y"], expected)
    for call in (
        lambda: api.verify_files(network(), path, kernels=True),
        lambda: api.bench(path, kernels=True),
    ):
        with pytest.raises(BackendError, match=message):
            call()


def test_kernels_of_a_file_that_was_saved_again_run(written: Path, tmp_path: Path) -> None:
    proto = onnx.load(written)
    proto.producer_name, proto.graph.node[0].doc_string = "another tool", "a region"
    onnx.save(proto, tmp_path / "fast.onnx", save_as_external_data=True, size_threshold=0)
    shutil.copy(written.with_suffix(".so"), tmp_path / "fast.so")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert options_with_kernels(tmp_path / "fast.onnx", required=True) is not None
        xrlflow.session(tmp_path / "fast.onnx").run(None, feeds(64))


def test_a_library_that_replaces_another_is_loaded(written: Path, tmp_path: Path) -> None:
    """In one process: the system's loader knows the name. What kernels complain of tells that they run."""
    path = tmp_path / "fast.onnx"
    for rows in (2, 3):
        asked(
            model("agraph (int64[2] i) => (float[2,48] y) { g = Gather(w, i) y = Relu(g) }", w=W[:rows])
        ).save(path)
        with pytest.raises(Exception, match=rf"index {rows} \(input i\) is outside of its table"):
            xrlflow.session(path).run(None, {"i": np.int64([0, rows])})


def test_a_library_that_is_overwritten_in_place_is_refused(written: Path, tmp_path: Path) -> None:
    """What the process has mapped is another file's content then."""
    for suffix in (".onnx", ".so"):
        shutil.copy(written.with_suffix(suffix), tmp_path)
    xrlflow.session(tmp_path / "fast.onnx")
    os.utime(tmp_path / "fast.so", (1, 1))  # as if: what runs in this process stays
    with pytest.warns(UserWarning, match=r"fast\.so: was overwritten while this process uses it"):
        session = xrlflow.session(tmp_path / "fast.onnx")
    expected = ort.InferenceSession(str(written)).run(None, feeds(64))[0]
    np.testing.assert_array_equal(session.run(None, feeds(64))[0], expected)


def test_a_library_runs_only_if_it_is_asked_for(written: Path, tmp_path: Path) -> None:
    """Commands that take models of strangers do not run what is in their folder."""
    shutil.copy(written, tmp_path / "fast.onnx")
    content = written.with_suffix(".so").read_bytes()
    (tmp_path / "fast.so").write_bytes(b"\x7fBAD" + content[4:])  # it cannot be loaded
    path = tmp_path / "fast.onnx"
    assert api.verify_files(written, path).verified
    api.bench(path, time_limit=0.1, threads=1)
    assert not api.view(path)["runs"][0]["lines"]
    xrlflow.optimize(path, search="greedy", cost="roofline", time_limit=5.0, threads=1, backend="onnxruntime")
    for call in (
        lambda: api.verify_files(written, path, kernels=True),
        lambda: api.bench(path, kernels=True),
    ):
        with pytest.raises(api.UserError, match=r"cannot load"):
            call()


def test_a_result_with_kernels_can_be_optimised_again(written: Path) -> None:
    again = xrlflow.optimize(written, search="greedy", cost="roofline", measure=False)
    assert {node.op for node in again.graph.nodes()} <= {"MatMul", "Sigmoid", "Tanh", "Add"}
    assert api.verify_files(network(), written, kernels=True).verified


def test_a_model_is_run_once(written: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **feeds(64))
    outputs = api.run_once(written, tmp_path / "x.npz")
    np.testing.assert_allclose(
        outputs["y"], ort.InferenceSession(str(written)).run(None, feeds(64))[0], rtol=1e-4, atol=1e-5
    )
    api.save_outputs(outputs, tmp_path / "y.npz")
    assert np.load(tmp_path / "y.npz")["y"].shape == (64, 48)
    assert api.run_once(written)["y"].shape == (64, 48)


def test_a_library_is_required_where_kernels_are_asked_for(written: Path, tmp_path: Path) -> None:
    shutil.copy(written, tmp_path / "alone.onnx")
    with pytest.raises(OptionError, match=r"no library in the folder belongs to .*alone\.onnx"):
        api.bench(tmp_path / "alone.onnx", kernels=True)


SWAPPED = "agraph (float[N,8] a, float[N,8] b) => (float[N,8] y, float[N,8] w) { w = Neg(b) y = Sub(b, a) }"
FOLDED = (
    "agraph (float[N,8] a, float[N,8] b) => (int64[2] s, float[N,8] y, float[N,8] a2) "
    "{ s = Shape(b) z = ConstantOfShape(s) c = Relu(a) y = Add(c, z) a2 = Mul(c, a) }"
)


@pytest.mark.parametrize("text", [SWAPPED, FOLDED], ids=["swapped", "folded"])
def test_ports_do_not_depend_on_the_order_of_reading(text: str, tmp_path: Path) -> None:
    """For each size, also where folding leaves other nodes, and inputs that are read for their shape alone."""
    proto = model(text)
    shapes = [dict.fromkeys("ab", (n, 8)) for n in (3, 5)]
    result = asked(proto, shapes=shapes[0], further_shapes=shapes[1:])
    assert result.hybrid is not None, result.report.notes
    result.save(tmp_path / "fast.onnx")
    session = xrlflow.session(tmp_path / "fast.onnx")
    plain = ort.InferenceSession(proto.SerializeToString())
    for n in (2, 3, 5):
        rng = np.random.default_rng(n)
        given = {name: rng.standard_normal((n, 8), np.float32) for name in "ab"}
        for item, expected in zip(session.run(None, given), plain.run(None, given), strict=True):
            np.testing.assert_allclose(item, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "q = Div(x, z) y = Identity(q)",  # the least whole number by -1 ends the process
        "o = Add(x, z) c = Less(x, o) y = Cast<to=6>(c)",  # arithmetic wraps around
        "f = Cast<to=1>(x) i = ArgMax<axis=0>(f) y = Cast<to=6>(i)",  # of a row of -inf
        "f = Cast<to=11>(x) t = Tanh(f) y = Cast<to=6>(t)",  # of another precision
    ],
)
def test_what_kernels_compute_otherwise_is_left_to_the_runtime(body: str) -> None:
    """Operators whose kernels differ from ONNX Runtime's in numbers that verification may not draw."""
    proto = model(f"agraph (int32[4] x, int32[4] z) => (int32[?] y) {{ {body} }}")
    names = {"Div", "Add", "ArgMax", "Tanh"}
    try:
        made = asked(proto, verify=False).hybrid
    except BackendError:
        return
    assert made is not None
    assert not names & {node.op_type for function in made.model.functions for node in function.node}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "fast.so"], "as a library"),
        (["-o", "fast.onnx", "--trace", "fast.so"], "one file"),
        (["-o", "mine.onnx"], "xrlflow did not write this"),
        (["-o", "folder.onnx"], "xrlflow did not write this"),
    ],
)
def test_paths_of_the_library_are_checked_first(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from xrlflow.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "optimize", lambda *a, **k: pytest.fail("it was optimised"))
    onnx.save(network(), "m.onnx")
    Path("mine.so").write_text("mine")
    Path("folder.so").mkdir()
    done = CliRunner().invoke(app, ["optimize", "m.onnx", *arguments])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert Path("mine.so").read_text() == "mine"


def test_a_fixed_input_has_one_size() -> None:
    with pytest.raises(BackendError, match=r"input x is 64x48: it cannot have the shape 5x48"):
        asked(network(), further_shapes=[{"x": (5, 48)}])


def slow_softmax(how: Any, operators: Any, channels_last: bool) -> list[Times]:
    """Prices of kernels: a second for a Softmax, a microsecond for others."""
    return [Times(np.full(5, 1.0 if b"Softmax" in proto else 1e-6), 0.0) for proto, _ in operators]


@pytest.mark.usefixtures("compiled_here")
def test_the_search_leaves_what_kernels_lose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And a trace of that makes the same file again."""
    monkeypatch.setattr(kernels.Lowering, "operator_times", slow_softmax)
    monkeypatch.setattr(kernels._Trials, "_gain", lambda self, *_: SpeedUp(2.0, 2.0, 2.0))
    monkeypatch.setattr(placement, "Database", lambda server: Database(tmp_path / "prices.sqlite"))
    proto = network(more="e = Softmax(d) y = Add(e, x)")
    result = asked(proto, measure=True, threads=1, cost="profiled")
    assert result.hybrid is not None
    assert [node.op_type for node in result.hybrid.model.graph.node] == ["Region_0", "Softmax", "Add"]
    assert "LeaveToRuntime" in [step.rule for step in result.trace]
    result.save(tmp_path / "fast.onnx")
    expected = ort.InferenceSession(proto.SerializeToString()).run(None, feeds(64))
    for item in (ort.InferenceSession(tmp_path / "fast.onnx"), xrlflow.session(tmp_path / "fast.onnx")):
        np.testing.assert_allclose(item.run(None, feeds(64))[0], expected[0], rtol=1e-4, atol=1e-5)
    assert result.report.cost_after < result.report.cost_before  # by the same prices
    result.save_trace(tmp_path / "trace.json")
    for measure in (False, True):
        again = asked(proto, replay=tmp_path / "trace.json", measure=measure, cost="profiled", threads=1)
        assert again.hybrid is not None
        assert [node.op_type for node in again.hybrid.model.graph.node] == ["Region_0", "Softmax", "Add"]
        assert again.graph.fingerprint == result.graph.fingerprint
    plain = asked(proto, replay=tmp_path / "trace.json", backend="onnxruntime")
    assert not any(node.on_runtime for node in plain.graph.nodes())


@pytest.mark.usefixtures("compiled_here")
def test_placement_is_excluded_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels.Lowering, "operator_times", slow_softmax)
    monkeypatch.setattr(placement, "Database", lambda server: Database(tmp_path / "prices.sqlite"))
    proto = network(more="e = Softmax(d) y = Add(e, x)")
    for option in ({"exclude": ["placement"]}, {"only": ["CancelTransposes"]}):
        result = asked(proto, measure=True, threads=1, cost="profiled", **option)
        assert "LeaveToRuntime" not in [step.rule for step in result.trace]


def test_what_a_file_leaves_is_decided_again(tmp_path: Path) -> None:
    """A result that is optimised once more, perhaps on another machine."""
    proto = network()
    for node in proto.graph.node:
        node.metadata_props.add(key=ON_RUNTIME, value="1")
    result = asked(proto)
    assert result.hybrid is not None
    assert [node.op_type for node in result.hybrid.model.graph.node] == ["Region_0"]
    kept = [e.key for f in result.hybrid.model.functions for n in f.node for e in n.metadata_props]
    assert ON_RUNTIME not in kept


def test_all_sizes_are_exercised() -> None:
    """What one verification does not reach, that of another size does."""
    result = asked(network("N"), shapes={"x": (32, 48)}, further_shapes=[{"x": (8, 48)}])
    assert result.verification is not None
    assert not [note for note in result.report.notes if "not exercised: the kernels" in note]
    assert {"N": 32} in [dict(b) for b in result.verification.bindings]
    assert {"N": 8} in [dict(b) for b in result.verification.bindings]


@pytest.mark.usefixtures("compiled_here")
def test_graphs_without_kernels_do_not_matter_where_others_have_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here the search leaves everything."""

    def slow(how: Any, operators: Any, channels_last: bool) -> list[Times]:
        return [Times(np.full(5, 1.0), 0.0) for _ in operators]

    monkeypatch.setattr(kernels.Lowering, "operator_times", slow)
    monkeypatch.setattr(placement, "Database", lambda server: Database(tmp_path / "prices.sqlite"))
    result = asked(network(), measure=True, threads=1, cost="profiled")
    assert result.hybrid is not None
    assert not [note for note in result.report.notes if "no generated kernels" in note]


@pytest.mark.usefixtures("compiled_here")
def test_prices_that_cannot_be_had_are_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(*_: Any) -> None:
        raise BackendError("a kernel failed")

    monkeypatch.setattr(kernels.Lowering, "operator_times", failing)
    monkeypatch.setattr(placement, "Database", lambda server: Database(tmp_path / "prices.sqlite"))
    result = asked(network(), measure=True, threads=1)
    assert result.hybrid is not None
    assert "generated kernels have no prices: a kernel failed" in result.report.notes


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("backend", whole(["hybrid", "tvm"], ("hybrid",)))
def test_what_fails_verification_is_compiled_again_with_exact_kernels(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels with fewer multiplications that are wrong here are found out, and direct ones take their place: whatever
    their error was estimated to be."""
    weights = (RNG.standard_normal((3, 32, 32, 3, 3)) / 17).astype(np.float32)
    proto = model(
        "agraph (float[1,32,24,24] x) => (float[1,32,24,24] y) { a = Conv<pads=[1,1,1,1]>(x, w) b = Relu(a)"
        " c = Conv<pads=[1,1,1,1]>(b, w1) d = Relu(c) y = Conv<pads=[1,1,1,1]>(d, w2) }",
        w=weights[0], w1=weights[1], w2=weights[2],
    )  # fmt: skip
    right = winograd.packed
    monkeypatch.setattr(
        layers_fusion, "relative_errors", lambda _, *sizes: [Errors({"normal": 0.9}, 0.9, 0.9) for _ in sizes]
    )
    monkeypatch.setattr(layers_fusion, "tiles_cost", lambda *_: float("inf"))
    monkeypatch.setattr(winograd, "packed", lambda *given: 1.01 * right(*given))
    result = asked(proto, backend=backend)
    assert result.verification is not None
    assert result.verification.status is Status.VERIFIED
    notes = " ".join(result.report.notes)
    assert "compiled again, with plain kernels" in notes
    assert {chosen.plain for chosen in result.report.algorithms} == {True}


def test_tuning_heeds_the_options_that_it_shares() -> None:
    given = TuneOptions(threads=3, seed=5, exact_kernels=True, measure=False, verify=False)
    result = tuning._for_search(given)
    for field in fields(Common):
        if field.name != "store":  # it need not exist yet
            assert getattr(result, field.name) == getattr(given, field.name), field.name


class ForgetAbs(Rule):
    """abs(x) -> x, which is wrong."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Abs(x)

    def target(self, op: Op, x: Val) -> Any:
        return x


@pytest.mark.parametrize("backend", whole(["hybrid", "tvm"], ("hybrid",)))
def test_a_wrong_rule_is_taken_back_and_kernels_are_made_of_the_rest(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrlflow.pipeline.library.LIBRARY", (ForgetAbs(),))
    result = asked(network(more="e = Abs(d) y = Add(e, x)"), backend=backend, exact_kernels=True)
    (note,) = (n for n in result.report.notes if "was taken back" in n)
    assert note.startswith("ForgetAbs was taken back: the models differ")
    assert not result.trace
    assert (result.hybrid if backend == "hybrid" else result.compiled) is not None
    assert result.report.verified


def test_kernels_that_were_not_run_are_told_in_words() -> None:
    """Whoever verifies with kernels learns that they were not what was compared, and what to do."""
    result = asked(network("N", MIXED), shapes={"x": (32, 48)}, verify=False)
    (guard,) = [node.name for node in result.model.graph.node if node.op_type == "If"]
    message = "not exercised: the kernels of Region_0: no input has their sizes (--shape names them)"
    assert not_exercised(f"If {guard}, then") == message

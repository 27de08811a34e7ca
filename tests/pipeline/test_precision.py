"""Changes of precision: which layers are converted, within which error, and what is written and said of them."""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from typer.testing import CliRunner

import xrlflow
from tests.rules.harness import model
from xrlflow.backends.results import RepeatedComparison, SpeedUp, Verdict
from xrlflow.cli import app
from xrlflow.onnxio import load, to_proto
from xrlflow.options import OptionError, Options
from xrlflow.pipeline.precision import floats, integers, run
from xrlflow.pipeline.precision.calibration import Deviation, Sets, deviation, user_sets
from xrlflow.pipeline.precision.integers import Group, Layer, Quantiser, select
from xrlflow.verify.errors import BadInputs

RNG = np.random.default_rng(0)
N = 32
W, V = (RNG.standard_normal((N, N)).astype(np.float32) / 6 for _ in range(2))
SETS = [{"x": RNG.standard_normal((8, N)).astype(np.float32)} for _ in range(6)]
PLAIN: dict[str, Any] = {
    "search": "greedy", "cost": "roofline", "backend": "onnxruntime", "measure": False, "threads": 1,
}  # fmt: skip
BODY = "a = MatMul(x, w) b = Relu(a) y = MatMul(b, v)"


def network(body: str = BODY, **weights: Any) -> onnx.ModelProto:
    return model(f"agraph (float[8,{N}] x) => (float[8,{N}] y) {{ {body} }}", **({"w": W, "v": V} | weights))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of sets of inputs."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for index, feeds in enumerate(SETS):
        np.savez(inputs / f"{index}.npz", **feeds)
    return inputs


def asked(proto: Any, precision: str, inputs: Any = None, **options: Any) -> xrlflow.Result:
    """The result within a bound that suits products of a few numbers, whose errors do not average out."""
    return xrlflow.optimize(
        proto, precision=precision, inputs=inputs, **(PLAIN | {"precision_error": 0.08} | options)
    )


def outputs(proto: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    found: list[Any] = ort.InferenceSession(proto.SerializeToString()).run(None, feeds)
    return found


def rms(proto: onnx.ModelProto, other: onnx.ModelProto, feeds: dict[str, Any]) -> float:
    (x,), (y,) = outputs(proto, feeds), outputs(other, feeds)
    return float(np.sqrt(np.mean((x - y) ** 2) / np.mean(x**2)))


def bytes_in(proto: onnx.ModelProto) -> set[str]:
    """The names of constants in signed bytes that are not zero points."""
    return {t.name for t in proto.graph.initializer if t.data_type == TensorProto.INT8 and len(t.dims) > 1}


def quantiser(proto: onnx.ModelProto, tmp_path: Path, sets: Any = SETS, **keywords: Any) -> Quantiser:
    imported = load(proto)
    return Quantiser(to_proto(imported, imported.graph, **keywords), Sets(tuple(sets), (), sets[0]), tmp_path)


# ---------------------------------------------------------------- sets of inputs, and errors


def test_an_error_is_relative_to_the_output() -> None:
    x, y = np.array([3.0, -4.0, 0.0]), np.array([3.0, -4.0, 1.0])
    error = deviation([[x]], [[y]])
    assert (error.rms, error.largest) == (pytest.approx(1 / 5), 1 / 4)
    worse = np.array([3.0, -4.0, 2.0])
    error = deviation([[x, x], [x, x]], [[x, y], [worse, x]])
    assert (error.rms, error.largest) == (pytest.approx(2 / 5), 2 / 4)


def test_infinities_and_nan_have_to_be_the_same() -> None:
    x = np.array([1.0, np.nan, np.inf])
    assert deviation([[x]], [[x]]) == Deviation(0.0, 0.0)
    for other in ([1.0, np.nan, 5.0], [1.0, 1.0, np.inf], [np.nan, np.nan, np.inf], [1.0, np.nan, -np.inf]):
        assert deviation([[x]], [[np.array(other)]]).rms == math.inf
    assert deviation([[np.zeros(2)]], [[np.ones(2)]]).rms == math.inf


def test_of_integers_those_that_differ_count() -> None:
    assert deviation([[np.array([1, 2, 3, 4])]], [[np.array([1, 2, 3, 9])]]) == Deviation(0.25, 0.25)
    assert deviation([[[np.array([1.0])], None]], [[[np.array([2.0])], None]]).rms == 1.0
    assert deviation([[None]], [[np.ones(1)]]).rms == math.inf


def test_a_third_of_a_folder_is_held_out(folder: Path) -> None:
    imported = load(network())
    sets = user_sets(imported, folder, 0)
    assert (len(sets.calibrating), len(sets.held_out)) == (4, 2)
    every = [feeds["x"].tobytes() for feeds in (*sets.calibrating, *sets.held_out)]
    assert sorted(every) == sorted(feeds["x"].tobytes() for feeds in SETS)
    again = user_sets(imported, folder, 0)
    assert [f["x"].tobytes() for f in again.held_out] == [f["x"].tobytes() for f in sets.held_out]
    other = [user_sets(imported, folder, seed).held_out[0]["x"].tobytes() for seed in range(8)]
    assert len(set(other)) > 1
    assert len(user_sets(imported, folder, 0, calibrated=False).checking) == 6


def test_a_batch_is_split_if_the_model_takes_any_number(tmp_path: Path) -> None:
    opened = load(model(f"agraph (float[n,{N}] x) => (float[n,{N}] y) {{ y = MatMul(x, w) }}", w=W))
    sets = user_sets(opened, SETS[0], 0)
    assert {f["x"].shape for f in (*sets.calibrating, *sets.held_out)} == {(1, N)}
    assert len(sets.calibrating) + len(sets.held_out) == 8
    assert sets.whole["x"].shape == (8, N)
    fixed = user_sets(load(network()), SETS[0], 0)
    assert (len(fixed.calibrating), len(fixed.held_out), len(fixed.checking)) == (1, 0, 1)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"the folder has no \.npz files"):
        user_sets(load(network()), tmp_path, 0)
    np.savez(tmp_path / "bad.npz", x=np.ones((2, 3), np.float32))
    with pytest.raises(BadInputs, match=r"bad\.npz: input 'x' has shape"):
        user_sets(load(network()), tmp_path, 0)


# ---------------------------------------------------------------- which layers


def group(name: str, gain: float, error: float) -> Group:
    return Group((Layer(name, name),), gain, error)


def test_layers_with_most_gain_for_their_error_are_selected() -> None:
    groups = [group("a", 5.0, 0.03), group("b", 4.0, 0.01), group("c", -1.0, 0.0), group("d", 1.0, 0.03)]
    names = {0.05: "abd", 0.04: "ab", 0.02: "b", 0.005: ""}
    for budget, expected in names.items():
        assert "".join(g.layers[0].name for g in select(groups, budget)) == expected
    # The squares of errors add up: 3^2 + 4^2 = 5^2.
    assert len(select([group("a", 1.0, 0.03), group("b", 1.0, 0.04)], 0.0501)) == 2


def test_only_products_with_constant_weights_are_layers(tmp_path: Path) -> None:
    body = (
        "a = MatMul(x, w) b = Transpose(x) c = MatMul(b, a) d = MatMul(x, c) e = MatMul(v, c) y = Add(d, a)"
    )
    assert [layer.shown for layer in quantiser(network(body), tmp_path).layers] == ["a"]


def test_other_readers_of_a_weight_read_it_unrounded(tmp_path: Path) -> None:
    proto = network(
        "a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) r = Gather(w, i) y = Add(c, r)", i=np.arange(8)
    )
    tool = quantiser(proto, tmp_path)
    first = onnx.load_from_string(tool.quantised(tool.layers[:1]))
    assert len(bytes_in(first)) == 1
    floats_ = {t.name: numpy_helper.to_array(t) for t in first.graph.initializer}
    for node in first.graph.node:
        if node.op_type == "Gather" or node.output[0] == "c":
            (weights,) = (
                floats_[name] for name in node.input if floats_.get(name, np.ones(1)).shape == (N, N)
            )
            np.testing.assert_array_equal(weights, W)
    both = onnx.load_from_string(tool.quantised(tool.layers))
    assert len(bytes_in(both)) == 2


def test_names_and_the_producer_stay(tmp_path: Path) -> None:
    proto = network()
    proto.producer_name, proto.graph.node[0].name = "trainer", "first"
    proto.metadata_props.add(key="author", value="me")
    tool = quantiser(proto, tmp_path)
    written = onnx.load_from_string(tool.quantised(tool.layers))
    assert [layer.shown for layer in tool.layers] == ["first", "y"]
    assert written.producer_name == "trainer"
    assert [entry.key for entry in written.metadata_props] == ["author"]
    assert [n.name for n in written.graph.node if n.op_type == "MatMul"] == ["first", ""]


@pytest.mark.parametrize("opset", [11, 17, 21])
def test_weights_have_scales_by_channel_at_each_opset(opset: int, folder: Path) -> None:
    proto = network("a = MatMul(x, w) b = Reshape(a, s) c = Transpose<perm=[1,0]>(b) d = Transpose<perm=[1,0]>(c) "
                    "y = MatMul(d, v)", s=np.array([8, N]))  # fmt: skip
    proto.opset_import[0].version = opset
    proto.ir_version = 10
    result = asked(proto, "int8", folder)
    assert not result.returned_original
    written = result.model
    scales = {node.input[1] for node in written.graph.node if node.op_type == "DequantizeLinear"}
    shapes = [list(t.dims) for t in written.graph.initializer if t.name in scales]
    assert shapes.count([N]) == 2
    assert rms(proto, written, SETS[0]) < 0.08


def test_batch_normalizations_are_folded_before(tmp_path: Path) -> None:
    channels = 8
    filters = RNG.standard_normal((channels, channels, 3, 3)).astype(np.float32)
    statistics = {n: np.abs(RNG.standard_normal(channels)).astype(np.float32) + 0.5 for n in "gbmz"}
    proto = model(
        f"agraph (float[n,{channels},9,9] x) => (float[n,{channels},7,7] y) "
        "{ a = Conv(x, f) y = BatchNormalization(a, g, b, m, z) }",
        f=filters, **statistics,
    )  # fmt: skip
    x = RNG.standard_normal((6, channels, 9, 9)).astype(np.float32)
    result = asked(proto, "int8", {"x": x})
    operators = [node.op_type for node in result.model.graph.node]
    assert "Conv" in operators
    assert "BatchNormalization" not in operators
    assert not result.returned_original
    assert rms(proto, result.model, {"x": x}) < 0.08


def test_what_follows_an_operator_of_the_runtime_is_quantised(tmp_path: Path) -> None:
    tool = quantiser(network("a = com.microsoft.Gelu(x) y = MatMul(a, w)"), tmp_path)
    written = onnx.load_from_string(tool.quantised(tool.layers))
    (product,) = (node for node in written.graph.node if node.op_type == "MatMul")
    makers = {node.output[0]: node.op_type for node in written.graph.node}
    assert [makers[name] for name in product.input] == ["DequantizeLinear"] * 2


def test_layers_are_left_out_until_the_rest_keeps_the_bound(folder: Path) -> None:
    rough = W.copy()
    rough[:, 0] *= 100.0  # one number of a row of activations hides all others
    proto = network("a = MatMul(x, w) b = MatMul(a, v) c = MatMul(b, r) y = MatMul(c, w)", r=rough)
    everything = asked(proto, "int8", folder, precision_error=10.0).report.precision
    assert everything is not None
    assert everything.error is not None
    assert len(everything.converted) == everything.candidates == 4
    bound = 0.85 * everything.error
    some = asked(proto, "int8", folder, precision_error=bound)
    assert some.report.precision is not None
    assert 0 < len(some.report.precision.converted) < 4
    assert some.report.precision.error is not None
    assert some.report.precision.error <= bound
    assert bytes_in(some.model)


def test_groups_that_exceed_the_bound_are_halved(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    rough = W.copy()
    rough[:, 0] *= 100.0
    proto = network("a = MatMul(x, w) b = MatMul(a, v) c = MatMul(b, r) y = MatMul(c, w)", r=rough)
    monkeypatch.setattr(integers.Selection, "_groups", lambda self, layers: [Group(tuple(layers))])
    everything = asked(proto, "int8", folder, precision_error=10.0).report.precision
    assert everything is not None
    assert everything.error is not None
    some = asked(proto, "int8", folder, precision_error=0.85 * everything.error).report.precision
    assert some is not None
    assert 0 < len(some.converted) < 4
    whole = Group(tuple(Layer(name, name) for name in "abc"), 6.0, 0.1)
    assert [(len(half.layers), half.gain, half.error) for half in whole.halves()] == [
        (1, 2.0, 0.0),
        (2, 4.0, 0.0),
    ]
    assert whole.halves()[0].halves() == [whole.halves()[0]]


def test_the_error_is_that_on_held_out_inputs(folder: Path) -> None:
    imported = load(network())
    held_out = {f["x"].tobytes() for f in user_sets(imported, folder, 0).held_out}
    for path in folder.iterdir():
        if np.load(path)["x"].tobytes() in held_out:
            np.savez(path, x=np.load(path)["x"] * 50)  # beyond every range that was calibrated
    result = asked(network(), "int8", folder)
    assert result.returned_original
    assert "keep within the bound of 0.08" in result.report.reason


def test_layers_that_gain_no_time_are_left_out(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def timed(self: Any, groups: Any, everything: bytes) -> list[Group]:
        assert all(isinstance(g, Group) for g in groups)
        return [replace(g, gain=1.0 if "y" in {layer.shown for layer in g.layers} else -1.0) for g in groups]

    monkeypatch.setattr(integers.Selection, "_timed", timed)
    precision = asked(network(), "int8", folder).report.precision
    assert precision is not None
    assert precision.converted == ("y",)
    monkeypatch.setattr(integers.Selection, "_timed", lambda self, groups, everything: list(groups))
    assert asked(network(), "int8", folder).report.reason == "no layer is faster in 8 bits"


@pytest.mark.measures
def test_gains_are_those_of_a_group_among_the_others(folder: Path, tmp_path: Path) -> None:
    tool = quantiser(network(), tmp_path)
    selection = integers.Selection(tool, network().SerializeToString(), 1.0, math.inf, 1, lambda *_: None)
    first, second = tool.layers
    timed = selection._timed([Group((first,)), Group((second,))], tool.quantised(tool.layers))
    assert [g.layers for g in timed] == [(first,), (second,)]
    assert all(math.isfinite(g.gain) and g.gain != 0.0 for g in timed)


# ---------------------------------------------------------------- the result, and its report


def test_a_model_in_8_bits_is_written_and_reported(folder: Path, tmp_path: Path) -> None:
    proto = network()
    result = asked(proto, "int8", folder)
    assert not result.returned_original
    result.save(tmp_path / "y.onnx")
    assert (tmp_path / "y.onnx").read_bytes() == result.source  # nothing was found to rewrite
    written = onnx.load(tmp_path / "y.onnx")
    assert len(bytes_in(written)) == 2
    precision = result.report.precision
    assert precision is not None
    assert precision.converted == ("a", "y")
    assert (precision.calibrating, precision.checking, precision.held_out) == (4, 2, True)
    held_out = user_sets(load(proto), folder, 0).held_out
    assert precision.error == pytest.approx(max(rms(proto, written, dict(f)) for f in held_out), rel=1e-3)
    data = result.report.to_json()["precision"]
    assert data["asked"] == "int8"
    assert data["bound"] == 0.08
    assert data["converted"] == ["a", "y"]
    assert str(precision) in result.report.notes
    assert "2 of 2 layers" in str(precision)
    assert result.report.model == "<ModelProto>"
    assert result.report.phases["precision"] > 0.0
    assert "2 of 2 layers" in result.report_html()


def test_nothing_changes_unless_it_is_asked_for() -> None:
    report = xrlflow.optimize(network(), **PLAIN).report
    assert report.precision is None
    assert report.to_json()["precision"] is None


def test_the_original_comes_back_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "x.onnx")
    result = asked(tmp_path / "x.onnx", "int8", folder, precision_error=1e-6)
    assert result.returned_original
    assert "keep within the bound of 1e-06" in result.report.reason
    assert result.report.precision is not None
    assert result.report.precision.converted == ()
    result.save(tmp_path / "y.onnx")
    assert (tmp_path / "y.onnx").read_bytes() == (tmp_path / "x.onnx").read_bytes()


def test_a_single_set_is_no_check_of_its_own() -> None:
    result = asked(network(), "int8", SETS[0])
    assert result.report.precision is not None
    assert not result.report.precision.held_out
    assert any("only one set" in note for note in result.report.notes)


@pytest.mark.parametrize(
    ("precision", "verdict", "low", "kept"),
    [
        ("int8", Verdict.FASTER, 1.1, False),
        ("int8", Verdict.NOT_FASTER, 0.99, True),
        ("float16", Verdict.NOT_FASTER, 0.99, False),
        ("float16", Verdict.NOT_FASTER, 0.5, True),
        ("float16", Verdict.REFUTED, 1.1, True),
    ],
)
def test_the_last_comparison_is_with_the_original(
    precision: str, verdict: Verdict, low: float, kept: bool, folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    onnx.save(network(), tmp_path / "x.onnx")
    speedup = SpeedUp(low + 0.01, low, low + 0.02)
    compared: list[Any] = []

    def measured(before: str, after: str, feeds: Any, **_: Any) -> RepeatedComparison:
        compared.append((before, onnx.load(after)))
        return RepeatedComparison(speedup, None, None, None, 0.0, 1, verdict, speedup, 6)

    monkeypatch.setattr(run, "measure_in_fresh_processes", measured)
    monkeypatch.setattr(
        integers.Selection, "_timed", lambda self, groups, _: [replace(g, gain=1.0) for g in groups]
    )
    options = Options(
        precision=precision,
        inputs=folder,
        precision_error=0.08,
        **(PLAIN | {"measure": True, "time_limit": 8.0}),
    )

    def unmeasured(converted: Any, asked: Options, listener: Any) -> xrlflow.Result:
        return xrlflow.optimize(converted, options=replace(asked, measure=False, only=["RemoveIdentity"]))

    result = run.converted(tmp_path / "x.onnx", options, None, unmeasured)
    ((before, after),) = compared
    assert before == str(tmp_path / "x.onnx")
    assert after.graph.initializer[0].data_type != TensorProto.FLOAT
    assert result.returned_original is kept
    assert result.report.speedup == (None if kept else speedup)
    assert result.report.decided == speedup


def test_the_result_has_to_keep_the_bound_and_not_only_what_was_converted(folder: Path) -> None:
    options = Options(precision="int8", inputs=folder, precision_error=0.08, **PLAIN)
    optimised: list[Options] = []

    def wrong(converted: Any, asked: Options, listener: Any) -> xrlflow.Result:
        optimised.append(asked)
        return xrlflow.optimize(network(w=2 * W), options=asked)

    result = run.converted(network(), options, None, wrong)
    assert result.returned_original
    assert re.search(r"the error \S+ exceeds the bound of 0.08", result.report.reason)
    (asked_of,) = optimised
    assert asked_of.precision == "keep"
    assert isinstance(asked_of.inputs, dict)
    assert any(np.array_equal(asked_of.inputs["x"], feeds["x"]) for feeds in SETS)


def test_what_is_too_wrong_is_not_optimised() -> None:
    options = Options(precision="float16", **PLAIN)
    result = run.converted(
        network("a = MatMul(x, w) y = Mul(a, k)", k=np.array(1e6, np.float32)), options, None, fail
    )
    assert result.returned_original


def fail(*_: Any, **__: Any) -> Any:
    raise KeyError("no\nrange")


def test_a_library_that_fails_is_named_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime.quantization as library

    monkeypatch.setattr(library, "quantize_static", fail)
    with pytest.raises(
        OptionError, match=r"^precision 'int8': onnxruntime.quantization cannot .*range"
    ) as raised:
        asked(network(), "int8", folder)
    assert "\n" not in str(raised.value)

    def lack(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name}", name="ml_dtypes")

    monkeypatch.setattr(importlib, "import_module", lack)
    for precision in ("int8", "float16"):
        with pytest.raises(OptionError, match=f"precision '{precision}' needs ml_dtypes"):
            asked(network(), precision, folder)


# ---------------------------------------------------------------- float16 and float32


def test_a_file_that_grows_too_much_is_no_result(folder: Path) -> None:
    """Each layer gets its own copy of weights that layers share."""
    wide = np.random.default_rng(3).standard_normal((N, 1 << 12)).astype(np.float32) / 64
    steps = [f"b{i} = MatMul(a{i}, w) a{i + 1} = MatMul(b{i}, v)" for i in range(6)]
    proto = network(f"a0 = Relu(x) {' '.join(steps)} y = Relu(a6)", w=wide, v=np.ascontiguousarray(wide.T))
    small = asked(proto, "int8", folder, max_growth=1.0, precision_error=0.5)
    assert small.returned_original
    assert re.fullmatch(
        r"the file would be 1\.\d+ times as large \(.*--max-growth 1\.\d\)", small.report.reason
    )
    large = asked(proto, "int8", folder, max_growth=2.0, precision_error=0.5)
    assert not large.returned_original


def test_wider_weights_count_half(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(3).standard_normal((N, 1 << 16)).astype(np.float16)
    proto = model(
        f"g (float16[8, {N}] x) => (float16[8, {1 << 16}] y) {{ a = MatMul(x, w) y = Relu(a) }}", w=weight
    )

    def grown(converted: Any, asked: Options, listener: Any) -> xrlflow.Result:
        wide = load(converted)
        wide.frame.graph.doc_string = "x" * (3 * weight.nbytes)
        return xrlflow.optimize(to_proto(wide, wide.graph), options=replace(asked, max_growth=9.0))

    options = Options(precision="float32", precision_error=0.1, **PLAIN)
    result = run.converted(proto, options, None, grown)
    assert result.returned_original
    found = re.fullmatch(
        r"the file would be (5\.0\d) times as large, of which --precision float32 counts half "
        r"\(allow it with --max-growth (2\.\d)\)",
        result.report.reason,
    )
    assert found
    assert not run.converted(
        proto, replace(options, max_growth=float(found[2])), None, grown
    ).returned_original


@pytest.mark.parametrize("width", [N, 1 << 13])
def test_only_a_smaller_file_is_called_smaller(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file grows by the nodes that convert."""
    wide = np.random.default_rng(3).standard_normal((N, width)).astype(np.float32) / 64
    proto = network("a = MatMul(x, w) b = Relu(a) y = MatMul(b, v)", w=wide, v=np.ascontiguousarray(wide.T))
    faster = SpeedUp(1.2, 1.1, 1.3)
    comparison = RepeatedComparison(faster, None, None, None, 0.0, 1, Verdict.FASTER, faster, 6)
    monkeypatch.setattr(run, "measure_in_fresh_processes", lambda *_, **__: comparison)

    def unmeasured(converted: Any, asked: Options, listener: Any) -> xrlflow.Result:
        return xrlflow.optimize(converted, options=replace(asked, measure=False))

    options = Options(precision="float16", inputs=SETS[0], **(PLAIN | {"measure": True, "time_limit": 6.0}))
    result = run.converted(proto, options, None, unmeasured)
    smaller = len(result.model.SerializeToString()) < len(proto.SerializeToString())
    assert smaller is (width > N)
    assert not result.returned_original
    assert ("the file is smaller" in result.report.reason) is smaller


def test_without_inputs_that_run_the_original_is_kept() -> None:
    """An index is outside of its table for all inputs."""
    proto = network("r = Relu(x) a = MatMul(r, w) b = Gather(a, i) y = Relu(b)", i=np.array([8]))
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    result = asked(proto, "float16")
    assert result.returned_original
    assert re.search(r"the error cannot be measured: .*out of data bounds", result.report.reason)
    assert result.model.SerializeToString() == proto.SerializeToString()


def test_no_layer_is_converted_that_makes_an_output_infinite(folder: Path) -> None:
    result = asked(network("a = MatMul(x, w) b = Relu(a) y = Reciprocal(b)"), "int8", folder)
    assert result.returned_original
    assert "an output is NaN or infinite on a set of inputs" in result.report.reason


def test_a_folder_of_inputs_is_for_a_change_of_precision(folder: Path) -> None:
    with pytest.raises(BadInputs, match=r"is a folder, of which only --precision takes the files"):
        xrlflow.optimize(network(), inputs=folder, **PLAIN)


@pytest.mark.parametrize("precision", ["keep", "int8", "float16"])
def test_a_list_of_sets_is_refused(precision: str) -> None:
    with pytest.raises(BadInputs, match="give a mapping of arrays by name"):
        xrlflow.optimize(network(), inputs=SETS, precision=precision, **PLAIN)  # type: ignore[arg-type]


def test_scales_of_channels_need_an_opset() -> None:
    with pytest.raises(OptionError, match="precision 'int8' needs opset 13 or later"):
        Options(precision="int8", opset=12, inputs={})


def test_a_converted_model_has_no_trace(tmp_path: Path) -> None:
    result = asked(network(), "float16", SETS[0])
    with pytest.raises(OptionError, match="a trace has substitutions of the file"):
        result.save_trace(tmp_path / "trace.json")
    onnx.save(network(), tmp_path / "x.onnx")
    asking = ["optimize", str(tmp_path / "x.onnx"), "-o", str(tmp_path / "y.onnx"), "--precision", "float16"]
    refused = CliRunner().invoke(app, [*asking, "--trace", str(tmp_path / "trace.json"), "--no-measure"])
    assert refused.exit_code == 2
    assert "--trace has no meaning with --precision" in " ".join(refused.output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.onnx"]


def test_random_sets_are_called_so() -> None:
    record = asked(network(), "float16").report.precision
    assert record is not None
    assert record.random
    assert "random sets of inputs" in str(record)


def test_weights_in_float16_have_half_the_size() -> None:
    wide = np.random.default_rng(3).standard_normal((N, 1 << 13)).astype(np.float32) / 8
    body = "a = com.microsoft.Gelu(x) b = MatMul(a, w) c = Relu(b) y = MatMul(c, v)"
    proto = network(body, w=wide, v=np.ascontiguousarray(wide.T))
    result = asked(proto, "float16", SETS[0])
    written = result.model
    weights = [t for t in written.graph.initializer if len(t.dims) == 2]
    assert {t.data_type for t in weights} == {TensorProto.FLOAT16}
    ports = (*written.graph.input, *written.graph.output)
    assert {port.type.tensor_type.elem_type for port in ports} == {TensorProto.FLOAT}
    assert result.report.precision is not None
    assert result.report.precision.converted == ("v", "w")
    assert 0.0 < rms(proto, written, SETS[0]) < 1e-3


def test_without_inputs_errors_are_measured_on_random_ones() -> None:
    report = asked(network(), "float16").report
    assert report.precision is not None
    assert (report.precision.checking, report.precision.held_out) == (4, False)


def test_numbers_beyond_float16_bring_the_original_back() -> None:
    result = asked(network("a = MatMul(x, w) y = Mul(a, k)", k=np.array(1e6, np.float32)), "float16")
    assert result.returned_original
    assert re.search(r"the error .* exceeds the bound of 0.08", result.report.reason)


def half(body: str = "a = MatMul(x, w) b = Add(a, k) y = Relu(b)") -> onnx.ModelProto:
    proto = model(
        f"agraph (float16[8,{N}] x, float16[{N}] k, bool q) => (float16[8,{N}] y) {{ {body} }}",
        w=W.astype(np.float16),
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(N, np.float16), "k"))
    return proto


@pytest.mark.parametrize(
    "body",
    [
        "a = MatMul(x, w) b = Add(a, k) y = Relu(b)",
        "a = MatMul(x, w) y = If(q)<then_branch = f () => (float16[8,32] o) { c = Add(a, k) o = Exp(c) }, "
        "else_branch = g () => (float16[8,32] p) { p = Mul(a, a) }>",
        "a = MatMul(x, w) c = Cast<to=1>(a) d = Cast<to=10>(c) z = ConstantOfShape<value = float16[1] {16384}>(s) "
        "y = Add(d, z)",
        "c = Constant<value = float16[1] {16384}>() y = Add(x, c)",
    ],
)
def test_short_floats_become_float32_and_the_ends_keep_their_types(body: str) -> None:
    proto = half(body)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([8, N]), "s"))
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    wide, names = floats.to_float32(copy)
    assert names
    onnx.checker.check_model(wide, full_check=True)
    ports = {port.name: port.type.tensor_type.elem_type for port in (*wide.graph.input, *wide.graph.output)}
    assert [ports[name] for name in "xky"] == [TensorProto.FLOAT16] * 3
    constants = {t.name: t.data_type for t in wide.graph.initializer}
    assert constants["w"] == TensorProto.FLOAT
    assert constants["k"] == TensorProto.FLOAT16
    casts = [node for node in wide.graph.node if node.op_type == "Cast"]
    assert [node.output[0] for node in casts if node.attribute[0].i == TensorProto.FLOAT16] == ["y"]
    feeds = {"x": SETS[0]["x"].astype(np.float16), "q": np.array(True), "k": np.full(N, 0.5, np.float16)}
    (before,), (after,) = outputs(proto, feeds), outputs(wide, feeds)
    np.testing.assert_allclose(after, before, rtol=0.02, atol=0.02)
    assert after.dtype == np.float16


def test_a_model_in_float16_is_optimised_in_float32() -> None:
    result = asked(half(), "float32")
    assert not result.returned_original
    assert {t.name: t.data_type for t in result.model.graph.initializer}["w"] == TensorProto.FLOAT
    assert asked(network(), "float32").report.reason == "the model has no weights in float16 or bfloat16"


def test_inputs_are_needed_only_for_8_bits() -> None:
    with pytest.raises(OptionError, match=r"--inputs data\.npz"):
        Options(precision="int8")
    assert Options(precision="float16").inputs is None

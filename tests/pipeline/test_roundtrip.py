"""What is read and written again runs as before: tried before the search, at the model's own opset first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.onnxio.support import model
from tests.onnxio.test_opsets import LEVELS, MODELS, X, session
from xrlflow.api import optimize
from xrlflow.backends import BackendError
from xrlflow.onnxio import ModelError, versions
from xrlflow.pipeline import artifact, roundtrip
from xrlflow.verify import runner

make, declare = helper.make_node, helper.make_tensor_value_info
PLAIN: dict[str, Any] = {"search": "greedy", "cost": "roofline", "backend": "onnxruntime", "measure": False}
MEASURED: dict[str, Any] = {**PLAIN, "measure": True, "time_limit": 3.0}


def twice_transposed(opset: int = 17) -> onnx.ModelProto:
    """A model that a rule makes smaller."""
    nodes = [
        make("Transpose", ["x"], ["a"], perm=[1, 0]),
        make("Transpose", ["a"], ["b"], perm=[1, 0]),
        make("Relu", ["b"], ["c"]),
        make("MatMul", ["c", "w"], ["y"]),
    ]
    consts = {"w": np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)}
    return model(nodes, {"x": X}, [declare("y", TensorProto.FLOAT, [4, 64])], consts, opset=opset)


def opset_in(path: Any) -> int | None:
    return versions.opset_of(
        onnx.load(path) if not isinstance(path, bytes) else onnx.ModelProto.FromString(path)
    )


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int | None]]:
    """A runtime that loads what was written only at some opsets. Gives the list of the opsets that were tried."""

    def install(allowed: Callable[[int], bool]) -> list[int | None]:
        tried: list[int | None] = []

        @contextmanager
        def opened(path: Any, **options: Any) -> Iterator[runner.Runner]:
            if isinstance(path, str):
                result = opset_in(path)
                tried.append(result)
                if result is None or not allowed(result):
                    raise BackendError(f"no kernel at {result}")
            with runner.opened(path, **options) as loaded:
                yield loaded

        monkeypatch.setattr(roundtrip, "opened", opened)
        return tried

    return install


@pytest.mark.parametrize("opset", [13, 19])
def test_an_8_bit_model_is_written_at_an_opset_at_which_it_loads(opset: int, tmp_path: Path) -> None:
    proto = MODELS["qdq s8"](opset)
    result = optimize(proto, **PLAIN)
    assert not result.returned_original
    result.save(tmp_path / "y.onnx")
    written = onnx.load(tmp_path / "y.onnx")
    assert versions.opset_of(written) == opset
    for level in LEVELS:
        before, after = (session(m, level).run(None, {"x": X}) for m in (proto, written))
        np.testing.assert_array_equal(after[0], before[0])


@pytest.mark.parametrize("options", [PLAIN, MEASURED], ids=["loaded", "compared"])
def test_another_opset_is_taken_where_the_models_own_does_not_do(
    options: dict[str, Any], refusing: Callable[..., list[int | None]]
) -> None:
    tried = refusing(lambda opset: opset in (19, 15))
    result = optimize(twice_transposed().SerializeToString(), **options)
    assert tried == [17, 23, 21, 19]
    (note,) = [n for n in result.report.notes if "opset" in n]
    assert note.startswith("written at opset 19, because at 17 ONNX Runtime does not run it: no kernel at 17")
    if not result.returned_original:
        assert versions.opset_of(result.model) == 19


def test_the_original_comes_back_where_no_opset_does(
    refusing: Callable[..., list[int | None]], tmp_path: Path
) -> None:
    data = twice_transposed().SerializeToString()
    tried = refusing(lambda opset: False)
    result = optimize(data, **PLAIN)
    assert tried == [17, 23, 21, 19, 15, 13]
    assert result.returned_original
    assert result.report.reason == (
        "read and written again, at 6 opsets, the first of which is 17: ONNX Runtime does not run it: no kernel at 17"
    )
    assert result.trace == ()
    result.save(tmp_path / "y.onnx")
    assert (tmp_path / "y.onnx").read_bytes() == data
    assert result.report_html()


def test_an_opset_that_was_asked_for_is_the_only_one(refusing: Callable[..., list[int | None]]) -> None:
    tried = refusing(lambda opset: opset != 15)
    result = optimize(twice_transposed().SerializeToString(), **PLAIN, opset=15)
    assert tried == [15]
    assert result.returned_original
    assert "at opset 15: ONNX Runtime does not run it" in result.report.reason
    outcome = optimize(twice_transposed(), **PLAIN, opset=18)
    assert versions.opset_of(outcome.model) == 18


@pytest.mark.parametrize("opset", [6, 99])
def test_an_opset_that_cannot_be_written_is_refused_at_once(opset: int) -> None:
    with pytest.raises(ModelError, match=f"opset {opset} cannot be written, only 7 to 28"):
        optimize(twice_transposed(), **PLAIN, opset=opset)


def test_what_differs_is_written_at_another_opset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the file at opset 17 has other weights."""
    real = artifact.save

    def save(imported: Any, graph: Any, path: Any, **options: Any) -> None:
        real(imported, graph, path, **options)
        proto = onnx.load(path)
        if versions.opset_of(proto) == 17:
            weights = proto.graph.initializer[0]
            weights.CopyFrom(
                onnx.numpy_helper.from_array(1 + onnx.numpy_helper.to_array(weights), weights.name)
            )
            onnx.save(proto, path)

    monkeypatch.setattr(artifact, "save", save)
    result = optimize(twice_transposed().SerializeToString(), **MEASURED)
    (note,) = [n for n in result.report.notes if "opset" in n]
    assert note.startswith("written at opset 23, because at 17 it differs from the original: output 'y'")


def test_random_results_need_not_be_equal() -> None:
    nodes = [make("RandomNormalLike", ["x"], ["r"]), make("Add", ["x", "r"], ["y"])]
    proto = model(nodes, {"x": X}, [declare("y", TensorProto.FLOAT, [4, 64])], opset=17)
    result = optimize(proto, **MEASURED)
    assert not any("opset" in note for note in result.report.notes)


def test_a_file_that_is_not_trusted_is_not_run(refusing: Callable[..., list[int | None]]) -> None:
    tried = refusing(lambda opset: False)
    result = optimize(twice_transposed().SerializeToString(), **PLAIN, verify=False)
    assert tried == []
    assert versions.opset_of(result.model) == 17


def test_a_rule_that_needs_a_newer_opset_still_fires() -> None:
    """An RMS normalisation spelt out at opset 17 becomes one operator of opset 23."""
    nodes = [
        make("Mul", ["x", "x"], ["q"]),
        make("ReduceMean", ["q"], ["v"], axes=[-1]),
        make("Add", ["v", "e"], ["w"]),
        make("Sqrt", ["w"], ["s"]),
        make("Div", ["x", "s"], ["n"]),
        make("Mul", ["n", "gain"], ["y"]),
    ]
    consts = {"e": np.float32(1e-5), "gain": np.full(64, 1.5, np.float32)}
    proto = model(nodes, {"x": X}, [declare("y", TensorProto.FLOAT, [4, 64])], consts, opset=17)
    result = optimize(proto, **PLAIN)
    assert [n.op_type for n in result.model.graph.node] == ["RMSNormalization"]
    assert versions.opset_of(result.model) == 23


def test_a_trace_is_replayed_to_the_same_graph_at_the_same_opset(tmp_path: Path) -> None:
    proto = twice_transposed(13)
    result = optimize(proto, **PLAIN)
    assert result.trace
    result.save_trace(tmp_path / "t.json")
    again = optimize(proto, **PLAIN, replay=tmp_path / "t.json")
    assert again.model.SerializeToString() == result.model.SerializeToString()
    assert versions.opset_of(again.model) == 13

"""ONNX's own backend tests: what ONNX Runtime runs, it runs to the same result after import and export."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import pytest
from onnx import numpy_helper

from tests.onnxio.support import assert_same_outputs, run
from xrlflow import onnxio
from xrlflow.onnxio.errors import ModelError

# Their results are random, or their files have an opset that no ONNX Runtime reads.
RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


def value(path: str, type: onnx.TypeProto) -> Any:
    data = Path(path).read_bytes()
    if type.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if type.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    return numpy_helper.to_array(onnx.TensorProto.FromString(data))


def cases(kind: str) -> Iterator[tuple[str, onnx.ModelProto, dict[str, Any]]]:
    from onnx.backend.test.loader import load_model_tests

    logging.disable(logging.WARNING)
    with np.errstate(all="ignore"):
        found = load_model_tests(kind=kind)
    for case in found:
        model = case.model
        if model is None:
            path = Path(case.model_dir or "") / "model.onnx"
            if not path.exists():  # those have to be downloaded
                continue
            model = onnx.load(path)
        names = [v.name for v in model.graph.input]
        if case.data_sets:
            feeds = dict(zip(names, case.data_sets[0][0]))
        else:
            folder = sorted(glob(f"{case.model_dir}/test_data_set_*"))[0]
            feeds = {
                v.name: value(f"{folder}/input_{i}.pb", v.type)
                for i, v in enumerate(model.graph.input)
                if Path(f"{folder}/input_{i}.pb").exists()
            }
        yield case.name, model, feeds


def trip(model: onnx.ModelProto, feeds: dict[str, Any], expected: list[Any]) -> None:
    imported = onnxio.load(model)
    assert onnxio.check_result(imported, imported.graph) == ()
    given = {v.name for v in imported.frame.graph.input}
    result = onnxio.to_proto(imported, imported.graph)
    assert [o.name for o in result.graph.output] == [o.name for o in model.graph.output]
    assert_same_outputs(expected, run(result, {k: v for k, v in feeds.items() if k in given}))


# At least so many models are run; fewer would mean that something else is broken.
@pytest.mark.parametrize(
    ("kind", "least"), [("node", 1190), ("simple", 10), ("pytorch-converted", 50), ("pytorch-operator", 10)]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_model_computes_the_same(kind: str, least: int) -> None:
    ran, failures, refusals = 0, [], []
    for name, model, feeds in cases(kind):
        inputs = {v.name for v in model.graph.input}
        if model.ir_version < 4:
            inputs -= {t.name for t in model.graph.initializer}
        try:
            expected = run(model, {k: v for k, v in feeds.items() if k in inputs})
        except Exception:  # a model that ONNX Runtime does not run: it must be read or refused, no more
            try:
                onnxio.to_proto(imported := onnxio.load(model), imported.graph)
            except ModelError as error:
                refusals.append(f"{name}: {error}")
            continue
        if RANDOM & {n.op_type for n in model.graph.node}:
            continue
        ran += 1
        try:
            trip(model, feeds, expected)
        except ModelError as error:  # a newer ONNX Runtime runs opsets that are refused
            (refusals if "from the future" in str(error) else failures).append(f"{name}: {error}")
        except Exception as error:  # all of them are reported together
            failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    assert not failures, "\n".join(failures)
    assert ran >= least
    assert not [r for r in refusals if "from the future" not in r and "too old" not in r]


LIGHT = sorted(glob(f"{Path(onnx.backend.test.__file__).parent}/data/light/*.onnx"))


@pytest.mark.parametrize("path", LIGHT, ids=lambda p: Path(p).stem)
def test_whole_networks_compute_the_same(path: str, tmp_path: Path) -> None:
    imported = onnxio.load(path)
    (image,) = imported.frame.graph.input
    shape = [d.dim_value for d in image.type.tensor_type.shape.dim]
    feeds = {image.name: np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    onnxio.save(imported, imported.graph, tmp_path / "out.onnx", max_growth=1)
    assert onnxio.check_result(imported, imported.graph) == ()
    assert imported.graph.node_count < imported.nodes_before
    assert_same_outputs(run(path, feeds), run(str(tmp_path / "out.onnx"), feeds))

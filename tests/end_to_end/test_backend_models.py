"""ONNX's own backend tests as a corpus: every model that ONNX Runtime runs gives the same after `optimize`.

Once as greedy search leaves it, and once after ten random legal edits.
"""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from onnx.backend.test.loader import load_model_tests

import xrlflow
from xrlflow.backends import BackendError
from xrlflow.cost import Roofline
from xrlflow.onnxio.versions import NEWEST
from xrlflow.verify.compare import by_deviation, is_float, judge_exact, judge_floats
from xrlflow.verify.runner import opened

CHUNKS = 16


@cache
def corpus() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            case
            for kind in ("node", "simple", "pytorch-converted", "pytorch-operator")
            for case in sorted(load_model_tests(kind=kind), key=lambda c: c.name)
        ]


def read(case: Any) -> tuple[onnx.ModelProto, list[Any]]:
    """A case's model and the values of its inputs, in order."""
    if case.model is not None:
        given = case.data_sets[0][0]
        return case.model, [
            onnx.numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in given
        ]
    folder = Path(case.model_dir)
    proto = onnx.load(folder / "model.onnx")
    inputs = []
    data = folder / "test_data_set_0"
    kinds = [v.type for v in proto.graph.input]
    for index in range(len(list(data.glob("input_*.pb")))):
        raw = (data / f"input_{index}.pb").read_bytes()
        if kinds[index].HasField("sequence_type"):
            inputs.append(onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(raw)))
        else:
            inputs.append(onnx.numpy_helper.to_array(onnx.TensorProto.FromString(raw)))
    return proto, inputs


def opset(proto: onnx.ModelProto) -> int:
    return max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=1)


def outputs(model: bytes, feeds: dict[str, Any]) -> list[Any] | None:
    """What the runtime makes of a model; None if it cannot run it."""
    try:
        with opened(model, threads=1) as runner:
            return runner.run(feeds)
    except BackendError:
        return None


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if a is None or b is None:
        return a is b
    x, y = np.asarray(a), np.asarray(b)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return (judge_floats(by_deviation(x, None), y) if is_float(x) else judge_exact(x, y)).passed


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_backend_models(chunk: int, record_property: Any) -> None:
    counts: Counter[str] = Counter()
    fired: set[str] = set()
    failures: list[str] = []
    cost = Roofline()
    for case in corpus()[chunk::CHUNKS]:
        proto, inputs = read(case)
        if opset(proto) > NEWEST:
            continue  # a newer ONNX Runtime runs opsets that are refused
        counts["models"] += 1
        original = proto.SerializeToString()
        initializers = {i.name for i in proto.graph.initializer}
        feeds = dict(zip((v.name for v in proto.graph.input if v.name not in initializers), inputs))
        expected = outputs(original, feeds)
        again = outputs(original, feeds) if expected is not None else None
        if expected is None or again is None or not same(expected, again):
            continue  # not for this runtime, or random
        counts["runnable"] += 1
        rewritten = False
        for search, budget in (("greedy", 100), ("random", 10)):
            try:
                result = xrlflow.optimize(
                    original,
                    search=search,
                    budget=budget,
                    cost=cost,
                    measure=False,
                    verify=False,
                    max_growth=10.0,
                )
                got = outputs(result.model.SerializeToString(), feeds)
            except Exception as error:
                failures.append(f"{case.name} ({search}): {type(error).__name__}: {error}")
                continue
            rewritten |= bool(result.trace)
            fired.update(s.rule for s in result.trace)
            if got is None or not same(expected, got):
                rules = ", ".join(dict.fromkeys(s.rule for s in result.trace))
                failures.append(f"{case.name} ({search}): another result; rules: {rules or 'none'}")
        counts["rewritten"] += rewritten
    record_property("backend models", {"counts": dict(counts), "fired": sorted(fired)})
    assert not failures, "\n".join(failures)
    assert counts["runnable"] > 0.5 * counts["models"]

"""The evaluator against ONNX's own node tests: every single operator that we cover, every case."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from onnx import defs

from tests.corpus import backend_tests
from xrlflow.ir import Attr, Attrs, RawAttr
from xrlflow.ops.evaluate import REALS, SPECS, evaluate_node, promote

pytestmark = pytest.mark.corpus

OPSET = 23

# Operators of opset 23 that have cases and that we leave out, on purpose.
NOT_COVERED = {
    "Bernoulli",
    "DeformConv",
    "ImageDecoder",
    "MelWeightMatrix",
    "NegativeLogLikelihoodLoss",
    "OptionalGetElement",
    "OptionalHasElement",
    "RegexFullMatch",
    "SequenceInsert",
    "SequenceMap",
    "SoftmaxCrossEntropyLoss",
    "SplitToSequence",
    "StringConcat",
    "StringNormalizer",
    "StringSplit",
    "TfIdfVectorizer",
}


@dataclass(frozen=True)
class Case:
    name: str
    node: onnx.NodeProto
    data: list[tuple[list[Any], list[Any]]]  # of each set: inputs, outputs


def _same_interface(op: str, version: int) -> bool:
    """Whether the definition that a case uses is that of opset 23, but perhaps for the types it allows."""
    old, new = defs.get_schema(op, version), defs.get_schema(op, OPSET)
    if old.since_version == new.since_version:
        return True
    return (
        old.since_version >= 10
        and sorted(old.attributes) == sorted(new.attributes)
        and [i.name for i in old.inputs] == [i.name for i in new.inputs]
    )


@cache
def _cases() -> tuple[Case, ...]:
    out = []
    for test in backend_tests("node"):
        model = test.model
        assert model is not None
        if len(model.graph.node) != 1:
            continue
        node = model.graph.node[0]
        version = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), OPSET)
        if node.domain not in ("", "ai.onnx"):
            continue
        try:
            same = _same_interface(node.op_type, version)
        except defs.SchemaError:  # an operator that opset 23 does not have
            continue
        if same:
            assert test.data_sets is not None
            out.append(Case(test.name, node, list(test.data_sets)))
    return tuple(out)


# Control flow is tested on whole graphs, in test_evaluate_graph.
ELSEWHERE = {"If", "Loop", "Scan"}
# Operators that no case has alone, as opset 23 defines them; those of other domains have no cases either.
WITHOUT_CASES = {"Cast", "CastLike", "GlobalLpPool", "Range", "SimplifiedLayerNormalization", "SpaceToDepth"}
OPERATORS = sorted(op for op in SPECS.keys() - ELSEWHERE - WITHOUT_CASES if "::" not in op)


@cache
def covered() -> dict[str, list[Case]]:
    """The cases of each operator. They are computed when they are first asked for, which takes seconds."""
    found: dict[str, list[Case]] = {}
    for case in _cases():
        if not case.name.startswith("test_training_dropout"):  # it is random
            found.setdefault(case.node.op_type, []).append(case)
    return {op: cases for op, cases in found.items() if op in SPECS.keys() - ELSEWHERE}


def attribute(proto: onnx.AttributeProto) -> Attr:
    if proto.type in (onnx.AttributeProto.TENSOR, onnx.AttributeProto.SPARSE_TENSOR):
        return RawAttr(proto.SerializeToString())
    value: Any = onnx.helper.get_attribute_value(proto)
    if isinstance(value, bytes):
        return value.decode()
    if proto.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
        return tuple(value)
    if proto.type == onnx.AttributeProto.STRINGS:
        return tuple(v.decode() for v in value)
    assert isinstance(value, (int, float)), proto
    return value


def _load(value: Any) -> np.ndarray[Any, Any]:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


# Tests whose numbers are written with four digits.
FOUR_DIGITS = frozenset(
    ["test_averagepool_2d_ceil_last_window_starts_on_pad", "test_gridsample_bicubic"]
    + ["test_roialign_aligned_false", "test_roialign_aligned_true"]
)


def _compare(got: np.ndarray[Any, Any], raw: np.ndarray[Any, Any], digits: float) -> None:
    expected = promote(REALS, raw)
    assert got.shape == expected.shape
    if raw.dtype.kind == "V" and expected is raw:  # float8, int4, ...: exact
        assert got.dtype == raw.dtype
        got, expected = got.astype(np.float64), raw.astype(np.float64)
        np.testing.assert_array_equal(got, expected)
        return
    if expected.dtype.kind == "f":
        # What the reference rounded to a narrow type, we round to compare.
        got = promote(REALS, got.astype(raw.dtype)) if raw.dtype != np.float64 else got
        coarse = raw.dtype.itemsize < 4
        rtol = 2 * float(ml_dtypes.finfo(raw.dtype).eps) if coarse else digits
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=1e-6)
    else:
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def check(case: Case) -> None:
    attrs = Attrs({a.name: attribute(a) for a in case.node.attribute})
    for given, wanted in case.data:
        fed = iter([promote(REALS, _load(value)) for value in given])
        inputs = [next(fed) if name else None for name in case.node.input]
        outputs = evaluate_node(case.node.op_type, attrs, inputs, len(case.node.output))
        present = [out for name, out in zip(case.node.output, outputs, strict=False) if name]
        for got, value in zip(present, wanted, strict=True):
            _compare(got, _load(value), 1e-3 if case.name in FOUR_DIGITS else 1e-5)


@pytest.mark.parametrize("operator", OPERATORS)
def test_backend_cases(operator: str) -> None:
    failures = []
    for case in covered()[operator]:
        try:
            check(case)
        except Exception as error:  # all of them are reported together
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


def test_coverage() -> None:
    assert covered().keys() == set(OPERATORS)
    count = sum(map(len, covered().values()))
    assert count >= 1025
    missing = Counter(c.node.op_type for c in _cases() if c.node.op_type not in SPECS)
    print(f"{count} cases of {len(_cases())}; operators not covered: {dict(missing)}")
    assert set(missing) == NOT_COVERED

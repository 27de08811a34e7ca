"""How rules are tested: both sides run in ONNX Runtime, with its own optimisations off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from tests.fuzz.check import in_float64
from xrlflow.ir import Graph, text
from xrlflow.onnxio import load, to_proto
from xrlflow.rewrite import AnyRule, Library, Match, RewriteState
from xrlflow.verify.compare import by_deviation, by_reference, is_float, judge_exact, judge_floats

_HALF_BYTES = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)


def model(source: str, *, opset: int = 23, **initializers: np.ndarray) -> onnx.ModelProto:
    """A model from ONNX's text form: `agraph (float[1,3] x) => (float[1,3] y) { y = Relu(x) }`.

    Keyword arguments become initialisers of these names.
    """
    proto = onnx.parser.parse_model(
        f'<ir_version: 11, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n{source}'
    )
    for tensor in proto.graph.initializer:
        if tensor.data_type in _HALF_BYTES and len(tensor.int32_data) == np.prod(tensor.dims):
            # ONNX's parser writes one number in each element, where its format has two.
            array = np.array(tensor.int32_data).astype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.reshape(tensor.dims), tensor.name))
    for name, array in initializers.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return proto


def alone(rule: AnyRule) -> Library:
    """A library of one rule, whatever it assumes and for whatever backend."""
    assuming = () if rule.assumes is None else (rule.assumes,)
    return Library([rule], backend=rule.backend, assuming=assuming, contrib=True, thorough=True)


def rewritten(rule: AnyRule, proto: onnx.ModelProto, pick: int = 0) -> tuple[onnx.ModelProto, Graph]:
    """The model after one application of the rule, at its `pick`th candidate; it must have one."""
    imported = load(proto)
    library = alone(rule)
    state = RewriteState.start(imported.graph, library)
    candidates = sorted(state.candidates, key=lambda m: m.key)
    refused = dict(library.stats[rule.name].refused)
    assert candidates, f"{rule.name} does not apply to\n{text(imported.graph)}\nrefused: {refused}"
    successor = state.apply(candidates[pick])
    successor.graph.topological()  # raises on a cycle
    assert successor.fingerprint == successor.graph.rebuilt_fingerprint()
    return to_proto(imported, successor.graph), successor.graph


def opened(proto: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return opened(proto).run(None, feeds)


def normal(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    """Normal numbers, others for each shape."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def numbers(*shape: int) -> np.ndarray:
    """Normal numbers; those of a smaller shape are the first of a larger one."""
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def ints(**given: object) -> dict[str, np.ndarray]:
    """The same numbers as arrays of int64."""
    return {k: np.array(v, np.int64) for k, v in given.items()}


def random_feeds(proto: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Normal floats, small integers, for inputs of numeric shape; symbols become 2, 3, ..."""
    rng = np.random.default_rng(seed)
    initializers = {i.name for i in proto.graph.initializer}
    symbols: dict[str, int] = {}
    feeds = {}
    for value in proto.graph.input:
        if value.name in initializers:
            continue
        tensor = value.type.tensor_type
        shape = [
            d.dim_value if d.HasField("dim_value") else symbols.setdefault(d.dim_param, 2 + len(symbols))
            for d in tensor.shape.dim
        ]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if dtype == np.bool_:
            feeds[value.name] = np.asarray(rng.random(shape) < 0.5)
        elif np.issubdtype(dtype, np.integer):
            feeds[value.name] = np.asarray(rng.integers(0, 4, shape), dtype)
        else:
            feeds[value.name] = rng.standard_normal(shape).astype(dtype)
    return feeds


def assert_equivalent(
    before: onnx.ModelProto, after: onnx.ModelProto, *inputs: dict[str, np.ndarray]
) -> None:
    """Both give the same on all these inputs: see `assert_same`. What `before` may be off is measured in float64."""
    one, other, imported = opened(before), opened(after), load(before)
    for feeds in inputs:
        expected, found = one.run(None, feeds), other.run(None, feeds)
        assert_same(expected, found, in_float64(imported, imported.graph, feeds))


def assert_same(
    expected: Sequence[np.ndarray], found: Sequence[np.ndarray], exact: Sequence[np.ndarray | None] = ()
) -> None:
    """Outputs of one shape and type, NaN and infinities at the same places, integers equal, floats as near to `exact`
    as `expected` is (by its slices, too), or to `expected` where that is not known: see `xrlflow.verify.compare`.
    """
    assert len(expected) == len(found)
    for i, (a, b) in enumerate(zip(expected, found)):
        if a is None or isinstance(a, (list, tuple)):
            assert type(a) is type(b)
            if a is not None:
                assert_same(a, b)
            continue
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"output {i}"
        if not is_float(a):
            judgement = judge_exact(a, b)
        else:
            reference = exact[i] if i < len(exact) else None
            targets = [by_reference(a, reference) if reference is not None else None, by_deviation(a, None)]
            judged = [judge_floats(y, b) for y in targets if y is not None]
            judgement = next((j for j in judged if j.passed), judged[0])
        assert judgement.passed, f"output {i}: {judgement.reason}; {judgement.worst}"


def applies(rule: AnyRule, proto: onnx.ModelProto, *, pick: int = 0, ops: list[str] | None = None) -> Graph:
    """The rule applies, and the result gives what the original gives on random inputs.

    `ops` are the operators of the result that run, sorted (constant expressions are not counted).
    """
    after, graph = rewritten(rule, proto, pick)
    assert_equivalent(proto, after, *(random_feeds(proto, seed) for seed in range(3)))
    if ops is not None:
        assert sorted(n.op for n in graph.nodes() if not n.const) == sorted(ops)
    return graph


def refuses(rule: AnyRule, proto: onnx.ModelProto, reason: str | None = None) -> None:
    """The rule has no candidate; with `reason`, because its condition refuses with words that contain it."""
    imported = load(proto)
    library = alone(rule)
    state = RewriteState.start(imported.graph, library)
    assert state.candidates == [], [Match.__name__, [m.key for m in state.candidates]]
    if reason is not None:
        reasons = list(library.stats[rule.name].refused)
        assert any(reason in r for r in reasons), f"refused for {reasons}, not for {reason!r}"

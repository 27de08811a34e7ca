"""How rules are tested: both sides run in ONNX Runtime, with its own optimisations off."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from xrlflow.ir import Graph, text
from xrlflow.onnxio import load, to_proto
from xrlflow.rewrite import AnyRule, Library, Match, RewriteState


def model(source: str, *, opset: int = 23, **initializers: np.ndarray) -> onnx.ModelProto:
    """A model from ONNX's text form: `agraph (float[1,3] x) => (float[1,3] y) { y = Relu(x) }`.

    Keyword arguments become initialisers of these names.
    """
    proto = onnx.parser.parse_model(
        f'<ir_version: 11, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n{source}'
    )
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


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


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


def applies(
    rule: AnyRule, proto: onnx.ModelProto, *, pick: int = 0, ops: list[str] | None = None, rtol: float = 2e-5
) -> Graph:
    """The rule applies, and the result equals the original on random inputs (relative to the largest output).

    `ops` are the operators of the result that run, sorted (constant expressions are not counted).
    """
    after, graph = rewritten(rule, proto, pick)
    for seed in range(3):
        feeds = random_feeds(proto, seed)
        for a, b in zip(run(proto, feeds), run(after, feeds), strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            if a.dtype.kind == "f":
                scale = max(1e-6, float(np.max(np.abs(a), initial=0.0)))
                np.testing.assert_allclose(b, a, rtol=0, atol=rtol * scale)
            else:
                np.testing.assert_array_equal(b, a)
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

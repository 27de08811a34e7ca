"""Random graphs through everything: search, export, incremental matching, equality.

`XRLFLOW_EXAMPLES=3000 pytest tests/end_to_end/test_hypothesis_graphs.py --hypothesis-seed=7` tries other graphs.
"""

from __future__ import annotations

import os
import random

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

import xrlflow
from rewrite_rules import LIBRARY
from tests.graphs import models
from tests.rules.harness import run
from xrlflow.backends.onnxruntime.session import ort_errors
from xrlflow.cost import Roofline
from xrlflow.ir import text
from xrlflow.onnxio import load, to_proto
from xrlflow.rewrite import Library, RewriteState
from xrlflow.verify import verify
from xrlflow.verify.compare import by_deviation, is_float, judge_exact, judge_floats

pytestmark = pytest.mark.corpus

EXAMPLES = int(os.environ.get("XRLFLOW_EXAMPLES", "0"))
COST = Roofline()


def profile(examples: int) -> settings:
    """In CI the same examples every time; more, and others, on request."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )


def feeds_of(proto: onnx.ModelProto, seed: int, batch: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    initializers = {t.name for t in proto.graph.initializer}
    feeds: dict[str, np.ndarray] = {}
    for value in proto.graph.input:
        if value.name in initializers and seed % 2:
            continue  # an overridable one keeps what the file gives it
        tensor = value.type.tensor_type
        shape = [batch if d.dim_param else d.dim_value for d in tensor.shape.dim]
        if tensor.elem_type == onnx.TensorProto.BOOL:
            feeds[value.name] = np.asarray(rng.random(shape) < 0.5)
        else:
            feeds[value.name] = np.asarray(rng.standard_normal(shape), np.float32)
    return feeds


def assert_equal(original: onnx.ModelProto, new: onnx.ModelProto, what: str) -> None:
    """Same signature, valid, equal outputs (relative to each output's size; xrlflow.verify decides what is close)."""
    assert list(new.graph.input) == list(original.graph.input), what
    assert list(new.graph.output) == list(original.graph.output), what
    onnx.checker.check_model(new, full_check=True)
    for seed, batch in ((0, 3), (1, 2), (2, 1)):
        feeds = feeds_of(original, seed, batch)
        try:
            expected = run(original, feeds)
        except ort_errors() as error:  # ONNX Runtime now and then loses a value that only a branch reads
            if "Missing Input" not in str(error):
                raise
            reject()
        for a, b, info in zip(expected, run(new, feeds), original.graph.output, strict=True):
            assert a.shape == b.shape, (what, info.name, a.shape, b.shape)
            assert a.dtype == b.dtype, (what, info.name)
            judgement = judge_floats(by_deviation(a, None), b) if is_float(a) else judge_exact(a, b)
            if not judgement.passed:
                found = verify(original.SerializeToString(), new.SerializeToString())
                assert found.verified, (what, found.failures)
                return


def assert_stable(exported: onnx.ModelProto) -> None:
    """Read and written again it has the same nodes and constants; after that not a byte changes."""
    first = load(exported)
    again = to_proto(first, first.graph)
    assert sorted(n.SerializeToString() for n in again.graph.node) == sorted(
        n.SerializeToString() for n in exported.graph.node
    )
    assert list(again.graph.initializer) == list(exported.graph.initializer)
    second = load(again)
    assert second.graph.fingerprint == first.graph.fingerprint
    assert to_proto(second, second.graph).SerializeToString() == again.SerializeToString()


def compute_the_same(proto: onnx.ModelProto, seed: int) -> None:
    """Check what several searches make of a model."""
    onnx.checker.check_model(proto, full_check=True)
    data = proto.SerializeToString()
    for search, budget in (("random", 10), ("greedy", 50), ("taso", 25)):
        result = xrlflow.optimize(
            data, search=search, budget=budget, cost=COST, seed=seed, measure=False, verify=False, max_growth=100
        )  # fmt: skip
        assert_equal(proto, result.model, f"{search}: {[s.rule for s in result.trace]}")
        report = result.report
        assert report.cost_after <= report.cost_before or search == "random"


@profile(50)
@given(models(), st.integers(0, 2**16))
def test_optimised_models_compute_the_same(proto: onnx.ModelProto, seed: int) -> None:
    compute_the_same(proto, seed)


@pytest.mark.whole
@profile(200)
@given(models(), st.integers(0, 2**16))
def test_more_optimised_models_compute_the_same(proto: onnx.ModelProto, seed: int) -> None:
    compute_the_same(proto, seed)


@profile(60)
@given(models(), st.integers(0, 2**16))
def test_walks_against_their_oracles(proto: onnx.ModelProto, seed: int) -> None:
    """Candidates equal a match from scratch, the fingerprint and the modelled cost equal the rebuilt ones."""
    imported = load(proto)
    library = Library(LIBRARY)
    state = RewriteState.start(imported.graph, library, COST.delta)
    modelled = COST.cost(imported.graph)
    rng = random.Random(seed)
    walked: list[str] = []
    for _ in range(8):
        candidates = sorted(state.candidates, key=lambda m: m.key)
        if not candidates:
            break
        match = rng.choice(candidates)
        walked.append(match.rule.name)
        edit = state.edit(match)
        modelled += COST.delta(state.graph, edit)
        state = state.apply(match, edit)
        scratch = RewriteState.start(state.graph, library, COST.delta)
        keys = {m.key for m in state.candidates}
        assert keys == {m.key for m in scratch.candidates}, (walked, text(state.graph))
        assert state.count == len(state.candidates) == len(keys), walked
        gaining = {m for m in state.candidates if m.delta < 0}
        assert set(state.gaining) == gaining, walked
        ordered = sorted(gaining, key=lambda m: (m.delta, m.key))
        assert state.gains_most(0.0) is (ordered[0] if ordered else None), walked
        if len(ordered) > 1:
            assert state.gains_most(-ordered[0].delta) is None, walked
            assert state.gains_most(0.0, {ordered[0]}.__contains__) is ordered[1], walked
        assert state.fingerprint == state.graph.rebuilt_fingerprint(), walked
        assert np.isclose(modelled, COST.cost(state.graph), rtol=1e-9, atol=1e-15), walked
        assert len(state.graph.topological()) == state.graph.node_count, walked
    exported = to_proto(imported, state.graph)
    assert_equal(proto, exported, str(walked))
    assert_stable(exported)


@profile(80)
@given(models())
def test_round_trips(proto: onnx.ModelProto) -> None:
    """Reading and writing changes nothing that is computed, and once more nothing at all."""
    imported = load(proto)
    exported = to_proto(imported, imported.graph)
    assert_equal(proto, exported, "round trip")
    assert_stable(exported)

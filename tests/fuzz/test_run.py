"""Random models, optimised at random: some of them, the same every time; and whether a wrong rule would be found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from rewrite_rules import LIBRARY
from tests.fuzz import check
from tests.fuzz.check import Case, Libraries, Session, draw_cases, examine, fuzz_one, one_rule, shrink
from tests.fuzz.models import Subject, idioms
from tests.fuzz.run import Job, Run
from tests.levels import whole
from tests.rules.harness import model
from xrlflow.ir import DType
from xrlflow.onnxio import load
from xrlflow.rewrite import Captures, Op, Rule, Val, require

pytestmark = pytest.mark.corpus

FEW, MANY = 36, 240


@pytest.mark.parametrize("graphs", whole((FEW, MANY), (FEW,)))
def test_random_models_compute_the_same_after_random_substitutions(
    graphs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m tests.fuzz.run` does it for longer."""
    pytest.importorskip("nnsmith", reason="a third of the models is NNSmith's (pip install '.[dev]')")
    run = Run(1, 0, save=tmp_path)
    run.go(None, graphs)
    told = run.to_json()
    print(run.summary())
    assert [f for f in told["findings"] if not f["by ONNX Runtime"]] == [], capsys.readouterr().out
    assert told["graphs"] == graphs
    assert told["substitutions"] > 10 * graphs
    assert told["distinct rules"] > (150 if graphs == MANY else 75)
    assert told["share not comparable"] < 0.05
    for name, tally in told["generators"].items():
        assert tally["graphs"] == graphs // 3, name
        assert tally["models with a float64 reference"] > 0.8 * tally["graphs"], name


class _Wrong(Rule):
    """A rule that is not right."""

    shapes = "x[...]"


class NarrowAndBack(_Wrong):
    """cast(cast(x to int32) to int64) -> x."""

    shapes = "x[...]:int"

    def where(self, m: Captures, x: Val) -> None:
        require(x.dtype == DType.INT64, "another type")

    def source(self, op: Op, x: Any) -> Any:
        return op.Cast(op.Cast(x, to=TensorProto.INT32), to=TensorProto.INT64)

    def target(self, op: Op, x: Val) -> Any:
        return x


class DropsSquareRoot(_Wrong):
    """sqrt(x) -> x."""

    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Sqrt(x)

    def target(self, op: Op, x: Val) -> Any:
        return x


class RoundsByFloor(_Wrong):
    """round(x) -> floor(x + 0.5): halves go to the even number, and not up."""

    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Round(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Floor(op.Add(x, 0.5))


class SwallowsInfinity(_Wrong):
    """neg(x) -> neg(clip(x))."""

    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Neg(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Neg(op.Clip(x, -3e38, 3e38))


def chain(*ops: str) -> onnx.ModelProto:
    """x through these operators, with others around them."""
    lines = ["v0 = Add(x, x)"] + [f"v{i + 1} = {op}(v{i})" for i, op in enumerate(ops)]
    kind = "int64" if "Cast" in ops[0] else "float"
    return model(
        f"agraph ({kind}[N,4] x) => ({kind}[] y, {kind}[] z) {{ {' '.join(lines)} "
        f"w = Abs(v{len(ops)}) y = Mul(w, w) z = Transpose<perm=[1,0]>(w) }}"
    )


PLANTED = (
    (NarrowAndBack(), chain("Cast<to=6>", "Cast<to=7>")),
    (DropsSquareRoot(), chain("Abs", "Sqrt")),
    (RoundsByFloor(), chain("Round")),
    (SwallowsInfinity(), chain("Neg")),
)


@pytest.mark.parametrize(("rule", "proto"), PLANTED, ids=lambda p: getattr(p, "name", ""))
def test_a_wrong_rule_is_found_and_its_model_made_small(rule: Rule, proto: onnx.ModelProto) -> None:
    subject = Subject(proto, ({"N": 3}, {"N": 5}))
    libraries = Libraries([*LIBRARY, rule])
    outcome = fuzz_one(subject, 0, libraries, lambda stage: None)
    assert not outcome.not_comparable
    found = next(d for d in outcome.differences if rule.name in d.trace and not d.runtime)
    original = examine(subject, draw_cases(subject, 0), lambda stage: None)
    step = check.culprit(original, found, libraries)
    assert step is not None
    assert found.trace[step] == rule.name
    wrong = one_rule(rule.name, False, libraries)
    small, cases = shrink(proto, [k.case for k in original.known], wrong)
    assert wrong(small, cases) is not None
    assert len(cases) == 1
    assert len(small.graph.node) <= len(proto.graph.node) - 3
    assert len(small.graph.output) == 1


def test_without_the_wrong_rule_nothing_is_found() -> None:
    for _, proto in PLANTED:
        outcome = fuzz_one(Subject(proto, ({"N": 3}, {"N": 5})), 0, Libraries(), lambda stage: None)
        assert outcome.differences == []


def test_a_rule_that_promises_less_is_judged_on_finite_numbers_alone() -> None:
    class Allowed(SwallowsInfinity):
        """neg(x) -> neg(clip(x))."""

        may_add_nonfinite = True
        may_remove_nonfinite = True

    outcome = fuzz_one(Subject(chain("Neg"), ({"N": 3},)), 0, Libraries([Allowed()]), lambda stage: None)
    assert outcome.substitutions["Allowed"]
    assert outcome.differences == []


def test_a_model_that_the_runtime_refuses_is_told() -> None:
    value = helper.make_tensor_value_info("x", TensorProto.UINT16, [2])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [])
    graph.output.append(helper.make_tensor_value_info("y", TensorProto.UINT16, [2]))
    outcome = fuzz_one(Subject(helper.make_model(graph, ir_version=10)), 0, Libraries(), lambda stage: None)
    assert "does not load" in outcome.not_comparable
    assert outcome.differences == []


def test_the_same_seed_gives_the_same_model_and_inputs() -> None:
    for seed in range(5):
        first, second = idioms(seed), idioms(seed)
        assert first.proto.SerializeToString(deterministic=True) == second.proto.SerializeToString(
            deterministic=True
        )
        for a, b in zip(draw_cases(first, 1), draw_cases(second, 1), strict=True):
            assert a.mode == b.mode
            assert all(
                np.array_equal(a.feeds[k], b.feeds[k], equal_nan=a.feeds[k].dtype.kind == "f")
                for k in a.feeds
            )


def test_a_process_that_dies_or_hangs_is_told(tmp_path: Path) -> None:
    run = Run(1, 0, save=tmp_path)
    run.workers = [run._start()]
    worker = run.workers[0]
    worker.job, worker.stage.value = Job("idioms", 7), b"the result in ONNX Runtime"
    run._reap(worker, "no end in sight")
    for other in run.workers:
        other.process.kill()
    assert run.to_json()["differences"] == 1
    assert "idioms-7" in run.lost[0]
    assert run.findings[0].what.startswith("no end in sight")
    worker.job, worker.found = Job("idioms", 8), None
    assert (tmp_path / "idioms-7-model.json").is_file()


def test_inputs_have_the_ends_of_their_types() -> None:
    proto = model("agraph (int32[500] x, uint64[500] u, float[500] f) => (y) { y = Identity(x) }")
    cases = {c.mode: c for c in draw_cases(Subject(proto), 0)}
    for name, dtype in (("x", np.int32), ("u", np.uint64)):
        grid = cases["grid"].feeds[name]
        assert {np.iinfo(dtype).min, np.iinfo(dtype).max} <= set(grid.tolist())
    assert np.isnan(cases["special"].feeds["f"]).any()
    assert np.isinf(cases["infinite"].feeds["f"]).any()
    assert not np.isnan(cases["infinite"].feeds["f"]).any()
    assert isinstance(Session(proto, True).run(cases["normal"].feeds)[0], np.ndarray)
    assert isinstance(cases["normal"], Case)


class DividesByCoarse(_Wrong):
    """x / (1 + exp(-y)) -> x * sigmoid(y) + 0: ONNX Runtime's sigmoid is exact to 1.7e-7, its quotient to 1e-10."""

    shapes = "x[N]:float y[N]:float"
    off = 0.0

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.Div(x, op.Add(1.0, op.Exp(op.Neg(y))))

    def target(self, op: Op, x: Val, y: Val) -> Any:
        return op.Add(op.Mul(x, op.Sigmoid(y)), self.off)


class DividesByCoarser(DividesByCoarse):
    """x / (1 + exp(-y)) -> x * sigmoid(y) + 2e-6."""

    off = 2e-6


def test_what_a_coarse_kernel_comes_to_is_told_from_what_a_rule_adds() -> None:
    proto = model(
        "agraph (float[N] x, float[N] y) => (float[N] z) <float one = {1}> "
        "{ n = Neg(y) e = Exp(n) s = Add(one, e) z = Div(x, s) }"
    )
    feeds = {"x": np.linspace(1, 4, 50, dtype=np.float32), "y": np.linspace(-9, -6, 50, dtype=np.float32)}
    libraries = Libraries([DividesByCoarse(), DividesByCoarser()])
    for rule, coarse in (("DividesByCoarse", True), ("DividesByCoarser", False)):
        fault = one_rule(rule, coarse, libraries)(proto, [Case("wide", feeds)])
        assert fault is not None
        assert ("ONNX Runtime's kernel" in fault.what) == coarse
        assert one_rule(rule, not coarse, libraries)(proto, [Case("wide", feeds)]) is None


def test_half_precision_may_be_kept_in_float32() -> None:
    """Between two kernels without float16 ONNX Runtime does not round: what overflows there may be finite."""
    proto = model(
        "agraph (float16[1] x, float16[1] e) => (float16[1] y) "
        "{ p = Pow(x, e) r = Reciprocal(p) y = Mul(r, r) }"
    )
    feeds = {"x": np.float16([1000]), "e": np.float16([2])}
    made = [check.noisy(load(proto), feeds, seed) for seed in range(12, 18)]
    positive = [float(np.asarray(m[0][0])[0]) > 0 for m in made if m is not None]
    assert not any(positive[0::2])
    assert any(positive[1::2])

"""Pairs that are equal nearly everywhere are told apart: by the sizes, values and branches that the models name."""

import os
from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import pytest

import xrlflow
from models.mobile import squeezenet
from rewrite_rules import LIBRARY
from tests.runtime import faulty
from tests.verify.models import model, normal
from xrlflow.backends import BackendError
from xrlflow.backends.protocol import OutOfTime
from xrlflow.cost import Roofline
from xrlflow.cost.model import InTypes
from xrlflow.ir import Graph, Node
from xrlflow.onnxio import load
from xrlflow.prover.thresholds import integers_in_code, limits
from xrlflow.verify import Reference, Status, exercise, isolated, verify
from xrlflow.verify.branches import instrumented, watched
from xrlflow.verify.cases import Estimate
from xrlflow.verify.compare import Criterion, Exemption, Target, by_deviation, judge_floats
from xrlflow.verify.input_constraints import input_constraints
from xrlflow.verify.inputs import InputPlan, evaluable_feeds
from xrlflow.verify.nonfinite import Fate, fates
from xrlflow.verify.numbers import around, marks, on_symbols, thresholds
from xrlflow.verify.runner import opened

pytestmark = pytest.mark.process

LIBRARY_BY_NAME = {rule.name: rule for rule in LIBRARY}

Pair = tuple[onnx.ModelProto, onnx.ModelProto]


def clip(most: float, shape: str = "n, 3, 8, 8") -> onnx.ModelProto:
    return model(
        f"g (float[{shape}] x) => (float[{shape}] y) {{ y = Clip(x, z, m) }}",
        z=np.float32(0),
        m=np.float32(most),
    )


def arms(large: str, threshold: float, reduced: str = "ReduceMax<keepdims=0>(x)") -> onnx.ModelProto:
    return model(
        f"""g (float[n, 4] x) => (float[n, 4] y) {{
          m = {reduced}
          c = Greater(m, k)
          y = If(c) <
            then_branch = t () => (float[n, 4] a) {{ a = {large}(x) }},
            else_branch = e () => (float[n, 4] b) {{ b = Identity(x) }}
          > }}""",
        k=np.float32(threshold),
    )


def by_size(least: int, other: str) -> onnx.ModelProto:
    return model(
        f"""g (float[n, s] x) => (float[n, s] y) {{
          d = Shape<start=1, end=2>(x)
          c = Greater(d, k)
          q = Squeeze(c)
          y = If(q) <
            then_branch = t () => (float[n, s] a) {{ a = {other}(x) }},
            else_branch = e () => (float[n, s] b) {{ b = Relu(x) }}
          > }}""",
        k=np.int64([least]),
    )


def kept(end: int | None, stride: int = 1) -> onnx.ModelProto:
    body = "h = Identity(p)" if end is None else "h = Slice(p, a, b, c)"
    return model(
        f"""g (float[n, 2, s] x) => (float[n, 2, t] y) {{
          p = MaxPool<kernel_shape=[1], strides=[{stride}]>(x)
          {body}
          y = Relu(h) }}""",
        a=np.int64([0]),
        b=np.int64([end or 0]),
        c=np.int64([2]),
    )


def ids(narrow: bool, kind: str = "int64") -> onnx.ModelProto:
    number = {"int64": 7, "uint32": 12}[kind]
    cast = f"a = Cast<to=6>(x)\n b = Cast<to={number}>(a)" if narrow else "b = Identity(x)"
    return model(f"g ({kind}[n] x) => (int64[n] y) {{ {cast}\n y = Cast<to=7>(b) }}")


def hashed(narrow: bool) -> onnx.ModelProto:
    cast = "a = Cast<to=6>(ids)\n b = Cast<to=7>(a)" if narrow else "b = Identity(ids)"
    return model(
        f"g (int64[n] ids) => (float[n, 3] y) {{ {cast}\n i = Mod(b, k)\n y = Gather(table, i) }}",
        k=np.int64([11]),
        table=normal(11, 3),
    )


def crop(wrong: bool, by: int = 4) -> onnx.ModelProto:
    """Pads to the next multiple, or, where it is one already, by a whole block too many."""
    return model(
        f"""g (float[n, s] x) => (float[n, t] y) {{
          d = Shape<start=1>(x)
          r = Mod(d, k)
          p = Sub(k, r)
          q = {"Identity(p)" if wrong else "Mod(p, k)"}
          a = Concat<axis=0>(zero, zero, zero, q)
          y = Pad(x, a) }}""",
        k=np.int64([by]),
        zero=np.int64([0]),
    )


def guard(dropped: bool, before: str = "h = Identity(x)", after: str = "y = MatMul(g, w)") -> onnx.ModelProto:
    body = "g = Identity(h)" if dropped else "i = IsNaN(h)\n g = Where(i, z, h)"
    return model(
        f"g (float[n, 4] x) => (float[n, 4] y) {{ {before}\n {body}\n {after} }}",
        z=np.float32(0),
        w=normal(4, 4),
    )


def wrapped(wrong: bool) -> onnx.ModelProto:
    """A lookup by hand, which forgets that indices may count from the end."""
    fix = "r = Add(ids, n)\n l = Less(ids, zero)\n i = Where(l, r, ids)" if not wrong else "i = Abs(ids)"
    return model(
        f"g (int64[k] ids) => (float[k, 3] y) {{ {fix}\n y = Gather(table, i) }}",
        table=normal(6, 3), n=np.int64([6]), zero=np.int64([0]),
    )  # fmt: skip


def masked(wrong: bool) -> onnx.ModelProto:
    last = "y = Mul(s, f)" if not wrong else "o = Max(f, t)\n y = Mul(s, o)"
    return model(
        f"""g (float[n, s] x, int64[n, s] attention_mask) => (float[n, s] y) {{
          f0 = Cast<to=1>(attention_mask)
          f = ReduceMax<keepdims=1>(f0, axis)
          s = Relu(x)
          {last} }}""",
        axis=np.int64([1]), t=np.float32([0.5]),
    )  # fmt: skip


def loop(body: str) -> onnx.ModelProto:
    return model(
        f"""g (float[n, 4] x, int64 trips) => (float[n, 4] y) {{
          go = Constant<value = bool {{1}}>()
          y = Loop(trips, go, x) <
            body = l (int64 k, bool before, float[n, 4] state) => (bool after, float[n, 4] next) {{
              after = Identity(before)
              two = Constant<value = float {{2.0}}>()
              next = {body} }}
          > }}"""
    )


PAIRS: dict[str, Callable[[], Pair]] = {
    "a Clip at 255 against one at 6": lambda: (clip(255), clip(6)),
    "the same without dynamic dimensions": lambda: (clip(255, "1, 3, 8, 8"), clip(6, "1, 3, 8, 8")),
    "a Clip far beyond": lambda: (clip(60000), clip(50000)),
    "an arm that is only reached at large values": lambda: (arms("Neg", 5000), arms("Abs", 5000)),
    "an arm that is only reached by sums": lambda: (
        arms("Neg", 3e5, "ReduceSum<keepdims=0>(x)"), arms("Abs", 3e5, "ReduceSum<keepdims=0>(x)"),
    ),
    "an arm that was left out": lambda: (
        arms("Neg", 700), model("g (float[n, 4] x) => (float[n, 4] y) { y = Identity(x) }"),
    ),
    "an arm of large sizes": lambda: (by_size(300, "Neg"), by_size(300, "Abs")),
    "a dropped NaN guard": lambda: (guard(False), guard(True)),
    "a guard behind a product": lambda: (
        guard(False, "h = MatMul(x, w)", "y = Relu(g)"), guard(True, "h = MatMul(x, w)", "y = Relu(g)"),
    ),
    "only the first 128 steps kept": lambda: (kept(None), kept(128)),
    "only the first 128 of every other step": lambda: (kept(None, 2), kept(128, 2)),
    "int64 through int32": lambda: (ids(False), ids(True)),
    "uint32 through int32 and float": lambda: (
        ids(False, "uint32"),
        model("g (uint32[n] x) => (int64[n] y) { f = Cast<to=1>(x)\n y = Cast<to=7>(f) }"),
    ),
    "hashed ids through int32": lambda: (hashed(False), hashed(True)),
    "a crop that is wrong at multiples of 4": lambda: (crop(False), crop(True)),
    "a crop that is wrong at multiples of 37": lambda: (crop(False, 37), crop(True, 37)),
    "indices that count from the end": lambda: (wrapped(False), wrapped(True)),
    "a mask of zeros": lambda: (masked(False), masked(True)),
    "a loop of several steps": lambda: (loop("Mul(state, two)"), loop("Add(x, state)")),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_told_apart(name: str) -> None:
    a, b = PAIRS[name]()
    verification = verify(a, b)
    assert verification.status is Status.FAILED, verification.message()
    for right in (a, b):
        assert verify(right, right).verified


# --- sizes ---


def numbers_of(proto: onnx.ModelProto, *symbols: str) -> dict[str, set[int]]:
    graph = load(proto).graph
    return {symbol: set(item) for symbol, item in on_symbols(marks(graph), symbols).items()}


def test_numbers_are_taken_from_operators_and_shape_computations() -> None:
    conv = model(
        "g (float[n, 2, h, w] x) => (float[] y) { "
        "y = Conv<strides=[3, 1], dilations=[1, 5], pads=[2, 0, 2, 0]>(x, k) }",
        k=normal(2, 2, 7, 3),
    )
    result = numbers_of(conv, "n", "h", "w")
    assert {7, 3, 2} <= result["h"]
    assert 11 in result["w"]
    assert result["n"] == set()
    assert 37 in numbers_of(crop(False, 37), "n", "s")["s"]
    assert numbers_of(crop(False, 37), "n", "s")["n"] == set()
    assert 700 in numbers_of(kept(700), "n", "s")["s"]
    assert {1399, 1400, 1401} & numbers_of(kept(700, 2), "n", "s")["s"], "carried back through the stride"
    pooled = model(
        "g (float[n, 1, s] x) => (float[] y) { y = MaxPool<kernel_shape=[6], strides=[6], ceil_mode=1>(x) }"
    )
    assert {6, 7} & numbers_of(pooled, "n", "s")["s"]
    positions = model(
        """g (float[n, s, 4] x) => (float[n, s, 4] y) {
          d = Shape<start=1, end=2>(x)
          q = Squeeze(d)
          r = Range(zero, q, one)
          p = Gather(table, r)
          y = Add(x, p) }""",
        zero=np.int64(0), one=np.int64(1), table=normal(77, 4),
    )  # fmt: skip
    assert 77 in numbers_of(positions, "n", "s")["s"]
    assert numbers_of(positions, "n", "s")["n"] == set()


def test_formulas_are_read_where_they_stand() -> None:
    """floor((s + 5) / 6) changes at 1, 7, 13, ..., and not at multiples of 6."""
    proto = model(
        """g (float[s] x) => (float[] y) {
          d = Shape(x)
          a = Add(d, five)
          q = Div(a, six)
          e = Expand(one, q)
          y = Relu(e) }""",
        five=np.int64([5]), six=np.int64([6]), one=np.float32([1]),
    )  # fmt: skip
    assert 7 in numbers_of(proto, "s")["s"]


def test_sizes_lie_around_the_numbers() -> None:
    tried = around({128: 4, 6: 4})
    assert {5, 6, 7, 127, 128, 129, 256, 257} <= {*tried}
    assert any(n % 6 == 0 and n > 6 for n in tried)
    assert {*tried[:2]} <= {6, 7, 128, 129, 127, 257, 256}
    assert around({}) == []
    assert around({4: 1, 1000: 16})[0] == 1001, "what tells most comes first"


def test_what_only_one_model_mentions_comes_first() -> None:
    many = "\n".join(f"a{i} = Slice(x, z, e{i}, o)\n m{i} = ReduceMax<keepdims=0>(a{i}, o)" for i in range(9))
    total = " ".join(f"t{i + 1} = Add(t{i}, m{i})" for i in range(9))
    ends = {f"e{i}": np.int64([40 + 9 * i]) for i in range(9)}

    def cut(last: str) -> onnx.ModelProto:
        head = "g (float[n, s] x) => (float[n] y) {\n t0 = ReduceMin<keepdims=0>(x, o)\n"
        kept = f"k = Slice(x, z, e, o)\n r = {last}<keepdims=0>(k, o)\n y = Add(t9, r) }}"
        return model(f"{head} {many}\n {total}\n {kept}", z=np.int64([0]), o=np.int64([1]), e=end, **ends)

    end = np.int64([9000])
    a = cut("ReduceSum")
    end = np.int64([137])
    b = cut("ReduceSum")
    assert not verify(a, b).verified
    tried = [bindings["s"] for bindings in Reference.of(a, against=b).bindings]
    assert {136, 137, 138} & {*tried[3:7]}, tried


def test_numbers_of_the_rules_come_after_those_of_the_models() -> None:
    proto = model(
        "g (float[n, s] x) => (float[n, t] y) { y = Slice(x, z, e, o) }",
        z=np.int64([0]), e=np.int64([40]), o=np.int64([1]),
    )  # fmt: skip
    tried = [b["s"] for b in Reference.of(proto, further=[300, 1, 2**31]).bindings]
    assert {299, 300, 301} <= {*tried}
    assert {39, 40, 41} <= {*tried[: tried.index(301)]}
    assert max(tried) <= 301, "what stands for no limit is no size"
    assert not {299, 300, 301} & {b["s"] for b in Reference.of(proto).bindings}


def test_numbers_of_the_applied_rules_are_sizes() -> None:
    """MergeMovement follows chains of so many operators, and through so many parts."""
    proto = model(
        """g (float[n, 3, s] x) => (float[n, s, 3] y) {
          i = Unsqueeze(x, one)
          a = Transpose<perm=[3, 1, 2, 0]>(i)
          j = Squeeze(a, one)
          b = Transpose<perm=[2, 0, 1]>(j)
          y = Relu(b) }""",
        one=np.int64([1]),
    )
    result = xrlflow.optimize(
        proto.SerializeToString(), search="greedy", cost=Roofline(), measure=False, max_growth=10.0
    )
    rules = [LIBRARY_BY_NAME[s.rule] for s in result.trace]
    numbers = {n for rule in rules for n in limits(integers_in_code(rule, types=False)) if n < 100}
    assert numbers
    (note,) = (note for note in result.report.notes if note.startswith("verified with"))
    for number in numbers:
        assert all(f"s={n}" in note for n in (number - 1, number, number + 1)), (number, note)


def test_what_is_too_large_is_named_and_not_run() -> None:
    assert not Estimate(0.1, 1e6, 1e6).too_large
    assert "GB" in Estimate(0.1, 1e12, 1e6).too_large
    head = "g (float[n, s] x) => (float[n, t] y) {"
    table = "t = Transpose(x)\n p = MatMul(t, x)\n q = ReduceMax<keepdims=0>(p, z)\n"
    proto = model(
        f"{head} {table} c = Slice(x, z, e, o)\n y = Add(c, q) }}",
        z=np.int64([0]),
        e=np.int64([480000]),
        o=np.int64([1]),
    )
    verification = verify(proto, proto)
    assert verification.verified
    assert any(text.startswith("n=") and "GB" in text for text in verification.left_out)
    assert max(b["s"] for b in verification.bindings) < 480000
    cheap = model(
        "g (float[s] x) => (float[t] y) { y = Slice(x, z, e) }", z=np.int64([0]), e=np.int64([480000])
    )
    assert max(b["s"] for b in verify(cheap, cheap).bindings) > 480000


def test_a_size_of_zero_is_compared() -> None:
    a = model("g (float[n, s] x) => (float[n, t] y) { y = Reshape(x, d) }", d=np.int64([0, -1]))
    b = model("g (float[n, s] x) => (float[n, t] y) { y = Relu(x) }")
    same = model("g (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }")
    assert any(0 in bindings.values() for bindings in verify(same, same).bindings)
    one = """g (float[n, 3] x) => (float[n, 3] y) {{
          r = Relu(x)
          d = Shape<start=0, end=1>(x)
          m = Max(d, one)
          {} }}"""
    constants = {
        "one": np.int64([1]),
        "zero": np.int64([0]),
        "zeros": np.int64([0, 0]),
    }
    longer = "l = Sub(m, d)\n p = Concat<axis=0>(zeros, l, zero)\n y = Pad(r, p)"
    failing = "k = Gather(r, zero)\n e = Slice(k, zero, zero)\n y = Concat<axis=0>(r, e)"
    other, fails = (model(one.format(body), **constants) for body in (longer, failing))
    reference = Reference.of(same, against=other)
    assert not reference.check(other).verified
    tolerated = reference.check(other, ["FuseAttention"])
    assert tolerated.verified
    assert any("where a dimension is 0 (FuseAttention needs sizes from 1)" in n for n in tolerated.notes)
    refused = reference.check(fails, ["FuseAttention"])
    assert "the new model fails on n=0" in refused.message(), "whatever a rule says: the original runs there"
    assert verify(a, a).verified
    assert not verify(a, b).verified, "where the original runs"


@faulty
def test_what_the_runtime_leaves_undefined_is_not_compared() -> None:
    """ONNX Runtime's reductions of the last axis keep an empty tensor's shape; some of its products leave memory."""
    mean = model(
        "g (float[n, 2, 5] x) => (float[n, 2] y) { y = ReduceMean<keepdims=0>(x, a) }", a=np.int64([-1])
    )
    product = model("g (float[1, 2, k] x, float[4, 1, k, 3] z) => (float[] y) { y = MatMul(x, z) }")
    for proto, words in ((mean, "the shape [0, 2, 5], its operators give [0, 2]"), (product, "other values")):
        verification = verify(proto, proto)
        assert verification.verified, verification.message()
        assert any("not compared on" in note and words in note for note in verification.notes), (
            verification.notes
        )
        assert not any(0 in bindings.values() for bindings in verification.bindings)
    total = model("g (float[n, 4] x) => (float[4] y) { y = ReduceSum<keepdims=0>(x, a) }", a=np.int64([0]))
    assert any(0 in bindings.values() for bindings in verify(total, total).bindings)


@faulty
def test_what_fails_without_elements_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of ONNX Runtime does not take an empty batch on its right, whatever the rule says of itself."""
    proto = model(
        "g (float[n, 8, 5, 5] x) => (float[n, 4, 5, 5] y) { y = Conv(x, w) }", w=normal(4, 8, 1, 1)
    ).SerializeToString()
    only = {"search": "greedy", "cost": _Without("Conv"), "measure": False}
    result = xrlflow.optimize(proto, **only)  # type: ignore[arg-type]
    assert "ReplacePointwiseConvByMatMul" not in {s.rule for s in result.trace}
    assumed = xrlflow.optimize(proto, assuming=["nonempty"], **only)  # type: ignore[arg-type]
    assert "ReplacePointwiseConvByMatMul" in {s.rule for s in assumed.trace}
    monkeypatch.setattr("xrlflow.rewrite.state.NEEDING", frozenset())
    taken_back = xrlflow.optimize(proto, **only)  # type: ignore[arg-type]
    assert "ReplacePointwiseConvByMatMul" not in {s.rule for s in taken_back.trace}
    (note,) = (n for n in taken_back.report.notes if "ReplacePointwiseConvByMatMul was taken back" in n)
    assert "n=0" in note


class _Without(Roofline):
    """Prefers graphs without an operator."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self._op = op

    def price(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        return 1.0 if node.op == self._op else 0.01


def _end(*of: object) -> None:
    os._exit(3)


def test_a_run_that_ends_its_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = model("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    feeds = {"x": np.ones(2, np.float32)}
    with monkeypatch.context() as patched:
        patched.setattr(isolated, "_run", _end)
        with pytest.raises(BackendError, match="ends the process"):
            isolated.run_isolated(proto, feeds)
    assert isolated.run_isolated(proto, feeds)[0].tolist() == [1, 1], "the next run has a process of its own"


# --- values ---


def test_thresholds_are_what_values_are_compared_with() -> None:
    proto = model(
        "g (float[n] x) => (bool[n] y) { c = Clip(x, a, b)\n m = Mul(c, k)\n y = Less(m, t) }",
        a=np.float32(-3), b=np.float32(900), k=np.float32(17), t=np.float32(-3.4e38),
    )  # fmt: skip
    assert thresholds(load(proto).graph) == {3.0, 900.0}


def test_what_sizes_or_divides_gets_ordinary_values_only() -> None:
    proto = model(
        """g (int64[1] size, int64[n] divisor, int64[n] x, int64 trips, int64[n] free) => (float[] y, int64[n] q) {
          z = ConstantOfShape(size)
          h = Sub(free, free)
          go = Constant<value = bool {1}>()
          s = Loop(trips, go, h) <
            body = l (int64 k, bool before, int64[n] state) => (bool after, int64[n] next) {
              after = Identity(before)
              next = Add(state, k) }
          >
          m = Add(x, s)
          d = Mul(divisor, divisor)
          q = Div(m, d)
          y = Relu(z) }"""
    )
    demands = InputPlan.of(load(proto)).demands
    assert {name for name, demand in demands.items() if demand.steers} == {"size", "divisor", "trips"}
    for known in Reference.of(proto).cases:
        assert int(known.case.feeds["size"][0]) <= 8
        assert int(known.case.feeds["trips"]) <= 8
        assert known.case.feeds["divisor"].min() >= 0
    assert any(abs(int(k.case.feeds["free"].max())) > 2**32 for k in Reference.of(proto).cases)


def test_indices_outside_their_table_are_tried_where_the_original_allows_them() -> None:
    plain = model("g (int64[n] ids) => (float[n, 3] y) { y = Gather(t, ids) }", t=normal(6, 3))
    assert all(-6 <= i < 6 for k in Reference.of(plain).cases for i in k.case.feeds["ids"])
    assert any(i < 0 for k in Reference.of(plain).cases for i in k.case.feeds["ids"])
    limited = model(
        "g (int64[n] ids) => (float[n, 3] y) { c = Clip(ids, a, b)\n y = Gather(t, c) }",
        t=normal(6, 3), a=np.int64(0), b=np.int64(5),
    )  # fmt: skip
    assert any(i > 5 for k in Reference.of(limited).cases for i in k.case.feeds["ids"])


def test_large_values_that_leave_nothing_are_drawn_smaller() -> None:
    exp = model("g (float[n, 4] x) => (float[n, 4] y) { y = Exp(x) }")
    values = Reference.of(exp).cases
    names = {k.case.values.name for k in values}
    assert "values of 1000" not in names
    assert "values of 31.25" in names


def test_an_error_on_unusual_values_is_judged_by_more_of_the_originals_own() -> None:
    """Values of a thousand in a product that cancels: neighbouring floats give other results."""
    y = np.float32([1.0, 2.0, 3.0])
    new = y + np.float32(1e-3)
    assert not judge_floats(Target(Criterion.FLOAT64, y, y.astype(np.float64)), new).passed
    moved = Target(Criterion.FLOAT64, y, y.astype(np.float64), noise=np.full(3, 5e-4))
    assert judge_floats(moved, new).passed
    assert not judge_floats(moved, y + np.float32(1e-2)).passed


# --- what is not finite ---


def fate_of(proto: onnx.ModelProto, x: np.ndarray) -> tuple[Fate, ...]:
    imported = load(proto)
    feeds = evaluable_feeds(imported, {"x": x})
    assert feeds is not None
    return fates(imported.graph, feeds, {"n": len(x)})


POISONED = np.float32([[np.nan, 1, 2, 3], [np.inf, 1, 2, 3], [4, 5, 6, 7]])
WHERE = "i = IsNaN(h)\n y = Where(i, z, h)"


@pytest.mark.parametrize(
    ("text", "x", "fate"),
    [
        ("y = Transpose<perm=[0, 1]>(x)", POISONED, Fate.EXACT),
        ("y = Add(x, x)", POISONED, Fate.SPREADS),
        ("y = Add(x, x)", POISONED[[0, 2]], Fate.EXACT),
        ("y = MatMul(x, w)", POISONED, Fate.SPREADS),
        ("h = MatMul(x, w)\n y = Relu(h)", POISONED, Fate.UNDEFINED),
        ("y = Relu(x)", POISONED, Fate.UNDEFINED),
        ("y = Relu(x)", POISONED[1:], Fate.EXACT),
        (f"h = Identity(x)\n {WHERE}", POISONED, Fate.EXACT),
        (f"h = MatMul(x, w)\n {WHERE}", POISONED, Fate.UNDEFINED),
        (f"h = MatMul(x, w)\n {WHERE}", np.full((2, 4), np.nan, np.float32), Fate.EXACT),
        (
            f"h = Identity(x)\n {WHERE.replace('y', 'g')}\n m = MatMul(g, w)\n y = Relu(m)",
            POISONED[[0, 2]],
            Fate.EXACT,
        ),
    ],
)
def test_fates(text: str, x: np.ndarray, fate: Fate) -> None:
    proto = model(f"g (float[n, 4] x) => (float[n, 4] y) {{ {text} }}", w=normal(4, 4), z=np.float32(0))
    assert fate_of(proto, x) == (fate,)


def test_what_rules_may_do_to_nan_is_allowed_and_no_more() -> None:
    a = np.float32([1, np.nan, np.inf, 2])
    yardstick = by_deviation(a, None)
    spread = np.float32([np.nan, np.inf, np.nan, 2])
    assert judge_floats(yardstick, spread, Exemption.SPREADS).passed
    assert not judge_floats(yardstick, np.float32([1, 0, 0, 3]), Exemption.SPREADS).passed, (
        "never another number"
    )
    mended = np.float32([1, 5, 5, 2])
    assert judge_floats(yardstick, mended, Exemption.MENDS).passed
    assert not judge_floats(yardstick, spread, Exemption.MENDS).passed
    assert not judge_floats(yardstick, mended).passed


# --- branches ---


def nested() -> onnx.ModelProto:
    """An If in a Loop in an If: the outer one by x, the inner one by the step."""
    return model(
        """g (float[4] x, int64 trips) => (float[4] y) {
          k = Constant<value = float {10.0}>()
          m = ReduceMax<keepdims=0>(x)
          c = Greater(m, k)
          y = If(c) <
            then_branch = t () => (float[4] a) {
              go = Constant<value = bool {1}>()
              a = Loop(trips, go, x) <
                body = l (int64 i, bool before, float[4] state) => (bool after, float[4] next) {
                  after = Identity(before)
                  one = Constant<value = int64 {1}>()
                  d = Less(i, one)
                  next = If(d) <
                    then_branch = tt () => (float[4] p) { p = Neg(state) },
                    else_branch = ee () => (float[4] q) { q = Add(state, state) }
                  > }
              > },
            else_branch = e () => (float[4] b) { b = Identity(x) }
          > }"""
    )


def counted(x: float, trips: int) -> dict[str, int]:
    proto, result = instrumented(nested())
    with opened(proto) as runner:
        counts = runner.run({"x": np.full(4, x, np.float32), "trips": np.asarray(trips)})
    return {str(arm): int(n) for arm, n in zip(result, counts)}


def test_branches_are_counted_in_bodies_too() -> None:
    outside = counted(0, 3)
    assert outside["If y, then"] == 0
    assert outside["If y, else"] == 1
    assert not any(n for name, n in outside.items() if name != "If y, else")
    assert counted(20, 0)["Loop a, no steps"] == 1
    assert counted(20, 1)["Loop a, one step"] == 1
    three = counted(20, 3)
    assert (three["If next, then"], three["If next, else"], three["Loop a, several steps"]) == (1, 2, 1)


def test_scans_hand_counters_on() -> None:
    proto = model(
        """g (float[s, 2] x) => (float[2] y, float[s, 2] z) {
          zero = Constant<value = float[2] {0.0, 0.0}>()
          y, z = Scan(zero, x) <
            num_scan_inputs = 1,
            body = b (float[2] state, float[2] row) => (float[2] next, float[2] out) {
              m = ReduceMax<keepdims=0>(row)
              k = Constant<value = float {10.0}>()
              c = Greater(m, k)
              out = If(c) <
                then_branch = t () => (float[2] p) { p = Neg(row) },
                else_branch = e () => (float[2] q) { q = Identity(row) }
              >
              next = Add(state, row) }
          > }"""
    )
    with watched(proto) as watch:
        assert watch.run({"x": np.float32([[1, 2], [20, 0], [3, 3]])})
        assert watch.missing == []
        counts = watch.runner.run({"x": np.float32([[1, 2], [20, 0], [3, 3]])})
    assert [int(n) for n in counts] == [1, 2]


def test_branches_that_no_time_was_left_for_are_not_said_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*given: object, **named: object) -> None:
        raise OutOfTime("loading was ended")

    monkeypatch.setattr(exercise, "watched", ended)
    assert "not exercised: any branch: there was no time" in verify(nested(), nested()).notes


def test_every_branch_is_sought_and_what_is_not_reached_is_named() -> None:
    verification = verify(nested(), nested())
    assert verification.unexercised == ()
    never = arms("Neg", np.inf)
    verification = verify(never, never)
    assert verification.verified
    assert verification.unexercised == ("If y, then",)
    assert "not exercised: If y, then" in verification.notes
    assert verification.to_json()["unexercised"] == ["If y, then"]


def test_optimize_says_what_was_verified() -> None:
    proto = model("g (float[n, 4] x) => (float[n, 4] y) { a = Neg(x)\n b = Neg(a)\n y = Relu(b) }")
    notes = xrlflow.optimize(proto, cost=Roofline(), search="greedy", measure=False).report.notes
    assert any(note.startswith("verified with n=2; n=3; ") for note in notes)


def test_a_loop_that_does_not_end_is_stopped() -> None:
    proto = model(
        """g (float[2] x) => (float[2] y) {
          most = Constant<value = int64 {9000000000000}>()
          go = Constant<value = bool {1}>()
          y = Loop(most, go, x) <
            body = l (int64 k, bool before, float[2] state) => (bool after, float[2] next) {
              after = Identity(before)
              next = Neg(state) }
          > }"""
    )
    with opened(proto) as runner, pytest.raises(BackendError):
        runner.run({"x": np.zeros(2, np.float32)}, limit=0.3)


PRODUCTS = """<ir_version: 9, opset_import: ["" : 20]>
    g (float[n,256] x, float[256,1] w) => (float[a,b] y) <int64[1] e = {-3}, int64[1] s = {0}> {
        k = KEPT
        t = Transpose <perm = [1, 0]> (k) p = MatMul (t, k) y = MatMul (p, w)
    }"""


@pytest.mark.parametrize(("kept", "applied"), [("Slice (x, s, e, s)", 0), ("Identity (x)", 1)])
def test_a_rule_that_needs_sizes_from_1_looks_at_what_is_left(kept: str, applied: int) -> None:
    """Of three rows nothing is left, and a NaN of w is lost in a product with nothing."""
    proto = onnx.parser.parse_model(PRODUCTS.replace("KEPT", kept))
    result = xrlflow.optimize(proto, search="greedy", cost=Roofline(), measure=False)
    assert result.report.substitutions["AssociateMatMulsRight"] == applied


def test_sizes_that_crash_the_runtime_are_left_out() -> None:
    """Where windows are larger than images, kernels of ONNX Runtime divide by zero and would end this process."""
    proto = squeezenet(8, 0, width=16, image=64)
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    assert verify(proto, proto).verified


def test_each_body_in_a_body_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "y0 = Relu(x)"
    for k in range(12):
        body = f"""y{k + 1} = If(c) <
            then_branch = t{k} () => (float[n] y{k}) {{ {body} }},
            else_branch = e{k} () => (float[n] z{k}) {{ z{k} = Neg(x) }}
          >"""
    graph = load(model(f"g (float[n] x, bool c) => (float[n] y12) {{ {body} }}")).graph
    seen: list[Node] = []

    def decides(graph: Graph, node: Node, position: int) -> bool:
        seen.append(node)
        return False

    monkeypatch.setattr("xrlflow.verify.input_constraints._decides", decides)
    for value in graph.inputs:
        input_constraints(graph, value)
    assert 24 <= len(seen) < 100  # it was 2 to the power of the depth

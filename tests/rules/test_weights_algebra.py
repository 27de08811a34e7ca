"""Weights multiplied out when the model is written."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules import weights_algebra
from rewrite_rules.weights_algebra import (
    FoldAffineIntoReaders,
    FoldBiasIntoNormalization,
    FoldGemmIntoGemm,
    FoldScaleIntoNormalization,
    FoldScaleOfPartIntoMatMul,
    MergeBatchNormalizations,
    MergeConstantsOfSum,
    MoveConstantBehindMean,
    MoveScaleIntoMatMul,
    MoveScaleOutOfMatMul,
    PushBatchNormalizationIntoConcat,
    PushGatherThroughFunction,
    PushGatherThroughMatMul,
    ReplaceOneHotByGather,
    SplitBatchNormalization,
)
from tests.rules.harness import applies, model, refuses
from xrlflow.rewrite import declared_in

EXAMPLES = [(r, e) for r in declared_in(weights_algebra) for e in r.examples]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("rule", "example"), EXAMPLES, ids=lambda v: getattr(v, "name", ""))
def test_examples(rule, example):
    proto = model(example)
    if any(i.name == "i" for i in proto.graph.input):
        after_indices(rule, proto)
    else:
        applies(rule, proto)


def after_indices(rule, proto):
    """Both sides at indices within a table of three rows."""
    from tests.rules.harness import assert_equivalent, random_feeds, rewritten

    after, _ = rewritten(rule, proto)
    feeds = {k: v % 3 for k, v in random_feeds(proto).items()}
    assert_equivalent(proto, after, feeds)


@pytest.mark.parametrize("index", ["", "N", "N,5"])
def test_table_times_matrix(index):
    out = f"{index},2" if index else "2"
    source = f"agraph (int64[{index}] i) => (float[{out}] y) {{ g = Gather(t, i) y = MatMul(g, w) }}"
    applies(PushGatherThroughMatMul(), model(source, t=normal(6, 3), w=normal(3, 2)), ops=["Gather"])
    other = source.replace("Gather(", "Gather<axis=1>(").replace("MatMul(g, w)", "MatMul(w, g)")
    refuses(PushGatherThroughMatMul(), model(other, t=normal(3, 6), w=normal(2, 3)))


def test_large_tables_stay():
    source = "agraph (int64[N] i) => (float[N,9000] y) { g = Gather(t, i) y = MatMul(g, w) }"
    refuses(PushGatherThroughMatMul(), model(source, t=normal(9000, 2), w=normal(2, 9000)), "large")


def test_tables_up_to_so_many_bytes(monkeypatch):
    source = "agraph (int64[N] i) => (float[N,2] y) { g = Gather(t, i) y = MatMul(g, w) }"
    proto = model(source, t=normal(6, 3), w=normal(3, 2))
    monkeypatch.setattr(weights_algebra, "_BYTES", 6 * 2 * 4)
    applies(PushGatherThroughMatMul(), proto, ops=["Gather"])
    monkeypatch.setattr(weights_algebra, "_BYTES", 6 * 2 * 4 - 1)
    refuses(PushGatherThroughMatMul(), proto, "large")


def test_functions_of_rows():
    source = "agraph (int64[N,5] i) => (float[N,5,{}] y) {{ g = Gather(t, i) {} }}"
    rule, table = PushGatherThroughFunction(), normal(6, 3)
    applies(rule, model(source.format(3, "y = Gelu(g)"), t=table), ops=["Gather"])
    applies(rule, model(source.format(3, "y = Sub(c, g)"), t=table, c=normal(1, 1, 3)), ops=["Gather"])
    for one in ((), (1,), (1, 1)):
        applies(rule, model(source.format(3, "y = Sub(c, g)"), t=table, c=normal(*one)), ops=["Gather"])
    applies(rule, model(source.format(3, "y = Clip(g, , h)"), t=table, h=np.float32(0.5)), ops=["Gather"])
    refuses(rule, model(source.format(3, "y = Add(g, c)"), t=table, c=normal(5, 3)), "per column")
    refuses(rule, model(source.format(3, "y = Softmax<axis=1>(g)"), t=table), "not the last")
    both = source.format(3, "a = Relu(g) b = Tanh(g) y = Add(a, b)")
    refuses(rule, model(both, t=table), "read elsewhere")
    cube = "agraph (int64[N] i) => (float[N,2,3] y) { g = Gather(t, i) y = Relu(g) }"
    refuses(rule, model(cube, t=normal(6, 2, 3)), "no table")


def one_hot(numbers, dtype="int64", weight=None):
    source = (
        f"agraph ({dtype}[N,5,1] i) => (float[N,5,2] y) {{ e = Equal(i, r) h = Cast<to=1>(e) y = "
        f"MatMul(h, w) }}"
    )
    return model(
        source, r=np.asarray(numbers, dtype), w=normal(len(numbers), 2) if weight is None else weight
    )


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_one_hot(dtype):
    # The drawn indices reach from 0 to 3: one is out of range.
    applies(ReplaceOneHotByGather(), one_hot([0, 1, 2], dtype), ops=_ONE_HOT)
    applies(ReplaceOneHotByGather(), one_hot(range(5), dtype), ops=_ONE_HOT)
    refuses(ReplaceOneHotByGather(), one_hot([0, 2, 1], dtype), "from 0")
    refuses(ReplaceOneHotByGather(), one_hot([1, 2, 3], dtype), "from 0")
    source = (
        f"agraph ({dtype}[N,3] i) => (float[N,2] y) {{ e = Equal(i, r) h = Cast<to=1>(e) y = MatMul(h, w) }}"
    )
    refuses(
        ReplaceOneHotByGather(), model(source, r=np.arange(3).astype(dtype), w=normal(3, 2)), "not one number"
    )


def test_one_hot_of_one_row():
    """The numbers may be a single one, without dimensions too."""
    source = "agraph (int64[4,1] i) => (float[4,2] y) { e = Equal(i, r) h = Cast<to=1>(e) y = MatMul(h, w) }"
    for shape in ((), (1,), (1, 1)):
        proto = model(source, r=np.zeros(shape, np.int64), w=normal(1, 2))
        applies(ReplaceOneHotByGather(), proto, ops=_ONE_HOT)
        refuses(ReplaceOneHotByGather(), model(source, r=np.ones(shape, np.int64), w=normal(1, 2)), "from 0")


_ONE_HOT = ["And", "Gather", "GreaterOrEqual", "Less", "Squeeze", "Where"]


@pytest.mark.parametrize("u", [0, 1])
@pytest.mark.parametrize("t", [0, 1])
def test_gemms(t, u):
    source = (
        f"agraph (float[N,3] x) => (float[N,5] y) {{{{ a = Gemm<transB={t}>({{}}) y = "
        f"Gemm<transB={u}>(a, w{{}}) }}}}"
    )
    given = {"v": normal(4, 3) if t else normal(3, 4), "w": normal(5, 4) if u else normal(4, 5)}
    for first, second in (("x, v", ""), ("x, v, b", ""), ("x, v", ", c"), ("x, v, b", ", c")):
        biases = ({"b": normal(4)} if "b" in first else {}) | ({"c": normal(1, 5)} if second else {})
        applies(FoldGemmIntoGemm(), model(source.format(first, second), **given, **biases), ops=["Gemm"])


def test_gemms_that_would_take_long(monkeypatch):
    """So many products of the first weights with a column, or a row, of the second."""
    source = "agraph (float[N,3] x) => (float[N,5] y) { a = Gemm(x, v) y = Gemm(a, w) }"
    proto = model(source, v=normal(3, 4), w=normal(4, 5))
    monkeypatch.setattr(weights_algebra, "_WORK", 3 * 4 * 5)
    applies(FoldGemmIntoGemm(), proto, ops=["Gemm"])
    monkeypatch.setattr(weights_algebra, "_WORK", 3 * 4 * 5 - 1)
    refuses(FoldGemmIntoGemm(), proto, "take long")


@pytest.mark.parametrize("shape", ["4,3", "5,4,3"])
def test_affine_part_for_weights_that_change_or_are_no_matrix(shape):
    source = "agraph (float[5,5,4] x{}) => (float[] y) {{ n = LayerNormalization(x, s, b) y = MatMul(n, w) }}"
    given = {"s": normal(4), "b": normal(4, seed=1)}
    changing = model(source.format(f", float[{shape}] w"), **given)
    refuses(FoldAffineIntoReaders(), changing, "no constant matrix")
    if shape != "4,3":
        refuses(FoldAffineIntoReaders(), model(source.format(""), **given, w=normal(5, 4, 3)), "no constant")


def test_affine_part():
    rule = FoldAffineIntoReaders()
    source = (
        "agraph (float[N,5,4] x) => ({}) {{ n = LayerNormalization{}(x, s, b) p = MatMul(n, w) q = "
        "MatMul(n, v) }}"
    )
    given = {"s": normal(4), "b": normal(4, seed=1), "w": normal(4, 3), "v": normal(4, 2)}
    two = source.format("float[N,5,3] p, float[N,5,2] q", "")
    applies(rule, model(two, **given), ops=["Add", "Add", "LayerNormalization", "MatMul", "MatMul"])
    refuses(rule, model(source.format("float[N,5,3] p, float[N,5,2] q, float[N,5,4] n", ""), **given))
    relu = two.replace("q = MatMul(n, v)", "q = Relu(n)").replace("[N,5,2] q", "[N,5,4] q")
    del given["v"]
    refuses(rule, model(relu, **given))
    left = two.replace("q = MatMul(n, v)", "q = MatMul(v, n)").replace("[N,5,2] q", "[N,2,4] q")
    refuses(rule, model(left, **given, v=normal(2, 5)), "as a weight")


def test_scale_and_bias_of_a_normalisation():
    source = "agraph (float[N,5,4] x) => (float[N,5,4] y) {{ n = LayerNormalization({}) y = {}(n, c) }}"
    given = {"s": normal(4), "c": normal(4, seed=2)}
    for rule, op in ((FoldScaleIntoNormalization(), "Mul"), (FoldBiasIntoNormalization(), "Add")):
        applies(rule, model(source.format("x, s", op), **given), ops=["LayerNormalization"])
        applies(rule, model(source.format("x, s, b", op), **given, b=normal(4)), ops=["LayerNormalization"])
        single = given | {"c": normal(1)}
        applies(rule, model(source.format("x, s", op), **single), ops=["LayerNormalization"])
        refuses(rule, model(source.format("x, s", op), **given | {"c": normal(5, 1)}))


def test_scale_of_a_product():
    source = "agraph (float[N,3,4] x, float[N,4,5] z) => (float[N,3,5] y) {{ {} }}"
    into = source.format("p = MatMul(x, z) y = Mul(p, s)")
    out = source.format("p = Mul(z, s) y = MatMul(x, p)")
    half = np.float32(0.5)
    applies(MoveScaleIntoMatMul(), model(into, s=half), ops=["MatMul", "Mul"])
    applies(MoveScaleOutOfMatMul(), model(out, s=half), ops=["MatMul", "Mul"])
    refuses(MoveScaleIntoMatMul(), model(into, s=normal(5)))
    refuses(MoveScaleOutOfMatMul(), model(out, s=normal(5)))
    constant = "agraph (float[N,3,4] x) => (float[N,3,5] y) { p = MatMul(x, z) y = Mul(p, s) }"
    refuses(MoveScaleIntoMatMul(), model(constant, s=half, z=normal(4, 5)), "constant")


@pytest.mark.parametrize("bias", ["", "q = Add(c, p)"])
def test_scale_of_a_part(bias):
    split = f"Split<axis=-1>({'q' if bias else 'p'}, k)"
    source = (
        f"agraph (float[N,3,4] x) => (float[N,3,2] d, float[N,3,2] y) "
        f"{{ p = MatMul(x, w) {bias} d, e = {split} y = Mul(e, s) }}"
    )
    given = {"w": normal(4, 4), "s": np.float32(0.5), "k": np.array([2, 2])} | (
        {"c": normal(4)} if bias else {}
    )
    ops = ["Add", "MatMul", "Split"] if bias else ["MatMul", "Split"]
    applies(FoldScaleOfPartIntoMatMul(), model(source, **given), ops=ops)
    refuses(FoldScaleOfPartIntoMatMul(), model(source, **given | {"s": normal(2)}))
    rows = (
        source.replace("axis=-1", "axis=1")
        .replace("[N,3,2] d", "[N,1,4] d")
        .replace("[N,3,2] y", "[N,2,4] y")
    )
    refuses(FoldScaleOfPartIntoMatMul(), model(rows, **given | {"k": np.array([1, 2])}), "columns")


@pytest.mark.parametrize("op", ["Mul", "Add"])
def test_constants_behind_means(op):
    rule, channel = MoveConstantBehindMean(), normal(3, 1, 1)
    source = "agraph (float[N,3,4,4] x) => (float[] y) {{ m = {}(c, x) y = {}(m{}) }}"
    for mean in ("GlobalAveragePool", "AveragePool<kernel_shape=[2,3], pads=[1,1,0,0]>"):
        applies(rule, model(source.format(op, mean, ""), c=channel), ops=[op, mean.partition("<")[0]])
    for keep in (0, 1):
        mean = f"ReduceMean<keepdims={keep}>"
        applies(
            rule,
            model(source.format(op, mean, ", i"), c=channel, i=np.array([2, -1])),
            ops=[op, "ReduceMean"],
        )
        refuses(rule, model(source.format(op, mean, ", i"), c=channel, i=np.array([1])), "differs")
    for shape in ((3, 4, 1), (3, 1, 4)):
        refuses(rule, model(source.format(op, "GlobalAveragePool", ""), c=normal(*shape)), "differs")
    counted = "AveragePool<kernel_shape=[2,2], pads=[1,1,0,0], count_include_pad=1>"
    total = source.format(op, "ReduceSum", ", i")
    if op == "Add":
        refuses(rule, model(source.format(op, counted, ""), c=channel), "counted")
        refuses(rule, model(total, c=channel, i=np.array([2])))
    else:
        applies(rule, model(source.format(op, counted, ""), c=channel), ops=["AveragePool", "Mul"])
        applies(rule, model(total, c=channel, i=np.array([2])), ops=["Mul", "ReduceSum"])


def test_constants_of_sums():
    source = (
        "agraph (float[N,3] x, float[N,3] z) => (float[N,3] y) { a = Add(x, c) b = Add(d, z) y = Add(a, b) }"
    )
    applies(MergeConstantsOfSum(), model(source, c=normal(3), d=normal(1)), ops=["Add", "Add"])
    wide = source.replace("N,3", "2,3")
    refuses(MergeConstantsOfSum(), model(wide, c=normal(3), d=normal(2, 1)), "larger")


def statistics(channels: int, seed: int = 0, suffix: str = "") -> dict[str, np.ndarray]:
    values = {f"{n}{suffix}": normal(channels, seed=seed + i) for i, n in enumerate(("s", "b", "m"))}
    return values | {f"v{suffix}": np.abs(normal(channels, seed=seed + 3)) + np.float32(0.1)}


BATCH_NORM = "BatchNormalization<epsilon=0.01>({0}, s{1}, b{1}, m{1}, v{1})"


@pytest.mark.parametrize("x", ["N,3", "N,3,4", "N,3,4,4"])
def test_batch_normalization(x):
    source = f"agraph (float[{x}] x) => (float[{x}] y) {{{{ {{}} }}}}"
    single = source.format(f"y = {BATCH_NORM.format('x', '')}")
    applies(SplitBatchNormalization(), model(single, **statistics(3)), ops=["Add", "Mul"])
    double = source.format(f"a = {BATCH_NORM.format('x', '')} y = {BATCH_NORM.format('a', 2)}")
    given = statistics(3) | statistics(3, 7, "2")
    applies(MergeBatchNormalizations(), model(double, **given), ops=["BatchNormalization"])


def test_batch_normalization_of_a_concat():
    rule = PushBatchNormalizationIntoConcat()
    source = (
        f"agraph (float[N,1,4] x, float[N,2,4] z) => (float[N,3,4] y) {{{{ a = Concat<axis={{}}>(x, z) y "
        f"= {BATCH_NORM.format('a', '')} }}}}"
    )
    applies(rule, model(source.format(1), **statistics(3)), ops=["BatchNormalization"] * 2 + ["Concat"])
    rows = (
        source.format(0)
        .replace("[N,1,4] x", "[2,3,4] x")
        .replace("[N,2,4] z", "[3,3,4] z")
        .replace("[N,3,4] y", "[5,3,4] y")
    )
    refuses(rule, model(rows, **statistics(3)), "channels")
    for training in ("y, q", "y, q, r"):
        node = BATCH_NORM.format("a", "").replace("<", "<training_mode=1, ")
        text = f"{source.format(1).partition(' y =')[0]} {training} = {node} }}"
        refuses(rule, model(text.replace("[N", "[2"), **statistics(3)))

"""ONNX Runtime's own operators."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import xrlflow
from rewrite_rules import microsoft
from rewrite_rules.microsoft import (
    FuseBiasedDynamicQuantizeMatMul,
    FuseBiasGelu,
    FuseDynamicQuantizeMatMul,
    FuseMatMulIntegerToFloat,
    FuseQuickGelu,
    FuseScaleIntoMatMul,
    FuseSiluIntoQuickGelu,
    FuseSkipLayerNormalization,
    FuseTransposedScale,
    FuseTransposeIntoLeftOfMatMul,
    FuseTransposeIntoRightOfMatMul,
    ReplaceAttentionByMultiHead,
    ReplaceRotaryEmbedding,
)
from tests.rules.harness import applies, model, numbers, refuses
from xrlflow.backends.onnxruntime.kernels import supports
from xrlflow.rewrite import Library, declared_in

MS = "com.microsoft::"


def test_only_when_allowed():
    assert not Library(declared_in(microsoft)).rules
    assert len(Library(declared_in(microsoft), contrib=True).rules) == len(declared_in(microsoft))
    assert not Library(declared_in(microsoft), backend="tvm", contrib=True).rules
    one = declared_in(microsoft)[0].name  # a part keeps what the whole was allowed
    assert list(Library(declared_in(microsoft), contrib=True).only({one}).rules) == [one]


def test_the_runtime_has_them():
    for op in ("FusedMatMul", "QuickGelu", "BiasGelu", "SkipLayerNormalization"):
        assert supports(op, "com.microsoft", ["float"])
    for op in ("MultiHeadAttention", "RotaryEmbedding", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"):
        assert supports(op, "com.microsoft", ["float"])


def test_transposed_operands():
    text = (
        "agraph (float[2,2,3,4] x, float[{}] z) => (float[] y) {{ t = Transpose<perm={}>(z) y = MatMul({}) }}"
    )
    right, left = FuseTransposeIntoRightOfMatMul(), FuseTransposeIntoLeftOfMatMul()
    applies(right, model(text.format("2,2,5,4", "[0,1,3,2]", "x, t")), ops=[MS + "FusedMatMul"])
    applies(right, model(text.format("2,5,2,4", "[0,2,3,1]", "x, t")), ops=["Transpose", MS + "FusedMatMul"])
    applies(right, model(text.format("5,4", "[1,0]", "x, t")), ops=[MS + "FusedMatMul"])
    refuses(right, model(text.format("2,4,2,5", "[0,2,1,3]", "x, t")), "stay together")
    applies(left, model(text.format("2,2,3,5", "[0,1,3,2]", "t, x")), ops=[MS + "FusedMatMul"])
    applies(left, model(text.format("3,5", "[1,0]", "t, x")), ops=[MS + "FusedMatMul"])
    refuses(left, model(text.format("2,5,2,3", "[0,2,1,3]", "t, x")), "stay together")


def test_scaled_products():
    text = "agraph (float[2,3,4] x, float[2,{}] z) => (float[] y) {{ {} y = Mul(m, c) }}"
    plain = "m = MatMul(x, z)"
    applies(
        FuseScaleIntoMatMul(), model(text.format("4,5", plain), c=np.float32(0.3)), ops=[MS + "FusedMatMul"]
    )
    refuses(FuseScaleIntoMatMul(), model(text.format("4,5", plain), c=numbers(5)))
    turned = "t = Transpose<perm=[0,2,1]>(z) m = MatMul(x, t)"
    applies(FuseTransposedScale(), model(text.format("5,4", turned), c=numbers(1)), ops=[MS + "FusedMatMul"])
    moved = "t = Transpose<perm=[1,2,0]>(z) m = MatMul(x, t)"
    batched = text.replace("float[2,{}]", "float[{}]")
    ops = ["Transpose", MS + "FusedMatMul"]
    applies(FuseTransposedScale(), model(batched.format("5,2,4", moved), c=numbers(1)), ops=ops)
    other = moved.replace("[1,2,0]", "[1,0,2]")
    refuses(FuseTransposedScale(), model(batched.format("4,2,5", other), c=numbers(1)), "stay together")


def test_gelus():
    text = "agraph (float[2,3,4] x) => (float[] y) {{ {} }}"
    sigmoid = "s = Mul(x, a) g = Sigmoid(s) y = Mul(g, x)"
    applies(FuseQuickGelu(), model(text.format(sigmoid), a=np.float32(1.702)), ops=[MS + "QuickGelu"])
    refuses(FuseQuickGelu(), model(text.format(sigmoid), a=numbers(4)))
    applies(
        FuseSiluIntoQuickGelu(), model(text.format("g = Sigmoid(x) y = Mul(x, g)")), ops=[MS + "QuickGelu"]
    )
    biased = "a = Add(x, b) y = Gelu{}(a)"
    b = numbers(4)
    applies(FuseBiasGelu(), model(text.format(biased.format("")), b=b), ops=[MS + "BiasGelu"])
    tanh = model(text.format(biased.format('<approximate="tanh">')), b=b)
    refuses(FuseBiasGelu(), tanh)
    refuses(FuseBiasGelu(), model(text.format(biased.format("")), b=numbers(1)))


def test_skip_layer_normalization():
    text = "agraph (float[2,3,4] x, float[{}] z) => (float[] y) {{ a = Add(x, z) y = LayerNormalization{}(a, s, t) }}"
    given = {"s": numbers(4), "t": numbers(4) + 1}
    rule = FuseSkipLayerNormalization()
    applies(rule, model(text.format("2,3,4", "<epsilon=0.01>"), **given), ops=[MS + "SkipLayerNormalization"])
    refuses(rule, model(text.format("4", ""), **given))
    wide = {"s": numbers(3, 4), "t": numbers(3, 4)}
    refuses(rule, model(text.format("2,3,4", "<axis=1>"), **wide))


def test_of_a_constant():
    """What the runtime's own operators give of a constant is not constant: they are not evaluated when written."""
    text = "agraph (float[4] b) => (float[] y) { a = Add(x, b) y = Gelu(a) }"
    graph = applies(FuseBiasGelu(), model(text, x=numbers(3, 4)))
    assert not any(n.const for n in graph.nodes())


HEADS = "a = Transpose<perm=[0,2,1,3]>(q) b = Transpose<perm=[0,2,1,3]>(k) c = Transpose<perm=[0,2,1,3]>(v)"


def attention(attrs="", mask="", back="[0,2,1,3]", heads=HEADS):
    extra = f", {mask} m" if mask else ""
    return model(
        f"agraph (float[2,3,2,4] q, float[2,5,2,4] k, float[2,5,2,4] v{extra}) => (float[] y) "
        f"{{ {heads} d = Attention{attrs}(a, b, c{', m' if mask else ''}) y = Transpose<perm={back}>(d) }}"
    )


@pytest.mark.parametrize("mask", ["", "float[2,2,3,5]", "float[1,3,5]", "float[3,5]"])
def test_multi_head_attention(mask):
    applies(ReplaceAttentionByMultiHead(), attention("<scale=0.3>", mask))
    applies(ReplaceAttentionByMultiHead(), attention("", mask))


def test_multi_head_attention_refuses():
    rule = ReplaceAttentionByMultiHead()
    refuses(rule, attention("<is_causal=1>"), "causal")
    refuses(rule, attention("", "bool[3,5]"), "not added")
    refuses(rule, attention("", back="[0,1,2,3]"), "go back")
    refuses(
        rule, attention("", heads=HEADS.replace("[0,2,1,3]>(v)", "[0,2,3,1]>(v)").replace("(q)", "(q)", 1))
    )


@pytest.mark.parametrize("mask", ["float[1,5]", "float[3,1]", "float[2,1,1,5]"])
def test_multi_head_attention_refuses_masks_that_repeat_rows_or_columns(mask):
    refuses(ReplaceAttentionByMultiHead(), attention("", mask), "does not fit")


@pytest.mark.parametrize(
    ("inputs", "call"),
    [
        ("", "d, m = Attention(a, b, c)"),
        ("", "d, m, n = Attention(a, b, c)"),
        (", float[2,2,1,4] m", "d = Attention(a, b, c, , m)"),
        (", float[2,2,1,4] m, float[2,2,1,4] n", "d = Attention(a, b, c, , m, n)"),
    ],
)
def test_multi_head_attention_refuses_other_keys(inputs, call):
    """Those of an earlier call, and those that are given out."""
    back = "y = Transpose<perm=[0,2,1,3]>(d)"
    shapes = f"float[2,3,2,4] q, float[2,5,2,4] k, float[2,5,2,4] v{inputs}"
    refuses(
        ReplaceAttentionByMultiHead(), model(f"agraph ({shapes}) => (float[] y) {{ {HEADS} {call} {back} }}")
    )


@pytest.mark.parametrize("shapes", ["3,H,4 5,H,4 5,H,4", "3,2,4 5,2,4 5,2,W", "3,2,4 5,2,4 5,2,0"])
def test_multi_head_attention_refuses_heads_that_are_not_known_or_empty(shapes):
    inputs = ", ".join(f"float[2,{s}] {name}" for s, name in zip(shapes.split(), "qkv"))
    calls = f"{HEADS} d = Attention(a, b, c) y = Transpose<perm=[0,2,1,3]>(d)"
    refuses(
        ReplaceAttentionByMultiHead(), model(f"agraph ({inputs}) => (float[] y) {{ {calls} }}"), "not known"
    )


def test_rotary_embedding_of_one_head():
    text = "agraph (float[{}] x, int64[2,4] p) => (float[] y) {{ y = RotaryEmbedding<{}>(x, c, s, p) }}"
    half = {"c": numbers(5, 2), "s": numbers(5, 2)}
    rule = ReplaceRotaryEmbedding()
    applies(rule, model(text.format("2,4,4", "num_heads=1"), **half), ops=[MS + "RotaryEmbedding"])
    refuses(rule, model(text.format("2,1,4,8", "rotary_embedding_dim=4"), **half), "number of heads")


def test_rotary_embedding():
    text = "agraph (float[2,3,4,8] x, int64[2,4] p) => (float[] y) {{ y = RotaryEmbedding{}(x, c, s, p) }}"
    wide = {"c": numbers(5, 4), "s": numbers(5, 4)}
    applies(ReplaceRotaryEmbedding(), model(text.format(""), **wide), ops=[MS + "RotaryEmbedding"])
    applies(
        ReplaceRotaryEmbedding(), model(text.format("<interleaved=1>"), **wide), ops=[MS + "RotaryEmbedding"]
    )


def product(zero="", columns=2, bias=False, dynamic=False):
    """An integer product, scaled to floats."""
    given = {"b": np.arange(-4, 4, dtype=np.int8).reshape(4, 2), "t": numbers(*[columns] if columns else [])}
    if zero:
        given["u"] = np.zeros(2 if zero == "columns" else (), np.int8)
    if bias:
        given["d"] = numbers(2)
    inputs = "float[N,3,4] x" if dynamic else "uint8[N,3,4] q, float s, uint8 z"
    quantised = "q, s, z = DynamicQuantizeLinear(x)" if dynamic else ""
    return model(
        f"agraph ({inputs}) => (float[] y) {{ {quantised} p = MatMulInteger(q, b, z{', u' if zero else ''}) "
        f"f = Cast<to=1>(p) c = Mul(s, t) {'e' if bias else 'y'} = Mul(f, c) {'y = Add(e, d)' if bias else ''} }}",
        **given,
    )


@pytest.mark.parametrize("columns", [0, 1, 2])
@pytest.mark.parametrize("zero", ["", "one"])
def test_integer_products(columns, zero):
    ops = [MS + "MatMulIntegerToFloat"]
    applies(FuseMatMulIntegerToFloat(), product(zero, columns), ops=ops)
    fused = [MS + "DynamicQuantizeMatMul"]
    applies(FuseDynamicQuantizeMatMul(), product(zero, columns, dynamic=True), ops=fused)
    biased = product(zero, columns, bias=True, dynamic=True)
    applies(FuseBiasedDynamicQuantizeMatMul(), biased, ops=fused)


def test_zero_points_of_columns():
    refuses(FuseMatMulIntegerToFloat(), product("columns"), "zero point")
    refuses(FuseDynamicQuantizeMatMul(), product("columns", dynamic=True))


def test_end_to_end():
    """They are written, verified and loaded when allowed, and not otherwise."""
    source = model(
        "agraph (float[N,6,2,8] x, float[N,6,2,8] z) => (float[N,2,6,6] y) "
        "{ q = Transpose<perm=[0,2,1,3]>(x) k = Transpose<perm=[0,2,3,1]>(z) m = MatMul(q, k) y = Mul(m, c) }",
        opset=17,
        c=np.float32(0.25),
    )
    del source.opset_import[1:]
    quick = {"search": "greedy", "cost": "roofline", "measure": False}
    allowed = xrlflow.optimize(source, backend_ops=True, **quick)
    assert allowed.verification is not None
    assert allowed.verification.verified
    proto = allowed.model
    onnx.checker.check_model(proto, full_check=True)
    assert {"FusedMatMul"} <= {n.op_type for n in proto.graph.node}
    assert {"", "com.microsoft"} == {o.domain for o in proto.opset_import}
    older = xrlflow.optimize(source, backend_ops=True, opset=17, **quick).model
    onnx.checker.check_model(older, full_check=True)
    assert {o.domain: o.version for o in older.opset_import} == {"": 17, "com.microsoft": 1}
    plain = xrlflow.optimize(source, **quick).model
    assert {n.domain for n in plain.graph.node} <= {""}

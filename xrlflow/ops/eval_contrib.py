"""Evaluation of ONNX Runtime's own operators (domain com.microsoft), as far as its optimiser or xrlflow's rules write
them.

Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from xrlflow.ir import Attrs, RawAttr
from xrlflow.ops.eval_attention import rotate
from xrlflow.ops.eval_elementwise import element
from xrlflow.ops.eval_linear import conv, gemm
from xrlflow.ops.eval_norm import layer_norm, rms_norm, softmax
from xrlflow.ops.eval_quant import Quantised, dynamic_quantize, integer_product
from xrlflow.ops.eval_spec import (
    Evaluate,
    Inputs,
    OpSpec,
    Proof,
    f32,
    integer,
    number,
    several,
    single,
    string,
)
from xrlflow.ops.field import Array, Field, NotEvaluable

_EPSILON = f32(1e-12)


def _gelu(field: Field, attrs: Attrs, x: Array, bias: Array | None = None) -> Array:
    return field.unary("gelu", x if bias is None else field.add(x, bias))


def _fast_gelu(field: Field, attrs: Attrs, x: Array, bias: Array | None = None) -> Array:
    return field.unary("gelu_tanh", x if bias is None else field.add(x, bias))


def _quick_gelu(field: Field, attrs: Attrs, x: Array) -> Array:
    alpha = field.constant(number(attrs, "alpha", f32(1.702)))
    return field.mul(x, field.unary("sigmoid", field.mul(x, alpha)))


def _activated(field: Field, attrs: Attrs, x: Array, parameters: tuple[float, ...] | None = None) -> Array:
    """Apply the activation at the end of a fused operator."""
    name = string(attrs, "activation", "")
    if parameters is None:
        numbers = attrs.get("activation_params", ())
        parameters = () if isinstance(numbers, RawAttr) else tuple(numbers)  # type: ignore[arg-type]
    if not name:
        return x
    if name in ("Relu", "Tanh", "Sigmoid"):
        return field.unary(name.lower(), x)
    if name == "LeakyRelu":
        return field.unary("leaky_relu", x, *(parameters or (f32(0.01),)))
    if name == "HardSigmoid":
        return field.unary("hard_sigmoid", x, *(parameters or (f32(0.2), 0.5)))
    if name == "Clip" and len(parameters) == 2:
        low, high = map(field.constant, parameters)
        return field.minimum(field.maximum(x, low), high)
    raise NotEvaluable(f"activation {name}")


def _fused_conv(
    field: Field, attrs: Attrs, x: Array, w: Array, bias: Array | None = None, added: Array | None = None
) -> Array:
    y = conv(field, attrs, x, w, bias)
    return _activated(field, attrs, y if added is None else field.add(y, added))


def _fused_gemm(field: Field, attrs: Attrs, a: Array, b: Array, c: Array | None = None) -> Array:
    alpha = (number(attrs, "activation_alpha", f32(0.01)),) if "activation_alpha" in attrs else ()
    return _activated(field, attrs, gemm(field, attrs, a, b, c), alpha)


def _fused_matmul(field: Field, attrs: Attrs, a: Array, b: Array) -> Array:
    if integer(attrs, "transBatchA", 0):
        a = np.moveaxis(a, 0, -2)
    if integer(attrs, "transBatchB", 0):
        b = np.moveaxis(b, 0, -2)
    if integer(attrs, "transA", 0) and a.ndim > 1:
        a = a.swapaxes(-1, -2)
    if integer(attrs, "transB", 0) and b.ndim > 1:
        b = b.swapaxes(-1, -2)
    y, alpha = field.matmul(a, b), number(attrs, "alpha", 1.0)
    return y if alpha == 1.0 else field.mul(y, field.constant(alpha))


def _skip_layer_norm(
    field: Field,
    attrs: Attrs,
    x: Array,
    skip: Array,
    scale: Array,
    shift: Array | None = None,
    bias: Array | None = None,
) -> tuple[Any, ...]:
    total = field.add(x, skip)
    if bias is not None:
        total = field.add(total, bias)
    y, mean, inverse = layer_norm(field, total, scale, shift, -1, number(attrs, "epsilon", _EPSILON))
    return y, mean, inverse, total


def _skip_rms_norm(
    field: Field, attrs: Attrs, x: Array, skip: Array, scale: Array, bias: Array | None = None
) -> tuple[Any, ...]:
    """The second and third outputs are only for training, and are returned empty."""
    total = field.add(x, skip)
    if bias is not None:
        total = field.add(total, bias)
    y = rms_norm(field, total, scale, -1, number(attrs, "epsilon", _EPSILON))
    empty = np.zeros(0)
    return y, empty, empty, total


def _rms_norm(field: Field, attrs: Attrs, x: Array, scale: Array) -> Array:
    return rms_norm(field, x, scale, integer(attrs, "axis", -1), number(attrs, "epsilon", f32(1e-5)))


def _multi_head(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
    """The inputs are query, key and value [b,s,h*d] (key and value may be [b,h,s,d]), a bias for all three, and a bias
    for the scores.

    Packed inputs, a key padding mask, past keys and a causal mask raise NotEvaluable.
    """
    padded: list[Array | None] = [*inputs, *[None] * (8 - len(inputs))]
    query, key, value, bias, padding, on_scores, *past = padded
    if key is None or value is None or padding is not None or any(p is not None for p in past):
        raise NotEvaluable("MultiHeadAttention of this form")
    if integer(attrs, "unidirectional", 0) or outputs > 1:
        raise NotEvaluable("MultiHeadAttention of this form")
    assert query is not None
    heads = integer(attrs, "num_heads", 1)
    parts = [query, key, value]
    if bias is not None:
        width = query.shape[-1]
        shifts = (bias[:width], bias[width : 2 * width], bias[2 * width :])
        parts = [field.add(x, b) if x.ndim == 3 else x for x, b in zip(parts, shifts)]
    q, k, v = (
        x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)
        for x in parts
    )
    scale = number(attrs, "scale", 0.0) or 1.0 / sqrt(q.shape[-1])
    scores = field.mul(field.matmul(q, k.swapaxes(-1, -2)), field.constant(scale))
    if on_scores is not None:
        scores = field.add(scores, on_scores)
    y = field.matmul(softmax(field, scores, -1), v).transpose(0, 2, 1, 3)
    return (y.reshape(*query.shape[:2], heads * y.shape[3]),)


def _rotary(field: Field, attrs: Attrs, x: Array, positions: Array, cosine: Array, sine: Array) -> Array:
    """Rotary embedding: x is [b,s,h*d] or [b,h,s,d]; positions are [b,s], or one number, the position of the first
    element.
    """
    if integer(attrs, "is_packed_batching", 0) or number(attrs, "scale", 1.0) != 1.0:
        raise NotEvaluable("RotaryEmbedding of this form")
    if x.ndim == 4:
        y = x.transpose(0, 2, 1, 3)
    else:
        heads = integer(attrs, "num_heads", 0) or x.shape[2] // (2 * cosine.shape[1])
        y = x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
    if positions.ndim == 1:
        positions = positions + np.arange(y.shape[1])[None]
    width = integer(attrs, "rotary_embedding_dim", 0) or y.shape[-1]
    rotated = rotate(
        field,
        y[..., :width],
        cosine[positions][:, :, None],
        sine[positions][:, :, None],
        bool(integer(attrs, "interleaved", 0)),
    )
    y = np.concatenate((rotated, y[..., width:]), axis=-1)
    return y.transpose(0, 2, 1, 3) if x.ndim == 4 else y.reshape(x.shape)


def _scaled_product(field: Field, a: Quantised, b: Quantised, bias: Array | None) -> Array:
    total = integer_product(field, a.numbers, b.numbers, a.zero, b.zero)
    y = field.mul(total, field.mul(element(field, np.asarray(a.scale)), element(field, b.scale)))
    return y if bias is None else field.add(y, bias)


def _matmul_integer_to_float(
    field: Field, attrs: Attrs, a: Array, b: Array, a_scale: Array, b_scale: Array, *more: Array | None
) -> Array:
    """The product of two quantised matrices as floats. `more`: the zero points of a and b, and a bias; each may be
    missing.
    """
    padded: list[Array | None] = [*more, None, None, None]
    a_zero, b_zero, bias = padded[:3]
    return _scaled_product(field, Quantised(a, a_scale, a_zero), Quantised(b, b_scale, b_zero), bias)


def _dynamic_quantize_matmul(
    field: Field,
    attrs: Attrs,
    a: Array,
    b: Array,
    b_scale: Array,
    b_zero: Array | None = None,
    bias: Array | None = None,
) -> Array:
    return _scaled_product(field, Quantised(*dynamic_quantize(a)), Quantised(b, b_scale, b_zero), bias)


def _table(proof: Proof, **operators: Evaluate) -> dict[str, OpSpec]:
    names = {f"com.microsoft::{op}": evaluate for op, evaluate in operators.items()}
    return {op: OpSpec(op, evaluate, proof) for op, evaluate in names.items()}


SPECS: dict[str, OpSpec] = {
    **_table(
        "polynomial",
        FusedMatMul=single(_fused_matmul),
        MatMulIntegerToFloat=single(_matmul_integer_to_float),
        RotaryEmbedding=single(_rotary),
    ),
    **_table(
        "uninterpreted",
        BiasGelu=single(_gelu),
        FastGelu=single(_fast_gelu),
        FusedConv=single(_fused_conv),
        FusedGemm=single(_fused_gemm),
        Gelu=single(_gelu),
        MultiHeadAttention=_multi_head,
        QuickGelu=single(_quick_gelu),
        SkipLayerNormalization=several(_skip_layer_norm),
        SkipSimplifiedLayerNormalization=several(_skip_rms_norm),
    ),
    **_table("numeric", DynamicQuantizeMatMul=single(_dynamic_quantize_matmul)),
    # Operators that are ONNX Runtime's own, although they are in the domain of ONNX.
    "SimplifiedLayerNormalization": OpSpec(
        "SimplifiedLayerNormalization", single(_rms_norm), "uninterpreted"
    ),
}

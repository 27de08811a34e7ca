"""Evaluation of Attention and RotaryEmbedding."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from xrlflow.ir import Attrs
from xrlflow.ops.eval_norm import softmax
from xrlflow.ops.eval_spec import Inputs, OpSpec, integer, number, single, table
from xrlflow.ops.field import Array, Field, NotEvaluable


def _heads(x: Array, heads: int) -> Array:
    """[b,s,h*d] as [b,h,s,d]. Arrays with four axes are returned as they are."""
    if x.ndim == 4:
        return x
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def _allowed(attrs: Attrs, shape: tuple[int, int], past: int, mask: Array | None) -> Array | None:
    """Which columns (keys) each row (query) may attend to: booleans [rows, columns], or None for all. `past` columns
    precede the column of row 0.
    """
    allowed: Array | None = None
    if integer(attrs, "is_causal", 0):
        rows, columns = shape
        allowed = np.arange(columns) <= np.arange(rows)[:, None] + past
    if mask is not None and mask.dtype.kind == "b":
        allowed = mask if allowed is None else allowed & mask
    return allowed


def _weights(field: Field, scores: Array, mask: Array | None, allowed: Array | None) -> Array:
    """The softmax of the scores. Rows that are wholly masked become zeros."""
    weights = softmax(field, scores, -1)
    if field.real and (mask is not None or allowed is not None):
        dead = np.ones((), np.bool_) if allowed is None else ~allowed
        if mask is not None and mask.dtype.kind == "f":
            hidden = mask == -np.inf
            dead = hidden if allowed is None else hidden | dead
        weights = np.where(dead.all(axis=-1, keepdims=True), 0.0, weights)
    return weights


def _attention(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
    """softmax(softcap(Q K^T * scale) + mask) V. Groups of query heads share keys and values.

    For a row (query) whose keys are all masked the result is zeros.
    """
    padded = (*inputs, *[None] * (6 - len(inputs)))
    query, key, value, mask, past_key, past_value = padded[:6]
    assert query is not None
    assert key is not None
    assert value is not None
    flat = query.ndim == 3
    query = _heads(query, integer(attrs, "q_num_heads", 0))
    kv_heads = integer(attrs, "kv_num_heads", 0)
    key, value = _heads(key, kv_heads), _heads(value, kv_heads)
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        key = np.concatenate((past_key, key), axis=2)
        value = np.concatenate((past_value, value), axis=2)

    batch, q_heads, rows, depth = query.shape
    kv_heads, columns = key.shape[1:3]
    if (
        {key.shape[0], value.shape[0]} != {batch}
        or value.shape[1:3] != (kv_heads, columns)
        or q_heads % kv_heads
    ):
        raise ValueError(f"attention of {query.shape} to {key.shape} and {value.shape}")
    group = q_heads // kv_heads
    scale = number(attrs, "scale", 1.0 / sqrt(depth))
    scaled = field.mul(query, field.constant(scale))
    scores = field.matmul(
        scaled.reshape(batch, kv_heads, group, rows, depth), key[:, :, None].swapaxes(-1, -2)
    ).reshape(batch, q_heads, rows, columns)
    stages = [scores]
    cap = number(attrs, "softcap", 0.0)
    if cap:
        top = field.constant(cap)
        scores = field.mul(field.unary("tanh", field.div(scores, top)), top)
    stages.append(scores)

    allowed = _allowed(attrs, (rows, columns), past, mask)
    if mask is not None and mask.dtype.kind != "b":
        scores = field.add(scores, mask)
    if allowed is not None:
        if not field.real:
            raise NotEvaluable("Attention with a mask of -inf")
        scores = np.where(allowed, scores, -np.inf)
    stages.append(scores)
    weights = _weights(field, scores, mask, allowed)
    stages.append(weights)

    y = field.matmul(weights.reshape(batch, kv_heads, group, rows, columns), value[:, :, None])
    width = value.shape[-1]
    y = y.reshape(batch, q_heads, rows, width)
    if flat:
        y = y.transpose(0, 2, 1, 3).reshape(batch, rows, q_heads * width)
    return y, key, value, stages[integer(attrs, "qk_matmul_output_mode", 0)]


def rotate(field: Field, x: Array, cosine: Array, sine: Array, interleaved: bool) -> Array:
    """Rotate pairs of elements of the last axis. A pair is (2i, 2i+1) if interleaved, else (i, i + half)."""
    half = x.shape[-1] // 2
    out = np.empty(x.shape, dtype=x.dtype)
    first: Any
    second: Any
    if interleaved:
        first, second = np.s_[..., 0::2], np.s_[..., 1::2]
    else:
        first, second = np.s_[..., :half], np.s_[..., half:]
    a, b = x[first], x[second]
    out[first] = field.sub(field.mul(a, cosine), field.mul(b, sine))
    out[second] = field.add(field.mul(a, sine), field.mul(b, cosine))
    return out


def _rotary(
    field: Field, attrs: Attrs, x: Array, cosine: Array, sine: Array, positions: Array | None = None
) -> Array:
    shape = x.shape
    if x.ndim == 4:
        x = x.transpose(0, 2, 1, 3)
    else:
        heads = integer(attrs, "num_heads", 0)
        x = x.reshape(*shape[:2], heads, shape[2] // heads)
    width = integer(attrs, "rotary_embedding_dim", 0) or x.shape[-1]
    if positions is not None:
        cosine, sine = cosine[positions], sine[positions]
    cosine, sine = (c[..., None, : width // 2] for c in (cosine, sine))
    rotated = rotate(field, x[..., :width], cosine, sine, bool(integer(attrs, "interleaved", 0)))
    y = np.concatenate((rotated, x[..., width:]), axis=-1) if width < x.shape[-1] else rotated
    return y.transpose(0, 2, 1, 3) if len(shape) == 4 else y.reshape(shape)


SPECS: dict[str, OpSpec] = {
    **table("uninterpreted", Attention=_attention),
    **table("polynomial", RotaryEmbedding=single(_rotary)),
}

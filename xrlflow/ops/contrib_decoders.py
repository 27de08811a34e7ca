"""The types of ONNX Runtime's own operators of transformers (domain com.microsoft): attention with caches, rotary
embeddings, and normalisations of sums.

Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from xrlflow.ir import Attrs, Dim, DType, TensorType
from xrlflow.ops.eval_spec import integer

_Types: TypeAlias = Sequence[TensorType | None]
_Found: TypeAlias = tuple[TensorType | None, ...]


def types_of_outputs(op: str, attrs: Attrs, types: _Types, outputs: int) -> _Found | None:
    """The types of the outputs of one of these operators, with None for those that are not known; None for any other
    operator. It is left to the runtime which inputs an operator takes.
    """
    of = _TYPES.get(op)
    if of is None:
        return None
    found = (*of(attrs, [*types, *[None] * 6]), *[None] * outputs)[:outputs]
    return tuple(None if t is None or t.dtype == DType.UNDEFINED else t for t in found)


def _same(attrs: Attrs, types: _Types) -> _Found:
    """An operator on the elements of x."""
    return (_runs(types[0]),)


def _scaled(attrs: Attrs, types: _Types) -> _Found:
    """A normalisation. The result has the type of the scale, which may differ from the input's."""
    x, scale = types[:2]
    return (None if x is None or scale is None else TensorType(scale.dtype, x.shape),)


def _of_sum(attrs: Attrs, types: _Types) -> _Found:
    """A normalisation of x + skip, which may be the fourth output. The mean and the deviation are for training."""
    return _runs(types[0]), None, None, _runs(types[0])


def _grouped(attrs: Attrs, types: _Types) -> _Found:
    """GroupQueryAttention: query [b,s,h*d], or all three parts side by side, [b,s,(h+2g)*d] for g shared heads; caches
    [b,g,p,d]. A cache that shares its memory with the past has the past's length, any other has all positions.
    """
    query, key, _, past_key, past_value = types[:5]
    shape = _shape(query, 3)
    heads, shared = integer(attrs, "num_heads", 0), integer(attrs, "kv_num_heads", 0)
    y: _Found = (None,)
    if query is not None and shape is not None:
        width: Dim = shape[2]
        if key is None:
            parts = heads + 2 * shared
            width = width // parts * heads if isinstance(width, int) and parts else None
        y = (TensorType(query.dtype, (shape[0], shape[1], width)),)
    return *y, _cache(past_key), _cache(past_value)


def _multi_head(attrs: Attrs, types: _Types) -> _Found:
    """MultiHeadAttention with query [b,s,h*d] and value [b,t,h*d] or [b,h,t,d]."""
    query, _, value = types[:3]
    of_query, of_rows, of_heads = _shape(query, 3), _shape(value, 3), _shape(value, 4)
    if query is None or of_query is None or (of_rows is None and of_heads is None):
        return (None,)
    width: Dim = None
    if of_rows is not None:
        width = of_rows[2]
    elif of_heads is not None and isinstance(of_heads[1], int) and isinstance(of_heads[3], int):
        width = of_heads[1] * of_heads[3]
    return (TensorType(query.dtype, (of_query[0], of_query[1], width)),)


def _cache(past: TensorType | None) -> TensorType | None:
    shape = _shape(past, 4)
    if past is None or shape is None:
        return None
    return TensorType(past.dtype, (shape[0], shape[1], None, shape[3]))


def _shape(type: TensorType | None, rank: int) -> tuple[Dim, ...] | None:
    """A type's sizes, if there are `rank` of them."""
    return type.shape if type is not None and type.shape is not None and len(type.shape) == rank else None


def _runs(type: TensorType | None) -> TensorType | None:
    """The same type, not constant: ONNX Runtime computes such a value when the model runs."""
    return None if type is None else type.as_const(False)


_TYPES: Mapping[str, Callable[[Attrs, _Types], _Found]] = {
    "com.microsoft::GroupQueryAttention": _grouped,
    "com.microsoft::MultiHeadAttention": _multi_head,
    "com.microsoft::RotaryEmbedding": _same,
    "com.microsoft::SkipLayerNormalization": _of_sum,
    "com.microsoft::SkipSimplifiedLayerNormalization": _of_sum,
    # This one is ONNX Runtime's own, although it is in the domain of ONNX.
    "SimplifiedLayerNormalization": _scaled,
}
TYPED = frozenset(_TYPES)
"""The operators whose types are known here."""

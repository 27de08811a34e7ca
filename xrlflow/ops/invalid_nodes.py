"""Finds nodes that a runtime refuses when it runs them, although ONNX's type inference accepts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from xrlflow.ir import Attrs, Const, TensorType

_Types = Sequence[TensorType | None]
_Data = Sequence[Const | None]


def why_invalid(op: str, attrs: Attrs, types: _Types, data: _Data, outputs: int) -> str | None:
    """A description of what is wrong with a node, or None. The arguments are those of `infer`."""
    check = _CHECKS.get(op)
    return None if check is None or not types else check(attrs, types, data, outputs)


def _split(attrs: Attrs, types: _Types, data: _Data, outputs: int) -> str | None:
    """Checks the number of a Split's outputs. If it differs from the number of sizes, ONNX reads beyond the end of a
    list.
    """
    parts = attrs.get("num_outputs", outputs)
    assert isinstance(parts, int)
    if len(data) > 1 and (sizes := data[1]) is not None and sizes.array is not None:
        parts = sizes.array.size
    return f"Split into {outputs} outputs with {parts} parts" if parts != outputs else None


def _transpose(attrs: Attrs, types: _Types, data: _Data, outputs: int) -> str | None:
    perm, (type, *_) = attrs.get("perm"), types
    if isinstance(perm, tuple) and type is not None and type.rank is not None and len(perm) != type.rank:
        return f"Transpose of {type} has {list(perm)} for a permutation"
    return None


def _concat(attrs: Attrs, types: _Types, data: _Data, outputs: int) -> str | None:
    """Checks the shapes of a Concat's operands. ONNX does not check them if one of the shapes is unknown."""
    axis = attrs.get("axis")
    ranks = {t.rank for t in types if t is not None and t.rank is not None}
    if len(ranks) > 1:
        return f"Concat of tensors of ranks {sorted(ranks)}"
    if isinstance(axis, int) and any(not -rank <= axis < rank for rank in ranks):
        return f"Concat of tensors of rank {ranks.pop()} along axis {axis}"
    return None


def _gemm(attrs: Attrs, types: _Types, data: _Data, outputs: int) -> str | None:
    """Checks the third operand of a Gemm, which ONNX does not."""
    shapes = [None if t is None else t.shape for t in types]
    if len(shapes) < 3 or any(s is None for s in shapes):
        return None
    a, b, c = (s for s in shapes if s is not None)
    if len(a) != 2 or len(b) != 2:
        return None  # ONNX's inference reports this
    product = (a[1 if attrs.get("transA") else 0], b[0 if attrs.get("transB") else 1])
    pairs = zip(reversed(product), reversed(c))
    if len(c) > 2 or any(isinstance(m, int) and isinstance(d, int) and d not in (1, m) for m, d in pairs):
        return f"Gemm of {types[0]} and {types[1]} adds {types[2]}"
    return None


def _convolution(weight: int) -> Callable[[Attrs, _Types, _Data, int], str | None]:
    """A function that checks the rank and the sizes of a convolution's kernel, which is input `weight`."""

    def check(attrs: Attrs, types: _Types, data: _Data, outputs: int) -> str | None:
        image, kernel = types[0], types[weight] if len(types) > weight else None
        if kernel is None or kernel.shape is None:
            return None
        if image is not None and image.rank is not None and image.rank != len(kernel.shape):
            return f"a convolution of {image} with {kernel}"
        declared = attrs.get("kernel_shape")
        if isinstance(declared, tuple) and (
            len(declared) != len(kernel.shape) - 2
            or any(isinstance(d, int) and d != n for d, n in zip(kernel.shape[2:], declared))
        ):
            return f"a convolution with {kernel} has the kernel_shape {list(declared)}"
        return None

    return check


_CHECKS: Mapping[str, Callable[[Attrs, _Types, _Data, int], str | None]] = {
    "Split": _split,
    "Transpose": _transpose,
    "Concat": _concat,
    "Gemm": _gemm,
    "Conv": _convolution(1),
    "ConvTranspose": _convolution(1),
    "ConvInteger": _convolution(1),
    "QLinearConv": _convolution(3),
}

"""Operators of 8-bit integers, computed otherwise where ONNX Runtime's kernels for them are slow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import numpy as np
import numpy.typing as npt

from rewrite_rules.elementwise import given
from rewrite_rules.examples import graphs
from xrlflow.ir import ABSENT, Const, DType, Node, Value
from xrlflow.ops.continuity import MOVING
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, accurate, profitable, require

_SINGLE = int(DType.FLOAT)
# Sums of integers below this number are exact in float32, in any order.
_EXACT = 1 << 24
_BYTE = 255  # the greatest distance of two bytes of one type
_BYTES = (DType.INT8, DType.UINT8)
# Products of bytes and scales below this number are finite in float32.
_LARGE = 1e36


def _numbers(count: int, middle: int = 0, most: int = 125) -> str:
    """Constant bytes around a middle, up to `most` from it, as ONNX's text has them."""
    return f"{{{','.join(str(middle + (37 * i) % (2 * most + 1) - most) for i in range(count))}}}"


def _greatest_sum(weights: npt.NDArray[Any]) -> int:
    """The greatest sum of products, and part of one, that bytes less their zero point can have with these weights.

    The weights of one output are in one row. Bytes less a zero point z are between -z and 255 - z, so positive and
    negative weights do not both meet the greatest distance.
    """
    rows = weights.reshape(len(weights), -1) if weights.size else np.zeros((1, 1))
    positive = np.where(rows > 0, rows, 0).sum(axis=1)
    negative = np.where(rows < 0, -rows, 0).sum(axis=1)
    return _BYTE * int(max(positive.max(), negative.max()))


def _without_zero(w: Val, v: Val | None) -> npt.NDArray[Any]:
    """The numbers of constant weights of a convolution, less their zero points."""
    return w.whole_array.astype(np.int64) - (0 if v is None else int(v.scalar))


def _unsigned(op: Op, signed: Val | None) -> Any:
    """Constant signed bytes, plus 128. (None: zero.)"""
    if signed is None:
        return op.constant(np.uint8(128))
    return op.Cast(op.Add(op.Cast(signed, to=int(DType.INT32)), 128), to=int(DType.UINT8))


_SIGNED = (
    f"agraph (uint8[N,2,5] x, uint8 z) => (y) <int8[3,2,3] w = {_numbers(18)}> "
    "{ p = ConvInteger<pads=[1,2], strides=[2]>(x, w, z) y = Cast<to=1>(p) }",
    f"agraph (uint8[2,4,5,5] x, uint8[1] z) => (y) <int8[4,2,2,2] w = {_numbers(32)}, int8[1] v = {{-3}}> "
    "{ p = ConvInteger<group=2, dilations=[1,2]>(x, w, z, v) y = Cast<to=1>(p) }",
    f"agraph (uint8[1,2,3,H] x) => (y) <int8[1,2,1,1] w = {_numbers(2)}> {{ p = ConvInteger(x, w) y = Cast<to=1>(p) }}",
)


class ConvolveUnsignedWeights(Rule, family="precision"):
    """convinteger(x, w, z, v) -> convinteger(x, w + 128, z, v + 128)  for signed weights w.

    ONNX Runtime's ConvInteger is 4 to 20 times slower for signed weights. Where the processor saturates sums of
    products of unsigned and signed bytes, the right side is exact and the left side is not.
    """

    backend = "onnxruntime"
    optional = ("z", "v")
    shapes = "x[...] w[...]:const z[...] v[...]:const"
    examples = (
        *(e.replace(" y = Cast<to=1>(p)", "").replace("=> (y)", "=> (p)") for e in _SIGNED),
        f"agraph (uint8[1,3,4,4] x) => (p) <int8[3,1,2,2] w = {_numbers(12)}, uint8 z = {{9}}> "
        "{ p = ConvInteger<group=3, pads=[1,0,1,0]>(x, w, z) }",
    )
    near_misses = (
        "agraph (uint8[1,2,3,4] x) => (p) <uint8[1,2,1,1] w = {3, 200}> { p = ConvInteger(x, w) }",
    )

    def source(self, op: Op, x: Any, w: Any, z: Any, v: Any) -> Any:
        return op.ConvInteger(x, w, z, v, attrs="c")

    def where(self, x: Val, w: Val) -> None:
        profitable(x.dtype == DType.UINT8, "the image is signed")
        require(w.dtype == DType.INT8, "the weights are unsigned")

    def target(self, op: Op, m: Captures, x: Val, w: Val, z: Val | None, v: Val | None) -> Any:
        no_zero = op.constant(np.uint8(0)) if z is None else z
        return op.ConvInteger(x, _unsigned(op, w), no_zero, _unsigned(op, v), attrs=m.c)


# For each operator, the places of its weights and of their zero point.
_WEIGHTS = {
    "DequantizeLinear": (0, 2),
    "MatMulInteger": (1, 3),
    "QLinearConv": (3, 5),
    "QLinearMatMul": (3, 5),
}


_WRAPS = "a difference of unsigned bytes wraps around, and so does the cast to signed ones"


class _OtherWeights(RegionRule, family="precision"):
    """A rule that replaces the weights of a product with unsigned bytes by weights of the other sign."""

    backend = "onnxruntime"
    unpriced = True
    anchors = tuple(_WEIGHTS)
    survivors: ClassVar[Mapping[str, str]] = {
        "attribute to of Cast (call 0)": _WRAPS,
        "omit Cast (call 0)": _WRAPS,
    }
    kind: ClassVar[DType]
    """The type of the weights that are replaced."""

    def find(self, reader: Reader, node: Node) -> Region | None:
        at, zero_at = _WEIGHTS[node.op]
        w = node.inputs[at]
        if not reader.is_const(w) or reader.type(w).dtype != self.kind:
            return None
        if node.op == "DequantizeLinear":
            other = _other_factor(reader, node)
        else:
            other = node.inputs[0]
        if other is None or reader.type(other).dtype != DType.UINT8:
            return None
        zero = node.inputs[zero_at] if zero_at < len(node.inputs) else ABSENT
        profitable(zero == ABSENT or reader.is_const(zero), "the zero point is computed")
        shape = () if node.op == "MatMulInteger" else reader.val(node.inputs[1]).sizes
        return Region(node.outputs, given(node.inputs), (node,), (node, shape))

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        node, shape = region.data
        values: list[Any] = [
            None if v == ABSENT else dict(zip(region.inputs, inputs))[v] for v in node.inputs
        ]
        at, zero_at = _WEIGHTS[node.op]
        values += [None] * (zero_at + 1 - len(values))
        values[at] = self.other(op, values[at])
        whole = values[zero_at] is not None or not shape
        zero = self.other(op, values[zero_at])
        values[zero_at] = zero if whole else op.Expand(zero, list(shape))
        return op[node.op](*values, attrs=node.attrs)

    def other(self, op: Op, parameter: Val | None) -> Any:
        """Constant weights or a constant zero point (None: zero) in the other type."""
        raise NotImplementedError


class UseSignedWeights(_OtherWeights):
    """f(x, w, z) -> f(x, w - 128, z - 128)  for a product f of unsigned bytes x and unsigned weights w.

    On processors that do not saturate sums of byte products (VNNI), ONNX Runtime multiplies unsigned with signed bytes
    by special instructions. It multiplies two unsigned matrices at half that speed.
    """

    assumes = "vnni"
    kind = DType.UINT8
    examples = (
        *(
            f"agraph (uint8[{shape},3] x, uint8 z) => (int32[{shape},2] y) <uint8[3,2] w = {{0, 255, 7, 128, 127, 30}},"
            f" uint8{kind} v = {value}> {{ y = MatMulInteger(x, w, z, v) }}"
            for shape in ("N", "2,N", "4", "2,5")
            for kind, value in (("", "{128}"), ("[2]", "{120, 255}"))
        ),
        "agraph (uint8[N,3] x) => (y) <uint8[3,2] w = {0, 255, 7, 128, 127, 30}> { y = MatMulInteger(x, w) }",
        f"agraph (uint8[N,2,5] x, float s, uint8 z) => (y) <uint8[3,2,3] w = {_numbers(18, 128)}, "
        "float[3] r = {0.1,0.2,0.3}, uint8[3] v = {128,7,255}> "
        "{ y = QLinearConv<strides=[2]>(x, s, z, w, r, v, s, z) }",
        "agraph (uint8[N,3] x, float s, uint8 z) => (y) <uint8[3,2] w = {0, 255, 7, 128, 127, 30}, uint8 v = {9}> "
        "{ y = QLinearMatMul(x, s, z, w, s, v, s, z) }",
        *graphs(
            "(uint8[N,3] q, float s, uint8 z) => (y) <uint8[3,2] w = {0, 255, 7, 128, 127, 30}, uint8[2] v = {9,0}, "
            "float[2] r = {0.1,0.2}> { x = DequantizeLinear(q, s, z) u = DequantizeLinear<axis=1>(w, r, v) "
            "m = MatMul(x, u) y = QuantizeLinear(m, s, z) }",
            f"(uint8[1,2,4,4] q, float s) => (y) <uint8[3,2,2,2] w = {_numbers(24, 128)}, "
            "float[3] r = {0.1,0.2,0.3}> { x = DequantizeLinear(q, s) u = DequantizeLinear<axis=0>(w, r) "
            "c = Conv(x, u) k = Relu(c) y = QuantizeLinear(k, s) }",
        ),
    )
    near_misses = (
        examples[0].replace("uint8[3,2] w = {0, 255, 7, 128, 127, 30}, uint8 v = {128}",
                            "int8[3,2] w = {0, 25, 7, -128, 127, 30}, int8 v = {12}"),
        examples[0].replace("uint8[N,3] x, uint8 z", "int8[N,3] x, int8 z"),
        "agraph (float[N,3] x) => (y) <uint8[3,2] w = {0, 255, 7, 128, 127, 30}, float s = {0.1}, uint8 v = {9}> "
        "{ u = DequantizeLinear(w, s, v) y = MatMul(x, u) }",
    )  # fmt: skip

    def other(self, op: Op, parameter: Val | None) -> Any:
        return _signed(op, parameter)


class UseUnsignedWeights(_OtherWeights):
    """f(x, w, z) -> f(x, w + 128, z + 128)  for a product f of unsigned bytes x and signed weights w.

    On processors without VNNI, ONNX Runtime adds two products of unsigned and signed bytes in 16 bits, where they
    saturate. It multiplies two unsigned matrices exactly, at 0.8 times that speed, three times as fast as two signed
    ones.
    """

    assumes = "saturates"
    swept_after = ("QuantiseAllUnsigned", "QuantiseUnsigned")
    kind = DType.INT8
    examples = (
        *(
            f"agraph (uint8[{shape},3] x, uint8 z) => (int32[{shape},2] y) <int8[3,2] w = {{0, 127, 7, -128, -1, 30}},"
            f" int8{kind} v = {value}> {{ y = MatMulInteger(x, w, z, v) }}"
            for shape in ("N", "2,N")
            for kind, value in (("", "{0}"), ("[2]", "{-8, 127}"))
        ),
        "agraph (uint8[N,3] x) => (y) <int8[3,2] w = {0, 127, 7, -128, -1, 30}> { y = MatMulInteger(x, w) }",
        f"agraph (uint8[N,2,5] x, float s, uint8 z) => (y) <int8[3,2,3] w = {_numbers(18)}, "
        "float[3] r = {0.1,0.2,0.3}, int8[3] v = {0,7,-125}> "
        "{ y = QLinearConv<strides=[2]>(x, s, z, w, r, v, s, z) }",
        "agraph (uint8[N,3] x, float s, uint8 z) => (y) <int8[3,2] w = {0, 127, 7, -128, -1, 30}, int8 v = {9}> "
        "{ y = QLinearMatMul(x, s, z, w, s, v, s, z) }",
        *graphs(
            "(uint8[N,3] q, float s, uint8 z) => (y) <int8[3,2] w = {0, 127, 7, -128, -1, 30}, int8[2] v = {9,0}, "
            "float[2] r = {0.1,0.2}> { x = DequantizeLinear(q, s, z) u = DequantizeLinear<axis=1>(w, r, v) "
            "m = MatMul(x, u) y = QuantizeLinear(m, s, z) }",
            f"(uint8[1,2,4,4] q, float s) => (y) <int8[3,2,2,2] w = {_numbers(24)}, "
            "float[3] r = {0.1,0.2,0.3}> { x = DequantizeLinear(q, s) u = DequantizeLinear<axis=0>(w, r) "
            "c = Conv(x, u) k = Relu(c) y = QuantizeLinear(k, s) }",
        ),
    )
    near_misses = (
        examples[0].replace("int8[3,2] w = {0, 127, 7, -128, -1, 30}, int8 v = {0}",
                            "uint8[3,2] w = {0, 127, 7, 128, 1, 30}, uint8 v = {12}"),
        examples[0].replace("uint8[N,3] x, uint8 z", "int8[N,3] x, int8 z"),
        examples[0].replace("{0, 127, 7, -128, -1, 30}", "{0, 64, 7, -64, -1, 30}"),
        "agraph (uint8[N,3,5] x, float s, uint8 z) => (y) <int8[3,1,2] w = {0, 127, 7, -128, -1, 30}, int8 v = {9}> "
        "{ y = QLinearConv<group=3>(x, s, z, w, s, v, s, z) }",
        "agraph (float[N,3] x) => (y) <int8[3,2] w = {0, 127, 7, -128, -1, 30}, float s = {0.1}, int8 v = {9}> "
        "{ u = DequantizeLinear(w, s, v) y = MatMul(x, u) }",
    )  # fmt: skip

    def find(self, reader: Reader, node: Node) -> Region | None:
        region = super().find(reader, node)
        if region is not None:
            profitable(not _is_depthwise(reader, node), "ONNX Runtime's depthwise kernels do not saturate")
            profitable(
                _saturates(reader.const(node.inputs[_WEIGHTS[node.op][0]])), "no sum of products saturates"
            )
        return region

    def other(self, op: Op, parameter: Val | None) -> Any:
        return _unsigned(op, parameter)


def _signed(op: Op, unsigned: Val | None) -> Any:
    """Constant unsigned bytes, minus 128. (None: zero.)"""
    if unsigned is None:
        return op.constant(np.int8(-128))
    return op.Cast(op.Sub(op.Cast(unsigned, to=int(DType.INT32)), 128), to=int(DType.INT8))


def _saturates(weights: Const | None) -> bool:
    """Whether 16 bits may be too few for two products of unsigned bytes and these weights (None: unknown)."""
    if weights is None:
        return True
    return 2 * _BYTE * int(np.abs(weights.numpy().astype(np.int32)).max(initial=0)) > np.iinfo(np.int16).max


def _is_depthwise(reader: Reader, node: Node) -> bool:
    """Whether a product, or the one that reads dequantised weights, is a convolution with one channel per group, and
    as many outputs as groups."""
    at, _ = _WEIGHTS[node.op]
    product = reader.users(node.outputs[0])[0] if node.op == "DequantizeLinear" else node
    group, shape = product.attrs.get("group", 1), reader.val(node.inputs[at]).sizes
    return group != 1 and shape[:2] == (group, 1)


def _other_factor(reader: Reader, weights: Node) -> Value | None:
    """The bytes that are multiplied with dequantised weights, if the product is quantised again."""
    users = reader.users(weights.outputs[0])
    if len(users) != 1 or users[0].op not in ("Conv", "Gemm", "MatMul") or not _is_fused(reader, users[0]):
        return None
    if [i for i, v in enumerate(users[0].inputs) if v == weights.outputs[0]] != [1]:
        return None
    image = reader.producer(users[0].inputs[0])
    return image.inputs[0] if image is not None and image.op == "DequantizeLinear" else None


class ConvolveIntegersInFloat32(Rule, family="precision"):
    """cast(convinteger(x, w, z, v)) -> conv(cast(x) - cast(z), cast(w) - cast(v))  if all sums stay below 2^24.

    Then float32 is exact, in whatever order the products are added. ONNX Runtime's ConvInteger copies images for each
    kernel position, has no kernel for depthwise convolutions, and is slow for signed weights on many processors.
    """

    backend = "onnxruntime"
    proof = "numeric"
    relies_on = "sums of integers below 2^24 are exact in float32"
    optional = ("z", "v")
    shapes = "x[...] w[...]:const z[...] v[...]:const"
    examples = (
        *_SIGNED,
        f"agraph (uint8[1,3,4,4] x) => (y) <uint8[3,1,2,2] w = {_numbers(12, 128)}, uint8 v = {{128}}, uint8 z = {{9}}>"
        " { p = ConvInteger<group=3, pads=[1,0,1,0]>(x, w, z, v) y = Cast<to=1>(p) }",
        f"agraph (uint8[1,2,3,H] x) => (y) <uint8[1,2,1,1] w = {_numbers(2, 128)}> "
        "{ p = ConvInteger(x, w) y = Cast<to=1>(p) }",
    )
    # 520 products of 255 and 127 need more than 24 bits; 518 of them, and as many negative ones, do not.
    near_misses = (
        f"agraph (uint8[1,520,1] x, uint8 z) => (y) <int8[1,520,1] w = {{{','.join(['127'] * 520)}}}> "
        "{ p = ConvInteger(x, w, z) y = Cast<to=1>(p) }",
    )

    def source(self, op: Op, x: Any, w: Any, z: Any, v: Any) -> Any:
        return op.Cast(op.ConvInteger(x, w, z, v, attrs="c"), to="t")

    def where(self, m: Captures, x: Val, w: Val, z: Val | None, v: Val | None) -> None:
        require(m.t == _SINGLE, "the sums are not read in float32")
        require(
            all(u is None or u.rank == 0 or u.sizes == (1,) for u in (z, v)), "a zero point is not one number"
        )
        accurate(_greatest_sum(_without_zero(w, v)) < _EXACT, "a sum may need more than 24 bits")

    def target(self, op: Op, m: Captures, x: Val, w: Val, z: Val | None, v: Val | None) -> Any:
        def single(u: Val) -> Any:
            return op.Cast(u, to=_SINGLE)

        one = None if z is None else op.constant(np.ones(z.shape, np.float32))
        left = single(x) if z is None else op.DequantizeLinear(x, one, z)
        right = single(w)
        if v is not None:
            right = op.Sub(right, single(v))
        return op.Conv(left, right, attrs=m.c)


class _Unsigned(RegionRule, family="precision"):
    """A rule that quantises to unsigned bytes instead of signed ones."""

    backend = "onnxruntime"
    proof = "numeric"
    relies_on = "the same quotient is rounded; range and zero point of the type move by 128"
    unpriced = True
    anchors = ("QuantizeLinear",)

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        values = iter(inputs)

        def parameters(zero: bool) -> tuple[Val, Any]:
            return next(values), _unsigned(op, next(values) if zero else None)

        results = []
        for (attrs, zero), *readers in region.data:
            kept = {k: v for k, v in attrs.items() if k != "output_dtype"}
            q = op.QuantizeLinear(next(values), *parameters(zero), **kept)
            results += [op.DequantizeLinear(q, *parameters(zero), attrs=attrs) for attrs, zero in readers]
        return results


class QuantiseUnsigned(_Unsigned):
    """dequantise(quantise(x, s, z), t, u) -> dequantise(quantise(x, s, z + 128), t, u + 128)  for signed bytes.

    ONNX Runtime has fast kernels for products of unsigned with signed bytes, and for elementwise operators of unsigned
    bytes.
    """

    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) <float s = {0.1}, int8 z = {3}> "
        "{ q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }",
        "(float[N,3,4] x) => (y, w) <float s = {0.1}, int8 z = {-7}, float t = {0.3}> "
        "{ q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) w = DequantizeLinear(q, t) }",
        "(float[N,3,4] x) => (y) <float[3] s = {0.1,0.2,0.3}, int8[3] z = {1,-128,127}> "
        "{ q = QuantizeLinear<axis=1>(x, s, z) y = DequantizeLinear<axis=1>(q, s, z) }",
        "(float[N,3] x) => (y) <float s = {0.1}> "
        "{ q = QuantizeLinear<output_dtype=3>(x, s) y = DequantizeLinear(q, s) }",
    )
    near_misses = graphs(
        "(float[N,3] x, float s) => (y) <int8 z = {3}> { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }",
        "(float[N,3] x) => (y, q) <float s = {0.1}, int8 z = {3}> "
        "{ q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }",
        "(float[N,3] x) => (y, w) <float s = {0.1}, int8 z = {3}> "
        "{ q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) w = Neg(q) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        group = _quantised(reader, node)
        return _region([group]) if group else None


class QuantiseAllUnsigned(_Unsigned):
    """All quantisations to signed bytes that operators connect become quantisations to unsigned bytes.

    Single steps are slower at first: an operator of bytes of both kinds has no fast kernel.
    """

    composite_of = ("QuantiseUnsigned",)
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) <float s = {0.1}, int8 z = {3}, float t = {0.2}> "
        "{ q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) b = Relu(a) r = QuantizeLinear(b, t, z) "
        "y = DequantizeLinear(r, t, z) }",
        "(float[N,3] x, float[N,3] w) => (y, v) <float s = {0.1}, int8 z = {3}, int8 u = {0}> "
        "{ q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) r = QuantizeLinear(w, s, u) "
        "b = DequantizeLinear(r, s, u) y = Add(a, b) v = Neg(b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        groups = _connected(reader, node)
        return _region(groups) if len(groups) > 1 else None


# A node that quantises, and those that dequantise its result.
_Group = tuple[Node, ...]


def _region(groups: Sequence[_Group]) -> Region:
    """These quantisations. What `target` needs of each node: its attributes, and whether it has a zero point."""
    outputs = tuple(n.outputs[0] for _, *users in groups for n in users)
    inputs = tuple(v for g in groups for i, n in enumerate(g) for v in n.inputs[i > 0 :] if v != ABSENT)
    data = tuple(tuple((n.attrs, len(n.inputs) == 3 and n.inputs[2] != ABSENT) for n in g) for g in groups)
    return Region(outputs, inputs, tuple(n for g in groups for n in g), data)


def _quantised(reader: Reader, node: Node) -> _Group:
    """A node that quantises to signed bytes, and its readers, if all of these dequantise; else nothing."""
    (quantised,) = node.outputs
    if node.types[0].dtype != DType.INT8 or reader.is_const(node.inputs[0]) or reader.is_output(quantised):
        return ()
    if reader.type(node.inputs[0]).dtype != DType.FLOAT:  # the kernel for float16 saturates wrongly
        return ()
    group = (node, *reader.users(quantised))
    return group if all(_is_constant(reader, user, quantised) for user in group) else ()


def _is_constant(reader: Reader, node: Node, quantised: Value) -> bool:
    """Whether a node quantises or dequantises by constants, with a zero point that can be written."""
    if node.op not in ("QuantizeLinear", "DequantizeLinear") or node.attrs.get("block_size", 0):
        return False
    scale, *zero = [v for v in node.inputs[1:] if v != ABSENT]
    if node.op == "DequantizeLinear" and (node.inputs[0] != quantised or quantised in node.inputs[1:]):
        return False
    return reader.is_const(scale) and (
        all(map(reader.is_const, zero)) if zero else reader.type(scale).shape == ()
    )


def _connected(reader: Reader, first: Node) -> list[_Group]:
    """The quantisations that operators connect with the first one; none if one of them has a smaller number."""
    if not _quantised(reader, first):  # most graphs quantise to unsigned bytes: nothing is followed
        return []
    seen, pending, groups = {first.id}, [first], list[_Group]()
    while pending:
        node = pending.pop()
        if node.op == "QuantizeLinear" and (group := _quantised(reader, node)):
            if node.id < first.id:
                return []
            groups.append(group)
        around = [n for v in node.inputs if v != ABSENT and (n := reader.producer(v)) and not n.const]
        for other in (*around, *(n for v in node.outputs for n in reader.users(v))):
            if other.id not in seen:
                seen.add(other.id)
                pending.append(other)
    return sorted(groups, key=lambda g: g[0].id)


def _along(op: Op, parameter: Val, rank: int, axis: int) -> Any:
    """A scale or zero point, so that it broadcasts over numbers of this rank."""
    if parameter.rank == 0:
        return parameter
    return op.Reshape(parameter, [-1 if i == axis % rank else 1 for i in range(rank)])


class StoreQuantisedWeights(Rule, family="precision"):
    """quantise(w, s, z) -> cast(clip(round(w / s) + z))  for constant floats w: the file holds bytes."""

    backend = "onnxruntime"
    proof = "numeric"
    relies_on = "QuantizeLinear divides, rounds to even, adds the zero point and saturates"
    optional = ("z",)
    shapes = "w[...]:const s[...]:const z[...]:const"
    examples = graphs(
        "(float[N,1,1] x) => (y) <float[2,3] w = {0.13,-0.27,0.37,5.06,-70,0}, float s = {0.2}, int8 z = {3}> "
        "{ q = QuantizeLinear(w, s, z) v = DequantizeLinear(q, s, z) y = Mul(v, x) }",
        "(float x) => (y) <float[2,3] w = {0.13,-0.27,0.37,5.06,-70,0}, float[2] s = {0.2,0.3}, uint8[2] z = {128,9}> "
        "{ q = QuantizeLinear<axis=0>(w, s, z) v = DequantizeLinear<axis=0>(q, s, z) y = Mul(v, x) }",
        "(float x) => (y) <float[2,3] w = {0.13,-0.27,0.37,5.06,-70,0}, float[3] s = {0.2,0.3,0.1}> "
        "{ q = QuantizeLinear<axis=-1>(w, s) v = DequantizeLinear<axis=-1>(q, s) y = Mul(v, x) }",
        "(float x) => (y) <float[1,2,3] w = {0.13,-0.27,0.37,5.06,-70,0}, float[2] s = {0.2,0.3}, int8[2] z = {1,2}> "
        "{ q = QuantizeLinear<axis=1>(w, s, z) v = DequantizeLinear<axis=1>(q, s, z) y = Mul(v, x) }",
    )
    near_misses = graphs(
        "(float x) => (y) <float[2,3] w = {0.13,-0.27,0.37,5.06,-70,0}, float s = {0.2}> "
        "{ q = QuantizeLinear<output_dtype=3>(w, s) v = DequantizeLinear(q, s) y = Mul(v, x) }",
        "(float x) => (y) <float[2,3] w = {0.13,-0.27,0.37,5.06,-70,0}, float s = {0.2}, int16 z = {7}> "
        "{ q = QuantizeLinear(w, s, z) v = DequantizeLinear(q, s, z) y = Mul(v, x) }",
    )

    def source(self, op: Op, w: Any, s: Any, z: Any) -> Any:
        return op.QuantizeLinear(w, s, z, axis="a")

    def where(self, m: Captures, w: Val, s: Val, z: Val | None) -> None:
        profitable(w.dtype == s.dtype == DType.FLOAT, "the numbers are not of float32")
        require(z is None or z.dtype in (DType.INT8, DType.UINT8), "the result is not of bytes")
        require(s.rank == 0 or s.rank == 1, "there is a scale for each block")
        fits = s.rank == 0 or (-w.rank <= m.a < w.rank and s.shape[0] == w.shape[m.a])
        require(fits, "there are not as many scales as numbers along the axis")

    def target(self, op: Op, m: Captures, w: Val, s: Val, z: Val | None) -> Any:
        stored = DType.UINT8 if z is None else z.dtype
        # Constants are evaluated in float64, and so does verification evaluate QuantizeLinear. Where float32 rounds the
        # quotient to a tie, ONNX Runtime takes the neighbour: one weight in 360,000.
        steps = op.Round(op.Div(w, _along(op, s, w.rank, m.a)))
        if z is not None:
            steps = op.Add(steps, _along(op, op.Cast(z, to=_SINGLE), w.rank, m.a))
        low, high = (-128.0, 127.0) if stored == DType.INT8 else (0.0, 255.0)
        numbers = op.Where(op.IsNaN(steps), op.constant(np.float32(low)), op.Clip(steps, low, high))
        return op.Cast(numbers, to=int(stored))


# Products of which ONNX Runtime packs the dequantised weights.
_PACKED = ("Gemm", "MatMul")


class DequantiseWeightsOnce(RegionRule, family="precision"):
    """f(x, dequantise(w, s, z)) -> f(x, (cast(w) - cast(z)) * s)  for a convolution or product f of floats.

    ONNX Runtime folds the right side when it loads the model, and then chooses a faster layout; it dequantises
    constants at every run. A convolution between bytes becomes one of bytes, and is left alone. So is a product whose
    weights, scale and zero point nothing else reads: ONNX Runtime packs these weights, and quantises x.
    """

    backend = "onnxruntime"
    unpriced = True
    anchors = ("Conv", "ConvTranspose", *_PACKED)
    examples = graphs(
        f"(float[N,2,5] x) => (y) <int8[3,2,3] w = {_numbers(18)}, float s = {{0.1}}, int8 z = {{3}}> "
        "{ v = DequantizeLinear(w, s, z) y = Conv<pads=[1,1]>(x, v) }",
        f"(float[N,2,5] x, float[3] b) => (y) <int8[3,2,3] w = {_numbers(18)}, float[3] s = {{0.1,0.2,0.3}}> "
        "{ v = DequantizeLinear<axis=0>(w, s) y = Conv(x, v, b) }",
        f"(uint8[1,2,4,4] q) => (y) <uint8[2,3,2,2] w = {_numbers(24, 128)}, float[3] s = {{0.1,0.2,0.3}}, "
        "uint8[3] z = {128,7,255}> "
        "{ x = DequantizeLinear(q, [0.1]) v = DequantizeLinear<axis=1>(w, s, z) c = ConvTranspose(x, v) y = Relu(c) }",
        "(float[N,3] x) => (y, r) <int8[2,3] t = {1,-2,3,-4,5,-6}, float s = {0.1}, int8 z = {3}> "
        "{ w = Transpose<perm=[1,0]>(t) v = DequantizeLinear(w, s, z) y = MatMul(x, v) q = QuantizeLinear(x, s, z) "
        "r = DequantizeLinear(q, s, z) }",
        "(float[N,3] x, float[2] b) => (y, u) <int8[2,3] w = {1,-2,3,-4,5,-6}, float[2] s = {0.1,0.2}> "
        "{ v = DequantizeLinear<axis=0>(w, s) y = Gemm<transB=1, alpha=0.5>(x, v, b) u = Mul(y, s) }",
    )
    near_misses = graphs(
        "(float[N,4] x, float[1] c) => (y, r) <int8[4] w = {1,2,3,4}, float[2] s = {0.1,0.2}> "
        "{ v = DequantizeLinear<axis=0, block_size=2>(w, s) y = MatMul(x, v) r = Mul(s, c) }",
        "(float[N,3] x) => (y) <int8[3,2] w = {1,-2,3,-4,5,-6}, float s = {0.1}, int8 z = {3}> "
        "{ v = DequantizeLinear(w, s, z) y = MatMul(x, v) }",
        "(uint8[N,3] q) => (y, r) <int8[3,2] w = {1,-2,3,-4,5,-6}, float s = {0.1}, int8 z = {3}> "
        "{ x = DequantizeLinear(q, s) v = DequantizeLinear(w, s, z) y = MatMul(x, v) r = Mul(y, s) }",
        f"(uint8[1,2,5] q) => (y) <int8[3,2,3] w = {_numbers(18)}, float s = {{0.1}}, int8 z = {{3}}, uint8 u = {{9}}> "
        "{ x = DequantizeLinear(q, s, u) v = DequantizeLinear(w, s, z) c = Conv(x, v) y = QuantizeLinear(c, s, u) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        weights = reader.producer(node.inputs[1])
        if not _dequantises(weights) or weights.types[0].dtype != DType.FLOAT:
            return None
        quantised = given(weights.inputs)
        if reader.type(quantised[1]).dtype != DType.FLOAT:
            return None
        shapes = {reader.type(v).shape for v in quantised[1:]}
        if len(shapes) > 1 or len(shapes.pop() or ()) > 1 or not all(map(reader.is_const, quantised)):
            return None
        if node.op in _PACKED:
            profitable("DequantizeLinear" not in above(reader, node), "the product is one of bytes")
            profitable(any(reader.count_users(v) > 1 for v in quantised), "the weights are packed")
        elif _is_fused(reader, node):
            return None
        inputs = (*quantised, node.inputs[0], *given(node.inputs[2:]))
        data = (node, weights.attrs.get("axis", 1), len(quantised))
        return Region(node.outputs, inputs, (node, weights), data)

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        node, axis, count = region.data
        w, *parameters = inputs[:count]
        scale, *zero = (_along(op, p, w.rank, axis) for p in parameters)
        weights = op.Cast(w, to=_SINGLE)
        if zero:
            weights = op.Sub(weights, op.Cast(zero[0], to=_SINGLE))
        x, *bias = inputs[count:]
        return op[node.op](x, op.Mul(weights, scale), *bias, attrs=node.attrs)


# Operators through which ONNX Runtime moves quantisations, or which it fuses with a convolution.
_THROUGH = MOVING | {"Clip", "LeakyRelu", "MaxPool", "Relu"}


def _is_fused(reader: Reader, node: Node) -> bool:
    """Whether ONNX Runtime makes an operator of bytes of a convolution, which stands between bytes, perhaps with some
    operators in between. It would quantise weights of floats once more, to other numbers.
    """
    return "DequantizeLinear" in above(reader, node) and "QuantizeLinear" in below(reader, node)


def above(reader: Reader, node: Node, through: Set[str] = _THROUGH) -> set[str]:
    """The operators before a node's first input, and those before operators in `through`, by their first input."""

    def before(n: Node) -> list[Node]:
        return [p for v in n.inputs[:1] if v != ABSENT and (p := reader.producer(v))]

    return _reached(before, node, through)


def below(reader: Reader, node: Node, through: Set[str] = _THROUGH) -> set[str]:
    """The operators that read a node's outputs, and those that read outputs of operators in `through`."""
    return _reached(lambda n: [u for v in n.outputs for u in reader.users(v)], node, through)


def _reached(following: Callable[[Node], list[Node]], node: Node, through: Set[str]) -> set[str]:
    seen, pending = dict[Value, Node](), following(node)
    while pending:
        other = pending.pop()
        if other.id not in seen:
            seen[other.id] = other
            if other.op in through:
                pending += following(other)
    return {n.op for n in seen.values()}


class _Rectified(Rule, family="precision"):
    """A rule that writes an activation between bytes as LeakyRelu with slope 0, for which ONNX Runtime has a kernel of
    bytes (a table of 256 results).
    """

    backend = "onnxruntime"
    proof = "numeric"
    relies_on = "leakyrelu with slope 0 is relu for finite numbers"
    unpriced = True

    def target(self, op: Op, x: Val, t: Val, u: Val | None, s: Val, z: Val | None) -> Any:
        return op.QuantizeLinear(op.LeakyRelu(op.DequantizeLinear(x, t, u), alpha=0.0), s, z)


def _check_bytes(x: Val, t: Val, s: Val, z: Val | None) -> None:
    # For larger scales, products with bytes overflow, and 0 * inf is no number.
    accurate(t.dtype == DType.FLOAT and 0 < t.scalar < _LARGE, "the scale is no ordinary number")
    accurate(0 < s.scalar < np.inf, "the scale of the result is no ordinary number")
    profitable(x.dtype in _BYTES, "the operand is not of bytes")
    profitable((DType.UINT8 if z is None else z.dtype) == x.dtype, "the result is not of the same bytes")


class RectifyBytes(_Rectified):
    """quantise(relu(dequantise(x, t, u)), s, z) -> quantise(leakyrelu(dequantise(x, t, u)), s, z)  with slope 0.

    ONNX Runtime has no kernel of bytes for Relu, which then stays one of floats, if the zero point is not the least
    byte.
    """

    optional = ("u", "z")
    shapes = "x[...] t[]:const u[]:const s[]:const z[]:const"
    examples = graphs(
        "(uint8[N,3] x) => (y) <float t = {0.1}, uint8 u = {100}, float s = {0.2}, uint8 z = {7}> "
        "{ d = DequantizeLinear(x, t, u) r = Relu(d) y = QuantizeLinear(r, s, z) }",
        "(int8[5] x) => (y) <float t = {0.1}, int8 u = {-3}, float s = {0.3}, int8 z = {-100}> "
        "{ d = DequantizeLinear(x, t, u) r = Relu(d) y = QuantizeLinear(r, s, z) }",
        "(uint8[2,2] x) => (y) <float t = {0.1}> { d = DequantizeLinear(x, t) r = Relu(d) y = QuantizeLinear(r, t) }",
    )
    near_misses = graphs(
        "(uint8[2,2] x) => (y) <float t = {3e37}> { d = DequantizeLinear(x, t) r = Relu(d) y = QuantizeLinear(r, t) }",
    )

    def source(self, op: Op, x: Any, t: Any, u: Any, s: Any, z: Any) -> Any:
        return op.QuantizeLinear(op.Relu(op.DequantizeLinear(x, t, u)), s, z)

    def where(self, x: Val, t: Val, s: Val, z: Val | None) -> None:
        _check_bytes(x, t, s, z)


class ClipBytes(_Rectified):
    """quantise(clip(dequantise(x, t, u), 0, h), s, z) -> quantise(leakyrelu(dequantise(x, t, u)), s, z)  with slope 0

    if h is quantised to the greatest byte, where the range of bytes ends anyway. See RectifyBytes.
    """

    optional = ("u", "z", "h")
    shapes = "x[...] t[]:const u[]:const s[]:const z[]:const k[]:const h[]:const"
    examples = graphs(
        "(uint8[N,3] x) => (y) <float t = {0.1}, uint8 u = {100}, float s = {0.2}, uint8 z = {7}, float k = {0}, "
        "float h = {49.6}> { d = DequantizeLinear(x, t, u) r = Clip(d, k, h) y = QuantizeLinear(r, s, z) }",
        "(int8[5] x) => (y) <float t = {0.1}, int8 u = {-3}, float s = {0.03}, int8 z = {-100}, float k = {0}, "
        "float h = {6.9}> { d = DequantizeLinear(x, t, u) r = Clip(d, k, h) y = QuantizeLinear(r, s, z) }",
        "(uint8[2,2] x) => (y) <float t = {0.1}, float k = {0}> "
        "{ d = DequantizeLinear(x, t) r = Clip(d, k) y = QuantizeLinear(r, t) }",
    )
    near_misses = graphs(
        "(uint8[2,2] x) => (y) <float t = {0.1}, float s = {0.05}, float k = {-1}> "
        "{ d = DequantizeLinear(x, t) r = Clip(d, k) y = QuantizeLinear(r, s) }",
        "(uint8[N,3] x) => (y) <float t = {0.1}, uint8 u = {100}, float s = {0.01}, uint8 z = {7}, float k = {0}, "
        "float h = {2.4}> { d = DequantizeLinear(x, t, u) r = Clip(d, k, h) y = QuantizeLinear(r, s, z) }",
    )

    def source(self, op: Op, x: Any, t: Any, u: Any, s: Any, z: Any, k: Any, h: Any) -> Any:
        return op.QuantizeLinear(op.Clip(op.DequantizeLinear(x, t, u), k, h), s, z)

    def where(self, x: Val, t: Val, s: Val, z: Val | None, k: Val, h: Val | None) -> None:
        _check_bytes(x, t, s, z)
        require(k.scalar == 0, "the least number is not 0")
        if h is not None:
            with np.errstate(over="ignore"):
                steps = np.rint(np.float32(h.scalar) / np.float32(s.scalar))
            highest = steps + (0 if z is None else z.scalar)
            require(highest >= (127 if x.dtype == DType.INT8 else 255), "the range of bytes goes on")


# The kernel of GlobalAveragePool takes a scale by which a sum is multiplied between 2^-32 and 2^8.
_FACTORS = (1e-8, 250.0)


class PoolBytes(Rule, family="precision"):
    """quantise(mean(dequantise(x), spatial axes)) -> quantise(globalaveragepool(dequantise(x))).

    ONNX Runtime has a kernel of bytes for GlobalAveragePool, and none for ReduceMean.
    """

    backend = "onnxruntime"
    unpriced = True
    optional = ("u", "z")
    shapes = "x[n,c,h,w] t[]:const u[]:const a[k]:const s[]:const z[]:const"
    examples = graphs(
        "(uint8[N,2,3,4] x) => (y) <float t = {0.1}, uint8 u = {100}, float s = {0.2}, uint8 z = {7}> "
        "{ d = DequantizeLinear(x, t, u) m = ReduceMean(d, [2,3]) y = QuantizeLinear(m, s, z) }",
        "(int8[N,2,3,5] x) => (y) <float t = {0.1}, int8 u = {-3}, float s = {0.3}, int8 z = {-100}> "
        "{ d = DequantizeLinear(x, t, u) m = ReduceMean(d, [-1,-2]) y = QuantizeLinear(m, s, z) }",
        "(uint8[1,2,2,2] x) => (y) <float t = {0.1}> "
        "{ d = DequantizeLinear(x, t) m = ReduceMean(d, [2,3]) y = QuantizeLinear(m, t) }",
    )
    near_misses = graphs(
        "(uint8[1,2,2,2] x) => (y) <float t = {0.1}> "
        "{ d = DequantizeLinear(x, t) m = ReduceMean(d, [1,2]) y = QuantizeLinear(m, t) }",
        "(uint8[1,2,2,W] x) => (y) <float t = {0.1}> "
        "{ d = DequantizeLinear(x, t) m = ReduceMean(d, [2,3]) y = QuantizeLinear(m, t) }",
        "(uint8[1,2,4,1] x) => (y) <float t = {1030}, float s = {1}> "
        "{ d = DequantizeLinear(x, t) m = ReduceMean(d, [2,3]) y = QuantizeLinear(m, s) }",
        "(int8[2,0,2,2] x) => (y) <float t = {0.1}, int8 u = {3}> "
        "{ d = DequantizeLinear(x, t, u) m = ReduceMean(d, [2,3]) y = QuantizeLinear(m, t, u) }",
    )

    def source(self, op: Op, x: Any, t: Any, u: Any, a: Any, s: Any, z: Any) -> Any:
        return op.QuantizeLinear(op.ReduceMean(op.DequantizeLinear(x, t, u), a), s, z)

    def where(self, x: Val, t: Val, s: Val, z: Val | None, a: Val) -> None:
        _check_bytes(x, t, s, z)
        require(sorted(i % 4 for i in a.ints) == [2, 3], "other axes are averaged")
        sizes = [n if isinstance(n, int) else 0 for n in x.shape[1:]]
        accurate(min(sizes) > 0, "an image may be empty")
        factor = t.scalar / s.scalar / math.prod(sizes[1:])
        accurate(_FACTORS[0] < factor < _FACTORS[1], "ONNX Runtime's kernel does not take such scales")

    def target(self, op: Op, x: Val, t: Val, u: Val | None, s: Val, z: Val | None) -> Any:
        return op.QuantizeLinear(op.GlobalAveragePool(op.DequantizeLinear(x, t, u)), s, z)


# Beyond so many channels, ONNX Runtime copies images for a convolution of bytes in pieces that are long enough.
_FEW = 4


class ConvolveBlocks(RegionRule, family="precision"):
    """conv(q(x), w) -> conv(q(spacetodepth(x)), w')  for a convolution of bytes with a stride, of few channels.

    A block of stride x stride pixels becomes one pixel, with the channels of all: the same products are added. ONNX
    Runtime copies an image of bytes row by row of the kernel, and a row of three channels is short.
    """

    backend = "onnxruntime"
    unpriced = True
    anchors = ("Conv", "QLinearConv")
    # Sums of two products of these weights do not saturate where processors add them in 16 bits.
    examples = graphs(
        f"(float[N,3,6,8] x, float s, uint8 z) => (y) <int8[2,3,3,3] w = {_numbers(54, most=60)}, "
        "float[2] r = {0.1,0.2}, float t = {0.1}, uint8 u = {7}, float[2] b = {1,-2}> { q = QuantizeLinear(x, s, z) "
        "p = DequantizeLinear(q, t, u) v = DequantizeLinear<axis=0>(w, r) "
        "c = Conv<strides=[2,2], pads=[1,1,1,1]>(p, v, b) y = QuantizeLinear(c, s, z) }",
        f"(float[1,1,6,6] x) => (y) <int8[2,1,2,1] w = {_numbers(4, most=60)}, float s = {{0.1}}, int8 z = {{3}}, "
        "int8 o = {0}> { q = QuantizeLinear(x, s, z) p = DequantizeLinear(q, s, z) v = DequantizeLinear(w, s, o) "
        "c = Conv<strides=[3,3], pads=[0,2,1,0]>(p, v) r = Relu(c) y = QuantizeLinear(r, s, z) }",
        f"(float[N,2,8,4] x) => (y) <int8[3,2,3,2] w = {_numbers(36, most=60)}, float s = {{0.1}}, uint8 z = {{3}}, "
        "float[3] r = {0.1,0.2,0.3}, int8[3] o = {0,0,0}, int32[3] b = {1,5,-7}> { q = QuantizeLinear(x, s, z) "
        "y = QLinearConv<strides=[2,2], pads=[1,0,0,1]>(q, s, z, w, r, o, s, z, b) }",
    )
    near_misses = graphs(
        f"(float[1,1,6,6] x) => (y) <int8[2,1,2,2] w = {_numbers(8)}, float s = {{0.1}}, int8 z = {{3}}, "
        "int8 o = {1}> { q = QuantizeLinear(x, s, z) p = DequantizeLinear(q, s, z) v = DequantizeLinear(w, s, o) "
        "c = Conv<strides=[3,3]>(p, v) y = QuantizeLinear(c, s, z) }",
        f"(float[1,1,7,6] x) => (y) <int8[2,1,2,2] w = {_numbers(8)}, float s = {{0.1}}, int8 z = {{3}}>"
        " { q = QuantizeLinear(x, s, z) p = DequantizeLinear(q, s, z) v = DequantizeLinear(w, s, z) "
        "c = Conv<strides=[2,2]>(p, v) y = QuantizeLinear(c, s, z) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        between: tuple[Node, ...] = ()
        if node.op == "Conv":
            image, weights = (reader.producer(v) for v in node.inputs[:2])
            if not _dequantises(image) or not _dequantises(weights) or not _is_fused(reader, node):
                return None
            between, (w, *parameters) = (image, weights), weights.inputs
            axis, quantised = weights.attrs.get("axis", 1), reader.producer(image.inputs[0])
        else:
            (w, *parameters), axis = node.inputs[3:6], 0
            quantised = reader.producer(node.inputs[0])
        if quantised is None or quantised.op != "QuantizeLinear" or not reader.is_const(w):
            return None
        x, numbers = reader.type(quantised.inputs[0]), reader.type(w)
        blocks = _Blocks.of(node.attrs, x.shape or (), numbers.shape or ())
        if blocks is None or x.dtype != DType.FLOAT:
            return None
        if quantised.types[0].dtype not in _BYTES or numbers.dtype not in _BYTES:
            return None
        for factor in between:  # a weight of zero meets each pixel of a block, and 0 * inf is no number
            scale = factor.inputs[1]
            profitable(reader.is_const(scale), "a scale is computed")
            largest = float(np.abs(reader.val(scale).whole_array).max(initial=0.0))
            accurate(largest < _LARGE, "a scale is no ordinary number")
        of_image = (*quantised.inputs[1:], *(between[0].inputs[1:] if between else node.inputs[1:3]))
        require(all(reader.type(v).shape == () for v in given(of_image)), "the image's channels have scales")
        require(axis == 0 or reader.type(parameters[0]).shape == (), "the scales are not those of channels")
        require(len(parameters) < 2 or _is_zero(reader, parameters[1]), "the weights have a zero point")
        nodes = (node, *between, quantised)
        profitable(all(_is_read_once(reader, n) for n in nodes[1:]), "the bytes are read elsewhere, too")
        values = dict.fromkeys(v for n in nodes for v in given(n.inputs))
        inputs = tuple(v for v in values if all(v not in n.outputs for n in nodes))
        return Region(node.outputs, inputs, nodes, (nodes, blocks))

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        (node, *between, quantised), blocks = region.data
        values: dict[Value, Any] = dict(zip(region.inputs, inputs))

        def again(n: Node, *first: Any, **attrs: Any) -> Any:
            rest = (None if v == ABSENT else values[v] for v in n.inputs[len(first) :])
            return op[n.op](*first, *rest, attrs=n.attrs, **attrs)

        x = op.SpaceToDepth(values[quantised.inputs[0]], blocksize=blocks.stride)
        image, changed = again(quantised, x), blocks.attrs
        if not between:
            w = blocks.weights(op, values[node.inputs[3]])
            return op.QLinearConv(
                image, *(values[v] for v in node.inputs[1:3]), w,
                *(values[v] for v in given(node.inputs[4:])), attrs=node.attrs, **changed,
            )  # fmt: skip
        w = blocks.weights(op, values[between[1].inputs[0]])
        return again(node, again(between[0], image), again(between[1], w), **changed)


def _dequantises(node: Node | None) -> TypeGuard[Node]:
    return node is not None and node.op == "DequantizeLinear" and not node.attrs.get("block_size")


def _is_zero(reader: Reader, value: Value) -> bool:
    return value == ABSENT or (reader.is_const(value) and reader.val(value).uniform == 0)


def _is_read_once(reader: Reader, node: Node) -> bool:
    (output,) = node.outputs
    return reader.count_users(output) == 1 and not reader.is_output(output)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A convolution with stride s as one of blocks of s x s pixels: kernel and padding count blocks. The kernel grows
    by zeros, `front` (of height and width) before it.
    """

    stride: int
    front: tuple[int, int]
    kernel: tuple[int, int]  # in blocks
    pads: tuple[int, ...]  # in blocks
    shape: tuple[int, ...]  # of the weights as they are

    @staticmethod
    def of(attrs: Mapping[str, Any], image: tuple[Any, ...], weights: tuple[Any, ...]) -> _Blocks | None:
        """None if the convolution has no such form, or gains nothing by it."""
        strides, plain = attrs.get("strides", ()), ("group", "auto_pad", "dilations")
        if len(image) != 4 or any(not isinstance(n, int) for n in (*image[1:], *weights)):
            return None
        if any(set(np.ravel(attrs.get(name, 1))) - {1, "NOTSET"} for name in plain):
            return None
        if len(set(strides)) != 1 or strides[0] < 2 or not 0 < image[1] <= _FEW or 0 in weights:
            return None
        (stride, _), pads = strides, attrs.get("pads", (0, 0, 0, 0))
        front, kernel, begin, end = [], [], [], []
        for size, width, before, after in zip(image[2:], weights[2:], pads[:2], pads[2:]):
            front.append(-before % stride)
            kernel.append(-(-(width + front[-1]) // stride))
            begin.append((before + front[-1]) // stride)
            count = (size + before + after - width) // stride + 1
            end.append(count - 1 + kernel[-1] - size // stride - begin[-1])
            if size % stride or count < 1 or end[-1] < 0:
                return None
        return _Blocks(stride, (front[0], front[1]), (kernel[0], kernel[1]), (*begin, *end), weights)

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes of the convolution that change."""
        return {"strides": (1, 1), "pads": self.pads, "kernel_shape": self.kernel}

    def weights(self, op: Op, w: Val) -> Any:
        """The weights, in SpaceToDepth's order of channels."""
        (m, c, *widths), (high, wide), s = self.shape, self.kernel, self.stride
        end = [n * s - width - front for n, width, front in zip(self.kernel, widths, self.front)]
        padded = op.Pad(w, [0, 0, *self.front, 0, 0, *end])
        split = op.Transpose(op.Reshape(padded, [m, c, high, s, wide, s]), perm=(0, 3, 5, 1, 2, 4))
        return op.Reshape(split, [m, s * s * c, high, wide])

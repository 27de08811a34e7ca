"""Products with weights of 4 or 8 bits that are packed in blocks (MatMulNBits), and rows of quantised tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewrite_rules.axes import same_dims
from rewrite_rules.elementwise import given
from rewrite_rules.examples import graphs
from xrlflow.ir import ABSENT, Attrs, DType, Node, Value
from xrlflow.ops.packed import PRODUCT, QUANTISING
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, accurate, profitable, require

_KNOWN = {"K", "N", "bits", "block_size", "accuracy_level"}
_SINGLE = int(DType.FLOAT)
_NARROW = {DType.INT4: DType.INT8, DType.UINT4: DType.UINT8}
_TABLES = (*_NARROW, DType.INT8, DType.UINT8)


def _packed(count: int) -> str:
    """Constant bytes, as ONNX's text has them."""
    return f"{{{','.join(str((91 * i + 7) % 256) for i in range(count))}}}"


def _scales(count: int) -> str:
    """Constant scales, as ONNX's text has them."""
    return f"{{{','.join(str((3 + 5 * i % 7) / 8) for i in range(count))}}}"


def _number(attrs: Attrs, name: str, default: int) -> int:
    value = attrs.get(name, default)
    assert isinstance(value, int)
    return value


# Products


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How the weights of a product are packed: [n, k] numbers of so many bits, in blocks along k."""

    k: int
    n: int
    bits: int
    block: int
    level: int

    @staticmethod
    def of(attrs: Attrs) -> _Blocks:
        """The packing that a node's attributes say. Refuses attributes of kernels for other processors."""
        require(attrs.keys() <= _KNOWN, "the layout is one of another processor")
        k, n = _number(attrs, "K", 0), _number(attrs, "N", 0)
        level = _number(attrs, "accuracy_level", 0)
        return _Blocks(k, n, _number(attrs, "bits", 4), _number(attrs, "block_size", 32), level)

    @property
    def count(self) -> int:
        """The blocks of one column."""
        return -(-self.k // self.block)

    def with_columns(self, n: int) -> dict[str, int]:
        """The attributes of a product with n columns that are packed alike."""
        level = {"accuracy_level": self.level} if self.level else {}
        return {"K": self.k, "N": n, "bits": self.bits, "block_size": self.block, **level}


class MergePackedMatMuls(RegionRule, family="merge"):
    """matmulnbits(x, v), matmulnbits(x, w), ... -> split(matmulnbits(x, [v|w|...]))  for all that are packed alike.

    Threads are started once. Columns are computed in groups of four, so the bits stay the same.
    """

    backend = "onnxruntime"
    anchors = (PRODUCT,)
    examples = graphs(
        "(float[N,2,16] x) => (float[N,2,4] y, float[N,2,8] z) "
        f"<uint8[4,1,8] v = {_packed(32)}, float[4] s = {_scales(4)}, uint8[8,1,8] w = {_packed(64)}, "
        f"float[8] t = {_scales(8)}> {{ y = com.microsoft.MatMulNBits<K=16, N=4, bits=4, block_size=16>(x, v, s) "
        "z = com.microsoft.MatMulNBits<K=16, N=8, bits=4, block_size=16>(x, w, t) }",
        "(float[N,20] x) => (float[N,4] a, float[N,4] b, float[N,4] c) "
        f"<uint8[4,2,8] u = {_packed(64)}, float[4,2] r = {_scales(8)}, uint8[4,1] i = {_packed(4)}, "
        "uint8[4,2,8] v = {"
        + ",".join(str((57 * i + 3) % 256) for i in range(64))
        + "}, float[8] s = {1,2,3,4,5,6,7,8}, uint8[4] j = {1,2,3,4}, "
        "uint8[4,2,8] w = {"
        + ",".join(str((33 * i + 9) % 256) for i in range(64))
        + "}, float[8] t = {3,1,2,4,5,9,7,8}, uint8[4] l = {9,20,30,40}, float[4] d = {1,2,3,4}> "
        "{ a = com.microsoft.MatMulNBits<K=20, N=4, bits=4, block_size=16>(x, u, r, i) "
        "b = com.microsoft.MatMulNBits<K=20, N=4, bits=4, block_size=16>(x, v, s, j, , d) "
        "c = com.microsoft.MatMulNBits<K=20, N=4, bits=4, block_size=16>(x, w, t, l) }",
    )
    near_misses = graphs(
        f"(float[N,32] x) => (float[N,4] y, float[N,4] z) <uint8[4,2,8] v = {_packed(64)}, float[8] s = {_scales(8)}, "
        f"uint8[4,1,16] w = {_packed(64)}, float[4] t = {_scales(4)}> "
        "{ y = com.microsoft.MatMulNBits<K=32, N=4, bits=4, block_size=16>(x, v, s) "
        "z = com.microsoft.MatMulNBits<K=32, N=4, bits=4, block_size=32>(x, w, t) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        x = node.inputs[0]
        own = _shared(reader, node, x)
        if own is None:
            return None
        group = [n for n in reader.users(x) if _shared(reader, n, x) == own]
        if len(group) < 2 or node.id != min(n.id for n in group):
            return None
        sizes = tuple(_Blocks.of(n.attrs).n for n in group)
        accurate(all(n % 4 == 0 for n in sizes), "four columns would be of two products")
        inputs = tuple(v for n in group for v in given(n.inputs[1:]))
        data = tuple((n.attrs, len(n.inputs) > 3 and n.inputs[3] != ABSENT, _biased(n)) for n in group)
        return Region(tuple(n.outputs[0] for n in group), (x, *inputs), tuple(group), data)

    def target(self, op: Op, region: Region, x: Val, *inputs: Val) -> Any:
        values = iter(inputs)
        packings = [_Blocks.of(attrs) for attrs, _, _ in region.data]
        weights, scales, zeros, biases = list[Val](), list[Val](), list[Val](), list[Any]()
        for packing, (_, offset, biased) in zip(packings, region.data):
            weights.append(next(values))
            scales.append(next(values))
            zeros += [next(values)] if offset else []
            biases.append(next(values) if biased else op.Expand(np.zeros(1, x.storage), [packing.n]))
        columns = sum(p.n for p in packings)
        y = op[PRODUCT](
            x,
            op.Concat(*weights, axis=0),
            _joined(op, scales),
            _joined(op, zeros) if zeros else None,
            None,
            op.Concat(*biases, axis=0) if any(b for _, _, b in region.data) else None,
            **packings[0].with_columns(columns),
        )
        return op.Split(y, axis=x.rank - 1, sizes=[p.n for p in packings])


def _biased(node: Node) -> bool:
    return len(node.inputs) > 5 and node.inputs[5] != ABSENT


def _shared(reader: Reader, node: Node, x: Value) -> tuple[_Blocks, DType | None] | None:
    """What products of x must have in common to be one: the packing, but for the number of columns, and the type of
    the zero points. None if the node is no product of x with constants.
    """
    if node.op != PRODUCT or node.inputs[0] != x or not node.attrs.keys() <= _KNOWN:
        return None
    weights, scales, zeros, groups, _ = [*node.inputs[1:], *[ABSENT] * 4][:5]
    if groups != ABSENT or not all(map(reader.is_const, given(node.inputs[1:]))):
        return None
    own = _Blocks.of(node.attrs)
    shape = (own.n, own.count, own.block * own.bits // 8)
    if reader.type(weights).shape != shape or reader.type(scales).size is None:
        return None
    offset = None if zeros == ABSENT else reader.type(zeros).dtype
    return _Blocks(own.k, 0, own.bits, own.block, own.level), offset


def _joined(op: Op, parts: Sequence[Val]) -> Any:
    """Parameters of all columns, one column after the other."""
    return op.Concat(*(p if p.rank == 1 else op.Reshape(p, [-1]) for p in parts), axis=0)


class AddBiasInPackedMatMul(Rule, family="precision"):
    """matmulnbits(x, w) + b -> matmulnbits(x, w, b)  for b[n]. ONNX Runtime does so, too, but not behind a Split."""

    backend = "onnxruntime"
    optional = ("z",)
    shapes = "x[...] w[...]:const s[...]:const z[...]:const b[...]"
    examples = graphs(
        f"(float[N,2,16] x, float[4] b) => (float[N,2,4] y) <uint8[4,1,8] w = {_packed(32)}, float[4] s = {_scales(4)}>"
        " { p = com.microsoft.MatMulNBits<K=16, N=4, bits=4, block_size=16>(x, w, s) y = Add(p, b) }",
        f"(float[N,16] x, float[4] b) => (float[N,4] y) <uint8[4,1,16] w = {_packed(64)}, float[4] s = {_scales(4)}, "
        "uint8[4] z = {100,128,7,0}> "
        "{ p = com.microsoft.MatMulNBits<K=16, N=4, bits=8, block_size=16>(x, w, s, z) y = Add(b, p) }",
    )
    near_misses = graphs(
        f"(float[N,16] x, float[1] b) => (float[N,4] y) <uint8[4,1,8] w = {_packed(32)}, float[4] s = {_scales(4)}> "
        "{ p = com.microsoft.MatMulNBits<K=16, N=4, bits=4, block_size=16>(x, w, s) y = Add(p, b) }",
    )

    def source(self, op: Op, x: Any, w: Any, s: Any, z: Any, b: Any) -> Any:
        return op.Add(op[PRODUCT](x, w, s, z, attrs="c"), b)

    def where(self, m: Captures, b: Val) -> None:
        require(b.rank == 1 and b.size(0) == _Blocks.of(m.c).n, "it is not one number per column")

    def target(self, op: Op, m: Captures, x: Val, w: Val, s: Val, z: Val | None, b: Val) -> Any:
        return op[PRODUCT](x, w, s, z, None, b, attrs=m.c)


class UnpackWeightsOnce(RegionRule, family="precision"):
    """matmulnbits(x, w, s, z) -> x @ ((unpack(w) - z) * s)  where the product is computed in float32 anyhow.

    ONNX Runtime computes the right side's weights when it loads the model. They take eight times the memory. The left
    side unpacks the weights in every run; a product of one row is bound by memory, and faster so.
    """

    backend = "onnxruntime"
    assumes = "memory"
    anchors = (PRODUCT,)
    examples = graphs(
        f"(float[N,2,16] x) => (float[N,2,4] y) <uint8[4,1,8] w = {_packed(32)}, float[4] s = {_scales(4)}> "
        "{ y = com.microsoft.MatMulNBits<K=16, N=4, bits=4, block_size=16>(x, w, s) }",
        f"(float[2,20] x) => (float[2,4] y) <uint8[4,2,8] w = {_packed(64)}, float[4,2] s = {_scales(8)}, "
        f"uint8[4] z = {{3,18,255,64}}, float[4] b = {{1,2,3,4}}> "
        "{ y = com.microsoft.MatMulNBits<K=20, N=4, bits=4, block_size=16>(x, w, s, z, , b) }",
        f"(float[2,40] x) => (float[2,3] y) <uint8[3,3,8] w = {_packed(72)}, float[9] s = {_scales(9)}, "
        f"uint8[6] z = {_packed(6)}> "
        "{ y = com.microsoft.MatMulNBits<K=40, N=3, bits=4, block_size=16>(x, w, s, z) }",
        f"(float[N,2,20] x) => (float[N,2,4] y) <uint8[4,2,16] w = {_packed(128)}, float[8] s = {_scales(8)}, "
        "uint8[8] z = {1,2,3,128,5,6,255,0}> "
        "{ y = com.microsoft.MatMulNBits<K=20, N=4, bits=8, block_size=16>(x, w, s, z) }",
    )
    near_misses = graphs(
        f"(float[2,32] x) => (float[2,4] y) <uint8[4,2,8] w = {_packed(64)}, float[8] s = {_scales(8)}, "
        "int32[32] g = {0,1,0,1,1,0,0,1,0,1,0,1,1,0,0,1,0,1,0,1,1,0,0,1,0,1,0,1,1,0,0,1}> "
        "{ y = com.microsoft.MatMulNBits<K=32, N=4, bits=4, block_size=16>(x, w, s, , g) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        x, weights, scales, zeros, groups, bias = [*node.inputs, *[ABSENT] * 3][:6]
        require(groups == ABSENT, "the rows of a block are scattered")
        parameters = given((weights, scales, zeros, bias))
        packing, rows = _Blocks.of(node.attrs), reader.val(x)
        profitable(all(map(reader.is_const, parameters)), "the weights are not constant")
        profitable(rows.dtype == DType.FLOAT, "the product is not one of float32")
        profitable(packing.level != QUANTISING, "products of bytes are faster")
        profitable(packing.bits in (4, 8), "the numbers have neither 4 nor 8 bits")
        profitable(zeros == ABSENT or reader.type(zeros).dtype == DType.UINT8, "the zero points are floats")
        profitable(any(d != 1 for d in rows.shape[:-1]), "the product has one row")
        return Region(node.outputs, (x, *parameters), (node,), (packing, zeros != ABSENT))

    def target(self, op: Op, region: Region, x: Val, w: Val, s: Val, *more: Val) -> Any:
        p, offset = region.data
        values = iter(more)
        numbers = _floats(op, w, p.bits, [p.n, p.count, p.block])
        if offset:
            packed = op.Reshape(next(values), [p.n, 1, -1])
            zeros: Any = op.Slice(_floats(op, packed, p.bits, [p.n, -1, 1]), [0], [p.count], [1])
        else:
            zeros = op.constant(np.float32(1 << p.bits - 1))
        weights = op.Mul(op.Sub(numbers, zeros), op.Reshape(s, [p.n, p.count, 1]))
        rows = op.Reshape(weights, [p.n, -1])
        if p.count * p.block != p.k:
            rows = op.Slice(rows, [0], [p.k], [1])
        y, bias = op.MatMul(x, op.Transpose(rows, perm=[1, 0])), next(values, None)
        return y if bias is None else op.Add(y, bias)


def _floats(op: Op, packed: Val, bits: int, shape: Sequence[int]) -> Any:
    """The numbers that bytes[n,i,j] hold, the lowest bits first, as float32 of a shape."""
    if bits == 4:
        low, high = op.Mod(packed, 16), op.Div(packed, 16)
        packed = op.Concat(op.Unsqueeze(low, [-1]), op.Unsqueeze(high, [-1]), axis=-1)
    return op.Cast(op.Reshape(packed, list(shape)), to=_SINGLE)


# Tables


class LookUpQuantisedRows(Rule, family="precision"):
    """gather(dequantise(w, s, z), i) -> dequantise(gather(w, i), gather(s, i), gather(z, i))  for rows.

    ONNX Runtime dequantises the whole table in each run. It cannot take rows of 4-bit numbers, so these are stored as
    bytes.
    """

    optional = ("z",)
    shapes = "w[...] s[...] z[...] i[...]:int"
    examples = graphs(
        "(int64[N,2] i) => (float[N,2,3] y) <int8[4,3] w = {1,-2,3,-4,5,-6,7,-8,9,-10,11,-12}, float s = {0.5}> "
        "{ t = DequantizeLinear(w, s) y = Gather(t, i) }",
        "(int64[2] i) => (float[2,3] y) <uint8[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[3] s = {0.5,2,4}, "
        "uint8[3] z = {7,128,3}> { t = DequantizeLinear<axis=1>(w, s, z) y = Gather(t, i) }",
        "(int64[N,2] i) => (float[N,2,3] y) <uint8[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[4] s = {0.5,2,4,3}, "
        "uint8[4] z = {7,128,3,1}> { t = DequantizeLinear<axis=0>(w, s, z) y = Gather(t, i) }",
        "(int64[N,2] i) => (float[N,2,3] y) <int8[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[4] s = {0.5,2,4,3}> "
        "{ t = DequantizeLinear<axis=0>(w, s) y = Gather(t, i) }",
        "(int64[N,2] i) => (float[N,2,5] y) <int8[2,5] w = {1,2,3,4,5,6,7,8,9,10}, "
        "float[2,3] s = {0.5,2,4,3,1,7}, int8[2,3] z = {1,2,3,4,-5,6}> "
        "{ t = DequantizeLinear<axis=1, block_size=2>(w, s, z) y = Gather(t, i) }",
        "(int64[1] i) => (float[1,4] y) <int4[3,4] w = {1,-2,3,-4,5,-6,7,-8,1,2,3,4}, float[3,2] s = {0.5,2,4,3,1,7}, "
        "int4[3,2] z = {1,2,3,4,-5,6}> { t = DequantizeLinear<axis=-1, block_size=2>(w, s, z) y = Gather(t, i) }",
        "(int64[2] i) => (float[2,2,2] y) <uint4[3,2,2] w = {1,2,3,4,5,6,7,8,1,2,3,4}, float[2] s = {0.5,2}, "
        "uint4[2] z = {1,2}> { t = DequantizeLinear<axis=1>(w, s, z) y = Gather(t, i) }",
    )
    near_misses = graphs(
        "(int64[2] i) => (float[2,2] y) <int8[4,2] w = {1,2,3,4,5,6,7,8}, float[2,2] s = {0.5,2,4,3}> "
        "{ t = DequantizeLinear<axis=0, block_size=2>(w, s) y = Gather(t, i) }",
        "(int64[2] i) => (float[2,2] y) <int8[4,2] w = {1,2,3,4,5,6,7,8}, float[3,2] s = {0.5,2,4,3,1,7}> "
        "{ t = DequantizeLinear<axis=1, block_size=1>(w, s) y = Gather(t, i) }",
        "(int64[2] i) => (float[2,2] y) <int8[4,2] w = {1,2,3,4,5,6,7,8}, float[4,2] s = {0.5,2,4,3,1,7,2,1}> "
        "{ t = DequantizeLinear(w, s) y = Gather(t, i) }",
        "(int64[2] i) => (float16[2,2] y) <int8[4,2] w = {1,2,3,4,5,6,7,8}, float s = {0.5}> "
        "{ t = DequantizeLinear<output_dtype=10>(w, s) y = Gather(t, i) }",
    )

    def source(self, op: Op, w: Any, s: Any, z: Any, i: Any) -> Any:
        return op.Gather(op.DequantizeLinear(w, s, z, attrs="c"), i)

    def where(self, m: Captures, w: Val, s: Val, z: Val | None, i: Val) -> None:
        require(m.c.keys() <= {"axis", "block_size"}, "the result has another type than the scales")
        profitable(w.dtype in _TABLES and s.dtype == DType.FLOAT, "it is no table of bytes")
        profitable(
            w.dtype not in _NARROW or (w.const and (z is None or z.const)), "no constant is made bytes"
        )
        in_range = s.rank == 0 or -w.rank <= _number(m.c, "axis", 1) < w.rank
        profitable(in_range, "an axis is out of range")
        block = _number(m.c, "block_size", 0)
        require(s.rank == w.rank if block else s.rank < 2, "the scales are neither of an axis nor of blocks")
        require(not (self._by_row(m, w, s) and (block or s.rank > 1)), "a block has several rows")
        require(z is None or same_dims(z.shape, s.shape), "there are not as many zero points as scales")
        for parameter in (s, z):
            if parameter is not None and (parameter.rank > 1 or self._by_row(m, w, s)):
                require(same_dims(parameter.shape[:1], w.shape[:1]), "there are not as many scales as rows")
        profitable(s.rank < 2 or w.rank + i.rank > 2, "it is one row, of blocks")

    @staticmethod
    def _by_row(m: Captures, w: Val, s: Val) -> bool:
        """Whether the scales differ along the rows' axis (in blocks, if they have as many axes as the table)."""
        return s.rank > 0 and s.sizes != (1,) and _number(m.c, "axis", 1) % w.rank == 0

    def target(self, op: Op, m: Captures, w: Val, s: Val, z: Val | None, i: Val) -> Any:
        rows = op.Gather(_bytes(op, w), i)
        zero = None if z is None else _bytes(op, z)
        if s.rank == 0 or s.sizes == (1,):
            return op.DequantizeLinear(rows, s, zero)
        if self._by_row(m, w, s):
            numbers = op.Cast(rows, to=_SINGLE)
            if zero is not None:
                numbers = op.Sub(numbers, op.Cast(self._beside(op, zero, i, w), to=_SINGLE))
            return op.Mul(numbers, self._beside(op, s, i, w))
        axis = _number(m.c, "axis", 1) % w.rank + i.rank - 1
        block = _number(m.c, "block_size", 0)
        if block:
            s, zero = op.Gather(s, i), None if zero is None else op.Gather(zero, i)
        return op.DequantizeLinear(rows, s, zero, axis=axis, block_size=block)

    @staticmethod
    def _beside(op: Op, parameter: Val, i: Val, w: Val) -> Any:
        """The numbers of these rows, so that they broadcast over the rows."""
        taken = op.Gather(parameter, i)
        return op.Unsqueeze(taken, list(range(i.rank, i.rank + w.rank - 1))) if w.rank > 1 else taken


def _bytes(op: Op, numbers: Val) -> Any:
    """Numbers of 4 bits as bytes; bytes as they are."""
    to = _NARROW.get(numbers.dtype)
    return numbers if to is None else op.Cast(numbers, to=int(to))

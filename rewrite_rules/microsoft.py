"""Rules that write ONNX Runtime's own operators (domain com.microsoft), in cases in which its optimiser does not.

The rules are off unless the user allows them, because no other runtime has these operators.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rewrite_rules.axes import compose, is_identity, permutation, reshape_numbers
from rewrite_rules.elementwise import FLOAT, read_once
from rewrite_rules.examples import graphs
from rewrite_rules.shapes import either
from xrlflow.ir import Dim, DType, Node, TensorType, Value
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, profitable, require


def _runs(type: TensorType) -> TensorType:
    """The same type, not constant: ONNX Runtime computes such a value when the model runs, even if it depends on
    constants only.
    """
    return type.as_const(False)


class _Contributed(Rule, family="microsoft"):
    """A rule that writes one of ONNX Runtime's own operators."""

    contrib = True
    backend = "onnxruntime"
    dtypes = FLOAT


# Products


def _last_two(rank: int) -> tuple[int, ...]:
    """The permutation that exchanges the last two dimensions."""
    return (*range(rank - 2), rank - 1, rank - 2)


class _FuseTransposeIntoMatMul(_Contributed):
    """A rule for a product of which one operand is a transpose of y."""

    def where(self, m: Captures, y: Val) -> None:
        perm = permutation(m.p, y.rank)
        profitable(perm[-2] == len(perm) - 1, "its rows would not stay together")

    @staticmethod
    def transposed(op: Op, m: Captures, y: Val) -> Any:
        """y as an operand of FusedMatMul, which itself exchanges the last two dimensions. A Transpose of other
        dimensions may remain.
        """
        perm = compose(permutation(m.p, y.rank), _last_two(y.rank))
        return y if is_identity(perm) else op.Transpose(y, perm=perm)


class FuseTransposeIntoRightOfMatMul(_FuseTransposeIntoMatMul):
    """x @ transpose(y) -> fusedmatmul(x, y; transB)  where a Transpose of whole rows of y may be left."""

    shapes = "x[...,a,k] y[...,c,d]"
    examples = (
        "agraph (float[N,2,3,4] q, float[N,5,2,4] k) => (float[N,2,3,5] y) "
        "{ t = Transpose<perm=[0,2,3,1]>(k) y = MatMul(q, t) }",
        "agraph (float[3,4] x, float[5,4] z) => (float[3,5] y) { t = Transpose(z) y = MatMul(x, t) }",
    )

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.MatMul(x, op.Transpose(y, perm="p"))

    def target(self, op: Op, m: Captures, x: Val, y: Val) -> Any:
        product = op.MatMul(x, op.Transpose(y, perm=m.p))
        return op["com.microsoft::FusedMatMul"](
            x, self.transposed(op, m, y), transB=1, type=_runs(product.type)
        )


class FuseTransposeIntoLeftOfMatMul(_FuseTransposeIntoMatMul):
    """transpose(y) @ x -> fusedmatmul(y, x; transA)  where a Transpose of whole rows of y may be left."""

    shapes = "x[...,k,b] y[...,c,d]"
    examples = (
        "agraph (float[N,2,3,4] q, float[N,3,2,5] k) => (float[N,2,5,4] y) "
        "{ t = Transpose<perm=[0,2,3,1]>(k) y = MatMul(t, q) }",
        "agraph (float[4,3] x, float[4,5] z) => (float[5,3] y) { t = Transpose(z) y = MatMul(t, x) }",
    )

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.MatMul(op.Transpose(y, perm="p"), x)

    def target(self, op: Op, m: Captures, x: Val, y: Val) -> Any:
        product = op.MatMul(op.Transpose(y, perm=m.p), x)
        return op["com.microsoft::FusedMatMul"](
            self.transposed(op, m, y), x, transA=1, type=_runs(product.type)
        )


class FuseScaleIntoMatMul(_Contributed):
    """(x @ y) * c -> fusedmatmul(x, y; alpha c)  for a constant number c."""

    shapes = either("x[...,a,k] y[...,k,n]", ("c[]:const", "c[1]:const", "c[1,1]:const"))

    def source(self, op: Op, x: Any, y: Any, c: Any) -> Any:
        return op.Mul(op.MatMul(x, y), c)

    def where(self, c: Val) -> None:
        profitable(c.known, "the constant cannot be read")

    def target(self, op: Op, x: Val, y: Val, c: Val) -> Any:
        product = op.MatMul(x, y)
        return op["com.microsoft::FusedMatMul"](x, y, alpha=c.scalar, type=_runs(product.type))


class FuseTransposedScale(_FuseTransposeIntoMatMul):
    """(x @ transpose(y)) * c -> fusedmatmul(x, y; transB, alpha c)  for a constant number c."""

    shapes = either("x[...,a,k] y[...,u,v]", ("c[]:const", "c[1]:const"))
    examples = graphs(
        "(float[N,2,3,4] q, float[N,5,2,4] k) => (float[N,2,3,5] y) { t = Transpose<perm=[0,2,3,1]>(k) "
        "m = MatMul(q, t) y = Mul(m, 0.5) }",
        "(float[3,4] x, float[5,4] z) => (float[3,5] y) { t = Transpose(z) m = MatMul(x, t) y = Mul([-2.0], m) }",
    )

    def source(self, op: Op, x: Any, y: Any, c: Any) -> Any:
        return op.Mul(op.MatMul(x, op.Transpose(y, perm="p")), c)

    def where(self, m: Captures, y: Val, c: Val) -> None:  # type: ignore[override]
        super().where(m, y)
        profitable(c.known, "the constant cannot be read")

    def target(self, op: Op, m: Captures, x: Val, y: Val, c: Val) -> Any:
        product = op.MatMul(x, op.Transpose(y, perm=m.p))
        fused = op["com.microsoft::FusedMatMul"]
        return fused(x, self.transposed(op, m, y), transB=1, alpha=c.scalar, type=_runs(product.type))


# Activations


class FuseQuickGelu(_Contributed):
    """x * sigmoid(x * a) -> quickgelu(x; alpha a)  for a constant number a."""

    shapes = either("x[...]:float", ("a[]:const", "a[1]:const"))

    def source(self, op: Op, x: Any, a: Any) -> Any:
        return op.Mul(x, op.Sigmoid(op.Mul(x, a)))

    def where(self, x: Val, a: Val) -> None:
        require(x.rank >= a.rank, "it adds a dimension")
        profitable(a.known, "the constant cannot be read")

    def target(self, op: Op, x: Val, a: Val) -> Any:
        return op["com.microsoft::QuickGelu"](x, alpha=a.scalar, type=_runs(x.type))


class FuseSiluIntoQuickGelu(_Contributed):
    """x * sigmoid(x) -> quickgelu(x; alpha 1)."""

    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Mul(x, op.Sigmoid(x))

    def target(self, op: Op, x: Val) -> Any:
        return op["com.microsoft::QuickGelu"](x, alpha=1.0, type=_runs(x.type))


class FuseBiasGelu(_Contributed):
    """gelu(x + b) -> biasgelu(x, b)  for b along the last dimension of x."""

    shapes = "x[...,n] b[n]"

    def source(self, op: Op, x: Any, b: Any) -> Any:
        return op.Gelu(op.Add(x, b))

    def where(self, b: Val) -> None:
        profitable(b.size(0) > 0, "it is empty")

    def target(self, op: Op, x: Val, b: Val) -> Any:
        return op["com.microsoft::BiasGelu"](x, b, type=_runs(x.type))


# Normalisation


class FuseSkipLayerNormalization(_Contributed):
    """layernormalization(x + y, s, t) -> skiplayernormalization(x, y, s, t)  over the last dimension.

    ONNX Runtime itself fuses an Add in this way, but not a Sum, which is faster on several threads (`ReplaceAddBySum`).
    """

    unpriced = True
    optional = ("t",)
    shapes = "x[a,b,n] y[a,b,n] s[n] t[n] | x[a,n] y[a,n] s[n] t[n]"

    def source(self, op: Op, x: Any, y: Any, s: Any, t: Any) -> Any:
        return op.LayerNormalization(op.Add(x, y), s, t, epsilon="epsilon")

    def target(self, op: Op, m: Captures, x: Val, y: Val, s: Val, t: Val | None) -> Any:
        fused = op["com.microsoft::SkipLayerNormalization"]
        return fused(x, y, s, t, epsilon=m.epsilon, type=_runs(x.type))


# Attention

# The permutation that exchanges positions and heads.
_EXCHANGED = (0, 2, 1, 3)


class ReplaceAttentionByMultiHead(RegionRule, family="microsoft"):
    """transpose(attention(transpose(q), transpose(k), transpose(v), mask)) -> multiheadattention(q, k, v, mask).

    The operator reads q, k and v with the heads side by side in the last dimension, so that nothing has to be
    transposed. If -inf masks a whole row, the operator's result is NaN.
    """

    may_lose_errors = ("sizes",)
    contrib = True
    backend = "onnxruntime"
    dtypes = FLOAT
    may_add_nonfinite = True
    anchors = ("Attention",)
    reads_from = ("Transpose",)
    examples = (
        "agraph (float[N,S,2,4] q, float[N,T,2,4] k, float[N,T,2,6] v, float[1,1,S,T] m) => (float[N,S,2,6] y) "
        "{ a = Transpose<perm=[0,2,1,3]>(q) b = Transpose<perm=[0,2,1,3]>(k) c = Transpose<perm=[0,2,1,3]>(v) "
        "d = Attention<scale=0.25>(a, b, c, m) y = Transpose<perm=[0,2,1,3]>(d) }",
        "agraph (float[2,3,1,4] q, float[2,5,1,4] k, float[2,5,1,4] v, float[3,5] m) => (float[2,3,1,4] y) "
        "{ a = Transpose<perm=[0,2,1,3]>(q) b = Transpose<perm=[0,2,1,3]>(k) c = Transpose<perm=[0,2,1,3]>(v) "
        "d = Attention(a, b, c, m) y = Transpose<perm=[0,2,1,3]>(d) }",
        "agraph (float[1,3,2,2] q, float[1,4,2,2] k, float[1,4,2,2] v) => (float[1,3,2,2] y) "
        "{ a = Transpose<perm=[0,2,1,3]>(q) b = Transpose<perm=[0,2,1,3]>(k) c = Transpose<perm=[0,2,1,3]>(v) "
        "d = Attention(a, b, c) y = Transpose<perm=[0,2,1,3]>(d) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if len(node.inputs) > 4 or len(node.outputs) > 1:
            return None
        require(node.attrs.keys() <= {"scale"}, "it is causal, capped, or has heads of its own")
        transposed = [self._transposed(reader, v) for v in node.inputs[:3]]
        after = reader.users(node.outputs[0])
        if not all(transposed) or len(after) != 1 or after[0].op != "Transpose":
            return None
        profitable(read_once(reader, node.outputs[0]), "it is read elsewhere")
        require(after[0].attrs.get("perm") == _EXCHANGED, "the heads do not go back")
        rows = [t.inputs[0] for t in transposed if t is not None]
        q, k, v = (reader.val(r).shape for r in rows)
        require(q[2] == k[2] == v[2], "heads share keys")
        sizes = (*q[2:], k[3], v[3])
        require(all(isinstance(d, int) and d > 0 for d in sizes), "the heads are not known")
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        if mask is not None:
            require(reader.type(mask).dtype == DType.FLOAT, "the mask is not added")
            require(self._fits(reader.val(mask).shape, q, k), "the mask does not fit")
        inputs = tuple(rows) if mask is None else (*rows, mask)
        return Region(after[0].outputs, inputs, (node, after[0]), node.attrs.get("scale"))

    @staticmethod
    def _transposed(reader: Reader, value: Value) -> Node | None:
        """The node that computes a value, if it is a Transpose that exchanges positions and heads; else None."""
        node = reader.producer(value)
        if node is None or node.op != "Transpose":
            return None
        return node if node.attrs.get("perm") == _EXCHANGED else None

    @staticmethod
    def _fits(mask: tuple[Dim, ...], q: tuple[Dim, ...], k: tuple[Dim, ...]) -> bool:
        if not 2 <= len(mask) <= 4 or None in mask:
            return False
        batch, heads, rows, columns = (1,) * (4 - len(mask)) + mask
        return batch in (1, q[0]) and heads in (1, q[2]) and rows == q[1] and columns == k[1]

    def target(self, op: Op, region: Region, q: Val, k: Val, v: Val, mask: Val | None = None) -> Any:
        flat = []
        for x in (q, k, v):
            shape = (*x.shape[:2], x.size(2) * x.size(3))
            flat.append(op.Reshape(x, reshape_numbers(x.shape, shape)))
        if mask is not None and mask.rank < 4:
            mask = op.Unsqueeze(mask, list(range(4 - mask.rank)))
        scale = {} if region.data is None else {"scale": region.data}
        heads, width = v.size(2), v.size(3)
        y = op["com.microsoft::MultiHeadAttention"](
            *flat,
            None,
            None,
            mask,
            num_heads=heads,
            type=TensorType(q.dtype, (*q.shape[:2], heads * width)),
            **scale,
        )
        return op.Reshape(y, reshape_numbers(y.shape, (*q.shape[:2], heads, width)))


class ReplaceRotaryEmbedding(_Contributed):
    """rotaryembedding(x, cosine, sine, positions) -> com.microsoft's operator, which the runtime has had for longer."""

    shapes = "x[a,h,s,d] cosine[m,n] sine[m,n] positions[a,s]:int | x[a,s,d] cosine[m,n] sine[m,n] positions[a,s]:int"
    examples = (
        "agraph (float[2,3,4,8] x, float[5,4] c, float[5,4] s, int64[2,4] p) => (float[2,3,4,8] y) "
        "{ y = RotaryEmbedding(x, c, s, p) }",
        "agraph (float[2,4,16] x, float[5,4] c, float[5,4] s, int64[2,4] p) => (float[2,4,16] y) "
        "{ y = RotaryEmbedding<num_heads=2, interleaved=1>(x, c, s, p) }",
        "agraph (float[1,2,4,8] x, float[5,2] c, float[5,2] s, int64[1,4] p) => (float[1,2,4,8] y) "
        "{ y = RotaryEmbedding<num_heads=2, rotary_embedding_dim=4>(x, c, s, p) }",
    )
    near_misses = (
        "agraph (float[1,2,4,8] x, float[5,2] c, float[5,2] s, int64[1,4] p) => (float[1,2,4,8] y) "
        "{ y = RotaryEmbedding<rotary_embedding_dim=4>(x, c, s, p) }",
    )

    def source(self, op: Op, x: Any, cosine: Any, sine: Any, positions: Any) -> Any:
        return op.RotaryEmbedding(x, cosine, sine, positions, attrs="c")

    def where(self, m: Captures, x: Val, cosine: Val) -> None:
        heads = m.c.get("num_heads", 0)
        width = x.size(3) if x.rank == 4 else x.size(2) // max(heads, 1)
        rotated = m.c.get("rotary_embedding_dim", 0) or width
        require(cosine.size(1) * 2 == rotated, "the tables are wider than what is turned")
        require(x.rank == 3 or rotated == width or heads == x.shape[1], "the number of heads is not known")

    def target(self, op: Op, m: Captures, x: Val, cosine: Val, sine: Val, positions: Val) -> Any:
        rotary = op["com.microsoft::RotaryEmbedding"]
        # Without the number of heads, the kernel does not take this width. By default it rotates all elements of a
        # head.
        width = m.c.get("rotary_embedding_dim") if m.c.get("num_heads") else None
        return rotary(x, positions, cosine, sine, attrs=m.c, rotary_embedding_dim=width, type=_runs(x.type))


# Quantised products


class FuseMatMulIntegerToFloat(_Contributed):
    """cast(matmulinteger(a, b)) * (s * t) -> matmulintegertofloat(a, b, s, t)  with t one number, or one per column."""

    nonempty = True
    proof = "numeric"
    relies_on = "a product of three numbers is the same in any order, rounded"
    optional = ("z", "u")
    shapes = either(
        "a[...,m,k] b[k,n]",
        ("s[]:float", "s[1]:float"),
        ("t[]:float", "t[1]:float", "t[n]:float"),
        "z[...] u[...]",
    )
    examples = (
        "agraph (uint8[N,3,4] a, int8[4,2] b, float s, float[2] t, uint8 z) => (float[N,3,2] y) "
        "{ p = MatMulInteger(a, b, z) f = Cast<to=1>(p) c = Mul(s, t) y = Mul(f, c) }",
        "agraph (uint8[3,4] a, uint8[4,2] b, float[1] s, float t, uint8 z, uint8 u) => (float[3,2] y) "
        "{ p = MatMulInteger(a, b, z, u) f = Cast<to=1>(p) c = Mul(t, s) y = Mul(c, f) }",
        "agraph (int8[3,4] a, int8[4,2] b, float s, float t) => (float[3,2] y) "
        "{ p = MatMulInteger(a, b) f = Cast<to=1>(p) c = Mul(s, t) y = Mul(f, c) }",
    )

    def source(self, op: Op, a: Any, b: Any, z: Any, u: Any, s: Any, t: Any) -> Any:
        return op.Mul(op.Cast(op.MatMulInteger(a, b, z, u), to=1), op.Mul(s, t))

    def where(self, z: Val | None, u: Val | None) -> None:
        worthwhile_zeros(z, u)

    def target(self, op: Op, a: Val, b: Val, z: Val | None, u: Val | None, s: Val, t: Val) -> Any:
        like = op.Cast(op.MatMulInteger(a, b, z, u), to=1)
        return op["com.microsoft::MatMulIntegerToFloat"](a, b, s, t, z, u, type=_runs(like.type))


def worthwhile_zeros(*zeros: Val | None) -> None:
    """Refuse zero points with more than one number, because not every kernel takes them."""
    for zero in zeros:
        profitable(zero is None or all(d == 1 for d in zero.sizes), "a zero point is not one number")


_QUANTISED = either(
    "x[...,m,k]:float b[k,n]:const", ("t[]:float", "t[1]:float", "t[n]:float"), ("u[]", "u[1]"), "c[n]:float"
)


class FuseDynamicQuantizeMatMul(_Contributed):
    """cast(q @ b) * (s * t) -> dynamicquantizematmul(x, b, t, u)  for q, s = quantise(x), u the zero point of b."""

    proof = "numeric"
    relies_on = "a product of three numbers is the same in any order, rounded"
    optional: ClassVar[tuple[str, ...]] = ("u",)
    shapes = _QUANTISED.replace(" c[n]:float", "")
    examples: ClassVar[tuple[str, ...]] = graphs(
        "(float[N,3,4] x) => (float[N,3,2] y) <int8[4,2] b = {1,2,3,-4,5,6,-7,8}> { q, s, z "
        "= DynamicQuantizeLinear(x) p = MatMulInteger(q, b, z) f = Cast<to=1>(p) c = Mul(s, [0.5, 0.25]) "
        "y = Mul(f, c) }",
        "(float[3,4] x) => (float[3,2] y) <uint8[4,2] b = {1,2,3,4,5,6,7,8}, uint8 u = {3}> { q, s, z "
        "= DynamicQuantizeLinear(x) p = MatMulInteger(q, b, z, u) f = Cast<to=1>(p) c = Mul(0.5, s) y = Mul(c, f) }",
    )

    def product(self, op: Op, x: Any, b: Any, u: Any, t: Any) -> Any:
        q, s, z = op.DynamicQuantizeLinear(x, outputs=3)
        return op.Mul(op.Cast(op.MatMulInteger(q, b, z, u), to=1), op.Mul(s, t))

    def source(self, op: Op, x: Any, b: Any, u: Any, t: Any) -> Any:
        return self.product(op, x, b, u, t)

    def where(self, u: Val | None) -> None:
        worthwhile_zeros(u)

    def target(self, op: Op, x: Val, b: Val, u: Val | None, t: Val) -> Any:
        like = self.product(op, x, b, u, t)
        return op["com.microsoft::DynamicQuantizeMatMul"](x, b, t, u, type=_runs(like.type))


class FuseBiasedDynamicQuantizeMatMul(FuseDynamicQuantizeMatMul):
    """cast(q @ b) * (s * t) + c -> dynamicquantizematmul(x, b, t, u, c)  for q, s = quantise(x), u b's zero point."""

    shapes = _QUANTISED
    examples = tuple(
        e.replace("y = Mul", "w = Mul")
        .replace(" }", " y = Add(w, d) }")
        .replace("> {", ", float[2] d = {1,2}> {")
        for e in FuseDynamicQuantizeMatMul.examples
    )

    def source(self, op: Op, x: Any, b: Any, u: Any, t: Any, c: Any) -> Any:  # type: ignore[override]
        return op.Add(self.product(op, x, b, u, t), c)

    def target(self, op: Op, x: Val, b: Val, u: Val | None, t: Val, c: Val) -> Any:  # type: ignore[override]
        like = self.product(op, x, b, u, t)
        return op["com.microsoft::DynamicQuantizeMatMul"](x, b, t, u, c, type=_runs(like.type))

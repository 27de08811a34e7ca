"""Random small ONNX models, drawn by hypothesis: the left sides of rules over-represented, glued at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

Dim = int | str  # "N": the batch; any other name: a size that follows from N
Shape = tuple[Dim, ...]

_UNARY = ("Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Erf", "Identity", "Softplus", "HardSwish", "HardSigmoid")
_UNARY_WITH = (
    ("LeakyRelu", {"alpha": 0.125}), ("Elu", {}), ("Gelu", {}), ("Gelu", {"approximate": "tanh"}),
    ("Cast", {"to": TensorProto.FLOAT}), ("Softsign", {}), ("Mish", {}), ("Selu", {}),
)  # fmt: skip
_BINARY = ("Add", "Sub", "Mul", "Max", "Min")


@dataclass(frozen=True)
class T:
    """A float32 tensor of the model under construction."""

    name: str
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)


def fixed(dim: Dim) -> bool:
    return isinstance(dim, int)


class Maker:
    """Draws a graph node by node."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.rng = np.random.default_rng(random.randrange(2**16))
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.pool: list[T] = []
        self.read: set[str] = set()
        self.weights: dict[tuple[int, ...], list[str]] = {}
        self.condition: str | None = None
        self.count = 0

    # --- small things ---

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.random.randrange(len(options))]

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def const(self, array: Any, dtype: Any = np.float32) -> str:
        name = self.name("c")
        data = np.asarray(array, dtype)
        if self.chance(20):
            self.nodes.append(
                helper.make_node("Constant", [], [name], value=numpy_helper.from_array(data, name))
            )
        else:
            self.initializers.append(numpy_helper.from_array(data, name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.const(numbers, np.int64)

    def weight(self, *shape: int, positive: bool = False, share: bool = True) -> str:
        """Random numbers of a sane size; now and then the same tensor again."""
        known = self.weights.setdefault(shape, [])
        if known and share and not positive and self.chance(30):
            return str(self.pick(known))
        fan = int(np.prod(shape[1:], initial=1)) if len(shape) > 1 else 1
        data = self.rng.standard_normal(shape) / np.sqrt(max(1, fan))
        if positive:
            data = np.abs(data) + 0.5
        name = self.const(data)
        if not positive and share:
            known.append(name)
        return name

    def node(self, op: str, inputs: Sequence[str], shape: Shape, **attrs: Any) -> T:
        (out,) = self.nodes_of(op, inputs, [shape], **attrs)
        return out

    def nodes_of(self, op: str, inputs: Sequence[str], shapes: Sequence[Shape], **attrs: Any) -> list[T]:
        domain = attrs.pop("domain", "")
        outs = [T(self.name("t"), shape) for shape in shapes]
        self.nodes.append(helper.make_node(op, inputs, [o.name for o in outs], domain=domain, **attrs))
        self.read.update(inputs)
        self.pool.extend(outs)
        return outs

    def tensor(self, fits: Callable[[T], bool] = lambda t: True) -> T | None:
        """One of the tensors made so far, the latest most often."""
        fitting = [t for t in self.pool if fits(t)]
        if not fitting:
            return None
        if self.chance(50):
            fitting = fitting[-3:]
        found: T = self.pick(fitting)
        return found

    # --- operators, one or several at a time; each returns whether it could ---

    def unary(self, x: T | None = None) -> T | None:
        x = x or self.tensor()
        if x is None:
            return None
        if self.chance(70):
            return self.node(self.pick(_UNARY), [x.name], x.shape)
        if self.chance(40):
            bounds = self.pick(((-1.0, 1.0), (0.0, 6.0), (0.0, None), (None, 0.5), (-0.5, 2.0)))
            names = ["" if b is None else self.const(b) for b in bounds]
            return self.node("Clip", [x.name, *names], x.shape)
        op, attrs = self.pick(_UNARY_WITH)
        return self.node(op, [x.name], x.shape, **attrs)

    def twice(self) -> T | None:
        """An operator that may be idempotent or an involution, applied twice."""
        x = self.tensor()
        if x is None:
            return None
        op = self.pick(("Relu", "Neg", "Abs", "Identity"))
        return self.node(op, [self.node(op, [x.name], x.shape).name], x.shape)

    def operand(self, x: T) -> str:
        """A constant that broadcasts to x."""
        kind = self.random.randint(0, 9)
        if kind == 0:
            return self.const(self.pick((0.0, 1.0, 2.0, 0.5, -1.0)))
        if kind == 1:
            return self.const([self.pick((0.0, 1.0, 3.0))])
        if kind == 2 and x.rank:
            return self.const(np.full([1] * x.rank, self.pick((0.0, 1.0, 2.0))))
        if kind <= 5 and x.rank >= 3 and fixed(x.shape[1]):
            return self.weight(x.shape[1], *[1] * (x.rank - 2), positive=True)  # one per channel
        if kind <= 7 and x.rank and fixed(x.shape[-1]):
            return self.weight(x.shape[-1], positive=kind == 7)
        shape = [d if fixed(d) and self.chance(70) else 1 for d in x.shape]
        return self.weight(*shape, positive=True)  # type: ignore[arg-type]

    def with_constant(self, x: T | None = None) -> T | None:
        x = x or self.tensor()
        if x is None:
            return None
        c = self.operand(x)
        op = self.pick((*_BINARY, "Mul", "Add"))
        pair = [x.name, c] if self.chance(70) else [c, x.name]
        return self.node(op, pair, x.shape)

    def division(self) -> T | None:
        x = self.tensor()
        if x is None:
            return None
        if self.chance(30):
            return self.node("Pow", [x.name, self.const(self.pick((1.0, 2.0)))], x.shape)
        shape = [x.shape[-1]] if x.rank and fixed(x.shape[-1]) and self.chance(50) else []
        return self.node("Div", [x.name, self.weight(*shape, positive=True)], x.shape)  # type: ignore[arg-type]

    def binary(self) -> T | None:
        x = self.tensor()
        if x is None:
            return None

        def broadcasts(t: T) -> bool:
            tail = x.shape[x.rank - t.rank :] if t.rank <= x.rank else ()
            return t.rank <= x.rank and all(a in (b, 1) for a, b in zip(t.shape, tail))

        y = self.tensor(broadcasts)
        if y is None:
            return None
        pair = [x.name, y.name] if self.chance(60) else [y.name, x.name]
        return self.node(self.pick((*_BINARY, "Add", "Sum")), pair, x.shape)

    def matmul(self, x: T | None = None, w: str | None = None, n: int | None = None) -> T | None:
        x = x or self.tensor(lambda t: t.rank >= 2 and fixed(t.shape[-1]))
        if x is None:
            return None
        n = n or self.pick((2, 4, 6))
        assert n is not None
        w = w or self.weight(x.shape[-1], n)  # type: ignore[arg-type]
        y = self.node("MatMul", [x.name, w], (*x.shape[:-1], n))
        if self.chance(40):
            y = self.node("Add", [y.name, self.weight(n)], y.shape)
        return y

    def gemm(self) -> T | None:
        x = self.tensor(lambda t: t.rank == 2 and all(map(fixed, t.shape[1:])))
        if x is None:
            return None
        k, n = x.shape[1], self.pick((3, 4))
        assert isinstance(k, int)
        flip = self.chance(40)
        attrs: dict[str, Any] = {"transB": 1} if flip else {}
        if self.chance(25):
            attrs["alpha"] = 0.5
        if self.chance(25):
            attrs["beta"] = 2.0
        inputs = [x.name, self.weight(n, k) if flip else self.weight(k, n)]
        if self.chance(70):
            inputs.append(self.weight(n))
        return self.node("Gemm", inputs, (x.shape[0], n), **attrs)

    def products(self) -> T | None:
        """Several products of one tensor, or of several tensors with one weight."""
        x = self.tensor(lambda t: t.rank >= 2 and fixed(t.shape[-1]))
        if x is None:
            return None
        if self.chance(50):
            made = [self.matmul(x) for _ in range(self.pick((2, 3)))]
        else:
            n = self.pick((2, 4))
            w = self.weight(x.shape[-1], n)  # type: ignore[arg-type]
            others = [t for t in self.pool if t.shape == x.shape and t is not x][-2:]
            if not others:
                others = [self.node("Tanh", [x.name], x.shape)]
            made = [self.matmul(t, w, n) for t in (x, *others)]
        parts = [t for t in made if t is not None]
        if self.chance(50):
            last = sum(t.shape[-1] for t in parts)  # type: ignore[misc]
            return self.node("Concat", [t.name for t in parts], (*x.shape[:-1], last), axis=-1)
        return parts[-1]

    def inner_product(self) -> T | None:
        """x @ x^T, of tensors only."""
        x = self.tensor(lambda t: t.rank >= 2)
        if x is None:
            return None
        perm = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
        flipped = self.node("Transpose", [x.name], tuple(x.shape[p] for p in perm), perm=perm)
        if self.chance(30):
            flipped = self.node("Mul", [flipped.name, self.const(0.25)], flipped.shape)
        y = self.node("MatMul", [x.name, flipped.name], (*x.shape[:-1], x.shape[-2]))
        if self.chance(50):
            y = self.node("Mul", [y.name, self.const(0.5)], y.shape)
        if self.chance(50):
            y = self.node("Softmax", [y.name], y.shape)
            if self.chance(60):
                y = self.node("MatMul", [y.name, x.name], x.shape)
        return y

    def conv(self, x: T | None = None) -> T | None:
        x = x or self.tensor(lambda t: t.rank == 4 and all(map(fixed, t.shape[1:])) and min(t.shape[1:]) >= 1)  # type: ignore[type-var, operator]
        if x is None:
            return None
        n, c, h, w = x.shape
        assert isinstance(c, int)
        assert isinstance(h, int)
        assert isinstance(w, int)
        k = self.pick((1, 1, 3))
        pad = self.pick((0, k // 2)) if min(h, w) >= k else k // 2
        stride = self.pick((1, 1, 2))
        groups = self.pick([g for g in (1, 1, 2, c) if c % g == 0])
        m = groups * self.pick((1, 2))
        attrs: dict[str, Any] = {"kernel_shape": [k, k]}
        if pad:
            attrs["pads"] = [pad] * 4
        if stride > 1:
            attrs["strides"] = [stride, stride]
        if groups > 1:
            attrs["group"] = groups
        inputs = [x.name, self.weight(m, c // groups, k, k)]
        if self.chance(50):
            inputs.append(self.weight(m))
        size = tuple((d + 2 * pad - k) // stride + 1 for d in (h, w))
        y = self.node("Conv", inputs, (n, m, *size), **attrs)
        after = self.random.randint(0, 5)
        if after == 0:
            y = self.norm(y) or y
        elif after == 1:
            y = self.node("Mul", [y.name, self.weight(m, 1, 1)], y.shape)
        elif after == 2:
            y = self.node("Add", [y.name, self.weight(1, m, 1, 1)], y.shape)
        elif after == 3:
            y = self.node("Relu", [y.name], y.shape)
        return y

    def norm(self, x: T | None = None) -> T | None:
        """BatchNormalization."""
        x = x or self.tensor(lambda t: t.rank >= 2 and fixed(t.shape[1]))
        if x is None:
            return None
        c = x.shape[1]
        assert isinstance(c, int)
        rest = [self.weight(c, positive=True, share=False), self.weight(c), self.weight(c)]
        rest.append(self.weight(c, positive=True, share=False))
        return self.node("BatchNormalization", [x.name, *rest], x.shape, epsilon=1e-3)

    def convs(self) -> T | None:
        """Several convolutions of one tensor, or one of a Concat."""
        x = self.tensor(lambda t: t.rank == 4 and all(map(fixed, t.shape[1:])))
        if x is None:
            return None
        if self.chance(50):
            self.conv(x)
            return self.conv(x)
        y = self.node("Relu", [x.name], x.shape)
        both = self.node("Concat", [x.name, y.name], (x.shape[0], 2 * x.shape[1], *x.shape[2:]), axis=1)  # type: ignore[operator]
        return self.conv(both)

    def pool_(self) -> T | None:
        x = self.tensor(lambda t: t.rank == 4 and all(map(fixed, t.shape[1:])) and min(t.shape[2:]) >= 2)  # type: ignore[type-var, operator]
        if x is None:
            return None
        n, c, h, w = x.shape
        kind = self.random.randint(0, 3)
        if kind == 0:
            return self.node("GlobalAveragePool", [x.name], (n, c, 1, 1))
        if kind == 1:
            axes = self.ints(2, 3)
            keep = self.chance(50)
            return self.node(
                "ReduceMean", [x.name, axes], (n, c, 1, 1) if keep else (n, c), keepdims=int(keep)
            )
        op = "MaxPool" if kind == 2 else "AveragePool"
        shape = (n, c, (h - 2) // 2 + 1, (w - 2) // 2 + 1)  # type: ignore[operator]
        return self.node(op, [x.name], shape, kernel_shape=[2, 2], strides=[2, 2])

    def transpose(self, x: T | None = None) -> T | None:
        x = x or self.tensor(lambda t: t.rank >= 2)
        if x is None:
            return None
        perm = self.random.sample(range(x.rank), x.rank)
        y = self.node("Transpose", [x.name], tuple(x.shape[p] for p in perm), perm=perm)
        if self.chance(50):
            y = self.unary(y) or y
        if self.chance(60):
            back = [int(i) for i in np.argsort(perm)]
            if self.chance(20):
                back = self.random.sample(back, len(back))
            y = self.node("Transpose", [y.name], tuple(y.shape[p] for p in back), perm=back)
        return y

    def reshape(self, x: T | None = None) -> T | None:
        x = x or self.tensor(lambda t: t.rank >= 2 and all(map(fixed, t.shape[1:])) and 0 not in t.shape)
        if x is None or not all(map(fixed, x.shape[1:])):
            return None
        rest = [d for d in x.shape[1:] if isinstance(d, int)]
        size = int(np.prod(rest))
        kind = self.random.randint(0, 4)
        if kind == 0:
            y = self.node("Flatten", [x.name], (x.shape[0], size))
        elif kind == 1:
            y = self.node("Reshape", [x.name, self.ints(0, -1)], (x.shape[0], size))
        elif kind == 2 and size % 2 == 0:
            y = self.node("Reshape", [x.name, self.ints(0, 2, size // 2)], (x.shape[0], 2, size // 2))
        elif kind == 3:
            rows = size // rest[-1]
            y = self.node("Reshape", [x.name, self.ints(0, rows, rest[-1])], (x.shape[0], rows, rest[-1]))
        else:
            d = x.shape[0]
            first: Dim = d * size // rest[-1] if isinstance(d, int) else self.name("rows")
            y = self.node("Reshape", [x.name, self.ints(-1, rest[-1])], (first, rest[-1]))
            if not isinstance(d, int) and self.chance(50):
                z = self.matmul(y) if self.chance(50) else self.unary(y)
                y = z or y
                last = y.shape[-1]
                assert isinstance(last, int)
                to = (*x.shape[:-1], last)
                shape = self.ints(-1, *rest[:-1], last)
                return self.node("Reshape", [y.name, shape], to)
        if self.chance(40):
            z = self.unary(y) or y
            spec = [0 if y.shape[0] == x.shape[0] else -1, *rest]
            if isinstance(x.shape[0], int):
                spec[0] = x.shape[0]
            y = self.node("Reshape", [z.name, self.ints(*spec)], x.shape)
        return y

    def squeeze(self) -> T | None:
        x = self.tensor(lambda t: t.rank <= 4)
        if x is None:
            return None
        at = self.random.randint(0, x.rank)
        shape = (*x.shape[:at], 1, *x.shape[at:])
        y = self.node("Unsqueeze", [x.name, self.ints(at)], shape)
        if self.chance(50):
            y = self.with_constant(y) or y if self.chance(30) else self.unary(y) or y
        if self.chance(60) and y.shape == shape:
            y = self.node("Squeeze", [y.name, self.ints(at)], x.shape)
        return y

    def concat(self) -> T | None:
        x = self.tensor(lambda t: t.rank >= 1)
        if x is None:
            return None
        axis = self.pick([i for i, d in enumerate(x.shape) if fixed(d)] or [None])
        if axis is None:
            return None
        parts = [x]
        for _ in range(self.pick((0, 1, 1, 2))):
            y = self.tensor(
                lambda t: (
                    t.rank == x.rank
                    and fixed(t.shape[axis])
                    and all(a == b for i, (a, b) in enumerate(zip(t.shape, x.shape)) if i != axis)
                )
            )
            if y is not None:
                parts.append(y)
        shape = list(x.shape)
        shape[axis] = sum(p.shape[axis] for p in parts)  # type: ignore[misc]
        given = axis if self.chance(60) else axis - x.rank
        return self.node("Concat", [p.name for p in parts], tuple(shape), axis=given)

    def split(self) -> T | None:
        x = self.tensor(lambda t: any(fixed(d) and d >= 2 for d in t.shape))  # type: ignore[operator]
        if x is None:
            return None
        axis = self.pick([i for i, d in enumerate(x.shape) if isinstance(d, int) and d >= 2])
        size = x.shape[axis]
        assert isinstance(size, int)
        at = self.random.randint(1, size - 1)
        shapes = [(*x.shape[:axis], n, *x.shape[axis + 1 :]) for n in (at, size - at)]
        a, b = self.nodes_of("Split", [x.name, self.ints(at, size - at)], shapes, axis=axis)
        if self.chance(50):
            if self.chance(40):
                a = self.unary(a) or a
            if self.chance(30):
                a, b = b, a
            return self.node("Concat", [a.name, b.name], x.shape, axis=axis)
        return b

    def slice(self) -> T | None:
        x = self.tensor(lambda t: any(fixed(d) and d >= 2 for d in t.shape))  # type: ignore[operator]
        if x is None:
            return None
        axis = self.pick([i for i, d in enumerate(x.shape) if isinstance(d, int) and d >= 2])
        size = x.shape[axis]
        assert isinstance(size, int)
        kind = self.random.randint(0, 4)
        others = (x.shape[:axis], x.shape[axis + 1 :])
        if kind == 0:
            at = self.random.randint(-size, size - 1)
            return self.node(
                "Gather", [x.name, self.const(at, np.int64)], (*others[0], *others[1]), axis=axis
            )
        if kind == 1:
            picked = [self.random.randint(-size, size - 1) for _ in range(self.pick((1, 2, 3)))]
            if self.chance(30):
                picked = list(range(size))
            return self.node(
                "Gather", [x.name, self.ints(*picked)], (*others[0], len(picked), *others[1]), axis=axis
            )
        step = self.pick((1, 1, 1, 2, -1))
        if step < 0:
            inputs = [self.ints(-1), self.ints(-(2**40)), self.ints(axis), self.ints(-1)]
            return self.node("Slice", [x.name, *inputs], x.shape)
        start = self.random.randint(0, size - 1)
        end = self.pick((size, 2**31 - 1, 2**63 - 1, start + 1))
        length = len(range(size)[start:end:step])
        inputs = [self.ints(start), self.ints(end), self.ints(axis), self.ints(step)]
        y = self.node("Slice", [x.name, *inputs], (*others[0], length, *others[1]))
        if kind == 2 and start and end != start + 1 and step == 1:  # the other part, and both again
            first = self.node(
                "Slice",
                [x.name, self.ints(0), self.ints(start), self.ints(axis)],
                (*others[0], start, *others[1]),
            )
            return self.node("Concat", [first.name, y.name], x.shape, axis=axis)
        return y

    def expand(self) -> T | None:
        x = self.tensor(lambda t: 1 <= t.rank <= 4)
        if x is None:
            return None
        kind = self.random.randint(0, 2)
        if kind == 0:
            to = [2 if d == 1 else 1 for d in x.shape]
            shape = tuple(2 if d == 1 else d for d in x.shape)
            return self.node("Expand", [x.name, self.ints(*to)], shape)
        if kind == 1:
            axis = self.pick([i for i, d in enumerate(x.shape) if fixed(d)] or [None])
            if axis is None:
                return None
            times = [1] * x.rank
            times[axis] = self.pick((1, 2))
            shape = tuple(d * t if isinstance(d, int) else d for d, t in zip(x.shape, times))
            return self.node("Tile", [x.name, self.ints(*times)], shape)
        n = self.pick((0, 0, 1))
        pads = [0] * (2 * x.rank)
        pads[-1] = n
        last = x.shape[-1]
        if n and not isinstance(last, int):
            return None
        return self.node(
            "Pad", [x.name, self.ints(*pads)], (*x.shape[:-1], last + n if isinstance(last, int) else last)
        )

    def reduce(self) -> T | None:
        x = self.tensor(lambda t: t.rank >= 1)
        if x is None:
            return None
        op = self.pick(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"))
        axes = sorted(self.random.sample(range(x.rank), min(x.rank, self.pick((1, 1, 2)))))
        keep = self.chance(60)
        shape = tuple(1 if i in axes else d for i, d in enumerate(x.shape) if keep or i not in axes)
        given = [a - x.rank if self.chance(30) else a for a in axes]
        return self.node(op, [x.name, self.ints(*given)], shape, keepdims=int(keep))

    def softmax(self) -> T | None:
        x = self.tensor(lambda t: t.rank >= 1 and fixed(t.shape[-1]))
        if x is None:
            return None
        if self.chance(30):
            e = self.node("Exp", [self.node("Tanh", [x.name], x.shape).name], x.shape)
            total = self.node("ReduceSum", [e.name, self.ints(-1)], (*x.shape[:-1], 1))
            return self.node("Div", [e.name, total.name], x.shape)
        return self.node(self.pick(("Softmax", "LogSoftmax")), [x.name], x.shape, axis=-1)

    def layer_norm(self) -> T | None:
        x = self.tensor(lambda t: t.rank >= 2 and isinstance(t.shape[-1], int) and t.shape[-1] >= 3)
        if x is None:
            return None
        width = x.shape[-1]
        assert isinstance(width, int)
        if self.chance(40):
            y = self.node("Add", [x.name, self.weight(width)], x.shape)
            inputs = [y.name, self.weight(width, positive=True, share=False), self.weight(width)]
            return self.node("LayerNormalization", inputs, x.shape, axis=-1, epsilon=1e-3)
        column = (*x.shape[:-1], 1)
        mean = self.node("ReduceMean", [x.name, self.ints(-1)], column)
        centred = self.node("Sub", [x.name, mean.name], x.shape)
        square = self.node("Pow", [centred.name, self.const(2.0)], x.shape)
        variance = self.node("ReduceMean", [square.name, self.ints(-1)], column)
        root = self.node("Sqrt", [self.node("Add", [variance.name, self.const(1e-3)], column).name], column)
        y = self.node("Div", [centred.name, root.name], x.shape)
        if self.chance(60):
            y = self.node("Mul", [y.name, self.weight(width)], x.shape)
            y = self.node("Add", [y.name, self.weight(width)], x.shape)
        return y

    def spelt_out(self) -> T | None:
        """Gelu or HardSwish made of smaller operators."""
        x = self.tensor()
        if x is None:
            return None
        if self.chance(50):
            e = self.node(
                "Erf", [self.node("Div", [x.name, self.const(1.4142135381698608)], x.shape).name], x.shape
            )
            one = self.node("Add", [e.name, self.const(1.0)], x.shape)
            return self.node(
                "Mul", [self.node("Mul", [x.name, one.name], x.shape).name, self.const(0.5)], x.shape
            )
        three = self.node("Add", [x.name, self.const(3.0)], x.shape)
        clipped = self.node("Clip", [three.name, self.const(0.0), self.const(6.0)], x.shape)
        return self.node(
            "Mul", [x.name, self.node("Div", [clipped.name, self.const(6.0)], x.shape).name], x.shape
        )

    def distribute(self) -> T | None:
        """a*c + b*c, or (a + b) * c."""
        a = self.tensor()
        if a is None:
            return None
        b = self.tensor(lambda t: t.shape == a.shape)
        assert b is not None
        c = self.operand(a)
        op = self.pick(("Add", "Sub"))
        if self.chance(50):
            parts = [self.node("Mul", [t.name, c], a.shape).name for t in (a, b)]
            return self.node(op, parts, a.shape)
        return self.node("Mul", [self.node(op, [a.name, b.name], a.shape).name, c], a.shape)

    def scaled_product(self) -> T | None:
        """A scale, a shift or a normalisation before and after MatMul, Gemm, Conv or ConvTranspose."""
        x = self.tensor(lambda t: t.rank in (2, 4) and all(map(fixed, t.shape[1:])))
        if x is None:
            return None
        c = x.shape[1]
        assert isinstance(c, int)
        ones = [1] * (x.rank - 2)

        def adjusted(t: T, width: int) -> T:
            kind = self.random.randint(0, 4)
            if kind == 0:
                return t
            if kind == 1:
                return self.norm(t) or t
            c = self.weight(width, *ones, positive=True) if self.chance(70) else self.const(0.5)
            return self.node("Mul" if kind == 2 else "Add", [t.name, c], t.shape)

        x = adjusted(x, c)
        m = self.pick((2, 4))
        if x.rank == 4:
            n, _, h, w = x.shape
            transposed = self.chance(40)
            weight = self.weight(c, m, 1, 1) if transposed else self.weight(m, c, 1, 1)
            inputs = [x.name, weight, *([self.weight(m)] if self.chance(50) else [])]
            y = self.node("ConvTranspose" if transposed else "Conv", inputs, (n, m, h, w))
        elif self.chance(50):
            y = self.node("MatMul", [x.name, self.weight(c, m)], (x.shape[0], m))
        else:
            y = self.node("Gemm", [x.name, self.weight(c, m), self.weight(m)], (x.shape[0], m))
        return adjusted(y, m)

    def sum_of_products(self) -> T | None:
        """x @ w + y @ v, of matrices, Gemms or convolutions; also with equal weights."""
        x = self.tensor(lambda t: t.rank in (2, 4) and all(map(fixed, t.shape[1:])))
        if x is None:
            return None
        y = self.tensor(
            lambda t: t.rank == x.rank and t.shape[0] == x.shape[0] and t.shape[2:] == x.shape[2:]
        )
        assert y is not None
        m = self.pick((2, 3))
        parts = []
        kind = self.pick(("MatMul", "Gemm"))
        for t in (x, y if fixed(y.shape[1]) else x):
            c = t.shape[1]
            assert isinstance(c, int)
            if x.rank == 4:
                inputs = [t.name, self.weight(m, c, 1, 1), *([self.weight(m)] if self.chance(40) else [])]
                parts.append(self.node("Conv", inputs, (t.shape[0], m, *t.shape[2:])))
            else:
                inputs = [t.name, self.weight(c, m), *([self.weight(m)] if kind == "Gemm" else [])]
                parts.append(self.node(kind, inputs, (t.shape[0], m)))
        op = self.pick(("Add", "Add", "Sum"))
        z = self.node(op, [p.name for p in parts], parts[0].shape)
        if self.chance(40):
            z = self.node("Add", [z.name, self.weight(m, *[1] * (z.rank - 2))], z.shape)
        return z

    def left_product(self) -> T | None:
        """A constant matrix times a tensor, perhaps scaled; or two products in a row."""
        x = self.tensor(lambda t: t.rank == 2 and all(map(fixed, t.shape)))
        if x is None:
            return None
        rows, width = x.shape
        assert isinstance(rows, int)
        assert isinstance(width, int)
        y = self.node("MatMul", [self.weight(3, rows), x.name], (3, width))
        if self.chance(50):
            return self.node("Mul", [y.name, self.weight(3, 1)], y.shape)
        return self.node("MatMul", [y.name, self.weight(width, 2)], (3, 2))

    def in_another_layout(self) -> T | None:
        """Transpose, something that has an axis or two operands, and the way back."""
        x = self.tensor(lambda t: t.rank in (2, 3, 4) and 0 not in t.shape)
        if x is None:
            return None
        perm = self.random.sample(range(x.rank), x.rank)
        back = [int(i) for i in np.argsort(perm)]

        def there(t: T) -> T:
            return self.node("Transpose", [t.name], tuple(t.shape[p] for p in perm), perm=perm)

        y = there(x)
        kind = self.random.randint(0, 5)
        numbers = [i for i, d in enumerate(y.shape) if isinstance(d, int)]
        axis = self.pick(numbers or [0])
        size = y.shape[axis]
        if kind == 0 and isinstance(size, int):
            other = there(self.tensor(lambda t: t.shape == x.shape) or x)
            shape = (*y.shape[:axis], 2 * size, *y.shape[axis + 1 :])
            y = self.node("Concat", [y.name, other.name], shape, axis=axis)
        elif kind == 1 and isinstance(size, int) and size >= 2:
            shapes = [(*y.shape[:axis], n, *y.shape[axis + 1 :]) for n in (1, size - 1)]
            parts = self.nodes_of("Split", [y.name, self.ints(1, size - 1)], shapes, axis=axis)
            if self.chance(50):
                self.node("Transpose", [parts[0].name], tuple(parts[0].shape[p] for p in back), perm=back)
            y = parts[1]
        elif kind == 2:
            shape = (*y.shape[:axis], 1, *y.shape[axis + 1 :])
            y = self.node(
                self.pick(("ReduceMean", "ReduceSum", "ReduceMax")), [y.name, self.ints(axis)], shape
            )
        elif kind == 3 and isinstance(size, int):
            y = self.node("Softmax", [y.name], y.shape, axis=axis)
        elif kind == 4 and x.rank == 2:
            last, first = y.shape[1], y.shape[0]
            if isinstance(last, int) and self.chance(50):
                return self.node("Gemm", [y.name, self.weight(last, 3)], (first, 3))
            if isinstance(x.shape[0], int):
                z = self.weight(2, y.shape[0]) if isinstance(y.shape[0], int) else None
                return self.node("Gemm", [z, y.name], (2, last)) if z else None
        elif kind == 5 and x.rank >= 3 and perm[-1] != x.rank - 1:
            other = there(self.node("Tanh", [x.name], x.shape))
            flip = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
            flipped = self.node("Transpose", [other.name], tuple(other.shape[p] for p in flip), perm=flip)
            return self.node("MatMul", [y.name, flipped.name], (*y.shape[:-1], y.shape[-2]))
        return self.node("Transpose", [y.name], tuple(y.shape[p] for p in back), perm=back)

    def stack(self) -> T | None:
        """Equal tensors, unsqueezed and put together, or cut and put together in another way."""
        x = self.tensor(lambda t: 1 <= t.rank <= 3 and isinstance(t.shape[-1], int) and t.shape[-1] >= 2)
        if x is None:
            return None
        size = x.shape[-1]
        assert isinstance(size, int)
        kind = self.random.randint(0, 4)
        if kind == 0:
            at = self.random.randint(0, x.rank)
            shape = (*x.shape[:at], 1, *x.shape[at:])
            others = [x, self.tensor(lambda t: t.shape == x.shape) or x]
            parts = [self.node("Unsqueeze", [t.name, self.ints(at)], shape) for t in others]
            both = (*x.shape[:at], 2, *x.shape[at:])
            return self.node("Concat", [p.name for p in parts], both, axis=at)
        y = (
            self.tensor(lambda t: t.shape[:-1] == x.shape[:-1] and t.rank == x.rank and fixed(t.shape[-1]))
            or x
        )
        total = size + y.shape[-1]  # type: ignore[operator]
        both = (*x.shape[:-1], total)
        joint = self.node("Concat", [x.name, y.name], both, axis=-1)
        if kind == 1:
            tail = self.unary(x) or x
            return self.node("Concat", [joint.name, tail.name], (*x.shape[:-1], total + size), axis=-1)
        if kind == 2:
            shapes = [x.shape, y.shape]
            return self.nodes_of("Split", [joint.name, self.ints(size, total - size)], shapes, axis=-1)[0]
        if kind == 3:
            inputs = [self.ints(0), self.ints(size), self.ints(-1)]
            return self.node("Slice", [joint.name, *inputs], x.shape)
        shapes = [(*x.shape[:-1], n) for n in (1, total - 1)]
        parts = self.nodes_of("Split", [joint.name, self.ints(1, total - 1)], shapes, axis=-1)
        op = self.pick(("Tanh", "Relu"))
        done = [self.node(op, [p.name], p.shape) for p in parts]
        return self.node("Concat", [p.name for p in done], both, axis=-1) if self.chance(50) else done[1]

    def pooled_concat(self) -> T | None:
        x = self.tensor(lambda t: t.rank == 4 and all(map(fixed, t.shape[1:])) and min(t.shape[2:]) >= 2)  # type: ignore[type-var, operator]
        if x is None:
            return None
        n, c, h, w = x.shape
        y = self.node("Tanh", [x.name], x.shape)
        size = ((h - 2) // 2 + 1, (w - 2) // 2 + 1)  # type: ignore[operator]
        attrs = {"kernel_shape": [2, 2], "strides": [2, 2]}
        op = self.pick(("MaxPool", "AveragePool"))
        if self.chance(50):
            both = self.node("Concat", [x.name, y.name], (n, 2 * c, h, w), axis=1)  # type: ignore[operator]
            return self.node(op, [both.name], (n, 2 * c, *size), **attrs)  # type: ignore[operator]
        parts = [self.node(op, [t.name], (n, c, *size), **attrs) for t in (x, y)]
        return self.node("Concat", [p.name for p in parts], (n, 2 * c, *size), axis=1)  # type: ignore[operator]

    def other_norms(self) -> T | None:
        """Variance from moments, RMS, Gelu by tanh, an affine clip."""
        x = self.tensor(lambda t: t.rank >= 2 and isinstance(t.shape[-1], int) and t.shape[-1] >= 3)
        if x is None:
            return None
        width = x.shape[-1]
        assert isinstance(width, int)
        column = (*x.shape[:-1], 1)
        kind = self.random.randint(0, 3)
        if kind == 0:
            y = self.node("Mul", [x.name, x.name], x.shape)
            mean = self.node("ReduceMean", [y.name, self.ints(-1)], column)
            root = self.node("Sqrt", [self.node("Add", [mean.name, self.const(1e-3)], column).name], column)
            y = self.node("Div", [x.name, root.name], x.shape)
            return self.node("Mul", [y.name, self.weight(width)], x.shape)
        if kind == 1:
            mean = self.node("ReduceMean", [x.name, self.ints(-1)], column)
            square = self.node("Mul", [x.name, x.name], x.shape)
            second = self.node("ReduceMean", [square.name, self.ints(-1)], column)
            first = self.node("Mul", [mean.name, mean.name], column)
            variance = self.node("Sub", [second.name, first.name], column)
            root = self.node(
                "Sqrt", [self.node("Add", [variance.name, self.const(1e-2)], column).name], column
            )
            centred = self.node("Sub", [x.name, mean.name], x.shape)
            return self.node("Div", [centred.name, root.name], x.shape)
        if kind == 2:
            cube = self.node("Pow", [x.name, self.const(3.0)], x.shape)
            inner = self.node("Mul", [cube.name, self.const(0.044715)], x.shape)
            inner = self.node("Add", [x.name, inner.name], x.shape)
            inner = self.node("Mul", [inner.name, self.const(0.7978845608)], x.shape)
            one = self.node("Add", [self.node("Tanh", [inner.name], x.shape).name, self.const(1.0)], x.shape)
            half = self.node("Mul", [x.name, self.const(0.5)], x.shape)
            return self.node("Mul", [half.name, one.name], x.shape)
        y = self.node("Mul", [x.name, self.const(0.2)], x.shape)
        y = self.node("Add", [y.name, self.const(0.5)], x.shape)
        return self.node("Clip", [y.name, self.const(0.0), self.const(1.0)], x.shape)

    def computed_shape(self) -> T | None:
        """A Reshape to sizes that the model computes."""
        x = self.tensor(lambda t: t.rank >= 2 and all(map(fixed, t.shape[1:])) and 0 not in t.shape)
        if x is None:
            return None
        sizes, first, shape = self.name("s"), self.name("s"), self.name("s")
        self.nodes.append(helper.make_node("Shape", [x.name], [sizes]))
        self.nodes.append(helper.make_node("Slice", [sizes, self.ints(0), self.ints(1)], [first]))
        self.nodes.append(helper.make_node("Concat", [first, self.ints(-1)], [shape], axis=0))
        self.read.add(x.name)
        size = int(np.prod(x.shape[1:]))  # type: ignore[arg-type]
        y = self.node("Reshape", [x.name, shape], (x.shape[0], size))
        return self.unary(y)

    def steps(self) -> T | None:
        """A recurrent cell over the first axis' neighbours: shared weights, step by step."""
        x = self.tensor(
            lambda t: t.rank == 3 and isinstance(t.shape[1], int) and t.shape[1] >= 2 and fixed(t.shape[2])
        )
        if x is None:
            return None
        n, count, c = x.shape
        assert isinstance(count, int)
        assert isinstance(c, int)
        w, u, b, d = self.weight(c, 4), self.weight(4, 4), self.weight(4), self.weight(4)
        gemm = self.chance(50)
        state: T | None = None
        for t in range(min(3, count)):
            now = self.node("Gather", [x.name, self.const(t, np.int64)], (n, c), axis=1)
            if gemm:
                y = self.node("Gemm", [now.name, w, b], (n, 4))
            else:
                y = self.node("MatMul", [now.name, w], (n, 4))
                y = self.node("Add", [y.name, b], (n, 4))
            if state is not None:
                z = (
                    self.node("Gemm", [state.name, u, d], (n, 4))
                    if gemm
                    else self.node("MatMul", [state.name, u], (n, 4))
                )
                y = self.node("Add", [y.name, z.name], (n, 4))
            state = self.node("Tanh", [y.name], (n, 4))
        return state

    def again(self) -> T | None:
        """A node that is there already."""
        shapes = {t.name: t.shape for t in self.pool}
        known = [n for n in self.nodes if n.op_type not in ("If", "Split") and n.output[0] in shapes]
        if not known:
            return None
        node = self.pick(known[-6:])
        shape = shapes[node.output[0]]
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        out = T(self.name("t"), shape)
        copy.output[0] = out.name
        self.nodes.append(copy)
        self.read.update(node.input)
        self.pool.append(out)
        return out

    def branch(self) -> T | None:
        """If over captured values."""
        x = self.tensor(lambda t: all(d != 0 for d in t.shape))
        if x is None:
            return None
        y = self.tensor(lambda t: t.shape == x.shape)
        assert y is not None
        if self.condition is None:
            self.condition = "condition"
            self.inputs.append(helper.make_tensor_value_info("condition", TensorProto.BOOL, []))
        bodies = []
        for stem, chain in (("then", ("Neg", "Neg", "Tanh")), ("else", ("Relu", "Relu", "Identity"))):
            at, nodes = x.name, []
            for op in chain:
                out = self.name("b")
                nodes.append(helper.make_node(op, [at], [out]))
                at = out
            out = self.name("b")
            nodes.append(helper.make_node("Add", [at, y.name], [out]))
            info = self.info(T(out, x.shape))
            bodies.append(helper.make_graph(nodes, self.name(stem), [], [info]))
        self.read.add(y.name)
        self.read.add(x.name)
        return self.node("If", ["condition"], x.shape, then_branch=bodies[0], else_branch=bodies[1])

    def wide(self) -> T | None:
        """Through float64 and back."""
        x = self.tensor()
        if x is None:
            return None
        out = self.name("d")
        self.nodes.append(helper.make_node("Cast", [x.name], [out], to=TensorProto.DOUBLE))
        self.read.add(x.name)
        return self.node("Cast", [out], x.shape, to=TensorProto.FLOAT)

    # --- the model ---

    def info(self, t: T) -> onnx.ValueInfoProto:
        dims = [d if isinstance(d, int) or d == "N" else None for d in t.shape]
        return helper.make_tensor_value_info(t.name, TensorProto.FLOAT, dims)

    def model(self, opset: int = 23) -> onnx.ModelProto:
        batch: Dim = self.pick(("N", "N", 2))
        shapes: list[Shape] = [self.pick(((batch, 4, 6, 6), (batch, 3, 8), (batch, 8), (4, 4)))]
        for _ in range(self.pick((0, 1, 1, 2))):
            shapes.append(self.pick((*shapes, (batch, 3, 8), (batch, 4, 6, 6))))
        for shape in shapes:
            t = T(self.name("x"), shape)
            self.pool.append(t)
            self.inputs.append(self.info(t))
        if self.chance(25):
            last = shapes[0][-1]
            assert isinstance(last, int)
            t = T("overridable", (last,))
            self.pool.append(t)
            self.inputs.append(self.info(t))
            data = self.rng.standard_normal(last).astype(np.float32)
            self.initializers.append(numpy_helper.from_array(data, t.name))
        sources = {v.name for v in self.inputs}
        ways = (
            self.unary, self.twice, self.with_constant, self.with_constant, self.division, self.binary, self.binary,
            self.matmul, self.matmul, self.gemm, self.products, self.inner_product, self.conv, self.conv,
            self.convs, self.norm, self.pool_, self.transpose, self.transpose, self.reshape, self.reshape, self.squeeze,
            self.concat,             self.split, self.slice, self.slice,
            self.expand, self.reduce, self.softmax, self.layer_norm, self.spelt_out,
            self.distribute, self.again, self.branch, self.wide,
            self.scaled_product, self.scaled_product, self.sum_of_products, self.left_product,
            self.in_another_layout, self.in_another_layout, self.stack, self.stack, self.pooled_concat,
            self.other_norms, self.computed_shape, self.steps,
        )  # fmt: skip
        wanted = self.random.randint(6, 20)
        tries = 0
        while len(self.nodes) < wanted and tries < 40:
            tries += 1
            self.pick(ways)()
        made = [t for t in self.pool if t.name not in sources]
        if not made:
            made = [self.node("Relu", [self.pool[0].name], self.pool[0].shape)]
        outputs = [t for t in made if t.name not in self.read][:6]
        if self.chance(30):
            extra = self.pick(made)
            if extra not in outputs:
                outputs.append(extra)
        graph = helper.make_graph(
            self.nodes, "drawn", self.inputs, [self.info(t) for t in outputs], self.initializers
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


@st.composite
def models(draw: Callable[[st.SearchStrategy[Any]], Any]) -> onnx.ModelProto:
    """A valid model of 6 to about 25 nodes."""
    return Maker(draw(st.randoms(use_true_random=False))).model()

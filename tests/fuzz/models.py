"""Random models like those that exporters write, for `tests/fuzz/run.py`: sizes computed from sizes, control flow,
integers that wrap, casts there and back, windows with odd attributes.

    subject = idioms(seed=7)      # a model, the sizes at which it runs, and what its inputs may hold

While a model is built, every dimension is known for each of the `SIZES` choices of its symbols, and so are the elements
of tensors that hold sizes. So the model is valid at those sizes, whatever is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as P
from onnx import helper, numpy_helper

Shape = tuple[int, ...]

SIZES = 4
_MOST = 4096  # elements of a tensor

FLOATS = (P.FLOAT, P.DOUBLE, P.FLOAT16)
SIGNED = (P.INT8, P.INT16, P.INT32, P.INT64)
UNSIGNED = (P.UINT8, P.UINT16, P.UINT32, P.UINT64)
INTEGERS = SIGNED + UNSIGNED
_SOME = (P.FLOAT, P.DOUBLE, P.FLOAT16, P.INT8, P.INT32, P.INT64, P.UINT8)

# The element types for which ONNX Runtime's CPU has kernels, if not all.
_UNARY: Mapping[str, tuple[int, ...]] = {
    "Neg": FLOATS + SIGNED, "Abs": FLOATS + INTEGERS, "Sign": FLOATS + INTEGERS, "Not": (P.BOOL,),
    "BitwiseNot": INTEGERS, "Relu": (*FLOATS, P.INT8, P.INT32), "Identity": (*FLOATS, *INTEGERS, P.BOOL),
    **dict.fromkeys(("Sqrt", "Exp", "Log", "Floor", "Ceil", "Round", "Sigmoid", "Tanh", "Reciprocal", "Sin"), FLOATS),
    **dict.fromkeys(("Erf", "Softplus", "HardSwish", "LeakyRelu", "Elu", "Atan", "Mish", "HardSigmoid"), (P.FLOAT,)),
    **dict.fromkeys(("Celu", "Selu", "Softsign", "Gelu", "ThresholdedRelu"), (P.FLOAT,)),
}  # fmt: skip
_MIN_MAX = (*FLOATS, P.INT8, P.INT32, P.INT64, P.UINT8, P.UINT32, P.UINT64)
_BINARY: Mapping[str, tuple[int, ...]] = {
    "Add": FLOATS + INTEGERS, "Sub": FLOATS + INTEGERS, "Mul": FLOATS + INTEGERS, "Min": _MIN_MAX, "Max": _MIN_MAX,
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor"), INTEGERS),
    **dict.fromkeys(("And", "Or", "Xor"), (P.BOOL,)),
}  # fmt: skip
_COMPARE = ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
_REDUCE: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("ReduceMax", "ReduceMin"), (*FLOATS, P.INT8, P.INT32, P.INT64, P.UINT8)),
    **dict.fromkeys(("ReduceSum", "ReduceProd", "ReduceSumSquare", "ReduceL1"), (*FLOATS, P.INT32, P.INT64)),
    **dict.fromkeys(("ReduceMean", "ReduceL2", "ReduceLogSumExp", "ReduceLogSum"), FLOATS),
}  # fmt: skip
_WHERE = (P.FLOAT, P.DOUBLE, P.INT8, P.INT32, P.INT64, P.UINT8, P.UINT32)
_ENDS = (2**63 - 1, 2**31 - 1, 480_000, 1000, 128, 7, 3, 2, 1, -1, -2, -3, -1000, -(2**31), -(2**63) + 1)


@dataclass(frozen=True)
class Domain:
    """What an input may contain: numbers from `low` to `high`."""

    low: int
    high: int


@dataclass(frozen=True)
class Subject:
    """A model to fuzz with. `sizes`: choices of its symbols at which it runs. `specials`: floats may be NaN. `fixed`:
    inputs that are always the same.
    """

    proto: onnx.ModelProto
    sizes: tuple[Mapping[str, int], ...] = ({},)
    domains: Mapping[str, Domain] = field(default_factory=dict)
    specials: bool = True
    fixed: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class T:
    """A tensor of the model: its shape for each choice of sizes, and its elements, if they are known."""

    name: str
    dtype: int
    shapes: tuple[Shape, ...]
    values: tuple[np.ndarray, ...] | None = None

    @property
    def rank(self) -> int:
        return len(self.shapes[0])

    def dims(self, axis: int) -> list[int]:
        return [s[axis] for s in self.shapes]

    def fixed(self, axis: int) -> bool:
        return len(set(self.dims(axis))) == 1

    @property
    def largest(self) -> int:
        return max(int(np.prod(s)) for s in self.shapes)

    @property
    def small(self) -> bool:
        """Whether the elements are known numbers from which a size can be computed."""
        return self.values is not None and all(np.abs(v).max(initial=0) < 10**6 for v in self.values)

    @property
    def size(self) -> bool:
        """Whether it is a single number to compute sizes with."""
        return self.small and self.dtype == P.INT64 and set(self.shapes) in ({()}, {(1,)})


def idioms(seed: int) -> Subject:
    """A model of about 6 to 20 operators."""
    return _Maker(seed).subject()


def _np(dtype: int) -> np.dtype[Any]:
    return np.dtype(helper.tensor_dtype_to_np_dtype(dtype))


def _broadcast(a: Sequence[Shape], b: Sequence[Shape]) -> tuple[Shape, ...] | None:
    try:
        return tuple(np.broadcast_shapes(x, y) for x, y in zip(a, b))
    except ValueError:
        return None


class _Maker:
    """Builds a model, operator by operator."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.pool: list[T] = []
        self.read: set[str] = set()
        self.domains: dict[str, Domain] = {}
        self.specials = True
        self.count = 0
        self.opset = self.pick((18, 19, 20, 21, 21))
        odd = self.pick((3, 5, 7, 11, 13))
        self.symbols = {
            "N": (2, 1, 3, self.random.randint(1, 6)),
            "S": (odd, 12 * self.random.randint(1, 2), self.pick((1, 1, 2, 4)), self.random.randint(1, 40)),
        }

    # --- small things ---

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.random.randrange(len(options))]

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def name(self, stem: str = "t") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def const(self, array: Any, dtype: int = P.INT64) -> str:
        name = self.name("c")
        proto = numpy_helper.from_array(np.asarray(array).astype(_np(dtype)), name)
        if self.chance(30):
            self.nodes.append(helper.make_node("Constant", [], [name], value=proto))
        else:
            self.initializers.append(proto)
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        dtype: int,
        shapes: Sequence[Shape],
        values: Sequence[np.ndarray] | None = None,
        **attrs: Any,
    ) -> T:
        return self.several(op, inputs, [(dtype, shapes)], [values], **attrs)[0]

    def several(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[tuple[int, Sequence[Shape]]],
        values: Sequence[Sequence[np.ndarray] | None] = (),
        **attrs: Any,
    ) -> list[T]:
        known = [*values, *[None] * (len(outputs) - len(values))]
        made = [
            T(self.name(), dtype, tuple(shapes), tuple(v) if v is not None else None)
            for (dtype, shapes), v in zip(outputs, known)
        ]
        self.nodes.append(helper.make_node(op, inputs, [t.name for t in made], **attrs))
        self.read.update(inputs)
        self.pool.extend(made)
        return made

    def input(self, dtype: int, dims: Sequence[int | str], domain: Domain | None = None) -> T:
        name = self.name("x")
        shapes = tuple(
            tuple(self.symbols[d][i] if isinstance(d, str) else d for d in dims) for i in range(SIZES)
        )
        self.inputs.append(helper.make_tensor_value_info(name, dtype, list(dims)))
        if domain is not None:
            self.domains[name] = domain
        made = T(name, dtype, shapes)
        self.pool.append(made)
        return made

    def tensor(self, fits: Callable[[T], bool] = lambda t: True) -> T | None:
        """One of the tensors so far; later ones are likelier."""
        fitting = [t for t in self.pool if fits(t)]
        if not fitting:
            return None
        found: T = self.pick(fitting[-4:] if self.chance(60) else fitting)
        return found

    def weight(self, shape: Sequence[int], dtype: int = P.FLOAT) -> str:
        fan = max(1, int(np.prod(shape[1:], initial=1)))
        return self.const(self.rng.standard_normal(shape) / np.sqrt(fan), dtype)

    def scalar(self, dtype: int) -> Any:
        """A number that is common in computations."""
        if dtype == P.BOOL:
            return self.chance(50)
        if dtype in FLOATS:
            return self.pick((0.0, 1.0, -1.0, 2.0, 0.5, 0.1, 1e-5, 3.0, 100.0, -0.25))
        info = np.iinfo(_np(dtype))
        options = (
            0,
            1,
            2,
            3,
            5,
            10,
            -1,
            -2,
            127,
            128,
            255,
            256,
            65535,
            2**31,
            info.min,
            info.max,
            info.max - 1,
        )
        return self.pick([v for v in options if info.min <= v <= info.max])

    # --- the model ---

    def subject(self) -> Subject:
        self.first_inputs()
        wanted = self.random.randint(6, 20)
        for _ in range(8 * wanted):
            if len([n for n in self.nodes if n.op_type != "Constant"]) >= wanted:
                break
            self.pick(_EMITTERS)(self)
        given = {v.name for v in self.inputs}
        leaves = [t for t in self.pool if t.name not in self.read and t.name not in given]
        others = [t for t in self.pool if t.name in self.read and t.name not in given]
        self.random.shuffle(others)
        outputs = {t.name: t for t in [*leaves, *others[: self.pick((0, 1, 2))]]}
        infos = [self.declared(t) for t in outputs.values()]
        self.random.shuffle(infos)
        used = [v for v in self.inputs if v.name in self.read or self.chance(20)] or self.inputs[:1]
        graph = helper.make_graph(self.nodes, "fuzz", used, infos, self.initializers)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=9)
        kept = {v.name for v in used}
        symbols = {d.dim_param for v in used for d in v.type.tensor_type.shape.dim if d.HasField("dim_param")}
        sizes = tuple({s: self.symbols[s][i] for s in sorted(symbols)} for i in range(SIZES))
        domains = {k: d for k, d in self.domains.items() if k in kept}
        return Subject(proto, sizes if symbols else ({},), domains, self.specials)

    def declared(self, t: T) -> onnx.ValueInfoProto:
        if self.chance(30):
            return helper.make_tensor_value_info(t.name, t.dtype, None)
        return helper.make_tensor_value_info(
            t.name, t.dtype, [t.dims(a)[0] if t.fixed(a) and self.chance(80) else None for a in range(t.rank)]
        )

    def first_inputs(self) -> None:
        for i in range(self.pick((1, 2, 2, 3))):
            kind = self.random.randrange(10 if i else 6)  # the first has sizes to compute with
            if kind < 3:
                self.input(
                    P.FLOAT,
                    (self.pick(("N", 1, 2)), self.pick((2, 3, 4)), self.pick((6, 7, "S")), self.pick((5, 8))),
                )
            elif kind < 5:
                self.input(P.FLOAT, ("N", "S", self.pick((4, 6, 8))))
            elif kind < 6:
                self.input(self.pick((P.DOUBLE, P.FLOAT16)), ("N", self.pick((3, 8))))
            elif kind < 9:
                self.input(self.pick(INTEGERS), self.pick((("N", "S"), (4, 3), ("S",), ("N", 2, 5), ())))
            else:
                self.input(P.BOOL, self.pick((("N", "S"), (4, 3), ())))

    # --- elementwise ---

    def unary(self, x: T | None = None) -> T | None:
        x = x or self.tensor()
        if x is None:
            return None
        ops = [op for op, types in _UNARY.items() if x.dtype in types and (op != "Gelu" or self.opset >= 20)]
        op = self.pick(ops)
        attrs: dict[str, Any] = {}
        if op == "Gelu" and self.chance(50):
            attrs["approximate"] = "tanh"
        if op == "LeakyRelu":
            attrs["alpha"] = self.pick((0.01, 0.2, 1.0, -0.5, 2.0))
        values = None
        if op in ("Neg", "Abs", "Identity") and x.small:
            values = [{"Neg": np.negative, "Abs": np.abs, "Identity": np.copy}[op](v) for v in x.values or ()]
        return self.node(op, [x.name], x.dtype, x.shapes, values, **attrs)

    def same(self) -> T | None:
        """One operator twice, or an operator and its inverse."""
        x = self.tensor()
        if x is None:
            return None
        pair = self.pick((("Neg", "Neg"), ("Abs", "Abs"), ("Not", "Not"), ("BitwiseNot", "BitwiseNot"), ("Exp", "Log"),
                          ("Relu", "Relu"), ("Neg", "Abs"), ("Sign", "Abs"), ("Floor", "Ceil"), ("Sign", "Sign"),
                          ("Reciprocal", "Reciprocal"), ("Sqrt", "Reciprocal")))  # fmt: skip
        if any(x.dtype not in _UNARY[op] for op in pair):
            return None
        return self.node(pair[1], [self.node(pair[0], [x.name], x.dtype, x.shapes).name], x.dtype, x.shapes)

    def operand(self, x: T) -> tuple[str, Sequence[Shape]]:
        """A constant that broadcasts to x."""
        kind = self.random.randrange(4)
        if kind == 0 and x.rank and all(map(x.fixed, range(x.rank))):
            shape: Shape = tuple(d if self.chance(60) else 1 for d in x.shapes[0])
        elif kind == 1 and x.rank and x.fixed(x.rank - 1):
            shape = x.shapes[0][-1:]
        else:
            shape = self.pick(((), (), (1,), (1,) * x.rank))
        if x.dtype in FLOATS and self.chance(50):
            array = self.rng.standard_normal(shape)
        elif x.dtype in INTEGERS and self.chance(40):
            array = self.rng.integers(0, 5, shape)
        else:
            array = np.full(shape, self.scalar(x.dtype), _np(x.dtype))
        return self.const(array, x.dtype), [shape] * SIZES

    def binary(self, x: T | None = None) -> T | None:
        x = x or self.tensor()
        if x is None:
            return None
        ops = [op for op, types in _BINARY.items() if x.dtype in types]
        y = self.tensor(lambda t: t.dtype == x.dtype and _broadcast(t.shapes, x.shapes) is not None)
        if y is None or self.chance(50):
            name, shapes = self.operand(x)
        else:
            name, shapes = y.name, y.shapes
        result = _broadcast(x.shapes, shapes)
        if result is None or not ops or max(int(np.prod(s)) for s in result) > _MOST:
            return None
        pair = [x.name, name] if self.chance(60) else [name, x.name]
        return self.node(self.pick(ops), pair, x.dtype, result)

    def again(self) -> T | None:
        """x op c op' c: it may cancel or not."""
        x = self.tensor(lambda t: t.dtype != P.BOOL)
        if x is None:
            return None
        first, second = self.pick((("Mul", "Div"), ("Add", "Sub"), ("Sub", "Add"), ("Div", "Mul"), ("Mul", "Mul"),
                                   ("Add", "Add"), ("Div", "Div"), ("Max", "Min"), ("Min", "Max"),
                                   ("Sub", "Sub")))  # fmt: skip
        if {first, second} & {"Max", "Min"} and x.dtype not in _MIN_MAX:
            return None
        options = (2, 3, 4, 5, 7, 16, 100) if x.dtype in INTEGERS else (2.0, 0.5, 3.0, 0.1, 1e-3)
        a = self.pick(options)
        b = a if self.chance(70) else self.pick(options)
        y = self.node(first, [x.name, self.const(a, x.dtype)], x.dtype, x.shapes)
        return self.node(second, [y.name, self.const(b, x.dtype)], x.dtype, x.shapes)

    def division(self) -> T | None:
        """Division by nonzero numbers; for integers not by -1 either, since the least one has no negative."""
        x = self.tensor(lambda t: t.dtype != P.BOOL)
        if x is None:
            return None
        if x.dtype in FLOATS:
            c = self.const(self.pick((2.0, 3.0, 0.5, -4.0, 8.0)), x.dtype)
            if self.chance(30):
                return self.node("Mod", [x.name, c], x.dtype, x.shapes, fmod=1)
            return self.node("Div", [x.name, c], x.dtype, x.shapes)
        options = [1, 2, 3, 4, 7, 8] + ([-2, -3] if x.dtype in SIGNED else [])
        c = self.const(self.pick(options), x.dtype)
        if self.chance(50):
            return self.node("Div", [x.name, c], x.dtype, x.shapes)
        return self.node("Mod", [x.name, c], x.dtype, x.shapes, fmod=self.pick((0, 0, 1)))

    def power(self) -> T | None:
        x = self.tensor(lambda t: t.dtype in (*FLOATS, P.INT32, P.INT64))
        if x is None:
            return None
        if x.dtype not in FLOATS:  # on overflow, ONNX Runtime's result depends on the shapes
            x = self.node(
                "Clip", [x.name, self.const(-1000, x.dtype), self.const(1000, x.dtype)], x.dtype, x.shapes
            )
        exponent = (
            self.pick((2, 2, 3, 1)) if x.dtype not in FLOATS else self.pick((2, 2, 3, 0.5, 1, 0, -1, -0.5))
        )
        return self.node("Pow", [x.name, self.const(exponent, x.dtype)], x.dtype, x.shapes)

    def clip(self) -> T | None:
        x = self.tensor(lambda t: t.dtype in _MIN_MAX)
        if x is None:
            return None
        for _ in range(self.pick((1, 2))):
            bounds = sorted([self.scalar(x.dtype), self.scalar(x.dtype)])
            if x.dtype == P.INT64:  # ONNX Runtime's kernel is wrong: clip([42] * 4, -5, 2**31) gives 2**31
                bounds = [min(b, 2**31 - 1) for b in bounds]
            if self.chance(10):
                bounds.reverse()
            names = [self.const(b, x.dtype) if self.chance(75) else "" for b in bounds]
            x = self.node("Clip", [x.name, *names], x.dtype, x.shapes)
        return x

    def compare(self) -> T | None:
        x = self.tensor(lambda t: t.dtype != P.BOOL)
        if x is None:
            return None
        y = self.tensor(lambda t: t.dtype == x.dtype and t.shapes == x.shapes)
        other = y.name if y is not None and self.chance(50) else self.const(self.scalar(x.dtype), x.dtype)
        left = x.name
        if self.chance(30) and y is not None:
            left = self.node("Sub", [x.name, y.name], x.dtype, x.shapes).name
            other = self.const(0, x.dtype)
        c = self.node(self.pick(_COMPARE), [left, other], P.BOOL, x.shapes)
        if self.chance(30):
            c = self.node("Not", [c.name], P.BOOL, c.shapes)
        return c

    def where(self) -> T | None:
        x = self.tensor(lambda t: t.dtype in _WHERE)
        if x is None:
            return None
        if x.dtype in FLOATS and self.chance(40):
            c = self.node(self.pick(("IsNaN", "IsInf")), [x.name], P.BOOL, x.shapes)
        else:
            found = self.tensor(lambda t: t.dtype == P.BOOL and _broadcast(t.shapes, x.shapes) == x.shapes)
            if found is None:
                return None
            c = found
        y = self.tensor(lambda t: t.dtype == x.dtype and t.shapes == x.shapes and t is not x)
        other = y.name if y is not None and self.chance(60) else self.const(self.scalar(x.dtype), x.dtype)
        pair = [x.name, other] if self.chance(50) else [other, x.name]
        return self.node("Where", [c.name, *pair], x.dtype, x.shapes)

    def cast(self) -> T | None:
        """A cast, and perhaps one back. Floats only become integers if they fit: otherwise the result is undefined."""
        x = self.tensor()
        if x is None:
            return None
        to = self.pick((*FLOATS, *INTEGERS, P.BOOL))
        y = self._cast(x, to)
        if self.chance(50):
            y = self._cast(y, x.dtype if self.chance(70) else self.pick((P.FLOAT, P.INT64, P.INT32)))
        return y

    def _cast(self, x: T, to: int) -> T:
        if x.dtype in FLOATS and to in INTEGERS:
            self.specials = False
            low, high = (0, 100) if to in UNSIGNED else (-100, 100)
            x = self.node(
                "Clip", [x.name, self.const(low, x.dtype), self.const(high, x.dtype)], x.dtype, x.shapes
            )
        values = x.values if x.small and to in (P.INT64, P.INT32) and x.dtype in (P.INT64, P.INT32) else None
        return self.node("Cast", [x.name], to, x.shapes, values, to=to)

    def shift(self) -> T | None:
        x = self.tensor(lambda t: t.dtype in (P.UINT8, P.UINT32, P.UINT64))
        if x is None:
            return None
        for _ in range(self.pick((1, 2))):
            c = self.const(self.random.randint(0, 7), x.dtype)
            x = self.node("BitShift", [x.name, c], x.dtype, x.shapes, direction=self.pick(("LEFT", "RIGHT")))
        return x

    # --- sizes computed from sizes ---

    def shape(self) -> T | None:
        x = self.tensor(lambda t: t.rank >= 1)
        if x is None:
            return None
        attrs: dict[str, int] = {}
        if self.chance(25):
            attrs["start"] = self.random.randint(-x.rank, x.rank - 1)
            if self.chance(50):
                attrs["end"] = self.random.randint(attrs["start"] % x.rank + 1, x.rank + 2)
        values = [np.asarray(s[attrs.get("start", 0) : attrs.get("end")], np.int64) for s in x.shapes]
        s = self.node("Shape", [x.name], P.INT64, [v.shape for v in values], values, **attrs)
        return self.reversed(s) if self.chance(20) else s

    def reversed(self, x: T) -> T:
        names = [self.const([v]) for v in (-1, -(2**31) if self.chance(50) else -(2**63) + 1, 0, -1)]
        values = [v[::-1].copy() for v in x.values] if x.values is not None else None
        return self.node("Slice", [x.name, *names], x.dtype, x.shapes, values)

    def number(self) -> T:
        """A size: a tensor of shape () or (1,) with an integer computed from dimensions."""
        n = self.tensor(lambda t: t.size)
        if n is None or self.chance(40):
            x = self.tensor(lambda t: t.rank >= 1)
            assert x is not None
            axis = self.random.randrange(x.rank)
            s = self.node(
                "Shape", [x.name], P.INT64, [(x.rank,)] * SIZES, [np.asarray(d, np.int64) for d in x.shapes]
            )
            form: Shape = self.pick(((), (1,)))
            values = [np.full(form, d, np.int64) for d in x.dims(axis)]
            index = self.const(np.full(form, axis if self.chance(60) else axis - x.rank))
            n = self.node("Gather", [s.name, index], P.INT64, [form] * SIZES, values)
        for _ in range(self.pick((0, 1, 2))):
            n = self.computed(n)
        return n

    def computed(self, n: T) -> T:
        """Arithmetic as exporters do it: floors, ceilings, multiples, clamps."""
        assert n.values is not None
        k = self.pick((2, 3, 4, 6, 8))
        form = n.shapes[0]
        values = [int(v.reshape(())) for v in n.values]
        kind = self.random.randrange(9)

        def step(op: str, x: T, other: int, results: Sequence[int], flip: bool = False) -> T:
            pair = [x.name, self.const(np.full(self.pick(((), form)), other))]
            arrays = [np.full(form, r, np.int64) for r in results]
            return self.node(op, pair[::-1] if flip else pair, P.INT64, [form] * SIZES, arrays)

        def truncated(v: int, d: int) -> int:
            return abs(v) // d * (1 if v >= 0 else -1)

        if kind == 0:
            return step("Add", n, k, [v + k for v in values])
        if kind == 1:
            return step("Mul", n, k, [v * k for v in values])
        if kind == 2:
            return step("Div", n, k, [truncated(v, k) for v in values])
        if kind == 3:
            return step("Sub", n, k, [v - k for v in values])
        if kind == 4:
            return step("Mod", n, k, [v % k for v in values])
        if kind == 5:  # ceil(n / k) * k
            values = [v + k - 1 for v in values]
            up = step("Add", n, k - 1, values)
            values = [truncated(v, k) for v in values]
            down = step("Div", up, k, values)
            return step("Mul", down, k, [v * k for v in values]) if self.chance(50) else down
        if kind == 6:
            op = self.pick(("Min", "Max"))
            return step(op, n, k, [(min if op == "Min" else max)(v, k) for v in values])
        if kind == 7:  # through floats, as interpolation does
            factor = self.pick((0.5, 2.0, 1.5, 0.25))
            arrays = [np.full(form, int(np.floor(v * factor)), np.int64) for v in values]
            f = self.node("Cast", [n.name], P.FLOAT, [form] * SIZES, to=P.FLOAT)
            f = self.node("Mul", [f.name, self.const(factor, P.FLOAT)], P.FLOAT, [form] * SIZES)
            f = self.node("Floor", [f.name], P.FLOAT, [form] * SIZES)
            return self.node("Cast", [f.name], P.INT64, [form] * SIZES, arrays, to=P.INT64)
        if self.chance(50):
            return step("Sub", n, k, [k - v for v in values], flip=True)
        m = self.tensor(lambda t: t.size and t.shapes[0] == form and t is not n)
        if m is None:
            return n
        op = self.pick(("Add", "Mul", "Sub", "Max", "Min"))
        run = {"Add": np.add, "Mul": np.multiply, "Sub": np.subtract, "Max": np.maximum, "Min": np.minimum}[
            op
        ]
        arrays = [np.asarray(run(a, b)) for a, b in zip(n.values, m.values or ())]
        return self.node(op, [n.name, m.name], P.INT64, [form] * SIZES, arrays)

    def vector(self, n: T) -> T:
        """A size as a tensor of one dimension."""
        if n.rank == 1:
            return n
        values = [v.reshape(1) for v in n.values or ()]
        if self.chance(50):
            return self.node("Unsqueeze", [n.name, self.const([0])], P.INT64, [(1,)] * SIZES, values)
        return self.node("Reshape", [n.name, self.const([1])], P.INT64, [(1,)] * SIZES, values)

    def joined(self, parts: Sequence[T | int]) -> T:
        """Sizes concatenated: known ones as constants."""
        names, arrays = [], []
        for part in parts:
            if isinstance(part, int):
                names.append(self.const([part]))
                arrays.append([np.asarray([part], np.int64)] * SIZES)
            else:
                v = self.vector(part)
                names.append(v.name)
                arrays.append(list(v.values or ()))
        values = [np.concatenate([a[i] for a in arrays]) for i in range(SIZES)]
        return self.node("Concat", names, P.INT64, [v.shape for v in values], values, axis=0)

    def size_of(self, x: T, axis: int) -> T:
        s = self.node(
            "Shape", [x.name], P.INT64, [(x.rank,)] * SIZES, [np.asarray(d, np.int64) for d in x.shapes]
        )
        values = [np.asarray(d, np.int64) for d in x.dims(axis)]
        return self.node("Gather", [s.name, self.const(axis)], P.INT64, [()] * SIZES, values)

    def reshape(self) -> T | None:
        x = self.tensor(lambda t: t.rank >= 2)
        if x is None:
            return None
        kind = self.random.randrange(5)
        if kind == 0:  # merge the first two dimensions, the product computed
            a, b = self.size_of(x, 0), self.size_of(x, 1)
            values = [u * v for u, v in zip(a.values or (), b.values or ())]
            ab = self.node("Mul", [a.name, b.name], P.INT64, [()] * SIZES, values)
            rest = [self.size_of(x, i) if not x.fixed(i) else x.shapes[0][i] for i in range(2, x.rank)]
            target = self.joined([ab, *rest])
            return self.node(
                "Reshape", [x.name, target.name], x.dtype, [tuple(map(int, v)) for v in target.values or ()]
            )
        if kind == 1:  # all but the first
            if any(0 in s for s in x.shapes):
                return None
            target = self.joined([self.size_of(x, 0), -1])
            return self.node(
                "Reshape", [x.name, target.name], x.dtype, [(s[0], int(np.prod(s[1:]))) for s in x.shapes]
            )
        if kind == 2:
            shapes = [(int(np.prod(s)),) for s in x.shapes]
            if any(0 in s for s in x.shapes):
                return None
            return self.node("Reshape", [x.name, self.const([-1])], x.dtype, shapes)
        if kind == 3:  # split the last
            if not x.fixed(x.rank - 1) or x.shapes[0][-1] % 2 or 0 in x.shapes[0]:
                return None
            half = x.shapes[0][-1] // 2
            back = self.node("Reshape", [x.name, self.const([0] * (x.rank - 1) + [2, half])], x.dtype,
                             [(*s[:-1], 2, half) for s in x.shapes])  # fmt: skip
            if self.chance(50):
                back = self.transpose(back) or back
            return back
        axis = self.random.randint(0, x.rank)
        return self.node("Flatten", [x.name], x.dtype,
                         [(int(np.prod(s[:axis])), int(np.prod(s[axis:]))) for s in x.shapes], axis=axis)  # fmt: skip

    def expand(self) -> T | None:
        x = self.tensor(lambda t: 1 <= t.rank <= 3)
        y = self.tensor(lambda t: x is not None and _broadcast(t.shapes, x.shapes) is not None)
        if x is None or y is None:
            return None
        shapes = _broadcast(x.shapes, y.shapes)
        if shapes is None or max(int(np.prod(s)) for s in shapes) > _MOST:
            return None
        values = [np.asarray(s, np.int64) for s in y.shapes]
        s = self.node("Shape", [y.name], P.INT64, [(y.rank,)] * SIZES, values)
        return self.node("Expand", [x.name, s.name], x.dtype, shapes)

    def filled(self) -> T | None:
        """ConstantOfShape or Range by a computed size."""
        n = self.number()
        values = [int(v.reshape(())) for v in n.values or ()]
        if max(values) > 200 or min(values) < 0:
            return n
        if self.chance(50):
            dtype = self.pick((P.FLOAT, P.INT64, P.INT32, P.BOOL, P.UINT8))
            value = numpy_helper.from_array(np.asarray([self.scalar(dtype)]).astype(_np(dtype)))
            return self.node(
                "ConstantOfShape", [self.vector(n).name], dtype, [(v,) for v in values], value=value
            )
        flat = (
            n
            if n.rank == 0
            else self.node(
                "Squeeze", [n.name], P.INT64, [()] * SIZES, [v.reshape(()) for v in n.values or ()]
            )
        )
        start, step = self.pick((0, 1, -2)), self.pick((1, 2, 3))
        arrays = [np.arange(start, v, step, dtype=np.int64) for v in values]
        return self.node("Range", [self.const(start), flat.name, self.const(step)], P.INT64,
                         [a.shape for a in arrays], arrays if max(map(len, arrays)) < 50 else None)  # fmt: skip

    def slice(self) -> T | None:
        """One or two slices, by constants near and far, or to a computed size."""
        x = self.tensor(lambda t: t.rank >= 1)
        if x is None:
            return None
        for _ in range(self.pick((1, 1, 2))):
            axis = self.random.randrange(x.rank)
            step = self.pick((1, 1, 1, 2, 3, -1, -2, 100))
            start = self.pick((0, 0, 1, 2, -1, -3, 5, -(2**31), 2**31 - 1))
            end: list[int] = [self.pick(_ENDS)] * SIZES
            if self.chance(25):
                n = self.vector(self.number())
                end = [int(v[0]) for v in n.values or ()]
                last = n.name
            else:
                last = self.const([end[0]])
            index = [
                (slice(None),) * axis + (_python_slice(start, e, step, s[axis]),)
                for s, e in zip(x.shapes, end)
            ]
            shapes = [np.empty(s, np.bool_)[i].shape for s, i in zip(x.shapes, index)]
            if any(0 in s for s in shapes) and self.chance(90):
                return None
            values = [v[i].copy() for v, i in zip(x.values, index)] if x.values is not None else None
            names = [self.const([start]), last, self.const([axis if self.chance(60) else axis - x.rank])]
            if step != 1 or self.chance(50):
                names.append(self.const([step]))
            x = self.node("Slice", [x.name, *names], x.dtype, shapes, values)
        return x

    def pad(self) -> T | None:
        x = self.tensor(lambda t: t.rank >= 1 and t.dtype in (*_MIN_MAX, P.BOOL) and t.largest < 1500)
        if x is None:
            return None
        least = [min(x.dims(i)) for i in range(x.rank)]
        mode = (
            self.pick(("constant", "constant", "reflect", "edge", "wrap"))
            if x.dtype == P.FLOAT
            else "constant"
        )
        reach = [min(2, d - 1) if mode in ("reflect", "wrap") else 2 for d in least]
        pads = [self.random.randint(0, max(0, r)) if self.chance(50) else 0 for r in reach + reach]
        if mode == "constant" and self.chance(30):
            at = self.random.randrange(2 * x.rank)
            pads[at] = -min(2, least[at % x.rank] - 1)
        shapes = [tuple(d + a + b for d, a, b in zip(s, pads, pads[x.rank :])) for s in x.shapes]
        if any(d < 1 for s in shapes for d in s):
            return None
        inputs = [x.name, self.const(pads)]
        if mode == "constant" and self.chance(60):
            inputs.append(self.const(self.scalar(x.dtype), x.dtype))
        attrs = {"mode": mode} if mode != "wrap" else {"mode": "edge"}
        y = self.node("Pad", inputs, x.dtype, shapes, **attrs)
        if x.dtype == P.FLOAT and x.rank == 4 and self.chance(60):
            return self.window(y)
        return y

    # --- movement ---

    def transpose(self, x: T | None = None) -> T | None:
        x = x or self.tensor(lambda t: t.rank >= 2)
        if x is None or x.rank < 2:
            return None
        for _ in range(self.pick((1, 1, 2))):
            perm = self.random.sample(range(x.rank), x.rank)
            x = self.node(
                "Transpose", [x.name], x.dtype, [tuple(s[p] for p in perm) for s in x.shapes], perm=perm
            )
            if self.chance(40):
                x = self.unary(x) or x
        return x

    def concat(self) -> T | None:
        x = self.tensor(lambda t: t.rank >= 1)
        if x is None:
            return None
        axis = self.random.randrange(x.rank)

        def fits(t: T) -> bool:
            return t.dtype == x.dtype and t.rank == x.rank and all(
                a[:axis] + a[axis + 1 :] == b[:axis] + b[axis + 1 :] for a, b in zip(t.shapes, x.shapes)
            )  # fmt: skip

        parts = [x, *(p for p in (self.tensor(fits) for _ in range(self.pick((1, 2)))) if p is not None)]
        shapes = [
            (*x.shapes[i][:axis], sum(p.shapes[i][axis] for p in parts), *x.shapes[i][axis + 1 :])
            for i in range(SIZES)
        ]
        if max(int(np.prod(s)) for s in shapes) > _MOST:
            return None
        return self.node(
            "Concat", [p.name for p in parts], x.dtype, shapes, axis=self.pick((axis, axis - x.rank))
        )

    def split(self) -> T | None:
        x = self.tensor(lambda t: any(t.fixed(i) and t.shapes[0][i] >= 2 for i in range(t.rank)))
        if x is None:
            return None
        axis = self.pick([i for i in range(x.rank) if x.fixed(i) and x.shapes[0][i] >= 2])
        size = x.shapes[0][axis]
        inputs, attrs = [x.name], {"axis": axis}
        if self.chance(60):
            cut = self.random.randint(1, size - 1)
            parts = [cut, size - cut]
            inputs.append(self.const(parts))
        else:
            count = self.pick((2, 3)) if size >= 3 else 2
            chunk = -(-size // count)
            parts = [chunk] * (size // chunk) + ([size % chunk] if size % chunk else [])
            if len(parts) != count:
                return None
            attrs["num_outputs"] = count
        outs = self.several(
            "Split",
            inputs,
            [(x.dtype, [(*s[:axis], p, *s[axis + 1 :]) for s in x.shapes]) for p in parts],
            **attrs,
        )
        if self.chance(50):
            order = [o.name for o in outs]
            if self.chance(30):
                order.reverse()
            return self.node("Concat", order, x.dtype, x.shapes, axis=axis)
        return outs[0]

    def squeeze(self) -> T | None:
        x = self.tensor(lambda t: t.rank <= 4)
        if x is None:
            return None
        ones = [i for i in range(x.rank) if set(x.dims(i)) == {1}]
        if ones and self.chance(50):
            axis = self.pick(ones)
            return self.node(
                "Squeeze", [x.name, self.const([axis])], x.dtype, [s[:axis] + s[axis + 1 :] for s in x.shapes]
            )
        axis = self.random.randint(0, x.rank)
        name = self.const([axis if self.chance(60) else axis - x.rank - 1])
        return self.node("Unsqueeze", [x.name, name], x.dtype, [(*s[:axis], 1, *s[axis:]) for s in x.shapes])

    def tile(self) -> T | None:
        x = self.tensor(lambda t: t.rank >= 1 and t.largest < 500)
        if x is None:
            return None
        repeats = [self.pick((1, 1, 2, 3)) for _ in range(x.rank)]
        shapes = [tuple(d * r for d, r in zip(s, repeats)) for s in x.shapes]
        if max(int(np.prod(s)) for s in shapes) > _MOST:
            return None
        return self.node("Tile", [x.name, self.const(repeats)], x.dtype, shapes)

    def gather(self) -> T | None:
        x = self.tensor(lambda t: t.rank >= 1 and min(min(s) for s in t.shapes) >= 1)
        if x is None:
            return None
        axis = self.random.randrange(x.rank)
        least = min(x.dims(axis))
        kind = self.pick((P.INT64, P.INT32))
        if self.chance(30):
            i = self.input(kind, self.pick(((), (3,), (2, 2))), Domain(-least, least - 1))
            name, form = i.name, i.shapes[0]
        else:
            form = self.pick(((), (1,), (2,), (3,), (2, 2)))
            indices = (
                self.rng.integers(-least, least, form)
                if self.chance(70)
                else self.rng.integers(0, least, form)
            )
            if form and form == (least,) and self.chance(50):
                indices = np.arange(least)
            name = self.const(indices, kind)
        shapes = [(*s[:axis], *form, *s[axis + 1 :]) for s in x.shapes]
        if max(int(np.prod(s)) for s in shapes) > _MOST:
            return None
        return self.node("Gather", [x.name, name], x.dtype, shapes, axis=axis)

    def elements(self) -> T | None:
        """GatherElements, ScatterElements or ScatterND."""
        x = self.tensor(
            lambda t: t.rank in (1, 2, 3) and min(min(s) for s in t.shapes) >= 1 and t.dtype in _SOME
        )
        if x is None:
            return None
        axis = self.random.randrange(x.rank)
        least = [min(x.dims(i)) for i in range(x.rank)]
        form = tuple(self.random.randint(1, d) for d in least)
        kind = self.random.randrange(3)
        if kind == 0:
            index = self.const(
                self.rng.integers(-least[axis], least[axis], form), self.pick((P.INT64, P.INT32))
            )
            return self.node("GatherElements", [x.name, index], x.dtype, [form] * SIZES, axis=axis)
        if kind == 1:
            places = np.broadcast_to(
                np.expand_dims(
                    self.rng.permutation(least[axis])[: form[axis]],
                    tuple(i for i in range(x.rank) if i != axis),
                ),
                form,
            )
            updates = self.const(self.rng.integers(0, 5, form), x.dtype)
            return self.node(
                "ScatterElements", [x.name, self.const(places), updates], x.dtype, x.shapes, axis=axis
            )
        if not all(x.fixed(i) for i in range(1, x.rank)):
            return None
        rows = self.rng.permutation(least[0])[: form[0]]
        updates = self.const(self.rng.integers(0, 5, (len(rows), *x.shapes[0][1:])), x.dtype)
        return self.node("ScatterND", [x.name, self.const(rows[:, None]), updates], x.dtype, x.shapes)

    # --- sums, orders, products ---

    def reduce(self) -> T | None:
        x = self.tensor(lambda t: t.rank >= 1 and min(min(s) for s in t.shapes) >= 1)
        if x is None:
            return None
        ops = [op for op, types in _REDUCE.items() if x.dtype in types]
        if not ops:
            return None
        axes = sorted(self.random.sample(range(x.rank), self.random.randint(1, x.rank)))
        keep = self.pick((0, 1))
        shapes = [
            tuple(1 if i in axes else d for i, d in enumerate(s) if keep or i not in axes) for s in x.shapes
        ]
        inputs = [x.name, self.const([a if self.chance(60) else a - x.rank for a in axes])]
        if len(axes) == x.rank and self.chance(40):
            inputs.pop()
        op = self.pick(ops)
        if op in ("ReduceMax", "ReduceMin"):
            self.specials = False  # the position decides whether NaN wins
        return self.node(op, inputs, x.dtype, shapes, keepdims=keep)

    def order(self) -> T | None:
        """ArgMax, TopK, CumSum, OneHot or Trilu."""
        x = self.tensor(lambda t: t.rank >= 1 and min(min(s) for s in t.shapes) >= 1)
        if x is None:
            return None
        axis = self.random.randrange(x.rank)
        kind = self.random.randrange(4)
        if kind == 0 and x.dtype in _SOME:
            self.specials = False  # the order of NaN is undefined
            keep = self.pick((0, 1))
            shapes = [(*s[:axis], *(1,) * keep, *s[axis + 1 :]) for s in x.shapes]
            return self.node(self.pick(("ArgMax", "ArgMin")), [x.name], P.INT64, shapes, axis=axis, keepdims=keep,
                             select_last_index=self.pick((0, 0, 1)))  # fmt: skip
        if kind == 1 and x.dtype in (P.FLOAT, P.DOUBLE, P.INT32, P.INT64):
            self.specials = False
            k = self.random.randint(1, min(x.dims(axis)))
            shapes = [(*s[:axis], k, *s[axis + 1 :]) for s in x.shapes]
            outs = self.several("TopK", [x.name, self.const([k])], [(x.dtype, shapes), (P.INT64, shapes)], axis=axis,
                                largest=self.pick((0, 1)))  # fmt: skip
            return outs[0]
        if kind == 2 and x.dtype in (P.FLOAT, P.DOUBLE, P.INT32, P.INT64):
            return self.node("CumSum", [x.name, self.const(axis)], x.dtype, x.shapes, exclusive=self.pick((0, 0, 1)),
                             reverse=self.pick((0, 0, 1)))  # fmt: skip
        if kind == 3 and x.rank >= 2 and x.dtype in (P.FLOAT, P.DOUBLE, P.INT64, P.BOOL):
            k = [self.const(self.pick((0, 1, -1, 2, -5)))] if self.chance(60) else []
            return self.node("Trilu", [x.name, *k], x.dtype, x.shapes, upper=self.pick((0, 1)))
        return None

    def product(self) -> T | None:
        x = self.tensor(
            lambda t: (
                t.rank >= 2
                and t.dtype in (P.FLOAT, P.DOUBLE, P.INT32, P.INT64)
                and t.fixed(t.rank - 1)
                and t.largest > 0
            )
        )
        if x is None:
            return None
        k, n = x.shapes[0][-1], self.pick((1, 2, 4, 5))
        array = (
            self.rng.integers(-3, 4, (k, n))
            if x.dtype in INTEGERS
            else self.rng.standard_normal((k, n)) / np.sqrt(k)
        )
        w = self.const(array, x.dtype)
        if x.rank == 2 and x.dtype in FLOATS and self.chance(40):
            bias = [self.weight((self.pick((1, n)),), x.dtype)] if self.chance(60) else []
            return self.node("Gemm", [x.name, w, *bias], x.dtype, [(s[0], n) for s in x.shapes],
                             alpha=self.pick((1.0, 0.5, -2.0)), beta=self.pick((1.0, 0.0, 2.0)))  # fmt: skip
        y = self.node("MatMul", [x.name, w], x.dtype, [(*s[:-1], n) for s in x.shapes])
        if self.chance(40):
            y = self.node(
                "Add", [y.name, self.const(self.rng.integers(-2, 3, (n,)), x.dtype)], x.dtype, y.shapes
            )
        return y

    def normal(self) -> T | None:
        """Softmax and norms, also written out."""
        x = self.tensor(lambda t: t.dtype == P.FLOAT and t.rank >= 2 and min(min(s) for s in t.shapes) >= 1)
        if x is None:
            return None
        kind = self.random.randrange(5)
        if kind == 0:
            return self.node(
                self.pick(("Softmax", "LogSoftmax")),
                [x.name],
                P.FLOAT,
                x.shapes,
                axis=self.random.randrange(-x.rank, x.rank),
            )
        kept = [(*s[:-1], 1) for s in x.shapes]
        if kind == 1:  # a layer norm, written out
            mean = self.node("ReduceMean", [x.name, self.const([-1])], P.FLOAT, kept, keepdims=1)
            d = self.node("Sub", [x.name, mean.name], P.FLOAT, x.shapes)
            square = self.node("Pow", [d.name, self.const(2.0, P.FLOAT)], P.FLOAT, x.shapes)
            var = self.node("ReduceMean", [square.name, self.const([-1])], P.FLOAT, kept, keepdims=1)
            eps = self.node("Add", [var.name, self.const(1e-5, P.FLOAT)], P.FLOAT, kept)
            return self.node(
                "Div", [d.name, self.node("Sqrt", [eps.name], P.FLOAT, kept).name], P.FLOAT, x.shapes
            )
        if kind == 2:  # a softmax, written out
            self.specials = False
            top = self.node("ReduceMax", [x.name, self.const([-1])], P.FLOAT, kept, keepdims=1)
            e = self.node(
                "Exp", [self.node("Sub", [x.name, top.name], P.FLOAT, x.shapes).name], P.FLOAT, x.shapes
            )
            total = self.node("ReduceSum", [e.name, self.const([-1])], P.FLOAT, kept, keepdims=1)
            return self.node("Div", [e.name, total.name], P.FLOAT, x.shapes)
        if kind == 3:  # x * sigmoid(x)
            s = self.node("Sigmoid", [x.name], P.FLOAT, x.shapes)
            return self.node("Mul", [x.name, s.name], P.FLOAT, x.shapes)
        if x.rank >= 3 and x.fixed(1):
            c = x.shapes[0][1]
            if self.chance(50):
                return self.node(
                    "InstanceNormalization", [x.name, self.weight((c,)), self.weight((c,))], P.FLOAT, x.shapes
                )
            rest = [self.weight((c,)) for _ in range(3)] + [
                self.const(np.abs(self.rng.standard_normal(c)) + 0.5, P.FLOAT)
            ]
            return self.node("BatchNormalization", [x.name, *rest], P.FLOAT, x.shapes)
        return None

    # --- windows ---

    def window(self, x: T | None = None) -> T | None:
        """Conv, ConvTranspose or a pooling with odd attributes."""
        x = x or self.tensor(
            lambda t: t.dtype == P.FLOAT and t.rank == 4 and t.fixed(1) and min(min(s) for s in t.shapes) >= 1
        )
        if x is None or not x.fixed(1) or x.largest > 2000:
            return None
        c = x.shapes[0][1]
        kernel = [self.pick((1, 2, 3)) for _ in range(2)]
        strides = [self.pick((1, 1, 2)) for _ in range(2)]
        dilations = [self.pick((1, 1, 2)) for _ in range(2)]
        pads = [self.random.randint(0, kernel[i % 2] - 1) if self.chance(60) else 0 for i in range(4)]
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
        padded = [[s[2 + i] + pads[i] + pads[2 + i] for i in range(2)] for s in x.shapes]
        if any(p[i] < reach[i] for p in padded for i in range(2)):
            return None
        attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "pads": pads}
        kind = self.random.randrange(4)
        spatial = [tuple((p[i] - reach[i]) // strides[i] + 1 for i in range(2)) for p in padded]
        if kind in (0, 1):
            group = self.pick([g for g in (1, 1, 2, c) if c % g == 0])
            m = group * self.pick((1, 2, 3))
            if self.chance(30) and kind == 0 and dilations == [1, 1]:
                attrs.pop("pads")
                attrs["auto_pad"] = self.pick(("SAME_UPPER", "SAME_LOWER"))
                spatial = [tuple(-(-s[2 + i] // strides[i]) for i in range(2)) for s in x.shapes]
            if kind == 1:
                return self.transposed(x, kernel, strides, dilations, pads, group)
            bias = [self.weight((m,))] if self.chance(50) else []
            y = self.node("Conv", [x.name, self.weight((m, c // group, *kernel)), *bias], P.FLOAT,
                          [(s[0], m, *o) for s, o in zip(x.shapes, spatial)], group=group,
                          dilations=dilations, **attrs)  # fmt: skip
            if self.chance(40):
                scale = self.weight((m, 1, 1))
                y = self.node(self.pick(("Mul", "Add")), [y.name, scale], P.FLOAT, y.shapes)
            return y
        shapes = [(s[0], c, *o) for s, o in zip(x.shapes, spatial)]
        if kind == 2:
            self.specials = False
            outs = [(P.FLOAT, shapes)] + ([(P.INT64, shapes)] if self.chance(20) else [])
            return self.several("MaxPool", [x.name], outs, dilations=dilations, **attrs)[0]
        if any(dilations[i] != 1 for i in range(2)):
            return None
        return self.node(
            "AveragePool", [x.name], P.FLOAT, shapes, count_include_pad=self.pick((0, 1)), **attrs
        )

    def transposed(
        self, x: T, kernel: list[int], strides: list[int], dilations: list[int], pads: list[int], group: int
    ) -> T | None:
        c, m = x.shapes[0][1], self.pick((1, 2))
        extra = [
            self.random.randint(0, max(strides[i], dilations[i]) - 1) if self.chance(40) else 0
            for i in range(2)
        ]
        spatial = [
            tuple(
                strides[i] * (s[2 + i] - 1)
                + extra[i]
                + (kernel[i] - 1) * dilations[i]
                + 1
                - pads[i]
                - pads[2 + i]
                for i in range(2)
            )
            for s in x.shapes
        ]
        if any(d < 1 for o in spatial for d in o) or any(e >= s for e, s in zip(extra, strides)):
            return None
        bias = [self.weight((m * group,))] if self.chance(50) else []
        return self.node("ConvTranspose", [x.name, self.weight((c, m, *kernel)), *bias], P.FLOAT,
                         [(s[0], m * group, *o) for s, o in zip(x.shapes, spatial)], kernel_shape=kernel,
                         strides=strides, dilations=dilations, pads=pads, group=group,
                         output_padding=extra)  # fmt: skip

    def resize(self) -> T | None:
        x = self.tensor(
            lambda t: (
                t.dtype == P.FLOAT and t.rank == 4 and t.largest < 700 and min(min(s) for s in t.shapes) >= 1
            )
        )
        if x is None:
            return None
        mode = self.pick(("nearest", "nearest", "linear", "cubic"))
        coordinates = self.pick(("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"))
        attrs: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": coordinates}
        if mode == "nearest":
            attrs["nearest_mode"] = self.pick(("floor", "round_prefer_floor", "ceil", "round_prefer_ceil"))
        factors = [self.pick((1, 2, 2, 3)) for _ in range(2)]
        shapes = [(*s[:2], s[2] * factors[0], s[3] * factors[1]) for s in x.shapes]
        if self.chance(50):
            scales = self.const([1.0, 1.0, *map(float, factors)], P.FLOAT)
            return self.node("Resize", [x.name, "", scales], P.FLOAT, shapes, **attrs)
        parts: list[T | int] = [self.size_of(x, 0), self.size_of(x, 1)]
        for i in (2, 3):
            n = self.size_of(x, i)
            values = [v * factors[i - 2] for v in n.values or ()]
            parts.append(
                self.node("Mul", [n.name, self.const(factors[i - 2])], P.INT64, [()] * SIZES, values)
            )
        return self.node("Resize", [x.name, "", "", self.joined(parts).name], P.FLOAT, shapes, **attrs)

    def depth(self) -> T | None:
        x = self.tensor(
            lambda t: t.dtype in (P.FLOAT, P.UINT8) and t.rank == 4 and t.fixed(1) and t.shapes[0][1] % 4 == 0
        )
        if x is None:
            return None
        shapes = [(s[0], s[1] // 4, s[2] * 2, s[3] * 2) for s in x.shapes]
        y = self.node("DepthToSpace", [x.name], x.dtype, shapes, blocksize=2, mode=self.pick(("DCR", "CRD")))
        if self.chance(50):
            return self.node("SpaceToDepth", [y.name], x.dtype, x.shapes, blocksize=2)
        return y

    # --- control flow ---

    def condition(self) -> T | None:
        """A boolean: an input, or computed from sizes or numbers."""
        kind = self.random.randrange(3)
        if kind == 0:
            return self.tensor(lambda t: t.dtype == P.BOOL and t.rank == 0) or self.input(P.BOOL, ())
        if kind == 1:
            n = self.number()
            if n.rank:
                n = self.node(
                    "Squeeze", [n.name], P.INT64, [()] * SIZES, [v.reshape(()) for v in n.values or ()]
                )
            return self.node(
                self.pick(_COMPARE), [n.name, self.const(self.pick((1, 2, 4, 12, 20)))], P.BOOL, [()] * SIZES
            )
        x = self.tensor(
            lambda t: t.dtype in (P.FLOAT, P.INT32, P.INT64) and min(min(s, default=1) for s in t.shapes) >= 1
        )
        if x is None:
            return None
        self.specials = False  # a comparison with NaN decides a branch
        top = self.node("ReduceMax", [x.name], x.dtype, [()] * SIZES, keepdims=0)
        return self.node(
            "Greater", [top.name, self.const(self.pick((0, 1, 3)), x.dtype)], P.BOOL, [()] * SIZES
        )

    def body(self, x: T, name: str, length: int) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto], str]:
        """Nodes that keep x's shape. They may read values from outside."""
        outer, constants, pool = self.nodes, self.initializers, self.pool
        self.nodes, self.initializers = [], []
        inner = T(name, x.dtype, x.shapes)
        self.pool = [inner, *(t for t in pool if t.dtype == x.dtype and t.shapes == x.shapes)]
        y = inner
        for _ in range(length):
            made = self.unary(y) if self.chance(50) else self.binary(y)
            if made is not None and made.shapes == x.shapes:
                y = made
        if y is inner:
            y = self.node("Identity", [name], x.dtype, x.shapes)
        made_nodes, made_constants = self.nodes, self.initializers
        self.nodes, self.initializers, self.pool = outer, constants, pool
        return made_nodes, made_constants, y.name

    def branch(self) -> T | None:
        c = self.condition()
        x = self.tensor(lambda t: t.dtype in (P.FLOAT, P.INT32, P.INT64, P.BOOL))
        if c is None or x is None:
            return None
        graphs = []
        for label in ("then", "else"):
            nodes, constants, last = self.body(x, x.name, self.pick((1, 2, 3)))
            out = helper.make_tensor_value_info(last, x.dtype, None)
            graphs.append(helper.make_graph(nodes, self.name(label), [], [out], constants))
        self.read.add(x.name)
        return self.node("If", [c.name], x.dtype, x.shapes, then_branch=graphs[0], else_branch=graphs[1])

    def loop(self) -> T | None:
        x = self.tensor(lambda t: t.dtype in (P.FLOAT, P.INT32, P.INT64) and t.largest < 300)
        if x is None:
            return None
        times = [self.random.randint(0, 4)] * SIZES
        trips = self.const(times[0])
        if self.chance(50):
            n = self.number()
            known = [int(v.reshape(())) for v in n.values or ()]
            if max(known) <= 6 and n.rank == 0:
                times, trips = [max(0, k) for k in known], n.name
                self.read.add(n.name)
        state = self.name("state")
        nodes, constants, last = self.body(x, state, self.pick((1, 2)))
        step, going, still, piece = (self.name(s) for s in ("i", "c", "k", "p"))
        nodes.append(helper.make_node("Identity", [going], [still]))
        scans = x.rank <= 2 and self.chance(50)
        outs = [
            helper.make_tensor_value_info(still, P.BOOL, []),
            helper.make_tensor_value_info(last, x.dtype, None),
        ]
        if scans:
            nodes.append(helper.make_node("Identity", [last], [piece]))
            outs.append(helper.make_tensor_value_info(piece, x.dtype, None))
        given = [
            helper.make_tensor_value_info(step, P.INT64, []),
            helper.make_tensor_value_info(going, P.BOOL, []),
            helper.make_tensor_value_info(state, x.dtype, None),
        ]
        graph = helper.make_graph(nodes, self.name("body"), given, outs, constants)
        made = [(x.dtype, x.shapes)]
        if scans and min(times) > 0:
            made.append((x.dtype, [(k, *s) for k, s in zip(times, x.shapes)]))
        elif scans:
            del graph.output[-1]
        always = self.pick((self.const(True, P.BOOL), ""))
        return self.several("Loop", [trips, always, x.name], made, body=graph)[0]


def _python_slice(start: int, end: int, step: int, size: int) -> slice:
    """ONNX's slice as NumPy's. With a negative step, an end below the first element means all elements."""
    if step > 0:
        return slice(start, end, step)
    first = start + size if start < 0 else start
    last = end + size if end < 0 else end
    return (
        slice(min(max(first, 0), size - 1), None if last < 0 else last, step) if first >= 0 else slice(0, 0)
    )


_EMITTERS: tuple[Callable[[_Maker], Any], ...] = (
    _Maker.unary, _Maker.unary, _Maker.same, _Maker.binary, _Maker.binary, _Maker.binary, _Maker.again,
    _Maker.division, _Maker.power, _Maker.clip, _Maker.compare, _Maker.where, _Maker.where, _Maker.cast,
    _Maker.cast, _Maker.shift, _Maker.shape, _Maker.filled, _Maker.filled, _Maker.reshape, _Maker.reshape,
    _Maker.expand, _Maker.slice, _Maker.slice, _Maker.slice, _Maker.pad, _Maker.pad, _Maker.transpose,
    _Maker.transpose, _Maker.concat, _Maker.split, _Maker.squeeze, _Maker.tile, _Maker.gather, _Maker.elements,
    _Maker.reduce, _Maker.reduce, _Maker.order, _Maker.product, _Maker.product, _Maker.normal, _Maker.window,
    _Maker.window, _Maker.resize, _Maker.depth, _Maker.branch, _Maker.loop,
)  # fmt: skip

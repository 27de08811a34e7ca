"""Formulas of shapes and of what is computed from them, against what ONNX Runtime makes of every size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from tests.runtime import recent
from xrlflow.ir import ArrayHandle, Attrs, Const, DType, Graph, TensorType, dims
from xrlflow.ir.dims import Formula
from xrlflow.onnxio import load
from xrlflow.onnxio.shapes import is_made_up
from xrlflow.ops.infer import infer
from xrlflow.ops.symbolic_values import Known, evaluate_call, of_array, values

pytestmark = pytest.mark.corpus

HEAD = '<ir_version: 8, opset_import: ["" : 18]> '
SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13)


def run(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def agree(text: str, most: int = 200) -> tuple[int, int]:
    """Compare the formulas of the outputs' dimensions with what runs: how many numbers were compared, of how many."""
    model = onnx.parser.parse_model(HEAD + text)
    graph = load(model).graph
    session = run(model)
    symbols = sorted({d for v in graph.inputs for d in graph.type(v).shape or () if isinstance(d, str)})
    compared = total = 0
    for numbers in list(product(SIZES, repeat=len(symbols)))[:most]:
        at = dict(zip(symbols, numbers))
        feeds = {}
        for value in graph.inputs:
            shape = [at.get(d, d) for d in graph.type(value).shape or ()]
            feeds[graph.leaves.names[value]] = np.ones(shape, np.float32)
        try:
            outputs = session.run(None, feeds)
        except Exception:  # at this size the original has no value
            continue
        for value, output in zip(graph.outputs, outputs):
            shape = graph.type(value).shape
            assert shape is None or len(shape) == output.ndim
            for dim, real in zip(shape or (), output.shape):
                found = dims.value(dim, at, evaluate_call)
                total += 1
                compared += found is not None
                assert found is None or found == real, (
                    f"at {at}: {dim} is {found}, runs as {output.shape}: {text}"
                )
    return compared, total


def windows() -> Iterator[str]:
    """Convolutions and pools."""
    rng = random.Random(0)
    for _ in range(60):
        k, s, d = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 2)
        a, b = rng.randint(0, 2), rng.randint(0, 2)
        common = f"strides=[{s}], dilations=[{d}]"
        pads = rng.choice(
            (f"pads=[{a},{b}]", 'auto_pad="SAME_UPPER"', 'auto_pad="SAME_LOWER"', 'auto_pad="VALID"')
        )
        weight = ",".join(["1"] * k)
        yield (
            f"g (float[N,1,S] x) => (float[a,b,c] y) <float[1,1,{k}] w = {{{weight}}}> "
            f"{{ y = Conv<{common}, {pads}>(x, w) }}"
        )
        for pool in ("MaxPool", "AveragePool", "LpPool"):
            ceil = rng.choice(("", ", ceil_mode=1")) if "auto" not in pads else ""
            if a < k and b < k:
                dilated = f"strides=[{s}]" if pool == "AveragePool" else common
                yield (
                    "g (float[N,1,S] x) => (float[a,b,c] y) "
                    f"{{ y = {pool}<kernel_shape=[{k}], {dilated}, {pads}{ceil}>(x) }}"
                )
        out = rng.randint(0, s - 1)
        yield (
            f"g (float[N,1,S] x) => (float[a,b,c] y) <float[1,1,{k}] w = {{{weight}}}> "
            f"{{ y = ConvTranspose<{common}, pads=[{a},{b}], output_padding=[{out}]>(x, w) }}"
        )


def slices() -> Iterator[str]:
    rng = random.Random(1)
    numbers = (0, 1, 2, 3, 5, 7, 480_000, 2**31 - 1, 2**63 - 1, -1, -2, -5, -480_000, -(2**63))
    for _ in range(120):
        start, end = rng.choice(numbers), rng.choice(numbers)
        step = rng.choice((1, 1, 2, 3, -1, -2))
        yield (
            f"g (float[S,3] x) => (float[a,b] y) <int64[1] s = {{{start}}}, int64[1] e = {{{end}}},"
            f" int64[1] t = {{{step}}}, int64[1] z = {{0}}> {{ y = Slice(x, s, e, z, t) }}"
        )


def reshapes() -> Iterator[str]:
    """Elements of the wanted shape: numbers, 0 and -1, dimensions and products of them."""
    rng = random.Random(2)
    parts = ("c0", "c1", "m", "p2", "p3", "p6", "ds", "dt", "dn", "st", "sn", "s2", "s6", "tn")
    define = (
        " h = Shape(x) ds = Slice(h, i0, i1) dt = Slice(h, i1, i2) dn = Slice(h, i2, i3) st = Mul(ds, dt)"
        " sn = Mul(ds, dn) tn = Mul(dt, dn) s2 = Mul(ds, p2) s6 = Mul(ds, p6) c0 = Identity(i0)"
        " c1 = Identity(i1) m = Identity(im) "
    )
    numbers = {"p2": 2, "p3": 3, "p6": 6, "i0": 0, "i1": 1, "i2": 2, "i3": 3, "im": -1}
    consts = ", ".join(f"int64[1] {name} = {{{number}}}" for name, number in numbers.items())
    for _ in range(160):
        chosen = rng.choices(parts, k=rng.randint(1, 4))
        if chosen.count("m") <= 1:
            zero = rng.choice(("", "", "<allowzero=1>"))
            yield (
                f"g (float[S,T,6] x) => (float[{','.join('abcd'[: len(chosen)])}] y) <{consts}> {{ {define}"
                f" w = Concat<axis=0>({', '.join(chosen)}) y = Reshape{zero}(x, w) }}"
            )


OTHERS = (
    "g (float[S,3] x, float[T,3] z) => (float[a,b] y) { y = Concat<axis=0>(x, z, x) }",
    "g (float[S,3] x, float[T,3] z) => (float[a,b] y) { y = Concat<axis=-2>(x, z) }",
    "g (float[S,T,3] x) => (float[a,b] y, float[c,d] z) { y = Flatten<axis=2>(x) z = Flatten<axis=-2>(x) }",
    "g (float[S,3] x, float[T,1,3] z) => (float[a,b,c] y) { y = Add(x, z) }",
    "g (float[S,1] x, float[1,T] z) => (float[a,b] y) { y = Where(c, x, z) c = Greater(x, z) }",
    "g (float[S] x, float[T] z) => (float[a] y) { y = Mul(x, z) }",
    "g (float[S,1,2,3] x, float[T,3,4] z) => (float[a,b,c,d] y) { y = MatMul(x, z) }",
    "g (float[S,T] x) => (float[a,b] y) <int64[4] p = {1,-2,0,3}> { y = Pad(x, p) }",
    "g (float[S,T] x) => (float[a,b] y) <int64[2] p = {-3,1}, int64[1] a = {1}, float z={0}> { y = Pad(x, p, z, a) }",
    "g (float[S,T] x) => (float[a,b] y) <int64[2] r = {3,0}> { y = Tile(x, r) }",
    "g (float[S,T] x, float[T,1] z) => (float[a,b] y) { s = Shape(z) y = Tile(x, s) }",
    "g (float[S] x, float[T] z) => (float[a] y, float[b] u, float[c] w) { y, u, w = Split<num_outputs=3>(x) }",
    "g (float[S,6] x) => (float[a,b] y, float[c,d] u) <int64[2] p = {2,4}> { y, u = Split<axis=1>(x, p) }",
    "g (float[S] x, float[T] z) => (float[a] y, float[b] u) { s = Shape(z) t = Shape(x) d = Sub(t, s)"
    " p = Concat<axis=0>(s, d) y, u = Split(x, p) }",
    "g (float[S,1] x, float[T,3] z) => (float[a,b] y) { s = Shape(z) y = Expand(x, s) }",
    "g (float[S] x) => (int64[a] y) <int64 z={0}, int64 k={3}> { s = Size(x) y = Range(z, s, k) }",
    "g (float[S] x) => (int64[a] y) <int64 k={-2}, int64 e={-1}> { s = Size(x) y = Range(s, e, k) }",
    "g (float[S,T] x) => (float[a,b] y) { s = Shape(x) y = ConstantOfShape(s) }",
    "g (float[S,4,2,T] x) => (float[a,b,c,d] y) { y = DepthToSpace<blocksize=2>(x) }",
    "g (float[1,4,S,T] x) => (float[a,b,c,d] y) { y = SpaceToDepth<blocksize=2>(x) }",
    "g (float[1,1,S,T] x) => (float[a,b,c,d] y) <float[4] s = {1,1,2,1.5}> { y = Resize(x, , s) }",
    "g (float[1,1,S,T] x) => (float[a,b,c,d] y) <float[4] s = {1,1,0.3,0.7}> { y = Resize(x, , s) }",
    "g (float[1,1,S,T] x, float[1,1,T,S] z) => (float[a,b,c,d] y) { s = Shape(z) y = Resize(x, , , s) }",
    "g (float[S,T] x) => (float[a,b] y, int64[c,d] i) <int64[1] k = {2}> { y, i = TopK(x, k) }",
    "g (float[S,T] x) => (float[a,b,c] y) { y = Unsqueeze(x, k) k = Constant<value_ints=[-1]>() }",
    "g (float[S,1,T] x) => (float[a,b] y) { k = Constant<value_ints=[1]>() y = Squeeze(x, k) }",
    'g (float[S,T] x, float[T,S] z) => (float[a,b] y) { y = Einsum<equation="ij,jk->ki">(x, z) }',
    "g (float[S,T] x) => (float[a] y) { k = Constant<value_ints=[1]>() y = ReduceSum<keepdims=0>(x, k) }",
    "g (float[S,T] x) => (float[a,b] y) { s = Shape(x) i = Constant<value_ints=[1,0]>() g = Gather(s, i)"
    " y = Reshape(x, g) }",
)  # fmt: skip


UNKNOWN = (
    "Slice(x, v, w)", "Slice(x, v, w, a)", "Slice(x, v, k)", "Slice(x, k, w)", "Slice(x, k, w, , v)", "Reshape(x, v)",
    "Expand(x, v)", "Tile(x, v)", "Pad(x, p)", "Resize(x, , , v)", "Resize(x, , f)", "ConstantOfShape(v)",
)  # fmt: skip


@pytest.mark.parametrize("node", UNKNOWN)
def test_what_only_the_data_decides_has_no_formula(node: str) -> None:
    text = (
        "g (float[S,1] x, int64[2] v, int64[2] w, int64[4] p, float[2] f) => (float[a,b] y) <int64[2] a = {0, 1},"
        f" int64[2] k = {{0, 2}}> {{ y = {node} }}"
    )
    graph = load(onnx.parser.parse_model(HEAD + text)).graph
    shape = graph.type(graph.outputs[0]).shape
    assert shape is not None
    assert [d for d in shape if d is not None and not is_made_up(d)] == []


@recent
@pytest.mark.parametrize("family", [windows, slices, reshapes], ids=lambda f: f.__name__)
def test_shapes_are_those_of_the_runtime(family: object) -> None:
    compared = total = 0
    for text in family():  # type: ignore[operator]
        found, of = agree(text)
        compared, total = compared + found, total + of
    assert total > 1000
    assert compared > 0.9 * total, (compared, total)  # what is not known is no formula, but that is rare


@recent
@pytest.mark.parametrize("text", OTHERS)
def test_shapes_of_other_operators(text: str) -> None:
    compared, total = agree(text)
    assert total
    assert compared or "float[S] x, float[T] z" in text or "Einsum" in text


def programs(rng: random.Random, steps: int) -> str:
    """Arithmetic on two dimensions, in integers of two types and in floats."""
    lines = [
        "h = Shape(x)", "s0 = Gather(h, k0)", "s1 = Gather(h, k1)",
    ]  # fmt: skip
    known = {"i": ["s0", "s1", "k0", "k1", "k3", "k6", "kb", "kn"], "j": ["j3"], "f": ["f2", "f3"]}
    for at in range(steps):
        kind = rng.choice("iiij" if len(known["j"]) > 1 else "iiii")
        name = f"v{at}"
        a, b = rng.choice(known[kind]), rng.choice(known[kind])
        op = rng.choice(
            ("Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Neg", "Cast", "Float", "Where", "Abs")
        )
        if op == "Cast":
            other = "j" if kind == "i" else "i"
            lines.append(f"{name} = Cast<to={6 if other == 'j' else 7}>({a})")
            kind = other
        elif op == "Float":
            step = rng.choice(("Ceil", "Floor", "Sqrt"))
            mul = rng.choice(("Mul", "Div"))
            lines += [
                f"c{at} = Cast<to=1>({a})",
                f"d{at} = {mul}(c{at}, {rng.choice(known['f'])})",
                f"e{at} = {step}(d{at})",
                f"{name} = Cast<to={7 if kind == 'i' else 6}>(e{at})",
            ]
        elif op == "Where":
            lines += [
                f"c{at} = {rng.choice(('Less', 'Equal', 'GreaterOrEqual'))}({a}, {b})",
                f"{name} = Where(c{at}, {b}, {a})",
            ]
        elif op in ("Neg", "Abs"):
            lines.append(f"{name} = {op}({a})")
        else:
            fmod = "<fmod=1>" if op == "Mod" and rng.random() < 0.3 else ""
            lines.append(f"{name} = {op}{fmod}({a}, {b})")
        known[kind].append(name)
    last = known[kind][-1]
    lines.append(f"y = Cast<to=7>({last})")
    consts = (
        "int64 k0={0}, int64 k1={1}, int64 k3={3}, int64 k6={6}, int64 kb={4294967296}, int64 kn={-5}, int32 j3={3},"
        " float f2={2.0}, float f3={0.3}"
    )
    return f"g (float[S,T] x) => (int64 y) <{consts}> {{ {' '.join(lines)} }}"


def computed(graph: Graph) -> Formula | None:
    """The formula of the one element of a graph's first output."""
    elements: dict[int, Known | None] = {}

    def known(value: int) -> Known | None:
        const = graph.const(value)
        return elements.get(value) if const is None else of_array(const.array)

    for node in graph.topological():
        types = [graph.type(v) for v in node.inputs]
        found = values(node.op, node.attrs, types, [known(v) for v in node.inputs], node.types[0])
        elements[node.outputs[0]] = found
    last = known(graph.outputs[0])
    return last.item() if last is not None and isinstance(last.item(), Formula) else None


@recent
@pytest.mark.parametrize("seed", range(6))
def test_computed_values_are_those_of_the_runtime(seed: int) -> None:
    """Random arithmetic: whatever has a formula has its value, wrapping and rounding included."""
    rng = random.Random(seed)
    decided = 0
    for _ in range(60):
        text = programs(rng, rng.randint(1, 6))
        model = onnx.parser.parse_model(HEAD + text)
        elements = computed(load(model).graph)
        if elements is None:
            continue
        try:
            session = run(model)
        except Exception:  # a division by 0 of constants
            continue
        for s, t in (
            (0, 0),
            (0, 70_000),
            (1, 0),
            (1, 70_000),
            (2, 1),
            (3, 5),
            (6, 7),
            (12, 1),
            (1000, 60),
            (7, 1),
        ):
            try:
                (real,) = session.run(None, {"x": np.ones((s, t), np.float32)})
            except Exception:
                continue
            found = dims.evaluate(elements, {"S": s, "T": t}, evaluate_call)
            assert found is None or found == int(real), (
                f"at {s}, {t}: {elements} is {found}, runs as {real}: {text}"
            )
            decided += found is not None
    assert decided > 300


@pytest.mark.parametrize("known", [(), (1,), (2,)])
def test_a_slice_at_places_that_are_not_known(known: tuple[int, ...]) -> None:
    """Without axes it cuts the first ones: nothing is known of those, whatever is known of its bounds."""
    bounds = TensorType(DType.INT64, (2,))
    data = [None, *(_const((1, 2)) if at in known else None for at in (1, 2))]
    (found,) = infer("Slice", Attrs(), [TensorType(DType.FLOAT, (20, 10, 5)), bounds, bounds], data, 1)
    assert found.shape is None or not isinstance(found.shape[0], int)
    assert found.shape is None or not isinstance(found.shape[1], int)


def _const(numbers: tuple[int, ...]) -> Const:
    array = np.array(numbers, np.int64)
    return Const(TensorType(DType.INT64, array.shape, True), ArrayHandle(array), array)


def test_nodes_that_double_a_formula_are_read_in_no_time() -> None:
    steps = " ".join(
        f"p{k} = Div(v{k}, two) q{k} = Mul(v{k}, h) r{k} = Div(q{k}, three) v{k + 1} = Min(p{k}, r{k})"
        for k in range(60)
    )
    graph = load(
        onnx.parser.parse_model(
            f"{HEAD} g (float[S] x) => (float[a] y) <int64[1] two = {{2}}, int64[1] three = {{3}}> {{"
            f" h = Shape(x) v0 = Add(h, two) {steps} y = ConstantOfShape(v60) }}"
        )
    ).graph
    assert graph.type(graph.outputs[0]).shape is not None


def test_a_reduction_without_axes_may_reduce_nothing() -> None:
    text = (
        "g (float[S,T] x) => (int64 y) { s = Shape(x) r = ReduceSum<noop_with_empty_axes=1>(s)"
        " y = ReduceMax<keepdims=0>(r) }"
    )
    elements = computed(load(onnx.parser.parse_model(HEAD + text)).graph)
    assert elements is None or dims.evaluate(elements, {"S": 3, "T": 5}) == 5


@pytest.mark.parametrize(("op", "expected"), [("Min", min), ("Max", max), ("Div", lambda a, b: a // b)])
def test_numbers_of_calls_wrap_around(op: str, expected: Callable[[int, int], int]) -> None:
    """At sizes beyond what a runtime could hold, as a user may give them for the cost model."""
    text = f"g (float[S,T,U] x) => (int64 y) <int64 k = {{3}}> {{ s = Size(x) y = {op}(s, k) }}"
    elements = computed(load(onnx.parser.parse_model(HEAD + text)).graph)
    assert elements is not None
    wrapped = 4_000_000**3 - 3 * 2**64
    assert 0 < wrapped < 2**63
    assert dims.evaluate(elements, dict.fromkeys("STU", 4_000_000), evaluate_call) == expected(wrapped, 3)


def test_a_scale_without_end_gives_no_size() -> None:
    model = onnx.parser.parse_model(
        f"{HEAD} g (float[S] x) => (float[a] y) <float[1] s = {{inf}}> {{ y = Resize(x, , s) }}"
    )
    assert load(model, shapes={"x": (5,)}).bindings == {"S": 5}


@pytest.mark.parametrize(("wanted", "size"), [("n, m, hole, k", 12), ("n, hole, k", None)])
def test_what_a_reshape_infers_beside_sizes_that_may_be_0(wanted: str, size: int | None) -> None:
    """With `allowzero` ONNX Runtime leaves zeros out of both products; m, if it is left, may be one."""
    text = (
        "g (float[N,M,384] x) => (float[a,b,c,d] y) <int64[1] hole = {-1}, int64[1] k = {32}> {"
        " n = Shape<start = 0, end = 1>(x) m = Shape<start = 1, end = 2>(x)"
        f" s = Concat<axis = 0>({wanted}) y = Reshape<allowzero = 1>(x, s) }}"
    )
    graph = load(onnx.parser.parse_model(HEAD + text)).graph
    shape = graph.type(graph.outputs[0]).shape
    assert shape is not None
    inferred = shape[wanted.split(", ").index("hole")]
    assert inferred == size if size is not None else not isinstance(inferred, int)

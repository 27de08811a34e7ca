"""softmax(f(q k)) v becomes one kernel with the results of ONNX Runtime. Similar graphs that are not attention do
not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.tvm.kernels.test_kernels import network
from tests.levels import whole
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import Machine, detect
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.kernels.algorithms import Algorithms
from xrlflow.backends.tvm.kernels.attention import Array, Attention, best_blocking, kernel
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.executable import schedule_all
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.tuning.layer_times import LayerLog

pytestmark = pytest.mark.measures

TRANSPOSED = """ a = Transpose<perm=[0,2,1,3]>(q)
 b = Transpose<perm=[0,2,3,1]>(k)
 c = Transpose<perm=[0,2,1,3]>(v1)
 p = MatMul(a, b)
"""


def heads(rows: int, keys: int, number: int, depth: int, width: int, middle: str, more: str = "") -> str:
    """A graph of attention with this number of heads. Its operands are [1, row, head, column]."""
    return (
        f"(float[1,{rows},{number},{depth}] q, float[1,{keys},{number},{depth}] k,"
        f" float[1,{keys},{number},{width}] v1 {more}) => (float[1,{rows},{number},{width}] y)"
        f" <float t = {{0.3}}> {{\n{TRANSPOSED} {middle}\n u = Softmax<axis=-1>(z)\n w1 = MatMul(u, c)\n"
        f" y = Transpose<perm=[0,2,1,3]>(w1)\n}}"
    )


STACKED = """ <int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, float t = {0.4}, int64[5] s5 = {1, 6, 3, 19, 19},
 int64[4] s4 = {6, 3, 19, 19}> { s = Transpose<perm=[2,0,3,1,4]>(x) r = Gather<axis=0>(s, i0) k = Gather<axis=0>(s, i1)
 v1 = Gather<axis=0>(s, i2) q = Mul(r, t) b = Transpose<perm=[0,1,3,2]>(k) p = MatMul(q, b)
"""
STACKED_END = " u = Softmax<axis=-1>(z) o = MatMul(u, v1) y = Transpose<perm=[0,2,1,3]>(o) }"


def windows(middle: str, more: str, keys: int = 37) -> str:
    """Attention in 6 windows of rows, with 3 heads each. q, k and v are parts of one tensor."""
    stacked = STACKED.replace("19", str(keys))
    return f"(float[6,{keys},3,3,16] x {more}) => (float[6,{keys},3,16] y) {stacked} {middle} {STACKED_END}".replace(
        "19", str(keys)
    )


WINDOWS = "c = Add(p, m) d = Reshape(c, s5) e = Add(d, n) z = Reshape(e, s4)"
BIASES = {
    "constant bias, mask of windows": (WINDOWS, ", float[1,3,37,37] m, float[1,6,1,37,37] n"),
    "bias without batch": ("z = Add(p, m)", ", float[3,37,37] m"),
    "bias first, mask of windows in all heads": (
        "c = Add(m, p) z = Add(n, c)",
        ", float[3,37,37] m, float[6,1,37,37] n",
    ),
    "bias of windows and heads": (WINDOWS, ", float[1,3,37,37] m, float[1,6,3,37,37] n"),
    "only a mask, reshaped": ("d = Reshape(p, s5) e = Add(d, n) z = Reshape(e, s4)", ", float[6,1,1,37] n"),
    "chosen in windows": (
        "d = Reshape(p, s5) h = Neg(t) e = Where(n, d, h) z = Reshape(e, s4)",
        ", bool[6,1,37,37] n",
    ),
}
FUSED = {
    **{name: windows(*bias) for name, bias in BIASES.items()},
    "heads in one dimension": "(float[2,3,30,16] q, float[2,3,40,16] k, float[2,3,40,24] v1, float[3,30,40] m) =>"
    " (float[2,3,30,24] y) <int64[3] a = {6, 30, 16}, int64[3] b = {6, 40, 16}, int64[3] c = {6, 40, 24},"
    " int64[4] d = {2, 3, 30, 40}, int64[3] e = {6, 30, 40}, int64[4] f = {2, 3, 30, 24}, float t = {3.0}> {"
    " q1 = Reshape(q, a) k1 = Reshape(k, b) v2 = Reshape(v1, c) k2 = Transpose<perm=[0,2,1]>(k1) k3 = Div(k2, t)"
    " p = MatMul(q1, k3) r = Reshape(p, d) z = Add(r, m) u = Softmax<axis=-1>(z) w2 = Reshape(u, e)"
    " o = MatMul(w2, v2) y = Reshape(o, f) }",
    "other heads, transposed": "(float[30,2,16,6] q, float[4,3,16,40] k, float[4,3,40,24] v1) => (float[4,3,30,24] y)"
    " <int64[4] a = {3, 4, 30, 16}> { q1 = Transpose<perm=[1,3,0,2]>(q) q2 = Reshape(q1, a)"
    " q3 = Transpose<perm=[1,0,2,3]>(q2) p = MatMul(q3, k) u = Softmax<axis=-1>(p) y = MatMul(u, v1) }",
    "transposed, and again": "(float[2,3,30,16] q, float[2,3,16,40] k, float[2,3,40,24] v1) => (float[24,3,30,2] y) {"
    " p = MatMul(q, k) u = Softmax<axis=-1>(p) o = MatMul(u, v1) o1 = Transpose<perm=[1,2,0,3]>(o)"
    " o2 = Transpose<perm=[3,0,1,2]>(o1) y = Identity(o2) }",
    "both scaled": "(float[2,30,16] q, float[2,16,40] k, float[2,40,24] v1) => (float[2,30,24] y)"
    " <float t = {0.7}, float[1] s = {1.5}> { q1 = Mul(t, q) k1 = Div(k, s) p = MatMul(q1, k1) u = Softmax(p)"
    " y = MatMul(u, v1) }",
    "scaled": heads(24, 48, 3, 16, 32, "z = Mul(p, t)"),
    "mask": heads(24, 48, 3, 16, 32, "r = Div(p, t)\n z = Add(r, m)", ", float[1,1,24,48] m"),
    "mask of keys, first": heads(16, 32, 2, 16, 16, "r = Mul(t, p)\n z = Add(m, r)", ", float[1,1,1,32] m"),
    "mask of lower rank": heads(16, 32, 2, 16, 16, "z = Sub(p, m)", ", float[16,32] m"),
    "bias of heads": heads(16, 33, 4, 16, 16, "z = Add(p, m)", ", float[1,4,16,33] m"),
    "choice": heads(16, 32, 2, 16, 16, "n = Neg(t)\n z = Where(m, p, n)", ", bool[1,1,16,32] m"),
    "odd": heads(37, 41, 3, 19, 23, "z = Mul(p, t)"),
    "heads of 15": heads(40, 40, 8, 15, 15, "z = Mul(p, t)"),
    "heads of 40": heads(20, 70, 2, 40, 40, "z = Mul(p, t)"),
    "wide values, odd": heads(9, 50, 1, 8, 101, "z = Mul(p, t)"),
    "number given": heads(16, 32, 2, 16, 16, "z = Mul(p, m)", ", float m"),
    "values the other way round": "(float[30,16] q, float[16,40] k, float[24,40] v1) => (float[24,30] y) {"
    " c = Transpose(v1)\n p = MatMul(q, k)\n u = Softmax(p)\n o = MatMul(u, c)\n y = Transpose(o) }",
    "odd, panels of keys": heads(7, 197, 2, 32, 40, "z = Mul(p, t)"),
    "one row": heads(1, 64, 3, 16, 16, "z = Mul(p, t)"),
    "one head": heads(101, 64, 1, 16, 16, "z = Mul(p, t)"),
    "a page of keys": heads(20, 1024, 1, 16, 16, "z = Mul(p, t)"),
    "no steps": "(float[2,30,16] q, float[2,16,40] k, float[2,40,24] v1) => (float[2,30,24] y) {"
    " p = MatMul(q, k)\n u = Softmax(p)\n y = MatMul(u, v1) }",
    "no heads": "(float[30,16] q, float[16,40] k, float[40,24] v1) => (float[30,24] y) {"
    " p = MatMul(q, k)\n u = Softmax(p)\n y = MatMul(u, v1) }",
    "constant keys": "(float[30,16] q, float[16,40] w, float[40,24] v) => (float[30,24] y) {"
    " p = MatMul(q, w)\n u = Softmax(p)\n y = MatMul(u, v) }",
    "transposed twice": "(float[2,3,30,16] q, float[3,40,2,16] k, float[2,40,3,24] v1) => (float[30,2,3,24] y) {"
    " b = Transpose<perm=[2,0,3,1]>(k)\n c = Transpose<perm=[0,2,1,3]>(v1)\n p = MatMul(q, b)\n"
    " u = Softmax(p)\n w1 = MatMul(u, c)\n y = Transpose<perm=[2,0,1,3]>(w1) }",
    "in front of more": "(float[30,16] q, float[16,40] k, float[40,24] v1) => (float[30,24] y) {"
    " p = MatMul(q, k)\n u = Softmax(p)\n o = MatMul(u, v1)\n y = Add(o, o) }",
    "the transposition of what is read twice":
    "(float[30,16] q, float[16,40] k, float[40,24] v1) => (float[24,30] y, float[30,24] o) {"
    " p = MatMul(q, k)\n u = Softmax(p)\n o = MatMul(u, v1)\n y = Transpose(o) }",
}  # fmt: skip
LEFT = {
    "rows that were heads": "(float[2,30,16] q, float[2,16,40] k, float[60,40,24] v1) => (float[60,1,24] y)"
    " <int64[3] a = {60, 1, 40}> { p = MatMul(q, k) r = Reshape(p, a) u = Softmax(r) y = MatMul(u, v1) }",
    "keys of all heads": "(float[4,30,16] q, float[1,16,40] k, float[4,40,24] v1) => (float[4,30,24] y) {"
    " p = MatMul(q, k) u = Softmax(p) y = MatMul(u, v1) }",
    "heads against heads": "(float[2,1,30,16] q, float[1,2,16,40] k, float[2,2,40,24] v1) => (float[2,2,30,24] y) {"
    " p = MatMul(q, k) u = Softmax(p) y = MatMul(u, v1) }",
    "scores read": "(float[30,16] q, float[16,40] k, float[40,24] v1) => (float[30,24] y, float[30,40] p) {"
    " p = MatMul(q, k)\n u = Softmax(p)\n y = MatMul(u, v1) }",
    "weights read": "(float[30,16] q, float[16,40] k, float[40,24] v1) => (float[30,24] y, float[30,40] u) {"
    " p = MatMul(q, k)\n u = Softmax(p)\n y = MatMul(u, v1) }",
    "another axis": "(float[30,16] q, float[16,40] k, float[40,24] v1) => (float[30,24] y) {"
    " p = MatMul(q, k)\n u = Softmax<axis=0>(p)\n y = MatMul(u, v1) }",
    "values of all heads": "(float[2,30,16] q, float[2,16,40] k, float[40,24] v1) => (float[2,30,24] y) {"
    " p = MatMul(q, k)\n u = Softmax(p)\n y = MatMul(u, v1) }",
    "few keys": "(float[30,16] q, float[16,7] k, float[7,24] v1) => (float[30,24] y) {"
    " p = MatMul(q, k)\n u = Softmax(p)\n y = MatMul(u, v1) }",
    "no product in front": "(float[30,40] p, float[40,24] v1) => (float[30,24] y) {"
    " u = Softmax(p)\n y = MatMul(u, v1) }",
    "another function in between": "(float[30,16] q, float[16,40] k, float[40,24] v1) => (float[30,24] y) {"
    " p = MatMul(q, k)\n z = Tanh(p)\n u = Softmax(z)\n y = MatMul(u, v1) }",
    "spread by a step": "(float[30,16] q, float[16,40] k, float[2,40,24] v1, float[2,1,40] m) =>"
    " (float[2,30,24] y) { p = MatMul(q, k)\n z = Add(p, m)\n u = Softmax(z)\n y = MatMul(u, v1) }",
    "scores on both sides": "(float[30,16] q, float[16,40] k, float[40,24] v1) => (float[30,24] y) {"
    " p = MatMul(q, k)\n z = Mul(p, p)\n u = Softmax(z)\n y = MatMul(u, v1) }",
    "doubles": "(double[30,16] q, double[16,40] k, double[40,24] v1) => (double[30,24] y) {"
    " p = MatMul(q, k)\n u = Softmax(p)\n y = MatMul(u, v1) }",
}

Feeds = dict[str, npt.NDArray[np.generic]]


def feeds(model: onnx.ModelProto) -> Feeds:
    rng = np.random.default_rng(1)
    result: Feeds = {}
    for value in model.graph.input:
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        drawn = rng.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim])
        result[value.name] = drawn > 0 if kind == np.bool_ else drawn.astype(kind)
    return result


def kernels(text: str) -> list[str]:
    """The names of a graph's kernels."""
    module = fuse(import_model(network(text)), detect())
    return [v.name_hint for v in module.functions if v.name_hint != "main"]


def both(
    model: onnx.ModelProto, given: Feeds, machine: Machine
) -> list[tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]]:
    """The outputs of ONNX Runtime, and those of TVM."""
    with open_model(model.SerializeToString(), threads=1) as runtime:
        expected = runtime.run(given)
    with compiled(model, machine, threads=2) as lowered:
        return list(zip(expected, lowered.run(given), strict=True))


@pytest.mark.parametrize("name", whole(FUSED, [*FUSED][::2]))
def test_one_kernel(name: str) -> None:
    names = kernels(FUSED[name])
    assert sum("attention" in kernel for kernel in names) == 1
    assert not any("softmax" in kernel or "matmul" in kernel for kernel in names)
    model = network(FUSED[name])
    for expected, result in both(model, feeds(model), detect()):
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    assert not any("attention" in kernel for kernel in kernels(LEFT[name]))


def test_transpositions_around_the_heads_disappear() -> None:
    (kernel,) = kernels(FUSED["scaled"])
    assert "attention" in kernel


@pytest.mark.parametrize("name", ["mask", "odd"])
@pytest.mark.parametrize("cores", [1, 2, 7])
def test_other_machines(name: str, cores: int) -> None:
    """The target has 16 registers of 8 floats. Rows of three heads are divided among any number of threads."""
    model = network(FUSED[name])
    ((expected, result),) = both(model, feeds(model), detect(cpu="haswell", cores=cores))
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)


def test_masked_by_infinity() -> None:
    """A masked key gets no weight. The result of a fully masked row is NaN, as in ONNX Runtime."""
    model = network(FUSED["mask"])
    given = feeds(model)
    mask = np.zeros((1, 1, 24, 48), np.float32)
    mask[..., 0, 5:] = -np.inf
    mask[..., 1, :47] = -np.inf
    mask[..., 2, :] = -np.inf
    ((expected, result),) = both(model, {**given, "m": mask}, detect())
    assert np.isnan(expected[0, 2]).all()
    assert not np.isnan(np.delete(result, 2, axis=1)).any()
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)


def test_windows_masked_by_infinity() -> None:
    model = network(FUSED["constant bias, mask of windows"])
    given = feeds(model)
    mask = np.where(np.arange(37) < 20, 0.0, -np.inf).astype(np.float32)
    given["n"] = np.broadcast_to(mask, (1, 6, 1, 37, 37)).copy()
    given["n"][0, 4, 0, 7] = -np.inf  # type: ignore[call-overload]
    ((expected, result),) = both(model, given, detect())
    assert np.isnan(result[4, 7]).all()
    assert np.isfinite(np.delete(result, 4, axis=0)).all()
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    model = network(FUSED["odd"])
    given = feeds(model)
    given["q"][0, 3, 1, 0] = np.nan  # type: ignore[call-overload]
    ((expected, result),) = both(model, given, detect())
    assert np.isnan(result[0, 3, 1]).all()
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("error:a kernel was left unscheduled")
def test_it_is_not_scheduled_again() -> None:
    module = fuse(import_model(network(FUSED["scaled"])), detect())
    (variable,) = (v for v in module.functions if "attention" in v.name_hint)
    written = module[variable].script()
    assert schedule_all(module, detect())[variable].script() == written


def test_layers_that_are_alike_share_a_kernel_that_nobody_tunes() -> None:
    text = (
        "(float[32,32] q, float[32,32] k, float[32,32] v1) => (float[32,32] y) {"
        " p = MatMul(q, k)\n u = Softmax(p)\n o = MatMul(u, v1)\n"
        " r = MatMul(o, k)\n t = Softmax(r)\n y = MatMul(t, v1) }"
    )
    (kernel,) = kernels(text)
    assert "attention" in kernel
    seen = LayerLog()
    fuse(import_model(network(text)), detect(), algorithms=Algorithms(timings=seen))
    assert seen.layers == []


@given(
    rows=st.integers(1, 300),
    keys=st.integers(16, 2000),
    depth=st.integers(1, 128),
    width=st.integers(1, 128),
    number=st.integers(1, 30),
    cores=st.integers(1, 64),
    narrow=st.booleans(),
)
def test_tiles_fit_the_registers_and_cover_the_rows(
    rows: int, keys: int, depth: int, width: int, number: int, cores: int, narrow: bool
) -> None:
    def array(*shape: int) -> Array:
        return Array(shape, tuple(range(len(shape))))

    workload = Attention(
        array(number, rows, depth), array(number, depth, keys), array(number, keys, width),
        array(number, rows, width), (),
    )  # fmt: skip
    machine = Machine("x86_64-unknown-linux-gnu", "znver4", cores, *((8, 16) if narrow else (16, 32)))
    blocking = best_blocking(workload, machine)
    for columns, lanes in (
        (blocking.columns, blocking.lanes),
        (blocking.value_columns, blocking.value_lanes),
    ):
        vectors = columns // lanes
        assert vectors * lanes == columns
        assert blocking.rows * vectors + vectors + 1 <= machine.registers
    tiles = -(-rows // blocking.rows)
    assert 1 <= blocking.parts <= tiles

    def longest(parts: int) -> int:
        """The work of the busiest thread, in tiles. Packing the keys takes as long as two tiles."""
        return -(-number * parts // cores) * (2 + -(-tiles // parts))

    assert longest(blocking.parts) <= min(longest(1), longest(min(cores, tiles)))


def test_rows_a_page_apart_do_not_push_each_other_out() -> None:
    """32 heads of 32 floats take 4 KB, so more than 8 rows of q would share a set of the first-level cache."""

    def workload(number: int) -> Attention:
        rows, keys = (1, 64, number, 32), (1, 32, number, 32)
        q, k, v = Array(rows, (0, 2, 1, 3)), Array(keys, (0, 2, 3, 1)), Array(keys, (0, 2, 1, 3))
        return Attention(q, k, v, q, ())

    machine = Machine("x86_64-unknown-linux-gnu", "znver4", 2, 16, 32)
    assert workload(32).q.row_stride == 4096
    assert best_blocking(workload(32), machine).rows <= 8 < best_blocking(workload(31), machine).rows


def test_few_heads_are_divided_among_threads() -> None:
    array = Array((1, 512, 64), (0, 1, 2))
    keys = Array((1, 64, 512), (0, 1, 2))

    def parts(cores: int) -> int:
        return best_blocking(
            Attention(array, keys, array, array, ()), Machine("x86_64", "znver4", cores, 16, 32)
        ).parts

    assert [parts(1), parts(2), parts(4)] == [1, 2, 4]


def test_packing_keys_again_is_weighed_against_idle_threads() -> None:
    def parts(number: int, rows: int, cores: int) -> int:
        array, keys = Array((number, rows, 64), (0, 1, 2)), Array((number, 64, 128), (0, 1, 2))
        values = Array((number, 128, 64), (0, 1, 2))
        blocking = best_blocking(
            Attention(array, keys, values, array, ()), Machine("x86_64", "znver4", cores, 16, 32)
        )
        assert 3 * blocking.rows < rows <= 4 * blocking.rows or rows > 100
        return blocking.parts

    assert parts(3, 128, 2) == 2  # three heads for two threads
    assert (
        parts(12, 20, 16) == 1
    )  # 4 threads would rest, but packing takes as long as half of what there is to do


def test_rows_behind_the_last_are_not_stored() -> None:
    """The rows after the last one belong to another head, or lie outside of the result."""

    def guarded_if_needed(rows: int) -> bool:
        array, keys = Array((2, rows, 64), (0, 1, 2)), Array((2, 64, 32), (0, 1, 2))
        workload = Attention(array, keys, Array((2, 32, 64), (0, 1, 2)), array, ())
        tile = best_blocking(workload, detect()).rows
        return (rows % tile == 0) == (f"< {rows}" not in kernel(workload, detect()).script())

    assert all(guarded_if_needed(rows) for rows in (7, 37, 41, 48, 64))

"""When two modules compute the same: rounding that decides is no difference, and a small error is one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from tests.passes.snippets import SNIPPETS
from xrlflow.passes import CompilerError
from xrlflow.passes.equality import compared, in_reals, in_types, movement
from xrlflow.passes.inputs import Draw, Floats, arrays, given, nudged
from xrlflow.passes.wide import widened
from xrlflow.passes.xla import XlaCompiler, XlaOptions

pytestmark = pytest.mark.process

ADD = "add { p = f32[] parameter(0)\n q = f32[] parameter(1)\n ROOT s = f32[] add(p, q) }\n"


@pytest.fixture(scope="module")
def xla() -> Iterator[XlaCompiler]:
    with XlaCompiler(XlaOptions(workers=1)) as compiler:
        yield compiler


def update(order: str = "x", centre: str = "1.0", rate: str = "0.001") -> str:
    """A step of Adam from scratch whose gradient is 0 but for rounding: the sum of differences from the mean. `order`:
    "x", or "back": summed backwards. `centre`: times the mean; but for 1, the gradient is none of rounding alone."""
    return f"""HloModule m
{ADD}ENTRY e {{ x = f32[1024] parameter(0)
 w = f32[] parameter(1)
 back = f32[1024] reverse(x), dimensions={{0}}
 z = f32[] constant(0)
 s = f32[] reduce({order}, z), dimensions={{0}}, to_apply=add
 n = f32[] constant({float(centre) / 1024!r})
 mean = f32[] multiply(s, n)
 b = f32[1024] broadcast(mean), dimensions={{}}
 d = f32[1024] subtract(x, b)
 g = f32[] reduce(d, z), dimensions={{0}}, to_apply=add
 v = f32[] multiply(g, g)
 r = f32[] sqrt(v)
 e = f32[] constant(1e-8)
 o = f32[] add(r, e)
 u = f32[] divide(g, o)
 l = f32[] constant({rate})
 c = f32[] multiply(l, u)
 a = f32[] subtract(w, c)
 ROOT t = (f32[], f32[]) tuple(c, a) }}
"""


def test_rounding_that_decides_is_no_difference(xla: XlaCompiler) -> None:
    one, other = xla.load(update()), xla.load(update("back"))
    comparison = xla.compare(one, other)
    assert comparison.equal
    assert comparison.note is not None
    assert comparison.note.startswith("hangs on rounding: output 0 (float32[]): ")


def test_a_real_difference_is_none_of_rounding(xla: XlaCompiler) -> None:
    """The gradient is no longer 0: in float32 the two updates look like two of the correct module."""
    comparison = xla.compare(xla.load(update()), xla.load(update("back", centre="1.01")))
    assert not comparison.equal
    assert comparison.difference is not None
    assert comparison.difference.startswith("output 0 (float32[]): ")
    assert comparison.difference.endswith(" (in float64)")


def test_a_small_error_beside_a_large_number_is_seen(xla: XlaCompiler) -> None:
    """A weight after a step that is 10% too long differs by less than the tolerance of float32."""

    def step(rate: str) -> str:
        return (
            "HloModule m\nENTRY e { w = f32[64] parameter(0)\n g = f32[64] parameter(1)\n"
            f" l = f32[] constant({rate})\n b = f32[64] broadcast(l), dimensions={{}}\n"
            " u = f32[64] multiply(b, g)\n ROOT r = f32[64] subtract(w, u) }"
        )

    comparison = xla.compare(xla.load(step("0.0001")), xla.load(step("0.00011")))
    assert not comparison.equal
    assert xla.compare(xla.load(step("0.0001")), xla.load(step("0.00010000001"))).equal


def test_what_hangs_on_rounding_and_has_no_float64_is_not_equal(xla: XlaCompiler) -> None:
    """A float of 8 bits keeps a module out of float64. Then nobody knows whether such updates are right."""

    def with_float8(text: str) -> str:
        return text.replace(
            " ROOT t = (f32[], f32[]) tuple(c, a)", " k = f8e5m2[] convert(w)\n kk = f32[] convert(k)\n"
            " ROOT t = (f32[], f32[]) tuple(c, kk)"
        )  # fmt: skip

    one, other = (xla.load(with_float8(update(order))) for order in ("x", "back"))
    assert xla.compare(one, one).equal
    comparison = xla.compare(one, other)
    assert not comparison.equal
    assert comparison.difference is not None
    assert "(in its own types alone: element type " in comparison.difference


# Their floats are of 8 bits, or their instructions mean something else in float64.
NARROW = {"stochastic_convert_decomposer", "qr_expander", "eigh_expander"}


@pytest.mark.parametrize("name", SNIPPETS)
def test_modules_have_a_counterpart_in_float64(xla: XlaCompiler, name: str) -> None:
    module = xla.load(SNIPPETS[name])
    if name in NARROW:
        with pytest.raises(CompilerError, match="something else in float64"):
            widened(module.data)
        return
    wide = xla.load(widened(module.data))
    kinds = {op for op, _ in module.summary.opcodes}
    assert kinds - {"convert"} <= {op for op, _ in wide.summary.opcodes}
    assert "f32[" not in xla.write(wide) or "bitcast-convert" in kinds
    assert "bf16[" not in xla.write(wide)


def test_bits_are_those_of_the_narrow_type(xla: XlaCompiler) -> None:
    """jax makes uniform numbers of random bits: by a conversion of bits to float32."""
    text = """HloModule m
ENTRY e { x = u32[64] parameter(0)
 nine = u32[] constant(9)
 b = u32[64] broadcast(nine), dimensions={}
 s = u32[64] shift-right-logical(x, b)
 one = u32[] constant(1065353216)
 c = u32[64] broadcast(one), dimensions={}
 o = u32[64] or(s, c)
 f = f32[64] bitcast-convert(o)
 e = f32[64] exponential(f)
 ROOT r = u32[64] bitcast-convert(f) }
"""
    module = xla.load(text.replace("ROOT r = u32[64] bitcast-convert(f)", "ROOT r = f32[64] exponential(f)"))
    back = xla.load(text)
    for each in (module, back):
        wide = xla.load(widened(each.data))
        assert dict(wide.summary.opcodes)["bitcast-convert"] == dict(each.summary.opcodes)["bitcast-convert"]
        assert xla.compare(each, each).equal
    other = xla.load(text.replace("1065353216", "1065353217"))
    assert not xla.compare(back, other).equal


def test_constants_that_are_rounded_are_no_difference(xla: XlaCompiler) -> None:
    """A pass may fold a constant in float32, and most of what it scales may cancel."""

    def module(factor: str) -> str:
        return (
            "HloModule m\nENTRY e { x = f32[8] parameter(0)\n y = f32[8] parameter(1)\n"
            f"{factor}"
            " b = f32[8] broadcast(t), dimensions={}\n u = f32[8] multiply(x, b)\n"
            " w = f32[8] subtract(u, x)\n big = f32[] constant(10000)\n bb = f32[8] broadcast(big), dimensions={}\n"
            " ROOT r = f32[8] multiply(w, bb) }"
        )

    # One unit of float32 in the last place moves the result, in which most of x cancels, by 1e-3.
    one = xla.load(module(" t = f32[] constant(1.0001)\n"))
    other = xla.load(module(" t = f32[] constant(1.00010002)\n"))
    assert xla.compare(one, other).equal
    wrong = xla.load(module(" t = f32[] constant(1.0003)\n"))
    assert not xla.compare(one, wrong).equal


def one(value: object, dtype: str = "float32") -> list[list[np.ndarray]]:
    return [[np.asarray(value, dtype)]]


def test_outputs_that_are_never_numbers_are_named() -> None:
    nan = float("nan")
    both = [[np.array([1.0, 2.0], np.float32), np.array([nan], np.float32)]]
    result = compared(both, both)
    assert result.equal
    assert result.blind == ("output 1 (float32[1])",)
    assert result.compared == pytest.approx(2 / 3)
    with pytest.raises(CompilerError, match="nothing can be compared"):
        compared([[np.array([nan])]], [[np.array([nan])]])


def test_a_mask_hides_nothing() -> None:
    """The least number of float32 stands for infinity: it does not make its tensor large."""
    least = float(np.finfo(np.float32).min)
    for kind in ("float32", "float64"):
        expected, wrong = one([least, 1.0, 2.0], kind), one([least, 1.0, 2.1], kind)
        assert not compared(expected, wrong).equal
        still = [expected]
        assert not in_reals(expected, wrong, still.copy).equal
        assert not in_types(expected, wrong, None, still.copy).equal
        assert not compared(expected, one([0.0, 1.0, 2.0], kind)).equal


def test_a_large_number_hides_little_in_float64() -> None:
    expected, wrong = one([1e4, 1.0], "float64"), one([1e4, 1.01], "float64")
    assert compared(one([1e4, 1.0]), one([1e4, 1.01])).equal
    assert not in_reals(expected, wrong, lambda: [expected]).equal


def test_narrow_floats_that_are_no_numbers_are_the_same() -> None:
    numbers = np.array([1.0, np.nan], ml_dtypes.float8_e5m2)
    assert compared([[numbers]], [[numbers]]).equal
    assert movement([[numbers]], [[[numbers]]])[0][0].max() == 0.0
    assert not compared([[numbers]], [[numbers[::-1]]]).equal


def test_infinity_is_compared() -> None:
    inf = float("inf")
    assert compared(one([inf, 1.0]), one([inf, 1.0])).equal
    assert not compared(one([inf, 1.0]), one([-inf, 1.0])).equal
    assert not compared(one([1.0, 1.0]), one([inf, 1.0])).equal


def test_movement_allows_what_the_original_does_itself() -> None:
    still, far = one([1.0, 5.0], "float64"), one([1.0 + 1e-5, 5.0], "float64")
    # The first number of the original moves by 1e-6: 10 times as much is allowed there, and not at the second.
    moved = [one([1.0 + 1e-6, 5.0], "float64")]
    assert in_reals(still, far, lambda: moved).equal
    assert not in_reals(still, one([1.0, 5.0 + 5e-5], "float64"), lambda: moved).equal
    assert not in_reals(still, one([1.0 + 1e-3, 5.0], "float64"), lambda: moved).equal


def test_movement_is_bounded() -> None:
    """An output that moves by all of its size is not equal to everything."""
    still, other = one([1.0, 5.0], "float64"), one([-1.0, -5.0], "float64")
    result = in_reals(still, other, lambda: [one([-1.0, -5.0], "float64")])
    assert not result.equal
    assert result.difference is not None
    assert result.difference.startswith("output 0 (float64[2]) hangs on rounding")
    # Two of three numbers are compared.
    still, moved = one([1.0, 5.0, 2.0], "float64"), [one([-1.0, 5.0, 2.0], "float64")]
    assert in_reals(still, one([-1.0, 5.0, 2.0], "float64"), lambda: moved).equal
    assert not in_reals(still, one([-1.0, -5.0, 2.0], "float64"), lambda: moved).equal


def test_integers_that_hang_on_rounding() -> None:
    still, other = one([3, 4, 4], "int32"), one([3, 5, 4], "int32")
    assert not in_reals(still, other, lambda: [still]).equal
    assert in_reals(still, other, lambda: [other]).equal
    assert not in_types(still, other, None, lambda: [still]).equal
    # Without float64 nobody decides.
    assert not in_types(still, other, None, lambda: [other]).equal
    assert in_types(still, other, still, lambda: [other]).equal


def test_own_types_must_be_as_near_as_the_original() -> None:
    exact = one([0.0, 1.0], "float64")
    # The original is off by 1e-3 in float32; so may be another module, to a factor of 8.
    expected = one([1e-3, 1.0])
    assert in_types(expected, one([-1e-3, 1.0]), exact, list).equal
    assert not in_types(expected, one([-1e-1, 1.0]), exact, list).equal
    assert not in_types(expected, one([np.inf, 1.0]), exact, list).equal


def drawn(text: str, xla: XlaCompiler, seeds: int = 20) -> list[list[np.ndarray]]:
    data = xla.load(text).data
    return [arrays(data, Draw(seed, form)) for seed in range(seeds) for form in Floats]


def test_indices_are_in_range_through_functions_and_loops(xla: XlaCompiler) -> None:
    """Token ids go through a call and a loop to a gather; other integers do not limit them."""
    text = f"""HloModule m
{ADD}look {{ t = f32[50,4] parameter(0)
 i = s32[3] parameter(1)
 z = s32[] constant(0)
 zz = s32[3] broadcast(z), dimensions={{}}
 l = pred[3] compare(i, zz), direction=LT
 n = s32[] constant(50)
 nn = s32[3] broadcast(n), dimensions={{}}
 j = s32[3] add(i, nn)
 k = s32[3] select(l, j, i)
 ROOT g = f32[3,4] gather(t, k), offset_dims={{1}}, collapsed_slice_dims={{0}}, start_index_map={{0}},
  index_vector_dim=1, slice_sizes={{1,4}} }}
c {{ s = (s32[], s32[3], f32[50,4], f32[3,4]) parameter(0)
 i = s32[] get-tuple-element(s), index=0
 n = s32[] constant(3)
 ROOT r = pred[] compare(i, n), direction=LT }}
b {{ s = (s32[], s32[3], f32[50,4], f32[3,4]) parameter(0)
 i = s32[] get-tuple-element(s), index=0
 o = s32[] constant(1)
 j = s32[] add(i, o)
 k = s32[3] get-tuple-element(s), index=1
 t = f32[50,4] get-tuple-element(s), index=2
 a = f32[3,4] get-tuple-element(s), index=3
 g = f32[3,4] call(t, k), to_apply=look
 h = f32[3,4] add(a, g)
 ROOT r = (s32[], s32[3], f32[50,4], f32[3,4]) tuple(j, k, t, h) }}
ENTRY e {{ t = f32[50,4] parameter(0)
 k = s32[3] parameter(1)
 free = s32[3] parameter(2)
 z = s32[] constant(0)
 a = f32[3,4] parameter(3)
 s = (s32[], s32[3], f32[50,4], f32[3,4]) tuple(z, k, t, a)
 w = (s32[], s32[3], f32[50,4], f32[3,4]) while(s), condition=c, body=b
 g = f32[3,4] get-tuple-element(w), index=3
 ROOT r = (f32[3,4], s32[3]) tuple(g, free) }}
"""
    result = drawn(text, xla)
    tokens = np.concatenate([one[1] for one in result])
    assert (tokens.min(), tokens.max()) == (0, 49)
    free = np.concatenate([one[2] for one in result])
    assert free.min() < 0  # no index: it may be negative
    assert free.max() > 49


def test_classes_are_below_the_length_of_one_hot(xla: XlaCompiler) -> None:
    text = """HloModule m
ENTRY e { l = s32[6] parameter(0)
 b = s32[6,5] broadcast(l), dimensions={0}
 i = s32[6,5] iota(), iota_dimension=1
 c = pred[6,5] compare(b, i), direction=EQ
 ROOT r = f32[6,5] convert(c) }
"""
    labels = np.concatenate([one[0] for one in drawn(text, xla)])
    assert set(labels.tolist()) == {0, 1, 2, 3, 4}


def test_each_of_several_indices_has_its_range(xla: XlaCompiler) -> None:
    text = """HloModule m
ENTRY e { x = f32[2,40,3] parameter(0)
 i = s32[] parameter(1)
 j = s32[] parameter(2)
 z = s32[] constant(0)
 ROOT s = f32[1,2,3] dynamic-slice(x, i, j, z), dynamic_slice_sizes={1,2,3} }
"""
    result = drawn(text, xla, 60)
    assert {int(one[1]) for one in result} == {0, 1}
    assert {int(one[2]) for one in result} == set(range(39))


def test_second_moments_are_positive_and_counts_are_not_zero(xla: XlaCompiler) -> None:
    """As Adam has them: the root of b * v + (1 - b) * g * g, divided by 1 - b ** count."""
    text = """HloModule m
ENTRY e { v = f32[8] parameter(0)
 g = f32[8] parameter(1)
 n = s32[] parameter(2)
 rate = f32[] parameter(3)
 c = f32[] constant(0.999)
 cc = f32[8] broadcast(c), dimensions={}
 a = f32[8] multiply(cc, v)
 d = f32[] constant(0.001)
 dd = f32[8] broadcast(d), dimensions={}
 gg = f32[8] multiply(g, g)
 b = f32[8] multiply(dd, gg)
 s = f32[8] add(b, a)
 m = f32[] convert(n)
 p = f32[] power(c, m)
 o = f32[] constant(1)
 q = f32[] subtract(o, p)
 qq = f32[8] broadcast(q), dimensions={}
 t = f32[8] divide(s, qq)
 r = f32[8] sqrt(t)
 u = f32[8] divide(g, r)
 l = f32[8] broadcast(rate), dimensions={}
 ROOT w = f32[8] multiply(l, u) }
"""
    for v, g, count, rate in drawn(text, xla):
        assert (v >= 0.0).all()
        assert count > 0
        assert rate > 0.0
        assert g.dtype == np.float32
    assert any((g < 0).any() for _, g, _, _ in drawn(text, xla))


def test_given_inputs_are_compared_too(xla: XlaCompiler) -> None:
    """Random numbers do not see what is different at 1000."""
    head = (
        "HloModule m\nENTRY e { x = f32[4] parameter(0)\n c = f32[] constant(900)\n"
        " b = f32[4] broadcast(c), dimensions={}\n"
    )
    one = xla.load(head + " ROOT r = f32[4] minimum(x, b) }")
    other = xla.load(head.replace("900", "800") + " ROOT r = f32[4] minimum(x, b) }")
    assert xla.compare(one, other).equal
    assert not xla.compare(one, other, inputs=[[np.full(4, 1000, np.float32)]]).equal
    with pytest.raises(CompilerError, match="2 inputs are given, and the module has 1 parameters"):
        xla.compare(one, other, inputs=[[np.zeros(4), np.zeros(4)]])
    with pytest.raises(CompilerError, match=r"input 0 is float64\[4\], and the parameter float32\[4\]"):
        xla.compare(one, other, inputs=[[np.zeros(4)]])


def test_complex_inputs_of_any_form_move_by_one_unit() -> None:
    rows = np.ones((2, 3), np.complex64)
    for still in (np.array(1 + 2j, np.complex64), rows, rows.T, rows[:, ::2], np.zeros((0, 3), np.complex64)):
        moved = nudged(still, np.random.default_rng(0))
        assert (moved.shape, moved.dtype) == (still.shape, still.dtype)
        assert (moved != still).all()
        np.testing.assert_allclose(moved, still, rtol=3e-7)


def test_outputs_that_do_not_fit_into_memory_are_refused(
    xla: XlaCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept of other comparisons goes first."""
    module = xla.load("HloModule m\nENTRY e { x = f32[1000] parameter(0)\n ROOT r = f32[1000] negate(x) }")
    # Six draws of 1000 numbers in and out, in float64, at three places.
    needed = 6 * 2 * 8000 * 3
    free = [needed - 1, needed]
    monkeypatch.setattr("xrlflow.passes.xla.available_memory", lambda: free[min(len(calls), 1)])
    calls: list[int] = []
    monkeypatch.setattr(xla, "_references", _Clearing(calls))
    assert xla.compare(module, module).equal
    assert calls == [1]
    free[1] = 1000
    with pytest.raises(CompilerError, match=r"takes 0.0 GB of memory, and 0.0 GB are free"):
        xla.compare(module, module, seed=1)


class _Clearing(OrderedDict[object, object]):
    """It tells when it is cleared."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.calls = calls

    def clear(self) -> None:
        super().clear()
        self.calls.append(1)


def test_inputs_move_by_one_unit(xla: XlaCompiler) -> None:
    data = xla.load("HloModule m\nENTRY e { x = f32[64] parameter(0)\n ROOT r = f32[64] negate(x) }").data
    (still,), (moved,), (other,) = (arrays(data, Draw(3, nudge=nudge)) for nudge in (0, 1, 2))
    steps = np.abs(moved.view(np.int32) - still.view(np.int32))
    assert steps.max() <= 2
    assert steps.min() >= 1
    assert not np.array_equal(moved, other)
    assert np.array_equal(arrays(data, given([still]))[0], still)

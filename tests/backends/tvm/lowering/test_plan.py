"""The plan of a region: the order of its kernels, and the memory of its tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.tvm.library.carried import carried, numbers, parsed
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.lowering.plan import (
    ALIGNMENT,
    COPY,
    ExecutionPlan,
    Life,
    Location,
    arranged,
    np_dtype,
)

pytestmark = pytest.mark.measures


def plan(text: str) -> ExecutionPlan:
    return carried("Region_0", parsed(text), detect(None, 2, None)).compiled.plan


def test_a_chain_shares_memory() -> None:
    """The kernels cannot be fused, and only the next kernel needs each value."""
    steps = " ".join(f"a{i + 1} = Softmax<axis = {i % 2}>(a{i})" for i in range(6))
    result = plan(f"(float[32,32] x) => (float[32,32] y) {{ a0 = Softmax(x) {steps} y = Softmax(a6) }}")
    assert len(result.calls) >= 4
    assert result.arena <= 2 * 32 * 32 * 4
    assert [result.tensors[n].location for n in (*result.inputs, *result.outputs)] == [
        Location.INPUT,
        Location.OUTPUT,
    ]


def test_an_output_is_computed_in_the_memory_of_the_caller() -> None:
    result = plan("(float[4] x) => (float[4] y) { y = Relu(x) }")
    (call,) = result.calls
    assert call.kernel != COPY
    assert result.arena == 0
    assert result.crossing() == result.kernels() == {call.kernel}


@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("(float[4] x) => (float[4] y) { y = Identity(x) }", 1),
        ("(float[4] x) => (float[4] y, float[4] z) { y = Relu(x) z = Identity(y) }", 1),
        ("(float[4] x) => (float[2,2] y) <int64[2] s = {2, 2}> { a = Relu(x) y = Reshape(a, s) }", 0),
        ("(float[4] x) => (float[4] y) { y = Constant<value = float[4] {1, 2, 3, 4}>() }", 1),
    ],
)
def test_what_no_kernel_computes_for_an_output_alone_is_copied(text: str, copies: int) -> None:
    result = plan(text)
    assert sum(call.kernel == COPY for call in result.calls) == copies
    assert all(result.tensors[n].location is Location.OUTPUT for n in result.outputs)


def test_kernels_between_others_do_not_cross_the_border() -> None:
    """These kernels may assume that their tensors are aligned."""
    result = plan(
        "(float[32,32] x) => (float[32,32] y) { a = Softmax(x) b = Softmax<axis = 0>(a) y = LogSoftmax(b) }"
    )
    assert len(result.kernels()) == 3
    assert len(result.crossing()) == 2


def test_equal_constants_are_kept_once() -> None:
    weights = f"float[8,8] v = {{{numbers(8, 8)}}}, float[8,8] w = {{{numbers(8, 8)}}}"
    result = plan(
        f"(float[4,8] x) => (float[4,8] y) <{weights}> {{ a = MatMul(x, v) b = Softmax(a) y = MatMul(b, w) }}"
    )
    assert sum(array.size == 64 for array in result.constants) == 1


def test_checks_are_computed_with_the_outputs() -> None:
    result = plan("(float[6,3] x, int64[4] index) => (float[4,3] y) { y = Gather<axis = 0>(x, index) }")
    (check,) = result.checks
    assert (check.low, check.high) == (-6, 5)
    assert result.checked is not None
    ends = result.tensors[result.checked]
    assert (ends.location, ends.shape, ends.dtype, ends.bytes) == (Location.ARENA, (1, 2), "int64", 16)
    assert len(result.outputs) == 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("(float[4] x) => (int64[1,N] y) { y = NonZero(x) }", "nonzero"),
        ("(float[4] x) => (float[N] y) { y = Unique(x) }", "unique"),
    ],
)
def test_functions_of_the_runtime_are_refused_by_name(text: str, name: str) -> None:
    with pytest.raises(BackendError, match=f"^{name} needs TVM's runtime"):
        carried("Region_0", parsed(text), detect(None, 2, None))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4", "complex64", "handle", ""])
def test_types_without_a_code_are_refused(name: str) -> None:
    import ml_dtypes  # noqa: F401  (it adds names to NumPy)

    with pytest.raises(BackendError, match=f"tensors of {name} cannot be in a library of kernels"):
        np_dtype(name)


def test_types_of_kernels() -> None:
    for name in ("bool", "uint8", "int32", "int64", "float16", "float32", "float64"):
        assert np_dtype(name) == np.dtype(name)


def test_more_dimensions_than_the_runtime_compares_are_refused() -> None:
    many = ",".join(["1"] * 65)
    with pytest.raises(BackendError, match="65 dimensions"):
        plan(f"(float[{many}] x) => (float[{many}] y) {{ y = Relu(x) }}")


# --- Memory

_lives = st.dictionaries(
    st.integers(0, 40),
    st.builds(
        lambda size, first, length: Life(size, first, first + length),
        st.integers(0, 5000), st.integers(0, 12), st.integers(0, 6),
    ),
)  # fmt: skip


@given(_lives)
def test_tensors_in_use_at_one_time_do_not_overlap(lives: dict[int, Life]) -> None:
    offsets, total = arranged(lives)
    assert offsets.keys() == lives.keys()
    assert all(offset % ALIGNMENT == 0 for offset in offsets.values())
    spans = {n: (offsets[n], offsets[n] + life.bytes) for n, life in lives.items()}
    assert all(end <= total for _, end in spans.values())
    for a, x in lives.items():
        for b, y in lives.items():
            if a < b and x.first <= y.last and y.first <= x.last:
                assert spans[a][1] <= spans[b][0] or spans[b][1] <= spans[a][0]


@given(_lives)
def test_memory_is_at_most_that_of_all_tensors(lives: dict[int, Life]) -> None:
    _, total = arranged(lives)
    rounded = [-(-max(life.bytes, 1) // ALIGNMENT) * ALIGNMENT for life in lives.values()]
    assert max(rounded, default=0) <= total <= sum(rounded)

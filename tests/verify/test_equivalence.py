"""Wrong pairs are told apart, right ones are not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from tests.verify.models import MLP, changed, mlp, model, normal
from xrlflow.ir import Attrs
from xrlflow.ops.eval_spec import OpSpec, single
from xrlflow.ops.evaluate import SPECS
from xrlflow.ops.field import Field
from xrlflow.verify import (
    HEADERS,
    BadInputs,
    InputsNeeded,
    OriginalFails,
    Reference,
    Status,
    Verification,
    VerificationError,
    verify,
)
from xrlflow.verify.compare import Criterion, by_deviation, grid, judge_floats


def identity(text: str = "y = Identity(x)", **types: str) -> onnx.ModelProto:
    kinds = {"x": "float[n, 4]", "y": "float[n, 4]"} | types
    return model(f"g ({kinds['x']} x) => ({kinds['y']} y) {{ {text} }}")


def swapped(a: str, b: str) -> onnx.ModelProto:
    return model(
        f"g (float[n, 4] x) => (float[n, 4] first, float[n, 4] second) {{ {a} = Relu(x)\n {b} = Neg(x) }}"
    )


W, B = normal(6, 6), normal(6)
CONV = normal(8, 4, 3, 3)


def conv(weight: np.ndarray, bias: np.ndarray) -> onnx.ModelProto:
    return model(
        "g (float[n, 4, 9, 9] x) => (float[n, 8, 9, 9] y) { y = Conv<pads=[1,1,1,1]>(x, w, b) }",
        w=weight,
        b=bias,
    )


def wrong_dtype() -> onnx.ModelProto:
    return identity("y = Cast<to=11>(x)", y="double[n, 4]")


def gather(text: str) -> onnx.ModelProto:
    return model(
        f"g (int64[n, s] ids) => (float[n, s, 4] y) {{ {text} }}", table=normal(50, 4), one=np.int64([1])
    )


# Each: the original, what became of it, and what the message has to name.
BROKEN: dict[str, tuple[onnx.ModelProto, onnx.ModelProto, str]] = {
    "a weight": (mlp(), mlp(w2=changed(normal(32, 8), (3, 5), 1e-2)), "output 'y'"),
    "a weight of a convolution": (
        conv(CONV, normal(8)),
        conv(changed(CONV, (2, 1, 0, 2), 1e-2), normal(8)),
        "output 'y'",
    ),
    "a dropped bias": (mlp(), mlp(b2=np.zeros(8, np.float32)), "worst element"),
    "a small dropped bias of one channel among large ones": (
        conv(CONV * np.float32([1e2] * 7 + [1e-3])[:, None, None, None], np.float32([0] * 7 + [1e-3])),
        conv(CONV * np.float32([1e2] * 7 + [1e-3])[:, None, None, None], np.zeros(8, np.float32)),
        ",7,",
    ),
    "a transposed output": (
        model("g (float[6, 6] x) => (float[6, 6] y) { y = MatMul(x, w) }", w=W),
        model(
            "g (float[6, 6] x) => (float[6, 6] y) { m = MatMul(x, w)\n y = Transpose<perm=[1,0]>(m) }", w=W
        ),
        "output 'y'",
    ),
    "a declared rank": (
        model("g (float[1, 4] x) => (float[1, 4] y) { y = Relu(x) }"),
        model(
            "g (float[1, 4] x) => (float[4] y) { r = Relu(x)\n y = Reshape(r, s) }",
            s=np.int64([4]),
        ),
        "declared float[4], was float[1,4]",
    ),
    "an actual rank behind an undeclared shape": (
        model("g (float[1, 4] x) => (float[] y) { y = Relu(x) }"),
        model("g (float[1, 4] x) => (float[] y) { r = Relu(x)\n y = Reshape(r, s) }", s=np.int64([4])),
        "its shape is [4], was [1, 4]",
    ),
    "swapped outputs": (swapped("first", "second"), swapped("second", "first"), "output 'first'"),
    "renamed outputs": (
        identity(),
        model("g (float[n, 4] x) => (float[n, 4] z) { z = Identity(x) }"),
        "output 'y' is missing",
    ),
    "reordered inputs": (
        model("g (float[n] a, float[n] b) => (float[n] y) { y = Add(a, b) }"),
        model("g (float[n] b, float[n] a) => (float[n] y) { y = Add(a, b) }"),
        "another order",
    ),
    "a dropped unused input": (
        model("g (float[n] a, float[n] b) => (float[n] y) { y = Relu(a) }"),
        model("g (float[n] a) => (float[n] y) { y = Relu(a) }"),
        "input 'b' is missing",
    ),
    "a fixed dimension": (
        identity(),
        model("g (float[2, 4] x) => (float[2, 4] y) { y = Identity(x) }"),
        "was float[n,4]",
    ),
    "an output's type": (identity(), wrong_dtype(), "declared double"),
    "wrong for batches over one": (
        identity(),
        model(
            "g (float[n, 4] x) => (float[n, 4] y) { f = Slice(x, zero, one, zero)\n s = Shape(x)\n y = Expand(f, s) }",
            zero=np.int64([0]),
            one=np.int64([1]),
        ),
        "n=",
    ),
    "wrong for a batch of one": (
        model("g (float[n, s] x) => (float[n, s] y) { y = Identity(x) }"),
        model(
            """g (float[n, s] x) => (float[n, s] y) {
              sh = Shape<start=0, end=1>(x)
              f = Cast<to=1>(sh)
              i = Div(one, f)
              k = Floor(i)
              y = Add(x, k) }""",
            one=np.float32([1]),
        ),
        "n=1",
    ),
    "a wrong index": (
        gather("y = Gather(table, ids)"),
        gather("m = Sub(ids, one)\n y = Gather(table, m)"),
        "output 'y'",
    ),
    "a shape that fails": (
        identity(),
        model("g (float[n, 4] x) => (float[n, 4] y) { y = Reshape(x, s) }", s=np.int64([2, 4])),
        "the new model fails on",
    ),
    "NaN for a number": (identity(), identity("z = Sub(x, x)\n q = Div(z, z)\n y = Add(x, q)"), "NaN"),
    "NaN in one place": (
        model("g (float[n, 4] x) => (float[n, 4] y) { a = Abs(x)\n y = Sqrt(a) }"),
        model("g (float[n, 4] x) => (float[n, 4] y) { y = Sqrt(x) }"),
        "NaN",
    ),
    "the sign of infinity": (
        identity("z = Sub(x, x)\n a = Abs(x)\n y = Div(a, z)"),
        identity("z = Sub(x, x)\n a = Abs(x)\n m = Neg(a)\n y = Div(m, z)"),
        "infinite",
    ),
    "a boolean": (
        model("g (float[n] x) => (bool[n] y) { z = Sub(x, x)\n y = Greater(x, z) }"),
        model("g (float[n] x) => (bool[n] y) { z = Sub(x, x)\n y = Less(x, z) }"),
        "differ",
    ),
    "an integer": (
        model("g (int64[n] x) => (int64[n] y) { y = Identity(x) }"),
        model("g (int64[n] x) => (int64[n] y) { y = Add(x, one) }", one=np.int64([1])),
        "differ",
    ),
    "an index of a clear maximum": (
        model("g (float[n, 9] x) => (int64[n] y) { y = ArgMax<axis=1, keepdims=0>(x) }"),
        model("g (float[n, 9] x) => (int64[n] y) { y = ArgMin<axis=1, keepdims=0>(x) }"),
        "differ",
    ),
    "a string": (
        model("g (string[n] x) => (string[n] y) { y = Identity(x) }"),
        model("g (string[n] x) => (string[n] y) { y = StringConcat(x, x) }"),
        "differ",
    ),
    "a half": (
        model("g (float16[n, 8] x) => (float16[n, 8] y) { y = Relu(x) }"),
        model(
            "g (float16[n, 8] x) => (float16[n, 8] y) { r = Relu(x)\n y = Mul(r, k) }", k=np.float16([1.01])
        ),
        "exceeds",
    ),
    "an item of a sequence": (
        model("g (float[n, 4] x) => (seq(float) y) { r = Relu(x)\n y = SequenceConstruct(x, r) }"),
        model("g (float[n, 4] x) => (seq(float) y) { r = Abs(x)\n y = SequenceConstruct(x, r) }"),
        "y[1]",
    ),
    "the length of a sequence": (
        model("g (float[n, 4] x) => (seq(float) y) { y = SequenceConstruct(x, x) }"),
        model("g (float[n, 4] x) => (seq(float) y) { y = SequenceConstruct(x) }"),
        "y.length",
    ),
    "a file that does not load": (
        identity(),
        identity("y = com.example.Unknown(x)"),
        "cannot be loaded",
    ),
    "an overridable default": (
        model("g (float[n] x, float[1] k = {2.0}) => (float[n] y) { y = Mul(x, k) }"),
        model("g (float[n] x, float[1] k = {2.0}) => (float[n] y) { y = Add(x, x) }"),
        "sample 1",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_pairs_are_told_apart(name: str) -> None:
    a, b, named = BROKEN[name]
    verification = verify(a, b)
    assert verification.status is Status.FAILED
    assert not verification.verified
    assert verification.failures
    assert named in verification.message()
    assert verification.to_json()["verified"] is False
    assert verify(a, a).verified, "the original equals itself"


def folded_batch_norm() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    scale, bias, mean = normal(8, seed=1), normal(8, seed=2), normal(8, seed=3)
    var = np.abs(normal(8, seed=4)) + np.float32(0.1)
    a = model(
        """g (float[n, 4, 9, 9] x) => (float[n, 8, 9, 9] y) {
          c = Conv<pads=[1,1,1,1]>(x, w, b)
          y = BatchNormalization(c, s, t, m, v) }""",
        w=CONV,
        b=normal(8),
        s=scale,
        t=bias,
        m=mean,
        v=var,
    )
    k = scale / np.sqrt(var + np.float32(1e-5))
    return a, conv(CONV * k[:, None, None, None], (normal(8) - mean) * k + bias)


def reassociated() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    # A row holds numbers of very different sizes, so that the order of the sum shows.
    rows = 10.0 ** np.random.default_rng(5).uniform(-3, 3, (1, 400))
    head = "g (float[n, 400] x) => (float[n] y) {"
    return (
        model(
            f"{head} p = Mul(x, k)\n y = ReduceSum<keepdims=0>(p, one) }}",
            k=rows.astype(np.float32),
            one=np.int64([1]),
        ),
        model(
            f"{head} m = MatMul(x, k)\n y = Squeeze(m, one) }}",
            k=rows.T.astype(np.float32),
            one=np.int64([1]),
        ),
    )


def cancelling() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    # (x + 30000) - 30000 loses most of x's digits in float32, and another order loses others.
    big, half = np.float32([3e4]), np.float32([1.5e4])
    head = "g (float[n, 40] x) => (float[n, 40] y) {"
    return (
        model(
            f"{head} a = Add(x, c)\n b = Mul(a, a)\n d = Sub(b, e)\n y = Div(d, f) }}",
            c=big,
            e=big * big,
            f=2 * big,
        ),
        model(
            f"{head} a = Add(x, c)\n h = Add(a, c)\n b = Mul(h, h)\n d = Sub(b, e)\n y = Div(d, f) }}",
            c=half,
            e=big * big,
            f=2 * big,
        ),
    )


RIGHT: dict[str, Callable[[], tuple[onnx.ModelProto, onnx.ModelProto]]] = {
    "folded batch normalisation": folded_batch_norm,
    "a reassociated sum": reassociated,
    "cancellation": cancelling,
    "half precision": lambda: (
        model(
            "g (float16[n, 8] x) => (float16[n, 8] y) { a = Add(x, b)\n y = Add(a, c) }",
            b=np.float16([0.1]),
            c=np.float16([0.3]),
        ),
        model("g (float16[n, 8] x) => (float16[n, 8] y) { y = Add(x, b) }", b=np.float16([0.4])),
    ),
    "infinities and NaN": lambda: (
        identity(
            "z = Sub(x, x)\n a = Div(x, z)\n b = Div(z, z)\n c = Concat<axis=0>(a, b)\n y = Concat<axis=0>(c, x)",
            y="float[m, 4]",
        ),
        identity(
            "z = Sub(x, x)\n a = Div(x, z)\n b = Div(z, z)\n y = Concat<axis=0>(a, b, x)", y="float[m, 4]"
        ),
    ),
    "an empty output": lambda: (
        model("g (float[n, 4] x) => (float[m, 4] y) { y = Slice(x, z, z, z) }", z=np.int64([0])),
        model("g (float[n, 4] x) => (float[m, 4] y) { r = Neg(x)\n y = Slice(r, z, z, z) }", z=np.int64([0])),
    ),
    "a sequence": lambda: (
        model("g (float[n, 4] x) => (seq(float) y) { r = Relu(x)\n y = SequenceConstruct(x, r) }"),
        model(
            """g (float[n, 4] x) => (seq(float) y) {
              q = Neg(x)
              m = Neg(q)
              r = Relu(m)
              y = SequenceConstruct(x, r) }"""
        ),
    ),
    "a scalar": lambda: (
        model("g (float x) => (float y) { y = Add(x, x) }"),
        model("g (float x) => (float y) { y = Mul(x, k) }", k=np.float32(2)),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_pairs_pass(name: str) -> None:
    a, b = RIGHT[name]()
    verification = verify(a, b)
    assert verification.verified, verification.message()
    assert verification.message().startswith("verified")
    assert {len(o.row) for o in verification.outputs} == {len(HEADERS)}


def criteria(found: Verification) -> set[Criterion]:
    return {o.judgement.criterion for o in found.outputs}


def test_float64_judges_where_it_exists_and_deviation_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = folded_batch_norm()
    wrong = conv(CONV, normal(8))
    assert criteria(verify(a, b)) == {Criterion.FLOAT64}
    assert criteria(verify(a, b, float64_flops=0)) == {Criterion.DEVIATION}
    assert not verify(a, wrong, float64_flops=0).verified
    two = model("g (float[n, 4] x) => (float[n, 4] p, float[n, 4] q) { p = Exp(x)\n q = Tanh(x) }")
    monkeypatch.delitem(SPECS, "Exp")
    verification = verify(two, two)
    assert [o.judgement.criterion for o in verification.outputs] == [Criterion.DEVIATION, Criterion.FLOAT64]


def test_what_float64_showed_of_some_inputs_counts_for_the_others() -> None:
    a, b = cancelling()
    only_one = verify(a, b, float64_flops=5e3, samples=4)
    assert only_one.verified, only_one.message()
    reference = Reference.of(a, float64_flops=5e3, samples=4)
    result = {k.targets[0, ""].criterion for k in reference.cases}
    assert result == {Criterion.FLOAT64, Criterion.DEVIATION}
    assert not verify(a, b, float64_flops=0).verified, "with no reference at all the rule is the strict one"


def test_cancellation_is_no_licence() -> None:
    """Where the original is bad the tolerance is wide, and still has an end."""
    a, b = cancelling()
    verification = verify(a, b)
    report = verification.worst
    assert report is not None
    assert 1e-4 < report.judgement.tolerance < 1
    worse = model("g (float[n, 40] x) => (float[n, 40] y) { y = Mul(x, k) }", k=np.float32([3]))
    assert not verify(a, worse).verified


def test_float64_evaluation_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the threads of small products wait for each other."""
    seen: list[int] = []

    def relu(field: Field, attrs: Attrs, x: np.ndarray) -> np.ndarray:
        seen.extend(p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas")
        return field.maximum(x, 0)

    monkeypatch.setitem(SPECS, "Relu", OpSpec("Relu", single(relu), "polynomial"))
    a = model("g (float[n, 8] x) => (float[n, 8] y) { y = Relu(x) }")
    with threadpool_limits(2, user_api="blas"):
        before = threadpool_info()
        assert criteria(verify(a, a)) == {Criterion.FLOAT64}
        assert threadpool_info() == before
    assert set(seen) == {1}


def test_a_reference_of_something_else_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If our evaluator computed another function, its distance from the original would admit anything."""
    wrong = OpSpec("Relu", single(lambda field, attrs, x: x * 1.5), "polynomial")
    monkeypatch.setitem(SPECS, "Relu", wrong)
    a = model("g (float[n, 8] x) => (float[n, 8] y) { y = Relu(x) }")
    verification = verify(
        a, model("g (float[n, 8] x) => (float[n, 8] y) { r = Relu(x)\n y = Mul(r, k) }", k=np.float32([1.1]))
    )
    assert not verification.verified
    assert criteria(verification) == {Criterion.DEVIATION}
    assert any("not what the original computes" in note for note in verification.notes)


# --- integers ---

# Too small to change a sum, but the sum is rounded.
TINY = np.float32([1e-12])
TIED = np.float32([[0, 1, 1 + 2e-7, 0.5]])


def argmax(weight: np.ndarray, z: np.ndarray = TINY) -> onnx.ModelProto:
    return model(
        "g (float[n, 4] x) => (int64[n] y) { p = Mul(x, z)\n s = Add(p, w)\n y = ArgMax<axis=1, keepdims=0>(s) }",
        z=z,
        w=weight,
    )


def test_integers_may_differ_at_proven_near_ties_only() -> None:
    other = np.float32([[0, 1 + 2e-7, 1, 0.5]])
    verification = verify(argmax(TIED), argmax(other))
    assert verification.verified
    assert criteria(verification) == {Criterion.TIE}
    some = np.float32([1e-9])  # with x of 1000 there is no tie
    assert criteria(verify(argmax(TIED, some), argmax(other, some))) == {Criterion.TIE}
    apart = np.float32([[0, 1.001, 1, 0.5]])
    assert not verify(argmax(apart), argmax(np.float32([[0, 1, 1.001, 0.5]]))).verified


def test_ranks_and_rounding_at_near_ties() -> None:
    def top(weight: np.ndarray) -> onnx.ModelProto:
        return model(
            """g (float[n, 4] x) => (float[n, 3] v, int64[n, 3] y) {
              p = Mul(x, z)
              s = Add(p, w)
              v, y = TopK<axis=1>(s, k) }""",
            z=TINY,
            w=weight,
            k=np.int64([3]),
        )

    verification = verify(top(TIED), top(np.float32([[0, 1 + 2e-7, 1, 0.5]])))
    assert verification.verified, verification.message()
    assert Criterion.TIE in criteria(verification)
    assert not verify(top(TIED), top(np.float32([[0.5, 1, 1 + 2e-7, 0]]))).verified

    def cast(offset: float, op: str = "t = Identity(s)") -> onnx.ModelProto:
        return model(
            f"g (float[n, 4] x) => (int32[n, 4] y) {{ p = Mul(x, z)\n s = Add(p, w)\n {op}\n y = Cast<to=6>(t) }}",
            z=TINY,
            w=np.float32([offset]),
        )

    assert verify(cast(3 - 2e-7), cast(3)).verified
    assert verify(cast(2.5, "t = Round(s)"), cast(2.5 + 3e-7, "t = Round(s)")).verified
    assert not verify(cast(2.9), cast(3)).verified
    assert not verify(cast(3), cast(5)).verified


@pytest.mark.parametrize("op", ["y = ArgMax<axis=1>(s)", "v, y = TopK<axis=1>(s, k)"])
def test_a_near_tie_is_one_of_its_own_element(op: str) -> None:
    """One row of 1e8 says nothing of the others."""

    def moved(by: float) -> onnx.ModelProto:
        return model(
            f"g (float[16, 10] x) => (int64[16, {2 if 'TopK' in op else 1}] y) {{ "
            f"p = Mul(x, r)\n s = Add(p, w)\n {op} }}",
            r=np.where(np.arange(16)[:, None] == 0, np.float32(1e8), np.float32(1)),
            w=np.where((np.arange(16)[:, None] > 0) & (np.arange(10) == 3), np.float32(by), np.float32(0)),
            k=np.int64([2]),
        )

    assert verify(moved(0), moved(0)).verified
    assert not verify(moved(0), moved(2)).verified


@pytest.mark.parametrize("s", ["s = Relu(x)", "s = Identity(x)", "b = Greater(x, h)\n s = Cast<to=1>(b)"])
def test_of_equal_numbers_the_first_is_chosen(s: str) -> None:
    def last(at: int) -> onnx.ModelProto:
        op = f"y = ArgMax<axis=1, keepdims=0, select_last_index={at}>(s)"
        return model(f"g (float[16, 4] x) => (int64[16] y) {{ {s}\n {op} }}", h=np.float32(0.5))

    assert verify(last(0), last(0)).verified
    assert not verify(last(0), last(1)).verified


# --- what cannot be compared ---


def test_random_models_have_a_status_of_their_own() -> None:
    a = model("g (float[n, 4] x) => (float[n, 4] y) { r = RandomNormalLike(x)\n y = Add(x, r) }")
    verification = verify(a, a)
    assert verification.status is Status.NOT_COMPARABLE
    assert not verification.verified
    assert "RandomNormalLike" in verification.message()
    dead = model("g (float[n, 4] x) => (float[n, 4] y) { r = RandomNormalLike(x)\n y = Relu(x) }")
    assert verify(dead, dead).verified
    changed_type = model("g (float[n, 4] x) => (float[n, 5] y) { r = RandomNormalLike(x)\n y = Add(x, r) }")
    assert verify(a, changed_type).status is Status.FAILED


def test_an_original_that_cannot_run_is_said_so() -> None:
    with pytest.raises(OriginalFails, match="Unknown"):
        verify(identity("y = com.example.Unknown(x)"), identity())
    bad = model("g (float[n, m] x) => (float[n, m] y) { y = Reshape(x, s) }", s=np.int64([2, 2]))
    with pytest.raises(OriginalFails, match="inputs given"):
        verify(bad, bad, inputs={"x": normal(3, 3)})
    picky = model("g (float[n, 4] x) => (float[m] y) { y = Reshape(x, s) }", s=np.int64([977 * 4]))
    with pytest.raises(InputsNeeded, match="--inputs"):
        verify(picky, picky)


# --- the user's inputs ---


def test_the_users_inputs(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=normal(3, 16))
    verification = verify(mlp(), mlp(), inputs=path)
    assert verification.verified
    assert verification.cases == 1
    assert verification.bindings == ({"batch": 3},)
    assert not verify(mlp(), mlp(b1=normal(32, seed=9)), inputs=path).verified
    for arrays, message in [
        ({}, "'x' is missing: expected float"),
        ({"x": normal(3, 16), "z": normal(1)}, "no input 'z'"),
        ({"x": normal(3, 16).astype(np.float64)}, "float64, expected float"),
        ({"x": normal(3, 15)}, r"shape \[3, 15\], expected float\[batch,16\]"),
        ({"x": normal(16)}, "shape"),
    ]:
        with pytest.raises(BadInputs, match=message):
            verify(mlp(), mlp(), inputs=arrays)
    with pytest.raises(BadInputs, match="no such file"):
        verify(mlp(), mlp(), inputs=tmp_path / "other.npz")
    np.savez(path, z=normal(1))
    with pytest.raises(BadInputs, match=r"data\.npz: input 'x' is missing"):
        verify(mlp(), mlp(), inputs=path)
    path.write_text("text")
    with pytest.raises(BadInputs, match="npz"):
        verify(mlp(), mlp(), inputs=path)
    two = model("g (float[n] a, float[n] b) => (float[n] y) { y = Add(a, b) }")
    with pytest.raises(BadInputs, match="n is 2"):
        verify(two, two, inputs={"a": normal(2), "b": normal(3)})


def test_sequences_have_to_be_given(tmp_path: Path) -> None:
    a = model("g (seq(float[k]) x) => (float[n] y) { y = ConcatFromSequence<axis=0>(x) }")
    with pytest.raises(InputsNeeded, match="--inputs"):
        verify(a, a)
    path = tmp_path / "data.npz"
    np.savez(path, **{"x.0": normal(2), "x.1": normal(3)})
    assert verify(a, a, inputs=path).verified


def test_bfloat16_goes_in_and_out() -> None:
    # ONNX Runtime's CPU kernels only carry bfloat16 through casts.
    a = model(
        "g (bfloat16[n, 4] x) => (bfloat16[n, 4] y) { f = Cast<to=1>(x)\n r = Relu(f)\n y = Cast<to=16>(r) }"
    )
    b = model(
        "g (bfloat16[n, 4] x) => (bfloat16[n, 4] y) { f = Cast<to=1>(x)\n r = Abs(f)\n y = Cast<to=16>(r) }"
    )
    assert verify(a, a).verified
    assert not verify(a, b).verified
    given = {"x": normal(3, 4).astype(ml_dtypes.bfloat16)}
    assert verify(a, a, inputs=given).verified


# --- one reference, many candidates; files ---


def test_one_reference_judges_many_candidates(tmp_path: Path) -> None:
    reference = Reference.of(mlp())
    assert reference.check(mlp()).verified
    first = reference.check(mlp(b1=normal(32, seed=9)))
    assert not first.verified
    assert reference.check(mlp(b1=normal(32, seed=9))).to_json() == first.to_json()
    assert reference.check(mlp()).verified


def test_paths_and_external_data(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    onnx.save_model(mlp(), path, save_as_external_data=True, location="a.data", size_threshold=0)
    assert verify(path, mlp()).verified
    assert verify(mlp().SerializeToString(), path).verified
    with pytest.raises(VerificationError, match=r"missing\.onnx"):
        verify(path, tmp_path / "missing.onnx")


def test_the_same_seed_gives_the_same_verification() -> None:
    a, b = mlp(), mlp(b1=normal(32, seed=9))
    assert verify(a, b, seed=3).to_json() == verify(a, b, seed=3).to_json()
    assert verify(a, b, seed=3).message() != verify(a, b, seed=4).message()


def test_six_sizes_and_more_values_at_the_first() -> None:
    verification = verify(mlp(), mlp())
    assert len(verification.bindings) >= 6
    assert {"batch": 1} in verification.bindings
    assert verification.bindings[0]["batch"] > 1
    assert verification.cases <= 18, "at most twice the runs that three samples of three sizes are"
    assert {"values from 0 to 255", "values of 1000", "values from 0 to 1", "values of 0.001"} <= {
        *verification.values
    }
    mine = verify(mlp(), mlp(), bindings={"batch": 1})
    assert mine.bindings[0] == {"batch": 1}
    static = model(MLP.replace("batch", "5"), **{n: normal(*s) for n, s in WEIGHTS.items()})
    assert verify(static, static).cases == 6
    assert verify(static, static).bindings == ()


def test_what_was_run_is_said() -> None:
    verification = verify(mlp(), mlp())
    assert verification.to_json()["bindings"] == [dict(b) for b in verification.bindings]
    assert verification.to_json()["values"] == list(verification.values)
    assert verification.sizes.startswith("batch=2; batch=3; ")


WEIGHTS = {"w1": (16, 32), "b1": (32,), "w2": (32, 8), "b2": (8,)}


def test_the_message_names_output_element_and_substitution() -> None:
    verification = verify(mlp(), mlp(b2=changed(normal(8), (5,), 0.5)))
    text = verification.message("step 3, FuseBias")
    assert "output 'y'" in text
    assert ",5]: " in text
    assert "FuseBias" in text
    assert 0.49 < verification.max_error < 0.51


def test_a_slice_is_judged_by_its_own_magnitude() -> None:
    large = np.concatenate([np.full((7, 64), 1e3), np.full((1, 64), 1e-3)]).astype(np.float32)
    wrong = large.copy()
    wrong[7] = 0
    assert "at 7 along axis 0" in judge_floats(by_deviation(large, large), wrong).reason


def test_small_elements_of_a_coarse_kernel_may_move_by_its_grid() -> None:
    """ONNX Runtime's Sigmoid ends in an addition of one half: near 0 its results are multiples of 2^-25."""
    step = 2.0**-25
    original = np.stack([np.arange(128) % 3, 1000 + np.arange(128)]).astype(np.float32) * np.float32(step)
    noise, new = np.zeros(original.shape), original.copy()
    noise[1] = 4 * step  # how far the original moves, where its elements are larger
    new[0, 5] += 2 * step
    assert judge_floats(replace(by_deviation(original, None), noise=noise), new).passed
    finer = original.copy()
    finer[0, 7] = new[0, 7] = np.float32(1e-3 * step)  # no such grid: the slice's own magnitude counts
    assert "along axis 0" in judge_floats(replace(by_deviation(finer, None), noise=noise), new).reason
    assert grid(original) == step
    assert grid(np.float32([0.0, 1.0, 2.0])) == 2.0**-24
    assert grid(np.zeros(3, np.float32)) == 2.0**-24


def test_a_number_that_rounding_could_flip_is_no_licence() -> None:
    """floor(i + 1) is not i, and a row is not the next one, though a moved sum would be rounded to it."""
    graph = "g (int64[n] i) => (float[n] y) <float one = {1}> { f = Cast<to=1>(i) %s }"
    a = model(graph % "s = Add(f, one) y = Floor(s)")
    assert not verify(a, model(graph % "y = Identity(f)")).verified
    table = np.arange(64, dtype=np.float32).reshape(16, 4) ** 2
    rows = (
        "g (int64[1,8] m) => (float[1,8,4] y) <int64 axis = {1}> { f = Cast<to=1>(m) z = Clip(f, low, high) "
        "c = CumSum(z, axis) %s y = Gather(t, k) }"
    )
    numbers = {"low": np.float32(0), "high": np.float32(1), "one": np.float32(1), "t": table}
    right = model(rows % "k = Cast<to=7>(c)", **numbers)
    assert not verify(right, model(rows % "d = Add(c, one) k = Cast<to=7>(d)", **numbers)).verified

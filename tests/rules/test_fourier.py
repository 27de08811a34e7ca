"""Fourier transforms."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules.examples import graphs
from rewrite_rules.fourier import DropImaginaryZeros, ReplaceDFTByMatMul
from tests.rules.harness import alone, applies, model, refuses, rewritten, run
from xrlflow.onnxio import load
from xrlflow.rewrite import RewriteState

# The first L of 512 zeros are added to the input, so L is 512 at most.
BOUNDED = (
    "c = ConstantOfShape([1, 512, 1]) n = Shape<start=1,end=2>(x) p = Slice(c, [0], n, [1]) z = Add(x, p) "
    "y = DFT(z, , 1)"
)


def transform(shape: str, result: str, body: str):
    (proto,) = map(model, graphs(f"(float[{shape}] x) => (float[{result}] y) {{ {body} }}"))
    return proto


@pytest.mark.parametrize("length", [1, 2, 4, 5, 12, 400])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("opened", [False, True])
def test_as_exact_as_numpy(length: int, parts: int, opened: bool) -> None:
    """ONNX Runtime's transform is not: see findings/a_transform_of_400_loses_three_digits.sh."""
    n = "L" if opened else length
    proto = transform(f"3,{n},{parts}", f"3,{n},2", BOUNDED if opened else "y = DFT(x, , 1)")
    result, graph = rewritten(ReplaceDFTByMatMul(), proto)
    assert "DFT" not in {node.op for node in graph.nodes()}
    data = np.random.default_rng(0).standard_normal((3, length, parts)).astype(np.float32)
    wide = data.astype(np.float64)
    exact = np.fft.fft(wide[..., 0] + (1j * wide[..., 1] if parts == 2 else 0), axis=1)
    (y,) = run(result, {"x": data})
    np.testing.assert_allclose(y[..., 0] + 1j * y[..., 1], exact, atol=3e-6 * np.abs(exact).max())


def test_along_no_elements() -> None:
    result, _ = rewritten(ReplaceDFTByMatMul(), transform("3,L,2", "3,L,2", BOUNDED))
    assert run(result, {"x": np.zeros((3, 0, 2), np.float32)})[0].shape == (3, 0, 2)


def test_layers_share_the_roots() -> None:
    """The matrices of an open length are computed of the model's input, once for all transforms along it."""
    proto = transform("2,L,1", "2,L,2", BOUNDED.replace("y =", "a =") + " b = Exp(a) y = DFT(b, , 1)")
    _, once = rewritten(ReplaceDFTByMatMul(), proto)
    state = RewriteState.start(load(proto).graph, alone(ReplaceDFTByMatMul()))
    while state.candidates:
        state = state.apply(state.candidates[0])
    assert [n.op for n in state.graph.nodes()].count("Sin") == [n.op for n in once.nodes()].count("Sin") == 2


def test_what_is_refused() -> None:
    rule = ReplaceDFTByMatMul()
    refuses(rule, transform("2,5,2", "2,4,2", "y = DFT(x, 4)"), "cut off or filled up")
    refuses(rule, transform("2,L,2", "2,L,2", "y = DFT<inverse=1>(x, , 1)"), "the length is open")
    refuses(rule, transform("2,L,2", "2,L,2", "y = DFT(x, , 1)"), "may be large")
    refuses(rule, transform("2,L,2", "2,L,2", BOUNDED.replace("512", "4096")), "may be large")
    refuses(rule, transform("2,L,2", "2,L,2", BOUNDED.replace("Add(x, p)", "Concat<axis=1>(x, p)")))
    refuses(rule, transform("2,5,2", "2,8,1", "y = DFT<inverse=1,onesided=1>(x)"), "real")
    refuses(rule, transform("2,1000,2", "2,1000,2", "y = DFT(x)"), "too large")


def test_imaginary_zeros() -> None:
    zeros = "s = Shape(x) z = Expand(0.0, s) c = Concat<axis=-1>(x, z) y = DFT(c, , 1)"
    applies(DropImaginaryZeros(), transform("2,4,1", "2,4,2", zeros), ops=["DFT"])
    refuses(DropImaginaryZeros(), transform("2,4,1", "2,4,2", zeros.replace("0.0", "0.5")))
    refuses(DropImaginaryZeros(), transform("2,4,2", "2,4,2", "y = DFT(x, , 1)"))

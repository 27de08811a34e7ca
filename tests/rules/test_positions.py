"""A gather of all positions is its input; a gather of some, or in another order, is not."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules.positions import RemoveGatherOfAllPositions, _mask, counted
from tests.rules.harness import alone, applies, ints, model, refuses, run
from xrlflow.ir import Value
from xrlflow.onnxio import load
from xrlflow.rewrite import Reader, RewriteState

# As PyTorch writes the mask of an attention: the sizes come from two inputs, and the shape from a Max.
EXPORTED = """agraph (bool[N,M] x, int64[N,M] ids) => (bool[N,1,1,M] y) {
  o = Constant<value_int = 0>() i = Constant<value_int = 1>() a = Constant<value_ints = [1, 2, 3]>()
  r = Constant<value_ints = [0, 1, 2]>() e = Constant<value_ints = [-1]>()
  s = Shape<start=0, end=1>(ids) n = Squeeze(s) t = Shape<start=1, end=2>(x) m = Squeeze(t)
  p = Range(o, n, i) q = Range(o, m, i) u = Unsqueeze(p, a) v = Unsqueeze(q, r) h = Max(u, v) g = Shape(h)
  c = Expand(u, g) d = Expand(v, g) f = Unsqueeze(c, e) k = Unsqueeze(d, e)
  j = Concat<axis=-1>(f, k) y = GatherND(x, j) }"""


def test_the_mask_of_an_attention() -> None:
    graph = applies(RemoveGatherOfAllPositions(), model(EXPORTED), ops=["Unsqueeze"])
    assert [n.op for n in graph.nodes()] == ["Unsqueeze"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": "N,N", "parts": "l, f"}, "the axes are in another order"),
        ({"wide": "z"}, "they are gathered several times"),
        ({"second": "0"}, "not all are gathered"),
        ({"start": "i"}, None),
        ({"step": "k"}, None),
    ],
)
def test_other_positions_are_gathered(changes: dict[str, str], reason: str | None) -> None:
    text = _mask(**changes)
    if changes.get("second") == "0":  # a square of the first rows and columns
        text = text.replace("end=2", "end=1")
    refuses(RemoveGatherOfAllPositions(), model(text), reason)


def test_symbols_that_may_differ_are_not_equal() -> None:
    """The second index counts to the length of another input, which may be shorter."""
    shorter = EXPORTED.replace("int64[N,M] ids", "int64[N,K] ids").replace("end=2>(x)", "end=2>(ids)")
    refuses(RemoveGatherOfAllPositions(), model(shorter.replace("[N,1,1,M] y", "[N,1,1,K] y")), "not all")


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (1, 1), (1, 4), (4, 1)])
def test_sizes_of_0_and_1(sizes: tuple[int, int]) -> None:
    (rewritten,) = (applies(RemoveGatherOfAllPositions(), model(EXPORTED)),)
    assert [n.op for n in rewritten.nodes()] == ["Unsqueeze"]
    x = np.arange(np.prod(sizes)).reshape(sizes) % 3 == 0
    (y,) = run(model(EXPORTED), {"x": x, "ids": np.zeros(sizes, np.int64)})
    np.testing.assert_array_equal(y, x[:, None, None])


def test_fixed_sizes_make_constants_of_the_positions() -> None:
    fixed = EXPORTED.replace("[N,M]", "[2,M]").replace("[N,1,1,M]", "[2,1,1,M]")
    applies(RemoveGatherOfAllPositions(), model(fixed), ops=["Unsqueeze"])
    source = "agraph (float[2,3] x) => (float[2,3] y) { y = GatherND(x, i) }"
    places = np.stack(np.meshgrid(np.arange(2), np.arange(3), indexing="ij"), -1)
    applies(RemoveGatherOfAllPositions(), model(source, i=places), ops=[])
    refuses(RemoveGatherOfAllPositions(), model(source, i=places[::-1].copy()))


def counts(text: str, **given: np.ndarray) -> object:
    graph = load(model(text, **given)).graph
    (output,) = graph.outputs
    found = counted(Reader(graph), Value(output))
    return None if found is None else (sorted(found.axes), found.shape)


def test_how_a_value_counts() -> None:
    text = (
        "agraph (float[N] x) => (y) {{ s = Shape(x) n = Squeeze(s) p = Range({}, n, {})"
        " a = Reshape{}(p, r) y = Expand(a, w) }}"
    )
    given = ints(o=0, i=1, r=[1, -1, 1], w=[2, 1, 5])
    assert counts(text.format("o", "i", ""), **given) == ([1], (2, "N", 5))
    assert counts(text.format("i", "i", ""), **given) is None
    assert counts(text.format("o", "i", ""), **given | ints(r=[0, 1, 1], w=[1])) == ([0], ("N", 1, 1))
    assert counts(text.format("o", "i", "<allowzero=1>"), **given | ints(r=[0, 1, 1], w=[1])) is None
    assert counts(text.format("o", "i", ""), **given | ints(w=[2, 7, 5])) is None


def test_the_indices_stay_where_they_are_read_again() -> None:
    text = EXPORTED.replace("(bool[N,1,1,M] y)", "(bool[N,1,1,M] y, int64[N,1,1,M,2] j)")
    state = RewriteState.start(load(model(text)).graph, alone(RemoveGatherOfAllPositions()))
    assert len(state.candidates) == 1
    applies(RemoveGatherOfAllPositions(), model(text))

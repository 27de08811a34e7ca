"""LSTM and GRU compute what ONNX Runtime computes, also in a library of kernels; what has no kernel is left to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.compiled import compiled
from xrlflow.backends.tvm.hybrid import hybrid
from xrlflow.backends.tvm.recurrent import Form, plans
from xrlflow.backends.tvm.target import Machine

GATES = {"LSTM": 4, "GRU": 3}
WAYS = {"forward": 1, "reverse": 1, "bidirectional": 2}


def drawn(seed: int, *shape: int) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) / 2).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Cell:
    """A node: sizes as steps, batch, inputs, hidden. `given`: which of the bias and the initial states it has.
    `outputs`: which results have a name."""

    op: str
    size: tuple[int, int, int, int]
    direction: str = "forward"
    after: int = 0
    given: str = "bhc"
    outputs: str = "yhc"

    @property
    def last(self) -> tuple[int, int, int]:
        return WAYS[self.direction], self.size[1], self.size[3]

    def model(self, more: Sequence[str] = (), **attributes: object) -> onnx.ModelProto:
        """The model, with `more` inputs between the bias and the states."""
        steps, batch, inputs, hidden = self.size
        rows, ways = GATES[self.op] * hidden, self.last[0]
        weights = {"w": (ways, rows, inputs), "r": (ways, rows, hidden), "b": (ways, 2 * rows)}
        has_cell = self.op == "LSTM"
        states = [name if name in self.given else "" for name in ("h", "c")[: 1 + has_cell]]
        names = ["x", "w", "r", "b" if "b" in self.given else "", *(more or [""]), *states]
        while not names[-1]:
            names.pop()
        made = [f"out_{name}" if name in self.outputs else "" for name in "yhc"[: 2 + has_cell]]
        if self.op == "GRU":
            attributes["linear_before_reset"] = self.after
        node = helper.make_node(
            self.op, names, made, "cell", hidden_size=hidden, direction=self.direction, **attributes
        )

        def value(name: str, shape: Sequence[int]) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

        shapes = [(steps, *self.last), self.last, self.last]
        graph = helper.make_graph(
            [node],
            "g",
            [value("x", (steps, batch, inputs)), *(value(name, self.last) for name in states if name)],
            [value(name, shape) for name, shape in zip(made, shapes) if name],
            [numpy_helper.from_array(drawn(n, *weights[name]), name) for n, name in enumerate("wrb")],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def feeds(self) -> dict[str, npt.NDArray[np.float32]]:
        states = [name for name in ("h", "c")[: 1 + (self.op == "LSTM")] if name in self.given]
        return {"x": 2 * drawn(7, *self.size[:3])} | {
            name: drawn(8 + n, *self.last) for n, name in enumerate(states)
        }


def agree(cell: Cell, cores: int = 1) -> None:
    model, feeds = cell.model(), cell.feeds()
    with open_model(model.SerializeToString()) as runtime, compiled(model, detect(cores=cores)) as ours:
        for a, b in zip(runtime.run(feeds), ours.run(feeds), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=2e-6)


# One row and several, whole vectors and a rest, fewer columns than a vector has, more terms than a chunk.
SIZES = ((1, 1, 3, 16), (4, 1, 5, 2), (3, 5, 7, 19), (5, 3, 6, 133))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("op", "after"), [("LSTM", 0), ("GRU", 0), ("GRU", 1)])
def test_sizes(op: str, after: int, size: tuple[int, int, int, int]) -> None:
    agree(Cell(op, size, after=after))


@pytest.mark.parametrize(
    "cell",
    [
        Cell("LSTM", (4, 2, 3, 21), "reverse", given="bc"),
        Cell("LSTM", (5, 3, 3, 40), "bidirectional", given="h"),
        Cell("LSTM", (4, 1, 3, 8), given="", outputs="c"),
        Cell("LSTM", (4, 1, 3, 8), given="b", outputs="h"),
        Cell("GRU", (5, 3, 3, 40), "bidirectional", 1, given="h"),
        Cell("GRU", (4, 2, 3, 21), "reverse", 0, given="b"),
        Cell("GRU", (4, 2, 3, 9), "bidirectional", 0, outputs="h"),
        Cell("GRU", (4, 1, 3, 8), "forward", 1, given="", outputs="y"),
    ],
    ids=str,
)
def test_directions_operands_and_results(cell: Cell) -> None:
    """On several cores, so that rows and directions are tasks: 5 and 3 rows are not divided equally."""
    agree(cell, cores=3)


def test_rows_are_divided_among_cores() -> None:
    """What is computed twice is the same."""
    agree(Cell("LSTM", (6, 5, 8, 40)), cores=2)
    agree(Cell("GRU", (6, 5, 8, 40)), cores=2)
    machine = Machine("x86_64-linux-gnu", "znver4", 2, 16, 32)
    form = Form("LSTM", 6, 5, 40, (False,), False, (True, True))
    assert {how.block for how in plans(form, machine)} == {3}


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_tiles_cover_all_columns(op: str, lanes: int) -> None:
    machine = Machine("x86_64-linux-gnu", "znver4", 2, lanes, 32 if lanes != 8 else 16)
    for batch in (1, 2, 7):
        for hidden in (1, 3, 16, 19, 256):
            form = Form(op, 4, batch, hidden, (False,), False, (False,))
            found = list(plans(form, machine))
            assert found
            assert all(how.wide >= hidden and how.wide - hidden < how.columns for how in found)


def test_what_is_not_finite() -> None:
    """An infinity saturates gates, and only the row with NaN becomes NaN, from its step on."""
    for op in GATES:
        cell = Cell(op, (4, 3, 5, 19), given="b")
        model, feeds = cell.model(), cell.feeds()
        feeds["x"][1, 0, 2] = 1e30
        feeds["x"][2, 1, 0] = np.nan
        with open_model(model.SerializeToString()) as runtime, compiled(model, detect()) as ours:
            a, b = runtime.run(feeds)[0], ours.run(feeds)[0]
        np.testing.assert_allclose(b[:, :, [0, 2]], a[:, :, [0, 2]], rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(b[:2, :, 1], a[:2, :, 1], rtol=1e-5, atol=2e-6)
        assert np.isnan(b[2:, :, 1]).all()


REFUSED = {
    "with sequence_lens": (("n",), {}),
    "with clip": ((), {"clip": 1.0}),
    "with layout": ((), {"layout": 1}),
    "with input_forget": ((), {"input_forget": 1}),
    "with other activations": ((), {"activations": ["Sigmoid", "Relu", "Tanh"]}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused(reason: str) -> None:
    more, attributes = REFUSED[reason]
    model = Cell("LSTM", (4, 1, 3, 8), given="b").model(more, **attributes)
    if more:
        lengths = numpy_helper.from_array(np.array([4], np.int32), "n")
        model.graph.initializer.append(lengths)
    with pytest.raises(BackendError, match=rf"LSTM cell \({reason}\): use --backend onnxruntime"):
        compiled(model, detect())


def test_peepholes_and_computed_weights_are_refused() -> None:
    model = Cell("LSTM", (4, 1, 3, 8), given="b").model()
    model.graph.node[0].input.extend(["", "", "", "p"])
    model.graph.initializer.append(numpy_helper.from_array(drawn(1, 1, 24), "p"))
    with pytest.raises(BackendError, match="with peepholes"):
        compiled(model, detect())
    model = Cell("GRU", (4, 1, 3, 8), given="b").model()
    model.graph.initializer.pop(0)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (1, 24, 3)))
    with pytest.raises(BackendError, match="with weights that are no constants"):
        compiled(model, detect())


def test_in_a_library_of_kernels(tmp_path: Path) -> None:
    """One kind has a kernel, the other is left to ONNX Runtime."""
    cell = Cell("LSTM", (4, 2, 6, 19), "bidirectional", given="b", outputs="y")
    model = cell.model()
    model.graph.node.extend(
        [
            helper.make_node("Tanh", ["out_y"], ["t"]),
            helper.make_node("ReduceMean", ["t"], ["m"], axes=[1], keepdims=0),
            helper.make_node("GRU", ["m", "gw", "gr"], ["z"], "left", hidden_size=3, clip=0.3),
        ]
    )
    for n, (name, width) in enumerate((("gw", 19), ("gr", 3))):
        model.graph.initializer.append(numpy_helper.from_array(drawn(n, 1, 9, width), name))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, (4, 1, 2, 3)))
    made = hybrid(model, {}, detect(cores=2))
    assert made.nodes == 3
    assert any("GRU left is left to ONNX Runtime" in remark for remark in made.remarks)
    made.save(tmp_path / "model.onnx")
    feeds = cell.feeds()
    with open_model(model.SerializeToString()) as runtime, open_model(str(tmp_path / "model.onnx")) as ours:
        for _ in range(2):  # also in memory that has been used
            for a, b in zip(runtime.run(feeds), ours.run(feeds), strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-5, atol=2e-6)

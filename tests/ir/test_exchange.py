"""Graphs as files of other programs: what networkx reads again is the graph that was written."""

from __future__ import annotations

import io
from pathlib import Path

import networkx
import onnx
import pytest
from typer.testing import CliRunner

from tests.rules.harness import model
from xrlflow import api, onnxio
from xrlflow.cli import app
from xrlflow.ir.exchange import FORMATS, serialised, to_labelled
from xrlflow.onnxio import ModelError
from xrlflow.options import OptionError

READERS = {".graphml": networkx.read_graphml, ".gexf": networkx.read_gexf}
SPLIT = (
    "agraph (float[4,6] x) => (float[4,3] y, float[4,3] z) { a, b = Split<axis=1,num_outputs=2>(x) "
    "y = Add(a, b) z = Relu(b) }"
)


def write(folder: Path) -> Path:
    onnx.save(model(SPLIT), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_holds_the_graph(ending: str) -> None:
    graph = onnxio.load(model(SPLIT)).graph
    read = READERS[ending](io.BytesIO(serialised(to_labelled(graph), ending)))
    label = {node: data["label"] for node, data in read.nodes(data=True)}
    assert sorted(label.values()) == ["Add", "Input", "Relu", "Split"]
    edges = {
        (label[source], data["output"], label[reader], data["input"], data["name"], data["tensor"])
        for source, reader, data in read.edges(data=True)
    }
    assert edges == {
        ("Input", 0, "Split", 0, "x", "float[4,6]"),
        ("Split", 0, "Add", 0, "a", "float[4,3]"),
        ("Split", 1, "Add", 1, "b", "float[4,3]"),
        ("Split", 1, "Relu", 0, "b", "float[4,3]"),
    }
    assert {label[node]: data["output"] for node, data in read.nodes(data=True)} == {
        "Input": False, "Split": False, "Add": True, "Relu": True,
    }  # fmt: skip
    (split,) = (data for _, data in read.nodes(data=True) if data["label"] == "Split")
    assert "axis=1" in split["attrs"]


def test_an_input_that_is_returned_and_a_constant() -> None:
    text = "agraph (float[2] x) => (float[2] x, float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }"
    labelled = to_labelled(onnxio.load(model(text)).graph)
    outputs = {data["label"]: data["output"] for _, data in labelled.nodes(data=True)}
    assert outputs == {"Input": True, "Constant": False, "Mul": True}


@pytest.mark.parametrize("ending", FORMATS)
def test_names_that_xml_cannot_hold(ending: str) -> None:
    proto = model("agraph (float[2] x) => (float[2] y) { a = Exp(x) y = Relu(a) }")
    proto.graph.node[0].output[0] = proto.graph.node[1].input[0] = 'a\x01<"&'
    read = READERS[ending](io.BytesIO(serialised(to_labelled(onnxio.load(proto).graph), ending)))
    assert 'a\ufffd<"&' in {data["name"] for _, _, data in read.edges(data=True)}


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"graph\.svg: a graph is written as \.graphml or \.gexf"):
        api.save_networkx(write(tmp_path), tmp_path / "graph.svg")
    with pytest.raises(ModelError, match="there is no folder"):
        api.save_networkx(write(tmp_path), tmp_path / "none" / "graph.gexf")
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    path, target = write(tmp_path), tmp_path / "graph.graphml"
    ran = CliRunner().invoke(app, ["view", str(path), "--networkx", str(target)])
    assert (ran.exit_code, ran.output) == (0, f"{target}: 4 nodes, 4 edges\n")
    assert len(networkx.read_graphml(target)) == 4
    ran = CliRunner().invoke(app, ["view", str(path), str(path), "--networkx", str(target)])
    assert ran.exit_code == 2
    assert "--networkx takes one model" in ran.output

"""The agent's network as an ONNX model. ONNX Runtime runs it, so a search with a trained agent does not need torch.

It computes the same as `xrlflow.rl.agent.Agent` and `xrlflow.rl.encoder.Encoder`. ScatterND with a reduction computes
sums by segment. All counts are dynamic.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from xrlflow.rewrite import Library
from xrlflow.rl.features import (
    CANDIDATE_FEATURES,
    CHANGE_FEATURES,
    DELTA,
    EDGE_FEATURES,
    GLOBAL_FEATURES,
    NODE_FEATURES,
    Batch,
    Observation,
    Vocabulary,
)
from xrlflow.rl.parameters import EncoderConfig, Parameters

# Opset 18 introduced ScatterND with the reduction "max"; IR version 8 belongs to it.
_OPSET, _IR = 18, 8
# The inputs' shapes: N nodes, E edges, C candidates, M roles, K changes, B observations.
_INPUTS: Mapping[str, tuple[str | int, ...]] = {
    "op": ("N",), "x": ("N", NODE_FEATURES), "edge_index": (2, "E"), "edge_attr": ("E", EDGE_FEATURES),
    "rule": ("C",), "family": ("C",), "candidate": ("C", CANDIDATE_FEATURES),
    "role_node": ("M",), "role_candidate": ("M",),
    "change_op": ("K",), "change_candidate": ("K",), "change": ("K", CHANGE_FEATURES),
    "globals": ("B", GLOBAL_FEATURES), "batch": ("N",), "rule_batch": ("C",),
}  # fmt: skip
_FEATURES = frozenset({"x", "edge_attr", "candidate", "change", "globals"})


class Network:
    """A trained agent that scores candidates for `xrlflow.rl.strategy.agent_search`, on one thread."""

    def __init__(self, parameters: Parameters) -> None:
        self.vocabulary: Vocabulary = parameters.vocabulary
        options = onnxruntime.SessionOptions()
        # More threads do not speed up small networks, and idle threads would spin and disturb measurements.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            to_onnx(parameters).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    @staticmethod
    def load(path: str | os.PathLike[str], library: Library) -> Network:
        """Read an agent and extend it by the rules and operators of a library. Raises CheckpointError."""
        return Network(Parameters.load(path).extended(library))

    def log_probs(self, observations: Sequence[Observation]) -> npt.NDArray[np.float64]:
        """For each observation: the log-probabilities of its candidates and, last, of No-Op, all in one flat array."""
        scores, stop = self._session.run(["scores", "stop"], Batch.of(observations).arrays())
        return _distributions(observations, scores, stop)

    def evaluate(
        self, observations: Sequence[Observation]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The log-probabilities, as `log_probs` returns them, and the values of the B observations [B]."""
        scores, stop, values = self._session.run(
            ["scores", "stop", "values"], Batch.of(observations).arrays()
        )
        return _distributions(observations, scores, stop), np.asarray(values, np.float64)


def _distributions(
    observations: Sequence[Observation], scores: npt.NDArray[np.float32], stop: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    ends = np.cumsum([o.candidates for o in observations])
    parts = zip(np.split(scores.astype(np.float64), ends[:-1]), stop.astype(np.float64))
    return np.concatenate([_log_softmax(np.append(part, last)) for part, last in parts])


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # the search raises an error for NaN, so no warning is needed
        shifted = logits - logits.max()
        return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def to_onnx(parameters: Parameters) -> onnx.ModelProto:
    """The agent as an ONNX model. Its inputs are the arrays of a `Batch`; its outputs are the logits `scores` [C] of
    candidates and `stop` [B] of No-Op, and `values` [B].
    """
    net = _Builder(parameters.arrays)
    nodes, graphs = _encoder(net, parameters.config.encoder)
    width = parameters.config.encoder.width
    context = net("Gather", net.linear("from_graph", graphs), "rule_batch")
    hidden = _candidates(net, nodes, context, width)
    delta = net("Gather", "candidate", net.constant(np.int64(DELTA)), axis=1)
    gain = net("Mul", net.constant(parameters.arrays["trust"][0]), net("Relu", net("Neg", delta)))
    loss = net("Mul", net.constant(parameters.arrays["trust"][1]), net("Relu", delta))
    scores = net("Squeeze", net.linear("score", hidden), net.constant([1]))
    net("Sub", net("Add", scores, gain), loss, output="scores")
    pooled = net.mean(hidden, "rule_batch", net.rows("globals"), width)
    state = net("Concat", graphs, pooled, axis=1)
    stop = net.linear("stop.2", net("Tanh", net.linear("stop.0", state)))
    net("Squeeze", stop, net.constant([1]), output="stop")
    described = net("Concat", state, "globals", axis=1)
    value = net.linear("value.2", net("Tanh", net.linear("value.0", described)))
    net("Squeeze", value, net.constant([1]), output="values")
    return net.model()


class _Builder:
    """Builds an ONNX graph: a call of the builder adds a node and returns the name of its output. Parameters become
    initializers.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.arrays = arrays
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}

    def __call__(self, op: str, *inputs: str, output: str = "", **attrs: Any) -> str:
        name = output or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attrs))
        return name

    def constant(self, value: Any) -> str:
        """Add a constant. Lists of integers become int64."""
        name = f"constant_{len(self.initializers)}"
        self.initializers[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def parameter(self, name: str) -> str:
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(self.arrays[name], name)
        return name

    def linear(self, name: str, x: str) -> str:
        """Add the linear layer `name`: x [R, inputs] -> [R, outputs]."""
        bias = (self.parameter(f"{name}.bias"),) if f"{name}.bias" in self.arrays else ()
        return self("Gemm", x, self.parameter(f"{name}.weight"), *bias, transB=1)

    def embedding(self, name: str, numbers: str) -> str:
        return self("Gather", self.parameter(f"{name}.weight"), numbers)

    def norm(self, name: str, x: str) -> str:
        scale, bias = self.parameter(f"{name}.weight"), self.parameter(f"{name}.bias")
        return self("LayerNormalization", x, scale, bias, epsilon=1e-5)

    def rows(self, x: str) -> str:
        """The number of rows of x, [1]."""
        return self("Shape", x, start=0, end=1)

    def sums(self, rows: str, owner: str, count: str, width: int, minimum: float | None = None) -> str:
        """The sums of the rows [R, width] of each owner [count, width]; with `minimum`, the maxima of these rows
        instead, at least `minimum`.
        """
        shape = self("Concat", count, self.constant([width]), axis=0)
        start = np.array([0.0 if minimum is None else minimum], np.float32)
        filled = self("ConstantOfShape", shape, value=numpy_helper.from_array(start))
        indices = self("Unsqueeze", owner, self.constant([1]))
        reduction = "add" if minimum is None else "max"
        return self("ScatterND", filled, indices, rows, reduction=reduction)

    def mean(self, rows: str, owner: str, count: str, width: int) -> str:
        """The mean of the rows of each owner, [count, width]; 0 for an owner without rows."""
        shape = self("Concat", self.rows(rows), self.constant([1]), axis=0)
        ones = self("ConstantOfShape", shape, value=numpy_helper.from_array(np.ones(1, np.float32)))
        sizes = self("Max", self.sums(ones, owner, count, 1), self.constant(np.float32(1)))
        return self("Div", self.sums(rows, owner, count, width), sizes)

    def model(self) -> onnx.ModelProto:
        inputs = [
            helper.make_tensor_value_info(
                name, TensorProto.FLOAT if name in _FEATURES else TensorProto.INT64, shape
            )
            for name, shape in _INPUTS.items()
        ]
        outputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [size])
            for name, size in (("scores", "C"), ("stop", "B"), ("values", "B"))
        ]
        graph = helper.make_graph(self.nodes, "agent", inputs, outputs, list(self.initializers.values()))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)


def _encoder(net: _Builder, config: EncoderConfig) -> tuple[str, str]:
    """Vectors of nodes [N, width] and of graphs [B, width]."""
    count, width = net.rows("x"), config.width
    source = net("Gather", "edge_index", net.constant(np.int64(0)))
    target = net("Gather", "edge_index", net.constant(np.int64(1)))
    nodes = net(
        "Relu", net("Add", net.linear("encoder.of_node", "x"), net.embedding("encoder.operator", "op"))
    )
    of_source = net("Gather", net.linear("encoder.edges.of_source", nodes), source)
    messages = net("Relu", net("Add", net.linear("encoder.edges.of_edge", "edge_attr"), of_source))
    summed = net.sums(messages, target, count, width)
    nodes = net("Add", nodes, net("Log", net("Add", summed, net.constant(np.float32(1)))))
    for index in range(config.layers):
        nodes = _attention(net, f"encoder.layers.{index}", nodes, (source, target), config)
    nodes = net.norm("encoder.last", nodes)
    # Attention over all nodes of a graph.
    gate = net.linear("encoder.pool.gate_nn", nodes)
    graphs = net.rows("globals")
    weights, total = _softmax_by(net, gate, "batch", graphs, 1)
    heard = net("Div", net.sums(net("Mul", nodes, weights), "batch", graphs, width), total)
    of_graph = net("Add", net.linear("encoder.of_graph", heard), net.linear("encoder.of_globals", "globals"))
    return nodes, net("Tanh", of_graph)


def _softmax_by(net: _Builder, scores: str, owner: str, count: str, width: int) -> tuple[str, str]:
    """The unnormalised softmax weights of rows [R, width], and for each owner the sum of its weights [count, width],
    which is at least 1e-9.
    """
    top = net.sums(scores, owner, count, width, minimum=float("-inf"))
    weights = net("Exp", net("Sub", scores, net("Gather", top, owner)))
    total = net("Max", net.sums(weights, owner, count, width), net.constant(np.float32(1e-9)))
    return weights, total


def _attention(net: _Builder, name: str, nodes: str, ends: tuple[str, str], config: EncoderConfig) -> str:
    """One residual layer of graph attention, the same as `xrlflow.rl.encoder.Attention`."""
    (source, target), heads, width = ends, config.heads, config.width
    count = net.rows("x")
    spoken = net.linear(f"{name}.of_node", net.norm(f"{name}.before", nodes))

    def columns(begin: int, end: int) -> str:
        return net("Slice", spoken, net.constant([begin]), net.constant([end]), net.constant([1]))

    values = columns(0, width)
    of_source = net("Gather", columns(width, width + heads), source)
    of_target = net("Gather", columns(width + heads, width + 2 * heads), target)
    of_edge = net.linear(f"{name}.of_edge", "edge_attr")
    scores = net("LeakyRelu", net("Add", net("Add", of_source, of_target), of_edge), alpha=0.2)
    weights, total = _softmax_by(net, scores, target, count, heads)
    # Each head has an equal part of the width.
    by_head = net.constant([-1, heads, width // heads])
    flat = net.constant([-1, width])
    part = net("Unsqueeze", weights, net.constant([2]))
    messages = net("Mul", net("Reshape", net("Gather", values, source), by_head), part)
    heard = net.sums(net("Reshape", messages, flat), target, count, width)
    share = net("Div", net("Reshape", heard, by_head), net("Unsqueeze", total, net.constant([2])))
    biased = net("Add", net("Reshape", share, flat), net.parameter(f"{name}.bias"))
    return net("Add", nodes, net("Relu", biased))


def _candidates(net: _Builder, nodes: str, context: str, width: int) -> str:
    """Vectors of the candidates [C, width], as in `xrlflow.rl.agent.Agent`."""
    count = net.rows("rule")
    role = net.mean(net("Gather", nodes, "role_node"), "role_candidate", count, width)
    parts = net("Add", net.linear("of_change", "change"), net.embedding("changed", "change_op"))
    change = net("Tanh", net.sums(net("Relu", parts), "change_candidate", count, width))
    terms = (
        net.linear("from_role", role),
        net.linear("from_change", change),
        net.linear("of_candidate", "candidate"),
        net.embedding("rule", "rule"),
        net.embedding("family", "family"),
        context,
    )
    return net("Relu", net.linear("candidate", net("Relu", net("Sum", *terms))))

"""`Net`: a small builder of ONNX graphs with random weights.

It builds the networks of the zoo as PyTorch's exporter writes them (`torch.onnx.export(dynamo=True,
opset_version=18)`). Methods take and return value names. ONNX's shape inference runs at each node, so `net.shape(x)` is
always known. All weights come from one generator in the order of the calls, so a seed fixes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
IR_VERSION = 10

Array = NDArray[np.generic]
Pair = int | tuple[int, int]


def pair(value: Pair) -> tuple[int, int]:
    """A pair of numbers for both spatial axes, from one number for both or from a pair."""
    return (value, value) if isinstance(value, int) else value


def divisible(channels: float, divisor: int = 8) -> int:
    """The multiple of `divisor` that is nearest to `channels`, but at least 90% of it: the rule of MobileNet and
    EfficientNet."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded if rounded >= 0.9 * channels else rounded + divisor


def spread(total: int, shares: Sequence[int]) -> list[int]:
    """`total` blocks over stages in the proportion of `shares`; `sum(shares)` blocks give `shares` themselves.

    >>> spread(16, (3, 4, 6, 3)), spread(4, (3, 4, 6, 3))
    ([3, 4, 6, 3], [1, 1, 1, 1])
    """
    ends = [round(total * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
    return [end - start for start, end in pairwise([0, *ends])]


class Net:
    """An ONNX graph under construction."""

    def __init__(self, name: str, seed: int, *, fold_batchnorm: bool = True) -> None:
        self.name = name
        self.rng = np.random.default_rng(seed)
        self.fold_batchnorm = fold_batchnorm
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: list[TensorProto] = []
        self._types: dict[str, onnx.TypeProto] = {}
        self._literals: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._data: dict[str, TensorProto] = {}
        self._scope: list[str] = []
        self._name_counts: Counter[str] = Counter()

    # ---------------------------------------------------------------- names, inputs, outputs

    @contextmanager
    def scope(self, *parts: object) -> Iterator[None]:
        """Prefix the names of values that are added inside the block with `parts`, as a module's path does."""
        self._scope.extend(str(part) for part in parts)
        yield
        del self._scope[len(self._scope) - len(parts) :]

    def _name(self, stem: str) -> str:
        path = ".".join([*self._scope, stem])
        self._name_counts[path] += 1
        return path if self._name_counts[path] == 1 else f"{path}_{self._name_counts[path] - 1}"

    def input(self, name: str, shape: Sequence[int], dtype: int = TensorProto.FLOAT) -> str:
        """Declare a graph input."""
        info = helper.make_tensor_value_info(name, dtype, shape)
        self._inputs.append(info)
        self._types[name] = info.type
        return name

    def output(self, value: str, name: str) -> None:
        """Declare `value` as the graph output `name`."""
        for node in self._nodes:
            node.output[:] = [name if out == value else out for out in node.output]
            node.input[:] = [name if arg == value else arg for arg in node.input]
        self._types[name] = self._types.pop(value)
        self._outputs.append(onnx.ValueInfoProto(name=name, type=self._types[name]))

    def shape(self, value: str) -> tuple[int, ...]:
        """The dimensions of a value, all of which are numbers."""
        return tuple(dim.dim_value for dim in self._types[value].tensor_type.shape.dim)

    def model(self) -> onnx.ModelProto:
        """The finished model."""
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, self._initializers)
        return helper.make_model(
            graph,
            producer_name="xrlflow.models",
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET)],
        )

    # ---------------------------------------------------------------- constants and weights

    def weight(self, name: str, array: Array) -> str:
        """Add an initializer that no other node shares."""
        tensor = numpy_helper.from_array(np.asarray(array, order="C"), self._name(name))
        self._initializers.append(tensor)
        self._types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        if array.dtype == np.int64:  # shapes, axes, sizes: read by shape inference
            self._data[tensor.name] = tensor
        return tensor.name

    def literal(self, value: object, dtype: type[np.generic]) -> str:
        """A small constant (scalar, shape, axes). Equal constants share one initializer."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._literals:
            scope, self._scope = self._scope, []
            self._literals[key] = self.weight("const", array)
            self._scope = scope
        return self._literals[key]

    def ints(self, *values: int) -> str:
        """A constant int64 vector."""
        return self.literal(values, np.int64)

    def scalar(self, value: float) -> str:
        """A constant float32 scalar."""
        return self.literal(value, np.float32)

    def normal(self, shape: Sequence[int], std: float, mean: float = 0.0) -> NDArray[np.float32]:
        """Normally distributed weights."""
        draw = self.rng.standard_normal(tuple(shape), dtype=np.float32)
        draw *= np.float32(std)
        draw += np.float32(mean)
        return draw

    def uniform(self, shape: Sequence[int], low: float, high: float) -> NDArray[np.float32]:
        """Uniformly distributed weights."""
        return self.rng.uniform(low, high, tuple(shape)).astype(np.float32)

    # ---------------------------------------------------------------- nodes

    def nodes(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """Append a node with `outputs` results."""
        stem = op.lower()
        names = [self._name(stem) for _ in range(outputs)]
        node = helper.make_node(op, inputs, names, name=f"node_{names[0]}", **attributes)
        schema = onnx.defs.get_schema(op, OPSET)
        inferred = onnx.shape_inference.infer_node_outputs(
            schema,
            node,
            {arg: self._types[arg] for arg in inputs if arg},
            {arg: self._data[arg] for arg in inputs if arg in self._data},
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
        )
        self._types.update(inferred)
        self._nodes.append(node)
        return names

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Append a node with one result."""
        return self.nodes(op, *inputs, **attributes)[0]

    def add(self, a: str, b: str) -> str:
        return self.node("Add", a, b)

    def mul(self, a: str, b: str) -> str:
        return self.node("Mul", a, b)

    def relu(self, x: str) -> str:
        return self.node("Relu", x)

    def sigmoid(self, x: str) -> str:
        return self.node("Sigmoid", x)

    def tanh(self, x: str) -> str:
        return self.node("Tanh", x)

    def relu6(self, x: str) -> str:
        return self.node("Clip", x, self.scalar(0), self.scalar(6))

    def silu(self, x: str) -> str:
        """x * sigmoid(x), as the exporter decomposes it."""
        return self.mul(x, self.sigmoid(x))

    def gelu(self, x: str) -> str:
        """x * 0.5 (1 + erf(x / sqrt 2)), as the exporter decomposes it below opset 20."""
        erf = self.node("Erf", self.node("Div", x, self.scalar(math.sqrt(2))))
        return self.mul(x, self.mul(self.scalar(0.5), self.add(erf, self.scalar(1))))

    def gelu_tanh(self, x: str) -> str:
        """GPT-2's approximation of Gelu, as the exporter decomposes it."""
        half = self.mul(x, self.scalar(0.5))
        cubic = self.mul(self.node("Pow", x, self.scalar(3)), self.scalar(0.044715))
        tanh = self.tanh(self.mul(self.add(x, cubic), self.scalar(math.sqrt(2 / math.pi))))
        return self.mul(half, self.add(tanh, self.scalar(1)))

    def concat(self, *values: str, axis: int = 1) -> str:
        return self.node("Concat", *values, axis=axis)

    def reshape(self, x: str, *dims: int) -> str:
        return self.node("Reshape", x, self.ints(*dims), allowzero=1)

    def transpose(self, x: str, *perm: int) -> str:
        return self.node("Transpose", x, perm=perm)

    def split(self, x: str, parts: int, axis: int) -> list[str]:
        """The `parts` equal parts of x along an axis."""
        return self.nodes("Split", x, outputs=parts, axis=axis, num_outputs=parts)

    def softmax(self, x: str) -> str:
        return self.node("Softmax", x, axis=-1)

    # ---------------------------------------------------------------- layers

    def conv(
        self,
        x: str,
        channels: int,
        kernel: Pair = 1,
        *,
        stride: int = 1,
        padding: Pair | None = None,
        groups: int = 1,
        norm: float | None = None,
        epsilon: float = 1e-5,
    ) -> str:
        """x[b,c,h,w] -> [b,channels,h',w']; padded to keep the size unless `padding` is given.

        With `norm` a BatchNormalization follows, whose scales lie around the number `norm`. It is folded into the
        weights, as by PyTorch's exporter in evaluation mode, unless the net has `fold_batchnorm=False`. With and
        without folding the same random numbers are drawn, so that the network computes the same function.
        """
        kh, kw = pair(kernel)
        ph, pw = pair(padding) if padding is not None else (kh // 2, kw // 2)
        fan_in = self.shape(x)[1] // groups * kh * kw
        weight = self.normal((channels, fan_in // (kh * kw), kh, kw), math.sqrt(2 / fan_in))
        spatial: dict[str, Any] = {
            "dilations": (1, 1),
            "group": groups,
            "kernel_shape": (kh, kw),
            "pads": (ph, pw, ph, pw),
            "strides": pair(stride),
        }
        if norm is None:
            bias = self.normal((channels,), 0.05)
            return self.node("Conv", x, self.weight("weight", weight), self.weight("bias", bias), **spatial)

        scale, shift = self.uniform((channels,), 0.8 * norm, 1.2 * norm), self.normal((channels,), 0.1)
        mean, var = self.normal((channels,), 0.1), self.uniform((channels,), 0.7, 1.4)
        if self.fold_batchnorm:
            factor = scale / np.sqrt(var + np.float32(epsilon))
            weight = weight * factor[:, None, None, None]
            bias = shift - mean * factor
            return self.node("Conv", x, self.weight("weight", weight), self.weight("bias", bias), **spatial)
        y = self.node("Conv", x, self.weight("weight", weight), **spatial)
        statistics = [
            self.weight(f"bn.{name}", array)
            for name, array in zip(
                ("weight", "bias", "running_mean", "running_var"), (scale, shift, mean, var)
            )
        ]
        return self.node("BatchNormalization", y, *statistics, epsilon=epsilon, momentum=0.9)

    def pool(self, op: str, x: str, kernel: int, stride: int, padding: int = 0) -> str:
        """`MaxPool`, or `AveragePool` that counts the padding, as in PyTorch."""
        attributes: dict[str, Any] = {
            "ceil_mode": 0,
            "kernel_shape": pair(kernel),
            "pads": (padding,) * 4,
            "strides": pair(stride),
        }
        if op == "AveragePool":
            attributes["count_include_pad"] = 1
        return self.node(op, x, **attributes)

    def global_mean(self, x: str) -> str:
        """x[b,c,h,w] -> [b,c,1,1], as adaptive average pooling is exported."""
        return self.node("ReduceMean", x, self.ints(-1, -2), keepdims=1)

    def gemm(self, x: str, features: int, gain: float = 1.0) -> str:
        """A linear layer on x[b,k] -> [b,features]: Gemm with a transposed weight, as in PyTorch."""
        fan_in = self.shape(x)[-1]
        weight = self.weight("weight", self.normal((features, fan_in), gain / math.sqrt(fan_in)))
        bias = self.weight("bias", self.normal((features,), 0.05))
        return self.node("Gemm", x, weight, bias, alpha=1.0, beta=1.0, transA=0, transB=1)

    def project(self, x: str, features: int, gain: float = 1.0) -> str:
        """x[...,k] -> [...,features] without a bias."""
        fan_in = self.shape(x)[-1]
        weight = self.normal((fan_in, features), gain / math.sqrt(fan_in))
        return self.node("MatMul", x, self.weight("weight", weight))

    def linear(self, x: str, features: int, gain: float = 1.0) -> str:
        """A linear layer on x[b,s,k] -> [b,s,features]: MatMul, then Add."""
        return self.add(self.project(x, features, gain), self.weight("bias", self.normal((features,), 0.05)))

    def layer_norm(self, x: str, epsilon: float) -> str:
        """LayerNormalization over the last axis."""
        features = self.shape(x)[-1]
        weight = self.weight("weight", self.normal((features,), 0.1, mean=1.0))
        bias = self.weight("bias", self.normal((features,), 0.05))
        return self.node("LayerNormalization", x, weight, bias, axis=-1, epsilon=epsilon, stash_type=1)

    def classifier(self, x: str, classes: int) -> None:
        """Global pooling and a linear layer: x[b,c,h,w] -> the output `logits`[b,classes]."""
        batch, channels = self.shape(x)[:2]
        with self.scope("classifier"):
            pooled = self.reshape(self.global_mean(x), batch, channels)
            self.output(self.gemm(pooled, classes), "logits")

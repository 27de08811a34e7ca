"""Recurrent cells unrolled over time: NasRNN, LSTM and GRU."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx

from models.builder import Net


def nasrnn(depth: int, seed: int, *, width: int = 512, shared: bool = False) -> onnx.ModelProto:
    """NasRNN (Zoph and Le, 2017) as TASO writes it: `depth` steps of x0, x1, ...[1,512] -> state[1,512].

    A step multiplies x and h by eight matrices each, adds the products in pairs and combines the eight sums in a tree.
    Each step has its own matrices; with `shared` all steps have the same.
    """
    net = Net("nasrnn-shared" if shared else "nasrnn", seed)
    std = 1 / math.sqrt(width)

    def weights() -> list[tuple[str, str]]:
        return [
            (
                net.weight(f"{i}.weight_x", net.normal((width, width), std)),
                net.weight(f"{i}.weight_h", net.normal((width, width), std)),
            )
            for i in range(8)
        ]

    xs = [net.input(f"x{step}", (1, width)) for step in range(depth)]
    with net.scope("cell"):
        of_cell = weights() if shared else None
        state = net.weight("state", net.normal((1, width), 0.5))
    for step, x in enumerate(xs):
        with net.scope("cell", step):
            t = [
                net.add(net.node("MatMul", x, wx), net.node("MatMul", state, wh))
                for wx, wh in of_cell or weights()
            ]
            left = net.add(net.relu(t[0]), net.sigmoid(t[3]))
            inner_left = net.add(net.sigmoid(t[1]), net.tanh(t[2]))
            inner_right = net.mul(net.sigmoid(t[4]), net.tanh(t[5]))
            right = net.mul(net.sigmoid(t[6]), net.relu(t[7]))
            inner = net.add(net.sigmoid(inner_left), net.tanh(inner_right))
            outer = net.mul(net.tanh(left), net.tanh(right))
            state = net.tanh(net.mul(net.tanh(inner), net.tanh(outer)))
    net.output(state, "state")
    return net.model()


def nasrnn_shared(depth: int, seed: int, *, width: int = 512) -> onnx.ModelProto:
    """NasRNN with the same weights in every step."""
    return nasrnn(depth, seed, width=width, shared=True)


def _projections(net: Net, width: int, gates: int) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """The cell's linear layers of the input and of the hidden state: [1,width] -> [1, gates * width]."""
    bound = 1 / math.sqrt(width)

    def linear(kind: str) -> Callable[[str], str]:
        weight = net.weight(f"weight_{kind}", net.uniform((gates * width, width), -bound, bound))
        bias = net.weight(f"bias_{kind}", net.uniform((gates * width,), -bound, bound))
        return lambda x: net.node("Gemm", x, weight, bias, alpha=1.0, beta=1.0, transA=0, transB=1)

    with net.scope("cell"):
        return linear("ih"), linear("hh")


def _step(net: Net, x: str, step: int) -> str:
    """x[1,steps,width] -> x[:, step], [1,width]."""
    return net.node("Gather", x, net.literal(step, np.int64), axis=1)


def _stack(net: Net, values: list[str]) -> str:
    """The values [1,width] of all steps -> [1,steps,width]."""
    return net.concat(*[net.node("Unsqueeze", value, net.ints(1)) for value in values])


def lstm_unrolled(depth: int, seed: int, *, width: int = 512) -> onnx.ModelProto:
    """A Python loop over `torch.nn.LSTMCell`, exported: x[1,depth,width] -> y[1,depth,width], c[1,width].

    As in nn.LSTMCell: gates i, f, g, o; c' = f c + i g; h' = o tanh(c').
    """
    net = Net("lstm-unrolled", seed)
    x = net.input("x", (1, depth, width))
    of_input, of_hidden = _projections(net, width, 4)
    h = c = net.node("ConstantOfShape", net.ints(1, width))
    ys = []
    for step in range(depth):
        with net.scope("cell", step):
            gates = net.split(net.add(of_hidden(h), of_input(_step(net, x, step))), 4, axis=1)
            i, f, g, o = (
                net.sigmoid(gates[0]),
                net.sigmoid(gates[1]),
                net.tanh(gates[2]),
                net.sigmoid(gates[3]),
            )
            c = net.add(net.mul(f, c), net.mul(i, g))
            h = net.mul(o, net.tanh(c))
        ys.append(h)
    net.output(_stack(net, ys), "y")
    net.output(c, "c")
    return net.model()


def gru_unrolled(depth: int, seed: int, *, width: int = 512) -> onnx.ModelProto:
    """A Python loop over `torch.nn.GRUCell`, exported: x[1,depth,width] -> y[1,depth,width].

    As in nn.GRUCell: gates r, z, n; n = tanh(x_n + r h_n), where the reset follows the projection; h' = n + z (h - n).
    """
    net = Net("gru-unrolled", seed)
    x = net.input("x", (1, depth, width))
    of_input, of_hidden = _projections(net, width, 3)
    h = net.node("ConstantOfShape", net.ints(1, width))
    ys = []
    for step in range(depth):
        with net.scope("cell", step):
            x_r, x_z, x_n = net.split(of_input(_step(net, x, step)), 3, axis=1)
            h_r, h_z, h_n = net.split(of_hidden(h), 3, axis=1)
            r, z = net.sigmoid(net.add(h_r, x_r)), net.sigmoid(net.add(h_z, x_z))
            n = net.tanh(net.add(x_n, net.mul(h_n, r)))
            h = net.add(net.mul(net.node("Sub", h, n), z), n)
        ys.append(h)
    net.output(_stack(net, ys), "y")
    return net.model()

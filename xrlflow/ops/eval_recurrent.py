"""Evaluation of RNN, GRU and LSTM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xrlflow.ir import Attrs
from xrlflow.ops.eval_spec import Inputs, OpSpec, f32, integer, number, string, table
from xrlflow.ops.field import Array, Field, NotEvaluable

Activation = Callable[[Field, Array], Array]

# Activations by lower-case name: the function's name in the field and its default parameters. Affine and ScaledTanh are
# defined below.
_ACTIVATIONS: dict[str, tuple[str, tuple[float, ...]]] = {
    "relu": ("relu", ()),
    "tanh": ("tanh", ()),
    "sigmoid": ("sigmoid", ()),
    "softplus": ("softplus", ()),
    "leakyrelu": ("leaky_relu", (f32(0.01),)),
    "thresholdedrelu": ("thresholded_relu", (1.0,)),
    "hardsigmoid": ("hard_sigmoid", (f32(0.2), 0.5)),
    "elu": ("elu", (1.0,)),
    "affine": ("affine", (1.0, 0.0)),
    "scaledtanh": ("scaledtanh", (1.0, 1.0)),
    "softsign": ("softsign", ()),
}


def _apply(field: Field, name: str, parameters: tuple[float, ...], x: Array) -> Array:
    if name == "affine":
        alpha, beta = map(field.constant, parameters)
        return field.add(field.mul(x, alpha), beta)
    if name == "scaledtanh":
        alpha, beta = map(field.constant, parameters)
        return field.mul(field.unary("tanh", field.mul(x, beta)), alpha)
    if name == "softsign":
        return field.div(x, field.add(field.constant(1), field.unary("abs", x)))
    return field.unary(name, x, *parameters)


def _activations(attrs: Attrs, default: tuple[str, ...], directions: int) -> Iterator[list[Activation]]:
    """The activation functions of each direction.

    Each function with such a parameter takes the next number from the list of alphas or betas.
    """
    names = attrs.get("activations") or default * directions
    assert isinstance(names, tuple)
    alphas = iter(attrs.get("activation_alpha") or ())  # type: ignore[arg-type]
    betas = iter(attrs.get("activation_beta") or ())  # type: ignore[arg-type]
    functions: list[Activation] = []
    for label in names:
        text = str(label).lower()
        if text not in _ACTIVATIONS:
            raise NotEvaluable(f"activation {label}")
        name, parameters = _ACTIVATIONS[text]
        values = tuple(next(source, p) for source, p in zip((alphas, betas), parameters))

        def function(field: Field, x: Array, name: str = name, values: Any = values) -> Array:
            return _apply(field, name, values, x)

        functions.append(function)
    for i in range(directions):
        yield functions[i * len(default) : (i + 1) * len(default)]


def _flipped(x: Array, lengths: Array) -> Array:
    """x[t,b,...] with the first `lengths[b]` steps of each sequence b reversed."""
    steps = np.arange(x.shape[0])[:, None]
    index = np.where(steps < lengths, lengths - 1 - steps, steps)
    return x[index, np.arange(x.shape[1])]


# A function for one step. It takes: field, projected input [b, g*h], state, recurrent weights [g*h, h], recurrent bias
# [g*h], activations, attributes and peepholes. It returns the new state: (hidden,) or (hidden, cell), each [b,h].
State = tuple[Array, ...]
Step = Callable[[Field, Array, State, Array, Array, list[Activation], Attrs, Array | None], State]


def _limited(field: Field, attrs: Attrs, x: Array) -> Array:
    if "clip" not in attrs:
        return x
    top = number(attrs, "clip", 0.0)
    return field.minimum(field.maximum(x, field.constant(-top)), field.constant(top))


def _rnn_step(
    field: Field,
    x: Array,
    state: State,
    weights: Array,
    bias: Array,
    functions: list[Activation],
    attrs: Attrs,
    peepholes: Array | None,
) -> State:
    total = field.add(field.add(x, field.matmul(state[0], weights.T)), bias)
    return (functions[0](field, _limited(field, attrs, total)),)


def _gru_step(
    field: Field,
    x: Array,
    state: State,
    weights: Array,
    bias: Array,
    functions: list[Activation],
    attrs: Attrs,
    peepholes: Array | None,
) -> State:
    (hidden,) = state
    gate, act = functions
    size = hidden.shape[1]
    split = 2 * size
    both = field.add(field.add(x[:, :split], field.matmul(hidden, weights[:split].T)), bias[:split])
    both = gate(field, _limited(field, attrs, both))
    update, reset = both[:, :size], both[:, size:]
    if integer(attrs, "linear_before_reset", 0):
        inner = field.add(field.matmul(hidden, weights[split:].T), bias[split:])
        candidate = field.add(x[:, split:], field.mul(reset, inner))
    else:
        inner = field.matmul(field.mul(reset, hidden), weights[split:].T)
        candidate = field.add(field.add(x[:, split:], inner), bias[split:])
    new = act(field, _limited(field, attrs, candidate))
    return (field.add(field.mul(field.sub(field.constant(1), update), new), field.mul(update, hidden)),)


def _lstm_step(
    field: Field,
    x: Array,
    state: State,
    weights: Array,
    bias: Array,
    functions: list[Activation],
    attrs: Attrs,
    peepholes: Array | None,
) -> State:
    """One step of an LSTM. Gates are in the order input, output, forget, cell; peepholes input, output, forget."""
    hidden, cell = state
    size = hidden.shape[1]
    gate, act, out = functions
    total = field.add(field.add(x, field.matmul(hidden, weights.T)), bias)
    gates = [total[:, i * size : (i + 1) * size] for i in range(4)]
    peep = None if peepholes is None else [peepholes[i * size : (i + 1) * size] for i in range(3)]

    def opened(index: int, cell_state: Array) -> Array:
        value = gates[index] if peep is None else field.add(gates[index], field.mul(peep[index], cell_state))
        return gate(field, _limited(field, attrs, value))

    let_in = opened(0, cell)
    if integer(attrs, "input_forget", 0):
        forget = field.sub(field.constant(1), let_in)
    else:
        forget = opened(2, cell)
    new = act(field, _limited(field, attrs, gates[3]))
    cell = field.add(field.mul(forget, cell), field.mul(let_in, new))
    return field.mul(opened(1, cell), out(field, cell)), cell


def _recurrent(step: Step, gates: int, states: int, default: tuple[str, ...]) -> Any:
    """The inputs are X [t,b,i], W [directions, g*h, i], R [directions, g*h, h], B [directions, 2*g*h], lengths [b],
    initial states [directions,b,h], peepholes [directions, 3*h] (LSTM). `layout` 1 puts the batch first.
    """

    def evaluate(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
        x, w, r, *others = inputs
        optional: list[Array | None] = [*others, *[None] * (5 - len(others))]
        b, lengths, *more = optional
        assert x is not None
        assert w is not None
        assert r is not None
        batch_first = bool(integer(attrs, "layout", 0))
        initial, peepholes = more[:states], more[2] if states == 2 else None
        if batch_first:
            x = x.swapaxes(0, 1)
            initial = [None if s is None else s.swapaxes(0, 1) for s in initial]
        time, batch = x.shape[:2]
        directions, _, size = r.shape
        direction = string(attrs, "direction", "forward")
        steps = np.full(batch, time) if lengths is None else lengths.astype(np.int64)
        ragged = bool((steps < time).any())
        sequences, last = [], []
        for d, functions in enumerate(_activations(attrs, default, directions)):
            backwards = direction == "reverse" or d == 1
            source = _flipped(x, steps) if backwards else x
            bias = np.zeros(2 * gates * size) if b is None else b[d]
            projected = field.add(field.matmul(source, w[d].T), bias[: gates * size])
            state: State = tuple(
                np.zeros((batch, size), dtype=x.dtype) if s is None else s[d] for s in initial
            )
            hidden_states = np.zeros((time, batch, size), dtype=x.dtype)
            for t in range(time):
                new = step(
                    field,
                    projected[t],
                    state,
                    r[d],
                    bias[gates * size :],
                    functions,
                    attrs,
                    None if peepholes is None else peepholes[d],
                )
                if ragged:
                    running = (t < steps)[:, None]
                    hidden_states[t] = np.where(running, new[0], 0)
                    state = tuple(np.where(running, after, before) for after, before in zip(new, state))
                else:
                    hidden_states[t] = new[0]
                    state = new
            sequences.append(_flipped(hidden_states, steps) if backwards else hidden_states)
            last.append(state)
        y = np.stack(sequences, axis=1)  # [t, directions, b, h]
        final = [np.stack([state[i] for state in last]) for i in range(states)]
        if batch_first:
            y = y.transpose(2, 0, 1, 3)
            final = [s.swapaxes(0, 1) for s in final]
        return (y, *final)

    return evaluate


SPECS: dict[str, OpSpec] = table(
    "uninterpreted",
    RNN=_recurrent(_rnn_step, 1, 1, ("Tanh",)),
    GRU=_recurrent(_gru_step, 3, 1, ("Sigmoid", "Tanh")),
    LSTM=_recurrent(_lstm_step, 4, 2, ("Sigmoid", "Tanh", "Tanh")),
)

"""An MLP, and an LSTM that scans over time."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax

from models.hlo import Benchmark
from models.hlo.layers import Array, Source, Weights, cross_entropy, linear, linear_weights
from models.hlo.training import Network

BATCH = 4
CLASSES = 10
VOCABULARY = 100
TOKENS = 32


def mlp(benchmark: Benchmark, source: Source) -> Network:
    """A classifier: x[4, width] -> logits[4, 10], `layers` linear layers with ReLU between."""
    sizes = [benchmark.width] * benchmark.layers + [CLASSES]
    weights = {"layers": [linear_weights(source, before, after) for before, after in pairwise(sizes)]}

    def logits(p: Weights, x: Array) -> Array:
        for layer in p["layers"][:-1]:
            x = jax.nn.relu(linear(layer, x))
        return linear(p["layers"][-1], x)

    def loss(p: Weights, state: Weights, x: Array, labels: Array) -> tuple[Array, Weights]:
        return cross_entropy(logits(p, x), labels).mean(), state

    def infer(p: Weights, state: Weights, x: Array) -> Array:
        return jax.nn.softmax(logits(p, x))

    x = source.normal(BATCH, benchmark.width)
    return Network(weights, (x, source.ids(BATCH, below=CLASSES)), loss, (x,), infer)


def _lstm_weights(source: Source, width: int) -> Weights:
    return {
        "input": linear_weights(source, width, 4 * width),
        "hidden": linear_weights(source, width, 4 * width)["kernel"],
    }


def _lstm_layer(p: Weights, x: Array) -> Array:
    """x[time, batch, width] -> [time, batch, width], the state starts at zero."""

    def step(carry: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = carry
        i, f, g, o = jnp.split(linear(p["input"], x) + h @ p["hidden"], 4, axis=-1)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros(x.shape[1:], x.dtype)
    _, hidden = lax.scan(step, (start, start), x)
    return hidden


def lstm(benchmark: Benchmark, source: Source) -> Network:
    """A language model: tokens[4, 32] -> logits[4, 32, 100], one scan over time for each layer."""
    width = benchmark.width
    weights = {
        "embedding": source.normal(VOCABULARY, width),
        "layers": [_lstm_weights(source, width) for _ in range(benchmark.layers)],
        "head": linear_weights(source, width, VOCABULARY),
    }

    def logits(p: Weights, tokens: Array) -> Array:
        x = jnp.swapaxes(p["embedding"][tokens], 0, 1)
        for layer in p["layers"]:
            x = _lstm_layer(layer, x)
        return linear(p["head"], jnp.swapaxes(x, 0, 1))

    def loss(p: Weights, state: Weights, tokens: Array) -> tuple[Array, Weights]:
        return cross_entropy(logits(p, tokens[:, :-1]), tokens[:, 1:]).mean(), state

    def infer(p: Weights, state: Weights, tokens: Array) -> Array:
        return logits(p, tokens)

    batch = (source.ids(BATCH, TOKENS + 1, below=VOCABULARY),)
    return Network(weights, batch, loss, (source.ids(BATCH, TOKENS, below=VOCABULARY),), infer)

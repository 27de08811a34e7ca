"""From a network to a program: inference, or a training step with Adam as optax writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.hlo.layers import Array, Source, Weights

LEARNING_RATE = 1e-3
DECAY = (0.9, 0.999)
EPSILON = 1e-8
EPSILON_ROOT = 0.0
"""Added under the root: optax's default is 0, and jax emits the addition."""


@dataclass(frozen=True)
class Network:
    """The network of one benchmark: its weights, functions and their arguments."""

    weights: Weights
    batch: tuple[Array, ...]
    """Arguments of `loss` in training."""
    loss: Callable[..., tuple[Array, Weights]]
    """`loss(weights, state, *batch)` -> the loss, and the next state."""
    examples: tuple[Array, ...]
    """Arguments of `infer`."""
    infer: Callable[..., Any]
    """`infer(weights, state, *examples)` -> the outputs."""
    state: Weights = field(default_factory=dict)
    """Not trained by gradients: the running statistics of batch normalisation."""


@dataclass(frozen=True)
class Program:
    """A function that jax lowers, and its arguments: trees of arrays, or of shapes and types."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def adam_state(source: Source, weights: Weights) -> Weights:
    """The state of Adam in the midst of training: moments of the weights' shapes, and the count of steps."""
    return {
        "count": source.ids(below=100, start=1),
        "mu": jax.tree.map(lambda w: source.normal(*w.shape, std=0.1), weights),
        "nu": jax.tree.map(lambda w: source.positive(*w.shape), weights),
    }


def adam(gradients: Weights, state: Weights, weights: Weights) -> tuple[Weights, Weights]:
    """One step of Adam: returns the next weights and the next state."""
    b1, b2 = DECAY
    mu = jax.tree.map(lambda g, m: (1 - b1) * g + b1 * m, gradients, state["mu"])
    nu = jax.tree.map(lambda g, v: (1 - b2) * g**2 + b2 * v, gradients, state["nu"])
    maximum = np.iinfo(np.int32).max
    count = jnp.where(state["count"] < maximum, state["count"] + 1, maximum)
    mu_correction, nu_correction = 1 - b1**count, 1 - b2**count
    mu_hat = jax.tree.map(lambda m: m / mu_correction, mu)
    nu_hat = jax.tree.map(lambda v: v / nu_correction, nu)
    updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + EPSILON_ROOT) + EPSILON), mu_hat, nu_hat)
    updates = jax.tree.map(lambda u: -LEARNING_RATE * u, updates)
    weights = jax.tree.map(lambda w, u: w + u, weights, updates)
    return weights, {"count": count, "mu": mu, "nu": nu}


def training(network: Network, source: Source) -> Program:
    """`train_step(weights, state, optimizer, *batch)` -> loss, weights, state, optimizer."""

    def train_step(weights: Weights, state: Weights, optimizer: Weights, *batch: Array) -> tuple[Any, ...]:
        (loss, state), gradients = jax.value_and_grad(network.loss, has_aux=True)(weights, state, *batch)
        weights, optimizer = adam(gradients, optimizer, weights)
        return loss, weights, state, optimizer

    optimizer = adam_state(source, network.weights)
    return Program(train_step, (network.weights, network.state, optimizer, *network.batch))


def inference(network: Network) -> Program:
    """`infer(weights, state, *examples)` -> the outputs."""

    def infer(weights: Weights, state: Weights, *examples: Array) -> Any:
        return network.infer(weights, state, *examples)

    return Program(infer, (network.weights, network.state, *network.examples))

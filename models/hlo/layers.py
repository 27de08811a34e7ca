"""The layers of the programs, as functions of their weights, and the source of the weights.

Weights are dicts of arrays. `thing_weights(source, ...)` creates the weights `p` of a layer `thing(p, x)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any
"""A jax or numpy array, a tracer of one, or its shape and type alone."""
Weights = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """Creates the arguments of a program: random arrays, or, without a generator, only shapes and types."""

    rng: np.random.Generator | None

    def _array(
        self, shape: tuple[int, ...], dtype: type[np.generic], fill: Callable[[np.random.Generator], Any]
    ) -> Array:
        if self.rng is None:
            return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
        return np.asarray(fill(self.rng), dtype)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Array:
        """float32, normally distributed."""
        return self._array(shape, np.float32, lambda rng: rng.normal(mean, std, shape))

    def positive(self, *shape: int) -> Array:
        """float32 between 0.5 and 1.5."""
        return self._array(shape, np.float32, lambda rng: rng.uniform(0.5, 1.5, shape))

    def ids(self, *shape: int, below: int, start: int = 0) -> Array:
        """int32 from `start` to below `below`."""
        return self._array(shape, np.int32, lambda rng: rng.integers(start, below, shape))

    def key(self) -> Array:
        """A key of jax's random numbers, uint32[2]."""
        return self._array((2,), np.uint32, lambda rng: rng.integers(0, 2**32, 2))


def linear_weights(source: Source, fan_in: int, fan_out: int) -> Weights:
    return {
        "kernel": source.normal(fan_in, fan_out, std=1 / math.sqrt(fan_in)),
        "bias": source.normal(fan_out, std=0.02),
    }


def linear(p: Weights, x: Array) -> Array:
    """x[..., in] -> [..., out]."""
    return x @ p["kernel"] + p["bias"]


def norm_weights(source: Source, width: int) -> Weights:
    """The weights of a layer, group or batch normalisation."""
    return {"scale": source.normal(width, std=0.1, mean=1.0), "bias": source.normal(width, std=0.1)}


def layer_norm(p: Weights, x: Array, epsilon: float = 1e-5) -> Array:
    """Normalise the last axis."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + epsilon) * p["scale"] + p["bias"]


def group_norm(p: Weights, x: Array, groups: int = 8, epsilon: float = 1e-5) -> Array:
    """Normalise groups of channels of x[batch, height, width, channels]."""
    batch, height, width, channels = x.shape
    grouped = x.reshape(batch, height, width, groups, channels // groups)
    mean = grouped.mean(axis=(1, 2, 4), keepdims=True)
    variance = grouped.var(axis=(1, 2, 4), keepdims=True)
    x = ((grouped - mean) * lax.rsqrt(variance + epsilon)).reshape(x.shape)
    return x * p["scale"] + p["bias"]


def conv_weights(source: Source, fan_in: int, fan_out: int, size: int) -> Array:
    """A kernel [size, size, in, out]."""
    return source.normal(size, size, fan_in, fan_out, std=1 / math.sqrt(size * size * fan_in))


def conv(kernel: Array, x: Array, stride: int = 1, padding: str = "SAME") -> Array:
    """x[batch, height, width, in] -> [batch, height / stride, width / stride, out]."""
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def dropout(key: Array | None, x: Array, rate: float = 0.1) -> Array:
    """Set the share `rate` of the elements of x to zero, and scale up the others. Without a key, x is returned
    unchanged."""
    if key is None:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0.0)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The cross entropy of logits[..., classes] and labels[...] for each label: [...]."""
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -jnp.squeeze(log_probs, -1)

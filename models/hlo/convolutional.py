"""ResNet, and blocks of the UNet of a diffusion model. Images are [batch, height, width, channels]."""

from __future__ import annotations

import math
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax

from models.hlo import Benchmark, Variant
from models.hlo.layers import (
    Array,
    Source,
    Weights,
    conv,
    conv_weights,
    cross_entropy,
    group_norm,
    linear,
    linear_weights,
    norm_weights,
)
from models.hlo.training import Network

CLASSES = 10
EXPANSION = 4
"""The channels that a bottleneck puts out, relative to those of its 3x3 convolution."""
STEPS = 1000
"""Time steps of the diffusion."""


class _BatchNorms:
    """The batch normalisations of one pass through a network; `next` collects the new running statistics."""

    def __init__(self, weights: Weights, running: Weights, training: bool) -> None:
        self.weights, self.running, self.training = weights, running, training
        self.next: Weights = {}

    def __call__(self, name: str, x: Array, momentum: float = 0.9, epsilon: float = 1e-5) -> Array:
        p, running = self.weights[name], self.running[name]
        if self.training:
            mean, variance = jnp.mean(x, axis=(0, 1, 2)), jnp.var(x, axis=(0, 1, 2))
            self.next[name] = {
                "mean": momentum * running["mean"] + (1 - momentum) * mean,
                "variance": momentum * running["variance"] + (1 - momentum) * variance,
            }
        else:
            mean, variance = running["mean"], running["variance"]
        return (x - mean) * lax.rsqrt(variance + epsilon) * p["scale"] + p["bias"]


def _residual(convs: Weights, norm: _BatchNorms, name: str, x: Array, stride: int) -> Array:
    """A basic block (two kernels) or a bottleneck (three); a projection if the shape changes."""
    names = sorted(key for key in convs if key != "project")
    widest = 1 if len(names) == 3 else 0  # the 3x3 convolution with the stride
    y = x
    for i, key in enumerate(names):
        y = norm(f"{name}.{key}", conv(convs[key], y, stride if i == widest else 1))
        if i < len(names) - 1:
            y = jax.nn.relu(y)
    if "project" in convs:
        x = norm(f"{name}.project", conv(convs["project"], x, stride))
    return jax.nn.relu(x + y)


def _block_weights(source: Source, fan_in: int, width: int, bottleneck: bool, stride: int) -> Weights:
    out = width * EXPANSION if bottleneck else width
    sizes = (
        [(fan_in, width, 1), (width, width, 3), (width, out, 1)]
        if bottleneck
        else [(fan_in, width, 3), (width, out, 3)]
    )
    convs = {f"conv{i}": conv_weights(source, *size) for i, size in enumerate(sizes)}
    if stride > 1 or fan_in != out:
        convs["project"] = conv_weights(source, fan_in, out, 1)
    return convs


def resnet(benchmark: Benchmark, source: Source) -> Network:
    """ResNet: image[2, 32, 32, 3] -> logits[2, 10], `layers` residual blocks in two or four stages."""
    bottleneck = benchmark.variant is Variant.BOTTLENECK
    stages = 2 if benchmark.layers < 4 else 4
    stage = [i * stages // benchmark.layers for i in range(benchmark.layers)]
    strides = [1] + [
        1 + after - before for before, after in pairwise(stage)
    ]  # the first block of a stage halves the image
    width = channels = benchmark.width
    blocks: list[Weights] = []
    norms = {"stem": channels}
    for i, stride in enumerate(strides):
        width *= stride
        convs = _block_weights(source, channels, width, bottleneck, stride)
        norms |= {f"{i}.{key}": kernel.shape[-1] for key, kernel in convs.items()}
        channels = width * EXPANSION if bottleneck else width
        blocks.append(convs)
    weights = {
        "stem": conv_weights(source, 3, benchmark.width, 7),
        "blocks": blocks,
        "norms": {name: norm_weights(source, size) for name, size in norms.items()},
        "head": linear_weights(source, channels, CLASSES),
    }
    running = {
        name: {"mean": source.normal(size, std=0.1), "variance": source.positive(size)}
        for name, size in norms.items()
    }

    def logits(p: Weights, running: Weights, x: Array, training: bool) -> tuple[Array, Weights]:
        norm = _BatchNorms(p["norms"], running, training)
        x = jax.nn.relu(norm("stem", conv(p["stem"], x, 2)))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for i, (convs, stride) in enumerate(zip(p["blocks"], strides)):
            x = _residual(convs, norm, str(i), x, stride)
        return linear(p["head"], x.mean(axis=(1, 2))), norm.next

    def loss(p: Weights, running: Weights, x: Array, labels: Array) -> tuple[Array, Weights]:
        y, running = logits(p, running, x, training=True)
        return cross_entropy(y, labels).mean(), running

    def infer(p: Weights, running: Weights, x: Array) -> Array:
        return logits(p, running, x, training=False)[0]

    x = source.normal(2, 32, 32, 3)
    return Network(weights, (x, source.ids(2, below=CLASSES)), loss, (x,), infer, running)


# ---------------------------------------------------------------- the UNet of a diffusion model


def _time_embedding(p: Weights, steps: Array, width: int) -> Array:
    """Sines and cosines of steps[batch], and two linear layers: [batch, 4 * width]."""
    frequencies = jnp.exp(-math.log(10000) * jnp.arange(width // 2) / (width // 2))
    angles = steps[:, None].astype(jnp.float32) * frequencies[None, :]
    x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return linear(p["second"], jax.nn.silu(linear(p["first"], x)))


def _unet_block_weights(source: Source, fan_in: int, width: int, of_time: int) -> Weights:
    block = {
        "norm1": norm_weights(source, fan_in),
        "conv1": conv_weights(source, fan_in, width, 3),
        "time": linear_weights(source, of_time, width),
        "norm2": norm_weights(source, width),
        "conv2": conv_weights(source, width, width, 3),
        "norm3": norm_weights(source, width),
        "qkv": linear_weights(source, width, 3 * width),
        "out": linear_weights(source, width, width),
    }
    if fan_in != width:
        block["project"] = conv_weights(source, fan_in, width, 1)
    return block


def _unet_block(p: Weights, x: Array, time: Array) -> Array:
    """A residual block that adds the time, then attention over the positions of the image."""
    y = conv(p["conv1"], jax.nn.silu(group_norm(p["norm1"], x)))
    y = y + linear(p["time"], jax.nn.silu(time))[:, None, None, :]
    y = conv(p["conv2"], jax.nn.silu(group_norm(p["norm2"], y)))
    x = (conv(p["project"], x) if "project" in p else x) + y
    batch, height, width, channels = x.shape
    flat = group_norm(p["norm3"], x).reshape(batch, height * width, channels)
    q, k, v = jnp.split(linear(p["qkv"], flat), 3, axis=-1)
    scores = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", q, k) / math.sqrt(channels), axis=-1)
    return x + linear(p["out"], jnp.einsum("bqk,bkc->bqc", scores, v)).reshape(x.shape)


def unet(benchmark: Benchmark, source: Source) -> Network:
    """image[2, 16, 16, 3], step[2] -> noise[2, 16, 16, 3]: `layers` blocks down, one in the middle and `layers` up."""
    levels, width = (benchmark.layers - 1) // 2, benchmark.width
    of_time = 4 * width

    def blocks(channels: int) -> list[Weights]:
        return [_unet_block_weights(source, channels, width, of_time) for _ in range(levels)]

    weights = {
        "time": {
            "first": linear_weights(source, width, of_time),
            "second": linear_weights(source, of_time, of_time),
        },
        "stem": conv_weights(source, 3, width, 3),
        "down": blocks(width),
        "halve": [conv_weights(source, width, width, 3) for _ in range(levels)],
        "middle": _unet_block_weights(source, width, width, of_time),
        "double": [conv_weights(source, width, width, 3) for _ in range(levels)],
        "up": blocks(2 * width),
        "norm": norm_weights(source, width),
        "head": conv_weights(source, width, 3, 3),
    }

    def predict(p: Weights, state: Weights, x: Array, steps: Array) -> Array:
        time = _time_embedding(p["time"], steps, width)
        x = conv(p["stem"], x)
        skips = []
        for block, halve in zip(p["down"], p["halve"]):
            x = _unet_block(block, x, time)
            skips.append(x)
            x = conv(halve, x, stride=2)
        x = _unet_block(p["middle"], x, time)
        for block, double in zip(p["up"], p["double"]):
            x = conv(double, jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2))
            x = _unet_block(block, jnp.concatenate([x, skips.pop()], axis=-1), time)
        return conv(p["head"], jax.nn.silu(group_norm(p["norm"], x)))

    def loss(p: Weights, state: Weights, x: Array, noise: Array, steps: Array) -> tuple[Array, Weights]:
        signal = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, STEPS))[steps][:, None, None, None]
        noisy = jnp.sqrt(signal) * x + jnp.sqrt(1 - signal) * noise
        return jnp.mean((predict(p, state, noisy, steps) - noise) ** 2), state

    x, noise, steps = source.normal(2, 16, 16, 3), source.normal(2, 16, 16, 3), source.ids(2, below=STEPS)
    return Network(weights, (x, noise, steps), loss, (x, steps), predict)

"""GPT-2, BERT and ViT."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.hlo import Benchmark, Kind, Variant
from models.hlo.layers import (
    Array,
    Source,
    Weights,
    conv,
    conv_weights,
    cross_entropy,
    dropout,
    layer_norm,
    linear,
    linear_weights,
    norm_weights,
)
from models.hlo.training import Network

BATCH = 2
TOKENS = 32
HEADS = 4
VOCABULARY = 128
CLASSES = 10


def _layer_weights(source: Source, width: int) -> Weights:
    """The weights of a layer of GPT-2 or ViT, with one projection to queries, keys and values."""
    return {
        "norm1": norm_weights(source, width),
        "qkv": linear_weights(source, width, 3 * width),
        "out": linear_weights(source, width, width),
        "norm2": norm_weights(source, width),
        "up": linear_weights(source, width, 4 * width),
        "down": linear_weights(source, 4 * width, width),
    }


def _split_heads(x: Array) -> Array:
    """[batch, tokens, width] -> [batch, heads, tokens, width / heads]."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, HEADS, width // HEADS).transpose(0, 2, 1, 3)


def _merge_heads(x: Array) -> Array:
    batch, heads, tokens, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * width)


def _attend(q: Array, k: Array, v: Array, mask: Array | None, key: Array | None = None) -> Array:
    """Attention of q[batch, heads, queries, size] to k and v [batch, heads, keys, size], where `mask` is true."""
    scores = q @ jnp.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, np.finfo(scores.dtype).min)
    return dropout(key, jax.nn.softmax(scores, axis=-1)) @ v


def _keys(key: Array | None, number: int) -> list[Array | None]:
    """`number` random keys, one for each dropout; each is None if `key` is."""
    return [None] * number if key is None else list(jax.random.split(key, number))


# ---------------------------------------------------------------- GPT-2


def _gpt2_layer(p: Weights, x: Array, mask: Array, key: Array | None) -> Array:
    of_attention, of_output, of_mlp = _keys(key, 3)
    q, k, v = (_split_heads(part) for part in jnp.split(linear(p["qkv"], layer_norm(p["norm1"], x)), 3, -1))
    x = x + dropout(of_output, linear(p["out"], _merge_heads(_attend(q, k, v, mask, of_attention))))
    y = jax.nn.gelu(linear(p["up"], layer_norm(p["norm2"], x)))
    return x + dropout(of_mlp, linear(p["down"], y))


def _gpt2_logits(p: Weights, tokens: Array, key: Array | None = None) -> Array:
    """tokens[batch, length] -> logits[batch, length, vocabulary]. The weight of the last layer is the embedding's
    table."""
    length = tokens.shape[1]
    of_embedding, *of_layers = _keys(key, 1 + len(p["layers"]))
    x = dropout(of_embedding, p["tokens"][tokens] + p["positions"][jnp.arange(length)])
    mask = jnp.tril(jnp.ones((length, length), dtype=bool))
    for layer, of_layer in zip(p["layers"], of_layers):
        x = _gpt2_layer(layer, x, mask, of_layer)
    return layer_norm(p["norm"], x) @ p["tokens"].T


def _gpt2_decode(
    p: Weights, state: Weights, token: Array, position: Array, cache: list[Weights]
) -> tuple[Array, list[Weights]]:
    """token[batch] at `position` -> logits[batch, vocabulary], and the cache with its keys and values."""
    x = p["tokens"][token][:, None, :] + p["positions"][position]
    mask = jnp.arange(TOKENS) <= position
    after = []
    for layer, past in zip(p["layers"], cache):
        y = linear(layer["qkv"], layer_norm(layer["norm1"], x))
        q, k, v = (_split_heads(part) for part in jnp.split(y, 3, -1))
        k = lax.dynamic_update_slice(past["k"], k, (0, 0, position, 0))
        v = lax.dynamic_update_slice(past["v"], v, (0, 0, position, 0))
        after.append({"k": k, "v": v})
        x = x + linear(layer["out"], _merge_heads(_attend(q, k, v, mask)))
        y = jax.nn.gelu(linear(layer["up"], layer_norm(layer["norm2"], x)))
        x = x + linear(layer["down"], y)
    return (layer_norm(p["norm"], x) @ p["tokens"].T)[:, 0], after


def gpt2(benchmark: Benchmark, source: Source) -> Network:
    """A language model: tokens[2, 32] -> logits[2, 32, 128]. To decode: one token, its position and a cache."""
    width = benchmark.width
    weights = {
        "tokens": source.normal(VOCABULARY, width, std=0.2),
        "positions": source.normal(TOKENS, width, std=0.2),
        "layers": [_layer_weights(source, width) for _ in range(benchmark.layers)],
        "norm": norm_weights(source, width),
    }

    def loss(p: Weights, state: Weights, tokens: Array, key: Array | None = None) -> tuple[Array, Weights]:
        return cross_entropy(_gpt2_logits(p, tokens[:, :-1], key), tokens[:, 1:]).mean(), state

    def infer(p: Weights, state: Weights, tokens: Array) -> Array:
        return _gpt2_logits(p, tokens)

    batch: tuple[Array, ...] = (source.ids(BATCH, TOKENS + 1, below=VOCABULARY),)
    if benchmark.variant is Variant.DROPOUT:
        batch = (*batch, source.key())
    if benchmark.variant is Variant.DECODE:
        shape = (BATCH, HEADS, TOKENS, width // HEADS)
        cache = [{"k": source.normal(*shape), "v": source.normal(*shape)} for _ in range(benchmark.layers)]
        examples = (source.ids(BATCH, below=VOCABULARY), source.ids(below=TOKENS), cache)
        return Network(weights, batch, loss, examples, _gpt2_decode)
    return Network(weights, batch, loss, (source.ids(BATCH, TOKENS, below=VOCABULARY),), infer)


# ---------------------------------------------------------------- BERT


def _bert_layer_weights(source: Source, width: int) -> Weights:
    return {
        **{name: linear_weights(source, width, width) for name in ("query", "key", "value", "out")},
        "norm1": norm_weights(source, width),
        "up": linear_weights(source, width, 4 * width),
        "down": linear_weights(source, 4 * width, width),
        "norm2": norm_weights(source, width),
    }


def _bert_layer(p: Weights, x: Array, bias: Array, key: Array | None) -> Array:
    """A layer of BERT, which normalises after adding. `bias` [batch, 1, 1, tokens] is added to the attention scores."""
    of_attention, of_output, of_mlp = _keys(key, 3)
    batch, tokens, width = x.shape
    split = (batch, tokens, HEADS, width // HEADS)
    q, k, v = (linear(p[name], x).reshape(split) for name in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(width // HEADS) + bias
    scores = dropout(of_attention, jax.nn.softmax(scores, axis=-1))
    y = jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(batch, tokens, width)
    x = layer_norm(p["norm1"], x + dropout(of_output, linear(p["out"], y)), 1e-12)
    y = linear(p["down"], jax.nn.gelu(linear(p["up"], x), approximate=False))
    return layer_norm(p["norm2"], x + dropout(of_mlp, y), 1e-12)


def _bert_encode(p: Weights, tokens: Array, types: Array, mask: Array, key: Array | None = None) -> Array:
    """tokens, types and mask [batch, length] -> [batch, length, width]; mask is 1 where there is a token."""
    of_embedding, *of_layers = _keys(key, 1 + len(p["layers"]))
    x = p["tokens"][tokens] + p["positions"][jnp.arange(tokens.shape[1])][None] + p["types"][types]
    x = dropout(of_embedding, layer_norm(p["norm"], x, 1e-12))
    bias = (1.0 - mask[:, None, None, :].astype(x.dtype)) * -1e9
    for layer, of_layer in zip(p["layers"], of_layers):
        x = _bert_layer(layer, x, bias, of_layer)
    return x


def bert(benchmark: Benchmark, source: Source) -> Network:
    """Tokens[2, 32], types, mask -> hidden[2, 32, width], pooled[2, width]. Training predicts masked tokens."""
    width = benchmark.width
    filling_in = {
        "transform": linear_weights(source, width, width),
        "norm_head": norm_weights(source, width),
        "bias_head": source.normal(VOCABULARY, std=0.1),
    }
    pooling = {"pooler": linear_weights(source, width, width)}
    weights = {
        "tokens": source.normal(VOCABULARY, width, std=0.2),
        "positions": source.normal(TOKENS, width, std=0.2),
        "types": source.normal(2, width, std=0.2),
        "norm": norm_weights(source, width),
        "layers": [_bert_layer_weights(source, width) for _ in range(benchmark.layers)],
        **(filling_in if benchmark.kind is Kind.TRAINING else pooling),
    }

    def loss(
        p: Weights, state: Weights, example: Weights, labels: Array, key: Array | None = None
    ) -> tuple[Array, Weights]:
        x = _bert_encode(p, example["tokens"], example["types"], example["mask"], key)
        x = layer_norm(p["norm_head"], jax.nn.gelu(linear(p["transform"], x), approximate=False), 1e-12)
        logits = x @ p["tokens"].T + p["bias_head"]
        hidden = (labels >= 0).astype(logits.dtype)  # -1: the token is not masked
        each = cross_entropy(logits, jnp.maximum(labels, 0))
        return jnp.sum(each * hidden) / jnp.maximum(hidden.sum(), 1.0), state

    def infer(p: Weights, state: Weights, example: Weights) -> tuple[Array, Array]:
        x = _bert_encode(p, example["tokens"], example["types"], example["mask"])
        return x, jnp.tanh(linear(p["pooler"], x[:, 0]))

    example = {
        "tokens": source.ids(BATCH, TOKENS, below=VOCABULARY),
        "types": source.ids(BATCH, TOKENS, below=2),
        "mask": source.ids(BATCH, TOKENS, below=2),
    }
    batch: tuple[Array, ...] = (example, source.ids(BATCH, TOKENS, below=VOCABULARY, start=-1))
    if benchmark.variant is Variant.DROPOUT:
        batch = (*batch, source.key())
    return Network(weights, batch, loss, (example,), infer)


# ---------------------------------------------------------------- ViT


def vit(benchmark: Benchmark, source: Source) -> Network:
    """Image[2, 32, 32, 3] -> logits[2, 10], from 16 patches and a class token."""
    width, patch, image = benchmark.width, 8, 32
    weights = {
        "patches": conv_weights(source, 3, width, patch),
        "bias": source.normal(width, std=0.1),
        "class": source.normal(1, 1, width, std=0.2),
        "positions": source.normal(1, (image // patch) ** 2 + 1, width, std=0.2),
        "layers": [_layer_weights(source, width) for _ in range(benchmark.layers)],
        "norm": norm_weights(source, width),
        "head": linear_weights(source, width, CLASSES),
    }

    def logits(p: Weights, images: Array) -> Array:
        x = conv(p["patches"], images, patch, "VALID") + p["bias"]
        x = x.reshape(x.shape[0], -1, width)
        start = jnp.broadcast_to(p["class"], (x.shape[0], 1, width))
        x = jnp.concatenate([start, x], axis=1) + p["positions"]
        for layer in p["layers"]:
            y = linear(layer["qkv"], layer_norm(layer["norm1"], x))
            q, k, v = (_split_heads(part) for part in jnp.split(y, 3, axis=-1))
            x = x + linear(layer["out"], _merge_heads(_attend(q, k, v, None)))
            y = jax.nn.gelu(linear(layer["up"], layer_norm(layer["norm2"], x)), approximate=False)
            x = x + linear(layer["down"], y)
        return linear(p["head"], layer_norm(p["norm"], x)[:, 0])

    def loss(p: Weights, state: Weights, images: Array, labels: Array) -> tuple[Array, Weights]:
        return cross_entropy(logits(p, images), labels).mean(), state

    def infer(p: Weights, state: Weights, images: Array) -> Array:
        return jax.nn.softmax(logits(p, images))

    images = source.normal(BATCH, image, image, 3)
    return Network(weights, (images, source.ids(BATCH, below=CLASSES)), loss, (images,), infer)

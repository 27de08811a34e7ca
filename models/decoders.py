"""Decoders that take a prompt and then one token after the other, as their users run them (`xrlflow bench --generate`).

    model = decoder("qwen3")                 # a minute the first time, then from the user's cache directory
    model = decoder("whisper", small=True)

The exports of `models.exports` with a cache run single steps.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnx
from onnx import helper

from models import ZooError, exports
from models.exports import Input, Network, _cache, _cached, _export, _ids, _model, _whisper_model
from xrlflow.onnxio.protos import all_nodes, subgraphs

if TYPE_CHECKING:
    import torch

FLAG = "use_cache_branch"


def decoder(name: str, small: bool = False, seed: int = 0) -> onnx.ModelProto:
    """The decoder with random weights, from the cache or exported. Raises ZooError for an unknown name."""
    if name not in DECODERS:
        raise ZooError(f"no decoder is called {name!r}; there are: {', '.join(DECODERS)}")
    sources = b"".join(Path(file).read_bytes() for file in (__file__, exports.__file__))
    digest = hashlib.sha256(sources).hexdigest()[:12]
    path = exports.cache_folder() / f"decoder-{name}-{'small' if small else 'full'}-{seed}-{digest}.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        onnx.save(DECODERS[name](small, seed), part)
        os.replace(part, path)
    return onnx.load(path)


def _names(layers: int, *parts: str, prefix: str = "past_key_values") -> list[str]:
    """The caches as optimum names them: "past_key_values.0.decoder.key"."""
    return [
        f"{prefix}.{layer}{part}.{kind}"
        for part in parts
        for layer in range(layers)
        for kind in ("key", "value")
    ]


def _qwen3(small: bool, seed: int) -> onnx.ModelProto:
    """Qwen3's architecture: one graph for prompts and single tokens."""
    layers, heads, width, features = (1, 2, 16, 64) if small else (12, 4, 64, 512)
    vocabulary = 500 if small else 8000
    model = _model(
        "Qwen3ForCausalLM", "Qwen3Config", hidden_size=features, intermediate_size=3 * features,
        num_hidden_layers=layers, num_attention_heads=2 * heads, num_key_value_heads=heads, head_dim=width,
        vocab_size=vocabulary, tie_word_embeddings=True,
    )  # fmt: skip

    def call(model: Any, ids: torch.Tensor, *past: torch.Tensor) -> Any:
        result = model(input_ids=ids, past_key_values=_cache(past), use_cache=True)
        return result.logits, *_cached(result.past_key_values)

    caches = {n: Input((1, heads, 8, width), names=("batch", "", "past")) for n in _names(layers, "")}
    inputs = {"input_ids": _ids(vocabulary, 1, 4), **caches}
    network = Network(inputs, ("logits", *_names(layers, "", prefix="present")), model, call)
    return _export(network, seed, "dynamo", True)


def _whisper(small: bool, seed: int) -> onnx.ModelProto:
    """Whisper's decoder (tiny) in one file as optimum merges it: an If on `use_cache_branch` chooses between a graph
    for prompts, which reads the encoder's output, and one for a single token, which reads caches."""
    features, layers, heads, frames, vocabulary = (64, 1, 4, 50, 500) if small else (384, 4, 6, 1500, 51865)
    model = _whisper_model(small, features, layers, frames)
    own, cross = _names(layers, ".decoder"), _names(layers, ".encoder")
    present = [_names(layers, part, prefix="present") for part in (".decoder", ".encoder")]

    def prompt(model: Any, ids: torch.Tensor, encoded: torch.Tensor) -> Any:
        result = model(decoder_input_ids=ids, encoder_outputs=(encoded,), use_cache=True)
        caches = result.past_key_values
        return result.logits, *_cached(caches.self_attention_cache), *_cached(caches.cross_attention_cache)

    shape = (1, heads, frames, features // heads)
    step = Network(
        {
            "input_ids": _ids(vocabulary, 1, 1, names=("batch",)),
            **{name: Input((1, heads, 8, shape[-1]), names=("batch", "", "past_decoder")) for name in own},
            **{name: Input(shape, names=("batch",)) for name in cross},
        },
        ("logits", *present[0]), model, exports._step_with_encoder(features),
    )  # fmt: skip
    first = Network(
        {
            "input_ids": _ids(vocabulary, 1, 4),
            "encoder_hidden_states": Input((1, frames, features), names=("batch",)),
        },
        ("logits", *present[0], *present[1]), model, prompt,
    )  # fmt: skip
    with_cache, without = (_export(network, seed, "dynamo", True) for network in (step, first))
    return merged(with_cache, without, dict(zip(present[1], cross, strict=True)))


DECODERS: Mapping[str, Callable[[bool, int], onnx.ModelProto]] = MappingProxyType(
    {"qwen3": _qwen3, "whisper": _whisper}
)


def merged(
    with_cache: onnx.ModelProto, without: onnx.ModelProto, passed: Mapping[str, str]
) -> onnx.ModelProto:
    """One model with an If on FLAG: `with_cache` if it is true, else `without`. Equal weights are stored once, outside.

    It has the inputs of both, and the outputs of `without`. `passed`: an output that `with_cache` lacks, and its input
    that is this output.
    """
    outputs = [value.name for value in without.graph.output]
    weights: dict[str, onnx.TensorProto] = {}
    branches = [
        _branch(with_cache, "cached/", outputs, passed, weights),
        _branch(without, "prompt/", outputs, {}, weights),
    ]
    inputs = {value.name: value for model in (with_cache, without) for value in model.graph.input}
    flag = helper.make_tensor_value_info(FLAG, onnx.TensorProto.BOOL, [1])
    node = helper.make_node(
        "If", [FLAG], outputs, name="merged", then_branch=branches[0], else_branch=branches[1]
    )
    graph = helper.make_graph(
        [node], "decoder", [*inputs.values(), flag], list(without.graph.output), list(weights.values())
    )
    model = helper.make_model(graph, opset_imports=list(without.opset_import), ir_version=without.ir_version)
    for part in ("functions", "opset_import"):
        if list(getattr(with_cache, part)) != list(getattr(without, part)):
            raise ValueError(f"the two models differ in their {part}")
    model.functions.extend(without.functions)
    return model


def _branch(
    model: onnx.ModelProto,
    prefix: str,
    outputs: Sequence[str],
    passed: Mapping[str, str],
    weights: dict[str, onnx.TensorProto],
) -> onnx.GraphProto:
    """The graph of a model as a branch, with `prefix` before all names of its own. Its weights go into `weights`."""
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    names = {value.name: value.name for value in graph.input}
    for tensor in graph.initializer:
        named = onnx.TensorProto(
            data_type=tensor.data_type,
            dims=tensor.dims,
            raw_data=onnx.numpy_helper.to_array(tensor).tobytes(),
        )
        named.name = f"w.{hashlib.sha256(named.SerializeToString()).hexdigest()[:16]}"
        names[tensor.name] = named.name
        weights.setdefault(named.name, named)
    for node in all_nodes(graph):
        names |= {value: prefix + value for value in node.output if value}
        names |= {value.name: prefix + value.name for body in subgraphs(node) for value in body.input}
    for name in [name for name in outputs if name in passed]:
        graph.node.append(helper.make_node("Identity", [passed[name]], [name], name=f"pass {name}"))
        names[name] = prefix + name
    for node in all_nodes(graph):
        node.name = node.name and prefix + node.name
        node.input[:] = [names.get(value, value) for value in node.input]
        node.output[:] = [names.get(value, value) for value in node.output]
        for body in subgraphs(node):
            for value in (*body.input, *body.output):
                value.name = names[value.name]
    returned = {value.name: value for value in graph.output}
    given = {value.name: value for value in graph.input}
    found = []
    for name in outputs:
        value = onnx.ValueInfoProto()
        value.CopyFrom(returned[name] if name in returned else given[passed[name]])
        value.name = prefix + name
        found.append(value)
    for kept in (graph.initializer, graph.input, graph.output, graph.value_info):
        del kept[:]
    graph.output.extend(found)
    graph.name = prefix.rstrip("/")
    return graph

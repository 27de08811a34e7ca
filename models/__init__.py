"""The zoo of benchmark networks, for bench, training and tests.

    import models
    model = models.build("bert")                        # BERT-base, as measured in the papers
    model = models.build("bert", depth=100, width=64)   # many nodes, few weights
    model = models.small("bert")                        # a second to build, a few MB: for tests

Weights are random, with magnitudes that keep activations in range. They differ from layer to layer, because the runtime
would merge layers with equal weights. A seed fixes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import onnx

from models.attention import (
    bert,
    bert_classifier,
    dalle,
    gpt2,
    transformer_transducer,
    vit,
    vit_classifier,
)
from models.dense import unet, yolo
from models.inception import inceptionv3
from models.mobile import efficientnet_b0, mobilenetv2, squeezenet
from models.nasnet import nasnet_a
from models.recurrent import gru_unrolled, lstm_unrolled, nasrnn, nasrnn_shared
from models.resnet import resnet18, resnet50, resnext50

__all__ = ["ZOO", "Model", "ZooError", "build", "depth_for", "small"]


class ZooError(ValueError):
    """The zoo has no network of this name, or no such depth or option. The message lists the possible values."""


@dataclass(frozen=True, slots=True)
class Model:
    """One network of the zoo."""

    name: str
    builder: Callable[..., onnx.ModelProto]
    """`builder(depth, seed, **options)`."""
    depth: int
    """The number of repeated blocks (layers, cells, time steps) in the paper."""
    small_depth: int
    small_options: Mapping[str, int] = field(repr=False)
    """The options of a quick and small build."""
    description: str

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the keyword arguments of `build` for this network, such as width and fold_batchnorm."""
        return tuple(
            name
            for name, parameter in inspect.signature(self.builder).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        )


def _model(
    name: str,
    builder: Callable[..., onnx.ModelProto],
    depth: int,
    description: str,
    small_depth: int,
    **small_options: int,
) -> Model:
    return Model(name, builder, depth, small_depth, MappingProxyType(small_options), description)


ZOO: Mapping[str, Model] = MappingProxyType(
    {
        model.name: model
        for model in (
            _model("resnet18", resnet18, 8, "8 residual blocks, 224x224", 4, width=16, image=32),
            _model("resnet50", resnet50, 16, "16 bottlenecks, 224x224", 4, width=16, image=32),
            _model("resnext50", resnext50, 16, "16 bottlenecks of 32 groups, 224x224", 4, width=16, image=32),
            _model(
                "inceptionv3", inceptionv3, 9, "9 modules of parallel branches, 299x299", 3, width=4, image=75
            ),
            _model("squeezenet", squeezenet, 8, "1.1: 8 Fire modules, 224x224", 4, width=16, image=64),
            _model("mobilenetv2", mobilenetv2, 17, "17 inverted residuals, 224x224", 7, width=16, image=32),
            _model(
                "efficientnet-b0",
                efficientnet_b0,
                16,
                "16 MBConv blocks with squeeze-excite, 224x224",
                6,
                width=16,
                image=32,
            ),
            _model(
                "nasnet-a", nasnet_a, 15, "15 normal and 3 reduction cells, 224x224", 3, width=8, image=32
            ),
            _model(
                "unet",
                unet,
                2,
                "two levels of a diffusion UNet, attention between them",
                1,
                width=16,
                image=8,
            ),
            _model("yolo", yolo, 6, "a detector like YOLOv8n, 640x640", 4, width=8, image=64),
            _model("nasrnn", nasrnn, 5, "5 steps, own weights, 512 hidden", 2, width=32),
            _model("nasrnn-shared", nasrnn_shared, 10, "10 steps, shared weights, 512 hidden", 3, width=32),
            _model("lstm-unrolled", lstm_unrolled, 32, "LSTMCell over 32 steps, 512 hidden", 4, width=32),
            _model("gru-unrolled", gru_unrolled, 32, "GRUCell over 32 steps, 512 hidden", 4, width=32),
            _model("bert", bert, 12, "BERT-base, 128 tokens", 1, width=128, tokens=32),
            _model(
                "bert-classifier",
                bert_classifier,
                4,
                "4 layers of BERT-base, 128 tokens, a head that reads the first",
                1,
                width=128,
                tokens=32,
            ),
            _model("vit", vit, 12, "ViT-B/16, 224x224", 1, width=128, image=64),
            _model(
                "vit-classifier",
                vit_classifier,
                12,
                "ViT-B/16, a head that reads the class token",
                1,
                width=128,
                image=64,
            ),
            _model("gpt2", gpt2, 12, "GPT-2 124M, 64 tokens, no cache", 1, width=128, tokens=16),
            _model(
                "dalle",
                dalle,
                8,
                "decoder, 16 text and 64 image tokens, 768 features",
                1,
                width=128,
                image=16,
            ),
            _model(
                "transformer-transducer",
                transformer_transducer,
                12,
                "12 audio and 2 label layers over 80 frames, 512 features, joint network",
                1,
                width=128,
                frames=24,
                labels=6,
            ),
        )
    }
)


def _find(name: str) -> Model:
    try:
        return ZOO[name]
    except KeyError:
        raise ZooError(f"no network is called {name!r}; the zoo has: {', '.join(ZOO)}") from None


def build(name: str, depth: int | None = None, seed: int = 0, **options: int | bool) -> onnx.ModelProto:
    """Build a network at the depth and width of its paper, unless `depth` and `options` change them."""
    model = _find(name)
    depth = model.depth if depth is None else depth
    if depth < 1:
        raise ZooError(f"the depth of {name} is at least 1, not {depth} (the paper's is {model.depth})")
    if unknown := set(options) - set(model.options):
        raise ZooError(
            f"{name} has no option {', '.join(sorted(unknown))}; it has: {', '.join(model.options)}"
        )
    return model.builder(depth, seed, **options)


def small(name: str, seed: int = 0, **options: int | bool) -> onnx.ModelProto:
    """Build a small version of the network with few weights, for tests."""
    model = _find(name)
    return build(name, model.small_depth, seed, **{**model.small_options, **options})


def depth_for(name: str, nodes: int) -> int:
    """The depth at which the network has about `nodes` nodes."""
    model = _find(name)
    shallow, deep = model.small_depth, 9 * model.small_depth
    few, many = (len(build(name, depth, **model.small_options).graph.node) for depth in (shallow, deep))
    return max(1, shallow + round((nodes - few) * (deep - shallow) / (many - few)))

"""BERT, ViT and GPT-2 exported by PyTorch from their `transformers` classes.

The zoo's own builders imitate these exports; they are faster and do not need PyTorch. A test compares both, and the
bench measures real exports. `dynamo` gives clean graphs. `torchscript` (BERT and ViT) is the older exporter, which
leaves Constant nodes and computed shapes.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import onnx

import models
from models.builder import OPSET

if TYPE_CHECKING:
    import torch

EXPORTED = ("bert", "vit", "gpt2")


def export(
    name: str,
    depth: int | None = None,
    seed: int = 0,
    *,
    exporter: str = "dynamo",
    width: int = 768,
    tokens: int | None = None,
    image: int = 224,
) -> onnx.ModelProto:
    """Export the network with `depth` layers. It has the same inputs and outputs as that of `models.build`."""
    if name not in EXPORTED:
        raise models.ZooError(f"{name} is not exported from transformers; these are: {', '.join(EXPORTED)}")
    if name == "gpt2" and exporter == "torchscript":
        raise models.ZooError("the torchscript exporter cannot export gpt2 (its mask uses diff); take dynamo")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.manual_seed(seed)
    depth = models.ZOO[name].depth if depth is None else depth
    module, feeds, outputs = _modules()[name](depth, width, tokens, image)
    return to_onnx(module, feeds, (outputs,), exporter)


def to_onnx(
    module: torch.nn.Module,
    feeds: Mapping[str, torch.Tensor],
    outputs: Sequence[str],
    exporter: str,
    dimensions: Sequence[Mapping[int, str]] | None = None,
) -> onnx.ModelProto:
    """Export a module, whose inputs are positional, by "dynamo" or "torchscript".

    `dimensions`: the names of each input's open dimensions, by axis ("dynamo" only).
    """
    import torch

    module.eval()
    _perturb(module)
    names: dict[str, Any] = {"input_names": list(feeds), "output_names": list(outputs)}
    values = tuple(feeds.values())
    _normalise(module, values)
    with _quiet():
        if exporter == "dynamo":
            program = torch.onnx.export(
                module, values, dynamo=True, opset_version=OPSET, verbose=False,
                # A module with *values takes a tuple of one entry, for all of them.
                dynamic_shapes=None if dimensions is None else (tuple(map(dict, dimensions)),), **names,
            )  # fmt: skip
            assert program is not None
            return program.model_proto
        buffer: Any = io.BytesIO()  # the annotation of torch leaves streams out
        torch.onnx.export(module, values, buffer, dynamo=False, opset_version=17, **names)
        return onnx.load_model_from_string(buffer.getvalue())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' warnings about missing packages and about branches."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _perturb(module: torch.nn.Module) -> None:
    """Draw scales and biases that differ from layer to layer. After initialisation they are one and zero.

    In frozen batch normalisation the scales and biases are buffers.
    """
    import torch

    frozen = [value for name, value in module.named_buffers() if name.endswith(("weight", "bias"))]
    with torch.no_grad():
        for value in (*module.parameters(), *frozen):
            if value.dim() == 1:
                value.add_(torch.randn_like(value), alpha=0.05)


def _normalise(module: torch.nn.Module, values: tuple[torch.Tensor, ...]) -> None:
    """Give batch normalisation the means and variances of these inputs, as training would.

    With means of zero and variances of one the activations fade from layer to layer until only biases are left.
    """
    import torch

    layers = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    if not layers:
        return
    for layer in layers:
        layer.train()
        layer.momentum = 1.0
    with torch.no_grad():
        module(*values)
    for layer in layers:
        layer.eval()


def _modules() -> dict[str, Any]:
    """For each network a function that returns the module, its inputs and its output's name."""
    import torch
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, ViTConfig, ViTModel

    class First(torch.nn.Module):
        """A module that returns only the first output of a model."""

        def __init__(self, model: torch.nn.Module, *names: str) -> None:
            super().__init__()
            self.model = model
            self.names = names

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return self.model(**dict(zip(self.names, values, strict=True)), return_dict=False)[0]

    eager: dict[str, Any] = {"attn_implementation": "eager"}

    def wrap(model: torch.nn.Module, feeds: dict[str, torch.Tensor], output: str) -> tuple[Any, ...]:
        return First(model, *feeds), feeds, output

    def bert(depth: int, width: int, tokens: int | None, _: int) -> tuple[Any, ...]:
        config = BertConfig(
            num_hidden_layers=depth,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=max(1, width // 64),
            vocab_size=30522 * width // 768,
            **eager,
        )
        ids = torch.zeros(1, tokens or 128, dtype=torch.int64)
        feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return wrap(BertModel(config, add_pooling_layer=False), feeds, "last_hidden_state")

    def vit(depth: int, width: int, _: int | None, image: int) -> tuple[Any, ...]:
        config = ViTConfig(
            num_hidden_layers=depth,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=max(1, width // 64),
            image_size=image,
            **eager,
        )
        feeds = {"pixel_values": torch.zeros(1, 3, image, image)}
        return wrap(ViTModel(config, add_pooling_layer=False), feeds, "last_hidden_state")

    def gpt2(depth: int, width: int, tokens: int | None, _: int) -> tuple[Any, ...]:
        config = GPT2Config(
            n_layer=depth,
            n_embd=width,
            n_head=max(1, width // 64),
            vocab_size=50257 * width // 768,
            use_cache=False,
            **eager,
        )
        feeds = {"input_ids": torch.zeros(1, tokens or 64, dtype=torch.int64)}
        return wrap(GPT2LMHeadModel(config), feeds, "logits")

    return {"bert": bert, "vit": vit, "gpt2": gpt2}

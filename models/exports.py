"""Networks that are deployed today, exported by PyTorch from their `transformers` classes with random weights.

    from models.exports import EXPORTS, HELD_OUT, export, inputs
    model = export("llama-step")             # minutes the first time, then from the user's cache directory
    model = export("llama-step", small=True) # a few MB, a second or two: for tests
    feeds = inputs("llama-step", seed=0)     # valid random inputs

Nothing is downloaded. Attention is the default of `transformers`, PyTorch's scaled_dot_product_attention; only T5, Swin
and the Conformer have eager attention, because torch 2.13 cannot decompose scaled_dot_product_attention in them
("Cannot view a tensor with shape ... and strides ..."). The networks with a cache run one step of decoding: the caches
are inputs, and the caches with one more token are outputs.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray

from models import ZooError, exported
from models.wheels import Input

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Network:
    """A network at one size."""

    inputs: Mapping[str, Input]
    outputs: tuple[str, ...]
    model: Callable[[], Any]
    """Builds the PyTorch module. It imports torch, so it is called only where the cache has no export."""
    call: Callable[..., Any]
    """`call(model, *inputs)` gives the outputs."""


@dataclass(frozen=True, slots=True)
class Export:
    """A network that PyTorch exports."""

    name: str
    description: str
    """At full size."""
    network: Callable[[bool], Network] = field(repr=False)
    """Of the small size, if the argument is true."""


_TEXT = ("batch", "length")
_OPEN_BATCH = 2  # PyTorch makes a constant of a size 1, also where it is said to be open


def _ids(high: int, *shape: int, low: int = 0, names: tuple[str, ...] = _TEXT) -> Input:
    return Input(shape, low, high, np.int64, names)


def _caches(
    layers: int, heads: int, length: int, width: int, *kinds: str, name: str = "past"
) -> dict[str, Input]:
    """The inputs for cached keys and values of each layer, for each kind of cache (such as "cross_"). `name`: of their
    length, if it can be open."""
    names = ("batch", "", name)
    return {
        name: Input((1, heads, length, width), names=names)
        for kind in kinds
        for name in _cache_names(layers, f"past_{kind}")
    }


def _cache_names(layers: int, prefix: str) -> list[str]:
    return [f"{prefix}{part}_{layer}" for layer in range(layers) for part in ("key", "value")]


def _cache(values: tuple[torch.Tensor, ...]) -> Any:
    """A cache of `transformers` from a list of tensors: for each layer its keys, then its values."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (key, value) in enumerate(zip(values[::2], values[1::2], strict=True)):
        cache.update(key, value, layer)
    return cache


def _cached(cache: Any) -> list[torch.Tensor]:
    return [value for layer in cache.layers for value in (layer.keys, layer.values)]


def _model(model: str, config: str, **options: Any) -> Callable[[], Any]:
    """A function that builds a model of a class of `transformers` from its configuration."""

    def build() -> Any:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


def _llama_model(small: bool, layers: int) -> Callable[[], Any]:
    return _model(
        "LlamaForCausalLM",
        "LlamaConfig",
        hidden_size=64 if small else 768,
        intermediate_size=176 if small else 2048,
        num_hidden_layers=layers,
        num_attention_heads=4 if small else 12,
        num_key_value_heads=2 if small else 4,
        vocab_size=500 if small else 32000,
        tie_word_embeddings=True,
    )


def _llama(small: bool) -> Network:
    def call(model: Any, ids: torch.Tensor) -> Any:
        return model(input_ids=ids, use_cache=False).logits

    inputs = {"input_ids": _ids(500 if small else 32000, 1, 16 if small else 64)}
    return Network(inputs, ("logits",), _llama_model(small, 1 if small else 8), call)


def _llama_step(small: bool) -> Network:
    layers, heads, length, width = (1, 2, 16, 16) if small else (8, 4, 256, 64)

    def call(model: Any, ids: torch.Tensor, *past: torch.Tensor) -> Any:
        result = model(input_ids=ids, past_key_values=_cache(past), use_cache=True)
        return result.logits, *_cached(result.past_key_values)

    inputs = {
        "input_ids": _ids(500 if small else 32000, 1, 1, names=("batch",)),
        **_caches(layers, heads, length, width, ""),
    }
    outputs = ("logits", *_cache_names(layers, "present_"))
    return Network(inputs, outputs, _llama_model(small, layers), call)


def _whisper_model(small: bool, width: int, layers: int, frames: int) -> Callable[[], Any]:
    return _model(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=width // (16 if small else 64),
        decoder_attention_heads=width // (16 if small else 64),
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames,
        vocab_size=500 if small else 51865,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )


def _whisper_encoder(small: bool) -> Network:
    def call(model: Any, features: torch.Tensor) -> Any:
        return model.model.encoder(features).last_hidden_state

    width, layers, frames = (64, 1, 50) if small else (384, 4, 500)
    inputs = {"input_features": Input((1, 80, 2 * frames), names=("batch",))}
    return Network(inputs, ("last_hidden_state",), _whisper_model(small, width, layers, frames), call)


def _step_with_encoder(width: int) -> Callable[..., Any]:
    """The call of a decoder that attends to an encoder, whose output has `width` features."""

    def call(model: Any, ids: torch.Tensor, *past: torch.Tensor) -> Any:
        import torch
        from transformers import EncoderDecoderCache

        own, cross = past[: len(past) // 2], past[len(past) // 2 :]
        result = model(
            decoder_input_ids=ids,
            # The call demands this argument, and does not use it, since the encoder's keys and values are in the cache.
            encoder_outputs=(torch.zeros(len(ids), cross[0].shape[2], width),),
            past_key_values=EncoderDecoderCache(_cache(own), _cache(cross)),
            use_cache=True,
        )
        return result.logits, *_cached(result.past_key_values.self_attention_cache)

    return call


def _whisper_step(small: bool) -> Network:
    width, layers, heads, length, frames = (64, 1, 4, 8, 50) if small else (512, 6, 8, 64, 1500)
    model = _whisper_model(small, width, layers, frames)

    inputs = {
        "input_ids": _ids(500 if small else 51865, 1, 1, names=("batch",)),
        **_caches(layers, heads, length, width // heads, ""),
        **_caches(layers, heads, frames, width // heads, "cross_", name=""),
    }
    outputs = ("logits", *_cache_names(layers, "present_"))
    return Network(inputs, outputs, model, _step_with_encoder(width))


def _t5_model(small: bool) -> Callable[[], Any]:
    return _model(
        "T5ForConditionalGeneration",
        "T5Config",
        d_model=64 if small else 512,
        d_kv=16 if small else 64,
        d_ff=128 if small else 2048,
        num_layers=1 if small else 6,
        num_heads=4 if small else 8,
        vocab_size=500 if small else 32128,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )


def _t5_encoder(small: bool) -> Network:
    def call(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state

    shape = (1, 16 if small else 128)
    inputs = {
        "input_ids": _ids(500 if small else 32128, *shape),
        "attention_mask": _ids(2, *shape, low=1),
    }
    return Network(inputs, ("last_hidden_state",), _t5_model(small), call)


def _t5_step(small: bool) -> Network:
    width, layers, heads, own, length, tokens = (64, 1, 4, 16, 8, 16) if small else (512, 6, 8, 64, 32, 128)

    inputs = {
        "input_ids": _ids(500 if small else 32128, 1, 1, names=("batch",)),
        **_caches(layers, heads, length, own, ""),
        **_caches(layers, heads, tokens, own, "cross_", name="encoded"),
    }
    outputs = ("logits", *_cache_names(layers, "present_"))
    return Network(inputs, outputs, _t5_model(small), _step_with_encoder(width))


def _deberta(small: bool) -> Network:
    vocabulary = 500 if small else 32000

    model = _model(
        "DebertaV2Model",
        "DebertaV2Config",
        hidden_size=64 if small else 384,
        intermediate_size=256 if small else 1536,
        num_hidden_layers=1 if small else 12,
        num_attention_heads=4 if small else 6,
        vocab_size=vocabulary,
        relative_attention=True,
        position_buckets=32 if small else 256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
    )

    def call(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return model(input_ids=ids, attention_mask=mask).last_hidden_state

    shape = (1, 16 if small else 128)
    inputs = {"input_ids": _ids(vocabulary, *shape), "attention_mask": _ids(2, *shape, low=1)}
    return Network(inputs, ("last_hidden_state",), model, call)


def _clip_text(small: bool) -> Network:
    vocabulary, tokens = (500, 16) if small else (49408, 77)

    model = _model(
        "CLIPTextModelWithProjection",
        "CLIPTextConfig",
        hidden_size=64 if small else 512,
        intermediate_size=256 if small else 2048,
        projection_dim=64 if small else 512,
        num_hidden_layers=1 if small else 12,
        num_attention_heads=4 if small else 8,
        vocab_size=vocabulary,
        max_position_embeddings=tokens,
        eos_token_id=2,  # as in the published checkpoints: the token with the highest number ends the text
    )

    def call(model: Any, ids: torch.Tensor) -> Any:
        return model(input_ids=ids).text_embeds

    return Network({"input_ids": _ids(vocabulary, 1, tokens)}, ("text_embeds",), model, call)


def _pixels(small: bool, image: int, *names: str) -> dict[str, Input]:
    """An image. `names`: of its height and width, if the network accepts all sizes."""
    size = 64 if small else image
    return {"pixel_values": Input((1, 3, size, size), names=("batch", "", *names))}


def _clip_vision(small: bool) -> Network:
    model = _model(
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        hidden_size=64 if small else 768,
        intermediate_size=256 if small else 3072,
        projection_dim=64 if small else 512,
        num_hidden_layers=1 if small else 12,
        num_attention_heads=4 if small else 12,
        image_size=64 if small else 224,
        patch_size=16 if small else 32,
    )

    def call(model: Any, pixels: torch.Tensor) -> Any:
        return model(pixel_values=pixels).image_embeds

    return Network(_pixels(small, 224), ("image_embeds",), model, call)


def _logits(model: Any, values: torch.Tensor) -> Any:
    return model(values).logits


def _swin(small: bool) -> Network:
    model = _model(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=64 if small else 224,
        embed_dim=16 if small else 96,
        depths=[2, 2] if small else [2, 2, 6, 2],
        num_heads=[2, 4] if small else [3, 6, 12, 24],
        window_size=4 if small else 7,
        attn_implementation="eager",
        num_labels=10 if small else 1000,
    )

    return Network(_pixels(small, 224), ("logits",), model, _logits)


def _convnext(small: bool) -> Network:
    model = _model(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        image_size=64 if small else 224,
        hidden_sizes=[8, 16, 32, 64] if small else [96, 192, 384, 768],
        depths=[1, 1, 2, 1] if small else [3, 3, 9, 3],
        num_labels=10 if small else 1000,
    )

    return Network(_pixels(small, 224, "height", "width"), ("logits",), model, _logits)


def _segformer(small: bool) -> Network:
    sizes: dict[str, Any] = {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [4, 2],
        "hidden_sizes": [16, 32],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [4, 4],
        "decoder_hidden_size": 32,
    }
    model = _model(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        num_labels=10 if small else 150,
        **(sizes if small else {}),
    )
    return Network(_pixels(small, 256, "height", "width"), ("logits",), model, _logits)


def _mobilevit(small: bool) -> Network:
    model = _model(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        image_size=64 if small else 256,
        hidden_sizes=[16, 24, 32] if small else [144, 192, 240],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64] if small else [16, 32, 64, 96, 128, 160, 640],
        initializer_range=0.1,  # at its own 0.02 the image would hardly matter
        num_labels=10 if small else 1000,
    )

    return Network(_pixels(small, 256), ("logits",), model, _logits)


def _detr(small: bool) -> Network:
    backbone: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32, 48, 64], "depths": [1] * 4}
    sizes: dict[str, Any] = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "num_queries": 10,
    }
    model = _model(
        "DetrForObjectDetection",
        "DetrConfig",
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config={"model_type": "resnet", "out_features": ["stage4"], **(backbone if small else {})},
        num_labels=91,
        init_std=0.18 if small else 0.06,  # at its own 0.02 the image would hardly matter
        **(sizes if small else {}),
    )

    def call(model: Any, pixels: torch.Tensor, mask: torch.Tensor) -> Any:
        result = model(pixel_values=pixels, pixel_mask=mask)
        return result.logits, result.pred_boxes

    pixels = _pixels(small, 256, "height", "width")
    mask = _ids(2, 1, *pixels["pixel_values"].shape[2:], low=1, names=("batch", "height", "width"))
    return Network({**pixels, "pixel_mask": mask}, ("logits", "pred_boxes"), model, call)


_SPEECH: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "conv_dim": (32,) * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
"""Of the small speech networks."""


def _samples(small: bool) -> dict[str, Input]:
    return {"input_values": Input((1, 3200 if small else 16000), names=("batch", "samples"))}


def _wav2vec2(small: bool) -> Network:
    model = _model("Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=32, **(_SPEECH if small else {}))
    return Network(
        {"input_values": Input((1, 3200 if small else 16000), names=("batch", "samples"))},
        ("logits",),
        model,
        _logits,
    )


def _conformer(small: bool) -> Network:
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
    }
    model = _model(
        "Wav2Vec2ConformerForCTC",
        "Wav2Vec2ConformerConfig",
        vocab_size=32,
        position_embeddings_type="relative",
        attn_implementation="eager",
        **(_SPEECH if small else sizes),
    )
    return Network(
        {"input_values": Input((1, 3200 if small else 16000), names=("batch", "samples"))},
        ("logits",),
        model,
        _logits,
    )


def _mamba(small: bool) -> Network:
    vocabulary, tokens = (500, 4) if small else (50280, 16)

    model = _model(
        "MambaForCausalLM",
        "MambaConfig",
        hidden_size=32 if small else 768,
        num_hidden_layers=2 if small else 8,
        state_size=8 if small else 16,
        vocab_size=vocabulary,
    )

    def call(model: Any, ids: torch.Tensor) -> Any:
        return model(input_ids=ids, use_cache=False).logits

    return Network({"input_ids": _ids(vocabulary, 1, tokens, names=("batch",))}, ("logits",), model, call)


def _lstm_acoustic(small: bool) -> Network:
    width, layers, frames, labels = (32, 2, 10, 20) if small else (512, 3, 100, 5000)

    def model() -> Any:
        import torch

        lstm = torch.nn.LSTM(80, width, layers, batch_first=True, bidirectional=True)
        return torch.nn.ModuleList([lstm, torch.nn.LayerNorm(2 * width), torch.nn.Linear(2 * width, labels)])

    def call(model: Any, frames: torch.Tensor) -> Any:
        lstm, norm, head = model
        return head(norm(lstm(frames)[0])).log_softmax(-1)

    return Network(
        {"frames": Input((1, frames, 80), names=("batch", "frames"))}, ("log_probabilities",), model, call
    )


EXPORTS: Mapping[str, Export] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Export("llama", "8 layers, 768 features, grouped queries, 64 tokens", _llama),
            Export("llama-step", "the same, one token after 256 cached ones", _llama_step),
            Export("whisper-encoder", "Whisper-tiny, 10 s", _whisper_encoder),
            Export("whisper-step", "Whisper-base, 30 s, one token after 64 cached ones", _whisper_step),
            Export("t5-encoder", "T5-small, 128 tokens", _t5_encoder),
            Export("t5-step", "T5-small, one token after 32 cached ones", _t5_step),
            Export("deberta", "DeBERTa-v3-xsmall with 32,000 tokens, 128 of them", _deberta),
            Export("clip-text", "CLIP ViT-B/32, 77 tokens", _clip_text),
            Export("clip-vision", "CLIP ViT-B/32, 224x224", _clip_vision),
            Export("swin", "Swin-T, 224x224", _swin),
            Export("convnext", "ConvNeXt-T, 224x224", _convnext),
            Export("segformer", "SegFormer-B0, 256x256", _segformer),
            Export("mobilevit", "MobileViT-S, 256x256", _mobilevit),
            Export("detr", "DETR-R50, 256x256", _detr),
            Export("wav2vec2", "wav2vec 2.0 base, 1 s", _wav2vec2),
            Export("conformer", "Wav2Vec2-Conformer, 6 layers of 512 features, 1 s", _conformer),
            Export("mamba", "8 layers of Mamba-130m, 16 tokens, the scan unrolled", _mamba),
            Export("lstm-acoustic", "3 bidirectional LSTMs of 512 features, 100 frames", _lstm_acoustic),
        )
    }
)

HELD_OUT = frozenset(
    {
        "conformer",
        "detr",
        "mamba",
        "segformer",
        "swin",
        "t5-encoder",
        "t5-step",
        "whisper-encoder",
        "whisper-step",
    }
)
"""Never used for training, so that tests of trained models see architectures that are new to them."""


def find(name: str) -> Export:
    """The network called `name`, of EXPORTS or of `models.unseen`."""
    from models.unseen import UNSEEN  # it is declared with what this module offers

    networks = {**EXPORTS, **UNSEEN}
    if name not in networks:
        raise ZooError(f"no export is called {name!r}; there are: {', '.join(networks)}")
    return networks[name]


def inputs(
    name: str, small: bool = False, seed: int = 0, sizes: Mapping[str, int] | None = None
) -> dict[str, NDArray[np.generic]]:
    """Random inputs that the network accepts, by name. `sizes`: of open dimensions, for the open form."""
    return _inputs(find(name).network(small), seed, sizes or {})


def _inputs(network: Network, seed: int, sizes: Mapping[str, int]) -> dict[str, NDArray[np.generic]]:
    rng = np.random.default_rng(seed)
    return {key: entry.sized(sizes).draw(rng) for key, entry in network.inputs.items()}


def cache_folder() -> Path:
    """The folder of the exported models."""
    import platformdirs

    return platformdirs.user_cache_path("xrlflow") / "exports"


def cached(
    name: str, small: bool = False, seed: int = 0, exporter: str = "dynamo", open: bool = False
) -> Path:
    """The path of the exported model in the cache, whether it exists or not.

    The path depends on the versions of the exporting packages, and on the code of the modules that declare networks.
    """
    size = f"{'small' if small else 'full'}{'-open' if open else ''}"
    versions = [f"{package}{version(package)}" for package in ("torch", "transformers", "onnxscript")]
    files = [
        __file__,
        exported.__file__,
        *([] if name in EXPORTS else [str(Path(__file__).with_name("unseen.py"))]),
    ]
    sources = b"".join(Path(file).read_bytes() for file in files)
    declared = hashlib.sha256(sources).hexdigest()[:12]
    return cache_folder() / "-".join(
        (find(name).name, size, str(seed), exporter, *versions, f"{declared}.onnx")
    )


def export(
    name: str, small: bool = False, seed: int = 0, exporter: str = "dynamo", open: bool = False
) -> onnx.ModelProto:
    """The network with random weights, from the cache or exported by "dynamo" or "torchscript".

    `open`: with the open dimensions that `Input.names` names, by "dynamo" only.
    """
    if open and exporter != "dynamo":
        raise ZooError(f"open dimensions are exported by dynamo, not by {exporter}")
    if exporter not in ("dynamo", "torchscript"):
        raise ZooError(f'the exporter is "dynamo" or "torchscript", not {exporter!r}')
    path = cached(name, small, seed, exporter, open)
    if path.exists():
        return onnx.load(path)
    model = _export(find(name).network(small), seed, exporter, open)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        part.write(model.SerializeToString())
    os.replace(part.name, path)
    return model


def _export(network: Network, seed: int, exporter: str, open: bool) -> onnx.ModelProto:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    class Module(torch.nn.Module):
        """A module that calls the network with positional inputs."""

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: torch.Tensor) -> Any:
            return network.call(self.model, *values)

    torch.manual_seed(seed)
    feeds = _inputs(network, 0, {"batch": _OPEN_BATCH} if open else {})
    tensors = {key: torch.from_numpy(value) for key, value in feeds.items()}
    dimensions = tuple(_open_axes(entry) for entry in network.inputs.values()) if open else None
    return exported.to_onnx(Module(network.model()), tensors, network.outputs, exporter, dimensions)


def _open_axes(entry: Input) -> dict[int, str]:
    return {axis: name for axis, name in enumerate(entry.names) if name}

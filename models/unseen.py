"""Networks that no agent was trained on and no rule was written for until they were measured: see `models.exports`.

from models.exports import export
model = export("qwen3-step", open=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from models.exports import Export, Network, _cache, _cache_names, _cached, _caches, _ids, _model

if TYPE_CHECKING:
    import torch


def _qwen3_step(small: bool) -> Network:
    layers, heads, length, width = (1, 2, 16, 16) if small else (12, 4, 256, 64)
    vocabulary = 500 if small else 8000
    model = _model(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        hidden_size=64 if small else 512,
        intermediate_size=176 if small else 1536,
        num_hidden_layers=layers,
        num_attention_heads=2 * heads,
        num_key_value_heads=heads,
        head_dim=width,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )

    def call(model: Any, ids: torch.Tensor, *past: torch.Tensor) -> Any:
        result = model(input_ids=ids, past_key_values=_cache(past), use_cache=True)
        return result.logits, *_cached(result.past_key_values)

    inputs = {
        "input_ids": _ids(vocabulary, 1, 1, names=("batch",)),
        **_caches(layers, heads, length, width, ""),
    }
    return Network(inputs, ("logits", *_cache_names(layers, "present_")), model, call)


def _text(
    model: str, config: str, vocabulary: int, small: bool, masked: bool = True, **options: Any
) -> Network:
    """An encoder of text."""

    def call(model: Any, ids: torch.Tensor, *mask: torch.Tensor) -> Any:
        return model(input_ids=ids, **({"attention_mask": mask[0]} if mask else {})).last_hidden_state

    shape = (1, 16 if small else 128)
    vocabulary = 500 if small else vocabulary
    inputs = {"input_ids": _ids(vocabulary, *shape)}
    if masked:
        inputs["attention_mask"] = _ids(2, *shape, low=1)
    return Network(
        inputs, ("last_hidden_state",), _model(model, config, vocab_size=vocabulary, **options), call
    )


def _sizes(small: bool, layers: int, width: int, inner: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": 1 if small else layers,
        "hidden_size": 64 if small else width,
        "intermediate_size": 128 if small else inner,
        **({"num_attention_heads": 4 if small else heads} if heads else {}),
    }


def _minilm(small: bool) -> Network:
    return _text("BertModel", "BertConfig", 30522, small, **_sizes(small, 6, 384, 1536, 12))


def _modernbert(small: bool) -> Network:
    tokens = {f"{name}_token_id": number for number, name in enumerate(("pad", "eos", "bos", "cls", "sep"))}
    sizes = _sizes(small, 8, 384, 576, 6)
    return _text("ModernBertModel", "ModernBertConfig", 8000, small, **sizes, **tokens)


def _fnet(small: bool) -> Network:
    return _text("FNetModel", "FNetConfig", 8000, small, False, **_sizes(small, 6, 384, 1536, 0))


UNSEEN: Mapping[str, Export] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Export("qwen3-step", "12 layers, 512 features, one token after 256 cached ones", _qwen3_step),
            Export("minilm", "6 layers of 384 features, 128 tokens", _minilm),
            Export("modernbert", "8 layers of 384 features, 128 tokens", _modernbert),
            Export("fnet", "6 layers of 384 features, 128 tokens", _fnet),
        )
    }
)

"""Transformers: BERT, ViT, GPT-2, DALL-E's decoder and the Transformer Transducer.

BERT, ViT and GPT-2 have the dimensions of their configurations in `transformers`, and the nodes that PyTorch's exporter
writes at opset 18 with eager attention. `models.exported` exports the originals; a test compares both.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto

from models.builder import Net

_MASKED = float(np.finfo(np.float32).min)
_HEAD = 64  # channels of an attention head, in all of these networks


def _heads(net: Net, x: str, *perm: int) -> str:
    """x[1,s,k] -> [1,h,s,64]; another `perm` changes the order of the dimensions."""
    return net.transpose(net.reshape(x, 1, net.shape(x)[1], -1, min(_HEAD, net.shape(x)[2])), *perm)


def _attend(net: Net, q: str, k: str, v: str, mask: str | None) -> str:
    """q[1,s,k], k and v[1,t,k] -> [1,h,s,64]: eager attention; the mask is added to the scores."""
    head = min(_HEAD, net.shape(q)[2])
    query, value = _heads(net, q, 0, 2, 1, 3), _heads(net, v, 0, 2, 1, 3)
    scores = net.mul(net.node("MatMul", query, _heads(net, k, 0, 2, 3, 1)), net.scalar(head**-0.5))
    if mask is not None:
        scores = net.add(scores, mask)
    return net.node("MatMul", net.softmax(scores), value)


def _attention(net: Net, x: str, mask: str | None) -> str:
    """x[1,s,k] -> [1,s,k]: self-attention by four linear layers."""
    _, length, features = net.shape(x)

    def projected(name: str) -> str:
        with net.scope(name):
            return net.linear(x, features)

    y = _attend(net, projected("query"), projected("key"), projected("value"), mask)
    y = net.transpose(y, 0, 2, 1, 3)
    with net.scope("output"):
        return net.linear(net.reshape(y, 1, length, -1), features)


def _mlp(net: Net, x: str, hidden: int, *, activation: str = "gelu") -> str:
    """x[1,s,k] -> [1,s,k] through a hidden layer of `hidden` features."""
    features = net.shape(x)[-1]
    with net.scope("fc1"):
        y = net.linear(x, hidden, gain=1.4)
    y = {"gelu": net.gelu, "relu": net.relu}[activation](y)
    with net.scope("fc2"):
        return net.linear(y, features)


def _norm(net: Net, x: str, epsilon: float, name: str = "layernorm") -> str:
    with net.scope(name):
        return net.layer_norm(x, epsilon)


def _pre_norm_layer(
    net: Net, x: str, hidden: int, *, mask: str | None, epsilon: float, activation: str = "gelu"
) -> str:
    """x[1,s,k] -> [1,s,k]: a transformer layer with LayerNormalization before attention and before the MLP."""
    with net.scope("attention"):
        x = net.add(_attention(net, _norm(net, x, epsilon), mask), x)
    with net.scope("mlp"):
        return net.add(_mlp(net, _norm(net, x, epsilon), hidden, activation=activation), x)


def _table(net: Net, name: str, rows: int, features: int, std: float = 0.5) -> str:
    """The table of an embedding."""
    return net.weight(name, net.normal((rows, features), std))


def _causal_mask(net: Net, length: int) -> str:
    """[1,1,length,length], added to scores: position i attends to positions up to i."""
    mask = np.triu(np.full((1, 1, length, length), _MASKED, np.float32), 1)
    return net.weight("causal_mask", mask)


def _windowed_mask(net: Net, length: int, left: int, right: int) -> str:
    """[1,1,length,length], added to scores: position i attends to positions from i - left to i + right."""
    offset = np.arange(length)[None, :] - np.arange(length)[:, None]
    mask = np.where((offset >= -left) & (offset <= right), 0, _MASKED).astype(np.float32)
    return net.weight("window_mask", mask[None, None])


def _bert(net: Net, depth: int, width: int, tokens: int, vocabulary: int | None) -> str:
    """The encoder: its last hidden state."""
    vocabulary = vocabulary or 30522 * width // 768
    ids = net.input("input_ids", (1, tokens), TensorProto.INT64)
    padding = net.input("attention_mask", (1, tokens), TensorProto.INT64)
    with net.scope("embeddings"):
        positions = net.weight("position_ids", np.arange(tokens)[None])
        segments = net.weight("token_type_ids", np.zeros((1, 512), np.int64))
        words = net.node("Gather", _table(net, "words", vocabulary, width), ids, axis=0)
        segment = net.node("GatherElements", segments, positions, axis=1)
        types = net.node("Gather", _table(net, "token_types", 2, width), segment, axis=0)
        position = net.node("Gather", _table(net, "positions", 512, width), positions, axis=0)
        x = _norm(net, net.add(net.add(words, types), position), 1e-12)
    with net.scope("mask"):
        index = np.stack([np.zeros(tokens, np.int64), np.arange(tokens)], -1).reshape(1, 1, 1, tokens, 2)
        visible = net.node(
            "GatherND", net.node("Cast", padding, to=TensorProto.BOOL), net.weight("index", index)
        )
        visible = net.node("And", net.weight("square", np.ones((1, 1, tokens, 1), np.bool_)), visible)
        mask = net.node("Where", visible, net.scalar(0), net.scalar(_MASKED))
    for layer in range(depth):
        with net.scope("layer", layer):
            with net.scope("attention"):
                x = _norm(net, net.add(_attention(net, x, mask), x), 1e-12)
            with net.scope("mlp"):
                x = _norm(net, net.add(_mlp(net, x, 4 * width), x), 1e-12)
    return x


def bert(
    depth: int, seed: int, *, width: int = 768, tokens: int = 128, vocabulary: int | None = None
) -> onnx.ModelProto:
    """BERT-base (Devlin et al., 2018): input_ids[1,128], attention_mask[1,128] -> last_hidden_state[1,128,768].

    A smaller width has a vocabulary that is smaller in proportion.
    """
    net = Net("bert", seed)
    net.output(_bert(net, depth, width, tokens, vocabulary), "last_hidden_state")
    return net.model()


def bert_classifier(
    depth: int,
    seed: int,
    *,
    width: int = 768,
    tokens: int = 128,
    vocabulary: int | None = None,
    classes: int = 2,
) -> onnx.ModelProto:
    """BERT with the head of BertForSequenceClassification, which reads the first token: -> logits[1,2]."""
    net = Net("bert-classifier", seed)
    x = _first(net, _bert(net, depth, width, tokens, vocabulary))
    with net.scope("pooler"):
        x = net.tanh(net.gemm(x, width))
    with net.scope("classifier"):
        net.output(net.gemm(x, classes), "logits")
    return net.model()


def _first(net: Net, x: str) -> str:
    """x[1,s,k] -> [1,k]: the first position, as the exporter writes `x[:, 0]`."""
    return net.node("Gather", x, net.literal(0, np.int64), axis=1)


def _vit(net: Net, depth: int, width: int, image: int, patch: int) -> str:
    """The encoder: its last hidden state."""
    patches = (image // patch) ** 2
    pixels = net.input("pixel_values", (1, 3, image, image))
    with net.scope("embeddings"):
        x = net.conv(pixels, width, patch, stride=patch, padding=0)
        x = net.transpose(net.reshape(x, 1, width, patches), 0, 2, 1)
        x = net.concat(net.weight("cls_token", net.normal((1, 1, width), 0.5)), x)
        x = net.add(x, net.weight("positions", net.normal((1, patches + 1, width), 0.5)))
    with net.scope("mask"):  # no patch is masked, but the exporter writes the Where nevertheless
        visible = net.weight("square", np.ones((1, 1, patches + 1, patches + 1), np.bool_))
        mask = net.node("Where", visible, net.scalar(0), net.scalar(_MASKED))
    for layer in range(depth):
        with net.scope("layer", layer):
            x = _pre_norm_layer(net, x, 4 * width, mask=mask, epsilon=1e-12)
    return _norm(net, x, 1e-12)


def vit(depth: int, seed: int, *, width: int = 768, image: int = 224, patch: int = 16) -> onnx.ModelProto:
    """ViT-B/16 (Dosovitskiy et al., 2020): pixel_values[1,3,224,224] -> last_hidden_state[1,197,768]."""
    net = Net("vit", seed)
    net.output(_vit(net, depth, width, image, patch), "last_hidden_state")
    return net.model()


def vit_classifier(
    depth: int, seed: int, *, width: int = 768, image: int = 224, patch: int = 16, classes: int = 1000
) -> onnx.ModelProto:
    """ViT with the head of ViTForImageClassification, which reads the class token: -> logits[1,1000]."""
    net = Net("vit-classifier", seed)
    x = _first(net, _vit(net, depth, width, image, patch))
    with net.scope("classifier"):
        net.output(net.gemm(x, classes), "logits")
    return net.model()


def gpt2(
    depth: int,
    seed: int,
    *,
    width: int = 768,
    tokens: int = 64,
    vocabulary: int | None = None,
    last: bool = False,
) -> onnx.ModelProto:
    """GPT-2 124M (Radford et al., 2019) without a cache: input_ids[1,64] -> logits[1,64,50257].

    With `last`, the output is only the logits of the last token, [1,1,50257], as generation needs them.

    Its linear layers are `Conv1D` modules, exported as Gemm between two Reshapes. The table of the embedding is also
    the weight of the last layer. A smaller width has a vocabulary that is smaller in proportion.
    """
    net = Net("gpt2", seed)
    vocabulary = vocabulary or 50257 * width // 768

    def conv1d(x: str, features: int, *, gain: float = 1.0, flat: bool = False) -> str:
        """x[1,s,k] ([s,k] if flat) -> [1,s,features]."""
        fan_in = net.shape(x)[-1]
        weight = net.weight("weight", net.normal((fan_in, features), gain / math.sqrt(fan_in)))
        bias = net.weight("bias", net.normal((features,), 0.05))
        rows = x if flat else net.reshape(x, -1, fan_in)
        y = net.node("Gemm", rows, weight, bias, alpha=1.0, beta=1.0, transA=0, transB=0)
        return net.reshape(y, 1, tokens, features)

    def layer(x: str) -> str:
        with net.scope("attention"):
            with net.scope("c_attn"):
                qkv = conv1d(_norm(net, x, 1e-5), 3 * width)
            q, k, v = net.split(qkv, 3, axis=2)
            y = _attend(net, q, k, v, causal)
            with net.scope("c_proj"):
                y = conv1d(net.reshape(net.transpose(y, 0, 2, 1, 3), tokens, width), width, flat=True)
            x = net.add(y, x)
        with net.scope("mlp"):
            with net.scope("c_fc"):
                y = net.gelu_tanh(conv1d(_norm(net, x, 1e-5), 4 * width, gain=1.4))
            with net.scope("c_proj"):
                return net.add(x, conv1d(y, width))

    ids = net.input("input_ids", (1, tokens), TensorProto.INT64)
    with net.scope("embeddings"):
        causal = _causal_mask(net, tokens)
        words = _table(net, "words", vocabulary, width, 0.05)
        table = _table(net, "positions", 1024, width, 0.05)
        positions = net.weight("position_ids", np.arange(tokens)[None])
        x = net.node("Gather", words, net.reshape(ids, -1, tokens), axis=0)
        x = net.add(x, net.node("Gather", table, positions, axis=0))
    for i in range(depth):
        with net.scope("layer", i):
            x = layer(x)
    x = net.reshape(_norm(net, x, 1e-5), -1, tokens, width)
    if last:
        x = _last(net, x)
    net.output(net.node("MatMul", x, net.transpose(words, 1, 0)), "logits")
    return net.model()


def _last(net: Net, x: str) -> str:
    """x[1,s,k] -> [1,1,k]: the last position, as the exporter writes `x[:, -1:]`."""
    return net.node("Slice", x, net.ints(-1), net.ints(np.iinfo(np.int64).max), net.ints(1), net.ints(1))


def dalle(
    depth: int, seed: int, *, width: int = 768, text: int = 16, image: int = 64, last: bool = False
) -> onnx.ModelProto:
    """DALL-E's decoder (Ramesh et al., 2021): text[1,16], image[1,64] token ids -> logits[1,80,18192].

    The size is X-RLflow's: 16 text tokens, 768 features, 8 layers. One causal transformer reads the text tokens and
    then the image tokens. As in the open PyTorch implementation, one linear layer without bias gives query, key and
    value, the MLP has a gated Gelu, and every residual branch a learned scale. A smaller width has smaller
    vocabularies. With `last`, the output is only the logits of the last token.
    """
    net = Net("dalle", seed)
    tokens = text + image
    vocabularies = {"text": 10000 * width // 768, "image": 8192 * width // 768}

    def embed(kind: str, ids: str, length: int) -> str:
        with net.scope(kind):
            words = net.node("Gather", _table(net, "words", vocabularies[kind], width), ids, axis=0)
            return net.add(words, net.weight("positions", net.normal((1, length, width), 0.5)))

    def scaled(y: str) -> str:
        return net.mul(y, net.weight("layer_scale", net.uniform((1, 1, width), 0.05, 0.15)))

    def layer(x: str) -> str:
        with net.scope("attention"):
            q, k, v = net.split(net.project(_norm(net, x, 1e-5), 3 * width), 3, axis=2)
            y = net.reshape(net.transpose(_attend(net, q, k, v, causal), 0, 2, 1, 3), 1, tokens, -1)
            x = net.add(scaled(net.linear(y, width)), x)
        with net.scope("mlp"):
            with net.scope("fc1"):
                value, gate = net.split(net.linear(_norm(net, x, 1e-5), 8 * width), 2, axis=2)
            with net.scope("fc2"):
                y = net.linear(net.mul(value, net.gelu(gate)), width)
            return net.add(scaled(y), x)

    text_ids = net.input("text", (1, text), TensorProto.INT64)
    image_ids = net.input("image", (1, image), TensorProto.INT64)
    causal = _causal_mask(net, tokens)
    x = net.concat(embed("text", text_ids, text), embed("image", image_ids, image))
    for i in range(depth):
        with net.scope("layer", i):
            x = layer(x)
    x = _norm(net, x, 1e-5)
    if last:
        x = _last(net, x)
    with net.scope("to_logits"):
        net.output(net.linear(x, sum(vocabularies.values())), "logits")
    return net.model()


def transformer_transducer(
    depth: int,
    seed: int,
    *,
    width: int = 512,
    frames: int = 80,
    labels: int = 20,
    vocabulary: int = 128,
) -> onnx.ModelProto:
    """Transformer Transducer (Zhang et al., 2020): audio[1,80,512], labels[1,20] -> logits[1,80,20,128].

    `depth` audio encoder layers (12) that attend to ten frames back and two ahead, a label encoder of a sixth as many
    causal layers (2), and a joint network that adds every frame to every label. Positions are added, not relative.
    """
    net = Net("transformer-transducer", seed)

    def encoder(name: str, x: str, layers: int, mask: str) -> str:
        with net.scope(name):
            x = net.add(x, net.weight("positions", net.normal((1, net.shape(x)[1], width), 0.3)))
            for i in range(layers):
                with net.scope("layer", i):
                    x = _pre_norm_layer(net, x, 4 * width, mask=mask, epsilon=1e-5, activation="relu")
            return _norm(net, x, 1e-5)

    audio = net.input("audio", (1, frames, width))
    ids = net.input("labels", (1, labels), TensorProto.INT64)
    with net.scope("audio_in"):
        audio = net.linear(audio, width)
    audio = encoder("audio", audio, depth, _windowed_mask(net, frames, 10, 2))
    words = net.node("Gather", _table(net, "words", vocabulary, width), ids, axis=0)
    label = encoder("label", words, max(1, depth // 6), _causal_mask(net, labels))
    with net.scope("joint"):
        frame = net.node("Unsqueeze", net.linear(audio, width), net.ints(2))
        label = net.node("Unsqueeze", net.linear(label, width), net.ints(1))
        net.output(net.linear(net.tanh(net.add(frame, label)), vocabulary), "logits")
    return net.model()

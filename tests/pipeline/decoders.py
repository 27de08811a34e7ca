"""Small decoders with a cache, one for each way of naming and handing it on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from tests.rules.harness import model

RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((50, 8)).astype(np.float32)
HEADS = np.array([0, 0, 2, 4])


def renamed(proto: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """The model with other names of its values: ONNX's text form has no dots in names."""
    for value in (*proto.graph.input, *proto.graph.output):
        value.name = names.get(value.name, value.name)
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for inner in attribute.g.node:
                inner.input[:] = [names.get(name, name) for name in inner.input]
    return proto


_ATTENDING = """
    e = Gather(table, ids)
    r = Reshape(e, heads)
    h = Transpose<perm=[0,2,1,3]>(r)
    half = Constant<value = float {0.5}>()
    g = Mul(h, half)
    key = Concat<axis=2>(past_key, h)
    value = Concat<axis=2>(past_value, g)
    t = Transpose<perm=[0,1,3,2]>(key)
    s = MatMul(h, t)
"""


def decoder(
    sequence: str = "sequence", total: str = "past + sequence", past: str = "past"
) -> onnx.ModelProto:
    """One layer in the way of optimum: with a mask and positions, named past_key_values.0.key and present.0.key."""
    later = f"{past}_and_{sequence}"
    proto = model(
        f"agraph (int64[batch,{sequence}] ids, int64[batch,all] mask, int64[batch,{sequence}] places,"
        f" float[batch,2,{past},4] past_key, float[batch,2,{past},4] past_value)"
        f" => (float[batch,2,{sequence},4] logits, float[batch,2,{later},4] key, float[batch,2,{later},4] value) {{"
        + _ATTENDING
        + "one = Constant<value_ints=[1,2]>() m = Unsqueeze(mask, one) f = Cast<to=1>(m) n = Mul(s, f)"
        " p = Softmax<axis=-1>(n) a = MatMul(p, value) last = Constant<value_ints=[1,3]>()"
        " b = Unsqueeze(places, last) c = Cast<to=1>(b) logits = Add(a, c) }",
        table=TABLE,
        heads=HEADS,
    )
    names = {
        "ids": "input_ids", "mask": "attention_mask", "places": "position_ids",
        "past_key": "past_key_values.0.key", "past_value": "past_key_values.0.value",
        "key": "present.0.key", "value": "present.0.value",
    }  # fmt: skip
    proto = renamed(proto, names)
    proto.graph.input[1].type.tensor_type.shape.dim[1].dim_param = total
    return proto


def plain(
    names: Mapping[str, str], *, sequence: str = "1", inputs: str = "", body: str = ""
) -> onnx.ModelProto:
    """One layer without mask and positions, with other names of `past_key`, `past_value`, `key` and `value`."""
    return renamed(
        model(
            f"agraph (int64[batch,{sequence}] ids, float[batch,2,past,4] past_key, float[batch,2,past,4] past_value"
            f"{inputs}) => (float[batch,2,{sequence},4] logits, float[batch,2,later,4] key,"
            f" float[batch,2,later,4] value) {{ {_ATTENDING} p = Softmax<axis=-1>(s) {body}"
            f" {'logits' if not body else 'z'} = MatMul(p, value) {'' if not body else 'logits = Add(z, w)'} }}",
            table=TABLE,
            heads=HEADS,
        ),
        names,
    )


def recurrent(names: Mapping[str, str] = {}) -> onnx.ModelProto:
    """Two states of fixed shape."""
    return renamed(
        model(
            "agraph (int64[batch,1] ids, float[batch,8] state_in, float[3,batch,8] memory_in)"
            " => (float[batch,8] logits, float[batch,8] state_out, float[3,batch,8] memory_out) {"
            " one = Constant<value_ints=[1]>() g = Gather(table, ids) e = Squeeze(g, one)"
            " half = Constant<value = float {0.5}>() d = Mul(state_in, half) state_out = Add(d, e)"
            " n = Mul(memory_in, half) memory_out = Add(n, state_out)"
            " zero = Constant<value_ints=[0]>() s = ReduceSum<keepdims=0>(memory_out, zero)"
            " logits = Tanh(s) }",
            table=TABLE,
        ),
        names,
    )


def merged() -> onnx.ModelProto:
    """A decoder with an encoder and a flag, in the way of optimum: with a cache, the encoder's comes back empty."""
    proto = model(
        "agraph (int64[batch,sequence] ids, float[batch,frames,4] encoder_hidden_states,"
        " float[batch,2,past,4] past_key, float[batch,2,past,4] past_value, float[batch,2,held,4] kept,"
        " bool[1] use_cache_branch) => (float[batch,2,sequence,4] logits, float[batch,2,later,4] key,"
        " float[batch,2,later,4] value, float[some,2,frames_out,4] encoded) {"
        + _ATTENDING
        + "p = Softmax<axis=-1>(s) a = MatMul(p, value) one = Constant<value_ints=[1]>()"
        " u = Unsqueeze(encoder_hidden_states, one) fresh = Concat<axis=1>(u, u)"
        " used = If(use_cache_branch) <then_branch = t () => (float[b1,2,f1,4] x1) { x1 = Identity(kept) },"
        " else_branch = e () => (float[b2,2,f2,4] x2) { x2 = Identity(fresh) }>"
        " encoded = If(use_cache_branch) <then_branch = t2 () => (float[b3,2,f3,4] x3) { x3 = Slice(kept, z, z, z) },"
        " else_branch = e2 () => (float[b4,2,f4,4] x4) { x4 = Identity(fresh) }>"
        " two = Constant<value_ints=[2]>() m = ReduceMean<keepdims=1>(used, two) logits = Add(a, m) }",
        table=TABLE,
        heads=HEADS,
        z=np.array([0]),
    )
    names = {
        "ids": "input_ids", "past_key": "past_key_values.0.decoder.key",
        "past_value": "past_key_values.0.decoder.value", "kept": "past_key_values.0.encoder.key",
        "key": "present.0.decoder.key", "value": "present.0.decoder.value", "encoded": "present.0.encoder.key",
    }  # fmt: skip
    return renamed(proto, names)

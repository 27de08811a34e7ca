"""Verification of decoders with caches: inputs that fit together, and faults that only some of them show."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.verify.models import normal
from xrlflow.verify import Reference, verify

GROUPED = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (float[b, s, 64] x, {inputs}, float[b, 2, past, 16] k, float[b, 2, past, 16] v)
=> (float[b, s, 64] y, float[b, 2, all, 16] new_k, float[b, 2, all, 16] new_v) {{
    {sizes}
    y, new_k, new_v = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = {rotary}>
      (x, half, half, k, v, last, total, cosines, sines)
}}"""
HALF = """
    begin = Constant<value_ints = [0]>()
    end = Constant<value_ints = [32]>()
    axis = Constant<value_ints = [2]>()
    half = Slice(x, begin, end, axis)"""
# As onnxruntime-genai's builder computes the sizes.
FROM_MASK = """
    one = Constant<value_ints = [1]>()
    sum = ReduceSum(mask, one)
    before = Sub(sum, one)
    last = Cast<to = 6>(before)
    shape = Shape(mask)
    index = Constant<value_int = 1>()
    long = Gather(shape, index)
    total = Cast<to = 6>(long)"""
FORMS = {
    "a mask": ("int64[b, total_length] mask", FROM_MASK),
    "lengths": ("int32[b, 1] last, int32 total", ""),
}
SCATTERED = """
<ir_version: 11, opset_import: ["" : 24]>
g (float[b, 2, s, 4] x, int64[b] at, float[b, 2, {length}, 4] cache) => (float[b, 2, {length}, 4] y) {{
    y = TensorScatter<axis = 2, mode = "{mode}">(cache, x, {at})
}}"""
ATTENDED = """
<ir_version: 11, opset_import: ["" : 24]>
g (float[b, 2, s, 4] q, float[b, 2, t, 4] k, int64[b] filled) => (float[b, 2, s, 4] y) {{
    {lengths}
    y = Attention(q, k, k, , , , lengths)
}}"""


def grouped(form: str, rotary: int = 1) -> onnx.ModelProto:
    inputs, sizes = FORMS[form]
    proto = onnx.parser.parse_model(GROUPED.format(inputs=inputs, sizes=HALF + sizes, rotary=rotary))
    for name in ("cosines", "sines"):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(normal(4096, 8), name))
    return proto


def scattered(mode: str, at: str = "at", length: str = "length") -> onnx.ModelProto:
    return onnx.parser.parse_model(SCATTERED.format(mode=mode, at=at, length=length))


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_in_one_operator_is_verified(form: str) -> None:
    """The numbers of positions fit the cache. Batches of more than 1 are for one new position only."""
    proto = grouped(form)
    cases = [known.case for known in Reference.of(proto).cases]
    sizes = {(c.bindings["b"], c.bindings["s"]) for c in cases}
    assert any(b > 1 for b, _ in sizes)
    assert any(s > 1 for _, s in sizes)
    for case in cases if form == "lengths" else ():
        assert np.all(case.feeds["last"] + 1 == case.bindings["past"] + case.bindings["s"])
    assert verify(proto, proto).verified


@pytest.mark.parametrize("form", FORMS)
def test_another_operator_is_found(form: str) -> None:
    assert not verify(grouped(form), grouped(form, rotary=0)).verified


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_a_cache_is_written_at_several_places(mode: str) -> None:
    proto = scattered(mode)
    cases = [known.case for known in Reference.of(proto).cases]
    assert any(np.any(c.feeds["at"] > 0) for c in cases)
    for case in cases if mode == "linear" else ():
        assert np.all(case.feeds["at"] + case.feeds["x"].shape[2] <= case.feeds["cache"].shape[2])
    assert verify(proto, proto).verified
    at_its_begin = scattered(mode, at="")
    assert not verify(proto, at_its_begin).verified


def test_the_filled_part_of_a_cache_varies() -> None:
    proto = onnx.parser.parse_model(ATTENDED.format(lengths="lengths = Identity(filled)"))
    cases = [known.case for known in Reference.of(proto).cases]
    for case in cases:
        assert np.all(case.feeds["filled"] <= case.feeds["k"].shape[2])
    assert verify(proto, proto).verified
    whole = "o = Constant<value_ints = [0]>() n = Shape<start = 2, end = 3>(k) z = Mul(filled, o) lengths = Add(z, n)"
    assert not verify(proto, onnx.parser.parse_model(ATTENDED.format(lengths=whole))).verified

"""Loops of a decoder: which output is whose cache, that the cache grows as it should, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from typer.testing import CliRunner

from tests.pipeline.decoders import decoder, merged, plain, recurrent, renamed
from tests.rules.harness import model
from xrlflow import api
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.onnxruntime.generate import Loop, Script
from xrlflow.cli import app
from xrlflow.onnxio import ModelError, load
from xrlflow.options import OptionError
from xrlflow.pipeline.generating import _apart, _prompt, _scripts
from xrlflow.verify.decoders import Decoder

KEYS = ("past_key", "past_value", "key", "value")
NAMES = {
    "with layers last": ("past_key_0", "past_value_0", "present_key_0", "present_value_0"),
    "in another order": ("past.value", "past.key", "present.value", "present.key"),
    "by torch": ("past_key_values_key_cache_0", "past_key_values_value_cache_0", "cat_3", "cat_7"),
    "by nobody": ("kv_0", "kv_1", "add_3", "add_7"),
}


def named(*names: str, **more: str) -> onnx.ModelProto:
    return plain(dict(zip(KEYS, names, strict=True)), **more)


def pairs(proto: onnx.ModelProto) -> dict[str, tuple[str, int | None]]:
    return {cache.input: (cache.output, cache.axis) for cache in Decoder.of(load(proto)).caches}


# --- which output is whose cache ---


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_caches_are_paired(names: tuple[str, ...]) -> None:
    assert pairs(named(*names)) == {names[0]: (names[2], 2), names[1]: (names[3], 2)}


def test_names_are_stronger_than_order() -> None:
    crossed = named("past_key_0", "past_value_0", "present_value_0", "present_key_0")
    assert pairs(crossed) == {"past_key_0": ("present_key_0", 2), "past_value_0": ("present_value_0", 2)}


def test_states_of_fixed_shape_are_caches() -> None:
    paired = {"state_in": ("state_out", None), "memory_in": ("memory_out", None)}
    assert pairs(recurrent()) == paired
    assert pairs(recurrent({"state_in": "h0", "memory_in": "c0"})) == {
        "h0": ("state_out", None), "c0": ("memory_out", None),
    }  # fmt: skip


def test_what_a_layer_takes_and_returns_is_no_state() -> None:
    layer = model(
        "agraph (float[batch,n,8] in_x, float[1,8] w) => (float[batch,n,8] out_x) { out_x = Add(in_x, w) }"
    )
    with pytest.raises(ModelError, match="has no cache that goes round"):
        Decoder.of(load(layer))


def test_the_cache_of_an_encoder_stays() -> None:
    one = pairs(merged())
    assert one["past_key_values.0.encoder.key"] == ("present.0.encoder.key", None)
    more = named(
        "past_key_0", "past_value_0", "present_key_0", "present_value_0",
        inputs=", float[batch,2,encoded,4] past_cross_key_0",
        body="two = Constant<value_ints=[2]>() w = ReduceMean<keepdims=1>(past_cross_key_0, two)",
    )  # fmt: skip
    assert pairs(more).keys() == {"past_key_0", "past_value_0"}


def test_what_an_encoder_returned_is_constant_without_a_flag() -> None:
    proto = merged()
    flag = next(value for value in proto.graph.input if value.name == "use_cache_branch")
    proto.graph.input.remove(flag)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([True]), "use_cache_branch"))
    assert pairs(proto).keys() == {"past_key_values.0.decoder.key", "past_key_values.0.decoder.value"}


# --- loops ---


def loop(proto: onnx.ModelProto, script: Script) -> list[np.ndarray]:
    """The outputs of the last step, in the second of two repetitions."""
    found = Loop(open_model(proto.SerializeToString(), threads=1), script, "the model")
    found.run()
    return [value.numpy().copy() for value in found.run()[1]]


def by_hand(proto: onnx.ModelProto, script: Script) -> list[np.ndarray]:
    """The outputs of the last step if NumPy copies each cache, and the encoder's after the prefill alone."""
    session = ort.InferenceSession(proto.SerializeToString())
    names = [value.name for value in session.get_outputs()]
    feeds = dict(script.start)
    for at, step in enumerate([script.prefill or {}, *script.steps]):
        if not step:
            continue
        feeds |= step
        outputs = dict(zip(names, session.run(names, feeds)))
        for cache in script.caches:
            if "encoder" not in cache.input or at == 0:
                feeds[cache.input] = outputs[cache.output].copy()
    return list(outputs.values())


STEPS = {
    "optimum": decoder(sequence="1", total="past + 1"),
    "torch": named("kv_0", "kv_1", "add_3", "add_7"),
    "recurrent": recurrent(),
}
WHOLE = {"optimum": decoder(), "merged": merged()}


@pytest.mark.parametrize("proto", [*STEPS.values(), *WHOLE.values()], ids=[*STEPS, "prefill", "merged"])
def test_a_loop_equals_one_that_copies(proto: onnx.ModelProto) -> None:
    scripts = _scripts(Decoder.of(load(proto)), 6, 5, seed=1)
    assert [script.prefill is None for script in scripts] == (
        [True] if any(proto is one for one in STEPS.values()) else [False, True]
    )
    for script in scripts:
        for ours, theirs in zip(loop(proto, script), by_hand(proto, script), strict=True):
            assert np.isfinite(theirs).all()
            np.testing.assert_array_equal(ours, theirs)


def test_masks_and_positions_count_on() -> None:
    decoding = Decoder.of(load(decoder()))
    script = _scripts(decoding, 3, 5, seed=0)[0]
    assert script.prefill is not None
    assert script.prefill["position_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert [step["position_ids"].tolist() for step in script.steps] == [[[5]], [[6]], [[7]]]
    assert [step["attention_mask"].tolist() for step in script.steps] == [[[1] * n] for n in (6, 7, 8)]
    assert script.start["past_key_values.0.key"].shape == (1, 2, 0, 4)


def test_states_begin_with_zeros_and_tokens_are_drawn_anew() -> None:
    (script,) = _scripts(Decoder.of(load(recurrent())), 20, 0, seed=0)
    assert not any(array.any() for array in script.start.values())
    assert len({int(step["ids"][0, 0]) for step in script.steps}) > 5


def test_the_flag_is_false_with_an_empty_cache_alone() -> None:
    whole, cached = _scripts(Decoder.of(load(merged())), 2, 5, seed=0)
    assert whole.prefill is not None
    assert not whole.prefill["use_cache_branch"][0]
    assert all(step["use_cache_branch"][0] for step in (*whole.steps, *cached.steps))


def masked(kind: str) -> onnx.ModelProto:
    """A decoder whose mask has four dimensions."""
    return plain(
        {
            "past_key": "past_key_0",
            "past_value": "past_value_0",
            "key": "present_key_0",
            "value": "present_value_0",
        },
        sequence="sequence",
        inputs=f", {kind}[batch,1,sequence,all] attention_mask",
        body="f = Cast<to=1>(attention_mask) two = Constant<value_ints=[3]>() w = ReduceMin<keepdims=1>(f, two)",
    )


@pytest.mark.parametrize(
    ("kind", "seen", "hidden"), [("float", 0.0, np.finfo(np.float32).min), ("bool", 1, 0)]
)
def test_masks_of_four_dimensions_are_causal(kind: str, seen: float, hidden: float) -> None:
    mask = Decoder.of(load(masked(kind))).tokens(2, 3, 0)["attention_mask"]
    expected = [[seen] * (3 + row) + [hidden] * (2 - row) for row in range(3)]
    np.testing.assert_array_equal(mask[0, 0].astype(np.float32), np.array(expected, np.float32))


def test_a_cache_that_does_not_grow_by_one_is_refused() -> None:
    wrong = model(
        "agraph (int64[batch,1] ids, float[batch,2,past,4] past_key) => (float[batch,2,later,4] present_key)"
        " { present_key = Concat<axis=2>(past_key, past_key) }"
    )
    script = _scripts(Decoder.of(load(wrong)), 2, 5, seed=0)[0]
    with pytest.raises(BackendError, match=r"the model: output 'present_key' has shape \[1, 2, 20, 4\]"):
        loop(wrong, script)


# --- what is reported ---


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(decoder(), tmp_path / "decoder.onnx")
    return tmp_path / "decoder.onnx"


def invoke(*arguments: object) -> Any:
    brief = ("--time-limit", 0.3, "--threads", 1)
    return CliRunner().invoke(app, [str(a) for a in ("bench", *arguments, *brief)])


def test_a_loop_is_reported(path: Path) -> None:
    result = invoke(path, "--generate", 4, "--prompt", 3, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["generate"] == 4
    assert found["prompt"] == 3
    assert found["against"] == "itself"
    assert all(
        found[key] > 0
        for key in ("prefill_ms", "tokens_per_second", "first_step_ms", "last_step_ms", "control")
    )
    assert "speedup" not in found


def test_two_models_are_compared(path: Path, tmp_path: Path) -> None:
    other = decoder()
    next(t for t in other.graph.initializer if t.name == "table").CopyFrom(
        onnx.numpy_helper.from_array(np.ones((50, 8), np.float32), "table")
    )
    onnx.save(other, tmp_path / "other.onnx")
    same = invoke(path, "--against", path, "--generate", 4, "--json")
    assert same.exit_code == 0, same.output
    found = json.loads(same.stdout)
    assert found["difference"] == 0
    assert found["output"] == "logits"
    assert all(
        found[key] > 0 for key in ("speedup", "control", "against_tokens_per_second", "against_prefill_ms")
    )
    apart = invoke(tmp_path / "other.onnx", "--against", path, "--generate", 4, "--prompt", 0)
    assert apart.exit_code == 1, apart.output
    assert "outputs differ: logits after the last step" in apart.stdout


def test_a_model_without_prefill_begins_with_a_cache(tmp_path: Path) -> None:
    onnx.save(named("past_key_0", "past_value_0", "present_key_0", "present_value_0"), tmp_path / "step.onnx")
    result = invoke(tmp_path / "step.onnx", "--generate", 2, "--prompt", 7)
    assert result.exit_code == 0, result.output
    assert "no prefill: the steps begin with 7 tokens in the cache" in result.stdout


def test_a_model_that_takes_no_empty_cache_begins_with_a_full_one(tmp_path: Path) -> None:
    picky = named(
        "past_key_0", "past_value_0", "present_key_0", "present_value_0", sequence="sequence",
        body="i = Constant<value_ints=[0]>() w0 = Gather<axis=2>(past_key, i) w = Identity(w0)",
    )  # fmt: skip
    onnx.save(picky, tmp_path / "picky.onnx")
    result = invoke(tmp_path / "picky.onnx", "--generate", 2, "--prompt", 7, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["prefill_ms"] is None


def test_the_difference_of_outputs() -> None:
    one = np.array([3.0, 4.0], np.float32)
    assert _apart(one, one) == 0.0
    assert _apart(one, one * np.float32(1.5)) == pytest.approx(0.5)
    assert _apart(one, np.array([np.nan, 4.0], np.float32)) is None
    assert _apart(one, one[:1]) is None


# --- what is refused ---


def unpaired() -> onnx.ModelProto:
    """Two caches of one type, of which one does not come back."""
    proto = named("past_key_0", "past_value_0", "present_key_0", "present_value_0")
    del proto.graph.output[2]
    return proto


def ambiguous() -> onnx.ModelProto:
    """Two states, and three outputs that may be theirs."""
    proto = recurrent({"state_in": "state_a", "state_out": "x", "memory_in": "state_b", "memory_out": "y"})
    for name in ("x", "y"):
        proto.graph.node.append(onnx.helper.make_node("Neg", [name], [f"{name}_2"]))
        given = next(value for value in proto.graph.output if value.name == name)
        proto.graph.output.add().CopyFrom(given)
        proto.graph.output[-1].name = f"{name}_2"
    return proto


def fixed() -> onnx.ModelProto:
    return model(
        "agraph (int64[1,1] ids, float[1,2,6,4] past_key, float[1,2,1,4] x) => (float[1,2,7,4] present_key)"
        " { present_key = Concat<axis=2>(past_key, x) }"
    )


@pytest.mark.parametrize(
    ("proto", "words"),
    [
        (unpaired(), ("with 'past_value_0':", "expected are inputs such as")),
        (ambiguous(), ("no single output", "'state_a', 'state_b'")),
        (fixed(), ("'past_key'", "fixed length of 6", "'present_key'")),
        (model("agraph (float[n,4] x) => (float[n,4] y) { y = Relu(x) }"), ("no cache", "'x'")),
    ],
    ids=["unpaired", "ambiguous", "fixed", "no cache"],
)
def test_a_decoder_that_cannot_go_round(
    tmp_path: Path, proto: onnx.ModelProto, words: tuple[str, ...]
) -> None:
    onnx.save(proto, tmp_path / "m.onnx")
    refused(invoke(tmp_path / "m.onnx", "--generate", 2), "m.onnx", *words)


def refused(result: Any, *words: str) -> None:
    """Exit code 2 and one line."""
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]


def test_arguments_that_make_no_sense(path: Path, tmp_path: Path) -> None:
    refused(invoke(path, "--generate", 0), "generate 0", "1 or more")
    refused(invoke(path, "--generate", 2, "--prompt", -1), "prompt -1")
    refused(invoke(path, "--prompt", 4), "--generate")
    refused(invoke(path, "--generate", 2, "--inputs", "x.npz"), "inputs")
    onnx.save(named("past_key_0", "past_value_0", "present_key_0", "present_value_0"), tmp_path / "step.onnx")
    refused(invoke(path, "--generate", 2, "--against", tmp_path / "step.onnx"), "step.onnx", "input")


def test_a_prompt_that_does_not_fit(tmp_path: Path) -> None:
    proto = decoder()
    dim = proto.graph.input[1].type.tensor_type.shape.dim[1]
    dim.Clear()
    dim.dim_value = 16
    onnx.save(proto, tmp_path / "short.onnx")
    refused(
        invoke(tmp_path / "short.onnx", "--generate", 8, "--prompt", 9),
        "short.onnx",
        "'attention_mask'",
        "16",
    )
    with pytest.raises(OptionError, match="attention_mask"):
        api.bench(tmp_path / "short.onnx", generate=17)
    assert _prompt(Decoder.of(load(proto)), 7, None) == 9  # the usual prompt is longer


def test_positions_of_a_table_are_not_left(tmp_path: Path) -> None:
    learned = renamed(
        plain(
            dict(zip(KEYS, NAMES["with layers last"])),
            inputs=", int64[batch,1] places",
            body="q = Gather(rows, places) one = Constant<value_ints=[1]>() w = Unsqueeze(q, one)",
        ),
        {"places": "position_ids"},
    )
    learned.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((12, 4), np.float32), "rows"))
    onnx.save(learned, tmp_path / "learned.onnx")
    refused(invoke(tmp_path / "learned.onnx", "--generate", 8, "--prompt", 5), "'position_ids'", "12 tokens")
    assert invoke(tmp_path / "learned.onnx", "--generate", 8, "--prompt", 4).exit_code == 0


def test_a_stated_shape_is_the_length_of_the_cache(tmp_path: Path) -> None:
    onnx.save(named(*NAMES["by torch"]), tmp_path / "m.onnx")
    shape = f"{NAMES['by torch'][0]}=2,2,9,4"
    found = json.loads(invoke(tmp_path / "m.onnx", "--generate", 2, "--shape", shape, "--json").stdout)
    assert found["prompt"] == 9


def test_keys_and_values_are_not_exchanged() -> None:
    """Of one shape, so that a loop would run."""
    with pytest.raises(ModelError, match="no single output can be paired with 'kc', 'vc'"):
        Decoder.of(load(named("kc", "vc", "v_out", "k_out")))


def test_tokens_that_are_ruled_out() -> None:
    logits = np.array([1.0, -np.inf, 2.0])
    assert _apart(logits, logits * 1.0001) == pytest.approx(1e-4)
    assert _apart(logits, np.array([1.0, 0.0, 2.0])) is None
    assert _apart(logits, np.array([1.0, np.nan, 2.0])) is None
    assert _apart(np.array([np.nan]), np.array([np.nan])) == 0.0


@pytest.mark.parametrize("steps", [2.5, "3", True])
def test_steps_are_a_whole_number(steps: Any) -> None:
    with pytest.raises(OptionError, match="is no whole number"):
        api.bench(decoder(), generate=steps)


def test_steps_whose_masks_take_too_much_memory() -> None:
    with pytest.raises(OptionError, match="take over 1 GB: give a smaller --generate"):
        api.bench(decoder(), generate=10**6)


def test_what_is_measured_is_said() -> None:
    found = api.bench(decoder(), generate=np.int64(2), time_limit=1.0)
    assert found["batch"] == 1
    assert all(key.startswith("past") for key in found["caches"])
    json.dumps(found)


def test_a_range_has_no_meaning_for_a_loop() -> None:
    with pytest.raises(OptionError, match=r"a range of sizes .* has no meaning with generate"):
        api.bench(decoder(), shapes={"past": ((1, 4), 2)}, generate=2)

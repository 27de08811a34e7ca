"""Operators that TVM lacks, spelt out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest

from rewrite_rules import LIBRARY, expansion
from rewrite_rules.expansion import (
    ExpandAttention,
    ExpandGRU,
    ExpandLoop,
    ExpandLSTM,
    ExpandRNN,
    ExpandRotaryEmbedding,
)
from tests.rules.harness import applies, model, refuses
from tests.runtime import recent
from xrlflow.onnxio import load
from xrlflow.rewrite import AnyRule, Library, RewriteState, declared_in
from xrlflow.search import simplify, steps_of

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
RULES: dict[str, AnyRule] = {"LSTM": ExpandLSTM(), "GRU": ExpandGRU(), "RNN": ExpandRNN()}
STEPS, BATCH, WIDTH, SIZE = 4, 2, 3, 5


def numbers(*shape: int) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) / 2).astype(np.float32)


def cell(
    op: str,
    attributes: str = "",
    *,
    ways: int = 1,
    steps: int = STEPS,
    bias: bool = True,
    states: bool = True,
    lengths: str = "",
    outputs: str = "",
    more: str = "",
    **given: np.ndarray,
) -> onnx.ModelProto:
    """A model of one recurrent operator; `outputs`: which of y, h, c are read (all of them by default)."""
    rows = GATES[op] * SIZE
    made = "yhc"[: 3 if op == "LSTM" else 2]
    last = f"{ways},{BATCH},{SIZE}"
    weights = {"w": numbers(ways, rows, WIDTH), "r": numbers(ways, rows, SIZE)}
    names = ["x", "w", "r", "b" if bias else "", lengths, *(("h0", "c0") if states else ())]
    inputs = f"float[{steps},{BATCH},{WIDTH}] x"
    if bias:
        weights["b"] = numbers(ways, 2 * rows)
    if states:
        inputs += f", float[{last}] h0" + (f", float[{last}] c0" if op == "LSTM" else "")
        names = names if op == "LSTM" else names[:-1]
    read = ", ".join(
        f"float[{steps},{ways},{BATCH},{SIZE}] y" if v == "y" else f"float[{last}] {v}"
        for v in outputs or made
    )
    while not names[-1]:
        names.pop()
    return model(
        f"agraph ({inputs}{more}) => ({read}) {{"
        f" {', '.join(made)} = {op}<hidden_size={SIZE}{attributes}>({', '.join(names)}) }}",
        **{**weights, **given},  # type: ignore[arg-type]
    )


def left(graph: Any) -> set[str]:
    return {n.op for n in graph.nodes() if not n.const}


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("bias", "states"), [(True, True), (True, False), (False, True), (False, False)])
def test_cells(op: str, direction: str, bias: bool, states: bool) -> None:
    ways = 2 if direction == "bidirectional" else 1
    proto = cell(op, f', direction="{direction}"', ways=ways, bias=bias, states=states)
    assert op not in left(applies(RULES[op], proto))


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("outputs", ["y", "h"])
@pytest.mark.parametrize("steps", [1, 2, 40])
def test_steps_and_outputs(op: str, outputs: str, steps: int) -> None:
    """Forty hidden states are put together in two rounds."""
    graph = applies(RULES[op], cell(op, steps=steps, outputs=outputs))
    products = [n for n in graph.nodes() if n.op == "MatMul" and not n.const]
    assert len(products) == (1 + steps) * (3 if op == "GRU" else 1)
    concats = [n for n in graph.nodes() if n.op == "Concat" and not n.const]
    assert max((len(n.inputs) for n in concats), default=0) <= 16
    assert bool(concats) == (outputs == "y" and steps > 1)


def test_the_cell_state_alone() -> None:
    applies(ExpandLSTM(), cell("LSTM", outputs="c"))


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("bias", [True, False])
def test_reset_after_the_product(direction: str, bias: bool) -> None:
    ways = 2 if direction == "bidirectional" else 1
    applies(
        ExpandGRU(), cell("GRU", f', linear_before_reset=1, direction="{direction}"', ways=ways, bias=bias)
    )


@pytest.mark.parametrize(
    ("op", "names"),
    [
        ("RNN", ["Relu"]),
        ("GRU", ["Sigmoid", "Relu"]),
        ("LSTM", ["Sigmoid", "Relu", "Tanh"]),
        ("LSTM", ["Sigmoid", "Tanh", "Sigmoid"]),
    ],
)
def test_plain_activations(op: str, names: list[str]) -> None:
    listed = ", ".join(f'"{n}"' for n in names)
    applies(RULES[op], cell(op, f", activations=[{listed}]"))


def test_directions_have_activations_of_their_own() -> None:
    proto = cell("RNN", ', activations=["Relu", "Tanh"], direction="bidirectional"', ways=2)
    assert {"Relu", "Tanh"} <= left(applies(ExpandRNN(), proto))


@pytest.mark.parametrize("op", GATES)
def test_refusals(op: str) -> None:
    rule = RULES[op]
    refuses(rule, cell(op, ", clip=0.5"), "what goes into the gates is clipped")
    refuses(rule, cell(op, lengths="n", more=f", int32[{BATCH}] n"), "sequence_lens is given")
    refuses(rule, cell(op, lengths="n", n=np.array([4, 3], np.int32)), "sequence_lens is given")
    refuses(rule, cell(op, steps=257), "it has 257 time steps, more than 256")
    affine = ", ".join(['"Affine"'] * len(rule.default))  # type: ignore[union-attr]
    refuses(rule, cell(op, f", activations=[{affine}]"), "an activation is Affine")
    free = cell(op, states=False)
    free.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "steps"
    for output in free.graph.output[:1]:
        output.type.tensor_type.shape.dim[0].dim_param = "steps"
    refuses(rule, free, "a dimension is not a known number")


@pytest.mark.parametrize("op", GATES)
def test_lengths_that_are_the_whole(op: str) -> None:
    applies(RULES[op], cell(op, lengths="n", n=np.array([STEPS] * BATCH, np.int32)))


def test_what_only_an_lstm_has() -> None:
    refuses(ExpandLSTM(), cell("LSTM", ", input_forget=1"), "the input gate and the forget gate are coupled")
    proto = cell("LSTM", p=numbers(1, 3 * SIZE))
    proto.graph.node[0].input.append("p")
    refuses(ExpandLSTM(), proto, "it has peepholes")


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_batch_first_has_no_kernel_but_a_meaning(rule: AnyRule) -> None:
    """ONNX Runtime does not run it, so that this is left to the proof; here only that it is spelt out."""
    texts = [e for e in rule.examples if "layout=1" in e]
    assert len(texts) >= 2
    for text in texts:
        state = RewriteState.start(load(model(text)).graph, Library([rule], backend="tvm"))
        (match,) = state.candidates
        assert match.rule is rule


# Attention


def attend(
    attributes: str = "",
    inputs: str = "q, k, v",
    *,
    q: str = "2,4,3,5",
    k: str = "2,4,6,5",
    v: str = "2,4,6,7",
    y: str = "2,4,3,7",
    more: str = "",
    made: str = "y",
    outputs: str = "",
    **given: np.ndarray,
) -> onnx.ModelProto:
    return model(
        f"agraph (float[{q}] q, float[{k}] k, float[{v}] v{more}) => (float[{y}] y{outputs})"
        f" {{ {made} = Attention{attributes}({inputs}) }}",
        **given,  # type: ignore[arg-type]
    )


@recent
@pytest.mark.parametrize(
    "attributes",
    ["", "<scale=0.3>", "<is_causal=1>", "<softcap=2.0>", "<scale=0.3, is_causal=1, softcap=2.0>"],
)
@pytest.mark.parametrize("shared", [4, 2, 1])
def test_attention(attributes: str, shared: int) -> None:
    proto = attend(attributes, k=f"2,{shared},6,5", v=f"2,{shared},6,7")
    assert "Attention" not in left(applies(ExpandAttention(), proto))


@recent
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("kind", ["float", "bool"])
@pytest.mark.parametrize("shape", ["3,6", "1,1,3,6", "2,1,3,6", "2,4,3,6"])
def test_masks(causal: int, kind: str, shape: str) -> None:
    proto = attend(f"<is_causal={causal}>", "q, k, v, m", more=f", {kind}[{shape}] m")
    applies(ExpandAttention(), proto)


@recent
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_a_row_that_sees_nothing_is_zero(causal: int, dtype: Any) -> None:
    """With the causal mask the first row sees the first key alone, which the mask hides."""
    seen = np.ones((3, 6), np.bool_)
    seen[0, 0] = seen[1] = False
    mask = seen if dtype is np.bool_ else np.where(seen, 0, -np.inf).astype(np.float32)
    applies(ExpandAttention(), attend(f"<is_causal={causal}>", "q, k, v, m", m=mask))


@pytest.mark.parametrize("attributes", ["", ", is_causal=1"])
@pytest.mark.parametrize("shared", [4, 2])
def test_three_dimensions(attributes: str, shared: int) -> None:
    proto = attend(
        f"<q_num_heads=4, kv_num_heads={shared}{attributes}>",
        q="2,3,20", k=f"2,6,{5 * shared}", v=f"2,6,{7 * shared}", y="2,3,28",
    )  # fmt: skip
    applies(ExpandAttention(), proto)


@pytest.mark.parametrize("causal", [0, 1])
def test_keys_and_values_from_before(causal: int) -> None:
    proto = attend(
        f"<is_causal={causal}>", "q, k, v, , pk, pv", q="2,4,3,5", k="2,2,3,5", v="2,2,3,7",
        more=", float[2,2,4,5] pk, float[2,2,4,7] pv", made="y, nk, nv",
        outputs=", float[2,2,7,5] nk, float[2,2,7,7] nv",
    )  # fmt: skip
    applies(ExpandAttention(), proto)


def test_attention_refusals() -> None:
    rule = ExpandAttention()
    scores = attend(made="y, a, b, s", outputs=", float[2,4,3,6] s")
    refuses(rule, scores, "the scores are read")
    refuses(rule, attend("<is_causal=1>", "q, k, v, m", m=numbers(3, 1)), "the mask has another shape")
    refuses(rule, attend(q="N,4,3,5", y="N,4,3,7"), "a dimension is not a known number")
    mixed = attend("<q_num_heads=4, kv_num_heads=4>", k="2,6,20", v="2,6,28", y="2,4,3,7")
    refuses(rule, mixed, "the ranks differ")


@pytest.mark.parametrize("count", [1, 2, 16, 17, 18, 257])
def test_parts_joined_a_few_at_a_time(count: int) -> None:
    """In order, and a part that is left over is not put together with nothing."""

    class Joins:
        def Concat(self, *parts: Any, axis: int) -> Any:
            assert 1 < len(parts) <= 16
            assert axis == 3
            return [e for part in parts for e in part]

    assert expansion._joined(Joins(), [[i] for i in range(count)], 3) == list(range(count))  # type: ignore[arg-type]


# Rotation


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_rotary(interleaved: int, width: int, flat: bool, positions: bool) -> None:
    half = (width or 6) // 2
    shape = "2,4,18" if flat else "2,3,4,6"
    table = (7, half) if positions else (2, 4, half)
    proto = model(
        f"agraph (float[{shape}] x{', int64[2,4] p' if positions else ''}) => (float[{shape}] y)"
        f" {{ y = RotaryEmbedding<interleaved={interleaved}, rotary_embedding_dim={width}, num_heads=3>"
        f"(x, c, s{', p' if positions else ''}) }}",
        c=numbers(*table),
        s=numbers(*table[::-1]).reshape(table),
    )
    assert "RotaryEmbedding" not in left(applies(ExpandRotaryEmbedding(), proto))


def test_rotary_refusals() -> None:
    text = "agraph (float[2,3,N,6] x) => (float[2,3,N,6] y) { y = RotaryEmbedding(x, c, s) }"
    proto = model(text, c=numbers(2, 4, 3), s=numbers(2, 4, 3))
    refuses(ExpandRotaryEmbedding(), proto, "a dimension is not a known number")


# Loops


def test_a_loop_that_the_search_would_not_unroll() -> None:
    proto = model(
        "agraph (float[2] z, float[2] x) => (float[2] last) {"
        " last = Loop (n, , z) <body = b (int64 i, bool going, float[2] v) => (bool on, float[2] w) {"
        " on = Identity(going) s = Mul(v, x) w = Add(s, x) }> }",
        n=np.array(60),
    )
    applies(ExpandLoop(), proto, ops=["Add", "Mul"] * 60)


def test_what_a_loop_repeats_is_spelt_out_too() -> None:
    """More substitutions than the file has operators."""
    proto = model(
        f"agraph (float[{STEPS},{BATCH},{SIZE}] x) => (float[{STEPS},{BATCH},{SIZE}] last) {{"
        f" last = Loop (n, , x) <body = b (int64 i, bool going, float[{STEPS},{BATCH},{SIZE}] v)"
        f" => (bool on, float[{STEPS},{BATCH},{SIZE}] o) {{ on = Identity(going)"
        f" y = RNN<hidden_size={SIZE}>(v, w, r) o = Squeeze(y, one) }}> }}",
        n=np.array(20), one=np.array([1]), w=numbers(1, SIZE, SIZE), r=numbers(1, SIZE, SIZE),
    )  # fmt: skip
    graph, path = simplify(load(proto).graph, Library(LIBRARY, backend="tvm"), lambda _: 0.0)
    assert Counter(s.rule for s in steps_of(path)) == {"ExpandLoop": 1, "ExpandRNN": 20}
    assert left(graph).isdisjoint(("Loop", "RNN"))


def test_only_for_tvm() -> None:
    names = {r.name for r in declared_in(expansion)}
    assert names.isdisjoint(Library(LIBRARY).rules)
    assert names <= Library(LIBRARY, backend="tvm").canonicalising().rules.keys()

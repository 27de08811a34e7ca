"""SampledCases inputs suit the model: sizes, indices, masks, shapes."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.verify.models import model, normal
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import open_model
from xrlflow.onnxio import load
from xrlflow.verify import InputsNeeded, Reference, feeds_at_other_sizes, feeds_for_measurement, verify
from xrlflow.verify.cases import CaseSampler
from xrlflow.verify.inputs import Case, InputPlan


def drawn(proto: onnx.ModelProto, kind: str = "", **options: Any) -> list[dict[str, Any]]:
    """The inputs on which a model is compared: the ordinary ones, or those of another kind."""
    known = Reference.of(proto, **options).cases
    return [dict(k.case.feeds) for k in known if k.case.values.name == kind]


def embedding(text: str, kind: str = "int64", rows: int = 7, **weights: np.ndarray) -> onnx.ModelProto:
    """A model that looks up what `text` makes of ids in a table of few rows."""
    return model(
        f"g ({kind}[n, s] ids) => (float[n, s, 4] y) {{ {text}\n y = Gather(table, i) }}",
        table=normal(rows, 4),
        **weights,
    )


IF = """
c = Constant<value = bool {1}>()
i = If(c) <
  then_branch = t () => (int64[n, s] a) { a = Identity(ids) },
  else_branch = e () => (int64[n, s] b) { b = Abs(ids) }
>"""

LOOP = """
trip = Constant<value = int64 {2}>()
go = Constant<value = bool {1}>()
i = Loop(trip, go, ids) <
  body = l (int64 k, bool before, int64[n, s] state) => (bool after, int64[n, s] next) {
    after = Identity(before)
    three = Constant<value = int64 {3}>()
    next = Add(state, three) }
>"""

# Each: the model, and the least and greatest index that ordinary values may have.
LOOKUPS = {
    "directly": (embedding("i = Identity(ids)"), 0, 6),
    "through a cast": (embedding("i = Cast<to=7>(ids)", "int32"), 0, 6),
    "from a float": (embedding("i = Cast<to=7>(ids)", "float"), 0, 6),
    "with an offset": (embedding("i = Add(ids, c)", c=np.int64([2])), -2, 4),
    "with a negative offset": (embedding("i = Sub(ids, c)", c=np.int64([5])), 5, 11),
    "reversed": (embedding("i = Sub(c, ids)", c=np.int64([6])), 0, 6),
    "scaled": (embedding("i = Mul(ids, c)", c=np.int64([2])), 0, 3),
    "divided": (embedding("i = Div(ids, c)", c=np.int64([2])), 0, 12),
    "reshaped": (
        embedding("f = Reshape(ids, m)\n u = Unsqueeze(f, z)\n q = Squeeze(u, z)\n h = Shape(ids)\n i = Reshape(q, h)",
                  m=np.int64([-1]), z=np.int64([0])),
        0, 6,
    ),
    "through a branch": (embedding(IF), 0, 6),
    "through a loop": (embedding(LOOP), 0, 6),
    "with an offset per column": (
        model(
            "g (int64[n, 3] ids) => (float[n, 3, 4] y) { i = Add(ids, c)\n y = Gather(table, i) }",
            table=normal(30, 4),
            c=np.int64([[0, 10, 20]]),
        ),
        0, 9,
    ),
    "in a branch, captured": (
        model(
            """g (int64[n, s] ids) => (float[n, s, 4] y) {
              c = Constant<value = bool {1}>()
              y = If(c) <
                then_branch = t () => (float[n, s, 4] a) { a = Gather(table, ids) },
                else_branch = e () => (float[n, s, 4] b) { b = Gather(table, ids) }
              > }""",
            table=normal(7, 4),
        ),
        0, 6,
    ),
    "of two tables": (
        model(
            """g (int64[n, s] ids) => (float[n, s, 4] y) {
              a = Gather(large, ids)
              b = Gather(small, ids)
              y = Add(a, b) }""",
            large=normal(9, 4),
            small=normal(5, 4),
        ),
        0, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKUPS)
def test_indices_stay_in_their_table_and_reach_its_ends(name: str) -> None:
    proto, least, most = LOOKUPS[name]
    feeds = drawn(proto)
    assert len(feeds) >= 7
    ids = np.concatenate([f["ids"].reshape(-1) for f in feeds])
    assert ids.min() >= least
    assert ids.max() <= most
    if name != "through a loop":  # there the offset grows as it goes round, and the walk is only cautious
        assert (ids.min(), ids.max()) == (least if least >= 0 else ids.min(), most)
    assert len(np.unique(ids)) > 1 or name == "through a loop"


def test_a_table_of_dynamic_size() -> None:
    proto = model("g (float[rows, 4] table, int64[s] ids) => (float[s, 4] y) { y = Gather(table, ids) }")
    for feeds in drawn(proto):
        assert feeds["ids"].max() < feeds["table"].shape[0]
    other = model(
        "g (float[rows, 4] t, int64[rows, 1] ids) => (float[rows, 1] y) { y = GatherElements<axis=1>(t, ids) }"
    )
    assert max(f["ids"].max() for f in drawn(other)) == 3


def test_masks_have_a_one_in_each_row() -> None:
    proto = model(
        """g (float[n, s] x, int64[n, s] attention_mask, bool[n, s] keep, float[n, s] other_mask) => (float[n, s] y) {
          m = Cast<to=1>(attention_mask)
          i = Sub(one, m)
          p = Mul(i, low)
          a = Add(x, p)
          w = Where(keep, a, p)
          y = Mul(w, other_mask) }""",
        one=np.float32([1]),
        low=np.float32([-1e4]),
    )
    seen = set()
    for feeds in drawn(proto):
        # Floats called masks may be logits: one sample has other numbers.
        floats = ("other_mask",) if {*np.unique(feeds["other_mask"])} <= {0.0, 1.0} else ()
        for name in ("attention_mask", "keep", *floats):
            mask = feeds[name].astype(int)
            assert set(np.unique(mask)) <= {0, 1}
            assert (mask.sum(-1) >= 1).all()
            seen.update((name, int(v)) for v in np.unique(mask))
    assert len(seen) == 6, "every mask has zeros somewhere"


def test_a_mask_by_use_needs_no_name() -> None:
    proto = model(
        "g (int64[n, s] a) => (float[n, s] y) { f = Cast<to=1>(a)\n i = Sub(one, f)\n y = Mul(i, low) }",
        one=np.float32([1]),
        low=np.float32([-1e4]),
    )
    assert {v for f in drawn(proto) for v in np.unique(f["a"])} == {0, 1}


def test_what_the_model_compares_with_is_tried() -> None:
    proto = model(
        """g (float[n] x, int64 sr) => (float[n] y) {
          c = Constant<value = int64 {16000}>()
          e = Equal(sr, c)
          y = If(e) <
            then_branch = t () => (float[n] a) { a = Neg(x) },
            else_branch = f () => (float[n] b) { b = Reshape(x, bad) }
          > }""",
        bad=np.int64([1000003]),
    )
    assert {int(f["sr"]) for f in drawn(proto)} == {16000}


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        ("y = Reshape(x, a)", "int64[2] a"),
        ("y = Expand(x, a)", "int64[2] a"),
        ("y = Tile(x, a)", "int64[2] a"),
        ("y, i = TopK<axis=1>(x, a)", "int64[1] a"),
        ("y = ReduceSum(x, a)", "int64[1] a"),
        ("y = Unsqueeze(x, a)", "int64[1] a"),
        ("z = Constant<value = int64[2] {0, 0}>()\n y = Slice(x, z, a)", "int64[2] a"),
        ("y = Pad(x, a)", "int64[4] a"),
        ("p, y = Split<axis=1>(x, a)", "int64[2] a"),
        ("k = ConstantOfShape(a)\n s = ReduceSum(k)\n y = Add(x, s)", "int64[3] a"),
        ("y = CumSum(x, a)", "int64 a"),
        ("d = Constant<value = int64 {1}>()\n z = Constant<value = int64 {0}>()\n r = Range(z, a, d)\n"
         "s = ReduceSum(r)\n f = Cast<to=1>(s)\n y = Add(x, f)", "int64 a"),
        ("v = Cast<to=7>(x)\n q = Mod(v, a)\n y = Cast<to=1>(q)", "int64 a"),
    ],
)  # fmt: skip
def test_integers_that_shape_the_graph(text: str, inputs: str) -> None:
    proto = model(f"g (float[n, 6] x, {inputs}) => (float[] y) {{ {text} }}")
    assert len(drawn(proto)) >= 7


@pytest.mark.parametrize("op", ["Reshape", "Expand"])
def test_a_shape_is_the_one_that_is_declared(op: str) -> None:
    proto = model(f"g (float[2, 3, 1] x, int64[3] a) => (float[2, 3, 1] y) {{ y = {op}(x, a) }}")
    for feeds in drawn(proto):
        assert feeds["a"].tolist() == [2, 3, 1]


def test_strings_images_and_lengths() -> None:
    proto = model(
        """g (string[n] words, uint8[n, 4, 4, 3] image, float[t, n, 3] x, int32[n] lengths) =>
             (string[n] w, float[n, 4, 4, 3] p, float[t, 1, n, 5] h) {
          w = Identity(words)
          p = Cast<to=1>(image)
          h = RNN<hidden_size=5>(x, k, r, b, lengths) }""",
        k=normal(1, 5, 3),
        r=normal(1, 5, 5),
        b=normal(1, 10),
    )
    for feeds in drawn(proto):
        assert feeds["image"].dtype == np.uint8
        assert feeds["image"].max() > 200
        assert feeds["words"].dtype == object
        assert 1 <= feeds["lengths"].min() <= feeds["lengths"].max() <= feeds["x"].shape[0]


def test_one_symbol_has_one_number_and_sums_add_up() -> None:
    proto = model(
        """g (float[n, s] a, float[n, past] b, float[n, total] c) => (float[n, total] y) {
          j = Concat<axis=1>(b, a)
          y = Add(j, c) }"""
    )
    proto.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "past_sequence_length"
    proto.graph.input[2].type.tensor_type.shape.dim[1].dim_param = "past_sequence_length + s"
    for feeds in drawn(proto):
        assert feeds["a"].shape[0] == feeds["b"].shape[0] == feeds["c"].shape[0]
        assert feeds["c"].shape[1] == feeds["a"].shape[1] + feeds["b"].shape[1]


PICKY = {
    "multiples of 32": model(
        """g (float[n, 1, h, w] x) => (float[] y) {
          s = Shape(x)
          d = Div(s, k)
          m = Mul(d, k)
          y = Reshape(x, m) }""",
        k=np.int64([1, 1, 32, 32]),
    ),
    "two symbols that have to be equal": model(
        """g (float[a, 3] x, float[b, 3] z) => (float[a, 3] y) {
          c = Sub(x, z)
          s = Shape(z)
          f = Reshape(x, s)
          y = Add(f, c) }"""
    ),
    "a batch of one, baked in by the exporter": model(
        "g (float[batch, t] x) => (float[] y) { s = Shape<start=1>(x)\n y = Reshape(x, s) }"
    ),
    "a window of 512, and a batch at another place": model(
        """g (float[n, k] x, float[2, m, 8] state) => (float[n, 512] y) {
          r = Reshape(x, s)
          h = Slice(state, z, one, z)
          q = ReduceSum(h, last)
          p = Reshape(q, t)
          y = Add(r, p) }""",
        s=np.int64([-1, 512]),
        z=np.int64([0]),
        one=np.int64([1]),
        last=np.int64([2]),
        t=np.int64([-1, 1]),
    ),
}


@pytest.mark.parametrize("proto", PICKY.values(), ids=PICKY.keys())
def test_sizes_that_the_original_refuses_are_drawn_again(proto: onnx.ModelProto) -> None:
    verification = verify(proto, proto)
    assert verification.verified
    assert len(verification.bindings) >= 3
    assert len({tuple(b.values()) for b in verification.bindings}) == len(verification.bindings)
    assert all(any(v != 1 for v in b.values()) for b in verification.bindings[:3])


def test_sizes_that_leave_nothing_to_compare_are_drawn_again() -> None:
    proto = model("g (float[n, w] x) => (float[n, v] y) { y = Slice(x, start, end, axis) }",
                  start=np.int64([15]), end=np.int64([9999]), axis=np.int64([1]))  # fmt: skip
    sizes = Reference.of(proto).bindings
    assert all(b["w"] > 15 for b in sizes)
    assert {"n": sizes[0]["n"], "w": 16} in [{**b, "n": sizes[0]["n"]} for b in sizes], (
        "the least that leaves something"
    )
    always = model("g (float[n, 4] x) => (float[m, 4] y) { y = Slice(x, z, z, z) }", z=np.int64([0]))
    assert len(Reference.of(always).bindings) == 3


def test_windows_fit_into_what_they_slide_over() -> None:
    """ONNX Runtime pools over inputs that are smaller than the window, which ONNX does not define."""
    proto = model(
        """g (float[n, 2, h, w] x) => (float[n, 2, p, q] y) {
          a = MaxPool<kernel_shape=[3, 3], strides=[3, 3]>(x)
          y = AveragePool<kernel_shape=[3, 2], strides=[3, 2]>(a) }"""
    )
    for bindings in Reference.of(proto).bindings:
        assert bindings["h"] // 3 >= 3
        assert bindings["w"] // 3 >= 2


def test_the_users_shapes_are_among_those_tried() -> None:
    proto = model("g (float[n, s] x) => (float[n, s] y) { y = Relu(x) }")
    imported = load(proto, shapes={"x": (4, 21)})
    reference = Reference.of(proto, imported=imported)
    assert reference.bindings[0] == {"n": 4, "s": 21}
    assert len(reference.bindings) == 6
    fixed = load(proto, shapes={"x": (4, 21)}, fix_shapes=True)
    pinned = model("g (float[4, 21] x) => (float[4, 21] y) { y = Relu(x) }")
    assert verify(proto, pinned, imported=fixed).verified
    assert not verify(proto, pinned).verified


def test_inputs_that_take_long_to_draw_are_tried_only_where_all_do() -> None:
    """A model of four free dimensions that hardly ever runs was tried with gigabytes."""
    images = "g (float[a, b, c, d] x) => (float[] y) { y = Relu(x) }"
    drawn: list[int] = []

    def attempt(case: Case) -> None:
        drawn.append(sum(array.nbytes for array in case.feeds.values()))

    with pytest.raises(InputsNeeded):
        CaseSampler(InputPlan.of(load(model(images))), attempt).all()
    assert len(drawn) > 20
    assert max(drawn) <= 64 << 20
    large = InputPlan.of(load(model("g (float[n, 3000, 6000] x) => (float[] y) { y = Relu(x) }")))
    assert large.nbytes({"n": 2}) == 2 * 3000 * 6000 * 4
    assert CaseSampler(large, lambda case: None)._candidates(5)
    mine = replace(large, bound={"n": 9})
    assert CaseSampler(mine, lambda case: None)._candidates(5)[0] == {"n": 9}


def test_symbols_are_those_of_the_graph() -> None:
    """A file may call a dimension what an inference calls those that it makes up."""
    proto = model("g (float[unk__7, 4] x) => (float[unk__7, 4] y) { y = Relu(x) }")
    reference = Reference.of(proto)
    (symbol,) = reference.bindings[0]
    assert symbol == reference.imported.graph.type(reference.imported.graph.inputs[0]).shape[0]
    assert verify(proto, proto).verified


def test_feeds_for_measurement() -> None:
    proto = model("g (float[batch, s] x, int64[batch] ids) => (float[batch, s] y) { y = Relu(x) }")
    feeds = feeds_for_measurement(load(proto))
    assert feeds["x"].shape == (1, 64)
    bound = feeds_for_measurement(load(proto, shapes={"x": (2, 9)}), seed=1)
    assert bound["x"].shape == (2, 9)
    assert bound["ids"].shape == (2,)
    same = feeds_for_measurement(load(proto, shapes={"x": (2, 9)}), seed=1)
    assert all(np.array_equal(bound[n], same[n]) for n in bound)
    picky = model("g (float[batch, s] x) => (float[] y) { y = Reshape(x, k) }", k=np.int64([-1, 160]))
    session = ort.InferenceSession(picky.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(feeds: Any) -> None:
        if feeds["x"].size % 160:
            raise BackendError("it does not fit")

    result = feeds_for_measurement(load(picky), run=run)
    assert session.run(None, result)[0].shape[1] == 160
    with pytest.raises(InputsNeeded, match="--inputs"):
        feeds_for_measurement(load(model("g (float[3] x) => (float[3] y) { y = Relu(x) }")), run=run)


def test_defaults_are_overridden_in_one_sample() -> None:
    proto = model(
        "g (float[n] x, float[2] k = {2.0, 3.0}) => (float[] y) { s = ReduceSum(k)\n y = Mul(x, s) }"
    )
    known = Reference.of(proto).cases
    given = ["k" in k.case.feeds for k in known if k.case.values.ordinary]
    assert 0 < sum(given) < len(given)
    assert not any("k" in k.case.feeds for k in known if not k.case.values.ordinary)


def test_plans_do_not_depend_on_order_or_process() -> None:
    proto = embedding("i = Identity(ids)")
    first = InputPlan.of(load(proto)).case({"n": 2, "s": 3}, 5, 0)
    second = InputPlan.of(load(proto)).case({"n": 2, "s": 3}, 5, 0)
    assert np.array_equal(first.feeds["ids"], second.feeds["ids"])
    other = InputPlan.of(load(proto)).case({"n": 2, "s": 3}, 6, 0)
    assert not np.array_equal(first.feeds["ids"], other.feeds["ids"])


DRAWN_TOO_NARROWLY = {
    "a float that indexes a table has fractions": (
        "i = Cast<to=7>(x)\n a = Gather(t, i)\n f = Floor(x)\n d = Sub(x, f)\n y = Add(a, d)",
        "i = Cast<to=7>(x)\n y = Gather(t, i)",
    ),
    "a number that is compared has other values": (
        "c = Equal(s, zero)\n p = Mul(x, s)\n y = Where(c, x, p)",
        "y = Identity(x)",
    ),
    "logits called a mask": ("q = Mul(x, mask)\n y = Mul(q, mask)", "y = Mul(x, mask)"),
    "a default of zeros is replaced": ("y = Add(x, bias)", "q = Mul(bias, zero)\n y = Add(x, q)"),
    "a bound behind a scale": ("p = Mul(x, small)\n y = Clip(p, none, three)", "y = Mul(x, small)"),
    "a bend far away": ("d = Sub(x, far)\n r = Relu(d)\n y = Add(x, r)", "y = Identity(x)"),
}


@pytest.mark.parametrize("name", DRAWN_TOO_NARROWLY)
def test_what_was_drawn_too_narrowly(name: str) -> None:
    numbers = {"zero": 0.0, "small": 1e-4, "none": -9.0, "three": 3.0, "far": 5e3}
    inputs = ["float[4, 16] x"]
    inputs += ["float s"] if "compared" in name else []
    inputs += ["float[4, 16] mask"] if "logits" in name else []
    inputs += ["float[16] bias = {0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}"] if "default" in name else []

    def made(text: str) -> onnx.ModelProto:
        constants = {n: np.float32(v) for n, v in numbers.items()}
        head = f"g ({', '.join(inputs)}) => (float[4, 16] y)"
        return model(f"{head} {{ {text} }}", t=np.arange(32, dtype=np.float32) ** 2, **constants)

    a, b = map(made, DRAWN_TOO_NARROWLY[name])
    assert not verify(a, b).verified
    assert verify(a, a).verified


def test_feeds_at_other_sizes() -> None:
    """Few and many elements, where the model runs. Sizes of the user stay."""
    proto = model("g (float[batch, s] x) => (float[batch, s] y) { y = Relu(x) }")

    def run(feeds: dict[str, Any]) -> None:
        if feeds["x"].shape == (1, 8):
            raise BackendError("it does not run")

    found, missed = feeds_at_other_sizes(load(proto), run)
    assert [(text, feeds["x"].shape) for text, feeds in found] == [("batch=4, s=256", (4, 256))]
    assert not missed
    assert feeds_at_other_sizes(load(proto, shapes={"x": (2, 9)}), run) == ([], ())


def test_ends_of_a_range_that_do_not_run_are_named() -> None:
    proto = model("g (float[batch, s] x) => (float[batch, s] y) { y = Relu(x) }")

    def run(feeds: dict[str, Any]) -> None:
        if feeds["x"].shape[1] % 8:
            raise BackendError("it does not run")

    found, missed = feeds_at_other_sizes(load(proto, shapes={"x": (1, (15, 512))}), run)
    assert [text for text, _ in found] == ["batch=1, s=512"]
    assert missed == ("batch=1, s=15 (the model fails: it does not run)",)
    large = load(proto, shapes={"x": (1, (8, 10**9))})
    assert feeds_at_other_sizes(large, run)[1] == ("batch=1, s=1000000000 (the inputs are over 64 MB)",)


def test_a_range_of_an_input_of_unknown_rank() -> None:
    proto = model("g (float[1] x) => (float[1] y) { y = Relu(x) }")
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    found, _ = feeds_at_other_sizes(load(proto, shapes={"x": (1, (16, 512))}), lambda feeds: None)
    assert [feeds["x"].shape for _, feeds in found] == [(1, 16), (1, 512)]


def test_a_cache_usually_holds_more_than_a_text() -> None:
    proto = model(
        "g (float[batch, 4] x, float[batch, 2, past_length, 4] c, float[batch, length] t) => (float[batch, 4] y) "
        "{ y = Neg(x) }"
    )
    plan = InputPlan.of(load(proto))
    assert plan.dimensions.default({}) == {"batch": 1, "past_length": 256, "length": 64}
    assert plan.dimensions.default({"past_length": 8})["past_length"] == 8


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("float[n,3,h,w] x", {"n": 1, "h": 224, "w": 224}),
        ("float[n,h,w,3] x", {"n": 1, "h": 224, "w": 224}),
        ("float[n,1,q,k] x", {"n": 1, "q": 64, "k": 64}),
        ("float[n,4,h,w] x", {"n": 1, "h": 64, "w": 64}),
        ("float[n,samples] x", {"n": 1, "samples": 16_000}),
        ("float[n,1,t] waveform", {"n": 1, "t": 16_000}),
        ("float[n,80,t] features", {"n": 1, "t": 64}),
        ("int64[n,samples] ids", {"n": 1, "samples": 64}),
    ],
)
def test_usual_sizes(text: str, sizes: dict[str, int]) -> None:
    proto = model(f"g ({text}) => ({text.split()[0]} y) {{ y = Neg({text.split()[1]}) }}")
    assert InputPlan.of(load(proto)).dimensions.default({}) == sizes


def test_other_sizes_of_an_image_have_an_eighth_and_four_times_as_many_pixels() -> None:
    proto = model("g (float[1,3,h,w] x) => (float[1,3,h,w] y) { y = Neg(x) }")
    found, _ = feeds_at_other_sizes(load(proto), lambda feeds: None)
    assert [text for text, _ in found] == ["h=64, w=64", "h=448, w=448"]


def merged(
    step: str = "s = Squeeze(x, one) t = Unsqueeze(s, one) y = Concat<axis = 1>(past, t)",
) -> onnx.ModelProto:
    """A decoder of one file for both phases: with a cache it takes one token only."""
    return model(
        "g (float[batch,length] x, float[batch,past_length] past, bool[1] use_cache) => (float[batch,total] out)"
        f" {{ out = If(use_cache) <then_branch = cached () => (float[b,t] y) {{ {step} }},"
        " else_branch = prompt () => (float[b,t] z) { z = Neg(x) }> }",
        one=np.asarray([1]),
    )  # fmt: skip


def test_a_decoder_with_a_flag_is_measured_with_one_token() -> None:
    with open_model(merged().SerializeToString()) as original:
        feeds = feeds_for_measurement(load(merged()), 0, original.run)
    assert feeds["use_cache"].tolist() == [True]
    assert (feeds["x"].shape, feeds["past"].shape) == ((1, 1), (1, 256))


def test_other_sizes_of_a_decoder_with_a_flag() -> None:
    """More batches, a shorter and a longer cache, and a prompt. The dimension of 1 stays where it has to."""
    usual = {"batch": 1, "length": 1, "past_length": 256}
    with open_model(merged().SerializeToString()) as original:
        found, _ = feeds_at_other_sizes(load(merged()), original.run, usual=usual)
    assert [sizes for sizes, _ in found] == [
        "batch=1, length=1, past_length=32",
        "batch=1, length=1, past_length=1024",
        "batch=1, length=64, past_length=256, use_cache=False",
    ]
    assert [feeds["use_cache"].item() for _, feeds in found] == [True, True, False]


@pytest.mark.parametrize(
    "wrong", ["y = Concat<axis = 1>(past, past)", "s = Neg(x) y = Concat<axis = 1>(past, s)"]
)
def test_a_branch_that_takes_one_token_is_compared(wrong: str) -> None:
    proto = merged()
    assert verify(proto, proto, imported=load(proto)).verified
    assert not verify(proto, merged(wrong), imported=load(proto)).verified


def test_a_wrong_prompt_is_found() -> None:
    proto, other = merged(), merged()
    other.graph.node[0].attribute[1].g.node[0].op_type = "Abs"
    assert not verify(proto, other, imported=load(proto)).verified


@pytest.mark.parametrize(
    ("flags", "original", "other"),
    [
        # Values: large ones, in the branch that takes one token, and in the branch that is not the usual one.
        ("f", "If(f) <then_branch = a () => (float[n,s] p) { q = Squeeze(x, one) r = Unsqueeze(q, one) p = Exp(r) },"
         " else_branch = b () => (float[n,s] q) { q = Neg(x) }>", ("p = Exp(r)", "m = Min(r, six) p = Exp(m)")),
        ("f", "If(f) <then_branch = a () => (float[n,s] p) { p = Neg(x) },"
         " else_branch = b () => (float[n,s] q) { q = Relu(x) }>", ("q = Relu(x)", "q = Clip(x, nil, six)")),
        # Two flags that differ.
        ("f,g", "If(k) <then_branch = a () => (float[n,s] p) { p = Sin(x) },"
         " else_branch = b () => (float[n,s] q) { q = Cos(x) }>", ("p = Sin(x)", "p = Tan(x)")),
    ],
    ids=["one token", "the unusual branch", "two flags"],
)  # fmt: skip
def test_kinds_of_values_reach_each_choice_of_flags(
    flags: str, original: str, other: tuple[str, str]
) -> None:
    def made(text: str) -> onnx.ModelProto:
        inputs = "".join(f", bool[1] {flag}" for flag in flags.split(","))
        head = "h = Not(g) k = And(f, h) " if "g" in flags else ""
        return model(
            f"m (float[n,s] x{inputs}) => (float[n,s] y) {{ {head}y = {text} }}",
            one=np.asarray([1]), six=np.float32(6), nil=np.float32(0),
        )  # fmt: skip

    before, after = made(original), made(original.replace(*other))
    assert verify(before, before).verified
    assert not verify(before, after).verified


def test_further_sizes_reach_each_choice_of_flags() -> None:
    """What differs from 100 elements on, in the branch that is not the usual one."""
    text = (
        "m (float[n,s] x, bool[1] f) => (float[n,s] y) {{ y = If(f)"
        " <then_branch = a () => (float[n,s] p) {{ p = Neg(x) }},"
        " else_branch = b () => (float[n,s] q) {{ t = Shape<start=1>(x) u = Sub(t, many) v = Clip(u, low, {high})"
        " w = Cast<to=1>(v) q = Add(x, w) }}> }}"
    )
    numbers = {"many": np.asarray([99]), "low": np.int64(0), "up": np.int64(1 << 40)}
    before, after = (model(text.format(high=high), **numbers) for high in ("low", "up"))
    assert verify(before, before).verified
    assert not verify(before, after).verified

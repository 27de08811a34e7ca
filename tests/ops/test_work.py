"""Work of operators: counted by hand on small shapes."""

from math import prod

import onnx
import pytest

from xrlflow.ir import Attr, Attrs, Body, DType, Graph, Leaves, Node, TensorType, Value
from xrlflow.ops.work import (
    BATCH_DIM,
    COUNTS,
    ELEMENTWISE,
    OTHER_DIM,
    UNKNOWN_STEPS,
    Gemm,
    OpKind,
    Work,
    bodies,
    dimensions,
    work,
)

pytestmark = pytest.mark.corpus


def t(*shape: int | str | None, dtype: DType = DType.FLOAT, const: bool = False) -> TensorType:
    return TensorType(dtype, shape, const)


def count(
    op: str,
    ins: list[TensorType | None],
    outs: list[TensorType],
    bindings: dict[str, int] | None = None,
    **attrs: Attr,
) -> Work:
    inputs = tuple(Value(0 if x is None else i + 1) for i, x in enumerate(ins))
    outputs = tuple(Value(1000 + i) for i in range(len(outs)))
    return work(Node(op, inputs, outputs, tuple(outs), Attrs(attrs)), ins, bindings or {})


def test_a_product_counts_two_operations_per_element_and_step() -> None:
    w = count("MatMul", [t(3, 5, 7), t(7, 11)], [t(3, 5, 11)])
    assert w.gemm == Gemm(1, 15, 11, 7)
    assert w.flops == 2 * 15 * 11 * 7
    assert w.bytes == 4 * (3 * 5 * 7 + 7 * 11 + 3 * 5 * 11)
    assert w.kind is OpKind.GEMM


@pytest.mark.parametrize(
    ("a", "b", "out", "gemm"),
    [
        ((4, 5, 7), (4, 7, 11), (4, 5, 11), Gemm(4, 5, 11, 7)),
        ((1, 5, 7), (4, 7, 11), (4, 5, 11), Gemm(4, 5, 11, 7)),
        ((5, 7), (2, 3, 7, 11), (2, 3, 5, 11), Gemm(6, 5, 11, 7)),
        ((7,), (7, 11), (11,), Gemm(1, 1, 11, 7)),
        ((5, 7), (7,), (5,), Gemm(1, 5, 1, 7)),
    ],
)
def test_matmul_broadcasts_like_numpy(
    a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...], gemm: Gemm
) -> None:
    assert count("MatMul", [t(*a), t(*b)], [t(*out)]).gemm == gemm


@pytest.mark.parametrize(("trans_a", "trans_b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_gemm_reads_its_dimensions_through_the_transpositions(trans_a: int, trans_b: int) -> None:
    a = t(7, 5) if trans_a else t(5, 7)
    b = t(11, 7) if trans_b else t(7, 11)
    assert count("Gemm", [a, b], [t(5, 11)], transA=trans_a, transB=trans_b).gemm == Gemm(1, 5, 11, 7)


@pytest.mark.parametrize(
    ("channels", "groups", "kind"),
    [(8, 1, OpKind.CONV), (8, 2, OpKind.GROUPED_CONV), (8, 8, OpKind.DEPTHWISE_CONV)],
)
def test_a_convolution_counts_per_group(channels: int, groups: int, kind: OpKind) -> None:
    w = count("Conv", [t(2, 8, 10, 10), t(16, channels // groups, 3, 3)], [t(2, 16, 8, 8)], group=groups)
    assert w.flops == 2 * (2 * 16 * 8 * 8) * (channels // groups) * 9
    assert w.kind is kind
    assert w.channels == channels // groups


def test_a_transposed_convolution_counts_from_its_input() -> None:
    w = count("ConvTranspose", [t(1, 6, 5, 5), t(6, 2, 3, 3)], [t(1, 4, 7, 7)], group=2)
    assert w.flops == 2 * 25 * 6 * 2 * 9


@pytest.mark.parametrize(
    ("equation", "a", "b", "out", "gemm"),
    [
        ("ij,jk->ik", (5, 7), (7, 11), (5, 11), Gemm(1, 5, 11, 7)),
        ("ij,jk", (5, 7), (7, 11), (5, 11), Gemm(1, 5, 11, 7)),
        ("bhqd,bhkd->bhqk", (2, 3, 5, 7), (2, 3, 11, 7), (2, 3, 5, 11), Gemm(6, 5, 11, 7)),
        ("...ij,...jk->...ik", (4, 5, 7), (4, 7, 11), (4, 5, 11), Gemm(4, 5, 11, 7)),
        ("i,j->ij", (5,), (11,), (5, 11), Gemm(1, 5, 11, 1)),
    ],
)
def test_einsum_is_the_product_behind_it(
    equation: str, a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...], gemm: Gemm
) -> None:
    assert count("Einsum", [t(*a), t(*b)], [t(*out)], equation=equation).gemm == gemm


def test_einsum_of_one_operand_only_moves() -> None:
    w = count("Einsum", [t(5, 7)], [t(7, 5)], equation="ij->ji")
    assert (w.flops, w.kind) == (0, OpKind.SHUFFLE)


def test_attention_is_the_same_in_both_layouts() -> None:
    four = count("Attention", [t(2, 3, 5, 8), t(2, 3, 6, 8), t(2, 3, 6, 8)], [t(2, 3, 5, 8)])
    three = count(
        "Attention",
        [t(2, 5, 24), t(2, 6, 24), t(2, 6, 24)],
        [t(2, 5, 24)],
        q_num_heads=3,
        kv_num_heads=3,
    )
    assert four.gemm == three.gemm == Gemm(6, 5, 6, 16)
    assert four.flops == three.flops > 2 * 6 * 5 * 6 * 16


def test_attention_attends_to_the_past() -> None:
    past = t(2, 3, 10, 8)
    new = [t(2, 3, 1, 8)] * 3
    w = count("Attention", [*new, None, past, past], [t(2, 3, 1, 8)])
    assert w.gemm is not None
    assert w.gemm.n == 11


def test_attention_with_shared_heads_attends_to_the_past() -> None:
    past, rows = t(2, 2, 4, 8), [t(2, 1, 48), t(2, 1, 16), t(2, 1, 16)]
    grouped = {"num_heads": 6, "kv_num_heads": 2}
    w = count("com.microsoft::GroupQueryAttention", [*rows, past, past], [t(2, 1, 48)], **grouped)
    assert w.gemm == Gemm(12, 1, 5, 16)


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_a_recurrent_layer_reads_its_recurrence_at_every_step(op: str, gates: int) -> None:
    steps, batch, inputs, hidden = 6, 2, 3, 5
    w = count(
        op,
        [t(steps, batch, inputs), t(1, gates * hidden, inputs), t(1, gates * hidden, hidden)],
        [t(steps, 1, batch, hidden)],
    )
    products = 2 * steps * batch * gates * hidden * (inputs + hidden)
    assert products < w.flops <= products + steps * batch * gates * hidden * 20
    one_read = 4 * prod((1, gates * hidden, hidden))
    assert w.bytes > steps * one_read > w.footprint


@pytest.mark.parametrize("op", ["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"])
def test_views_are_free(op: str) -> None:
    w = count(op, [t(4, 6), t(1, dtype=DType.INT64)], [t(24)])
    assert (w.flops, w.bytes, w.kind) == (0, 0, OpKind.VIEW)


@pytest.mark.parametrize("op", ["Slice", "Gather", "Split"])
def test_taking_a_part_reads_the_part(op: str) -> None:
    index = t(1, dtype=DType.INT64)
    assert count(op, [t(1000, 6), index], [t(1, 6)]).bytes == 2 * 4 * 6 + 8


def test_concat_reads_and_writes_everything() -> None:
    w = count("Concat", [t(2, 6), t(3, 6)], [t(5, 6)], axis=0)
    assert (w.flops, w.bytes, w.kind) == (0, 2 * 4 * 30, OpKind.MOVE)


@pytest.mark.parametrize(
    ("shape", "perm", "kind"),
    [
        ((4, 6, 8), (1, 0, 2), OpKind.MOVE),
        ((4, 6, 8), (0, 2, 1), OpKind.SHUFFLE),
        ((4, 6, 1), (0, 2, 1), OpKind.MOVE),  # a dimension of one moves nothing
        ((1, 6, 8), (1, 0, 2), OpKind.MOVE),
    ],
)
def test_a_transpose_of_the_innermost_dimension_shuffles(
    shape: tuple[int, ...], perm: tuple[int, ...], kind: OpKind
) -> None:
    assert count("Transpose", [t(*shape)], [t(*(shape[p] for p in perm))], perm=perm).kind is kind


def test_a_transpose_without_permutation_reverses() -> None:
    assert count("Transpose", [t(4, 6)], [t(6, 4)]).kind is OpKind.SHUFFLE


def test_elementwise_operators_count_per_output_element() -> None:
    w = count("Add", [t(3, 4), t(4)], [t(3, 4)])
    assert (w.flops, w.bytes, w.kind) == (12, 4 * 28, OpKind.ELEMENTWISE)
    assert count("Erf", [t(3, 4)], [t(3, 4)]).flops == 12 * ELEMENTWISE["Erf"]


def test_a_power_with_one_exponent_is_cheap() -> None:
    one = count("Pow", [t(3, 4), t()], [t(3, 4)])
    each = count("Pow", [t(3, 4), t(3, 4)], [t(3, 4)])
    assert one.flops < each.flops / 10


def test_what_nobody_knows_counts_one_operation_per_element() -> None:
    w = count("my.domain::Strange", [t(3, 4)], [t(5)])
    assert (w.flops, w.bytes, w.kind) == (5, 4 * 17, OpKind.OTHER)


@pytest.mark.parametrize("op", sorted(COUNTS))
def test_every_count_takes_what_does_not_fit(op: str) -> None:
    """Types of unknown rank, absent inputs: a number all the same."""
    unknown = TensorType(DType.FLOAT, None)
    for ins in ([unknown] * 3, [None, unknown, None], [unknown], [t(), t(), t()]):
        w = count(op, list(ins), [unknown])
        assert w.flops >= 0
        assert w.bytes >= 0


def test_the_tables_name_operators_that_exist() -> None:
    known = {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}
    named = {op for op in (*COUNTS, *ELEMENTWISE) if "::" not in op}
    assert named <= known
    assert not set(COUNTS) & set(ELEMENTWISE)


def test_bytes_follow_the_element_type() -> None:
    for dtype, size in ((DType.DOUBLE, 8), (DType.FLOAT16, 2), (DType.INT8, 1)):
        assert count("Add", [t(6, dtype=dtype), t(6, dtype=dtype)], [t(6, dtype=dtype)]).bytes == 18 * size
    assert count("Conv", [t(1, 4, 4, dtype=DType.DOUBLE)] * 2, [t(1, 1, 1, dtype=DType.DOUBLE)]).bits == 64


def test_symbols_are_bound_or_count_by_their_names() -> None:
    shape = t("batch_size", "seq", None, 3)
    assert dimensions(shape, {"seq": 17}) == (BATCH_DIM, 17, OTHER_DIM, 3)
    assert dimensions(t(None, "N"), {}) == (BATCH_DIM, BATCH_DIM)
    assert dimensions(TensorType(DType.FLOAT, None), {}) == (OTHER_DIM,)
    assert count("Relu", [t("seq")], [t("seq")], {"seq": 5}).flops == 5


def body(op: str, size: int) -> Body:
    """A body that applies `op` to its one input of `size` elements, and one constant node that is free."""
    leaves = Leaves()
    leaves.types[Value(1)] = t(size)
    leaves.types[Value(2)] = t(size, const=True)
    free = Node("Exp", (Value(2),), (Value(4),), (t(size, const=True),))
    return Body(
        Graph.make([Node(op, (Value(1),), (Value(3),), (t(size),)), free], (Value(1),), (Value(3),), leaves),
        (),
    )


def test_an_if_counts_every_branch() -> None:
    w = count(
        "If", [t(dtype=DType.BOOL)], [t(10)], then_branch=body("Relu", 10), else_branch=body("Relu", 30)
    )
    assert w.flops == 40


def test_a_scan_counts_its_body_as_often_as_its_input_is_long() -> None:
    w = count("Scan", [t(10), t("T", 10)], [t(10)], {"T": 7}, body=body("Relu", 10), num_scan_inputs=1)
    assert w.flops == 70
    across = count(
        "Scan", [t(10, 3)], [t(10)], body=body("Relu", 10), num_scan_inputs=1, scan_input_axes=(1,)
    )
    assert across.flops == 30


def test_a_scan_does_not_take_captured_values_for_scanned_ones() -> None:
    node = Node(
        "Scan",
        (Value(1), Value(2)),
        (Value(9),),
        (t(10),),
        Attrs({"body": body("Relu", 10), "num_scan_inputs": 1}),
        captured=1,
    )
    [(graph, times)] = bodies(node, [t(4, 10), t(99)], {})
    assert times == 4
    assert graph.node_count == 2


def test_a_loop_counts_its_body_as_often_as_it_collects_or_a_few_times() -> None:
    assert count("Loop", [t(dtype=DType.INT64), None], [t(4, 10)], body=body("Relu", 10)).flops == 40
    assert (
        count("Loop", [t(dtype=DType.INT64), None], [t("T", 10)], {"T": 5}, body=body("Relu", 10)).flops == 50
    )
    unknown = count("Loop", [t(dtype=DType.INT64), None, t(10)], [t(10)], body=body("Relu", 10))
    assert unknown.flops == 10 * UNKNOWN_STEPS


def test_more_open_dimensions_than_a_machine_holds_count_as_one() -> None:
    """A Reshape to 255 sizes that an input has: 64 to the power of 255 is no float."""
    type = TensorType(DType.FLOAT, (2, *(f"d{i}" for i in range(255))))
    assert dimensions(type, {}) == (2, *[1] * 255)
    assert dimensions(TensorType(DType.FLOAT, (2, "d")), {}) == (2, 64)


def test_packed_weights_are_unpacked_in_each_run() -> None:
    def product(rows: int, n: int = 64, **attrs: int) -> Work:
        packed = t(n, 3, 16, dtype=DType.UINT8, const=True)
        ins = [t(1, rows, 96), packed, t(n, 3, const=True)]
        out = [t(1, rows, n)]
        return count("com.microsoft::MatMulNBits", ins, out, K=96, N=n, bits=4, block_size=32, **attrs)

    plain = count("MatMul", [t(1, 16, 96), t(96, 64)], [t(1, 16, 64)])
    assert product(16).gemm == plain.gemm == Gemm(1, 16, 64, 96)
    assert product(16, accuracy_level=4).flops < plain.flops < product(16).flops
    assert product(1).bytes < count("MatMul", [t(1, 1, 96), t(96, 64)], [t(1, 1, 64)]).bytes / 4
    assert product(16, 128).flops == 2 * product(16).flops

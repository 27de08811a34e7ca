"""Decisions that an operator-level model can see come out as measured on real machines (reference figures)."""

from dataclasses import replace

import numpy as np
import pytest

from tests.cost.graphs import Builder, t
from xrlflow.cost.machine import Machine
from xrlflow.cost.roofline import Roofline, seconds
from xrlflow.ir import ABSENT, Attr, Attrs, Body, DType, Graph, Node, TensorType, Value
from xrlflow.ops.work import Gemm, OpKind, Work

MODEL = Roofline(machine=Machine.reference())


def price(op: str, ins: list[TensorType], *outs: TensorType, model: Roofline = MODEL, **attrs: Attr) -> float:
    b = Builder()
    node = b.node(op, [b.input(x) for x in ins], *outs, **attrs)
    return model.cost(b.graph(*node.outputs))


def conv(inputs: int, outputs: int, size: int, kernel: int, groups: int = 1) -> float:
    weight = t(outputs, inputs // groups, kernel, kernel, const=True)
    attrs: dict[str, Attr] = {"group": groups} if groups > 1 else {}
    return price("Conv", [t(1, inputs, size, size), weight], t(1, outputs, size, size), **attrs)


def split(shape: tuple[int, ...], axis: int, *sizes: int) -> float:
    outs = [t(*shape[:axis], n, *shape[axis + 1 :]) for n in sizes]
    return price("Split", [t(*shape)], *outs, axis=axis)


def concat(axis: int, *shapes: tuple[int, ...]) -> float:
    total = sum(s[axis] for s in shapes)
    return price(
        "Concat", [t(*s) for s in shapes], t(*shapes[0][:axis], total, *shapes[0][axis + 1 :]), axis=axis
    )


def matmul(m: int, k: int, n: int) -> float:
    return price("MatMul", [t(m, k), t(k, n, const=True)], t(m, n))


@pytest.mark.parametrize(("channels", "size"), [(128, 56), (256, 28), (512, 14)])
def test_groups_are_merged_up_to_a_vector_of_channels(channels: int, size: int) -> None:
    by_width = {width: conv(channels, channels, size, 3, channels // width) for width in (4, 8, 16, 32)}
    assert by_width[16] < min(by_width[4], by_width[8])
    assert by_width[8] > by_width[4]  # merging twos does not pay yet
    assert by_width[32] > by_width[16]
    assert conv(channels, channels, size, 3) > 2 * by_width[4]


def test_enlarging_a_kernel_to_merge_convolutions_loses() -> None:
    apart = conv(16, 64, 55, 1) + conv(16, 64, 55, 3)
    merged = conv(16, 128, 55, 3) + split((1, 128, 55, 55), 1, 64, 64)
    assert merged > 1.2 * apart


def test_merging_parallel_convolutions_gains_nothing() -> None:
    apart = 3 * conv(192, 64, 35, 1)
    merged = conv(192, 192, 35, 1) + split((1, 192, 35, 35), 1, 64, 64, 64)
    assert apart < merged < 1.15 * apart


def test_merging_query_key_and_value_is_neutral() -> None:
    apart = 3 * matmul(64, 768, 768)
    merged = matmul(64, 768, 2304) + split((64, 2304), 1, 768, 768, 768)
    assert merged == pytest.approx(apart, rel=0.03)


@pytest.mark.parametrize(("steps", "width"), [(10, 512), (64, 256), (8, 2048)])
def test_products_that_share_a_weight_become_one(steps: int, width: int) -> None:
    apart = steps * matmul(1, width, 4 * width)
    rows = [(1, width)] * steps
    merged = matmul(steps, width, 4 * width) + concat(0, *rows) + split((steps, 4 * width), 0, *[1] * steps)
    assert merged < 0.6 * apart


@pytest.mark.parametrize(("steps", "width"), [(10, 512), (64, 256), (16, 1024)])
def test_a_native_recurrent_layer_beats_the_unrolled_one(steps: int, width: int) -> None:
    gates, state = t(1, 4 * width), t(1, width)
    step = (
        2 * matmul(1, width, 4 * width)
        + 2 * price("Add", [gates, gates], gates)
        + split((1, 4 * width), 1, *[width] * 4)
        + 3 * price("Sigmoid", [state], state)
        + 2 * price("Tanh", [state], state)
        + 3 * price("Mul", [state, state], state)
        + price("Add", [state, state], state)
    )
    weight = t(1, 4 * width, width, const=True)
    native = price(
        "LSTM",
        [t(steps, 1, width), weight, weight],
        t(steps, 1, 1, width),
        t(1, 1, width),
        t(1, 1, width),
        hidden_size=width,
    )
    assert native < 0.9 * steps * step


def test_a_convolution_of_a_concat_is_better_as_a_sum_of_convolutions() -> None:
    image = (1, 64, 55, 55)
    together = concat(1, image, image) + conv(128, 16, 55, 1)
    out = t(1, 16, 55, 55)
    assert 2 * conv(64, 16, 55, 1) + price("Add", [out, out], out) < together


def test_a_view_costs_its_call_and_a_copy_more() -> None:
    big = t(512, 512)
    assert price("Reshape", [big, t(1, dtype=DType.INT64)], t(512 * 512)) == MODEL.machine.overhead
    assert price("Transpose", [big], big, perm=(1, 0)) > 2 * price("Concat", [big], big, axis=0)


def test_padding_to_vectors_is_paid_for() -> None:
    assert conv(64, 20, 28, 3) == pytest.approx(conv(64, 32, 28, 3), rel=0.01)
    assert conv(20, 64, 28, 3) > 1.5 * conv(16, 64, 28, 3)


def test_what_exceeds_the_cache_streams_from_memory() -> None:
    machine = MODEL.machine
    inside = Work(0, machine.cache, OpKind.ELEMENTWISE)
    outside = Work(0, machine.cache + 1, OpKind.ELEMENTWISE)
    ratio = machine.cache_bandwidth / machine.memory_bandwidth
    assert seconds(outside, machine) == pytest.approx(seconds(inside, machine) * ratio, rel=0.02)


def test_small_calls_do_not_wake_the_threads() -> None:
    machine = replace(MODEL.machine, fork=1e-3)
    small = Work(1e4, 0, OpKind.ELEMENTWISE)
    one_thread = 1e4 / (machine.peak / machine.threads * machine.speeds[OpKind.ELEMENTWISE].compute)
    assert seconds(small, machine) == pytest.approx(machine.overhead + one_thread)


def test_twice_the_peak_is_half_the_time_of_a_large_product() -> None:
    product = Work(1e12, 1e3, OpKind.GEMM, gemm=Gemm(1, 8192, 8192, 8192))
    fast = replace(MODEL.machine, peak=2 * MODEL.machine.peak)
    assert seconds(product, fast) == pytest.approx(seconds(product, MODEL.machine) / 2, rel=1e-3)


@pytest.mark.parametrize("kind", list(OpKind))
def test_no_work_takes_the_call_and_never_fails(kind: OpKind) -> None:
    nothing = Work(0, 0, kind, gemm=Gemm(1, 0, 0, 0), channels=3)
    assert seconds(nothing, MODEL.machine) == MODEL.machine.overhead


def test_wider_elements_take_longer() -> None:
    def product(dtype: DType) -> float:
        square = t(512, 512, dtype=dtype)
        return price("MatMul", [square, square], square)

    assert product(DType.DOUBLE) > 1.8 * product(DType.FLOAT)


def test_a_body_is_priced_by_its_nodes() -> None:
    b = Builder()
    x = b.input(t(1 << 16))
    y = b.node("Tanh", [x], t(1 << 16))
    inner: Graph = b.graph(y.id)
    node = Node(
        "Scan",
        (Value(1),),
        (Value(2),),
        (t(5, 1 << 16),),
        Attrs({"body": Body(inner, ()), "num_scan_inputs": 1}),
    )
    outer = Builder()
    outer.leaves.types[Value(1)] = t(5, 1 << 16)
    graph = Graph.make([node], (Value(1),), (Value(2),), outer.leaves)
    overhead = MODEL.machine.overhead
    assert MODEL.cost(graph) == pytest.approx(overhead + 5 * (overhead + MODEL.cost(inner)))


def test_a_loop_is_priced_by_its_trip_count() -> None:
    b = Builder()
    inner: Graph = b.graph(b.node("Tanh", [b.input(t(1 << 16))], t(1 << 16)).id)
    outer = Builder()
    counts = [outer.leaves.intern(np.array(n), DType.INT64) for n in (3, 30)]
    outer.leaves.types[Value(1)] = t(1 << 16)

    def cost(count: Value) -> float:
        attrs = Attrs({"body": Body(inner, ())})
        node = Node("Loop", (count, ABSENT, Value(1)), (Value(2),), (t(1 << 16),), attrs)
        return MODEL.cost(Graph.make([node], (Value(1),), (Value(2),), outer.leaves))

    overhead = MODEL.machine.overhead
    assert cost(counts[1]) - overhead == pytest.approx(10 * (cost(counts[0]) - overhead))


def test_bindings_decide_what_symbols_cost() -> None:
    def cost(n: int) -> float:
        model = Roofline(bindings={"seq": n})
        return price("MatMul", [t("seq", 512), t(512, 512, const=True)], t("seq", 512), model=model)

    assert cost(1024) > 10 * cost(16)


def half(op: str, ins: list[TensorType], *outs: TensorType) -> float:
    """The price of an operator in float16."""
    return price(op, [replaced(x) for x in ins], *map(replaced, outs))


def replaced(type: TensorType) -> TensorType:
    return TensorType(DType.FLOAT16, type.shape, type.const)


def test_float16_without_a_kernel_costs_the_casts_that_the_runtime_adds() -> None:
    x = t(1, 64, 56, 56)
    there = price("Cast", [replaced(x)], x, to=int(DType.FLOAT))
    back = price("Cast", [x], replaced(x), to=int(DType.FLOAT16))
    assert half("Sigmoid", [x], x) == pytest.approx(price("Sigmoid", [x], x) + there + back)
    weights = t(64, 64, 3, 3, const=True)
    assert half("Conv", [x, weights], x) == pytest.approx(price("Conv", [x, weights], x) + there + back)


def test_moving_float16_costs_half() -> None:
    x = t(64, 512, 512)
    assert half("Transpose", [x], x) == pytest.approx(price("Transpose", [x], x) / 2, rel=0.05)

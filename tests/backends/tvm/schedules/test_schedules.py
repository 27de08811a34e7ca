"""Schedules: tiles fit, long sums are divided into chunks, and every core has its part."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.tvm.kernels.test_kernels import GRAPHS, network
from xrlflow.backends.tvm import Machine
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.backends.tvm.schedules.contraction import chunk
from xrlflow.backends.tvm.schedules.dispatch import schedule
from xrlflow.backends.tvm.schedules.ratings import Grid, tile_of
from xrlflow.backends.tvm.schedules.rows import partial_lanes
from xrlflow.backends.tvm.toolchain.import_tvm import tvm

MACHINE = Machine("x86_64-unknown-linux-gnu", "znver4", 2, 16, 32)


@given(
    rows=st.integers(1, 400),
    columns=st.integers(1, 400),
    stride=st.sampled_from([64, 3072, 4096, 12288]),
    reduction=st.sampled_from([1, 64, 3072, 100_000]),
    padding=st.booleans(),
)
def test_tiles_fit_registers_and_output(
    rows: int, columns: int, stride: int, reduction: int, padding: bool
) -> None:
    tile = tile_of(Grid(rows, columns, stride, reduction, padding, padding), MACHINE)
    vectors = tile.columns // tile.lanes
    assert tile.columns == vectors * tile.lanes
    assert tile.rows * vectors + vectors + 1 <= MACHINE.registers
    if not padding:
        assert rows % tile.rows == 0
        assert columns % tile.columns == 0


def test_tiles_of_products_that_networks_have() -> None:
    """With fewer than 8 accumulators of whole vectors, each would wait for its own last result."""
    for rows, columns in ((128, 768), (512, 512), (3136, 64), (56, 64), (14, 256), (7, 512)):
        tile = tile_of(Grid(rows, columns, 1024, 576), MACHINE)
        assert tile.lanes == 16
        assert tile.rows * tile.columns >= 8 * 16


def test_channelwise_tiles_leave_registers_for_the_weights() -> None:
    """The 9 or 25 weights of one vector of channels stay in registers, together with the accumulators."""
    for rows, columns, taps in ((56, 144, 9), (28, 240, 25), (112, 32, 9)):
        tile = tile_of(Grid(rows, columns, 12, taps, channelwise=True), MACHINE)
        assert (tile.rows, tile.columns, tile.lanes) == (2, 16, 16)
    # With a prime number of rows, a tile has two vectors of channels instead of two rows.
    assert tile_of(Grid(7, 960, 12, 9, channelwise=True), MACHINE).columns == 32


def test_padding_saves_a_prime_number_of_rows() -> None:
    assert tile_of(Grid(197, 768, 3072, 768), MACHINE).rows == 1
    assert tile_of(Grid(197, 768, 3072, 768, pad_rows=True), MACHINE).rows > 4


@pytest.mark.parametrize(
    ("extents", "expected"),
    [
        ([192], None),
        ([193], None),  # a prime number
        ([194], (0, 97)),
        ([1, 1, 480], (2, 120)),
        ([3, 3, 64], (0, 1)),
        ([3, 3, 512], (2, 128)),
        ([2, 97], (0, 1)),
        ([1, 1, 384], (2, 96)),  # not three loops in succession
        ([291], (0, 97)),
        ([257], None),
        ([382], (0, 191)),
        ([11, 11, 3], None),
        ([3072], (0, 128)),
    ],
)
def test_long_sums_are_made_of_chunks(extents: list[int], expected: tuple[int, int] | None) -> None:
    assert chunk(extents) == expected


@pytest.mark.parametrize(
    ("along", "lanes", "expected"),
    [
        (48, 16, 16),
        (120, 16, 8),
        (16, 16, 8),
        (15, 16, 0),
        (101, 16, 0),
        (32, 1, 0),
        (6632, 16, 0),
        (768, 16, 16),
    ],
)
def test_lanes_of_partial_results(along: int, lanes: int, expected: int) -> None:
    assert partial_lanes(along, lanes) == expected


@pytest.mark.parametrize(
    ("channels", "expected"),
    [
        (32, [("parallel", 2), ("serial", 60), ("serial", 60), ("unrolled", 1), ("vectorized", 16)]),
        (64, [("parallel", 2), ("serial", 60), ("serial", 60), ("unrolled", 2), ("vectorized", 16)]),
        (1024, [("parallel", 16), ("serial", 60), ("serial", 60), ("unrolled", 4), ("vectorized", 16)]),
        (1000, [("parallel", 125), ("serial", 60), ("serial", 60), ("unrolled", 1), ("vectorized", 8)]),
    ],
)
def test_sums_across_memory_are_vectors_abreast_for_each_core(
    channels: int, expected: list[tuple[str, int]]
) -> None:
    te = tvm().te
    x = te.placeholder((1, 60, 60, channels), name="x")
    row, column = te.reduce_axis((0, 60)), te.reduce_axis((0, 60))
    y = te.compute((1, channels), lambda n, c: te.sum(x[n, row, column, c], axis=[row, column]), name="y")
    done = schedule(tvm().IRModule({"main": te.create_prim_func([x, y])}), MACHINE)
    assert loops(done, "y_update") == expected


def loops(sch: Any, block: str) -> list[tuple[str, int]]:
    """The loops around a block, from the outside: the kind and the number of iterations of each."""
    kinds = ("serial", "parallel", "vectorized", "unrolled")
    result = [sch.get(loop) for loop in sch.get_loops(sch.get_sblock(block))]
    return [(kinds[int(loop.kind)], int(loop.extent)) for loop in result]


def scheduled(graph: str, name: str) -> Any:
    """The only kernel whose name contains `name`, scheduled."""
    module = fuse(import_model(network(graph)), MACHINE)
    (kernel,) = (f for v, f in module.functions.items() if name in v.name_hint)
    return schedule(tvm().IRModule({"main": kernel.with_attr("global_symbol", "main")}), MACHINE)


def test_chunks_of_long_sums_are_tiles_in_vectors() -> None:
    """There are 35 pixels in 5 tiles of 7, and four chunks of 120 terms. Steps are unrolled, with whole vectors."""
    graph = "(float[1,480,7,5] x, float[48,480,1,1] w) => (float[1,48,7,5] y) { y = Conv(x, w) }"
    result = scheduled(graph, "conv")
    (sums,) = (
        b
        for b in result.get_child_blocks(result.get_sblock("root"))
        if "rf_update" in result.get(b).name_hint
    )
    around = loops(result, result.get(sums).name_hint)
    assert [n for kind, n in around if kind != "unrolled" and n > 1] == [5, 4, 120, 16]
    assert around[-1] == ("vectorized", 16)
    assert math.prod(n for kind, n in around if kind == "unrolled") == 21


def test_few_rows_are_shared_by_all_threads() -> None:
    """There is only one mean, but the kernel that reads it has 256 rows of 16 vectors."""
    graph = "(float[1,256,256] x) => (float[1,256,256] y) { m = ReduceMean(x)\n y = Sub(x, m) }"
    result = scheduled(graph, "mean")
    (last,) = result.get_output_blocks(result.get_sblock("root"))
    assert loops(result, result.get(last).name_hint) == [("parallel", 256 * 16), ("vectorized", 16)]


def test_sums_that_others_read_along_columns_are_made_once() -> None:
    """There are as many columns as rows, and each row of the result reads all sums."""
    graph = GRAPHS["sums of rows beside columns"]
    result = scheduled(graph, "sum")
    names = [result.get(b).name_hint for b in result.get_child_blocks(result.get_sblock("root"))]
    assert len(names) > 3
    assert all(math.prod(n for _, n in loops(result, name)) <= 48 * 101 for name in names)


def test_scalars_do_not_keep_long_sums_whole() -> None:
    result = scheduled(GRAPHS["product, long, a scalar beside"], "matmul")
    names = [result.get(b).name_hint for b in result.get_child_blocks(result.get_sblock("root"))]
    assert any("rf_update" in name for name in names)


def test_means_of_rows_are_made_by_all_threads() -> None:
    """There are few results, and each is the mean of many elements."""
    graph = "(float[40,6625] x) => (float[40,1] y) <int64[1] a = {1}> { y = ReduceMean(x, a) }"
    assert loops(scheduled(graph, "mean"), "kept")[0] == ("parallel", 40)

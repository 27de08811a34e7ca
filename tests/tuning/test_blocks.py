"""Depthwise convolutions with their neighbours are measured, one by one and in bands, and the faster of both is
used."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.backends.tvm.kernels.test_bands import block_graph
from tests.backends.tvm.kernels.test_kernels import network, numbers
from tests.tuning.measured import MACHINE, put, setting, times, tune_one
from xrlflow import api
from xrlflow.backends.library_files import library_path
from xrlflow.backends.onnxruntime import open_model, with_library
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.devices.execution import ExecutionTarget
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.kernels import bands_plan
from xrlflow.backends.tvm.kernels.algorithms import Algorithms, TimedBlock
from xrlflow.backends.tvm.kernels.bands import BandBlocking, ConvBlock, Tile
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm, KernelChoice
from xrlflow.backends.tvm.kernels.steps import Earlier, Extra, Step
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.executable import schedule_all
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.backends.tvm.lowering.joined import joined
from xrlflow.backends.tvm.lowering.plan import plan_of, sequence
from xrlflow.tuning import blocks
from xrlflow.tuning.blocks import Block, BlockChoice
from xrlflow.tuning.layer_times import LayerLog, StoredTimes, block_results, together
from xrlflow.tuning.layer_tuning import LayerMeasurer
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.lowering import Lowering
from xrlflow.tuning.measurable import key_of
from xrlflow.tuning.pool import Pool
from xrlflow.tuning.session import Stop, TuningResult
from xrlflow.tuning.store import Record, Store
from xrlflow.tuning.tuners.protocol import Measurement

pytestmark = pytest.mark.measures

APART = BlockChoice()
BIAS = Step("relax.add", (Earlier(0), Extra(True)))
RELU = (BIAS, Step("relax.nn.relu", (Earlier(1),)))
SILU = (
    BIAS,
    Step("relax.sigmoid", (Earlier(1),)),
    Step("relax.multiply", (Earlier(1), Earlier(2))),
)
RESIDUAL = (BIAS, Step("relax.add", (Extra(False), Earlier(1))))
WORKLOADS = {
    "a residual": ConvBlock((1, 9, 9, 16), (1, 9, 9, 48), (1, 9, 9, 16), (3, 3), (1, 1), 1, 1, RELU, RELU, RESIDUAL),
    "strides, odd channels, a batch": ConvBlock(
        (2, 9, 8, 11), (2, 5, 4, 37), (2, 5, 4, 13), (5, 5), (2, 2), 2, 2, SILU, SILU, ()
    ),
    "not all rows are read": ConvBlock((1, 9, 9, 8), (1, 2, 2, 16), (1, 2, 2, 8), (3, 3), (4, 4), 0, 0, (), (), ()),
    "expansion alone": ConvBlock((1, 9, 9, 16), (1, 9, 9, 48), (1, 9, 9, 48), (3, 3), (1, 1), 1, 1, RELU, RELU, None),
    "projection alone": ConvBlock((1, 9, 9, 48), (1, 9, 9, 48), (1, 9, 9, 16), (3, 3), (1, 1), 1, 1, None, RELU, RELU),
    "equal 1x1 convolutions": ConvBlock(
        (1, 9, 9, 32), (1, 9, 9, 32), (1, 9, 9, 32), (3, 3), (1, 1), 1, 1, RELU, RELU, RELU
    ),
}  # fmt: skip
BLOCK = Block(WORKLOADS["a residual"], far=False)
MODEL = block_graph("1,16,9,9", 48, "1,16,9,9", end="y = Add(x, p)")
CHAIN = (
    "(float[1,32,20,20] x, float[32,1,3,3] w, float[64,32,1,1] w1, float[64,1,3,3] w2, float[32,64,1,1] w3,"
    " float[32,32,1,1] v) => (float[1,32,20,20] y) { z = Conv(x, v) a = Conv<group=32, pads=[1,1,1,1]>(z, w)"
    " b = Relu(a) c = Conv(b, w1) d = Relu(c) e = Conv<group=64, pads=[1,1,1,1]>(d, w2) f = Relu(e)"
    " y = Conv(f, w3) }"
)
"""Two depthwise convolutions with a 1x1 convolution between them, which can be fused with either of them."""


def untuned(block: Block) -> BlockChoice:
    """The block's untuned kernel in bands."""
    return block.untuned(MACHINE)[1]


def other(block: Block) -> BlockChoice:
    """Another kernel in bands than the untuned one."""
    return next(choice for choice in block.everything(MACHINE) if choice not in block.untuned(MACHINE))


def blocks_of(text: str, timings: StoredTimes | None = None) -> list[Block]:
    log = LayerLog(timings)
    fuse(import_model(network(text)), MACHINE, algorithms=Algorithms(timings=log))
    return log.blocks


def bands_in(text: str, algorithms: Algorithms) -> int:
    """The number of blocks of a model that are fused to one kernel."""
    module = fuse(import_model(network(text)), MACHINE, algorithms=algorithms)
    return sum("bands" in variable.name_hint for variable in module.functions)


def test_a_store_knows_blocks_of_earlier_versions() -> None:
    assert Block(WORKLOADS["a residual"], True).key == "block af73935ad39dcfb1e8b60a27"


@pytest.mark.parametrize("name", WORKLOADS)
def test_all_ways_of_a_block_compute_the_same(name: str, pool: Pool) -> None:
    block = Block(WORKLOADS[name], far=False)
    wanted = block.expected(MACHINE)
    assert wanted.shape == block.workload.out
    some = [*block.untuned(MACHINE), other(block)]
    assert [choice.blocking is None for choice in some] == [True, False, False]
    modules = [block.kernel(choice, MACHINE) for choice in some]
    with pool.built(MACHINE.target(), modules) as built:
        for choice, kernel in zip(some, built):
            assert kernel is not None
            assert not isinstance(kernel, Measurement)
            (result,) = pool.called(kernel, block.arguments(choice, MACHINE))
            np.testing.assert_allclose(result, wanted, rtol=0, atol=5e-6 * np.abs(wanted).max())


def test_what_is_expected_is_the_block() -> None:
    """Compares with ONNX Runtime: the block of a workload has the right operators, paddings and layouts."""
    workload = WORKLOADS["strides, odd channels, a batch"]
    drawn = blocks._samples(workload)
    assert drawn.expand is not None
    assert drawn.project is not None
    model = network(
        "(float[2,11,9,8] x, float[37,11,1,1] w, float[37] b, float[37,1,5,5] w1, float[37] b1,"
        " float[13,37,1,1] w2) => (float[2,13,5,4] y) { e = Conv(x, w, b) s = Sigmoid(e) f = Mul(e, s)"
        " d = Conv<group=37, pads=[2,2,2,2], strides=[2,2]>(f, w1, b1) t = Sigmoid(d) g = Mul(d, t) y = Conv(g, w2) }"
    )
    del model.graph.initializer[:]
    arrays = {
        "w": drawn.expand.weights.transpose(3, 2, 0, 1), "b": drawn.expand.extras[0],
        "w1": drawn.depthwise.weights.transpose(3, 2, 0, 1), "b1": drawn.depthwise.extras[0],
        "w2": drawn.project.weights.transpose(3, 2, 0, 1),
    }  # fmt: skip
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
    with open_model(model.SerializeToString(), threads=1) as runtime:
        (wanted,) = runtime.run({"x": np.ascontiguousarray(drawn.image.transpose(0, 3, 1, 2))})
    result = Block(workload, False).expected(MACHINE).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["a residual", "expansion alone", "projection alone"])
def test_a_block_of_a_model_has_this_form(name: str) -> None:
    """Measurements are stored under the key that a compilation of the model looks up."""
    texts = {
        "a residual": MODEL,
        "expansion alone": (
            "(float[1,16,9,9] x, float[48,16,1,1] w, float[48] b, float[48,1,3,3] w1, float[48] b1)"
            " => (float[1,48,9,9] y) { e = Conv(x, w, b) f = Relu(e)"
            " d = Conv<group=48, pads=[1,1,1,1]>(f, w1, b1) y = Relu(d) }"
        ),
        "projection alone": (
            "(float[1,48,9,9] x, float[48,1,3,3] w, float[48] b, float[16,48,1,1] w1, float[16] b1)"
            " => (float[1,16,9,9] y) { e = Conv<group=48, pads=[1,1,1,1]>(x, w, b) f = Relu(e)"
            " d = Conv(f, w1, b1) y = Relu(d) }"
        ),
    }
    (result,) = blocks_of(texts[name])
    assert not result.far
    workload = result.workload
    assert replace(workload, expand=None, depthwise=(), project=None) == replace(
        WORKLOADS[name], expand=None, depthwise=(), project=None
    )
    assert [s is None for s in (workload.expand, workload.project)] == [
        s is None for s in (WORKLOADS[name].expand, WORKLOADS[name].project)
    ]
    if name != "a residual":
        assert workload == WORKLOADS[name]


def test_an_expansion_that_is_read_elsewhere_is_no_part_of_a_block() -> None:
    """The fused kernel would compute the expansion a second time."""
    text = (
        "(float[1,16,9,9] x, float[48,16,1,1] w, float[48,1,3,3] w1, float[16,48,1,1] w2)"
        " => (float[1,16,9,9] y, float[1,48,9,9] f) { e = Conv(x, w) f = Relu(e)"
        " d = Conv<group=48, pads=[1,1,1,1]>(f, w1) a = Relu(d) y = Conv(a, w2) }"
    )
    (result,) = blocks_of(text)
    assert result.workload.expand is None
    assert result.workload.project is not None


@pytest.mark.parametrize("far", [False, True])
def test_blocks_know_where_their_weights_come_from(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.backends.tvm.fusion.bands.weights_from_memory", lambda main: far)
    (result,) = blocks_of(MODEL)
    assert result.far == far


def test_every_way_is_stored() -> None:
    result = BLOCK.everything(MACHINE)
    assert (
        {APART, BlockChoice(bands_plan.best_blocking(BLOCK.workload, MACHINE))}
        == {*BLOCK.untuned(MACHINE)}
        <= {*result}
    )
    assert [BlockChoice.stored(choice.text) for choice in result] == result


def test_keys_are_those_of_blocks() -> None:
    keys = [
        block.key
        for workload in WORKLOADS.values()
        for far in (False, True)
        for block in [Block(workload, far)]
    ]
    assert len(set(keys)) == len(keys)
    assert all(key.startswith("block ") for key in keys)
    assert BLOCK.name == "3x3 block of 16 to 48 to 16 channels at 9x9"


def test_blocks_are_measured_once(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[BlockChoice] = []
    arguments = Block.arguments

    def watched(block: Block, choice: BlockChoice, machine: Any) -> Any:
        checked.append(choice)
        return arguments(block, choice, machine)

    monkeypatch.setattr(Block, "arguments", watched)
    assert tune_one(store, BLOCK, 3).measured == 3
    assert {*checked} > {*BLOCK.untuned(MACHINE)}, "each way is compared before it is timed"
    records = store.records(BLOCK.key, setting())
    assert {record.candidate for record in records} == {key_of(BLOCK, choice, MACHINE) for choice in checked}
    assert all(record.error is None for record in records)
    result = times(store).of_block(BLOCK.workload, far=False)
    assert result is not None
    assert result.seconds > 0
    assert BlockChoice(result.blocking) in checked
    assert times(store).of_block(BLOCK.workload, far=True) == result, (
        "at another distance, for want of better"
    )
    assert tune_one(store, BLOCK, 3).measured == 0


def test_kernels_that_compute_something_else_are_no_choice(
    store: Store, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = blocks._in_bands

    def wrong(workload: ConvBlock, blocking: BandBlocking) -> Any:
        return fused(replace(workload, depthwise=workload.depthwise[:1]), blocking)

    monkeypatch.setattr(blocks, "_in_bands", wrong)
    tune_one(store, BLOCK, 3)
    assert sum("off by" in (record.error or "") for record in store.records(BLOCK.key)) == 2
    result = times(store).of_block(BLOCK.workload, far=False)
    assert result is not None
    assert result.blocking is None


@pytest.mark.parametrize("name", WORKLOADS)
def test_one_by_one_there_is_a_kernel_for_each_convolution(name: str) -> None:
    """Otherwise the comparison would be between bands and bands."""
    workload = WORKLOADS[name]
    called = [call.kernel for call in plan_of(sequence(blocks._scheduled(workload, MACHINE))).calls]
    assert len(called) == 1 + (workload.expand is not None) + (workload.project is not None)
    assert all("conv2d" in kernel for kernel in called)


def test_a_block_that_cannot_run_alone_is_left_to_the_estimates(
    store: Store, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise BackendError("not this one")

    monkeypatch.setattr(blocks, "_scheduled", failing)
    blocks._apart.cache_clear()
    (result,) = tune_one(store, BLOCK, 1).tasks
    assert result.error == f"{BLOCK.name}: its untuned kernel cannot be measured alone"
    assert store.records(BLOCK.key, setting()) == []
    put(store, BLOCK, APART, 1e-9, key="code")
    put(store, BLOCK, untuned(BLOCK), 1e-3)
    assert times(store).of_block(BLOCK.workload, far=False) is None
    monkeypatch.undo()
    blocks._apart.cache_clear()


def test_what_is_more_than_a_sequence_of_kernels_is_not_joined() -> None:
    model = network("(float[4,4] x) => (float[4,4] y) { y = Identity(x) }")
    with pytest.raises(BackendError, match="a copy cannot be part of one function"):
        joined(schedule_all(fuse(import_model(model), MACHINE), MACHINE))


def test_kernels_that_read_another_view_are_not_joined() -> None:
    """In a joined function, each of the two shapes would have its own memory, and nothing writes the second one."""
    model = network(
        "(float[4,6] x) => (float[8,3] y) <int64[2] s = {8, 3}> {"
        " a = Softmax(x) b = Reshape(a, s) y = Softmax(b) }"
    )
    with pytest.raises(BackendError, match=r"kernel softmax.* cannot be part of one function"):
        joined(schedule_all(fuse(import_model(model), MACHINE), MACHINE))


Times = Sequence[float]
CHOSEN: dict[str, tuple[Times, Times, Times, str]] = {
    # The seconds one by one, of the untuned kernel in bands, and of another kernel in bands; and the fastest of them.
    "apart": ([1e-3] * 4, [2e-3] * 4, [3e-3] * 4, "apart"),
    "apart, but not clearly": ([1e-3] * 4, [1.01e-3] * 4, [3e-3] * 4, "untuned"),
    "bands": ([2e-3] * 4, [1e-3] * 4, [3e-3] * 4, "untuned"),
    "other bands": ([2e-3] * 4, [1e-3] * 4, [0.5e-3] * 4, "other"),
    "other bands, but not clearly": ([2e-3] * 4, [1e-3] * 4, [0.99e-3] * 4, "untuned"),
    "other bands, but once": ([2e-3] * 4, [1e-3] * 4, [0.5e-3], "untuned"),
    "other bands, the untuned ones failed": ([2e-3] * 4, [], [1e-3] * 4, "other"),
    "all bands failed": ([2e-3] * 4, [], [], "apart"),
}


def choices_of(block: Block) -> dict[str, BlockChoice]:
    return {"apart": APART, "untuned": untuned(block), "other": other(block)}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen(name: str, store: Store) -> None:
    *seconds, wanted = CHOSEN[name]
    options = choices_of(BLOCK)
    for choice, measured in zip(options.values(), seconds):
        put(store, BLOCK, choice, *measured, error=None if measured else "died")
    result = times(store).of_block(BLOCK.workload, far=False)
    assert result is not None
    assert BlockChoice(result.blocking) == options[wanted]


@pytest.mark.parametrize("choice", ["apart", "untuned"])
def test_a_block_that_was_measured_one_way_only_is_estimated(choice: str, store: Store) -> None:
    put(store, BLOCK, choices_of(BLOCK)[choice], 1e-9)
    assert times(store).of_block(BLOCK.workload, far=False) is None
    put(store, BLOCK, APART, error="died")
    assert times(store).of_block(BLOCK.workload, far=False) is None


def test_a_block_that_stays_apart_untuned_does_so_unless_bands_are_clearly_faster(store: Store) -> None:
    workload = replace(
        WORKLOADS["projection alone"], image=(1, 20, 20, 48), middle=(1, 20, 20, 48), out=(1, 20, 20, 16)
    )
    block = Block(workload, far=False)
    assert block.untuned_choice(MACHINE) == APART
    put(store, block, APART, *[1e-3] * 4)
    put(store, block, untuned(block), *[0.99e-3] * 4)
    assert times(store).of_block(workload, far=False) == TimedBlock(pytest.approx(1e-3, rel=1e-3))
    put(store, block, untuned(block), *[0.5e-3] * 8)
    result = times(store).of_block(workload, far=False)
    assert result is not None
    assert result.blocking == untuned(block).blocking


OTHER_PLAN = BandBlocking(Tile(3, 17), Tile(3, 17), 16, 17, 5)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", '["bands", null]', '["one by one", {}]', '["bands", {"band": 3}]', '["F(4,3)", null]',
        '["bands", {"expand": 1, "project": 2, "lanes": 3, "block": 4, "band": 5}]',
        untuned(BLOCK).text.replace('"parts"', '"pieces"'),
        untuned(BLOCK).text.replace('"lanes": ', '"lanes": [1, 2], "parts": '),
        json.dumps(["one by one", json.loads(untuned(BLOCK).text)[1]]),
        BlockChoice(OTHER_PLAN).text,
    ],
)  # fmt: skip
def test_plans_that_are_unknown_or_no_longer_a_choice_are_ignored(text: str, store: Store) -> None:
    """The estimate is used, as without these records."""
    (block,) = blocks_of(MODEL)
    put(store, block, APART, *[1e-3] * 4)
    store.put(Record(block.key, setting(), "code", text, (1e-9,), None, time.time()))
    assert times(store).of_block(block.workload, block.far) is None
    assert bands_in(MODEL, Algorithms(timings=times(store))) == 1


def test_a_blocking_that_was_given_up_is_ignored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice's kernel and its key are unchanged, but the blocking is no longer offered."""
    for choice, seconds in zip(choices_of(BLOCK).values(), (2e-3, 1e-3, 0.5e-3)):
        put(store, BLOCK, choice, *[seconds] * 4)
    assert times(store).of_block(BLOCK.workload, far=False) == TimedBlock(
        pytest.approx(0.5e-3, rel=1e-3), other(BLOCK).blocking
    )
    given_up = other(BLOCK).blocking
    left = [blocking for blocking in bands_plan.blockings(BLOCK.workload, MACHINE) if blocking != given_up]
    monkeypatch.setattr(blocks, "blockings", lambda workload, machine: left)
    assert times(store).of_block(BLOCK.workload, far=False) == TimedBlock(
        pytest.approx(1e-3, rel=1e-3), untuned(BLOCK).blocking
    )


@pytest.mark.parametrize("field", ["lanes", "block", "band", "parts", "expand"])
@pytest.mark.parametrize("kind", [float, bool])
def test_numbers_of_another_type_are_no_blocking(field: str, kind: type, store: Store) -> None:
    """2.0 equals 2 and true equals 1 in Python, but loops cannot have such sizes."""
    (block,) = blocks_of(MODEL)
    name, blocking = json.loads(untuned(block).text)
    number = blocking["expand"]["rows"] if field == "expand" else blocking[field]
    wrong = kind(number)
    blocking[field] = {**blocking["expand"], "rows": wrong} if field == "expand" else wrong
    text = json.dumps([name, blocking])
    assert BlockChoice.stored(text) is None
    put(store, block, APART, *[1e-3] * 4)
    key = key_of(block, untuned(block), MACHINE)
    store.put(Record(block.key, setting(), key, text, (1e-9,), None, time.time()))
    assert times(store).of_block(block.workload, block.far) is None


def test_nested_nonsense_is_no_way() -> None:
    assert BlockChoice.stored("[" * 100_000) is KernelChoice.stored("[" * 100_000) is None


def test_times_of_other_code_are_ignored(store: Store) -> None:
    """The records have the key of an earlier kernel of the same choice, or are of another machine or thread count."""
    put(store, BLOCK, APART, *[1e-3] * 4, key="another kernel")
    put(store, BLOCK, untuned(BLOCK), *[2e-3] * 4)
    assert times(store).of_block(BLOCK.workload, far=False) is None
    put(store, BLOCK, APART, *[1e-3] * 4)
    assert times(store).of_block(BLOCK.workload, far=False) == TimedBlock(pytest.approx(1e-3, rel=1e-3))
    put(store, BLOCK, other(BLOCK), *[0.5e-3] * 4)
    put(store, BLOCK, untuned(BLOCK), *[1e-9] * 4, key="another kernel")
    put(store, BLOCK, untuned(BLOCK), *[0.4e-3] * 9, key="yet another kernel")
    result = times(store).of_block(BLOCK.workload, far=False)
    assert result is not None
    assert result.blocking == other(BLOCK).blocking
    for machine, threads, device in ((MACHINE, 1, None), (MACHINE, 2, "raspberry")):
        assert StoredTimes.on(store, machine, threads, device).of_block(BLOCK.workload, far=False) is None


def tuned_store(store: Store, text: str, fastest: str) -> None:
    """Store times of a model's blocks, among which one choice is the fastest."""
    for block in together(blocks_of(text)):
        for name, choice in choices_of(block).items():
            put(store, block, choice, *[0.5e-3 if name == fastest else 1e-3] * 4)


@pytest.mark.parametrize("fastest", ["apart", "untuned", "other"])
def test_a_compilation_uses_what_was_measured(
    fastest: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_store(store, MODEL, fastest)
    (block,) = blocks_of(MODEL)
    used: list[BandBlocking] = []
    kernel = blocks.kernel

    def watched(workload: ConvBlock, blocking: BandBlocking) -> Any:
        used.append(blocking)
        return kernel(workload, blocking)

    monkeypatch.setattr("xrlflow.backends.tvm.fusion.bands.kernel", watched)
    model, algorithms = network(MODEL), Algorithms(timings=times(store))
    assert bands_in(MODEL, algorithms) == (0 if fastest == "apart" else 1)
    given = numbers(model)
    with open_model(model.SerializeToString(), threads=1) as runtime:
        (wanted,) = runtime.run(given)
    with compiled(model, MACHINE, threads=2, algorithms=algorithms) as lowered:
        (result,) = lowered.run(given)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=8e-6 * np.abs(np.asarray(wanted)).max())
    assert set(used) == {
        blocking for blocking in [choices_of(block)[fastest].blocking] if blocking is not None
    }


@pytest.mark.parametrize("fastest", ["apart", "untuned"])
def test_kernels_beside_a_file_use_what_was_measured(fastest: str, store: Store, tmp_path: Path) -> None:
    tuned_store(store, MODEL, fastest)
    model = network(MODEL)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    blocking = Lowering(ExecutionTarget(MACHINE), {}, str(tmp_path), store)
    made = blocking.hybrid(str(path), [{}], str(path.with_name("made.onnx")))
    assert (b"bands" in library_path(made.path).read_bytes()) == (fastest != "apart")
    made.loaded().save(tmp_path / "fast.onnx")
    given = numbers(model)
    with open_model(str(path), threads=1) as runtime:
        (wanted,) = runtime.run(given)
    options = with_library(None, str(library_path(tmp_path / "fast.onnx")))
    with open_model(str(tmp_path / "fast.onnx"), threads=2, session_options=options) as runtime:
        (result,) = runtime.run(given)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=8e-6 * np.abs(np.asarray(wanted)).max())


def test_a_store_without_blocks_leaves_them_to_the_estimates(store: Store) -> None:
    """An older version stored only convolutions."""
    text = MODEL.replace("y = Add(x, p)", "y = Conv<pads=[1,1,1,1]>(p, v)").replace(
        "float[16] b2", "float[16] b2, float[16,16,3,3] v"
    )
    log = LayerLog()
    fuse(import_model(network(text)), MACHINE, algorithms=Algorithms(timings=log))
    (convolution,) = log.layers
    assert isinstance(convolution, Layer)
    put(store, convolution, convolution.untuned_choice(Algorithm.TILES, MACHINE), *[1e-3] * 4)
    store.close()
    with Store(store.path) as again:
        stored = times(again)
        assert stored.of(convolution.workload, convolution.far).keys() == {Algorithm.TILES}
        assert bands_in(text, Algorithms(timings=stored)) == bands_in(text, Algorithms()) == 1
        tuned_store(again, text, "apart")
        assert stored.of(convolution.workload, convolution.far).keys() == {Algorithm.TILES}
        assert bands_in(text, Algorithms(timings=stored)) == 0


def test_what_comes_apart_leaves_its_convolutions_to_others(store: Store) -> None:
    first, second = blocks_of(CHAIN)
    assert first.workload.project is not None
    assert second.workload.expand is None
    for choice, seconds in ((APART, 1e-3), (untuned(first), 2e-3)):
        put(store, first, choice, *[seconds] * 4)
    again, third = blocks_of(CHAIN, times(store))
    assert again.key == first.key
    assert third.workload.expand is not None
    assert third.workload.project is not None


def test_equal_blocks_are_one() -> None:
    assert [block.weight for block in together([BLOCK, BLOCK, replace(BLOCK, far=True)])] == [2, 1]
    assert BLOCK.work == 81 * 48 * (16 + 9 + 16)


def test_results_say_what_was_chosen(store: Store) -> None:
    put(store, BLOCK, APART, *[1e-3] * 4)
    put(store, BLOCK, untuned(BLOCK), *[2e-3] * 4)
    (row,) = block_results([BLOCK, BLOCK], times(store))
    assert (row.name, row.calls) == (BLOCK.name, 2)
    assert (row.heuristic, row.chosen) == (str(untuned(BLOCK)), "one by one")
    assert row.heuristic_seconds == pytest.approx(2e-3, rel=1e-3)
    assert row.chosen_seconds == row.plain_seconds == pytest.approx(1e-3, rel=1e-3)
    (row,) = block_results([Block(WORKLOADS["projection alone"], False)], times(store))
    assert row.chosen == row.heuristic
    assert row.chosen_seconds is row.heuristic_seconds is row.plain_seconds is None


def test_a_row_has_times_of_one_distance(store: Store) -> None:
    """Measuring was interrupted at the other distance of the weights. Its times were not those that the choice was
    based on."""
    put(store, BLOCK, APART, *[1e-3] * 4)
    put(store, BLOCK, untuned(BLOCK), *[2e-3] * 4)
    far = replace(BLOCK, far=True)
    put(store, far, untuned(far), 0.5e-3)
    (row,) = block_results([far], times(store))
    assert (row.heuristic_seconds, row.chosen_seconds, row.plain_seconds) == pytest.approx(
        (2e-3, 1e-3, 1e-3), rel=1e-3
    )
    put(store, far, APART, 0.7e-3)
    (row,) = block_results([far], times(store))
    assert (row.heuristic_seconds, row.chosen_seconds, row.plain_seconds) == (0.5e-3, 0.5e-3, 0.7e-3)


@pytest.mark.whole
def test_tune_measures_blocks(tmp_path: Path) -> None:
    """From the command to the report. The next compilation uses the stored times."""
    path = tmp_path / "store.sqlite"
    untuned_blocks = blocks_of(CHAIN, None)
    result = api.tune(
        network(CHAIN),
        trials=24,
        batch=3,
        method="random",
        threads=2,
        store=path,
        measure=False,
        rewrite=False,
    )
    assert result.verification is not None
    assert result.verification.verified
    rows = [row for row in result.to_json()["layers"] if "block" in row["name"]]
    with Store(path) as store:
        used = blocks_of(CHAIN, times(store))
        tasks = set(store.tasks())
        assert any(block.key in tasks for block in untuned_blocks)
        assert [row["name"] for row in rows] == [block.name for block in used]
        fused = bands_in(CHAIN, Algorithms(timings=times(store)))
    for row, block in zip(
        rows, used
    ):  # one that others made possible when all trials were spent has no times
        seconds = [row["plain_us"], row["heuristic_us"], row["best_us"]]
        assert all(second > 0 for second in seconds) if block.key in tasks else seconds == [None] * 3
    assert fused == sum(row["algorithm"].startswith("bands of") for row in rows)


def one_by_one(asked: list[list[str]]) -> Any:
    """A stand-in for `tune` that finds every block faster one by one. `asked` gets the names of the blocks of each
    call."""

    def faked(tasks: Any, maker: Any, *, store: Store, pool: LayerMeasurer, **_: Any) -> TuningResult:
        blocks = [block for block in pool.layers.layers if isinstance(block, Block)]
        if blocks:
            asked.append([block.name for block in blocks])
        for block in blocks:
            put(store, block, APART, *[1e-3] * 4)
            put(store, block, untuned(block), *[2e-3] * 4)
        return TuningResult((), Stop.TRIALS, 0.0, 0.0, 0.0)

    return faked


def test_blocks_that_others_made_possible_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block is faster one by one. So the first block leaves its 1x1 convolution to the second one."""
    asked: list[list[str]] = []
    monkeypatch.setattr("xrlflow.tuning.models.tune", one_by_one(asked))
    result = api.tune(
        network(CHAIN), trials=1, threads=2, store=tmp_path / "s.sqlite", measure=False, rewrite=False
    )
    assert asked == [
        [
            "3x3 block of 32 to 32 to 64 channels at 20x20",
            "3x3 block of 64 to 32 channels at 20x20",
        ],
        ["3x3 block of 32 to 64 to 32 channels at 20x20"],
    ]
    assert result.verification is not None
    assert result.verification.verified
    rows = [row for row in result.to_json()["layers"] if "block" in row["name"]]
    assert [row["name"] for row in rows] == [asked[0][0], asked[1][0]]
    assert [row["algorithm"] for row in rows] == ["one by one"] * 2


@pytest.mark.whole
def test_blocks_are_measured_until_no_more_come_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few pixels, each pair that is computed one by one leaves its 1x1 convolution to the next pair."""
    text = (
        "(float[1,24,9,9] x, float[24,1,3,3] w, float[40,24,1,1] b, float[40,1,3,3] w1, float[56,40,1,1] b1,"
        " float[56,1,3,3] w2, float[72,56,1,1] b2) => (float[1,72,9,9] y) {"
        " c = Conv<group=24, pads=[1,1,1,1]>(x, w) d = Conv(c, b) e = Conv<group=40, pads=[1,1,1,1]>(d, w1)"
        " f = Conv(e, b1) g = Conv<group=56, pads=[1,1,1,1]>(f, w2) y = Conv(g, b2) }"
    )
    asked: list[list[str]] = []
    monkeypatch.setattr("xrlflow.tuning.models.tune", one_by_one(asked))
    result = api.tune(
        network(text), trials=1, threads=2, store=tmp_path / "s.sqlite", measure=False, rewrite=False
    )
    assert [len(names) for names in asked] == [3, 1, 1]
    rows = [row for row in result.to_json()["layers"] if "block" in row["name"]]
    assert [row["name"] for row in rows] == [asked[0][0], asked[1][0], asked[2][0]]
    assert all(row["best_us"] is not None for row in rows)

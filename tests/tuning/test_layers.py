"""The algorithms and blockings of 3x3 convolutions are measured, stored, and used."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.backends.tvm.kernels.test_kernels import network, numbers
from tests.backends.tvm.kernels.test_winograd import conv
from tests.levels import whole
from tests.tuning.measured import MACHINE, put, setting, times, tune_one
from xrlflow import api
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.fusion import tiles
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.fusion.layers import chosen_in
from xrlflow.backends.tvm.kernels import direct, products
from xrlflow.backends.tvm.kernels.algorithms import AlgorithmOption, Algorithms, Timed, with_times
from xrlflow.backends.tvm.kernels.layer_kernels import (
    KERNELS,
    Algorithm,
    KernelChoice,
    LayerWorkload,
    algorithms_of,
)
from xrlflow.backends.tvm.kernels.steps import Earlier, Extra, Step
from xrlflow.backends.tvm.kernels.winograd import WinogradBlocking
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.tuning.layer_times import LayerLog, StoredTimes, results, together
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.measurable import key_of
from xrlflow.tuning.pool import Kernel, Pool
from xrlflow.tuning.store import CONFIRMED, Record, Store

pytestmark = pytest.mark.measures

TILES, DIRECT, F23, F43 = Algorithm.TILES, Algorithm.DIRECT, Algorithm.F23, Algorithm.F43
ALL = (TILES, DIRECT, F23, F43)
STEPS = (
    Step("relax.add", (Earlier(0), Extra(True))),
    Step("relax.add", (Earlier(1), Extra(False))),
    Step("relax.nn.relu", (Earlier(2),)),
    Step("relax.minimum", (Earlier(3), 1.5)),
)


def of_3x3(
    image: tuple[int, ...],
    out: tuple[int, ...],
    begin: tuple[int, int],
    steps: tuple[Step, ...] = (),
    groups: int = 1,
) -> direct.Convolution:
    return direct.Convolution(image, out, (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, *begin), groups, steps)


LAYER = Layer(of_3x3((1, 8, 8, 16), (1, 8, 8, 32), (1, 1), STEPS), far=False)
PLAIN = LAYER.untuned_choice(TILES, MACHINE)
MODEL = (
    "(float[1,16,8,8] x, float[32,16,3,3] w, float[32] b, float[32,32,3,3] v) => (float[1,32,8,8] y) {"
    " c = Conv<pads=[1,1,1,1]>(x, w, b) r = Relu(c) y = Conv<pads=[1,1,1,1]>(r, v) }"
)


def other(layer: Layer, algorithm: Algorithm) -> KernelChoice:
    """Another choice of this algorithm than the untuned one."""
    return next(
        choice
        for choice in layer.everything(MACHINE)
        if choice.algorithm is algorithm and choice != layer.untuned_choice(algorithm, MACHINE)
    )


TWICE = (Step("relax.sigmoid", (Earlier(0),)), Step("relax.multiply", (Earlier(0), Earlier(1))))
WORKLOADS: dict[str, LayerWorkload] = {
    "steps": LAYER.workload,
    "odd sizes, one side padded": of_3x3((2, 7, 9, 19), (2, 8, 7, 23), (2, 0), STEPS[:1]),
    "groups": of_3x3((1, 6, 6, 32), (1, 6, 6, 48), (1, 1), groups=2),
    "a step that reads two": of_3x3((1, 6, 6, 16), (1, 4, 4, 16), (0, 0), TWICE),
    "pointwise": direct.Convolution((1, 6, 7, 19), (1, 6, 7, 32), *[(1, 1, 1)] * 3, (0, 0, 0), 1, STEPS),
    "strided": direct.Convolution(
        (1, 9, 9, 16), (1, 5, 5, 32), (1, 3, 3), (1, 2, 2), (1, 1, 1), (0, 1, 1), 1, STEPS
    ),
    "tiles that pad": direct.Convolution(
        (1, 17, 17, 16), (1, 17, 17, 37), (1, 3, 3), *[(1, 1, 1)] * 2, (0, 1, 1), 1, STEPS
    ),
    "groups and strides": direct.Convolution(
        (1, 8, 8, 64), (1, 4, 4, 64), (1, 1, 1), (1, 2, 2), (1, 1, 1), (0, 0, 0), 8, STEPS[:1]
    ),
    "factors of each channel": direct.Convolution(
        (1, 5, 5, 8), (1, 5, 5, 64), *[(1, 1, 1)] * 3, (0, 0, 0), 8, STEPS[:1]
    ),
    "one dimension": direct.Convolution((1, 20, 16), (1, 18, 32), (1, 1, 3), *[(1, 1, 1)] * 2, (0, 0, 0), 1),
    "a product": products.Product((2, 5, 40), (2, 5, 48), STEPS),
    "a product of a matrix": products.Product((7, 40), (7, 51), STEPS[:1]),
}


def test_a_store_knows_layers_of_earlier_versions() -> None:
    assert Layer(WORKLOADS["steps"], False).key == "layer dee02171d85ffa186470c1d0"
    assert Layer(WORKLOADS["a product"], False).key == "layer 68839784d39d7d14bc0ff963"


@pytest.mark.parametrize("name", whole(WORKLOADS, [*WORKLOADS][::3]))
def test_all_kernels_of_a_layer_compute_the_same(name: str, pool: Pool) -> None:
    layer = Layer(WORKLOADS[name], far=False)
    wanted = layer.expected(MACHINE)
    assert wanted.shape == layer.workload.out
    some = [
        *layer.untuned(MACHINE),
        *(KernelChoice(TILES, blocking) for blocking in tiles.tile_choices(layer.workload, MACHINE)[1:3]),
    ]
    assert {choice.algorithm for choice in some} == {*algorithms_of(layer.workload)}
    modules = [layer.kernel(choice, MACHINE) for choice in some]
    with pool.built(MACHINE.target(), modules) as built:
        for choice, kernel in zip(some, built):
            assert isinstance(kernel, Kernel), choice
            if (arguments := layer.arguments(choice, MACHINE)) is None:
                assert choice == layer.untuned_choice(TILES, MACHINE)
                continue
            (result,) = pool.called(kernel, arguments)
            np.testing.assert_allclose(
                result, wanted, rtol=0, atol=5e-6 * np.abs(wanted).max(), err_msg=str(choice)
            )


def test_a_tile_leaves_the_kernel_to_the_next_one() -> None:
    """TVM's schedule changes a module if no variable refers to it. Then all of 64 tiles but the first failed, or
    started from the remains of the one before."""
    alone = tiles.only_kernel(tiles.fused(WORKLOADS["groups and strides"], MACHINE))
    assert alone is not None
    before = alone.kernel.script()
    tile_options = tiles.tile_choices(WORKLOADS["groups and strides"], MACHINE)
    result = [tiles.tiled(alone, tile_option, MACHINE) for tile_option in tile_options]
    assert alone.kernel.script() == before
    assert sum(kernel is not None for kernel in result) > len(tile_options) // 2
    again = tiles.tiled(alone, tile_options[0], MACHINE)
    assert again is not None
    assert again.script() == result[0].script()


def test_tiles_are_the_convolution() -> None:
    """Compares with ONNX Runtime: the layer of a workload has the right operators, paddings and layouts."""
    workload = WORKLOADS["odd sizes, one side padded"]
    given = tiles.random_operands(workload)
    weights, (bias,) = given.weights, given.extras
    assert bias is not None
    model = network(
        "(float[2,19,7,9] x, float[23,19,3,3] w, float[23] b) => (float[2,23,8,7] y) "
        "{ y = Conv<pads=[2,0,1,0]>(x, w, b) }"
    )
    del model.graph.initializer[:]
    for name, array in (("w", weights.transpose(3, 2, 0, 1)), ("b", bias)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
    with open_model(model.SerializeToString(), threads=1) as runtime:
        (wanted,) = runtime.run(
            {"x": np.ascontiguousarray(tiles.random_variables(workload)["image"].transpose(0, 3, 1, 2))}
        )
    result = Layer(workload, False).expected(MACHINE).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-5)


def test_every_way_is_stored() -> None:
    result = LAYER.everything(MACHINE)
    assert (
        {LAYER.untuned_choice(algorithm, MACHINE) for algorithm in ALL}
        == {*LAYER.untuned(MACHINE)}
        <= {*result}
    )
    assert [KernelChoice.stored(choice.text) for choice in result] == result


def test_layers_are_measured_once(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[KernelChoice] = []
    arguments = Layer.arguments

    def watched(layer: Layer, choice: KernelChoice, machine: Any) -> Any:
        checked.append(choice)
        return arguments(layer, choice, machine)

    monkeypatch.setattr(Layer, "arguments", watched)
    untuned = LAYER.untuned(MACHINE)
    assert tune_one(store, LAYER, 6).measured == 6
    assert len(checked) == len({*checked}) == 6
    assert {*checked} > {*untuned}, "each kernel is compared before it is timed"
    records = store.records(LAYER.key, setting())
    assert {record.candidate for record in records} == {key_of(LAYER, choice, MACHINE) for choice in checked}
    assert all(record.error is None for record in records)
    known = times(store).of(LAYER.workload, far=False)
    assert set(known) == {*ALL}
    assert times(store).of(LAYER.workload, far=True) == known, (
        "measured at another distance, for want of better"
    )
    assert tune_one(store, LAYER, 6).measured == 0


@pytest.mark.whole
def test_the_leading_kernels_are_measured_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.tuning.session._AGAIN_SECONDS", 60.0)  # beside other work it takes longer
    tune_one(store, LAYER, 6, confirm=True)
    (best,) = store.best(LAYER.key, 1, setting(), least=CONFIRMED)
    known = Counter(record.candidate for record in store.records(LAYER.key, setting()))
    untuned_key = key_of(LAYER, PLAIN, MACHINE)
    assert best.candidate == untuned_key or min(known[best.candidate], known[untuned_key]) >= CONFIRMED


def test_only_a_blocking_that_is_clearly_faster_replaces_the_untuned_one(store: Store) -> None:
    untuned, another = LAYER.untuned_choice(F43, MACHINE), other(LAYER, F43)
    put(store, LAYER, PLAIN, 4e-3)
    put(store, LAYER, untuned, 1e-3)
    put(store, LAYER, another, 0.99e-3)
    known = times(store).of(LAYER.workload, far=False)
    assert known == {TILES: Timed(4e-3, PLAIN.blocking), F43: Timed(1e-3, untuned.blocking)}
    put(store, LAYER, another, 0.5e-3)
    result = times(store).of(LAYER.workload, far=False)[F43]
    assert result is not None
    assert result.blocking == another.blocking


def test_what_was_measured_once_is_lucky(store: Store) -> None:
    put(store, LAYER, PLAIN, 4e-3)
    put(store, LAYER, LAYER.untuned_choice(F43, MACHINE), *[1e-3] * 4)
    put(store, LAYER, other(LAYER, F43), 0.5e-3)
    result = times(store).of(LAYER.workload, far=False)[F43]
    assert result is not None
    assert result.blocking == LAYER.untuned_choice(F43, MACHINE).blocking


NOT_CURRENT = {
    "no plan any more": KernelChoice(F43, WinogradBlocking(rows=3, columns=17, lanes=16, block=3, parts=1)),
    "no plan": KernelChoice(F43),
    "a plan of another kernel": KernelChoice(DIRECT, WinogradBlocking(2, 16, 16, 2, 1)),
    "an algorithm that cannot compute it": KernelChoice(
        Algorithm.PRODUCT, products.ProductBlocking(2, 16, 16, 2, 1)
    ),
}


@pytest.mark.parametrize("name", NOT_CURRENT)
def test_a_plan_that_is_no_longer_a_choice_is_ignored(name: str, store: Store) -> None:
    assert not LAYER.is_current(NOT_CURRENT[name], "code", MACHINE)
    put(store, LAYER, PLAIN, 4e-3)
    put(store, LAYER, NOT_CURRENT[name], 1e-9, key="code")
    assert times(store).of(LAYER.workload, far=False) == {TILES: Timed(4e-3, PLAIN.blocking)}


def test_times_of_other_code_are_ignored(store: Store) -> None:
    """The records have the key of an earlier kernel of the same choice, are of another machine or thread count, or are
    not choices."""
    put(store, LAYER, PLAIN, 4e-3)
    put(store, LAYER, LAYER.untuned_choice(F43, MACHINE), 1e-3, key="another kernel")
    put(store, LAYER, other(LAYER, F43), error="died", key="another kernel")
    untuned = LAYER.untuned_choice(F43, MACHINE).text
    several = re.sub(r'"rows": \d+', '"rows": [1]', untuned)
    real = re.sub(r'"rows": (\d+)', r'"rows": \1.0', untuned)
    assert len({untuned, several, real}) == 3
    for text in ("", "[]", '["F(9,3)", null]', '["F(4,3)", {"rows": 3}]', "null", several, real):
        record = Record(LAYER.key, setting(), "x", text, (1e-9,), None, time.time())
        store.put(record)
    assert times(store).of(LAYER.workload, far=False) == {TILES: Timed(4e-3, PLAIN.blocking)}
    for machine, threads, device in ((MACHINE, 1, None), (MACHINE, 2, "raspberry")):
        assert StoredTimes.on(store, machine, threads, device).of(LAYER.workload, far=False) == {}
    assert StoredTimes.on(store, detect(cpu="haswell", cores=2), 2).of(LAYER.workload, far=False) == {}


def test_a_layer_without_a_time_of_its_plain_algorithm_is_estimated(store: Store) -> None:
    """Seconds of one algorithm cannot be compared with the estimate of another."""
    put(store, LAYER, LAYER.untuned_choice(F43, MACHINE), 1e-9)
    assert times(store).of(LAYER.workload, far=False) == {}
    put(store, LAYER, PLAIN, error="died")
    assert times(store).of(LAYER.workload, far=False) == {}


def test_estimates_and_seconds_have_one_unit() -> None:
    blocking = WinogradBlocking(4, 64, 16, 8, 1)
    estimates = [
        [AlgorithmOption(TILES, n), AlgorithmOption(F23, n / 2, 1.1), AlgorithmOption(F43, n / 4, 3.0)]
        for n in (8.0, 6.0)
    ]
    assert with_times(estimates, [{}, {}]) == estimates
    measured = with_times(estimates, [{TILES: Timed(16.0), F43: Timed(5.0, blocking), F23: None}, {}])
    assert measured == [
        [AlgorithmOption(TILES, 16.0), AlgorithmOption(F43, 5.0, 3.0, blocking)],
        [AlgorithmOption(TILES, 12.0), AlgorithmOption(F23, 6.0, 1.1), AlgorithmOption(F43, 3.0, 3.0)],
    ]


def layers_of(text: str) -> list[Layer]:
    seen = LayerLog()
    fuse(import_model(network(text)), MACHINE, algorithms=Algorithms(timings=seen))
    return seen.layers


def functions(module: Any) -> list[str]:
    return [variable.name_hint for variable in module.functions]


def tuned_store(store: Store, fastest: Algorithm) -> None:
    """Store times of the layers of MODEL, so that an algorithm is the fastest, with another blocking than the untuned
    one."""
    for layer in layers_of(MODEL):
        for algorithm in ALL:
            seconds = 1e-3 if algorithm is fastest else 4e-3
            put(store, layer, layer.untuned_choice(algorithm, MACHINE), *[seconds] * 4)
        put(store, layer, other(layer, fastest), *[0.5e-3] * 4)


@pytest.mark.parametrize("fastest", ALL)
def test_a_compilation_uses_what_was_measured(fastest: Algorithm, store: Store) -> None:
    tuned_store(store, fastest)
    model = network(MODEL)
    algorithms = Algorithms(timings=times(store))
    module = fuse(import_model(model), MACHINE, algorithms=algorithms)
    assert [chosen.algorithm for chosen in chosen_in(module)] == [fastest.value] * 2
    name = "tiles" if fastest is TILES else KERNELS[fastest].name
    assert sum(name in each for each in functions(module)) == 2
    given = numbers(model)
    with open_model(model.SerializeToString(), threads=1) as runtime:
        (wanted,) = runtime.run(given)
    with compiled(model, MACHINE, threads=2, algorithms=algorithms) as lowered:
        (result,) = lowered.run(given)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=8e-6 * np.abs(np.asarray(wanted)).max())


def test_exact_kernels_stay_exact(store: Store) -> None:
    tuned_store(store, F43)
    algorithms = Algorithms(exact=True, timings=times(store))
    module = fuse(import_model(network(MODEL)), MACHINE, algorithms=algorithms)
    assert all(chosen.error <= 1.0 for chosen in chosen_in(module))
    assert all(chosen.algorithm != F43.value for chosen in chosen_in(module))


def test_the_budget_of_errors_holds_for_measured_times(store: Store) -> None:
    tuned_store(store, F43)
    algorithms = Algorithms(budget=1.2, timings=times(store))
    chosen = chosen_in(fuse(import_model(network(MODEL)), MACHINE, algorithms=algorithms))
    assert F43.value not in {each.algorithm for each in chosen}


def test_equal_layers_are_one() -> None:
    text = MODEL.replace(
        "y = Conv<pads=[1,1,1,1]>(r, v)", "s = Conv<pads=[1,1,1,1]>(r, v) y = Conv<pads=[1,1,1,1]>(s, v)"
    )
    result = layers_of(text)
    assert len(result) == 3
    assert [layer.weight for layer in together(result)] == [1, 2]
    assert replace(result[1], far=True).key != result[1].key


@pytest.mark.whole
def test_tune_reports_algorithms(tmp_path: Path) -> None:
    """From the command to the report. The next compilation uses the stored times."""
    path = tmp_path / "store.sqlite"
    text = conv("1,16,6,6", "16,16,3,3", "1,16,6,6")
    model = network(text)
    result = api.tune(model, trials=4, method="random", threads=2, store=path, measure=False)
    assert result.verification is not None
    assert result.verification.verified
    rows = result.to_json()["layers"]
    assert [row["name"] for row in rows] == [layer.name for layer in layers_of(text)]
    for row in rows:
        assert row["plain_us"] > 0
        assert row["heuristic_us"] > 0
        assert row["best_us"] > 0
        assert row["heuristic"].split(",")[0] in {"tiles", "F(2", "F(4"}
    with Store(path) as store:
        assert {layer.key for layer in layers_of(text)} <= set(store.tasks())
        algorithms = Algorithms(timings=times(store))
        module = fuse(import_model(model), MACHINE, algorithms=algorithms)
        assert [c.algorithm for c in chosen_in(module)] == [row["algorithm"].split(", ")[0] for row in rows]
    json.dumps(result.to_json())


def test_an_interrupt_while_layers_are_measured(tmp_path: Path) -> None:
    def listener(phase: str, done: int, total: int, note: str) -> None:
        if phase == "tune":
            raise KeyboardInterrupt

    result = api.tune(
        network(MODEL), trials=4, threads=2, store=tmp_path / "s.sqlite", measure=False, listener=listener
    )
    assert result.result.tuning.interrupted
    assert result.result.tuning.measured == 1
    assert result.verification is not None
    assert result.verification.verified
    assert all(row["best_us"] is None for row in result.to_json()["layers"])


def untuned_way(layer: Layer, algorithm: Algorithm) -> KernelChoice:
    return layer.untuned_choice(algorithm, MACHINE)


def test_results_say_what_was_chosen(store: Store) -> None:
    tuned_store(store, F23)
    result = layers_of(MODEL)
    before = chosen_in(fuse(import_model(network(MODEL)), MACHINE))
    algorithms = Algorithms(timings=times(store))
    after = chosen_in(fuse(import_model(network(MODEL)), MACHINE, algorithms=algorithms))
    for layer, row, untuned in zip(
        result, results(zip(result, before), zip(result, after), times(store), untuned_way), before
    ):
        assert row.name == layer.name
        assert row.calls == 1
        assert row.plain_seconds == pytest.approx(4e-3)
        assert row.heuristic == str(layer.untuned_choice(Algorithm(untuned.algorithm), MACHINE))
        assert row.heuristic_seconds == pytest.approx(
            1e-3 if untuned.algorithm == F23.value else 4e-3, rel=1e-3
        )
        assert row.chosen == str(other(layer, F23))
        assert row.chosen_seconds == pytest.approx(0.5e-3, rel=1e-3)


def test_weights_are_far_in_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.backends.tvm.toolchain.reading.last_level", lambda: 1 << 16)
    few, many = (conv(f"1,{n},6,6", f"32,{n},3,3", "1,32,6,6") for n in (16, 32))
    assert not layers_of(few)[0].far
    assert layers_of(many)[0].far

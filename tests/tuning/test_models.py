"""The kernels of a model become tasks, are tuned, and are put back into the model."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from typer.testing import CliRunner

from tests.levels import whole
from tests.tuning.measured import MACHINE, QUICK, put
from xrlflow import api
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure, open_model
from xrlflow.backends.results import Comparison
from xrlflow.backends.tvm import Machine, Tvm, TvmModel, load_compiled
from xrlflow.backends.tvm.fusion import layers as layers_fusion
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.fusion.tiles import tile_choices
from xrlflow.backends.tvm.kernels.algorithms import Algorithms
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm, KernelChoice
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.backends.tvm.schedules.contraction import schedule_contraction
from xrlflow.cli import app
from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.layer_times import LayerLog, StoredTimes, together
from xrlflow.tuning.layer_tuning import LayerMeasurer, LayerTasks
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.measurable import key_of
from xrlflow.tuning.one_shot.predictor import shipped
from xrlflow.tuning.pool import Kernel, Pool
from xrlflow.tuning.session import tune
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.store import Store
from xrlflow.tuning.tasks import Task
from xrlflow.tuning.tuners.chameleon import ChameleonConfig, ChameleonTuner
from xrlflow.tuning.tuners.one_shot import OneShotTuner
from xrlflow.tuning.tuners.protocol import SEARCHING, Measurement, Method
from xrlflow.tuning.tuners.random import RandomTuner
from xrlflow.tuning.worker import Timing

pytestmark = pytest.mark.measures


def network() -> onnx.ModelProto:
    """A network with two equal products, a different one, and a softmax."""
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]>'
        " agraph (float[16,32] x, float[32,32] u, float[32,32] v, float[32,48] w) => (float[16,48] y) {"
        " a = MatMul(x, u)\n b = Relu(a)\n c = MatMul(b, v)\n d = Relu(c)\n e = MatMul(d, w)\n y = Softmax(e) }"
    )
    rng = np.random.default_rng(0)
    for value in list(model.graph.input)[1:]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        weight = rng.standard_normal(shape).astype(np.float32) / 6
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, value.name))
        model.graph.input.remove(value)
    return model


@pytest.fixture(scope="module")
def tasks() -> LayerTasks:
    seen = LayerLog()
    fuse(import_model(network()), MACHINE, algorithms=Algorithms(timings=seen))
    return tasks_of(together(seen.layers))


def tasks_of(layers: Sequence[Layer]) -> LayerTasks:
    return LayerTasks(layers, MACHINE, lambda layer: layer.untuned(MACHINE)[0])


@contextlib.contextmanager
def measuring(tasks: LayerTasks) -> Iterator[LayerMeasurer]:
    with contextlib.ExitStack() as at_end:
        yield LayerMeasurer(tasks, QUICK, at_end)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(network(), path)
    return path


def test_layers_are_tasks(tasks: LayerTasks) -> None:
    assert sorted(task.weight for task in tasks.tasks) == [1, 2]  # the softmax is none
    assert [task.key for task in tasks.tasks] == [layer.key for layer in tasks.layers]


def test_kernels_are_timed_in_turns_with_the_untuned_one(
    tasks: LayerTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first kernel is timed, the processor has half of its speed."""
    pairs: list[tuple[Kernel, ...]] = []

    def in_turns(pool: Pool, kernels: Sequence[Kernel], timing: Timing) -> list[tuple[float, ...]]:
        pairs.append(tuple(kernels))
        slower = 2.0 if len(pairs) == 1 else 1.0
        return [(slower * 2e-3, slower * 1e-3), (slower * 2e-3, slower * 1.2e-3), (2e-3, 1e-3)]

    monkeypatch.setattr(Pool, "in_turns", in_turns)
    monkeypatch.setattr(Pool, "timed", lambda pool, kernel, timing: Measurement((3e-3, 4e-3, 4e-3)))
    task = tasks.tasks[0]
    space = DesignSpace.of(tasks.layers[0], MACHINE)
    others = [result for choice in space.choices[:2] if (result := space.candidate(choice)) is not None]
    with measuring(tasks) as measurer:
        assert measurer.untuned_seconds(task.key) is None
        outcomes = dict(measurer.outcomes(task, others))
        assert measurer.untuned_seconds(task.key) == 4e-3
        for position in range(2):
            assert outcomes[position].error is None
            assert outcomes[position].seconds == pytest.approx((2e-3, 2.4e-3, 2e-3))
    assert len({first.path for first, _ in pairs}) == 1
    assert len({kernel.path for pair in pairs for kernel in pair}) == 3


def test_kernels_that_are_measured_again_are_not_built_again(
    tasks: LayerTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    build = Pool.built

    def built(pool: Pool, target: Any, modules: Sequence[Any], until: float = math.inf) -> Any:
        counts.append(len(modules))
        return build(pool, target, modules, until)

    monkeypatch.setattr(Pool, "built", built)
    task = tasks.tasks[0]
    space = DesignSpace.of(tasks.layers[0], MACHINE)
    a, b, c = [result for choice in space.choices[:3] if (result := space.candidate(choice)) is not None]
    with measuring(tasks) as measurer:
        assert sorted(position for position, _ in measurer.outcomes(task, [a, b])) == [0, 1]
        again = dict(measurer.outcomes(task, [b, c, a]))
        assert sorted(again) == [0, 1, 2]
        assert all(outcome.error is None for outcome in again.values())
        assert not [*measurer.outcomes(task, [a, b], until=time.monotonic())], "it is too late"
        assert counts == [2, 1, 1]  # the second is the untuned kernel, with which all are timed
        (folder,) = {
            Path(kernel.path).parent for built in measurer._built for kernel in built.kernels.values()
        }
        assert len([*folder.iterdir()]) == 3
        [*measurer.outcomes(task, [c])]
        assert len([*folder.iterdir()]) == 2, "what is not asked for is removed"
        [*measurer.outcomes(tasks.tasks[1], [])]
        assert len([*folder.iterdir()]) == 1
    assert not folder.exists()


def few_choices(monkeypatch: pytest.MonkeyPatch, count: int = 3) -> None:
    """Limit layers to `count` choices for each algorithm, and the untuned ones."""
    everything = Layer.everything

    def first(layer: Layer, machine: Machine) -> list[KernelChoice]:
        result = everything(layer, machine)
        some = [[choice for choice in result if choice.algorithm is a][:count] for a in Algorithm]
        return list(dict.fromkeys([*layer.untuned(machine), *(choice for each in some for choice in each)]))

    monkeypatch.setattr(Layer, "everything", first)


def test_a_tile_that_does_not_fit_is_no_kernel(tasks: LayerTasks, monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm.s_tir import ScheduleError

    def failing(sch: Any, block: Any, result: Any, workload: Any, machine: Any, choice: Any) -> None:
        if choice == bad:
            raise ScheduleError("not with this tile")
        schedule_contraction(sch, block, result, workload, machine, choice)

    workload = replace(tasks.layers[0].workload, out=(16, 48))  # kernels of other tests are remembered
    layer = Layer(workload, False)
    untuned, bad = tile_choices(workload, MACHINE)[:2]
    monkeypatch.setattr("xrlflow.backends.tvm.schedules.dispatch.schedule_contraction", failing)
    space = DesignSpace.of(layer, MACHINE)
    assert space.candidate(KernelChoice(Algorithm.TILES, bad)) is None
    assert space.candidate(KernelChoice(Algorithm.TILES, untuned)) is not None


def test_the_untuned_kernels_are_the_first_proposals(tasks: LayerTasks) -> None:
    layer = tasks.layers[0]
    tuner = tasks.maker(Method.RANDOM)(tasks.tasks[0], 3)
    untuned = [key_of(layer, choice, MACHINE) for choice in layer.untuned(MACHINE)]
    proposed = tuner.propose(len(untuned) + 3)
    assert [candidate.key for candidate in proposed][: len(untuned)] == untuned
    others = [*proposed[len(untuned) :], *tuner.propose(20)]
    assert len({candidate.key for candidate in others} - {*untuned}) == len(others) >= 23


def test_what_a_predictor_chooses_is_measured_after_the_untuned_kernels(tasks: LayerTasks) -> None:
    layer = tasks.layers[0]
    space = DesignSpace.of(layer, MACHINE)
    untuned = [key_of(layer, choice, MACHINE) for choice in layer.untuned(MACHINE)]
    chosen = [candidate.key for candidate in OneShotTuner(space, shipped()).propose(8)]
    first = list(dict.fromkeys([*untuned, *chosen]))
    assert len(first) > len(untuned)
    tuner = replace(tasks, predictor=shipped()).maker(Method.RANDOM)(tasks.tasks[0], 3)
    proposed = tuner.propose(len(first) + 3)
    assert [candidate.key for candidate in proposed][: len(first)] == first
    assert not {candidate.key for candidate in proposed[len(first) :]} & {*first}


def test_layers_that_are_too_large_for_a_predictor_are_not_predicted(
    tasks: LayerTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrlflow.tuning.one_shot.times.LARGEST", 1)
    first = [
        each.maker(Method.RANDOM)(tasks.tasks[0], 3).propose(16)
        for each in (tasks, replace(tasks, predictor=shipped()))
    ]
    assert [candidate.key for candidate in first[0]] == [candidate.key for candidate in first[1]]


@pytest.mark.parametrize("method", SEARCHING)
def test_asked_for_one_at_a_time_a_tuner_comes_to_all_ways(
    method: Method, tasks: LayerTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ChameleonConfig(walks=8, steps=4, rounds=1)  # the default plans for seconds
    monkeypatch.setattr("xrlflow.tuning.tuners.chameleon.ChameleonTuner", partial(ChameleonTuner, config=few))
    few_choices(monkeypatch)
    layer, task = tasks.layers[0], tasks.tasks[0]
    tuner = tasks.maker(method)(task, 3)
    keys: list[str] = []
    while proposed := tuner.propose(1):
        keys += [candidate.key for candidate in proposed]
        tuner.update([(candidate, Measurement((1e-3 / len(keys),))) for candidate in proposed])
    assert len(keys) == len(set(keys))
    assert set(keys) == {key_of(layer, choice, MACHINE) for choice in layer.everything(MACHINE)}


@pytest.mark.parametrize("count", [1, 3])
def test_a_tuner_learns_how_long_the_untuned_kernels_take(
    count: int, tasks: LayerTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Listening(RandomTuner):
        def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
            told.extend(candidate.key for candidate, _ in measured)
            super().update(measured)

    told: list[str] = []
    monkeypatch.setattr(
        "xrlflow.tuning.layer_tuning.make_tuner", lambda _, space, seed: Listening(space, seed)
    )
    tuner = tasks.maker(Method.RANDOM)(tasks.tasks[0], 3)
    proposed = tuner.propose(count)
    tuner.update([(candidate, Measurement((1e-3,))) for candidate in proposed])
    assert told == [candidate.key for candidate in proposed]


@pytest.mark.parametrize(
    "method", whole([m for m in Method if m is not Method.ONE_SHOT], (Method.CHAMELEON,))
)
def test_every_method_tunes_a_models_layers(method: Method, tasks: LayerTasks, tmp_path: Path) -> None:
    with Store(tmp_path / "store.sqlite") as store, measuring(tasks) as measurer:
        actual = tune(
            tasks.tasks, tasks.maker(method), trials=12, batch=3, store=store, pool=measurer, kernels=tasks,
        )  # fmt: skip
        assert sum(result.trials for result in actual.tasks) == 12
        for result in actual.tasks:
            assert result.error is None
            assert result.failed == 0
            assert result.best is not None
            records = store.records(result.task.key)
            assert tasks.untuned_candidate(result.task).key in {record.candidate for record in records}
            assert len({record.candidate for record in records}) == result.trials


def test_a_second_run_measures_nothing(tasks: LayerTasks, tmp_path: Path) -> None:
    with Store(tmp_path / "store.sqlite") as store, measuring(tasks) as measurer:
        for wanted in (6, 0):
            actual = tune(
                tasks.tasks, tasks.maker(Method.RANDOM), trials=6, batch=3, store=store, pool=measurer
            )
            assert actual.measured == wanted
            assert all(result.best is not None for result in actual.tasks)


def test_kernels_that_compute_something_else_fail(
    tasks: LayerTasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the untuned tiles do not fail: their results are the reference of the others."""
    expected = Layer.expected
    monkeypatch.setattr(Layer, "expected", lambda layer, machine: expected(layer, machine) + 0.01)
    one = tasks_of(tasks.layers[:1])
    with Store(tmp_path / "store.sqlite") as store, measuring(one) as measurer:
        tune(one.tasks, one.maker(Method.RANDOM), trials=5, batch=5, store=store, pool=measurer)
        records = store.records(one.layers[0].key)
        wrong = [record for record in records if "off by" in (record.error or "")]
        assert len(wrong) == len(records) - 1 == 4
        known = StoredTimes.on(store, MACHINE, 2).of(one.layers[0].workload, False)
        assert known == {} or set(known.values()) == {None, known[Algorithm.TILES]}


def test_a_layer_that_cannot_run_alone_is_left_to_the_estimates(
    tasks: LayerTasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise BackendError("not this one")

    monkeypatch.setattr(Layer, "expected", failing)
    one = tasks_of(tasks.layers[:1])
    with Store(tmp_path / "store.sqlite") as store, measuring(one) as measurer:
        result = tune(one.tasks, one.maker(Method.RANDOM), trials=3, batch=3, store=store, pool=measurer)
        assert result.tasks[0].best is None
        errors = {record.error for record in store.records(one.layers[0].key)}
        assert errors == {"the layer cannot run alone: not this one"}
        assert StoredTimes.on(store, MACHINE, 2).of(one.layers[0].workload, False) == {}


def test_kernels_that_cannot_be_scheduled_run_as_they_are(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tune` and `optimize` both warn. A layer has other algorithms, too."""
    from tvm.s_tir import ScheduleError

    def failing(*_: Any) -> Any:
        raise ScheduleError("not this one")

    monkeypatch.setattr("xrlflow.backends.tvm.schedules.dispatch.prepare", failing)
    with pytest.warns(UserWarning, match="a kernel was left unscheduled: .*not this one"):
        result = api.tune(file, trials=4, threads=2, store=tmp_path / "store.sqlite", measure=False)
    assert result.verification is not None
    assert result.verification.verified


def test_a_models_layers_are_measured_again_beside_the_untuned_ones(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Sequence[Task], Any, LayerMeasurer]] = []

    def watched(tasks: Sequence[Task], *given: Any, kernels: Any, pool: LayerMeasurer, **named: Any) -> Any:
        kept.append((tasks, kernels, pool))
        return tune(tasks, *given, kernels=kernels, pool=pool, **named)

    monkeypatch.setattr("xrlflow.tuning.models.tune", watched)
    api.tune(file, method="random", trials=2, threads=2, store=tmp_path / "s.sqlite", measure=False)
    ((tasks, kernels, pool),) = kept
    assert pool.flushed, "as between other kernels"
    for task in tasks:
        layer = pool.layers.by_key.get(task.key)
        if layer is not None:
            assert kernels.untuned_candidate(task).key == key_of(layer, layer.untuned(MACHINE)[0], MACHINE)


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("function", [api.optimize, api.tune])
def test_kernels_run_as_the_store_has_them(
    function: Any, file: Path, tasks: LayerTasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sqlite"
    wanted: dict[Any, KernelChoice] = {}
    with Store(path) as store:
        for layer in tasks.layers:
            first, *untuned = layer.untuned(MACHINE)
            products = [
                choice for choice in layer.everything(MACHINE) if choice.algorithm is Algorithm.PRODUCT
            ]
            other = next(choice for choice in products if choice not in (first, *untuned))
            put(store, layer, first, *[1e-3] * 4)
            put(store, layer, other, *[1e-4] * 4)
            wanted[layer.workload] = other
    used: dict[Any, KernelChoice] = {}
    replacement = layers_fusion._replacement

    def watched(match: Any, option: Any, machine: Machine) -> Any:
        used[match.workload] = KernelChoice(option.algorithm, option.blocking)
        return replacement(match, option, machine)

    monkeypatch.setattr(layers_fusion, "_replacement", watched)
    if function is api.optimize:
        options: dict[str, Any] = {"backend": "tvm", "search": "greedy", "cost": "roofline"}
    else:
        options = {"trials": 0}
    function(file, store=path, threads=2, measure=False, **options)
    assert used == wanted


def test_a_file_that_is_something_else_is_no_store(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it began")

    for module in ("attempts", "tuning"):
        monkeypatch.setattr(f"xrlflow.pipeline.{module}.start", never)
    before = file.read_bytes()
    for command in (["tune"], ["optimize", "--backend", "tvm"]):
        result = CliRunner().invoke(
            app, [*command, str(file), "-o", str(tmp_path / "fast.so"), "--store", str(file)]
        )
        assert result.exit_code == 2
        assert f"{file}: no store of measurements" in result.stderr
        assert "name another file" in result.stderr
    assert file.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]


def test_progress_is_told(file: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []

    def listener(phase: str, done: int, total: int, note: str) -> None:
        if phase == "tune":
            told.append((done, total, note))

    api.tune(
        file, method="random", trials=4, batch=2, threads=2, store=tmp_path / "s.sqlite", measure=False,
        verify=False, listener=listener,
    )  # fmt: skip
    assert {total for _, total, _ in told} == {4}
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert {1, 2, 3, 4} <= {done for done, _, _ in told}
    assert all(note.endswith(" us") for _, _, note in told)


def rewritable() -> onnx.ModelProto:
    """A model with two products of one input, which a search merges."""
    model = network()
    del model.graph.node[:]
    for text in ("a = MatMul(x, u)", "b = MatMul(x, v)", "c = Add(a, b)", "y = MatMul(c, w)"):
        parsed = onnx.parser.parse_graph(f"g () => () {{ {text} }}")
        model.graph.node.extend(parsed.node)
    return model


@pytest.mark.parametrize("fastest", ["untuned", "tuned", "rewritten"])
def test_the_fastest_of_the_untuned_the_tuned_and_the_rewritten_model_is_taken(
    fastest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["onnxruntime", "untuned", "tuned", "rewritten"]

    def measured(models: Sequence[str | bytes], *given: Any, **named: Any) -> Any:
        assert len(models) == len(names)
        times = [SimpleNamespace(median_ms=1.0 if name == fastest else 2.0) for name in names]
        paths.extend(str(path) for path in models[1:])
        return SimpleNamespace(latencies=times)

    paths: list[str] = []
    monkeypatch.setattr("xrlflow.tuning.models.measure", measured)
    monkeypatch.setattr("xrlflow.pipeline.tuning.final", lambda *_: None)
    result = api.tune(rewritable(), trials=0, threads=2, store=tmp_path / "s.sqlite")
    assert result.verification is not None
    assert result.verification.verified
    assert result.result.path == paths[names.index(fastest) - 1]
    report = result.to_json()
    assert [report[f"{name}_ms"] for name in names] == [1.0 if name == fastest else 2.0 for name in names]
    assert (
        report["written"]
        == {
            "untuned": "the original graph, untuned",
            "tuned": "the original graph with what tuning found",
            "rewritten": "the rewritten graph with what tuning found",
        }[fastest]
    )


@pytest.mark.parametrize(
    ("options", "count"), [({}, 2), ({"rewrite": False}, 1), ({"measure": False, "verify": False}, 1)]
)
def test_what_cannot_be_compared_is_not_rewritten(
    options: dict[str, bool], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(lowering: Any, original: Any, given: Sequence[str], *rest: Any) -> Any:
        graphs.extend([node.op_type for node in onnx.load(path).graph.node] for path in given)
        raise BackendError("enough")

    graphs: list[list[str]] = []
    monkeypatch.setattr("xrlflow.pipeline.tuning.tune_model", watched)
    with pytest.raises(BackendError, match="enough"):
        api.tune(rewritable(), trials=0, threads=2, store=tmp_path / "s.sqlite", **options)  # type: ignore[arg-type]
    assert len(graphs) == count
    assert sorted(graphs[0]) == ["Add", "MatMul", "MatMul", "MatMul"]
    if count == 2:
        assert graphs[1].count("MatMul") < 3


def test_a_rewritten_graph_that_does_not_compile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(backend: Tvm, graph: str, **named: Any) -> TvmModel:
        if sum(node.op_type == "MatMul" for node in onnx.load(graph).graph.node) < 3:
            raise BackendError("not this one")
        return compile_model(backend, graph, **named)

    compile_model = Tvm.compile
    monkeypatch.setattr(Tvm, "compile", failing)
    monkeypatch.setattr("xrlflow.pipeline.tuning.final", lambda *_: None)
    result = api.tune(rewritable(), trials=0, threads=2, store=tmp_path / "s.sqlite")
    assert result.result.rewritten_ms is None
    assert result.to_json()["notes"] == ["the rewritten graph is left out: not this one"]


def test_after_an_interrupted_search_nothing_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listener(phase: str, done: int, total: int, note: str) -> None:
        if phase == "search":
            raise KeyboardInterrupt

    monkeypatch.setattr("xrlflow.pipeline.tuning.final", lambda *_: None)
    result = api.tune(rewritable(), trials=8, threads=2, store=tmp_path / "s.sqlite", listener=listener)
    assert result.result.tuning.measured == 0
    assert result.verification is not None
    assert result.notes[0].startswith("interrupted: nothing was tuned")


def test_tune_writes_a_library_that_computes_the_same(file: Path, tmp_path: Path) -> None:
    store, output = tmp_path / "store.sqlite", tmp_path / "fast.so"
    result = CliRunner().invoke(
        app,
        [
            "tune", str(file), "-o", str(output), "--method", "random", "--trials", "4", "--batch", "2", "--threads",
            "2", "--store", str(store), "--no-measure", "--json",
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["verified"] is True
    assert sum(kernel["measured"] for kernel in report["kernels"]) == 4
    assert report["speedup"] is None
    assert report["written"] == "the original graph with what tuning found"
    feeds = {"x": np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)}
    with load_compiled(output) as loaded, open_model(str(file)) as runtime:
        np.testing.assert_allclose(loaded.run(feeds)[0], runtime.run(feeds)[0], rtol=1e-5, atol=1e-6)
    again = api.tune(file, method="random", trials=4, batch=2, threads=2, store=store, measure=False)
    assert again.result.tuning.measured == 0
    options = ["--trials", "0", "--threads", "2", "--store", str(store), "--no-measure"]
    shown = " ".join(CliRunner().invoke(app, ["tune", str(file), "-o", str(output), *options]).stdout.split())
    assert "verification: equal, largest deviation" in shown
    assert shown.endswith(": written (the original graph with what tuning found)")


@pytest.mark.parametrize("interrupting", whole([True, False], (True,)))
def test_an_interrupt_hurries_what_follows(
    interrupting: bool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs so far are compiled and compared, in less time."""
    seconds: list[float] = []

    def listener(phase: str, done: int, total: int, note: str) -> None:
        if interrupting and phase == "tune":
            raise KeyboardInterrupt

    def measured(*given: Any, time_limit: float, **named: Any) -> Comparison:
        seconds.append(time_limit)
        return measure(*given, time_limit=0.2, **named)

    def final(context: Any, path: str, verification: Any, allowed: float) -> None:
        seconds.append(allowed)

    monkeypatch.setattr("xrlflow.tuning.models.measure", measured)
    monkeypatch.setattr("xrlflow.pipeline.tuning.final", final)
    result = api.tune(
        file, method="random", trials=4, batch=2, threads=2, store=tmp_path / "s.sqlite", listener=listener
    )
    assert result.result.tuning.interrupted == interrupting
    assert result.verification is not None
    assert [s < 10.0 for s in seconds] == [interrupting] * 2


def broken(*_: Any, **__: Any) -> NoReturn:
    raise BackendError("a measuring process was ended by SIGKILL")


def test_what_cannot_be_measured_is_delivered(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tuned, compiled and verified: a measuring process that dies costs only the times."""
    monkeypatch.setattr("xrlflow.tuning.models.measure", broken)
    monkeypatch.setattr("xrlflow.pipeline.confirm.measure_in_fresh_processes", broken)
    result = api.tune(file, trials=0, threads=2, rewrite=False, store=tmp_path / "s.sqlite")
    assert result.verification is not None
    assert result.verification.verified
    assert result.to_json()["tuned_ms"] is result.speedup is None
    why = "a measuring process was ended by SIGKILL"
    assert f"the result could not be measured: {why}" in result.notes
    assert f"the models could not be compared, the original's graph is kept: {why}" in result.notes
    result.save(tmp_path / "fast.so")
    with pytest.raises(BackendError, match="SIGKILL"):  # nobody knows whether it runs
        api.tune(file, trials=0, threads=2, rewrite=False, store=tmp_path / "s.sqlite", verify=False)


@pytest.mark.parametrize("command", [["tune"], ["optimize", "--backend", "tvm"]])
def test_the_name_of_a_library_is_checked_first(command: list[str], file: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*command, str(file), "-o", str(tmp_path / "fast.onnx")])
    assert result.exit_code == 2
    assert "give it a name that ends in .so" in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]


def test_bad_options(file: Path) -> None:
    with pytest.raises(api.OptionError, match="choose of chameleon, genetic"):
        api.tune(file, method="luck")
    with pytest.raises(api.OptionError, match="above zero"):
        api.tune(file, time_limit=0)
    for function in (api.tune, api.optimize, api.bench, partial(api.verify_files, file)):
        with pytest.raises(api.OptionError, match="seed -1 is negative"):
            function(file, seed=-1)

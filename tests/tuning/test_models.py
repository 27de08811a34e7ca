"""A model's kernels as tasks, tuned and put back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from typer.testing import CliRunner

from xrlflow import api
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure, open_model
from xrlflow.backends.results import Comparison
from xrlflow.backends.tvm import Tvm, TvmModel, detect, load_compiled, schedules
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.lower import fuse, import_model
from xrlflow.backends.tvm.schedules import apply, choices, design_space, heuristic
from xrlflow.cli import app
from xrlflow.lowering import _together
from xrlflow.tuning.kernels import blocked, kernel_tasks, tuned_by, untuned_kernel
from xrlflow.tuning.knobs import Candidate, KnobSpace
from xrlflow.tuning.pool import PoolOptions
from xrlflow.tuning.session import tune
from xrlflow.tuning.store import Record, Setting, Store
from xrlflow.tuning.tasks import Task, module_key
from xrlflow.tuning.tuners.chameleon import ChameleonConfig, ChameleonTuner
from xrlflow.tuning.tuners.evolutionary import EvolutionaryConfig
from xrlflow.tuning.tuners.protocol import Measurement, Method
from xrlflow.tuning.tuners.random import RandomTuner
from xrlflow.tuning.worker import Timing

QUICK = PoolOptions(builders=2, threads=2, timing=Timing(samples=2, sample_ms=0.2))


def network() -> onnx.ModelProto:
    """Two products that are alike, one that is not, a softmax."""
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
def tasks() -> list[Task]:
    machine = detect(cores=2)
    return kernel_tasks(fuse(import_model(network()), machine), machine)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(network(), path)
    return path


def test_kernels_with_a_choice_are_tasks(tasks: list[Task]) -> None:
    assert sorted(task.weight for task in tasks) == [1, 2]  # the softmax leaves no choice
    for task in tasks:
        assert heuristic(task.mod, detect(cores=2)) in choices(task.mod, detect(cores=2))


def test_every_choice_computes_the_same(tasks: list[Task]) -> None:
    from tvm.s_tir import Schedule

    package, machine = tvm(), detect(cores=2)
    task = next(task for task in tasks if task.weight == 2)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((16, 32)).astype(np.float32)
    w = rng.standard_normal((32, 32)).astype(np.float32)
    expected = np.maximum(x @ w, 0)
    offered = choices(task.mod, machine)
    assert len(set(offered)) == len(offered) > 8
    for choice in offered[:: max(1, len(offered) // 8)]:
        scheduled = apply(Schedule(task.mod), machine, choice).mod
        library = package.compile(scheduled, target=machine.target())
        result = package.runtime.tensor(np.zeros((16, 32), np.float32))
        library["main"](package.runtime.tensor(x), package.runtime.tensor(w), result)
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_the_design_space_has_a_sketch_for_each_choice(tasks: list[Task]) -> None:
    machine = detect(cores=2)
    for task in tasks:
        space = KnobSpace.of(task, 0, design_space(machine))
        assert space.size == len(choices(task.mod, machine))
        candidate = space.decode(space.random(np.random.default_rng(0)))
        assert candidate is not None
        assert space.encode(candidate.trace) == candidate.vector


def test_a_tile_that_does_not_fit_is_no_sketch(tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm.s_tir import ScheduleError

    def failing(sch: Any, block: Any, found: Any, form: Any, machine: Any, choice: Any) -> None:
        if choice == bad:
            raise ScheduleError("not with this tile")
        schedule_contraction(sch, block, found, form, machine, choice)

    machine = detect(cores=2)
    offered, untuned = choices(tasks[0].mod, machine), heuristic(tasks[0].mod, machine)
    bad = offered[0] if offered[0] != untuned else offered[-1]
    schedule_contraction = schedules._schedule_contraction
    monkeypatch.setattr("xrlflow.backends.tvm.schedules._schedule_contraction", failing)
    assert KnobSpace.of(tasks[0], 0, design_space(machine)).size == len(offered) - 1
    (first,) = blocked(Method.RANDOM, machine)(tasks[0], 0).propose(1)
    assert first.key == untuned_kernel(machine)(tasks[0]).key
    assert first.vector is not None


def test_the_untuned_schedule_is_the_first_proposal(tasks: list[Task]) -> None:
    from tvm.s_tir import Schedule

    machine = detect(cores=2)
    task = tasks[0]
    tuner = blocked(Method.RANDOM, machine)(task, 3)
    first, *others = tuner.propose(4)
    untuned = apply(Schedule(task.mod, debug_mask="none"), machine)
    assert first.key == module_key(untuned.mod)
    assert len({first.key, *(other.key for other in others)}) == 1 + len(others) > 2
    assert first.key not in {candidate.key for candidate in tuner.propose(100)}


@pytest.mark.parametrize("method", [m for m in Method if m is not Method.EVOLUTIONARY])
def test_asked_for_one_at_a_time_a_tuner_comes_to_all_choices(
    method: Method, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvm.s_tir import Schedule

    few = ChameleonConfig(walks=8, steps=4, rounds=1)  # the default plans for seconds
    monkeypatch.setattr("xrlflow.tuning.tuners.chameleon.ChameleonTuner", partial(ChameleonTuner, config=few))
    machine = detect(cores=2)
    task = min(tasks, key=lambda task: len(choices(task.mod, machine)))
    tuner = blocked(method, machine)(task, 3)
    keys: list[str] = []
    while proposed := tuner.propose(1):
        keys += [candidate.key for candidate in proposed]
        tuner.update([(candidate, Measurement((1e-3 / len(keys),))) for candidate in proposed])
    assert len(keys) == len(set(keys))
    offered = choices(task.mod, machine)
    assert set(keys) == {
        module_key(apply(Schedule(task.mod, debug_mask="none"), machine, choice).mod) for choice in offered
    }


@pytest.mark.parametrize("count", [1, 3])
def test_a_tuner_learns_how_long_the_untuned_schedule_takes(
    count: int, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Listening(RandomTuner):
        def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
            told.extend(candidate.key for candidate, _ in measured)
            super().update(measured)

    told: list[str] = []
    monkeypatch.setattr(
        "xrlflow.tuning.kernels.make_tuner", lambda _, task, seed, space: Listening(space, seed)
    )
    tuner = blocked(Method.RANDOM, detect(cores=2))(tasks[0], 3)
    proposed = tuner.propose(count)
    tuner.update([(candidate, Measurement((1e-3,))) for candidate in proposed])
    assert told == [candidate.key for candidate in proposed]


@pytest.mark.parametrize("method", Method)
def test_every_method_tunes_a_models_kernels(
    method: Method, tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(
        EvolutionaryConfig, population=16, generations=1, warmup=8
    )  # the default takes many seconds
    monkeypatch.setattr("xrlflow.tuning.tuners.evolutionary.EvolutionaryConfig", few)
    machine = detect(cores=2)
    with Store(tmp_path / "store.sqlite") as store:
        found = tune(
            tasks, blocked(method, machine), trials=12, batch=3, store=store, pool=QUICK,
            usual=untuned_kernel(machine),
        )  # fmt: skip
        assert sum(result.trials for result in found.tasks) == 12
        for result in found.tasks:
            assert result.error is None
            assert result.failed == 0
            assert result.best is not None
            records = store.known(result.task.key)
            assert untuned_kernel(machine)(result.task).key in {record.candidate for record in records}
            assert len({record.candidate for record in records}) == result.trials


def test_a_second_run_measures_nothing(tasks: list[Task], tmp_path: Path) -> None:
    machine = detect(cores=2)
    with Store(tmp_path / "store.sqlite") as store:
        assert tuned_by(store, machine, 2, flushed=False)(tasks[0].mod) is None
        found = tune(tasks, blocked(Method.RANDOM, machine), trials=6, batch=3, store=store, pool=QUICK)
        assert found.measured == 6
        assert all(result.best is not None for result in found.tasks)
        again = tune(tasks, blocked(Method.RANDOM, machine), trials=6, batch=3, store=store, pool=QUICK)
        assert again.measured == 0


def test_only_what_is_clearly_faster_replaces_the_untuned_schedule(tasks: list[Task], tmp_path: Path) -> None:
    machine = detect(cores=2)
    task = tasks[0]
    first, other = blocked(Method.RANDOM, machine)(task, 0).propose(2)
    setting = Setting.here(machine.target(), 2)
    with Store(tmp_path / "store.sqlite") as store:
        tuned = tuned_by(store, machine, 2, flushed=False)
        store.put(Record.of(task, setting, first, Measurement((1e-3,))))
        store.put(Record.of(task, setting, other, Measurement((0.99e-3,))))
        assert tuned(task.mod) is None
        store.put(Record.of(task, setting, other, Measurement((0.5e-3,))))
        found = tuned(task.mod)
        assert found is not None
        assert module_key(found) == other.key
        assert tuned_by(store, machine, 2, flushed=True)(task.mod) is None, "timed in another way"


@pytest.mark.parametrize("usual", [Measurement((1e-3,)), Measurement(error="it took longer than 1 s")])
def test_what_the_untuned_schedule_once_took_counts(
    usual: Measurement, tasks: list[Task], tmp_path: Path
) -> None:
    """Also where it was measured too seldom to be the best, or failed the last time."""
    machine = detect(cores=2)
    task = tasks[0]
    first, other = blocked(Method.RANDOM, machine)(task, 0).propose(2)
    setting = Setting.here(machine.target(), 2)
    with Store(tmp_path / "store.sqlite") as store:
        store.put(Record.of(task, setting, first, Measurement((1e-3 + 1e-9,))))
        store.put(Record.of(task, setting, first, usual))
        for number in range(4):
            store.put(Record.of(task, setting, other, Measurement((2e-3 + 1e-9 * number,))))
        assert tuned_by(store, machine, 2, flushed=False)(task.mod) is None


def test_kernels_that_cannot_be_scheduled_are_not_tuned(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run as they are, with a warning, in `tune` as in `optimize`."""
    from tvm.s_tir import ScheduleError

    def failing(*_: Any) -> Any:
        raise ScheduleError("not this one")

    monkeypatch.setattr("xrlflow.backends.tvm.schedules._prepare", failing)
    with pytest.warns(UserWarning, match="a kernel was left unscheduled: .*not this one"):
        result = api.tune(file, trials=4, threads=2, store=tmp_path / "store.sqlite", measure=False)
    assert result.found.tuning.tasks == ()
    assert result.verification is not None
    assert result.verification.verified


def test_a_kernel_whose_choices_fail_is_said_not_to_be_tuned(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvm.s_tir import ScheduleError

    def failing(sch: Any, block: Any, found: Any, form: Any, machine: Any, choice: Any) -> None:
        if choice is not None:
            raise ScheduleError("not with this tile")
        schedule_contraction(sch, block, found, form, machine, choice)

    schedule_contraction = schedules._schedule_contraction
    monkeypatch.setattr("xrlflow.backends.tvm.schedules._schedule_contraction", failing)
    result = api.tune(file, trials=4, threads=2, store=tmp_path / "store.sqlite", measure=False)
    errors = [kernel["error"] for kernel in result.to_json()["kernels"]]
    assert len(errors) == 2
    assert all(error.endswith("the schedule rules give no sketch") for error in errors)
    assert result.verification is not None
    assert result.verification.verified


def test_what_was_lucky_once_does_not_replace_what_was_measured_often(
    tasks: list[Task], tmp_path: Path
) -> None:
    machine = detect(cores=2)
    task = tasks[0]
    first, other = blocked(Method.RANDOM, machine)(task, 0).propose(2)
    setting = Setting.here(machine.target(), 2)
    with Store(tmp_path / "store.sqlite") as store:
        tuned = tuned_by(store, machine, 2, flushed=False)
        store.put(Record.of(task, setting, other, Measurement((0.5e-3,))))
        assert tuned(task.mod) is not None
        for number in range(4):
            store.put(Record.of(task, setting, first, Measurement((1e-3 + 1e-6 * number,))))
        assert tuned(task.mod) is None


def test_a_models_kernels_are_measured_again_beside_the_untuned_ones(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Sequence[Task], Any, PoolOptions]] = []

    def watched(tasks: Sequence[Task], *given: Any, usual: Any, pool: PoolOptions, **named: Any) -> Any:
        kept.append((tasks, usual, pool))
        return tune(tasks, *given, usual=usual, pool=pool, **named)

    monkeypatch.setattr("xrlflow.lowering.tune", watched)
    api.tune(file, method="random", trials=2, threads=2, store=tmp_path / "s.sqlite", measure=False)
    ((tasks, usual, pool),) = kept
    assert pool.timing.flush, "as between other kernels"
    for task in tasks:
        space = KnobSpace.of(task, 0, design_space(detect(cores=2)))
        options = choices(task.mod, detect(cores=2))
        untuned = space.decode((options.index(heuristic(task.mod, detect(cores=2))),))
        assert untuned is not None
        assert usual(task).key == untuned.key


def remember_another_kernel(task: Task, path: Path) -> str:
    """A store that has another schedule than the untuned one as the faster of the two; its key."""
    machine = detect(cores=2)
    first, other = blocked(Method.RANDOM, machine)(task, 0).propose(2)
    setting = Setting.here(machine.target(), 2, flushed=True)
    with Store(path) as store:
        for candidate, seconds in ((first, 1e-3), (other, 1e-4)):
            record = Record.of(task, setting, candidate, Measurement((seconds,)))
            for times in range(4):
                store.put(replace(record, taken=float(times), seconds=(seconds + 1e-9 * times,)))
    return other.key


@pytest.mark.parametrize("function", [api.optimize, api.tune])
def test_kernels_run_as_the_store_has_them(
    function: Any, file: Path, tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sqlite"
    wanted = {task.key: remember_another_kernel(task, path) for task in tasks}
    used: dict[str, str] = {}
    scheduled = Store.scheduled

    def watched(store: Store, task: Task, record: Record) -> Any:
        used[task.key] = record.candidate
        assert store.path == path
        return scheduled(store, task, record)

    monkeypatch.setattr(Store, "scheduled", watched)
    if function is api.optimize:
        options: dict[str, Any] = {"backend": "tvm", "search": "greedy", "cost": "roofline"}
    else:
        options = {"trials": 0}
    function(file, store=path, threads=2, measure=False, **options)
    assert used == wanted


def test_two_graphs_share_tasks_as_often_as_the_one_that_calls_them_more(tasks: list[Task]) -> None:
    once, twice = sorted(tasks, key=lambda task: task.weight)
    for groups in ([[once, twice], [replace(twice, weight=1)]], [[replace(twice, weight=1)], [once, twice]]):
        found = _together(groups)
        assert sorted((task.key, task.weight) for task in found) == sorted([(once.key, 1), (twice.key, 2)])


def test_a_file_that_is_something_else_is_no_store(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it began")

    for module in ("race", "tuning"):
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
    """Two products of one input, which a search merges."""
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
    monkeypatch.setattr("xrlflow.lowering.measure", measured)
    monkeypatch.setattr("xrlflow.pipeline.tuning.final", lambda *_: None)
    result = api.tune(rewritable(), trials=0, threads=2, store=tmp_path / "s.sqlite")
    assert result.verification is not None
    assert result.verification.verified
    assert result.found.path == paths[names.index(fastest) - 1]
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
    def watched(how: Any, original: Any, given: Sequence[str], *rest: Any) -> Any:
        graphs.extend([node.op_type for node in onnx.load(path).graph.node] for path in given)
        raise BackendError("enough")

    graphs: list[list[str]] = []
    monkeypatch.setattr("xrlflow.lowering.tune_model", watched)
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
    assert result.found.rewritten_ms is None
    assert result.to_json()["notes"] == ["the rewritten graph is left out: not this one"]


def test_after_an_interrupted_search_nothing_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listener(phase: str, done: int, total: int, note: str) -> None:
        if phase == "search":
            raise KeyboardInterrupt

    monkeypatch.setattr("xrlflow.pipeline.tuning.final", lambda *_: None)
    result = api.tune(rewritable(), trials=8, threads=2, store=tmp_path / "s.sqlite", listener=listener)
    assert result.found.tuning.measured == 0
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
    assert again.found.tuning.measured == 0
    options = ["--trials", "0", "--threads", "2", "--store", str(store), "--no-measure"]
    shown = " ".join(CliRunner().invoke(app, ["tune", str(file), "-o", str(output), *options]).stdout.split())
    assert "verification: equal, largest deviation" in shown
    assert shown.endswith(": written (the original graph with what tuning found)")


@pytest.mark.parametrize("interrupting", [True, False])
def test_an_interrupt_hurries_what_follows(
    interrupting: bool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known is compiled and compared, in less time."""
    seconds: list[float] = []

    def listener(phase: str, done: int, total: int, note: str) -> None:
        if interrupting and phase == "tune":
            raise KeyboardInterrupt

    def measured(*given: Any, time_limit: float, **named: Any) -> Comparison:
        seconds.append(time_limit)
        return measure(*given, time_limit=0.2, **named)

    def final(context: Any, path: str, allowed: float) -> None:
        seconds.append(allowed)

    monkeypatch.setattr("xrlflow.lowering.measure", measured)
    monkeypatch.setattr("xrlflow.pipeline.tuning.final", final)
    result = api.tune(
        file, method="random", trials=4, batch=2, threads=2, store=tmp_path / "s.sqlite", listener=listener
    )
    assert result.found.tuning.interrupted == interrupting
    assert result.verification is not None
    assert [s < 10.0 for s in seconds] == [interrupting] * 2


@pytest.mark.parametrize("command", [["tune"], ["optimize", "--backend", "tvm"]])
def test_the_name_of_a_library_is_checked_first(command: list[str], file: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*command, str(file), "-o", str(tmp_path / "fast.onnx")])
    assert result.exit_code == 2
    assert "give it a name that ends in .so" in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]


def test_bad_options(file: Path) -> None:
    with pytest.raises(api.OptionError, match="choose of chameleon, evolutionary"):
        api.tune(file, method="luck")
    with pytest.raises(api.OptionError, match="above zero"):
        api.tune(file, time_limit=0)
    for function in (api.tune, api.optimize, api.bench, partial(api.verify_files, file)):
        with pytest.raises(api.OptionError, match="seed -1 is negative"):
            function(file, seed=-1)

"""A model's kernels as tasks, tuned and put back."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from typer.testing import CliRunner

from xrlflow import api
from xrlflow.backends.onnxruntime import measure, open_model
from xrlflow.backends.results import Comparison
from xrlflow.backends.tvm import detect, load_compiled
from xrlflow.backends.tvm.load import tvm
from xrlflow.backends.tvm.lower import fuse, import_model
from xrlflow.backends.tvm.schedules import apply, choices, design_space, heuristic
from xrlflow.cli import app
from xrlflow.tuning.kernels import blocked, kernel_tasks, tuned_by
from xrlflow.tuning.knobs import KnobSpace
from xrlflow.tuning.pool import PoolOptions
from xrlflow.tuning.session import tune
from xrlflow.tuning.store import Record, Setting, Store
from xrlflow.tuning.tasks import Task, module_key
from xrlflow.tuning.tuners.protocol import Method, Outcome
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


def test_what_was_tuned_is_put_back(tasks: list[Task], tmp_path: Path) -> None:
    machine = detect(cores=2)
    with Store(tmp_path / "store.sqlite") as store:
        tuned = tuned_by(store, machine, 2)
        assert tuned(tasks[0].mod) is None
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
        tuned = tuned_by(store, machine, 2)
        store.put(Record.of(task, setting, first, Outcome((1e-3,))))
        store.put(Record.of(task, setting, other, Outcome((0.99e-3,))))
        assert tuned(task.mod) is None
        store.put(Record.of(task, setting, other, Outcome((0.5e-3,))))
        found = tuned(task.mod)
        assert found is not None
        assert module_key(found) == other.key


def test_what_was_lucky_once_does_not_replace_what_was_measured_often(
    tasks: list[Task], tmp_path: Path
) -> None:
    machine = detect(cores=2)
    task = tasks[0]
    first, other = blocked(Method.RANDOM, machine)(task, 0).propose(2)
    setting = Setting.here(machine.target(), 2)
    with Store(tmp_path / "store.sqlite") as store:
        tuned = tuned_by(store, machine, 2)
        store.put(Record.of(task, setting, other, Outcome((0.5e-3,))))
        assert tuned(task.mod) is not None
        for number in range(4):
            store.put(Record.of(task, setting, first, Outcome((1e-3 + 1e-6 * number,))))
        assert tuned(task.mod) is None


def test_a_models_kernels_are_measured_again_beside_the_untuned_ones(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Sequence[Task], Any]] = []

    def watched(tasks: Sequence[Task], *given: Any, usual: Any, **named: Any) -> Any:
        kept.append((tasks, usual))
        return tune(tasks, *given, usual=usual, **named)

    monkeypatch.setattr("xrlflow.lowering.tune", watched)
    api.tune(file, method="random", trials=2, threads=2, store=tmp_path / "s.sqlite", measure=False)
    ((tasks, usual),) = kept
    for task in tasks:
        space = KnobSpace.of(task, 0, design_space(detect(cores=2)))
        options = choices(task.mod, detect(cores=2))
        untuned = space.decode((options.index(heuristic(task.mod, detect(cores=2))),))
        assert untuned is not None
        assert usual(task).key == untuned.key


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
    feeds = {"x": np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)}
    with load_compiled(output) as loaded, open_model(str(file)) as runtime:
        np.testing.assert_allclose(loaded.run(feeds)[0], runtime.run(feeds)[0], rtol=1e-5, atol=1e-6)
    again = api.tune(file, method="random", trials=4, batch=2, threads=2, store=store, measure=False)
    assert again.found.tuning.measured == 0


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

    def final(job: Any, path: str) -> None:
        seconds.append(job.deadline - time.monotonic())

    monkeypatch.setattr("xrlflow.lowering.measure", measured)
    monkeypatch.setattr("xrlflow.api._final", final)
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

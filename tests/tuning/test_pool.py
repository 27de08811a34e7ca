"""The builders and the runner of a pool, and candidates that crash, hang or misbehave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import tvm_ffi

from tests.tuning.kernels import calls, matmul, scheduled, target, unscheduled
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.tuning import worker
from xrlflow.tuning.crew import PoolError, Work, local_crew
from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.pool import Kernel, Pool, PoolOptions
from xrlflow.tuning.tasks import Task
from xrlflow.tuning.tuners.protocol import Measurement
from xrlflow.tuning.worker import Build, Built, Failed, Ran, Run, Timing, build, run, steady
from xrlflow.workers import ProcessWorker

pytestmark = pytest.mark.measures

QUICK = Timing(samples=2, sample_ms=0.5)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(PoolOptions(builders=1, threads=1, timing=QUICK, run_seconds=1.0)) as pool:
        yield pool


def is_fork_server(process: psutil.Process) -> bool:
    try:
        return "serve_forks" in " ".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):  # another test's, which has just ended
        return False


def workers_of(process: int) -> list[psutil.Process]:
    servers = [p for p in psutil.Process(process).children() if is_fork_server(p)]
    # The first one that a server forks ends it with its parent.
    result = [worker for server in servers for worker in sorted(server.children(), key=lambda p: p.pid)[1:]]
    return [worker for worker in result if worker.status() != psutil.STATUS_ZOMBIE]


def test_kernels_compute_what_numpy_does(pool: Pool) -> None:
    task = matmul(16, 32)
    generator = np.random.default_rng(0)
    x = generator.random((16, 16), np.float32)
    w = generator.random((16, 32), np.float32)
    for candidate in (unscheduled(task), scheduled(task, 8), scheduled(task, 16, parallel=True)):
        (y,) = pool.evaluate(task, candidate, [x, w])
        np.testing.assert_allclose(y, x @ w, rtol=1e-5)


def test_measured_are_positive_times_in_the_candidates_order(pool: Pool) -> None:
    # The times differ too much for noise: one kernel has a million times as many multiplications as the other.
    small, large = matmul(2, 4), matmul(256)
    outcomes = pool.measure(small, [unscheduled(large), unscheduled(small), unscheduled(large)])
    assert all(outcome.error is None for outcome in outcomes)
    assert outcomes[1].median < min(outcomes[0].median, outcomes[2].median)


def test_kernels_run_with_the_threads_asked_for_each_on_a_cpu(pool: Pool) -> None:
    task = matmul(16)
    path = f"{pool._server.folder}/parallel.so"
    built = build(next(Pool._builds(task, [scheduled(task, 8, parallel=True)], [path])))
    for threads in (1, 2):
        crew = local_crew(pool._server, 1, Work("running", threads, 500, 20.0))
        try:
            ((_, answer),) = crew.work(iter([Run(path, built.arguments, QUICK)]))
            assert isinstance(answer, Ran)
            process = psutil.Process(crew.crew.workers[0].process.pid)
            tasks = [int(thread.id) for thread in process.threads()]
            assert len(tasks) == threads
            if len(os.sched_getaffinity(0)) >= threads > 1:
                places = [os.sched_getaffinity(task) for task in tasks]
                assert sorted(map(len, places)) == [1] * threads
                assert len(set.union(*places)) == threads
        finally:
            crew.close()
    os.unlink(path)


def test_caches_are_filled_before_each_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = matmul(64)
    path = str(tmp_path / "kernel.so")
    built = build(next(Pool._builds(task, [unscheduled(task)], [path])))
    filled = []
    evict = tvm_ffi.get_global_func(worker._evicting())
    tvm_ffi.register_global_func("xrlflow.counted", lambda *given: filled.append(evict(*given)))
    monkeypatch.setattr(worker, "_evicting", lambda others: "xrlflow.counted")
    result = run(Run(path, built.arguments, Timing(samples=4, flush=True, limit_ms=1e6))).seconds
    assert 1 <= len(result) <= 8
    assert all(second > 0 for second in result)
    assert len(filled) in (1 + 4, 1 + 8)  # once for how long a call takes
    filled.clear()
    run(Run(path, built.arguments, Timing(samples=4, sample_ms=0.1)))
    assert not filled


def test_what_fills_caches_is_larger_than_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    tensor = tvm().runtime.tensor
    monkeypatch.setattr(tvm().runtime, "tensor", lambda array: made.append(array.nbytes) or tensor(array))
    monkeypatch.setattr(worker, "cache_levels", lambda: {1: 1 << 15, 2: 3 << 18})
    worker._evicting.cache_clear()
    try:
        tvm_ffi.get_global_func(worker._evicting())()
        tvm_ffi.get_global_func(worker._evicting(1 << 26))()
    finally:
        worker._evicting.cache_clear()
    threads = int(tvm_ffi.get_global_func("runtime.NumThreads")())
    assert made[:2] == [threads * 2 * (3 << 18)] * 2
    assert made[2:] == [(1 << 26) // threads // 4 * 4 * threads] * 2, "the weights of a large model"


def test_slow_kernels_are_timed_once(tmp_path: Path) -> None:
    task = matmul(64)
    path = str(tmp_path / "kernel.so")
    built = build(next(Pool._builds(task, [unscheduled(task)], [path])))
    once = run(Run(path, built.arguments, Timing(samples=4, limit_ms=1e-6))).seconds
    assert len(once) == 1, "what takes longer than the limit is called once"


def test_kernels_are_timed_in_turns(pool: Pool) -> None:
    small, large = unscheduled(matmul(2, 4)), unscheduled(matmul(256))
    with pool.built(target(), [small.mod, large.mod, calls("abort").mod]) as kernels:
        one, other, bad = (kernel for kernel in kernels if isinstance(kernel, Kernel))
        rounds = pool.in_turns([one, other, one], replace(QUICK, samples=3, flush=True))
        assert isinstance(rounds, list)
        assert len(rounds) == 3
        for first, between, last in rounds:
            assert 0 < max(first, last) < between
        (once,) = pool.in_turns([one, other], replace(QUICK, samples=3, limit_ms=1e-6))
        assert len(once) == 2, "what takes longer than the limit is called once"
        failed = pool.in_turns([one, bad], QUICK)
        assert isinstance(failed, Measurement)
        assert failed.error is not None
        assert "SIGABRT" in failed.error


def test_inputs_of_another_shape_are_refused(pool: Pool) -> None:
    task = matmul(16)
    with pytest.raises(BackendError, match=r"input 0 is float32\[4, 4\], not float32\[16, 16\]"):
        pool.evaluate(task, unscheduled(task), [np.zeros((4, 4), np.float32)])


def test_half_precision_needs_the_compilers_library(pool: Pool) -> None:
    te = tvm().te
    x = te.placeholder((8,), "float16", "X")
    y = te.compute((8,), lambda i: te.exp(x[i].astype("float32")).astype("float16"), name="Y")
    task = Task.of("half", te.create_prim_func([x, y]), target())
    given = np.linspace(-1, 1, 8).astype(np.float16)
    (result,) = pool.evaluate(task, unscheduled(task), [given])
    np.testing.assert_allclose(result, np.exp(given.astype(np.float32)), rtol=2e-3)
    assert pool.measure(task, [unscheduled(task)])[0].error is None


def test_bad_candidates_cost_their_worker_and_say_why(pool: Pool) -> None:
    task = matmul(16)
    good = unscheduled(task)
    candidates = [good, calls("abort"), good, calls("pause"), calls("there_is_no_such_function"), good]
    result = pool.measure(task, candidates)
    assert [outcome.error is None for outcome in result] == [True, False, True, False, False, True]
    assert result[1].error is not None
    assert result[1].error.startswith("running it, the process ended by SIGABRT")
    assert result[3].error == "running it took longer than 1 s"
    assert result[4].error is not None
    assert "there_is_no_such_function" in result[4].error


def not_for_a_cpu(task: Task) -> Candidate:
    schedule = tvm().s_tir.Schedule(task.mod)
    i, _, _ = schedule.get_loops(schedule.get_sblock("Y"))
    schedule.bind(i, "threadIdx.x")  # a CPU has none
    return Candidate(None, [[], []], schedule.mod, "bad")


def test_what_does_not_compile_is_an_outcome(pool: Pool) -> None:
    task = matmul(16)
    result = pool.measure(task, [not_for_a_cpu(task), unscheduled(task)])
    assert result[0].error is not None
    assert "\n" not in result[0].error
    assert result[1].error is None


def test_tools_that_do_not_work_are_no_fault_of_the_candidate(pool: Pool) -> None:
    task = matmul(16)
    jobs = pool._builds(task, [unscheduled(task)], [f"{pool._server.folder}/no such folder/x.so"])
    job = next(jobs)
    Path(f"{job.path}.o").parent.mkdir()
    Path(job.path).mkdir()  # where the library is to be
    with pytest.raises(PoolError, match="linking failed"):
        list(pool._builders.work(iter([job])))
    assert pool.measure(task, [unscheduled(task)])[0].error is None


def test_a_full_disk_is_no_fault_of_the_candidate(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a candidate does not build on a full disk, this is not stored as its result."""
    task = matmul(16)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=4096))
    with pytest.raises(PoolError, match="no space is left for kernels: make some, or set TMPDIR"):
        pool.measure(task, [not_for_a_cpu(task)])
    assert pool.measure(task, [unscheduled(task)])[0].error is None


def test_killed_workers_are_replaced_and_nobody_is_blamed(pool: Pool) -> None:
    task = matmul(16)
    assert pool.measure(task, [unscheduled(task)])[0].error is None
    before = {worker.pid for worker in workers_of(os.getpid())}
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert pool.measure(task, [unscheduled(task)])[0].error is None
    assert before.isdisjoint(worker.pid for worker in workers_of(os.getpid()))


def test_nothing_is_begun_after_the_limit(pool: Pool) -> None:
    task = matmul(16)
    assert list(pool.outcomes(task, [unscheduled(task)], until=time.monotonic())) == []


def test_an_iterator_left_early_leaves_the_pool_usable(pool: Pool) -> None:
    task = matmul(16)
    outcomes = pool.outcomes(task, [unscheduled(task)] * 3)
    assert next(outcomes)[1].error is None
    outcomes.close()
    assert pool.measure(task, [unscheduled(task)])[0].error is None


def test_the_first_few_are_run_before_the_others_are_built(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = matmul(16)
    begun: list[type] = []
    begin = ProcessWorker.begin

    def noted(worker: ProcessWorker, order: Build | Run) -> None:
        begun.append(type(order))
        begin(worker, order)

    monkeypatch.setattr(ProcessWorker, "begin", noted)
    result = list(pool.outcomes(task, [unscheduled(task)] * 5))
    assert [position for position, _ in result] == [0, 1, 2, 3, 4]
    assert all(outcome.error is None for _, outcome in result)
    assert begun == [Build, Build, Run, Run, *[Build] * 3, *[Run] * 3]


def test_a_few_are_all(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    task = matmul(16)
    outcomes = pool.outcomes(task, [unscheduled(task)])
    assert next(outcomes)[1].error is None
    monkeypatch.setattr(pool._builders, "_closed", True)  # nothing is left to be built
    assert list(outcomes) == []


def test_no_library_stays_on_disk(pool: Pool) -> None:
    task = matmul(16)
    pool.measure(task, [unscheduled(task), calls("abort")])
    assert [path for path in Path(pool._server.folder).rglob("*") if path.is_file()] == []


def test_a_slow_build_is_ended(pool: Pool) -> None:
    task = matmul(16)
    crew = local_crew(pool._server, 1, Work("building", 1, 500, 0.001))
    try:
        jobs = pool._builds(task, [unscheduled(task)], [f"{pool._server.folder}/slow.so"])
        assert list(crew.work(jobs)) == [(0, Failed("building it took longer than 0.001 s"))]
    finally:
        crew.close()


def test_old_workers_are_replaced(pool: Pool) -> None:
    task = matmul(16)
    crew = local_crew(pool._server, 1, Work("building", 1, 2, 20.0))
    try:
        seen = []
        for _ in range(4):
            crew.settle()
            seen.append(crew.crew.workers[0].process.pid)
            jobs = pool._builds(task, [unscheduled(task)], [f"{pool._server.folder}/old.so"])
            ((_, answer),) = crew.work(jobs)
            assert isinstance(answer, Built)
        assert seen[0] == seen[1] != seen[2] == seen[3]
    finally:
        crew.close()


def test_closing_leaves_nothing() -> None:
    pool = Pool(PoolOptions(builders=2, threads=1))
    folder, group = pool._server.folder, pool._server.server.pid
    assert os.path.isdir(folder)
    pool.close()
    assert not os.path.exists(folder)
    assert not members(group)
    task = matmul(16)
    with pytest.raises(PoolError, match="closed"):
        pool.measure(task, [unscheduled(task)])
    pool.close()


def test_a_killed_fork_server_is_an_error_and_no_hang() -> None:
    task = matmul(16)
    with Pool(PoolOptions(builders=1, threads=1)) as pool:
        os.kill(pool._server.server.pid, signal.SIGKILL)
        with pytest.raises(PoolError, match=r"no worker can be started: .*SIGKILL"):
            pool.measure(task, [unscheduled(task)])


HOLDER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from xrlflow.tuning.pool import Pool, PoolOptions
from xrlflow.tuning.worker import Run, Timing
with Pool(PoolOptions(builders=1, threads=1, run_seconds=300.0)) as pool:
    pool.settle()
    print(pool._server.folder, pool._server.server.pid, flush=True)
    list(pool._runners.work(iter([Run(sys.argv[1], (("float32", (4,)),) * 2, Timing())])))
"""


def test_neither_an_interrupt_nor_a_kill_leaves_anything_behind(tmp_path: Path) -> None:
    library = str(tmp_path / "endless.so")
    (job,) = Pool._builds(matmul(4), [calls("pause")], [library])
    build(job)
    signals = (signal.SIGINT, signal.SIGKILL)
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, library],
            cwd=Path(__file__).resolve().parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in signals
    ]
    try:
        for holder, how in zip(holders, signals):
            assert holder.stdout is not None
            folder, group = holder.stdout.readline().split()
            assert os.path.isdir(folder)
            await_that(lambda group=group: any(library in maps(pid) for pid in members(int(group))))
            holder.send_signal(how)
            _, said = holder.communicate(timeout=20)
            assert holder.returncode != 0
            assert ("KeyboardInterrupt" in said) == (how == signal.SIGINT)
            await_that(lambda folder=folder: not os.path.exists(folder))
            await_that(lambda group=group: not members(int(group)))
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def maps(process: int) -> str:
    """The memory maps of a process, which name its files."""
    try:
        return Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return ""


def members(group: int) -> list[int]:
    result = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                result.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return result


def await_that(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_workers_that_cannot_start_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['tvm'] = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = matmul(16)
    with (
        Pool(PoolOptions(builders=1, threads=1)) as pool,
        pytest.raises(PoolError, match="TVM cannot be loaded"),
    ):
        pool.measure(task, [unscheduled(task)])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((1.0,), (1.0,)),
        ((1.0, 1.001, 0.999, 1.3), (1.0, 1.001, 0.999)),
        ((1.0, 1.01, 0.99, 1.015), (1.0, 1.01, 0.99, 1.015)),
        ((3.0, 1.0), (1.0,)),
        ((3.0, 0.99, 9.0, 1.0, 1.02, 3.1, 3.3, 3.2), (0.99, 1.0, 1.02)),
        ((0.5, 1.0, 1.0, 1.0), (0.5, 1.0, 1.0, 1.0)),
    ],
)
def test_samples_that_others_slowed_down_are_dropped(
    given: tuple[float, ...], kept: tuple[float, ...]
) -> None:
    assert steady(given) == kept


@pytest.mark.parametrize("wrong", [{"builders": 0}, {"threads": 0}, {"uses": 0}, {"run_seconds": 0.0}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"pool|positive"):
        PoolOptions(**wrong)  # type: ignore[arg-type]


def test_a_pool_says_how_long_it_has_been_building_and_running(pool: Pool) -> None:
    task = matmul(16)
    building, running = pool.building, pool.running
    start = time.monotonic()
    outcomes = pool.outcomes(task, [unscheduled(task), calls("no_such_function")])
    position, outcome = next(outcomes)
    # The caller's own work meanwhile does not count.
    time.sleep(0.2)
    result = {position: outcome, **dict(outcomes)}
    took = time.monotonic() - start - 0.2
    assert len(result) == 2
    spent = pool.building - building, pool.running - running
    assert min(spent) > 0
    assert sum(spent) <= took

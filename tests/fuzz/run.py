"""Random models, optimised at random, and compared: `python -m tests.fuzz.run --minutes 5 --jobs 2`.

Three generators take turns: NNSmith; `idioms`, models like those of exporters (tests/fuzz/models.py); `rules`,
left-hand sides of rules put together. Each model is read and written again, optimised by a greedy search, and changed
by random substitutions of the whole library, including ONNX Runtime's own operators and definitions for TVM
(tests/fuzz/check.py). A model that then computes something else is made small and saved with its trace.

The findings depend only on the seed, not on --jobs: `--only idioms --seed 859 --graphs 1` repeats one model.
Exit code 1 if there are differences.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

NAMES = ("nnsmith", "idioms", "rules")
_SECONDS = 60.0  # processor time for one model
_SECONDS_TO_SHRINK = 180.0
_WAITING = 8.0  # wall-clock time as a multiple of that, since other programs may use the processor
_STARTING = 120.0  # for a worker to start
_GRAPHS_A_PROCESS = 1000
_MOST_SHRUNK = 40  # differences that a run makes small: further ones usually have the same causes


@dataclass(frozen=True)
class Job:
    """One model: its generator and its seed."""

    generator: str
    seed: int

    def __str__(self) -> str:
        return f"{self.generator}-{self.seed}"


@dataclass(frozen=True)
class Finding:
    """A difference. `rule`: the substitution that causes it ("": reading and writing, or unknown)."""

    job: Job
    what: str
    walk: str
    trace: tuple[str, ...]
    runtime: bool
    rule: str = ""
    model: bytes = b""
    inputs: tuple[Mapping[str, Any], ...] = ()


@dataclass
class ModelFindings:
    """The results for one model."""

    job: Job
    substitutions: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    runtime: tuple[str, ...] = ()
    not_comparable: str = ""
    seconds: float = 0.0


@dataclass
class Tally:
    """The results for all models of a generator."""

    graphs: int = 0
    substitutions: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    not_comparable: Counter[str] = field(default_factory=Counter)
    differences: int = 0
    runtime: int = 0
    itself: int = 0  # models that ONNX Runtime's optimisations change
    seconds: float = 0.0

    def add(self, found: ModelFindings) -> None:
        self.graphs += 1
        self.substitutions.update(found.substitutions)
        self.counts.update(found.counts)
        if found.not_comparable:
            self.not_comparable[_kind(found.not_comparable)] += 1
        self.differences += any(not f.runtime for f in found.findings)
        self.runtime += any(f.runtime for f in found.findings)
        self.itself += bool(found.runtime)
        self.seconds += found.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "graphs": self.graphs,
            "substitutions": sum(self.substitutions.values()),
            "distinct rules": len(self.substitutions),
            "differences": self.differences,
            "differences by ONNX Runtime's own faults": self.runtime,
            "originals that ONNX Runtime's optimisations change": self.itself,
            "not comparable": dict(self.not_comparable.most_common()),
            **self.counts,
            "seconds": round(self.seconds, 1),
        }


def _kind(reason: str) -> str:
    """A reason without names and numbers."""
    return "".join("#" if c.isdigit() else c for c in reason)[:120]


# --- the workers ---


def _generators() -> dict[str, Callable[[int], Any]]:
    from tests.fuzz.models import idioms
    from tests.fuzz.nnsmith import nnsmith
    from tests.fuzz.rules import rules

    return {"nnsmith": nnsmith, "idioms": idioms, "rules": rules}


def look(job: Job, libraries: Any, stage: Callable[[str], None]) -> tuple[ModelFindings, Any]:
    """Make one model and fuzz it. Returns the results and the model."""
    from models.rule_graphs import RuleGraphError
    from tests.fuzz.check import fuzz_one
    from tests.fuzz.nnsmith import NothingDrawn

    begin = time.monotonic()
    stage("the generator")
    try:
        subject = _generators()[job.generator](job.seed)
    except (NothingDrawn, RuleGraphError) as error:
        return ModelFindings(job, not_comparable=f"nothing could be drawn: {error}"), None
    try:
        outcome = fuzz_one(subject, job.seed, libraries, stage)
    except Exception as error:  # any exception is a finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        told = " ".join(
            f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}".split()
        )
        found = Finding(job, told, "raised", (), False, "", subject.proto.SerializeToString())
        return ModelFindings(job, findings=[found], seconds=time.monotonic() - begin), None
    findings = [
        Finding(job, d.what, str(d.walk or "round trip"), d.trace, d.runtime) for d in outcome.differences
    ]
    found = ModelFindings(
        job, outcome.substitutions, outcome.counts, findings, outcome.runtime, outcome.not_comparable,
        time.monotonic() - begin,
    )  # fmt: skip
    return found, (subject, outcome)


def minimised(job: Job, subject: Any, outcome: Any, libraries: Any) -> list[Finding]:
    """The differences of one model, one for each rule, each with the smallest model that shows it."""
    from dataclasses import replace

    from tests.fuzz.check import _silent, culprit, derive, draw_cases, examine, one_rule, shrink
    from xrlflow.onnxio import ModelError, to_proto

    made: dict[tuple[str, bool], Finding] = {}
    try:
        original = examine(subject, draw_cases(subject, job.seed), _silent)
    except ModelError:
        return [
            Finding(job, d.what, "round trip", (), d.runtime, "", subject.proto.SerializeToString())
            for d in outcome.differences
        ]
    for d in outcome.differences:
        step = culprit(original, d, libraries)
        rule = d.trace[step] if step is not None else ""
        if (rule, d.runtime) in made:
            continue
        proto, cases = subject.proto, [k.case for k in original.known]
        if step is not None:
            graph, _, _ = derive(original, replace(d.walk, steps=step), libraries)
            proto = to_proto(original.imported, graph)
        wrong = one_rule(rule, d.runtime, libraries)
        what, trace = d.what, d.trace
        if (rule or d.walk is None) and (fault := wrong(proto, cases)) is not None:
            proto, cases = shrink(proto, cases, wrong)
            fault = wrong(proto, cases) or fault
            what, trace = fault.what, (rule,) if rule else ()
        else:
            proto = subject.proto
        feeds = tuple(dict(c.feeds) for c in cases)
        made[rule, d.runtime] = Finding(
            job, what, str(d.walk or "round trip"), trace, d.runtime, rule, proto.SerializeToString(), feeds
        )
    return list(made.values())


def _work(pipe: Connection, stage: Any, shrinking: bool) -> None:
    """A worker: receives models and sends results, first as found, then made small."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    from tests.fuzz.check import Libraries

    libraries = Libraries()

    def note(text: str) -> None:
        stage.value = text.encode()[:99]

    while True:
        pipe.send("ready")
        try:
            job = pipe.recv()
        except EOFError:
            return
        found, details = look(job, libraries, note)
        pipe.send(found)
        if found.findings:
            note("making it small")
            pipe.send(minimised(job, *details, libraries) if shrinking and details else found.findings)


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    stage: Any
    allowed: float
    since: float = field(default_factory=time.monotonic)
    used: float = 0.0  # processor seconds before the current model
    job: Job | None = None
    done: int = 0
    found: ModelFindings | None = None  # findings that are being made small

    def allow(self, seconds: float) -> None:
        """Allow this many more seconds of processor time."""
        self.allowed, self.since, self.used = seconds, time.monotonic(), self.processor()

    def processor(self) -> float:
        """The processor seconds that it has used."""
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return self.used
        return float(times.user + times.system)

    @property
    def late(self) -> bool:
        waited = time.monotonic() - self.since
        return waited > self.allowed and (
            waited > _WAITING * self.allowed or self.processor() - self.used > self.allowed
        )


# --- the run ---


class Run:
    """A run: all its models, in several processes, and the findings."""

    def __init__(
        self,
        jobs: int,
        seed: int,
        only: Sequence[str] = NAMES,
        save: Path | None = None,
        shrinking: bool = True,
    ) -> None:
        self.count, self.seed, self.only, self.save, self.shrinking = jobs, seed, tuple(only), save, shrinking
        self.tallies = {name: Tally() for name in self.only}
        self.findings: list[Finding] = []
        self.lost: list[str] = []  # models that crashed a process or never ended
        self.begin = time.monotonic()
        self.context = multiprocessing.get_context("spawn")
        self.workers: list[_Worker] = []
        self.ended = ""
        self._said = 0.0

    def jobs(self) -> Iterator[Job]:
        index = 0
        while True:
            yield Job(self.only[index % len(self.only)], self.seed + index // len(self.only))
            index += 1

    def go(self, minutes: float | None, graphs: int | None) -> None:
        """Fuzz until the time is over or there are no more models."""
        end = self.begin + 60 * minutes if minutes is not None else float("inf")
        jobs, given = self.jobs(), 0
        try:
            self.workers = [self._start() for _ in range(self.count)]
            while self.workers:
                over = time.monotonic() >= end or (graphs is not None and given >= graphs)
                for connection in wait([w.pipe for w in self.workers], timeout=0.5):
                    worker = next(w for w in self.workers if w.pipe is connection)
                    given += self._hear(worker, jobs, over)
                    over = over or (graphs is not None and given >= graphs)
                self._look_after(end)
                self._say()
        except KeyboardInterrupt:
            self.ended = "interrupted"
        finally:
            for worker in self.workers:
                worker.process.kill()
            self.workers = []

    def _start(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        stage = self.context.Array("c", 100, lock=False)
        process = self.context.Process(target=_work, args=(theirs, stage, self.shrinking), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, stage, _STARTING)

    def _hear(self, worker: _Worker, jobs: Iterator[Job], over: bool) -> int:
        """Handle a worker's message. Returns 1 if the worker got another model, else 0."""
        try:
            message = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._reap(worker, "the process died")
            return 0
        if isinstance(message, ModelFindings):
            self.tallies[message.job.generator].add(message)
            worker.found = message if message.findings else None
            worker.job = None
            worker.allow(_SECONDS_TO_SHRINK)
        elif isinstance(message, list):
            self._keep(message)
            worker.found = None
        elif over or worker.done >= _GRAPHS_A_PROCESS:
            self._end(worker)
            if not over:
                self.workers.append(self._start())
        else:
            worker.job = next(jobs)
            worker.done += 1
            worker.allow(_SECONDS)
            worker.pipe.send(worker.job)
            return 1
        return 0

    def _end(self, worker: _Worker) -> None:
        worker.pipe.close()
        self.workers.remove(worker)

    def _reap(self, worker: _Worker, how: str) -> None:
        """A process crashed or hangs: its model is a finding, unless ONNX Runtime crashes on the original."""
        stage = worker.stage.value.decode(errors="replace")
        worker.process.kill()
        worker.process.join()
        if worker.found is not None:
            self._keep(worker.found.findings)
        elif worker.job is not None:
            what = f"{how} (exit code {worker.process.exitcode}) at: {stage}"
            found = ModelFindings(worker.job)
            if stage == "the original in ONNX Runtime" or stage == "the generator":
                found.not_comparable = what
            else:
                # The stage is that of tests.fuzz.check.OPTIMIZED, which is not imported here: it loads everything.
                found.findings = [
                    Finding(worker.job, what, stage, (), stage.endswith("as ONNX Runtime optimises it"))
                ]
                self._keep(found.findings)
            self.tallies[worker.job.generator].add(found)
            self.lost.append(f"{worker.job}: {what}")
        elif worker.done == 0:
            raise SystemExit(f"a worker does not start: {how}, exit code {worker.process.exitcode}")
        self._end(worker)
        self.workers.append(self._start())

    def _look_after(self, end: float) -> None:
        now = time.monotonic()
        for worker in list(self.workers):
            if worker.late and not worker.pipe.poll():
                self._reap(worker, "no end in sight")
            elif not worker.process.is_alive() and not worker.pipe.poll():
                self._reap(worker, "the process died")
        if now > end + _SECONDS_TO_SHRINK:
            raise KeyboardInterrupt

    def _keep(self, findings: Sequence[Finding]) -> None:
        self.findings.extend(findings)
        for f in findings:
            kind = "ONNX RUNTIME" if f.runtime else "DIFFERENCE"
            print(f"{kind} {f.job} {f.rule or f.walk}: {f.what}", flush=True)
        if len(self.findings) > _MOST_SHRUNK:
            self.shrinking = False
        if self.save is not None:
            for f in findings:
                _save(self.save, f)

    def _say(self) -> None:
        now = time.monotonic()
        if now - self._said >= 10:
            self._said = now
            print(f"{now - self.begin:6.0f} s  {self.line()}", flush=True)

    def line(self) -> str:
        total = sum(t.graphs for t in self.tallies.values())
        steps = sum(sum(t.substitutions.values()) for t in self.tallies.values())
        wrong = sum(t.differences for t in self.tallies.values())
        return f"{total} graphs, {steps} substitutions, {wrong} with differences"

    def to_json(self) -> dict[str, Any]:
        rules = {r for t in self.tallies.values() for r in t.substitutions}
        graphs = sum(t.graphs for t in self.tallies.values())
        lost = sum(sum(t.not_comparable.values()) for t in self.tallies.values())
        return {
            "seed": self.seed,
            "seconds": round(time.monotonic() - self.begin, 1),
            "jobs": self.count,
            "ended": self.ended or "complete",
            "graphs": graphs,
            "substitutions": sum(sum(t.substitutions.values()) for t in self.tallies.values()),
            "distinct rules": len(rules),
            "differences": sum(t.differences for t in self.tallies.values()),
            "share not comparable": round(lost / graphs, 4) if graphs else None,
            "generators": {name: t.to_json() for name, t in self.tallies.items()},
            "findings": [
                {"model": str(f.job), "rule": f.rule, "what": f.what, "walk": f.walk, "trace": f.trace,
                 "by ONNX Runtime": f.runtime} for f in self.findings
            ],
            "processes lost": self.lost,
        }  # fmt: skip

    def summary(self) -> str:
        """The results as text."""
        told = self.to_json()
        lines = [
            f"{told['graphs']} graphs in {told['seconds']} s ({told['ended']}, seed {self.seed}, {self.count} "
            "processes): "
            f"{told['substitutions']} substitutions by {told['distinct rules']} rules, "
            f"{told['differences']} graphs with differences, {told['share not comparable']} not comparable"
        ]
        for name, tally in self.tallies.items():
            lines.append(
                f"  {name:8} {tally.graphs} graphs, {sum(tally.substitutions.values())} substitutions, "
                f"{len(tally.substitutions)} rules, {tally.differences} differences, {tally.runtime} by ONNX Runtime, "
                f"{tally.itself} that ONNX Runtime's optimisations change; outputs: "
                + ", ".join(f"{n} {k.removeprefix('outputs ')}" for k, n in tally.counts.items())
            )
            lines += [
                f"      {n} not comparable: {reason}" for reason, n in tally.not_comparable.most_common(5)
            ]
        return "\n".join(lines)


def _save(folder: Path, finding: Finding) -> None:
    """Save the model, the inputs and the trace of a finding."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{finding.job}-{'runtime-' if finding.runtime else ''}{finding.rule or 'model'}"
    told = {"model": str(finding.job), "what": finding.what, "walk": finding.walk, "trace": finding.trace,
            "rule": finding.rule, "by ONNX Runtime": finding.runtime}  # fmt: skip
    (folder / f"{stem}.json").write_text(json.dumps(told, indent=1))
    if finding.model:
        (folder / f"{stem}.onnx").write_bytes(finding.model)
    for i, feeds in enumerate(finding.inputs):
        np.savez(folder / f"{stem}.{i}.npz", **feeds)


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    from xrlflow.backends.limits import available_cpus

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="how long (default: 1, without --graphs)")
    parser.add_argument("--graphs", type=int, help="how many models")
    parser.add_argument("--jobs", type=int, default=available_cpus(), help="processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=NAMES, action="append", help="this generator (again for others)")
    parser.add_argument("--json", type=Path, help="write the summary there")
    parser.add_argument("--save", type=Path, default=Path("out/fuzz"), help="where differences go")
    given = parser.parse_args(arguments)
    minutes = given.minutes if given.minutes is not None or given.graphs is not None else 1.0
    # NNSmith iterates over sets, whose order must be the same in every process; runtimes must not compete for cores.
    os.environ.update(PYTHONHASHSEED="0", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    signal.signal(signal.SIGTERM, _stop)
    run = Run(given.jobs, given.seed, given.only or NAMES, given.save)
    try:
        run.go(minutes, given.graphs)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(run.summary(), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(run.to_json(), indent=1))
    return 1 if any(t.differences for t in run.tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

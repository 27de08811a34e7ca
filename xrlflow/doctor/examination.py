"""Runs all checks: quick checks in this process, and checks that may crash or take long in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from xrlflow.backends.protocol import one_line
from xrlflow.doctor import disk, machine, software
from xrlflow.doctor.finding import Finding, Status
from xrlflow.storage.stores import VARIABLE
from xrlflow.workers import Processes, Terms, WorkerError, WorkerLate, WorkerLost, WorkerPool

LIMIT = 60.0
"""Time limit in seconds of a check in a separate process."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check with its name, and the advice to give if it crashes or takes too long. `needed`: see `Finding`."""

    name: str
    run: Callable[[], Finding]
    advice: str = ""
    needed: bool = False


HERE: Sequence[Check] = (
    Check("load", machine.load),  # first, since the checks below cause load themselves
    Check("packages", software.packages),
    Check("extras", software.extras),
    Check("processor", machine.processor),
    Check("threads", machine.threads),
    Check("frequency", machine.frequency),
    Check("memory", machine.memory),
    Check("temporary files", disk.temporary, "set TMPDIR to a folder that can be written", True),
    *(Check(kind.name, partial(disk.store, kind)) for kind in disk.STORES),
    Check("store on a server", disk.server, f"start it, correct {VARIABLE}, or unset it", True),
    Check("C compiler", software.compiler),
)
APART: Mapping[str, Check] = {
    "onnx_runtime": Check(
        "ONNX Runtime", software.onnx_runtime, "reinstall it: pip install --force-reinstall onnxruntime", True
    ),
    "bytes": Check("8 bits", software.products_of_bytes),
    "agent": Check("agent", software.agent, "reinstall xrlflow, or search without it: --search greedy", True),
    "kernels": Check(
        "TVM", software.kernels, "pip install 'xrlflow[tvm]' installs versions that fit; --portable does without"
    ),
}  # fmt: skip


def works(findings: Sequence[Finding]) -> bool:
    """Whether optimising for ONNX Runtime works."""
    return not any(f.needed and f.status is Status.FAIL for f in findings)


def examine(limit: float = LIMIT) -> Generator[Finding, None, None]:
    """Yield the findings as they arrive. If the caller closes the generator, running checks are ended.

    `limit`: seconds for each check in a separate process.
    """

    def failed(name: str, error: WorkerError) -> Finding:
        check = APART[name]
        text = str(error)
        if isinstance(error, WorkerLate):
            text = f"no answer in {limit:.0f} s"
        elif isinstance(error, WorkerLost):
            text = f"its process ended {error.how}"
        return Finding(check.name, Status.FAIL, text, check.advice, check.needed)

    for check in HERE:
        yield _checked(check)
    terms = Terms(limit, LIMIT, uses=1, attempts=1)
    factory = Processes(variables={"OMP_NUM_THREADS": "1"})
    unfinished = dict(enumerate(APART))
    with WorkerPool(factory, Examiner, len(APART), terms=terms) as pool:
        try:
            for number, finding in pool.work(iter(APART), fallback=failed):
                del unfinished[number]
                yield finding
        except WorkerError as error:
            for name in unfinished.values():
                yield failed(name, error)


def _checked(check: Check) -> Finding:
    """The finding of a check. An exception counts as a failed check, since a broken installation may raise anything."""
    try:
        return check.run()
    except Exception as error:
        text = f"{type(error).__name__}: {one_line(error)}"
        return Finding(check.name, Status.FAIL, text, check.advice, check.needed)


class Examiner:
    """A worker's handler that runs checks which may crash or take long."""

    def do(self, name: str) -> Finding:
        return _checked(APART[name])

"""The examination: quick checks here, and in processes of their own those that may crash or take long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from xrlflow.backends.protocol import one_line
from xrlflow.doctor import disk, machine, software
from xrlflow.doctor.finding import Finding, Status
from xrlflow.storage.stores import VARIABLE
from xrlflow.workers.process import command, environment

LIMIT = 60.0
"""Seconds for a check in a process of its own."""
_PAUSE = 0.02
_MARK = b"xrlflow found: "


@dataclass(frozen=True, slots=True)
class Check:
    """A check by its name, and what to do if it does not even end. `needed`: see `Finding`."""

    name: str
    run: Callable[[], Finding]
    advice: str = ""
    needed: bool = False


HERE: Sequence[Check] = (
    Check("load", machine.load),  # first: our own processes are load, too
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
    "agent": Check("agent", software.agent, "reinstall xrlflow, or search without it: --search greedy", True),
    "kernels": Check(
        "TVM", software.kernels, "pip install 'xrlflow[tvm]' installs versions that fit; --portable does without"
    ),
}  # fmt: skip


def works(findings: Sequence[Finding]) -> bool:
    """Whether optimising for ONNX Runtime works."""
    return not any(f.needed and f.status is Status.FAIL for f in findings)


def examine(limit: float = LIMIT) -> Generator[Finding, None, None]:
    """The findings, as they come. Processes that still run are ended if the caller stops asking.

    `limit`: seconds for each check in a process of its own.
    """
    for check in HERE:
        yield _checked(check)
    running = {name: _Process(name, limit) for name in APART}
    try:
        while running:
            for name in [name for name, process in running.items() if process.over]:
                yield running.pop(name).finding()
            time.sleep(_PAUSE)
    finally:
        for process in running.values():
            process.end()


def _checked(check: Check) -> Finding:
    """What a check finds. A broken installation may raise anything: that is what is looked for here."""
    try:
        return check.run()
    except Exception as error:
        found = f"{type(error).__name__}: {one_line(error)}"
        return Finding(check.name, Status.FAIL, found, check.advice, check.needed)


class _Process:
    """A check that runs in a process of its own."""

    def __init__(self, name: str, limit: float) -> None:
        self._check = APART[name]
        self._until = time.monotonic() + limit
        self._limit = limit
        # A group of its own: what it starts (a compiler) is ended with it.
        self._process = subprocess.Popen(
            command(__name__, "answer", name), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=environment(OMP_NUM_THREADS="1"), start_new_session=True,
        )  # fmt: skip

    @property
    def over(self) -> bool:
        return self._process.poll() is not None or time.monotonic() > self._until

    def finding(self) -> Finding:
        """What the process says, or how it ended."""
        if self._process.poll() is None:
            self.end()
            return self._failed(f"no answer in {self._limit:.0f} s")
        said, _ = self._process.communicate()
        code = self._process.returncode
        marked = [line for line in said.splitlines() if line.startswith(_MARK)]
        if code == 0 and marked:
            return Finding.from_json(json.loads(marked[-1].removeprefix(_MARK)))
        return self._failed(f"it crashes: {_name_of_end(code)}")

    def _failed(self, found: str) -> Finding:
        return Finding(self._check.name, Status.FAIL, found, self._check.advice, self._check.needed)

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def answer(name: str) -> None:
    """In a process of its own: write what a check found to standard output, where libraries may write, too."""
    found = json.dumps(_checked(APART[name]).to_json())
    sys.stdout.write(f"\n{_MARK.decode()}{found}\n")
    sys.stdout.flush()


def _name_of_end(code: int) -> str:
    """How a process ended: `SIGILL`, or `exit code 3`."""
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:  # a signal without a name
        return f"signal {-code}"

"""Names and applies passes. With `XRLFLOW_DUMP=FOLDER`, the module after each pass is written into that folder."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xrlflow.backends.interrupts import heeding_interrupts
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine

DUMP = "XRLFLOW_DUMP"
"""The environment variable with the folder that modules are written into."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass: `run` maps a Relax module to another. `name` is part of the name of the file into which the resulting
    module is written."""

    name: str
    run: Callable[[Any], Any]


def applied(title: str, module: Any, passes: Sequence[Pass], machine: Machine) -> Any:
    """The module after all passes.

    If `XRLFLOW_DUMP` is a folder, the module is written as TVMScript into a new folder in it (`title-1`, `title-2`,
    ...), before all passes and after each pass. Raises BackendError if a file cannot be written.
    """
    write = _writer(title)
    write("before", module)
    with machine.target(), tvm().transform.PassContext(opt_level=3):
        for each in passes:
            with heeding_interrupts():
                module = each.run(module)
            write(each.name, module)
    return module


def _writer(title: str) -> Callable[[str, Any], None]:
    """A function that writes modules into numbered files of a new folder; it does nothing if `XRLFLOW_DUMP` is not
    set."""
    folder = os.environ.get(DUMP)
    if not folder:
        return lambda name, module: None
    numbers = itertools.count()
    try:
        own = _new_folder(Path(folder), title)
    except OSError as error:
        raise BackendError(f"{DUMP}: {folder} cannot be written ({error.strerror})") from error

    def write(name: str, module: Any) -> None:
        path = own / f"{next(numbers):02}-{name}.py"
        try:
            path.write_text(module.script(), encoding="utf-8")
        except OSError as error:
            raise BackendError(f"{DUMP}: {path} cannot be written ({error.strerror})") from error

    return write


def _new_folder(folder: Path, title: str) -> Path:
    """A new folder, which no other process uses."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        own = folder / f"{title}-{number}"
        try:
            own.mkdir()
        except FileExistsError:
            number += 1
        else:
            return own

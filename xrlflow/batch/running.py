"""Runs one job of a batch: optimises its model, and writes its files."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

from xrlflow.backends.library_files import library_path
from xrlflow.batch.jobs import WAITING, Job, Row, failed
from xrlflow.batch.plan import key_of, versions
from xrlflow.common.text import printable
from xrlflow.cost.machine import cpu_name
from xrlflow.onnxio import ModelError
from xrlflow.onnxio.content import input_names
from xrlflow.onnxio.external_data import data_files
from xrlflow.options import Options
from xrlflow.pipeline import Result, VerificationFailed, optimize
from xrlflow.pipeline.errors import CORRECTABLE
from xrlflow.pipeline.pages import write_page
from xrlflow.storage import files
from xrlflow.storage.exclusive import measuring


def run(job: Job, report: Callable[[str], None] | None = None) -> Row:
    """Run a job: optimise its model, write the result, its report page and, last, its record. Returns the row.

    An error of the model becomes a failed row; only KeyboardInterrupt, SystemExit and the like are raised. A job that
    measures on this machine waits until no other job does (`exclusive.measuring`); the wait does not count towards its
    time limit. `report(text)` is called with what the job does now.
    """
    say = report if report is not None else lambda text: None
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", RuntimeWarning)
        try:
            _check(job)
            with _turn(job.options, say):
                begin = time.monotonic()
                say("reading")  # the wait is over
                result = optimize(job.source, _fitting(job), lambda *at: say(_phase(*at)))
                say("writing the result")
                page = result.page  # this measures the times of operators
            _check(job)
            row = _written(job, result, page, round(time.monotonic() - begin, 1))
        except (*CORRECTABLE, VerificationFailed) as error:
            return failed(job, printable(error), seconds=time.monotonic() - begin)
        except MemoryError:
            return failed(job, "out of memory: the model, or one of its values, is too large for this machine",
                          seconds=time.monotonic() - begin)  # fmt: skip
        except OSError as error:
            return failed(
                job, printable(f"cannot write or read files ({error})"), seconds=time.monotonic() - begin
            )
        except Exception as error:
            message = printable(f"an error in xrlflow, please report it: {type(error).__name__}: {error}")
            return failed(job, message, seconds=time.monotonic() - begin, detail=traceback.format_exc())
    row = replace(row, notes=(*row.notes, *dict.fromkeys(printable(w.message) for w in caught)))
    try:
        files.write(job.record, row.recorded())
    except OSError as error:
        return failed(job, f"{job.record} cannot be written ({error.strerror})", seconds=row.seconds)
    return row


def _check(job: Job) -> None:
    """Raise ModelError if the result would not be the one that the job's key describes.

    A model may be changed while the batch runs, and another node may have other files or versions.
    """
    if not os.access(job.source, os.R_OK):
        return  # the error is reported when the file is read
    if key_of(job.source, job.options) != job.key:
        raise ModelError(
            f"{job.source}, or a file or version that its result depends on, is not what it was when the batch began "
            f"(here: {versions()}): run the batch again, with the same files and versions on all machines"
        )


def measures(options: Options) -> bool:
    """Whether an optimisation measures times on this machine (and not only on a remote device)."""
    if options.cost_name != "roofline":
        return True
    return options.remote is None and (options.measure or options.backend in ("hybrid", "tvm"))


def _turn(options: Options, say: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    if not measures(options):
        return contextlib.nullcontext()
    return measuring(lambda holder: say(f"{WAITING}: another job measures on this machine ({holder})"))


def _fitting(job: Job) -> Options:
    """The options for this model, with only those shapes whose inputs the model has."""
    options = job.options
    if not options.shapes and not options.further_shapes:
        return options
    inputs = input_names(job.source)
    further = [{k: v for k, v in shapes.items() if k in inputs} for shapes in options.further_shapes]
    return replace(
        options, shapes={k: v for k, v in (options.shapes or {}).items() if k in inputs} or None,
        further_shapes=tuple(shapes for shapes in further if shapes),
    )  # fmt: skip


def _phase(phase: str, done: int, total: int, note: str) -> str:
    count = f" {done}/{total}" if total else ""
    return f"{phase}{count}{' ' * bool(note)}{note}"


def _written(job: Job, result: Result, page: Mapping[str, object], seconds: float) -> Row:
    """Write the result and its page, and return the row. Raises OSError, ModelError and BackendError."""
    output = job.output
    output.parent.mkdir(parents=True, exist_ok=True)
    # The record of an earlier run is removed first, because it would not describe the new files.
    job.record.unlink(missing_ok=True)
    result.save(output)
    write_page(page, job.page)
    written = [output]
    if result.compiled is None:
        written += [output.parent / name for name in sorted(data_files(os.fspath(output)))]
    if result.hybrid is not None:
        written.append(library_path(output))
    sizes = tuple(
        (path.relative_to(job.root).as_posix(), os.stat(path).st_size) for path in (*written, job.page)
    )
    return Row(job.name, job.key, None, result.report.to_json(), sizes, cpu_name(), seconds, job.remarks)

"""Before the search: checks whether a model that is read and written again still runs as before, and at which opset.

A runtime optimises models of different opsets differently. ONNX Runtime 1.31 cannot load some 8-bit models at opset 21
that it loads at opset 13.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xrlflow.backends import BackendError
from xrlflow.backends.protocol import OutOfTime
from xrlflow.common import deadline
from xrlflow.onnxio import ImportedModel, preferring, written_opset
from xrlflow.ops.schema import OPSET
from xrlflow.pipeline.context import Context
from xrlflow.verify import Reference, Status
from xrlflow.verify.runner import first_line, flat, opened

# The fraction of the remaining time that this check may take.
_TRYING = 0.25
# The opsets that are tried if the model does not run at its own.
_OTHERS = (OPSET, 21, 19, 17, 15, 13)


def with_working_opset(context: Context) -> Context:
    """The context in which the model is written at its own opset. If ONNX Runtime does not run the written model as
    before, the model is written at another opset, with a note; if no opset works, `unwritable` is set.

    If the options forbid measuring, the files are only loaded; if they forbid verification, too, nothing is checked.
    """
    options = context.options
    if context.unwritable or options.compiling or not (options.measure or options.verify):
        return context
    now = time.monotonic()
    try:
        with context.clock.phase("import"), deadline.within(now + _TRYING * (context.clock.limit - now)):
            return _with_working_opset(context)
    except OutOfTime:
        context.notes.append(
            "there was no time to try whether the model runs as before when it is read and written"
        )
        return context


def _with_working_opset(context: Context) -> Context:
    """See `with_working_opset`. Raises OutOfTime."""
    options = context.options
    try:
        trial = _Trial(context, _outputs(context, context.original.runnable))
    except OutOfTime:
        raise
    except BackendError:  # a later phase runs the original, and reports its errors
        return context
    own = context.imported
    fault = trial.fault(own)
    if not fault:
        return context
    first, opsets = written_opset(own, own.graph), set[int]()
    opsets.add(first)
    for opset in () if options.opset is not None else _OTHERS:
        other = preferring(own, opset)
        written = written_opset(other, other.graph)
        if written in opsets:
            continue
        opsets.add(written)
        if not trial.fault(other):
            context.notes.append(f"written at opset {written}, because at {first} {fault}")
            return replace(context, imported=other)
    tries = f"opset {first}" if len(opsets) == 1 else f"{len(opsets)} opsets, the first of which is {first}"
    return replace(context, unwritable=f"read and written again, at {tries}: {fault}")


@dataclass(frozen=True, slots=True)
class _Trial:
    """Writes the model, and compares the file with the original."""

    context: Context
    outputs: Sequence[Any] | None  # outputs of the original; None: there are no inputs on which to run it

    def fault(self, imported: ImportedModel) -> str:
        """The fault of the file that is written of the imported model; "" if it has none."""
        context = replace(self.context, imported=imported)
        try:
            path = context.artifact(imported.graph).file
            outputs = _outputs(context, path)
            if outputs is None or self.outputs is None or _same(self.outputs, outputs):
                return ""
            return self._difference(path)
        except OutOfTime:
            raise
        except BackendError as error:
            return f"ONNX Runtime does not run it: {first_line(error)}"

    def _difference(self, path: str) -> str:
        """How a file's outputs differ from the original's by more than rounding; "" if they do not differ."""
        context = self.context
        reference = Reference.of(
            context.original.runnable, imported=context.imported, inputs=context.feeds, seed=context.options.seed,
            threads=context.threads, session_options=context.options.session_options,
        )  # fmt: skip
        verification = reference.check(path)
        if deadline.over():
            raise OutOfTime("there was no time to compare it with the original")
        return (
            f"it differs from the original: {verification.failures[0]}"
            if verification.status is Status.FAILED
            else ""
        )


def _outputs(context: Context, model: str | bytes) -> list[Any] | None:
    """The outputs of a model on the inputs for measurements. Without such inputs the model is only loaded, and the
    result is None. Raises BackendError.
    """
    with opened(model, threads=context.threads, session_options=context.options.session_options) as runner:
        return None if context.feeds is None else runner.run(context.feeds)


def _same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether outputs are equal bit by bit, except that any NaN equals any other."""
    pairs = zip(map(flat, first), map(flat, second), strict=True)
    return all(len(a) == len(b) and all(map(_equal, a, b)) for a, b in pairs)


def _equal(first: tuple[str, Any], second: tuple[str, Any]) -> bool:
    a, b = first[1], second[1]
    if first[0] != second[0] or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(np.array_equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())

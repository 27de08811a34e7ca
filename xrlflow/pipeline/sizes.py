"""Other sizes than the usual ones: a model with open dimensions is measured with few elements and with many, too."""

from __future__ import annotations

import math
import time

from xrlflow.backends.onnxruntime import OrtModel, measure, open_model
from xrlflow.backends.protocol import BackendError, Feeds, OutOfTime
from xrlflow.backends.results import SpeedUp
from xrlflow.common import deadline
from xrlflow.onnxio import load
from xrlflow.pipeline.context import Context
from xrlflow.verify import feeds_at_other_sizes

# Seconds of one measurement besides loading, of guessed sizes and of the user's ranges, and the relative width of the
# interval that is narrow enough.
_MEASURING, _MEASURING_RANGES, _NARROW = 2.0, 4.0, 0.02
# Seconds to run the original with inputs of these sizes: many elements of a slow model may take long. A size whose run
# takes more than a part of the measurement is left out.
_RUNNING, _PART = 3.0, 1 / 4
_SIZES = 2


def other_sizes(context: Context) -> list[tuple[str, Feeds]]:
    """Inputs with the least and the greatest sizes of the user's ranges (without ranges: an eighth, and four times, of
    the usual sizes), with a text that says the sizes. Dimensions that the user states keep their sizes; none if the
    inputs are the user's. Sizes with which a run takes long are left out, with a note. Raises BackendError if the
    original cannot be loaded.
    """
    options = context.options
    if options.inputs is not None or context.feeds is None or context.imported.fixed:
        return []
    if not context.at_sizes:
        context.at_sizes.append([])
        imported = load(context.original.source, shapes=context.shapes)  # not bound to the usual sizes
        session = open_model(
            context.original.runnable, threads=context.threads, session_options=options.session_options
        )
        with context.clock.phase("select"), session as original, deadline.within(time.monotonic() + _RUNNING):
            usual = context.imported.bindings
            found, missed = feeds_at_other_sizes(imported, original.run, options.seed, usual)
            context.notes.extend(f"not measured with {text}" for text in missed)
            for text, feeds in found:
                seconds = _seconds(original, feeds)
                if seconds > _PART * _measuring(context):
                    context.notes.append(f"not measured with {text}: a run takes {seconds:.1f} s")
                else:
                    context.at_sizes[0].append((text, feeds))
    return context.at_sizes[0]


def _seconds(original: OrtModel, feeds: Feeds) -> float:
    """The seconds of a run; infinite if the time of `deadline` is over."""
    began = time.monotonic()
    try:
        original.run(feeds)
    except OutOfTime:
        return math.inf
    return time.monotonic() - began


def seconds_at_sizes(context: Context) -> float:
    """About how long `slower_with` takes."""
    imported = context.imported
    opened = (
        bool(imported.ranges or (imported.bindings and not context.shapes)) and context.options.inputs is None
    )
    return _SIZES * _at_one(context) if opened else 0.0


def _at_one(context: Context) -> float:
    return _measuring(context) + 2 * context.clock.loading


def _measuring(context: Context) -> float:
    return _MEASURING_RANGES if context.imported.ranges else _MEASURING


def slower_with(context: Context, path: str) -> str:
    """Why a result is not kept: with which other sizes it is slower than the original, or fails; "" if with none. The
    measurements are noted in `context.found_at`.

    They are made in one process, where the model that is loaded first may run a few percent faster. So a result that is
    slower is measured in the other order, too, and is kept if that does not confirm it.
    """
    context.found_at.clear()
    try:
        found = other_sizes(context)
    except BackendError as error:
        context.notes.append(f"not measured with other sizes: {error}")
        return ""
    original = context.original.runnable
    for text, feeds in found:
        if not _has_time(context):
            context.notes.append(f"not measured with {text}: there was no time (--time-limit)")
            continue
        try:
            first = _speedup(context, original, path, feeds)
            if first.slower and not (_has_time(context) and _is_refuted(context, path, feeds)):
                return f"slower with {text}: {first}"
        except OutOfTime:
            context.notes.append(f"not measured with {text}: there was no time (--time-limit)")
        except BackendError as error:
            return f"it fails with {text}: {error}"  # where the original ran
        else:
            context.found_at[text] = first
    return ""


def _has_time(context: Context) -> bool:
    return time.monotonic() + _at_one(context) <= context.clock.budget.until


def _is_refuted(context: Context, path: str, feeds: Feeds) -> bool:
    """Whether a result that was slower is not, measured in the other order."""
    again = _speedup(context, path, context.original.runnable, feeds)
    return again.bounded and again.low <= 1.0


def _speedup(context: Context, before: str | bytes, after: str | bytes, feeds: Feeds) -> SpeedUp:
    options = context.options
    with context.clock.phase("measure"):
        return measure(
            [before, after], feeds, threads=context.threads, time_limit=_measuring(context), target_width=_NARROW,
            control=False, session_options=options.session_options,
        ).speedup  # fmt: skip

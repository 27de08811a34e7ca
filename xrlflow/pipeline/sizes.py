"""Other sizes than the usual ones: a model with open dimensions is measured with few elements and with many, too."""

from __future__ import annotations

import time

from xrlflow.backends.onnxruntime import measure, open_model
from xrlflow.backends.protocol import BackendError, Feeds
from xrlflow.backends.results import SpeedUp
from xrlflow.common import deadline
from xrlflow.onnxio import load
from xrlflow.pipeline.context import Context
from xrlflow.verify import feeds_at_other_sizes

# Seconds of one measurement besides loading, and the relative width of the interval that is narrow enough.
_MEASURING, _NARROW = 2.0, 0.02
# Seconds to run the original with inputs of these sizes: many elements of a slow model may take long.
_RUNNING = 3.0
_SIZES = 2


def other_sizes(context: Context) -> list[tuple[str, Feeds]]:
    """Inputs whose sizes are an eighth, and four times, of the usual ones, with a text that says the sizes. Dimensions
    that the user states keep their sizes; none if the inputs are the user's."""
    options = context.options
    if options.inputs is not None or context.feeds is None or context.imported.fixed:
        return []
    if not context.at_sizes:
        imported = load(context.original.source, shapes=context.shapes)  # not bound to the usual sizes
        session = open_model(
            context.original.runnable, threads=context.threads, session_options=options.session_options
        )
        with context.clock.phase("select"), session as original, deadline.within(time.monotonic() + _RUNNING):
            found = feeds_at_other_sizes(imported, original.run, options.seed)
        texts = (", ".join(f"{name}={size}" for name, size in at.items()) for at, _ in found)
        context.at_sizes.append([*zip(texts, (feeds for _, feeds in found))])
    return context.at_sizes[0]


def seconds_at_sizes(context: Context) -> float:
    """About how long `slower_with` takes."""
    opened = bool(context.imported.bindings) and not context.shapes and context.options.inputs is None
    return _SIZES * (_MEASURING + 2 * context.clock.loading) if opened else 0.0


def slower_with(context: Context, path: str) -> str:
    """The other sizes with which a result is certainly slower than the original, as a text; "" if there are none. The
    measurements are noted in `context.found_at`.

    They are made in one process, where the model that is loaded first may run a few percent faster. So a result is
    slower if it is in both orders.
    """
    context.found_at.clear()
    for text, feeds in other_sizes(context):
        if time.monotonic() + _MEASURING + 2 * context.clock.loading > context.clock.budget.until:
            context.notes.append(f"not measured with {text}: there was no time (--time-limit)")
            continue
        try:
            first = _speedup(context, context.original.runnable, path, feeds)
            again = _speedup(context, path, context.original.runnable, feeds) if first.slower else None
        except BackendError as error:
            context.notes.append(f"not measured with {text}: {error}")
            continue
        if again is not None and again.bounded and again.low > 1.0:
            return f"slower with {text}: {first}"
        context.found_at[text] = first
    return ""


def _speedup(context: Context, before: str | bytes, after: str | bytes, feeds: Feeds) -> SpeedUp:
    options = context.options
    with context.clock.phase("measure"):
        return measure(
            [before, after], feeds, threads=context.threads, time_limit=_MEASURING, target_width=_NARROW,
            control=False, session_options=options.session_options,
        ).speedup  # fmt: skip

"""The phases of an optimisation, in order."""

from __future__ import annotations

import time

from rewrite_rules.placement import without_placement
from xrlflow.onnxio import Source
from xrlflow.options import KEEP, Options
from xrlflow.pipeline.accuracy import error_of_level, with_level
from xrlflow.pipeline.attempts import attempted
from xrlflow.pipeline.prepare import fed, opened
from xrlflow.pipeline.results import Result, result_of
from xrlflow.pipeline.roundtrip import with_working_opset
from xrlflow.report import Listener


def optimize(source: Source, options: Options, listener: Listener | None = None) -> Result:
    """Read, change the precision if asked to, search, choose, verify and measure. Raises what `xrlflow.optimize`
    raises.
    """
    if options.precision != KEEP:
        from xrlflow.pipeline.precision.run import converted

        return converted(source, options, listener, _optimize)
    return _optimize(source, options, listener)


def _optimize(source: Source, options: Options, listener: Listener | None) -> Result:
    with opened(source, options, listener, time.monotonic()) as context:
        context = with_level(with_working_opset(fed(context)))
        context.clock.share()
        attempt = attempted(context)
        accepted = attempt.finished.accepted
        if context.meant is not None and accepted is not None:
            context.notes.append(error_of_level(context, without_placement(accepted.state.graph)))
        return result_of(attempt.context, attempt.start, attempt.explored, attempt.finished)

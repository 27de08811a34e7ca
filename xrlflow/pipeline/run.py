"""The phases of an optimisation, in order."""

from __future__ import annotations

import time
from collections.abc import Mapping

from xrlflow.lowering import missing_for_kernels
from xrlflow.onnxio import Source
from xrlflow.options import Options
from xrlflow.pipeline import compiled, confirm, kernels
from xrlflow.pipeline.finish import Finisher
from xrlflow.pipeline.kernels import compile_seconds
from xrlflow.pipeline.prepare import opened, with_feeds
from xrlflow.pipeline.race import searched
from xrlflow.pipeline.results import Result, result_of
from xrlflow.report import Listener

FINISHERS: Mapping[str, Finisher] = {
    "auto": kernels.finish,
    "hybrid": kernels.finish,
    "onnxruntime": confirm.finish,
    "tvm": compiled.finish,
}
"""What follows the search, by backend."""


def optimize(source: Source, options: Options, listener: Listener | None = None) -> Result:
    """Read, search, choose, verify and measure. Raises what `xrlflow.optimize` raises."""
    with opened(source, options, listener, time.monotonic()) as context:
        context = with_feeds(context)
        if options.with_kernels and missing_for_kernels() is None:
            context.clock.compiling = context.clock.reserved = compile_seconds(context)
        context.clock.races = options.races
        begin, explored = searched(context)
        finished = FINISHERS[options.backend](context, begin, explored)
        return result_of(context, begin, explored, finished)

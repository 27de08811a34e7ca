"""The end of an optimisation with TVM: proposals are compiled, and the fastest is verified and measured."""

from __future__ import annotations

import time

from xrlflow import lowering
from xrlflow.lowering import Choice
from xrlflow.pipeline.confirm import final
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.finish import Finished
from xrlflow.pipeline.prepare import Start
from xrlflow.pipeline.verifier import Verifier
from xrlflow.report import compared_with
from xrlflow.verify import Verification


def finish(context: Context, start: Start, explored: Explored) -> Finished:
    """Compile the proposals, choose by measurement, verify the compiled model, compare it with ONNX Runtime.

    See `Finisher`.
    """
    options, target = context.options, context.target
    assert target is not None
    choice = _compiled(context, start, explored)
    best = choice.lowered
    verification: Verification | None = None
    if options.verify:
        with context.clock.phase("verify"), lowering.running(target, best.path, best.model) as runner:
            verification = Verifier(context).check_compiled(runner, best.model.sizes)
    compared = best.compared
    reason = "not measured"
    if compared is not None:
        reason = f"measured {compared.speedup} against the original graph, compiled, on {target.remote}"
    elif options.measure and target.remote is not None and choice.interrupted:
        reason = "the original graph, compiled: interrupted before anything was compared with it"
    elif options.measure and target.remote is not None:
        reason = "the original graph, compiled: nothing is faster on the remote device"
    elif options.measure:
        compared = final(context, best.path)
        reason = f"{compared_with(compared)} against ONNX Runtime"
        if compared.speedup is not None and compared.speedup.slower:
            reason += ", which is faster"
    return Finished(
        best.found, reason, verification, compared, compiled=best.model, threads=target.machine.cores
    )


def _compiled(context: Context, start: Start, explored: Explored) -> Choice:
    """The proposal that runs fastest, compiled. Raises KeyboardInterrupt if the search was interrupted before."""
    options, clock, interrupted = context.options, context.clock, explored.result.interrupted
    context.say("compile", note="with TVM")
    with clock.phase("compile"):
        choice = lowering.lower_best(
            context.lowering, context.original, start.base, explored.proposals, context.write,
            context.feeds if options.measure else None, lambda: clock.limit - time.monotonic(), interrupted,
        )  # fmt: skip
    context.notes.extend(choice.remarks)
    if choice.interrupted and interrupted:
        raise KeyboardInterrupt
    if choice.interrupted or interrupted:
        clock.hurry()
    return choice

"""The end of an optimisation with TVM: proposals are compiled, and the fastest is verified and measured."""

from __future__ import annotations

import time
from dataclasses import replace

from xrlflow import lowering
from xrlflow.backends.children import Child
from xrlflow.backends.tvm.kernels.algorithms import multiplies_less
from xrlflow.common import deadline
from xrlflow.lowering import Choice, Lowered
from xrlflow.pipeline.confirm import final
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.finish import Finished
from xrlflow.pipeline.prepare import Start
from xrlflow.pipeline.verifier import VerificationFailed, Verifier, check_without
from xrlflow.report import compared_with
from xrlflow.verify import Verification


def finish(context: Context, start: Start, explored: Explored) -> Finished:
    """Compile the proposals, choose by measurement, verify the compiled model, compare it with ONNX Runtime.

    VerificationFailed names a rule if the graph is wrong in ONNX Runtime, too. See `Finisher`.
    """
    options, target = context.options, context.target
    assert target is not None
    choice = _compiled(context, start, explored)
    try:
        verification = _verified(context, choice.lowered)
    except VerificationFailed as error:
        check_without(context, start, choice.lowered.found)
        if not multiplies_less(choice.lowered.model.chosen):
            raise
        context.notes.append(f"compiled again, with plain kernels: {error}")
        context = replace(context, options=replace(options, exact_kernels=True))
        choice = _compiled(context, start, explored)
        verification = _verified(context, choice.lowered)
    best = choice.lowered
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


def _verified(context: Context, lowered: Lowered) -> Verification | None:
    """Compare a compiled model with the original, if it is asked for. Raises VerificationFailed."""
    if not context.options.verify:
        return None
    assert context.target is not None
    with (
        context.clock.phase("verify"),
        lowering.running(context.target, lowered.path, lowered.model) as runner,
    ):
        return Verifier(context).check_compiled(runner, lowered.model.sizes)


def _compiled(context: Context, start: Start, explored: Explored) -> Choice:
    """The proposal that runs fastest, compiled. Raises KeyboardInterrupt if the search was interrupted before."""
    options, clock, interrupted = context.options, context.clock, explored.result.interrupted
    context.say("compile", note="with TVM")
    with clock.phase("compile"), Child(TMPDIR=context.folder) as child, deadline.within(clock.limit):
        choice = lowering.lower_best(
            replace(context.lowering, child=child), context.original, start.base, explored.proposals, context.write,
            context.feeds if options.measure else None, lambda: clock.limit - time.monotonic(), interrupted,
        )  # fmt: skip
    context.notes.extend(choice.remarks)
    if choice.interrupted and interrupted:
        raise KeyboardInterrupt
    if choice.interrupted or interrupted:
        clock.hurry()
    return choice

"""Compiled libraries as candidates: proposals are compiled with TVM, and the fastest is the candidate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xrlflow.backends import BackendError, RepeatedComparison
from xrlflow.backends.children import Child
from xrlflow.backends.onnxruntime import measure
from xrlflow.backends.protocol import OutOfTime
from xrlflow.backends.tvm import TvmModel
from xrlflow.backends.tvm.devices.execution import ExecutionTarget, compare_there, repeated, running
from xrlflow.backends.tvm.kernels.algorithms import multiplies_less
from xrlflow.common import deadline
from xrlflow.ir import Graph
from xrlflow.pipeline.confirm import NOT_MEASURED, final
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.finish import Candidates, Finished
from xrlflow.pipeline.prepare import Start
from xrlflow.pipeline.verifier import VerificationFailed, Verifier, check_without
from xrlflow.report import compared_with
from xrlflow.search.result import SearchNode
from xrlflow.tuning.lowering import Lowering
from xrlflow.verify import Verification

Export = Callable[[Graph], str]
"""Writes a graph as an ONNX file and returns the path."""
# The maximum number of proposals that are compiled, besides the original graph.
_AT_MOST = 3


@dataclass(frozen=True, slots=True)
class Lowered:
    """A compiled graph."""

    node: SearchNode
    path: str  # the path of the shared library
    model: TvmModel
    milliseconds: float | None = None  # the latency; None: not measured
    compared: RepeatedComparison | None = None  # on a remote device: relative to the compiled original


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of `lower_best`, with remarks for the user. `interrupted`: Ctrl-C came before anything was
    compared."""

    lowered: Lowered
    remarks: tuple[str, ...]
    interrupted: bool = False


def candidates(context: Context, start: Start, explored: Explored) -> Candidates:
    """The candidates: first the compiled proposal that runs fastest; if it computes something else, the same proposal
    with plain kernels. See `Source`.

    VerificationFailed names a rule if the graph is wrong in ONNX Runtime as well.
    """
    choice = _compiled(context, start, explored)
    try:
        yield _Compiled(context, choice)
    except VerificationFailed as error:
        check_without(context, start, choice.lowered.node)
        if not multiplies_less(choice.lowered.model.chosen):
            raise
        context.notes.append(f"compiled again, with plain kernels: {error}")
    context = replace(context, options=replace(context.options, exact_kernels=True))
    yield _Compiled(context, _compiled(context, start, explored))
    return None


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled model as a candidate. It is always accepted, even if it is slower than ONNX Runtime."""

    context: Context
    choice: Choice

    def judged(self) -> Finished:
        context, best = self.context, self.choice.lowered
        assert context.target is not None
        verification = self._verified()
        compared, reason = best.compared, "not measured"
        if compared is not None:
            remote = context.target.remote
            reason = f"measured {compared.speedup} against the original graph, compiled, on {remote}"
        elif context.options.measure and context.target.remote is not None:
            why = "nothing is faster on the remote device"
            if self.choice.interrupted:
                why = "interrupted before anything was compared with it"
            reason = f"the original graph, compiled: {why}"
        elif context.options.measure:
            compared = final(context, best.path, verification)
            reason = _against_runtime(compared)
        cores = context.target.machine.cores
        return Finished(best.node, reason, verification, compared, compiled=best.model, threads=cores)

    def _verified(self) -> Verification | None:
        """Compare the compiled model with the original, if the options ask for it. Raises VerificationFailed."""
        context, lowered = self.context, self.choice.lowered
        if not context.options.verify:
            return None
        assert context.target is not None
        with (
            context.clock.phase("verify"),
            running(context.target, lowered.path, lowered.model) as runner,
        ):
            return Verifier(context).check_compiled(runner, lowered.model.sizes)


def _against_runtime(compared: RepeatedComparison | None) -> str:
    if compared is None:
        return NOT_MEASURED
    slower = compared.speedup is not None and compared.speedup.slower
    return f"{compared_with(compared)} against ONNX Runtime{', which is faster' if slower else ''}"


def _compiled(context: Context, start: Start, explored: Explored) -> Choice:
    """The proposal that runs fastest, compiled.

    Raises KeyboardInterrupt if the search was interrupted, and OutOfTime if nothing was compiled in time.
    """
    options, clock, interrupted = context.options, context.clock, explored.result.interrupted
    context.say("compile", note="with TVM")
    with clock.phase("compile"), Child(TMPDIR=context.folder) as child, deadline.within(clock.limit):
        try:
            choice = lower_best(
                replace(context.lowering, child=child), context.original.runnable, start.base, explored.proposals,
                lambda graph: context.artifact(graph).file,
                context.feeds if options.measure else None, lambda: clock.limit - time.monotonic(), interrupted,
            )  # fmt: skip
        except OutOfTime as error:
            raise OutOfTime(
                f"the {options.time_limit:g} s were over before TVM had compiled the model: give --time-limit more"
            ) from error
    context.notes.extend(choice.remarks)
    if choice.interrupted and interrupted:
        raise KeyboardInterrupt
    if choice.interrupted or interrupted:
        clock.hurry()
    return choice


def lower_best(
    how: Lowering,
    original: str | bytes,
    base: SearchNode,
    proposals: Sequence[SearchNode],
    export: Export,
    feeds: Mapping[str, Any] | None,
    time_left: Callable[[], float],
    hurried: bool = False,
) -> Choice:
    """Compile the imported graph and the best proposals, and choose the one that runs fastest.

    Kernels in the store are compiled as they were tuned. With `feeds`, runs of all models and of the original in ONNX
    Runtime are measured in alternation; without `feeds`, only the best graph by modelled cost is compiled. A remote
    device has no ONNX Runtime, so on it the compiled original is the baseline. Compiling stops when another model
    would exceed the remaining time. `hurried`: only the best proposal is compiled, and measuring takes less time. On
    Ctrl-C, and if the models cannot be measured, the model that was compiled first is chosen. Raises BackendError if
    the original graph cannot be compiled, and KeyboardInterrupt if nothing was compiled.
    """
    # If the original graph is the best one, it is among the proposals.
    different = {node.state.graph.fingerprint: node for node in proposals if node.cost < base.cost}
    cheaper = list(different.values())[: 1 if hurried else _AT_MOST]
    compiling = _Compiling(how, base, export, time_left, feeds is None)
    compiled = compiling.models
    try:
        # Without measuring, the best graph by modelled cost that compiles is chosen.
        compiling.compile_all([base, *cheaper] if feeds is not None else [*cheaper, base])
        if feeds is None:
            return Choice(compiled[0], tuple(compiling.remarks))
        limit = max(2.0, min(5.0 if hurried else 15.0, 0.3 * time_left()))
        if how.target.remote is not None:
            best, remarks = _best_there(how.target, compiled, feeds, limit)
        else:
            best, remarks = _best_here(how, original, compiled, feeds, limit)
    except KeyboardInterrupt:
        if not compiled:
            raise
        compiling.remarks.append(
            "interrupted before the compiled graphs were compared: the first of them is kept"
        )
        return Choice(compiled[0], tuple(compiling.remarks), interrupted=True)
    except BackendError as error:
        if not compiled:
            raise
        compiling.remarks.append(f"the compiled graphs could not be compared, the first is kept: {error}")
        return Choice(compiled[0], tuple(compiling.remarks))
    return Choice(best, (*compiling.remarks, *remarks))


@dataclass(slots=True)
class _Compiling:
    """Compiles graphs one after the other. `models`: the compiled models, with remarks on failures. `alone`: stop
    after the first success.
    """

    how: Lowering
    base: SearchNode
    export: Export
    time_left: Callable[[], float]
    alone: bool
    models: list[Lowered] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def compile_all(self, nodes: Sequence[SearchNode]) -> None:
        """Compile these graphs. Raises BackendError if the original graph cannot be compiled."""
        longest = 0.0
        for index, node in enumerate(nodes):
            before = self.time_left()
            if self.models and (self.alone or before < 3 * longest):
                return
            path = os.path.join(self.how.folder, f"compiled{index}.so")
            try:
                model = self.how.compiled(self.export(node.state.graph), path)
            except BackendError as error:
                if node is self.base and not self.models:
                    raise
                self.remarks.append(f"a proposal was dropped: {error}")
                continue
            self.models.append(Lowered(node, path, model))
            longest = max(longest, before - self.time_left())


def _best_here(
    how: Lowering, original: str | bytes, compiled: Sequence[Lowered], feeds: Mapping[str, Any], limit: float
) -> tuple[Lowered, tuple[str, ...]]:
    """Choose the fastest model on this machine; its runs and those of the original in ONNX Runtime alternate. Returns
    (choice, remarks).
    """
    measured = measure(
        [original, *(lowered.path for lowered in compiled)], dict(feeds), threads=how.threads, time_limit=limit,
        target_width=0.02, control=False, session_options=how.session_options,
    )  # fmt: skip
    timed = [
        replace(lowered, milliseconds=latency.median_ms)
        for lowered, latency in zip(compiled, measured.latencies[1:])
    ]
    remarks = [
        f"ONNX Runtime runs the original in {measured.latencies[0].median_ms:.2f} ms",
        f"TVM runs the original graph in {timed[0].milliseconds:.2f} ms",
    ]
    if len(timed) > 1:
        other_times = ", ".join(f"{lowered.milliseconds:.2f}" for lowered in timed[1:])
        remarks.append(f"and what the search found in {other_times} ms")
    return min(timed, key=lambda lowered: lowered.milliseconds or 0.0), tuple(remarks)


def _best_there(
    target: ExecutionTarget, compiled: Sequence[Lowered], feeds: Mapping[str, Any], limit: float
) -> tuple[Lowered, tuple[str, ...]]:
    """Choose the fastest model on the remote device, and compare it with the first one. Returns (choice, remarks).

    The minimum of several measurements is biased, so the comparison is measured in another session. A model that is
    not clearly faster in this session is not chosen.
    """
    if len(compiled) == 1:
        return compiled[0], (
            f"nothing measured on remote device {target.remote}: no other graph was compiled",
        )
    files = [(lowered.path, lowered.model) for lowered in compiled]
    measured = compare_there(target, files, feeds, 0.5 * limit)
    times = [latency.median_ms for latency in measured.latencies]
    fastest = min(range(len(compiled)), key=times.__getitem__)
    other_times = ", ".join(f"{milliseconds:.2f}" for milliseconds in times[1:])
    remarks = (
        f"measured on remote device {target.remote}, in one session, without ONNX Runtime",
        f"TVM runs the original graph there in {times[0]:.2f} ms, and what the search found in {other_times} ms",
    )
    first = replace(compiled[0], milliseconds=times[0])
    if fastest == 0:
        return first, remarks
    # For a slow model, a confidence interval needs the whole time; for other models the comparison ends when the
    # interval is narrow.
    again = compare_there(target, [files[0], files[fastest]], feeds, limit)
    text = f"measured again in another session, the fastest of them is {{}}clearly faster: {again.speedup}"
    if not again.speedup.faster:
        return first, (*remarks, text.format("not "))
    fastest_model = replace(
        compiled[fastest], milliseconds=again.latencies[1].median_ms, compared=repeated(again)
    )
    return fastest_model, (*remarks, text.format(""))

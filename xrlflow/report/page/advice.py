"""Suggests what the user may try next, from a report and its measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from xrlflow.backends.onnxruntime.profile import OperatorProfile
from xrlflow.report.report import Report
from xrlflow.verify import Verification

# Operators that rewriting seldom makes faster; only better kernels do.
_HEAVY = frozenset(
    {"MatMul", "FusedMatMul", "Gemm", "FusedGemm", "Conv", "FusedConv", "LSTM", "GRU", "MatMulNBits"}
)
_DOMINANT = 0.5


def advice(
    report: Report,
    verification: Verification | None,
    after: OperatorProfile | None,
    bindings: Mapping[str, int],
    open_dimensions: bool,
) -> tuple[str, ...]:
    """Suggestions, the most useful first. `open_dimensions`: an input has a dynamic dimension.

    `bindings`: the numbers that the user gave for dynamic dimensions.
    """
    return tuple(
        dict.fromkeys((
            *_about_time(report), *_about_the_machine(report), *_about_checks(report, verification),
            *_about_sizes(bindings, open_dimensions), *_about_operators(report, after),
        ))
    )  # fmt: skip


def _about_time(report: Report) -> Iterator[str]:
    if "--time-limit" in report.reason or any("--time-limit" in note for note in report.notes):
        yield f"Time was short (see the notes). Give it more than {report.seconds:.0f} s with --time-limit."
    if "interrupted" in report.reason or any("interrupted" in note for note in report.notes):
        yield "It was interrupted. Run it to its end to search further and to measure more."
    if report.latency_before is None and report.backend != "tvm":
        yield "Nothing was measured. Leave out --no-measure to know whether this is faster here."


def _about_the_machine(report: Report) -> Iterator[str]:
    control = report.control
    if control is not None and (control.faster or control.slower):
        yield (
            f"The original seems to be {control.median:.3f} times as fast as itself: the machine was too noisy. "
            "Measure again when nothing else runs."
        )
    elif any("other programs" in note for note in report.notes):
        yield "Other programs used the processor. Measure again when nothing else runs, for a narrower interval."
    speedup = report.speedup
    if speedup is not None and speedup.bounded and speedup.width > 0.1:
        yield (
            f"The interval is wide ({speedup.low:.2f} to {speedup.high:.2f}). "
            "`xrlflow bench NEW --against ORIGINAL` on a quiet machine narrows it."
        )


def _about_checks(report: Report, verification: Verification | None) -> Iterator[str]:
    if report.verified is None and not report.returned_original:
        yield "The result was not verified. Leave out --no-verify, or run `xrlflow verify ORIGINAL NEW`."
    if verification is not None and verification.unexercised:
        yield (
            f"No drawn input reached {len(verification.unexercised)} of the branches. "
            "Give inputs of your own that do with --inputs."
        )
    if verification is not None and verification.left_out:
        yield "Some sizes were too large to be verified here. Check them with `xrlflow verify --shape`."


def _about_sizes(bindings: Mapping[str, int], open_dimensions: bool) -> Iterator[str]:
    if open_dimensions and not bindings:
        yield (
            "Inputs have open dimensions. If yours always have the same, name them with --shape: more "
            "substitutions apply (and with --fix-shapes they are written into the file)."
        )


def _about_operators(report: Report, after: OperatorProfile | None) -> Iterator[str]:
    total = sum(o.ms for o in after.operators) if after is not None else 0.0
    if after is None or not total:
        return
    heaviest = after.operators[0]
    share = heaviest.ms / total
    if share < _DOMINANT or heaviest.op not in _HEAVY:
        return
    message = f"{heaviest.op} takes {share:.0%} of the time that is left"
    if report.kernel_nodes:
        yield f"{message}. `xrlflow tune` searches for faster kernels of it on this machine."
    elif report.backend == "onnxruntime":
        yield f"{message}. No other graph makes that faster; generated kernels may: --backend auto."
    else:
        yield f"{message}, in ONNX Runtime's own kernels. `xrlflow tune` searches for faster ones on this machine."

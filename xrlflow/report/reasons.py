"""The reason why a result was accepted or not, in one line."""

from __future__ import annotations

from collections.abc import Mapping

from xrlflow.backends.results import RepeatedComparison, Verdict
from xrlflow.search import Selection

# The names of an optimisation's phases, in order.
PHASES = {
    "precision": "change of precision", "import": "import", "inputs": "inputs", "calibrate": "operators",
    "correct": "correction of costs", "search": "search", "select": "selection", "compile": "compilation",
    "profile": "profile", "verify": "verification", "measure": "last comparison",
}  # fmt: skip
_MORE = "give it more with --time-limit"


def no_search(seconds: float, limit: float, phases: Mapping[str, float]) -> str:
    """Why there was no time to search: `seconds` of the limit were spent on these `phases`."""
    phase = max(phases, key=lambda name: phases[name], default="")
    reason = f", most of it for {PHASES.get(phase, phase)}" if phase else ""
    return (
        f"there was no time to search: {seconds:.0f} of {limit:g} s had passed{reason}, and the rest is for comparing "
        f"and verifying ({_MORE})"
    )


def nothing_chosen(selection: Selection | None, late: str = "") -> str:
    """Why no proposal is compared with the original.

    `selection`: None if there was no graph to measure. `late`: why there was no time to search, if there was none.
    """
    if selection is None:
        return "no cheaper graph was found"
    measured = sum(trial.measured for trial in selection.trials)
    if measured:
        graphs = "one graph was" if measured == 1 else f"{measured} graphs were"
        return f"nothing measured faster: {graphs} compared with another"
    if selection.trials:
        return "nothing that was found could be measured"
    if selection.interrupted:
        return "interrupted before anything that was found was measured"
    return late or "nothing was found to change"


def compared_with(compared: RepeatedComparison) -> str:
    """The outcome of the last comparison, in words."""
    decided = compared.decided
    match compared.verdict:
        case None:
            return f"measured {compared.speedup}" if compared.speedup else "too few measurements for a figure"
        case Verdict.TOO_FEW:
            return f"not decided in the time: too few measurements ({_MORE})"
        case Verdict.NOT_FASTER:
            less = decided is not None and decided.median <= 1.0
            return f"measured {decided}: {'not faster' if less else 'not clearly faster'}"
        case Verdict.REFUTED:
            return f"measured {decided}, but {compared.speedup} when it was measured again: not faster"
        case Verdict.FASTER:
            if compared.speedup is not None:
                return f"measured {compared.speedup}"
            return f"decided at {decided}; there was no time to measure it again ({_MORE})"


def not_verified_in_time(compared: RepeatedComparison) -> str:
    """The reason for a result that is faster, but for which there was no time to verify it."""
    return f"clearly faster ({compared.decided}), but there was no time to verify it ({_MORE})"

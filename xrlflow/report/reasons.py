"""One line that says why a result was kept or not."""

from __future__ import annotations

from xrlflow.backends.results import RepeatedComparison, Verdict
from xrlflow.search import Selection

_MORE = "give it more with --time-limit"


def nothing_chosen(selection: Selection | None, searched: bool = True) -> str:
    """Why no proposal is compared with the original.

    `selection`: None if nothing was to be measured. `searched`: there was time to search.
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
    if not searched:
        return f"there was no time to search ({_MORE})"
    return "nothing was found to change"


def compared_with(compared: RepeatedComparison) -> str:
    """The outcome of the last comparison, and what follows from it."""
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
    """The result is faster, but there was no time to verify it."""
    return f"clearly faster ({compared.decided}), but there was no time to verify it ({_MORE})"

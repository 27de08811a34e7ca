"""Results as tables and JSON, progress, learning curves."""

from xrlflow.report.progress import Listener, progress
from xrlflow.report.reasons import compared_with, no_search, not_verified_in_time, nothing_chosen
from xrlflow.report.report import Precision, Report, bounds, finite, operators

__all__ = [
    "Listener",
    "Precision",
    "Report",
    "bounds",
    "compared_with",
    "finite",
    "no_search",
    "not_verified_in_time",
    "nothing_chosen",
    "operators",
    "progress",
]

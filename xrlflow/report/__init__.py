"""Results as tables, JSON, progress."""

from xrlflow.report.progress import Listener, progress
from xrlflow.report.report import Report, finite, operators

__all__ = ["Listener", "Report", "finite", "operators", "progress"]

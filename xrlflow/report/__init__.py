"""Results as tables, JSON, progress."""

from xrlflow.report.progress import Listener, progress
from xrlflow.report.report import Report, operators

__all__ = ["Listener", "Report", "operators", "progress"]

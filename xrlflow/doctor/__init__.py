"""Examines an installation and its machine: what works, what does not, and what to do about it."""

from xrlflow.doctor.examination import examine, works
from xrlflow.doctor.finding import Finding, Status

__all__ = ["Finding", "Status", "examine", "works"]

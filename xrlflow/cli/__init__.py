"""The command line. Each command imports the heavy modules that it needs."""

from xrlflow.cli.passes import PASS_METRICS, PASS_SEARCHES
from xrlflow.cli.program import app, main

__all__ = ["PASS_METRICS", "PASS_SEARCHES", "app", "main"]

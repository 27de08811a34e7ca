"""Many models in one go: jobs and rows, which can be sent to other machines, and executors, which run the jobs."""

from xrlflow.batch.batch import INDEX, Batch, Listener, Progress, optimize_all
from xrlflow.batch.elsewhere import Elsewhere
from xrlflow.batch.jobs import Executor, Job, ProgressCallback, Row, failed
from xrlflow.batch.processes import Processes
from xrlflow.batch.running import measures, run

__all__ = [
    "INDEX",
    "Batch",
    "Elsewhere",
    "Executor",
    "Job",
    "Listener",
    "Processes",
    "Progress",
    "ProgressCallback",
    "Row",
    "failed",
    "measures",
    "optimize_all",
    "run",
]  # fmt: skip

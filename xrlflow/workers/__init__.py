"""Workers: they carry out tasks in this process, in other processes or on other machines, behind one interface.

A worker factory starts workers: in this process (`InProcess`), in processes of this machine (`Processes`, or `Forks`,
which starts them faster), or on the nodes of a Ray cluster (`cluster.Cluster`). Each worker has a handler: any object
with a method `do`, created inside the worker. The workers of a `WorkerPool` take tasks from one queue. Replies do not
depend on where the workers are.
"""

from xrlflow.workers.local import InProcess
from xrlflow.workers.pool import Terms, WorkerPool
from xrlflow.workers.process import Forks, Processes, ProcessWorker
from xrlflow.workers.protocol import (
    Handler,
    Kind,
    MakeHandler,
    Unable,
    Worker,
    WorkerError,
    WorkerFactory,
    WorkerLate,
    WorkerLost,
)
from xrlflow.workers.serving import tell

__all__ = [
    "Forks",
    "Handler",
    "InProcess",
    "Kind",
    "MakeHandler",
    "ProcessWorker",
    "Processes",
    "Terms",
    "Unable",
    "Worker",
    "WorkerError",
    "WorkerFactory",
    "WorkerLate",
    "WorkerLost",
    "WorkerPool",
    "tell",
]

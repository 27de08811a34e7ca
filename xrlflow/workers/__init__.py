"""Workers: they carry out tasks in this process, in other processes or on other machines, behind one interface.

A worker factory starts workers: in this process (`InProcess`), in processes of this machine (`Processes`; `Forks`,
which is quicker), or on the nodes of a Ray cluster (`cluster.Cluster`). Each worker has a handler: any object with a
method `do`, created inside the worker. The workers of a `WorkerPool` take tasks from one queue. Replies do not depend
on where the workers are.
"""

from xrlflow.workers.crew import Crew, Terms
from xrlflow.workers.local import InProcess
from xrlflow.workers.process import Forks, Processes, ProcessWorker
from xrlflow.workers.protocol import (
    Hand,
    Kind,
    MakeHand,
    Place,
    Unable,
    Worker,
    WorkerError,
    WorkerLate,
    WorkerLost,
)
from xrlflow.workers.serving import tell

__all__ = [
    "Crew",
    "Forks",
    "Hand",
    "InProcess",
    "Kind",
    "MakeHand",
    "Place",
    "ProcessWorker",
    "Processes",
    "Terms",
    "Unable",
    "Worker",
    "WorkerError",
    "WorkerLate",
    "WorkerLost",
    "tell",
]

"""Workers: whatever carries out orders somewhere else, behind one interface.

A place makes workers: this process (`InProcess`), processes of this machine (`Processes`; `Forks`, which is quicker),
or the nodes of a Ray cluster (`cluster.Cluster`). What works there is a hand: any object with a method `do`, made where
it works. A `Crew` of workers takes orders from one queue. The answers do not depend on the place.
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
